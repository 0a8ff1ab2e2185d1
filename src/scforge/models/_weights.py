"""Read safetensors files from untrusted sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scforge.errors import ModelFileError, first_line

if TYPE_CHECKING:
    import torch
    from torch import nn


PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
"""Suffixes of files that torch and others write as pickles."""

_LENGTH = 8


def refuse_pickle(path: Path) -> None:
    """Raise if a file that should hold weights is a pickle, whatever its name.

    Raises
    ------
    ModelFileError
        If it is one.
    """
    with path.open("rb") as handle:
        head = handle.read(_LENGTH + 1)
    # The length of a header may begin like a pickle; but then a header follows.
    pickled = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and head[_LENGTH:] != b"{"
    if pickled or head.startswith(b"PK\x03\x04"):
        raise ModelFileError(
            f"{str(path)!r} is a pickle, which can run code when it is read, and so is never opened; "
            "make a model folder of it with scforge convert-checkpoint, or ask its maker for safetensors."
        )


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a safetensors file; reads and checks the header alone.

    Raises
    ------
    ModelFileError
        If the file is a pickle, or its header is not sound.
    """
    refuse_pickle(path)
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 -- not a dict


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file.

    Raises
    ------
    ModelFileError
        If it is a pickle, or cannot be read.
    """
    refuse_pickle(path)
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- not a dict


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file, whose library checks that the header and the tensors fit the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModelFileError(
            f"{str(path)!r} is corrupted, or no safetensors file: {first_line(error)}; copy the folder again."
        ) from error


def refuse_not_finite(weights: Mapping[str, torch.Tensor], module: nn.Module, *, source: str) -> None:
    """Raise if a parameter of a module is to get numbers that are NaN or infinite; buffers may hold such.

    Raises
    ------
    ModelFileError
        Naming the first of them.
    """
    for name, _ in module.named_parameters():
        if name in weights and not weights[name].isfinite().all():
            raise ModelFileError(
                f"the weights in {source!r} hold {name!r} with NaN or infinite values; train or copy the model again."
            )
