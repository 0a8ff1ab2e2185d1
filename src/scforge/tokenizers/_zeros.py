"""Genes without counts as entries of a cell.

Shapes: B cells, Z entries of all cells together, M measured genes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

from scforge.data.cells import CellBlock

__all__ = ["with_zeros"]


def with_zeros(
    block: CellBlock, n_genes: int, columns: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """List all measured genes of each cell, in the order of the vocabulary.

    Parameters
    ----------
    block
        The cells. Where it does not say which genes were measured, all were.
    n_genes
        Genes of the vocabulary.
    columns
        What is known of the entries of `block`, arrays of shape (Z,).

    Returns
    -------
    Row boundaries, int64, shape (B + 1,); gene of each entry, int32, shape (B * M,); the columns, with zeros where a
    cell has no count of a gene.
    """
    measured = np.arange(n_genes) if block.measured is None else np.flatnonzero(block.measured)
    indptr, genes, entries = _with_zeros(block.indptr, block.genes, measured.astype(np.int32))
    counted = entries >= 0
    filled = []
    for column in columns:
        full = np.zeros(len(genes), dtype=column.dtype)
        full[counted] = column[entries[counted]]
        filled.append(full)
    return indptr, genes, filled


@numba.njit(cache=True, nogil=True)
def _with_zeros(indptr, genes, measured):
    n_cells, size = len(indptr) - 1, len(measured)
    out_genes = np.empty(n_cells * size, dtype=np.int32)
    entries = np.empty(n_cells * size, dtype=np.int64)
    for cell in range(n_cells):
        entry = indptr[cell]
        for i in range(size):
            out = cell * size + i
            out_genes[out] = measured[i]
            if entry < indptr[cell + 1] and genes[entry] == measured[i]:
                entries[out] = entry
                entry += 1
            else:
                entries[out] = -1
    return np.arange(n_cells + 1) * size, out_genes, entries
