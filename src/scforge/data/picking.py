"""Compiled loops over cells that were just read: checking them, and picking the genes of a vocabulary.

Shapes: B cells, Z entries of all cells together.
"""

from __future__ import annotations

import numba
import numpy as np
from scipy import sparse

__all__ = ["CHECK", "first_damaged", "pick_genes", "row_checks"]

CHECK = "scforge_check"
"""Column of obs of a store with the check number of each cell (:func:`row_checks`)."""


def row_checks(counts: sparse.csr_matrix) -> np.ndarray:
    """Return a check number of each row, uint32, shape (B,), made of its number of entries and its sums.

    It is 0x9E3779B1 * sum of the genes + 0x85EBCA77 * sum of the counts + number of entries, modulo 2^32. zarr checks a
    chunk only if all of it is read, and takes a missing one for zeros; this finds both, for a tenth of a microsecond.
    """
    checks = np.empty(counts.shape[0], dtype=np.uint32)
    _checks(counts.indptr, counts.indices, counts.data, checks)
    return checks


def first_damaged(counts: sparse.csr_matrix, expected: np.ndarray) -> int:
    """Return the first row whose check number is another than expected, or -1."""
    return int(_first_damaged(counts.indptr, counts.indices, counts.data, expected))


def pick_genes(counts: sparse.csr_matrix, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keep the columns that have a place, which must ascend with the columns: then no row has to be sorted.

    Parameters
    ----------
    counts
        Sorted rows.
    columns
        New place of each column, or -1, int32.

    Returns
    -------
    Row boundaries, int64, shape (B + 1,); places, int32, and counts, float32, shape (Z,).
    """
    indptr = np.empty(len(counts.indptr), dtype=np.int64)
    genes = np.empty(len(counts.indices), dtype=np.int32)
    kept = np.empty(len(counts.indices), dtype=np.float32)
    _pick(counts.indptr, counts.indices, counts.data, columns, indptr, genes, kept)
    return indptr, genes[: indptr[-1]], kept[: indptr[-1]]


@numba.njit(cache=True, nogil=True)
def _check(start, stop, indices, data):
    genes, counts = np.uint64(0), np.uint64(0)
    for entry in range(np.uint64(start), np.uint64(stop)):
        genes += np.uint64(indices[entry])
        counts += np.uint64(data[entry])
    return np.uint32(genes * np.uint64(0x9E3779B1) + counts * np.uint64(0x85EBCA77) + np.uint64(stop - start))


@numba.njit(cache=True, nogil=True)
def _checks(indptr, indices, data, checks):
    for row in range(len(checks)):
        checks[row] = _check(indptr[row], indptr[row + 1], indices, data)


@numba.njit(cache=True, nogil=True)
def _first_damaged(indptr, indices, data, expected):
    for row in range(len(expected)):
        if _check(indptr[row], indptr[row + 1], indices, data) != expected[row]:
            return row
    return -1


@numba.njit(cache=True, nogil=True)
def _pick(indptr, indices, data, columns, out_indptr, genes, counts):
    out = 0
    out_indptr[0] = 0
    for row in range(len(indptr) - 1):
        for entry in range(indptr[row], indptr[row + 1]):
            place = columns[indices[entry]]
            # Written in any case and taken back if the gene is not wanted: no processor could guess which are.
            genes[out] = place
            counts[out] = data[entry]
            out += place >= 0
        out_indptr[row + 1] = out
