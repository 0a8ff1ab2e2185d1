"""Matrices compressed by row or by column (CSR, CSC) whose parts fit together.

SciPy's compiled code trusts the parts: with boundaries or indices out of range it reads and writes memory that is not
its own. A damaged file therefore has to be found before anything is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from scforge._constants import TARGET_SUM
from scforge.errors import DataError

__all__ = [
    "REPAIR",
    "boundary_problem",
    "compressed_problem",
    "index_problem",
    "log1p_cp10k_rows",
    "row_sums",
    "sound_csr",
]

REPAIR = "write the file again, or build the matrix anew"
"""What to do about a damaged matrix."""


def sound_csr(matrix: Any, where: str) -> sparse.csr_matrix:
    """Return `matrix` as CSR, itself if it is one.

    Raises
    ------
    DataError
        If its parts do not fit together; `where` says in the message what it is, e.g. ``"adata.X"``.
    """
    if problem := compressed_problem(matrix):
        raise DataError(f"{where} is damaged: {problem}; {REPAIR}.")
    if isinstance(matrix, sparse.csr_matrix) and len(matrix.data) == len(matrix.indices) == matrix.indptr[-1]:
        return matrix
    return sparse.csr_matrix(matrix)


def compressed_problem(matrix: Any) -> str | None:
    """Return what is wrong with the parts of a matrix, or None; one that is not compressed has none."""
    if not sparse.issparse(matrix) or matrix.format not in ("csr", "csc"):
        return None
    for name in ("data", "indices", "indptr"):
        part = getattr(matrix, name)
        # What anndata reads from a damaged file may be no array.
        if not isinstance(part, np.ndarray) or part.ndim != 1 or (name != "data" and part.dtype.kind not in "iu"):
            return f"{name} is no list of numbers"
    n_major, n_minor = matrix.shape if matrix.format == "csr" else matrix.shape[::-1]
    if len(matrix.indptr) != n_major + 1:
        return f"it has {len(matrix.indptr)} boundaries (indptr) and needs {n_major + 1}"
    n_entries = min(len(matrix.indices), len(matrix.data))
    return boundary_problem(matrix.indptr, n_entries) or index_problem(matrix.indices[: matrix.indptr[-1]], n_minor)


def boundary_problem(indptr: np.ndarray, n_entries: int, *, first: int = 0) -> str | None:
    """Return what is wrong with boundaries that start at `first`, where there are `n_entries`, or None."""
    if (indptr[1:] < indptr[:-1]).any():
        return "its boundaries (indptr) do not ascend"
    if int(indptr[0]) != first or int(indptr[-1]) > n_entries:
        return f"its boundaries (indptr) run from {indptr[0]} to {indptr[-1]}, but there are {n_entries} entries"
    return None


def index_problem(indices: np.ndarray, n_minor: int) -> str | None:
    """Return which index is out of range, or None."""
    if not len(indices):
        return None
    low, high = int(indices.min()), int(indices.max())
    if low >= 0 and high < n_minor:
        return None
    return f"it has the index {low if low < 0 else high}, which is not from 0 to {n_minor - 1}"


def row_sums(matrix: sparse.csr_matrix) -> np.ndarray:
    """Return the sum of each row, float64 whatever the dtype of the matrix, shape (number of rows,)."""
    return np.asarray(matrix.sum(axis=1, dtype=np.float64)).ravel()


def log1p_cp10k_rows(counts: sparse.csr_matrix, totals: np.ndarray) -> sparse.csr_matrix:
    """Return log1p of counts per 10,000 of each cell, a new float32 matrix of the same shape.

    Parameters
    ----------
    counts
        Counts, shape (N, G).
    totals
        Total counts of each cell, shape (N,).
    """
    values = counts.astype(np.float32, copy=True)
    values.data *= np.repeat((TARGET_SUM / totals).astype(np.float32), np.diff(values.indptr))
    np.log1p(values.data, out=values.data)
    return values
