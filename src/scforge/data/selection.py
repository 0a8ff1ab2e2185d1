"""Which genes a model is built on: detected genes, highly variable genes, and the medians of their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_count
from scforge._constants import TARGET_SUM
from scforge.data.arguments import listed_names
from scforge.data.checks import check_obs_column, counts_of
from scforge.data.compressed import row_sums
from scforge.data.duplicates import sum_columns, warn_summed
from scforge.data.mapping import GeneMap, gene_names, names_place
from scforge.data.naming import strip_version
from scforge.data.vocab import FROM_DATA, GeneVocab
from scforge.errors import DataError, OptionError, did_you_mean, listing, warn

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.data.cells import CellSource

__all__ = ["gene_medians", "kept_genes", "select_genes", "variable_genes"]

_BINS, _FEWEST_OF_BIN = 20, 20
"""Bins of mean expression, and genes that those of the highest share at least."""


def select_genes(
    adata: AnnData,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    n_top_genes: int | None = None,
    min_cells: int = 3,
    batch_key: str | None = None,
    within: GeneVocab | None = None,
    keep_genes: Sequence[str] = (),
) -> GeneVocab:
    """Make a vocabulary of the genes of `adata` that a model should see.

    Parameters
    ----------
    adata
        Annotated data with raw counts; not changed.
    layer, gene_key
        Where the counts and the gene names are.
    n_top_genes
        Keep this many highly variable genes, found as by :func:`scanpy.pp.highly_variable_genes` with
        ``flavor="seurat"`` on log1p CP10K values, within batches if there is a `batch_key`; bins of the most expressed
        genes are joined until they hold 20, so that a gene that is alone there can be chosen. None keeps all detected
        genes.
    min_cells
        Leave out genes detected in fewer cells.
    batch_key
        Column of ``adata.obs``.
    within
        Choose among the genes of this vocabulary, and keep what it knows of them.
    keep_genes
        Names of genes that are among them in any case, e.g. hallmark genes; they count among `n_top_genes`.

    Returns
    -------
    Vocabulary in the order of ``adata.var``. Columns that mean one gene are summed before genes are chosen.

    Raises
    ------
    DataError
        If the counts, the gene names or the `batch_key` cannot be used, or no gene is left.
    OptionError
        If `n_top_genes` is not a positive number, or `keep_genes` names a gene that is not there.

    Warns
    -----
    ScforgeWarning
        If columns are summed, or a batch has one cell.

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
    candidates = np.flatnonzero(np.bincount(counts.indices[counts.data > 0], minlength=len(genes)) >= min_cells)
    if not len(candidates):
        raise DataError(
            f"no gene is detected in {min_cells} cells, of {adata.n_obs}; use more cells, or name the genes, e.g. "
            "vocab=GeneVocab.from_adata(adata)."
        )
    kept = np.array([], dtype=np.int64)
    if len(keep_genes):
        there = GeneVocab.from_genes([str(gene) for gene in genes]) if within is None else within.subset(genes)
        kept = kept_genes(keep_genes, there, "adata" if within is None else f"both adata and {within.release!r}")
    batches = None if batch_key is None else np.asarray(adata.obs[batch_key], dtype=object).astype(str)
    chosen = _chosen(counts, totals, candidates, n_top_genes, batches, kept)
    if within is None:
        return GeneVocab.from_genes([str(gene) for gene in genes[chosen]])
    release = within.release if within.chosen_from_data else f"{within.release}, {FROM_DATA}"
    return replace(within.subset(genes[chosen]), release=release)


def variable_genes(
    cells: CellSource,
    n_top_genes: int,
    *,
    batch_key: str | None = None,
    min_cells: int = 3,
    keep_genes: Sequence[str] = (),
) -> GeneVocab:
    """Choose highly variable genes of cells as :func:`select_genes` does, e.g. of a sample of a store.

    Parameters
    ----------
    cells
        Cells over a vocabulary. Library sizes are those over all genes of the data.
    n_top_genes, batch_key, min_cells, keep_genes
        See :func:`select_genes`.

    Returns
    -------
    The part of the vocabulary of `cells`, with what it knows of its genes.
    """
    check_count("n_top_genes", n_top_genes, "genes")
    assert cells.vocab is not None
    candidates = np.flatnonzero(np.bincount(cells.counts.indices, minlength=cells.counts.shape[1]) >= min_cells)
    if not len(candidates):
        raise DataError(f"no gene is detected in {min_cells} cells, of {len(cells)}; use more cells.")
    kept = kept_genes(keep_genes, cells.vocab, "the cells")
    batches = None if batch_key is None else np.asarray(cells.column(batch_key), dtype=object).astype(str)
    chosen = _chosen(cells.counts, cells.totals, candidates, n_top_genes, batches, kept)
    vocab = cells.vocab
    release = vocab.release if vocab.chosen_from_data else f"{vocab.release}, {FROM_DATA}"
    return replace(vocab.subset(chosen), release=release)


