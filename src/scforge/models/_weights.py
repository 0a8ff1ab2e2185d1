"""Read safetensors files from untrusted sources."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from scforge._io import parse_json
from scforge.errors import ModelFileError, first_line

if TYPE_CHECKING:
    import torch
    from torch import nn


PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
"""Suffixes of files that torch and others write as pickles."""

_SIZES = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8},
    **{"F16": 2, "BF16": 2, "F32": 4, "F64": 8},
}
_LENGTH = 8
_MAX_HEADER = 2**25
_MAX_AXES = 16


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
        If the file is a pickle, or its header is not sound: longer than the file, tensors that overlap, that leave
        gaps, that reach beyond the end or that are of an unknown dtype.
    """
    refuse_pickle(path)
    try:
        return header_shapes(path)
    except ValueError as error:
        raise ModelFileError(
            f"{str(path)!r} is corrupted, or no safetensors file: {first_line(error)}; copy the folder again."
        ) from error


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file whose header is sound.

    Raises
    ------
    ModelFileError
        If it cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{str(path)!r} is not a safetensors file: {first_line(error)}.") from error


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


def header_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a safetensors file; reads and checks the header alone.

    Raises
    ------
    ValueError
        Saying in a few words why the header is not sound.
    """
    with path.open("rb") as handle:
        size = path.stat().st_size
        n_header = int.from_bytes(handle.read(_LENGTH), "little")
        if size < _LENGTH or n_header > size - _LENGTH:
            raise ValueError(f"it has {size:,} bytes, and its header would have {n_header:,}")
        if n_header > _MAX_HEADER:
            raise ValueError(f"its header has {n_header:,} bytes, where {_MAX_HEADER:,} are the most that is read")
        header = parse_json(handle.read(n_header))
    if not isinstance(header, dict):
        raise ValueError("its header names no tensors")
    header.pop("__metadata__", None)
    places = {name: _place(name, tensor) for name, tensor in header.items()}
    end = 0
    for name, (start, stop, _) in sorted(places.items(), key=lambda item: item[1][:2]):
        if start != end:
            what = "overlaps the one before it" if start < end else "leaves a gap before it"
            raise ValueError(f"the tensor {name[:80]!r} {what}")
        end = stop
    if end != size - _LENGTH - n_header:
        raise ValueError(f"its tensors take {end:,} bytes, and {size - _LENGTH - n_header:,} are there")
    return {name: shape for name, (_, _, shape) in places.items()}


def _place(name: str, tensor: Any) -> tuple[int, int, tuple[int, ...]]:
    """Return where a tensor starts and stops, and its shape."""
    fields = tensor if isinstance(tensor, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    said = f"the tensor {name[:80]!r}"
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise ValueError(f"{said} is of the dtype {str(dtype)[:20]!r}, which is not known")
    if not _are_counts(shape) or len(shape) > _MAX_AXES:
        raise ValueError(f"{said} has no shape")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{said} has no place in the file")
    start, stop = offsets
    if stop - start != math.prod(shape) * _SIZES[dtype]:
        raise ValueError(f"{said} does not take the bytes that its shape {shape} needs")
    return start, stop, tuple(shape)


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
