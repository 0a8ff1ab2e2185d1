"""Reading generated and real cells on one scale.

Shapes: N cells, G genes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from scforge._constants import TARGET_SUM
from scforge.data.checks import check_adata, counts_of, value_problem
from scforge.errors import DataError, listing
from scforge.eval.leaks import row_hashes

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["check_same_genes", "log_matrix", "totals_of"]

_MOST = float(np.log1p(TARGET_SUM)) + 1e-3
"""A cell with a single gene has that much of it."""

_ROOM = 1.01
"""Rounding that a total of 10,000 may show."""

_FIX = "give raw counts, or sc.pp.normalize_total(adata, target_sum=1e4) and sc.pp.log1p(adata) over all genes"


def log_matrix(adata: AnnData, what: str, layer: str | None = None, *, made: bool = False) -> sparse.csr_matrix:
    """Return log1p CP10K of cells that come as counts or are on that scale, CSR without stored zeros, shape (N, G).

    Whole numbers are counts. Anything else has to lie between 0 and log(10001), above which no gene can be, and
    ``expm1`` of it has to have a total of 10,000 in each cell, or less where the data hold part of the genes only.
    Totals that are the same in all cells, but another one, are those of another scale.

    Parameters
    ----------
    adata
        The cells.
    what
        What they are, for the message.
    layer
        Key in ``adata.layers``; None reads ``adata.X``.
    made
        Whether a model predicted the values: then totals may vary about 10,000.

    Raises
    ------
    DataError
        If the values are neither.
    """
    check_adata(adata, argument=what)
    matrix = adata.X if layer is None else adata.layers.get(layer)
    if matrix is None:
        raise DataError(f"{what} have no {'X' if layer is None else f'layer {layer!r}'}; put their expression there.")
    cells = sparse.csr_matrix(matrix)
    if value_problem(cells.data) is None:
        cells = counts_of(adata, layer).astype(np.float64)
        scale = TARGET_SUM / np.asarray(cells.sum(axis=1)).ravel()
        values = np.log1p(cells.data * np.repeat(scale, np.diff(cells.indptr)))
        cells = sparse.csr_matrix((values, cells.indices, cells.indptr), shape=cells.shape)
    elif not np.isfinite(cells.data).all() or cells.data.min() < 0 or cells.data.max() > _MOST:
        low, high = cells.data.min(), cells.data.max()
        raise DataError(
            f"{what} hold values from {low:g} to {high:g}, neither counts nor log1p CP10K (0 to {_MOST:.2f}); {_FIX}."
        )
    else:
        _check_totals(cells, what, made=made)
    cells = cells.astype(np.float32)
    cells.eliminate_zeros()
    return cells


def totals_of(logs: sparse.csr_matrix) -> np.ndarray:
    """Return the total of ``expm1`` of each cell, float64, shape (N,)."""
    plain = sparse.csr_matrix((np.expm1(logs.data.astype(np.float64)), logs.indices, logs.indptr), shape=logs.shape)
    return np.asarray(plain.sum(axis=1)).ravel()


def _check_totals(logs: sparse.csr_matrix, what: str, *, made: bool) -> None:
    """Raise where logarithms cannot be log1p CP10K."""
    totals = totals_of(logs)
    usual = float(np.median(totals))
    if not made and totals.max() > _ROOM * TARGET_SUM:
        raise DataError(f"{what} are not log1p CP10K: expm1 of a cell has a total of {totals.max():,.0f}; {_FIX}.")
    if abs(usual / TARGET_SUM - 1) <= _ROOM - 1:
        return
    plain = np.expm1(logs.data.astype(np.float64))
    # Counts have ones among them; scaled ones would need a total of 10,000 for that.
    if np.abs(plain - np.round(plain)).max() < 1e-2 and abs(plain[plain > 0].min() - 1) < 1e-2:
        raise DataError(f"{what} hold log1p of counts that were not normalised; {_FIX}.")
    # Cells that are all the same one have one total on any scale.
    differ = len(np.unique(row_hashes(logs)[0])) > 1
    if differ and np.ptp(totals) <= (_ROOM - 1) * usual:
        raise DataError(f"{what} are log1p of counts per {usual:,.0f}, not per {TARGET_SUM:,.0f}; {_FIX}.")


def check_same_genes(made: AnnData, reference: AnnData) -> None:
    """Raise :class:`~scforge.errors.DataError` unless both have the same genes, in any order, each once."""
    for some, what in ((made, "the generated cells"), (reference, "the real cells")):
        if not some.var_names.is_unique:
            twice = listing(some.var_names[some.var_names.duplicated()].unique(), most=3)
            raise DataError(f"{what} have genes twice ({twice}); make var_names unique.")
    of_made, of_real = made.var_names.difference(reference.var_names), reference.var_names.difference(made.var_names)
    if len(of_made) or len(of_real):
        raise DataError(
            f"{len(of_made)} genes are in the generated cells only and {len(of_real)} in the real ones only (first: "
            f"{str([*of_made, *of_real][0])!r}); take the genes of both, as evaluate_generation does."
        )
