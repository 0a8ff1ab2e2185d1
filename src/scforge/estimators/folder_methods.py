"""What every front class does with folders: save, load, export."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scforge.errors import OptionError

if TYPE_CHECKING:
    pass


def check_prefix(dir_path: str | os.PathLike[str], prefix: str | None) -> None:
    if prefix is not None:
        own = Path(dir_path) / str(prefix).strip("_-. ")
        raise OptionError(f"prefix={prefix!r}, but a folder holds one model; pass dir_path={str(own)!r} in its place.")


def device_of(accelerator: str, device: Any) -> Any:
    """Return the device that scvi-tools' `accelerator` and `device` name."""
    import torch

    if accelerator == "auto":
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    kinds = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps"}
    if accelerator not in kinds:
        raise OptionError(f"accelerator={accelerator!r} is not known (known: 'auto', {', '.join(map(repr, kinds))}).")
    return f"{kinds[accelerator]}:{device}" if isinstance(device, int) and accelerator != "cpu" else kinds[accelerator]
