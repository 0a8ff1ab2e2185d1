"""Where a model computes."""

from __future__ import annotations

import os

import torch

from scforge.errors import OptionError, first_line
from scforge.estimators.base import CellModel


def device_for(device: str | torch.device) -> torch.device:
    """Return a device; ``"auto"`` is a GPU if there is one, of several processes on a machine each another."""
    if device != "auto":
        try:
            return torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise OptionError(
                f"device={device!r} is not the name of a device; give 'auto', 'cpu' or 'cuda'."
            ) from error
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    return torch.device("cuda", int(local) % torch.cuda.device_count())


def move_to(model: CellModel, device: torch.device) -> None:
    """Put a model there, or raise :class:`~scforge.errors.OptionError`."""
    if model.device == device:
        return
    try:
        model.to_device(device)
    except (AssertionError, RuntimeError) as error:
        raise OptionError(f"device={str(device)!r} cannot be used: {first_line(error)}.") from error
