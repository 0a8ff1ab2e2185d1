"""Reading of safetensors files; pickles are rejected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from scforge.errors import ModelFileError, first_line

if TYPE_CHECKING:
    import torch
    from torch import nn


PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
"""Suffixes of files that torch and other packages write as pickles."""


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file; torch files and pickles are never opened.

    Raises
    ------
    ModelFileError
        If the file is not a safetensors file, or is corrupted.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: torch cannot open the file, or map it
        what = f"is corrupted or is not a safetensors file ({first_line(error)})"
        raise ModelFileError(
            f"{str(path)!r} {what}; copy the file again, or convert it with scforge convert-checkpoint."
        ) from error


def refuse_not_finite(weights: Mapping[str, torch.Tensor], module: nn.Module, *, source: str) -> None:
    """Raise an error if new parameter values of a module are NaN or infinite; buffers may contain such values."""
    for name, _ in module.named_parameters():
        if name in weights and not weights[name].isfinite().all():
            raise ModelFileError(f"the weights in {source!r} have NaN or infinite values in {name!r}; copy them again.")
