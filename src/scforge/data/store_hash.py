"""Hashes of the content of a store, whatever way it is compressed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["content_hash", "dataset_hash"]

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


def content_hash(vocab_hash: str, datasets: Iterable[str] | Sequence[str]) -> str:
    """Return the SHA-256 of a store, given the hashes of its vocabulary and its datasets."""
    return hashlib.sha256("".join([vocab_hash, *datasets]).encode()).hexdigest()
