"""Checks of what a tokenizer is called with: its kernels index arrays by these numbers without looking.

Shapes: B cells, G genes of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import sparse

from scforge.data.checks import value_problem
from scforge.data.compressed import REPAIR, compressed_problem
from scforge.data.id_kinds import recognise_ids
from scforge.data.mapping import GeneMap, how_to_convert
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, GeneMismatchError, OptionError, listing

__all__ = ["checked_counts", "checked_map", "checked_totals"]

_CHUNK = 2**15
"""Values that are looked at together, so that they stay in the cache."""


def checked_counts(cells: Any) -> sparse.csr_matrix:
    """Return counts as a CSR matrix of shape (B, number of columns), or raise unless they are raw counts."""
    kind = type(cells).__name__
    if hasattr(cells, "var_names"):
        raise OptionError(f"cells is of type {kind!r}; call tokenizer(adata.X, adata.var_names).")
    if not sparse.issparse(cells) and not isinstance(cells, np.ndarray):
        raise OptionError(f"cells is of type {kind!r}; pass counts as a sparse matrix or a NumPy array.")
    if cells.ndim != 2:
        raise DataError(f"cells has the shape {cells.shape}, but (cells, genes) is needed; pass one row a cell.")
    if cells.dtype.kind not in "biuf":
        raise DataError(f"cells has the dtype {cells.dtype}, but raw counts are needed; convert it first.")
    if problem := compressed_problem(cells):
        raise DataError(f"cells is damaged: {problem}; {REPAIR}.")
    cells = cells.astype(_plain(cells.dtype), copy=False)
    matrix = cells if isinstance(cells, sparse.csr_matrix) else sparse.csr_matrix(cells)
    _check_values(matrix.data)
    return matrix


def checked_totals(totals: Any, n_cells: int) -> np.ndarray:
    """Return library sizes, float64, shape (B,), or raise unless there is a finite one for each cell."""
    try:
        array = np.asarray(totals)
    except ValueError as error:  # lists of unequal length
        raise DataError("totals is not a list of numbers; give the library size of each cell.") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"totals has the dtype {array.dtype}; give the library size of each cell as a number.")
    if array.shape != (n_cells,):
        raise DataError(f"totals has the shape {array.shape} but there are {n_cells} cells; give one number a cell.")
    bad = ~(np.isfinite(array) & (array >= 0))
    if bad.any():
        raise DataError(f"totals holds {array[bad][0]:g}, which is no library size; give zero or a positive number.")
    return array.astype(np.float64, copy=False)


def checked_map(gene_ids: Any, vocab: GeneVocab, n_columns: int) -> GeneMap:
    """Return which column is which gene, or raise unless `gene_ids` fits the vocabulary and the columns."""
    names = None
    if isinstance(gene_ids, GeneMap):
        gene_map = gene_ids
        highest = gene_map.columns.max(initial=-1)
        if gene_map.n_genes != vocab.n_genes or highest >= vocab.n_genes:
            raise DataError(
                f"gene_ids is a GeneMap onto {max(gene_map.n_genes, highest + 1)} genes but the vocabulary has "
                f"{vocab.n_genes}; make it with GeneMap.of(names, tokenizer.vocab)."
            )
    elif isinstance(gene_ids, str) or not isinstance(gene_ids, Iterable):
        raise OptionError(f"gene_ids={gene_ids!r} is not a list of names; give the name of the gene of each column.")
    else:
        names = [str(name) for name in gene_ids]
        gene_map = GeneMap.of(names, vocab)
    if len(gene_map.columns) != n_columns:
        raise DataError(
            f"gene_ids names {len(gene_map.columns)} genes but cells has {n_columns} columns; name each column once."
        )
    if n_columns and gene_map.columns.max() < 0:
        raise GeneMismatchError(
            f"gene_ids has none of the {vocab.n_genes} genes of the vocabulary{_kinds(names, vocab)}"
        )
    return gene_map


def _kinds(names: list[str] | None, vocab: GeneVocab) -> str:
    """Say what names look like that are none of the vocabulary's, and what to do."""
    if names is None:
        return "; make it with GeneMap.of(names, tokenizer.vocab)."
    kind, expected = recognise_ids(names), recognise_ids(vocab.genes)
    hint = how_to_convert(kind, expected) or "map the names to those of the vocabulary first"
    return (
        f": it holds {kind} such as {listing(names[:2])}, the vocabulary {expected} such as "
        f"{listing(vocab.genes[:2])}; {hint}."
    )


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that can be summed and be in a sparse matrix."""
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if dtype.kind == "f":
        return np.dtype(np.float32 if dtype.itemsize <= 4 else np.float64)
    return dtype.newbyteorder("=")


def _check_values(data: np.ndarray) -> None:
    if not len(data) or data.dtype.kind == "u":
        return
    # A missing value makes both of them missing, and each comparison false.
    lowest, highest = data.min(), data.max()
    if lowest >= 0 and (data.dtype.kind == "i" or (highest <= np.finfo(np.float32).max and _are_whole(data))):
        return
    problem = value_problem(data) or f"holds values that are too large (largest: {highest:g})"
    raise DataError(f"cells {problem}, but raw counts are needed; pass the matrix that holds them.")


def _are_whole(data: np.ndarray) -> bool:
    parts = (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK))
    return all(bool((part == np.floor(part)).all()) for part in parts)
