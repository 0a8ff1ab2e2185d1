"""Which genes a model is built on: detected genes, highly variable genes, and the medians of their values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_count
from scforge._constants import TARGET_SUM
from scforge.data.checks import check_obs_column, counts_of
from scforge.data.compressed import log1p_cp10k_rows, row_sums
from scforge.data.duplicates import sum_columns, warn_summed
from scforge.data.mapping import gene_names, names_place
from scforge.data.naming import strip_version
from scforge.data.vocab import FROM_DATA, GeneVocab
from scforge.errors import DataError

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.data.cells import CellSource

__all__ = ["gene_medians", "select_genes", "variable_genes"]


def select_genes(
    adata: AnnData,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    n_top_genes: int | None = None,
    min_cells: int = 3,
    batch_key: str | None = None,
    within: GeneVocab | None = None,
) -> GeneVocab:
    """Make a vocabulary of the genes of `adata` that a model should see.

    Parameters
    ----------
    adata
        Annotated data with raw counts; not changed.
    layer, gene_key
        Where the counts and the gene names are.
    n_top_genes
        Keep this many highly variable genes, found by :func:`scanpy.pp.highly_variable_genes` with
        ``flavor="seurat"`` on log1p CP10K values, within batches if there is a `batch_key`. None keeps all detected
        genes.
    min_cells
        Leave out genes detected in fewer cells.
    batch_key
        Column of ``adata.obs``.
    within
        Choose among the genes of this vocabulary, and keep what it knows of them.

    Returns
    -------
    Vocabulary in the order of ``adata.var``. Columns that mean one gene are summed before genes are chosen.

    Raises
    ------
    DataError
        If the counts, the gene names or the `batch_key` cannot be used, or no gene is left.
    OptionError
        If `n_top_genes` is not a positive number.

    Warns
    -----
    ScforgeWarning
        If columns are summed.

    Examples
    --------
    >>> import scforge
    >>> select_genes(scforge.datasets.pbmc3k(), n_top_genes=100).n_genes
    100
    """
    counts = counts_of(adata, layer)
    names = gene_names(adata, gene_key)
    check_obs_column(adata, batch_key, argument="batch_key")
    if n_top_genes is not None:
        check_count("n_top_genes", n_top_genes, "genes")
    # Library sizes are those of all genes, also of those that are left out.
    totals = row_sums(counts)
    genes, columns = _distinct(names, within)
    if len(genes) < len(names):
        warn_summed(names, columns, names_place(gene_key))
        counts = sum_columns(counts, columns, len(genes))
    keep = np.bincount(counts.indices[counts.data > 0], minlength=len(genes)) >= min_cells
    if not keep.any():
        raise DataError(
            f"no gene is detected in at least min_cells={min_cells} of the {adata.n_obs} cells; use more cells, "
            "lower min_cells, or name the genes, e.g. vocab=GeneVocab.from_adata(adata)."
        )
    if n_top_genes is not None and n_top_genes < keep.sum():
        chosen = np.flatnonzero(keep)
        batches = None if batch_key is None else np.asarray(adata.obs[batch_key], dtype=object).astype(str)
        keep = np.zeros(len(genes), dtype=bool)
        keep[chosen[_highly_variable(counts, totals, chosen, n_top_genes, batches)]] = True
    if within is None:
        return GeneVocab.from_genes([str(gene) for gene in genes[keep]])
    release = within.release if within.chosen_from_data else f"{within.release}, {FROM_DATA}"
    return replace(within.subset(genes[keep]), release=release)


def variable_genes(
    cells: CellSource, n_top_genes: int, *, batch_key: str | None = None, min_cells: int = 3
) -> GeneVocab:
    """Choose highly variable genes of cells as :func:`select_genes` does, e.g. of a sample of a store.

    Parameters
    ----------
    cells
        Cells over a vocabulary. Library sizes are those over all genes of the data.
    n_top_genes, batch_key, min_cells
        See :func:`select_genes`.

    Returns
    -------
    The part of the vocabulary of `cells`, with what it knows of its genes.
    """
    check_count("n_top_genes", n_top_genes, "genes")
    assert cells.vocab is not None
    chosen = np.flatnonzero(np.bincount(cells.counts.indices, minlength=cells.counts.shape[1]) >= min_cells)
    if not len(chosen):
        raise DataError(f"no gene is detected in at least min_cells={min_cells} of {len(cells)} cells; use more cells.")
    if n_top_genes < len(chosen):
        batches = None if batch_key is None else np.asarray(cells.column(batch_key), dtype=object).astype(str)
        chosen = chosen[_highly_variable(cells.counts, cells.totals, chosen, n_top_genes, batches)]
    vocab = cells.vocab
    release = vocab.release if vocab.chosen_from_data else f"{vocab.release}, {FROM_DATA}"
    return replace(vocab.subset(chosen), release=release)


def _distinct(names: np.ndarray, within: GeneVocab | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the genes in the order of their first column, and for each column the position of its gene (-1: none).

    Genes are names without version, or indices into the vocabulary `within`.
    """
    keys = np.array([strip_version(name) for name in names]) if within is None else within.gene_indices(names)
    known = np.ones(len(names), dtype=bool) if within is None else keys >= 0
    columns = np.full(len(names), -1, dtype=np.int64)
    columns[known], genes = pd.factorize(keys[known])
    return genes, columns


def _highly_variable(
    counts: sparse.csr_matrix, totals: np.ndarray, chosen: np.ndarray, n_top_genes: int, batches: np.ndarray | None
) -> np.ndarray:
    """Return a boolean array over `chosen` that is true for the highly variable genes."""
    import anndata
    import scanpy as sc

    obs = pd.DataFrame(index=[str(i) for i in range(counts.shape[0])])
    if batches is not None:
        obs["batch"] = pd.Categorical(batches)
    values = log1p_cp10k_rows(counts, totals)
    work = anndata.AnnData(values[:, chosen], obs=obs, uns={"log1p": {"base": None}})
    sc.pp.highly_variable_genes(work, n_top_genes=n_top_genes, batch_key=None if batches is None else "batch")
    return np.asarray(work.var["highly_variable"], dtype=bool)


def gene_medians(counts: sparse.csr_matrix, totals: np.ndarray) -> np.ndarray:
    """Return the median of the nonzero CP10K values of each gene, as Geneformer scales its ranks.

    Parameters
    ----------
    counts
        Counts, shape (N, G).
    totals
        Library size of each cell, shape (N,).

    Returns
    -------
    Medians, float64, shape (G,); 1 for a gene that no cell expresses.
    """
    scale = TARGET_SUM / totals
    by_gene = sparse.csc_matrix(counts, copy=True)
    by_gene.eliminate_zeros()
    values = by_gene.data * scale[by_gene.indices]
    medians = np.ones(counts.shape[1])
    for gene, (start, stop) in enumerate(zip(by_gene.indptr[:-1], by_gene.indptr[1:], strict=True)):
        if stop > start:
            medians[gene] = np.median(values[start:stop])
    return medians
