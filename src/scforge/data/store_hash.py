"""Hashes of the content of a store, whatever way it is compressed."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["column_check", "content_hash", "dataset_hash"]

_STEP = 2**22
"""Entries that are in memory at a time."""


def dataset_hash(indptr: Any, indices: Any, data: Any, obs: pd.DataFrame) -> str:
    """Return the SHA-256 of a dataset, see :class:`scforge.data.StoreInfo`.

    Parameters
    ----------
    indptr, indices, data
        Parts of the CSR matrix, arrays of NumPy or zarr.
    obs
        The table of cells, with the columns of scforge at its end.
    """
    digest = hashlib.sha256()
    for part, dtype in ((indptr, "<i8"), (indices, "<u4"), (data, "<u4")):
        for start in range(0, part.shape[0], _STEP):
            digest.update(np.ascontiguousarray(part[start : start + _STEP], dtype=dtype))
    for column in obs.columns:
        values = obs[column]
        codes = values.cat.codes.to_numpy("<i4") if hasattr(values, "cat") else values.to_numpy()
        digest.update(np.ascontiguousarray(codes, dtype=codes.dtype.newbyteorder("<")))
    digest.update("".join(f"{name}\0" for name in obs.index).encode())
    return digest.hexdigest()


def column_check(values: Any) -> int:
    """Return the CRC-32 of a column of a table of cells, or of the names of cells, as text or NumPy array.

    zarr takes a chunk that is missing for zeros, and looks at no checksum in a table.
    """
    if hasattr(values, "codes"):
        # What stands in the same category has the same code, in however many bits.
        found = zlib.crc32(np.ascontiguousarray(values.codes, dtype="<i4"))
        return zlib.crc32("\0".join(map(str, values.categories)).encode(), found)
    values = np.asarray(values)
    if values.dtype.kind in "OUT":
        return zlib.crc32("\0".join(values.tolist()).encode())
    return zlib.crc32(np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")))


def content_hash(vocab_hash: str, datasets: Iterable[str] | Sequence[str]) -> str:
    """Return the SHA-256 of a store, given the hashes of its vocabulary and its datasets."""
    return hashlib.sha256("".join([vocab_hash, *datasets]).encode()).hexdigest()
