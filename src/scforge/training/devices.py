"""What there is to compute on."""

from __future__ import annotations

import os
from typing import Any

import torch

from scforge.errors import OptionError

__all__ = ["ensure_devices", "n_processes", "out_of_memory", "root_device"]


def ensure_devices(accelerator: str, devices: Any) -> None:
    """Raise if more GPUs are asked for than there are.

    Raises
    ------
    OptionError
        Naming how many there are.
    """
    if accelerator not in ("gpu", "cuda"):
        return
    there = torch.cuda.device_count() or int(torch.backends.mps.is_available())
    wanted = devices if isinstance(devices, int) and devices > 0 else 1
    if wanted > there:
        others = "accelerator='cpu'" if there == 0 else f"devices={there}"
        raise OptionError(
            f"devices={devices!r} with accelerator={accelerator!r}, but this machine has {there} GPUs; pass {others}."
        )


def n_processes(accelerator: str, devices: Any, num_nodes: int) -> int | None:
    """Return how many processes will train, or None if only Lightning can tell."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if isinstance(devices, list):
        return len(devices) * num_nodes
    if isinstance(devices, int) and devices > 0:
        return devices * num_nodes
    if isinstance(devices, str) and devices not in ("auto", "-1"):
        # As in Lightning: "2" are two devices, and "0,1" those of these numbers.
        parts = [part for part in devices.split(",") if part.strip()]
        return (len(parts) if "," in devices else int(devices)) * num_nodes
    if accelerator == "cpu":
        return num_nodes
    return max(1, torch.cuda.device_count()) * num_nodes if accelerator != "mps" else 1


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that there was no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("not enough memory", "can't allocate memory", "out of memory")
    )


def root_device(accelerator: str, devices: Any) -> torch.device:
    """Return the device on which the first process will train.

    Examples
    --------
    >>> root_device("cpu", 1)
    device(type='cpu')
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", devices[0] if isinstance(devices, list) and devices else 0)
    if accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
