"""What a model has to beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scforge._constants import TARGET_SUM
from scforge.data.checks import counts_of
from scforge.errors import OptionError

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["pca_embedding", "variable_genes"]


def pca_embedding(
    adata: AnnData,
    *,
    n_comps: int = 50,
    n_top_genes: int = 2_000,
    layer: str | None = None,
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
        If there are no raw counts.
    OptionError
        If there cannot be so many components.
    """
    import scanpy as sc

    check_n_comps(n_comps, adata)
    work = variable_genes(adata, n_top_genes=n_top_genes, layer=layer)
    if scale:
        work.X = work.X.toarray()  # scaled values are not sparse, and scanpy would warn of it
        sc.pp.scale(work, max_value=10)
    sc.pp.pca(work, n_comps=n_comps, random_state=seed)
    return np.asarray(work.obsm["X_pca"], dtype=np.float32)


def check_n_comps(n_comps: int, adata: AnnData) -> None:
    """Raise :class:`~scforge.errors.OptionError` unless there can be so many principal components."""
    if not 0 < n_comps < min(adata.n_obs, adata.n_vars):
        raise OptionError(f"n_comps={n_comps} is not between 1 and the smaller side of {adata.shape}.")


def variable_genes(adata: AnnData, *, n_top_genes: int = 2_000, layer: str | None = None) -> AnnData:
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

    Returns
    -------
    CSR float32 in ``X`` and ``layers["counts"]``, with the names of the cells and genes alone.

    Raises
    ------
    DataError
        If there are no raw counts.
    """
    import anndata
    import scanpy as sc

    counts = counts_of(adata, layer).astype(np.float32)
    work = anndata.AnnData(counts, obs=adata.obs[[]].copy(), var=adata.var[[]].copy())
    sc.pp.filter_genes(work, min_cells=3)
    work.layers["counts"] = work.X.copy()
    sc.pp.normalize_total(work, target_sum=TARGET_SUM)
    sc.pp.log1p(work)
    sc.pp.highly_variable_genes(work, n_top_genes=min(n_top_genes, work.n_vars))
    return work[:, np.asarray(work.var["highly_variable"])].copy()