def _distinct(names: np.ndarray, within: GeneVocab | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the genes in the order of their first column, and for each column the position of its gene (-1: none).

    Genes are names without version, or indices into the vocabulary `within`.
    """
    keys = np.array([strip_version(name) for name in names]) if within is None else GeneMap.of(names, within).columns
    known = np.ones(len(names), dtype=bool) if within is None else keys >= 0
    columns = np.full(len(names), -1, dtype=np.int64)
    columns[known], genes = pd.factorize(keys[known])
    return genes, columns


def _chosen(
    counts: sparse.csr_matrix,
    totals: np.ndarray,
    candidates: np.ndarray,
    n_top_genes: int | None,
    batches: np.ndarray | None,
    kept: np.ndarray,
) -> np.ndarray:
    """Return which genes to take, in ascending order: those kept, and the most variable candidates beside them."""
    if n_top_genes is None:
        return np.union1d(candidates, kept)
    others = np.setdiff1d(candidates, kept)
    n_others = max(n_top_genes - len(kept), 0)
    if n_others < len(others):
        # All candidates are ranked, so that what is kept changes nothing but which genes make room for it.
        ranked = candidates[_by_variability(counts, totals, candidates, n_top_genes, batches)]
        others = ranked[~np.isin(ranked, kept)][:n_others]
    return np.union1d(others, kept)


def _by_variability(
    counts: sparse.csr_matrix, totals: np.ndarray, candidates: np.ndarray, n_top_genes: int, batches: np.ndarray | None
) -> np.ndarray:
    """Return positions among the candidates, the most variable first.

    As scanpy's ``flavor="seurat"`` has it, save for the bins of few genes. The normalised dispersion of n genes of a
    bin cannot exceed (n - 1) / sqrt(n), and scanpy sets that of one gene to 1, so that a hormone that alone is most
    expressed would be left out.
    """
    values = sparse.csr_matrix(counts[:, candidates], dtype=np.float64)
    values.data *= np.repeat(TARGET_SUM / np.maximum(totals, 1.0), np.diff(values.indptr))
    groups = [np.arange(len(totals))] if batches is None else [np.flatnonzero(batches == b) for b in np.unique(batches)]
    if alone := [str(batches[rows[0]]) for rows in groups if batches is not None and len(rows) == 1]:
        warn(f"batch_key names {listing(alone)} for one cell each, which have no part in the choice of variable genes.")
    scores = [_normalised_dispersions(values[rows]) for rows in groups if len(rows) > 1] or [np.zeros(len(candidates))]
    n_batches = np.zeros(len(candidates))
    for score in scores:
        found = np.flatnonzero(score > -np.inf)  # not of genes that no cell of the batch expresses
        n_batches[found[np.argsort(-score[found], kind="stable")[:n_top_genes]]] += 1
    return np.lexsort((-np.mean([np.nan_to_num(score, nan=0.0, neginf=-1e6) for score in scores], axis=0), -n_batches))


def _normalised_dispersions(values: sparse.csr_matrix) -> np.ndarray:
    """Return the log of variance over mean, in standard deviations of genes of like mean; NaN for genes of no cell."""
    from sklearn.utils.sparsefuncs import mean_variance_axis

    n_cells, n_genes = values.shape
    scores = np.full(n_genes, np.nan)
    mean, variance = mean_variance_axis(values, axis=0)
    found = np.flatnonzero(mean > 0)
    mean, variance = mean[found], variance[found] * n_cells / (n_cells - 1)
    dispersions = pd.Series(np.log(np.where(variance > 0, variance / mean, np.nan)))
    bins = pd.cut(np.log1p(mean), _BINS, labels=False)
    n_above = np.bincount(bins, minlength=_BINS)[::-1].cumsum()[::-1]
    last = np.flatnonzero(n_above >= min(_FEWEST_OF_BIN, len(found)))[-1]
    of_bin = dispersions.groupby(np.minimum(bins, last))
    normalised = ((dispersions - of_bin.transform("mean")) / of_bin.transform("std")).fillna(1.0)
    scores[found] = np.where(dispersions.isna(), -np.inf, normalised)  # last, what is the same in all cells
    return scores


def kept_genes(names: Iterable[str], vocab: GeneVocab, what: str) -> np.ndarray:
    """Return the indices of genes to keep whatever their variability, in ascending order."""
    listed = listed_names("keep_genes", names)
    found = GeneMap.of(listed, vocab).columns
    if unknown := [name for name, index in zip(listed, found, strict=True) if index < 0]:
        known = [*vocab.genes, *(vocab.symbols or ())]
        raise OptionError(
            f"keep_genes names {listing(unknown)}, not among the genes of {what}"
            f"{did_you_mean(unknown[0], known) or '; leave them out.'}"
        )
    return np.unique(found)


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
