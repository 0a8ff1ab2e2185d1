"""Where a model of bytes computes."""

from __future__ import annotations

import torch

from scforge.errors import OptionError


def device_of(device: str) -> torch.device:
    """Return a device by its name; ``"auto"`` is a GPU if there is one.

    Raises
    ------
    OptionError
        If there is no such device.

    Examples
    --------
    >>> device_of("cpu")
    device(type='cpu')
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device={device!r} is not the name of a device; give 'auto', 'cpu' or 'cuda'.") from error
    if chosen.type not in ("cpu", "cuda", "mps"):
        raise OptionError(f"device={device!r} is no device to compute on; give 'auto', 'cpu' or 'cuda'.")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise OptionError(f"device={device!r}, but this machine has none; give 'cpu'.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"device={device!r}, but this machine has {torch.cuda.device_count()} GPUs; give 'cpu'.")
    return torch.device("cpu") if chosen.type == "cpu" else chosen
