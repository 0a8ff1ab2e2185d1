"""Columns that mean one gene: their counts are summed, and the user is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from scforge.data.compressed import sound_csr
from scforge.errors import DataError, warn

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["join_columns", "n_summed", "sum_columns", "warn_summed"]


def sum_columns(matrix: sparse.csr_matrix, columns: np.ndarray, n_columns: int) -> sparse.csr_matrix:
    """Return `matrix` with other columns: sorted, those that become one summed, those at -1 left out.

    Parameters
    ----------
    matrix
        Shape (n_cells, n_vars).
    columns
        For each column its new place, or -1, integer, shape (n_vars,).
    n_columns
        Number of new columns.

    Returns
    -------
    Canonical matrix of shape (n_cells, n_columns) without explicit zeros, in the dtype of `matrix`; small integers
    that are summed become int64.

    Raises
    ------
    DataError
        If the parts of `matrix` do not fit together, or `columns` is of another matrix.
    """
    matrix = sound_csr(matrix, "matrix")
    if matrix.shape[1] != len(columns):
        raise DataError(f"matrix has {matrix.shape[1]} columns but columns names {len(columns)}; give one for each.")
    places = columns[matrix.indices]
    keep = places >= 0
    kept_before = np.concatenate([[0], np.cumsum(keep)])
    mapped = sparse.csr_matrix(
        (matrix.data[keep], places[keep], kept_before[matrix.indptr]), shape=(matrix.shape[0], n_columns)
    )
    if mapped.dtype.kind in "iu" and not mapped.has_canonical_format:
        mapped = mapped.astype(np.int64)  # a sum may not fit into e.g. uint8
    mapped.sum_duplicates()
    mapped.eliminate_zeros()
    return mapped


def n_summed(columns: np.ndarray) -> int:
    """Return how many columns are summed into another one, given the place of each (-1: none)."""
    used = columns[columns >= 0]
    return len(used) - len(np.unique(used))


def warn_summed(names: np.ndarray, columns: np.ndarray, where: str) -> None:
    """Warn if columns are summed: how many, and which name comes first.

    Parameters
    ----------
    names
        Name of each column, shape (n_vars,).
    columns
        Place of each column, shape (n_vars,); -1 where it is not used.
    where
        What holds the names, e.g. ``"adata.var_names"``.
    """
    used = np.flatnonzero(columns >= 0)
    _, first = np.unique(columns[used], return_index=True)
    again = np.delete(used, first)
    if len(again):
        warn(
            f"{where} names genes that other columns name as well: the counts of {len(again)} columns "
            f"(first: {str(names[again[0]])!r}) are summed with those."
        )


def join_columns(adata: AnnData, where: str) -> AnnData:
    """Return `adata` with each of its ``var_names`` once; X and layers are summed, and a warning says so.

    Of ``var`` the first row of each name is kept; ``varm`` and ``varp``, which cannot be summed, are left out.
    """
    import anndata
    import pandas as pd

    columns, unique = pd.factorize(adata.var_names)
    warn_summed(np.asarray(adata.var_names), columns, where)

    def joined(matrix: object) -> sparse.csr_matrix:
        return sum_columns(matrix, columns, len(unique))

    result = anndata.AnnData(
        None if adata.X is None else joined(adata.X),
        obs=adata.obs,
        var=adata.var[~adata.var_names.duplicated()],
        uns=dict(adata.uns),
        obsm=dict(adata.obsm),
        # anndata lists X among the layers, as None.
        layers={key: joined(layer) for key, layer in adata.layers.items() if key is not None},
    )
    if adata.raw is not None:
        result.raw = adata.raw.to_adata()
    return result
