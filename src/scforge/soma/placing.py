"""Where a model of bytes computes."""

from __future__ import annotations

import torch

from scforge.errors import OptionError, first_line


def device_of(device: str) -> torch.device:
    """Return a device by its name, or raise if there is none; ``"auto"`` is a GPU if there is one.

    Examples
    --------
    >>> device_of("cpu")
    device(type='cpu')
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros((), device=device).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts it
        raise OptionError(f"device={device!r} cannot be used ({first_line(error)}); give 'auto' or 'cpu'.") from error
