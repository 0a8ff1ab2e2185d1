"""Reading cells, measured or made, on one scale: log1p of counts per 10,000.

Shapes: N cells, G genes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from scforge._constants import TARGET_SUM
from scforge.data.compressed import sound_csr
from scforge.errors import DataError, did_you_mean, listing

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["log_normalised", "totals_of"]

_ROOM = 1.01
"""Rounding that a total of 10,000 may show."""

_ROOM_OF_MADE = 10.0
"""What is predicted on the log scale need not have a total of 10,000; who compares it with real cells sees more."""

_SAME_TOTAL = 1e-3
"""How little totals of cells differ that were scaled to the same one; over a part of the genes they differ."""


def log_normalised(
    adata: AnnData, layer: str | None = None, *, argument: str = "adata", made: bool = False
) -> sparse.csr_matrix:
    """Return log1p CP10K of counts, or of values that are that already.

    Whole numbers are counts. Other values are log1p CP10K if ``expm1`` of them has a total of 10,000 in each cell, or
    less where the data hold part of the genes only.

    Parameters
    ----------
    adata
        The cells.
    layer
        Key in ``adata.layers``; None reads ``adata.X``.
    argument
        What `adata` is called in messages.
    made
        Whether values are predicted: their totals may vary about 10,000, by ten times at most in the median.

    Returns
    -------
    CSR without stored zeros, float64 if the values are, else float32, shape (N, G).

    Raises
    ------
    DataError
        If values are missing, negative, or of another scale, or the cells are in a file and not in memory.
    """
    where = f"X of {argument}" if layer is None else f"layers[{layer!r}] of {argument}"
    if layer is not None and layer not in adata.layers:
        known = [key for key in adata.layers if key is not None]
        raise DataError(f"layer={layer!r} is no layer of {argument}{did_you_mean(layer, known)} ({listing(known)}).")
    if adata.isbacked:
        raise DataError(f"{argument} is backed by a file, and is read as a whole; pass it as adata.to_memory().")
    matrix = adata.X if layer is None else adata.layers[layer]
    if matrix is None:
        raise DataError(f"{where} is None; put counts or log1p of counts per 10,000 there.")
    # SciPy knows no sparse matrices of half precision.
    matrix = matrix.astype(np.float32) if matrix.dtype == np.float16 else matrix
    matrix = sound_csr(matrix if sparse.issparse(matrix) else sparse.csr_matrix(np.asarray(matrix)), where)
    if not matrix.has_canonical_format:
        # A value in two parts is their sum, also under a logarithm.
        matrix = matrix.copy()
        matrix.sum_duplicates()
    kind = np.float64 if matrix.dtype == np.float64 else np.float32
    values = matrix.data.astype(np.float64)
    if not np.isfinite(values).all():
        raise DataError(f"{where} holds {int((~np.isfinite(values)).sum())} missing or infinite values; mend them.")
    if len(values) and values.min() < 0:
        raise DataError(
            f"{where} holds negative values (smallest: {values.min():g}), which are neither counts nor log1p of counts "
            "per 10,000; undo the scaling, cut predictions at 0, or give predicted effects as a DataFrame."
        )
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    if (values == np.floor(values)).all():
        total = np.bincount(rows, values, minlength=matrix.shape[0])
        values = np.log1p(values * (TARGET_SUM / np.maximum(total, 1.0))[rows])
    else:
        _check_scale(values, rows, matrix.shape[0], where, made=made)
    logs = sparse.csr_matrix((values.astype(kind), matrix.indices, matrix.indptr), shape=matrix.shape)
    if not values.all():
        logs = logs.copy()  # the indices are those of `adata`
        logs.eliminate_zeros()
    return logs


def _check_scale(values: np.ndarray, rows: np.ndarray, n_cells: int, where: str, *, made: bool) -> None:
    fix = "give counts, or sc.pp.normalize_total(adata, target_sum=1e4) and sc.pp.log1p(adata)"
    plain = np.expm1(np.minimum(values, 50.0))
    # Counts have ones among them; scaled to a total, all cells would need one of exactly 10,000 for that.
    if np.abs(plain - np.round(plain)).max() < 1e-3 and abs(plain[plain > 0].min() - 1) < 1e-3:
        raise DataError(f"{where} holds log1p of counts that were not normalised; {fix}.")
    total = np.bincount(rows, plain, minlength=n_cells)
    total = total[total > 0]
    middle = float(np.median(total)) if len(total) else TARGET_SUM
    most, room = (middle, _ROOM_OF_MADE) if made else (total.max(), _ROOM)
    if most > room * TARGET_SUM:
        raise DataError(
            f"{where} holds values that are neither counts nor log1p of counts per 10,000 (expm1 of a cell has a "
            f"total of {most:.4g}); {fix}."
        )
    # Predicted cells may be one profile many times, so their totals are compared with those of real cells instead.
    if not made and len(total) > 1 and np.ptp(total) < _SAME_TOTAL * middle and abs(middle / TARGET_SUM - 1) > 0.01:
        raise DataError(f"{where} is normalised to about {middle:,.0f} per cell and not to 10,000; {fix}.")


def totals_of(logs: sparse.csr_matrix) -> np.ndarray:
    """Return the total of ``expm1`` of each cell, float64, shape (N,)."""
    plain = sparse.csr_matrix((np.expm1(logs.data.astype(np.float64)), logs.indices, logs.indptr), shape=logs.shape)
    return np.asarray(plain.sum(axis=1)).ravel()
