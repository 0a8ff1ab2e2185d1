"""What a model has to beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scforge._constants import TARGET_SUM
from scforge.data.checks import counts_of
from scforge.errors import DataError, OptionError
from scforge.eval.base import check_column

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["pca_embedding", "variable_genes"]

_MIN_CELLS = 3
"""Cells that a gene has to be in."""


def pca_embedding(
    adata: AnnData,
    *,
    n_comps: int = 50,
    n_top_genes: int = 2_000,
    layer: str | None = None,
    batch_key: str | None = None,
    scale: bool = False,
    seed: int = 0,
) -> np.ndarray:
    """Return principal components of the log-normalised highly variable genes, as scanpy computes them.

    Library-size normalisation to 10,000, log1p, highly variable genes (``flavor="seurat"``), scaling if asked for
    (clipped at 10), PCA.

    Parameters
    ----------
    adata
        Annotated data with raw counts; not changed.
    n_comps
        Number of components.
    n_top_genes
        Number of genes.
    layer
        Key in ``adata.layers`` with raw counts; None reads ``adata.X``.
    batch_key
        Column of obs with the batches, within which genes are chosen (:func:`variable_genes`); the components are not
        corrected for them.
    scale
        Scale each gene to unit variance first.
    seed
        Seed of the solver.

    Returns
    -------
    Float32, shape (n_obs, n_comps).

    Raises
    ------
    DataError
        If there are no raw counts, or `batch_key` is no column.
    OptionError
        If there cannot be so many components, e.g. because so few genes are in three cells.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:200].copy()
    >>> scforge.eval.pca_embedding(adata, n_comps=10).shape
    (200, 10)
    """
    import scanpy as sc

    check_n_comps(n_comps, adata)
    work = variable_genes(adata, n_top_genes=n_top_genes, layer=layer, batch_key=batch_key)
    if n_comps >= work.n_vars:
        raise OptionError(
            f"n_comps={n_comps} is too many: of {adata.n_vars} genes {work.n_vars} are highly variable and in at least "
            f"{_MIN_CELLS} cells, which have at most {work.n_vars - 1} components; lower it, or raise n_top_genes."
        )
    if scale:
        work.X = work.X.toarray()  # scaled values are not sparse, and scanpy would warn of it
        sc.pp.scale(work, max_value=10)
    sc.pp.pca(work, n_comps=n_comps, random_state=seed)
    return np.asarray(work.obsm["X_pca"], dtype=np.float32)


def check_n_comps(n_comps: int, adata: AnnData) -> None:
    """Raise :class:`~scforge.errors.OptionError` unless there can be so many principal components."""
    if not 0 < n_comps < min(adata.n_obs, adata.n_vars):
        raise OptionError(f"n_comps={n_comps} is not between 1 and the smaller side of {adata.shape}.")


def variable_genes(
    adata: AnnData, *, n_top_genes: int = 2_000, layer: str | None = None, batch_key: str | None = None
) -> AnnData:
    """Return the highly variable genes of cells, log-normalised, with their counts in a layer.

    Genes in fewer than three cells are left out; library-size normalisation to 10,000, log1p, highly variable genes
    (``flavor="seurat"``).

    Parameters
    ----------
    adata
        Annotated data with raw counts; not changed.
    n_top_genes
        Number of genes; all, if there are fewer.
    layer
        Key in ``adata.layers`` with raw counts; None reads ``adata.X``.
    batch_key
        Column of obs with the batches: genes are ranked in each, and taken by the number of batches in which they are
        variable, so that what differs between batches alone is not chosen. Cells without a batch are one of their own.
        None, or a single batch, ranks genes over all cells.

    Returns
    -------
    CSR float32 in ``X`` and ``layers["counts"]``, with the names of the cells and genes, and nothing of their obs.

    Raises
    ------
    DataError
        If there are no raw counts, no gene is in three cells, or `batch_key` is no column.
    """
    import anndata
    import scanpy as sc

    if batch_key is not None:
        check_column("batch_key", batch_key, adata.obs)
    counts = counts_of(adata, layer).astype(np.float32)
    work = anndata.AnnData(counts, obs=adata.obs[[]].copy(), var=adata.var[[]].copy())
    sc.pp.filter_genes(work, min_cells=_MIN_CELLS)
    if not work.n_vars:
        raise DataError(f"no gene is in at least {_MIN_CELLS} of the {adata.n_obs} cells; take more cells.")
    work.layers["counts"] = work.X.copy()
    sc.pp.normalize_total(work, target_sum=TARGET_SUM)
    sc.pp.log1p(work)
    chosen = np.ones(work.n_vars, dtype=bool)
    # All genes are all genes, however they are ranked.
    if n_top_genes < work.n_vars:
        batches = None if batch_key is None else np.asarray(adata.obs[batch_key], dtype=object).astype(str)
        several = batches is not None and len(np.unique(batches)) > 1
        if several:
            work.obs["batch"] = pd.Categorical(batches)
        sc.pp.highly_variable_genes(work, n_top_genes=n_top_genes, batch_key="batch" if several else None)
        chosen = np.asarray(work.var["highly_variable"])
    work.obs = work.obs[[]].copy()
    work.var["highly_variable"] = chosen
    return work[:, chosen].copy()
