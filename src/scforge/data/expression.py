"""Expression on the scale of log1p of counts per 10,000 (log1p CP10K).

Shapes: N cells, G genes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from scforge._checks import check_known
from scforge._constants import TARGET_SUM
from scforge.data.cells import Cells
from scforge.data.checks import log1p_cp10k_rows, sound_csr
from scforge.errors import DataError, listing

if TYPE_CHECKING:
    from anndata import AnnData

_ROOM = 1.01
"""Tolerance for rounding errors of a total of 10,000."""

_ROOM_OF_MADE = 10.0
"""Factor by which totals of predictions on the log scale may differ from 10,000; comparisons with real cells are
stricter."""

_MAX_RATIO = 1.2
"""Maximum ratio of totals over the same genes between cells with the same normalization."""

_SAME_TOTAL = 1e-3
"""Maximum variation of totals in cells normalized to the same total; totals over some of the genes vary more."""

_PIECE = 1 << 14
"""Number of cells that are read at once, to limit memory."""


def log_normalized(
    adata: AnnData, layer: str | None = None, *, argument: str = "adata", made: bool = False
) -> sparse.csr_matrix:
    """Return log1p CP10K values from counts or log1p CP10K values, as CSR without stored zeros, shape (N, G).

    Integers are taken as counts. Other values are taken as log1p CP10K if their ``expm1`` sums to 10,000 in each cell,
    or to less if the data contain only some genes. With `made`, the cells are predictions: their median total may
    differ from 10,000 by a factor of at most ten. `argument` is the name of the cells in messages.
    """
    where = f"X of {argument}" if layer is None else f"layers[{layer!r}] of {argument}"
    if layer is not None:
        check_known("layer", layer, adata.layers, f"{argument}.layers")
    matrix = adata.X if layer is None else adata.layers[layer]
    if adata.isbacked or matrix is None:
        raise DataError(
            f"is {'backed by a file' if adata.isbacked else None}; pass an AnnData with values in memory, e.g. "
            "adata.to_memory().",
            argument=where,
        )
    if adata.var_names.has_duplicates:
        twice = adata.var_names[adata.var_names.duplicated()].unique()
        raise DataError(f"var_names of {argument} contains duplicates ({listing(twice, most=3)}); make them unique.")
    # SciPy knows no sparse matrices of half precision.
    matrix = matrix.astype(np.float32) if matrix.dtype == np.float16 else matrix
    matrix = sound_csr(matrix if sparse.issparse(matrix) else sparse.csr_matrix(np.asarray(matrix)), where)
    if not matrix.has_canonical_format:
        # A value in two parts is their sum, also under a logarithm.
        matrix = matrix.copy()
        matrix.sum_duplicates()
    kind = np.float64 if matrix.dtype == np.float64 else np.float32
    values = matrix.data.astype(np.float64)
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    counts = bool((values == np.floor(values)).all()) and values.min(initial=0) >= 0
    if not counts and (problem := _scale_problem(values, rows, matrix.shape[0], made=made)):
        raise DataError(
            f"contains {problem}; pass counts or log1p CP10K values, or (for predictions) effects as a DataFrame.",
            argument=where,
        )
    if counts:
        total = np.bincount(rows, values, minlength=matrix.shape[0])
        values = np.log1p(values * (TARGET_SUM / np.maximum(total, 1.0))[rows])
    logs = sparse.csr_matrix((values.astype(kind), matrix.indices, matrix.indptr), shape=matrix.shape)
    if not values.all():
        logs = logs.copy()  # the indices are those of `adata`
        logs.eliminate_zeros()
    return logs


def _scale_problem(values: np.ndarray, rows: np.ndarray, n_cells: int, *, made: bool) -> str | None:
    """Return the reason why values are not log1p of counts per 10,000, or None."""
    if not np.isfinite(values).all():
        return f"{int((~np.isfinite(values)).sum())} missing or infinite values"
    if values.min() < 0:
        return f"negative values (smallest: {values.min():g}), which are neither counts nor log1p of counts per 10,000"
    plain = np.expm1(np.minimum(values, 50.0))
    # Counts have ones among them; scaled to a total, all cells would need one of exactly 10,000 for that.
    if np.abs(plain - np.round(plain)).max() < 1e-3 and abs(plain[plain > 0].min() - 1) < 1e-3:
        return "log1p of counts that were not normalized"
    total = np.bincount(rows, plain, minlength=n_cells)
    total = total[total > 0]
    middle = float(np.median(total)) if len(total) else TARGET_SUM
    most, room = (middle, _ROOM_OF_MADE) if made else (total.max(), _ROOM)
    if most > room * TARGET_SUM:
        return f"neither counts nor log1p of counts per 10,000 (expm1 of a cell sums to {most:.4g})"
    # Predicted cells may be one profile many times, so their totals are compared with those of real cells instead.
    if not made and len(total) > 1 and np.ptp(total) < _SAME_TOTAL * middle and abs(middle / TARGET_SUM - 1) > 0.01:
        return f"values normalized to about {middle:,.0f} per cell instead of 10,000"
    return None


def scale_difference(one: sparse.csr_matrix, other: sparse.csr_matrix, *, profiles: bool = False) -> str | None:
    """Return a description of how the totals of two sets of log1p CP10K cells differ, or None.

    With `profiles`, cells may be means on the log scale, which have smaller totals but the same sum of logarithms.
    """
    if not one.shape[0] or not other.shape[0]:
        return None
    totals = [float(np.median(totals_of(cells))) for cells in (one, other)]
    pairs = [totals, [float(cells.sum()) / cells.shape[0] for cells in (one, other)]][: 1 + profiles]
    if any(min(pair) <= 0 or max(pair) <= _MAX_RATIO * min(pair) for pair in pairs):
        return None
    return f"a median total of {totals[0]:,.0f} over the shared genes, but the other cells have {totals[1]:,.0f}"


def totals_of(logs: sparse.csr_matrix) -> np.ndarray:
    """Return the total of ``expm1`` of each cell, float64, shape (N,)."""
    return np.asarray(logs.astype(np.float64).expm1().sum(axis=1)).ravel()


def log_expression(cells: Cells, rows: np.ndarray | None = None) -> sparse.csr_matrix:
    """Return log1p CP10K of cells over the genes of their vocabulary, CSR, float32, shape (N, G).

    Library sizes are computed over all genes of the data, including genes outside the vocabulary.
    """
    assert cells.vocab is not None
    rows = np.arange(len(cells)) if rows is None else np.asarray(rows, dtype=np.int64)
    n_genes = cells.vocab.n_genes
    parts = [sparse.csr_matrix((0, n_genes), dtype=np.float32)]
    for start in range(0, len(rows), _PIECE):
        block = cells.block(rows[start : start + _PIECE])
        counts = sparse.csr_matrix((block.counts, block.genes, block.indptr), shape=(len(block), n_genes))
        parts.append(log1p_cp10k_rows(counts, np.maximum(block.totals, 1.0)))
    return sparse.vstack(parts, format="csr")
