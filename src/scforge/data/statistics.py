"""Gene statistics: highly variable genes, expression medians and entropies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_count
from scforge._columns import texts_of
from scforge._constants import TARGET_SUM
from scforge.data.cells import CellBlock, CellSource
from scforge.data.checks import check_obs_column, counts_of, gene_names, names_place, row_sums
from scforge.data.genes import GeneMap, map_streams, sum_columns, warn_summed
from scforge.data.medians import StreamingMedians
from scforge.data.readers import AdataStream, ChunkReader, open_streams
from scforge.data.vocab import FROM_DATA, GeneVocab, listed_names, open_vocab, strip_version
from scforge.errors import DataError, OptionError, did_you_mean, listing, warn

if TYPE_CHECKING:
    import os

    from anndata import AnnData


_BINS, _MIN_OF_BIN = 20, 20
"""Number of bins of mean expression, and minimum number of genes in the merged bins of highest expression."""

_PIECE = 4096
"""Number of cells per block of an AnnData."""


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
    """Create a vocabulary of selected genes of `adata`, e.g. highly variable genes.

    Parameters
    ----------
    adata
        Annotated data with raw counts. It is not modified.
    layer, gene_key
        Layer with the counts, and column of ``adata.var`` with the gene names.
    n_top_genes
        Number of highly variable genes, chosen as in :func:`scanpy.pp.highly_variable_genes` with ``flavor="seurat"``
        on log1p CP10K values, within batches if there is a `batch_key`. Bins of the most expressed genes are merged
        until they contain 20 genes, so that a gene that is alone in its bin can be chosen. If None, keeps all detected
        genes.
    min_cells
        Minimum number of cells in which a gene must be detected; other genes are left out.
    batch_key
        Column of ``adata.obs`` with the batch of each cell.
    within
        Vocabulary from which to choose genes; its symbols and statistics are kept.
    keep_genes
        Names of genes that are always kept, e.g. hallmark genes. They count toward `n_top_genes`.

    Returns
    -------
    A vocabulary in the order of ``adata.var``. Columns of the same gene are summed before genes are chosen.

    Raises
    ------
    DataError
        If the counts, the gene names or the `batch_key` are invalid, or no gene is left.
    OptionError
        If `n_top_genes` is not a positive number, or `keep_genes` contains a gene that is missing.

    Warns
    -----
    ScforgeWarning
        If columns are summed, or a batch has only one cell.

    Examples
    --------
    >>> import scforge
    >>> select_genes(scforge.datasets.pbmc3k(), n_top_genes=100).n_genes
    100
    """
    counts = counts_of(adata, layer)
    names = gene_names(adata, gene_key)
    check_obs_column(adata, batch_key, argument="batch_key")
    # Library sizes are those of all genes, also of those that are left out.
    totals = row_sums(counts)
    # Genes are names without version or, with `within`, indices into it, in the order of their first column.
    keys = np.array([strip_version(name) for name in names]) if within is None else GeneMap.of(names, within).columns
    in_vocab = np.ones(len(names), dtype=bool) if within is None else keys >= 0
    columns = np.full(len(names), -1, dtype=np.int64)
    columns[in_vocab], genes = pd.factorize(keys[in_vocab])
    if len(genes) < len(names):
        warn_summed(names, columns, names_place(gene_key))
        counts = sum_columns(counts, columns, len(genes))
    kept = np.array([], dtype=np.int64)
    if len(keep_genes):
        available = GeneVocab.from_genes([str(gene) for gene in genes]) if within is None else within.subset(genes)
        kept = kept_genes(keep_genes, available, "adata" if within is None else f"both adata and {within.release!r}")
    batches = None if batch_key is None else texts_of(adata.obs[batch_key], key=batch_key, argument="batch_key")
    chosen = _chosen(counts, totals, min_cells, n_top_genes, batches, kept)
    if within is None:
        return GeneVocab.from_genes([str(gene) for gene in genes[chosen]])
    return _subset(within, genes[chosen])


def variable_genes(
    cells: CellSource, n_top_genes: int, *, batch_key: str | None = None, keep_genes: Sequence[str] = ()
) -> GeneVocab:
    """Choose highly variable genes of cells, e.g. of cells sampled from a store, as in :func:`select_genes`.

    The result is a subset of the vocabulary of `cells`, including symbols and statistics.
    """
    assert cells.vocab is not None
    kept = kept_genes(keep_genes, cells.vocab, "the cells")
    batches = None if batch_key is None else texts_of(cells.column(batch_key), key=batch_key, argument="batch_key")
    return _subset(cells.vocab, _chosen(cells.counts, cells.totals, 3, n_top_genes, batches, kept))


def _subset(vocab: GeneVocab, genes: np.ndarray) -> GeneVocab:
    release = vocab.release if vocab.chosen_from_data else f"{vocab.release}, {FROM_DATA}"
    return replace(vocab.subset(genes), release=release)


def _chosen(
    counts: sparse.csr_matrix,
    totals: np.ndarray,
    min_cells: int,
    n_top_genes: int | None,
    batches: pd.Series | None,
    kept: np.ndarray,
) -> np.ndarray:
    """Return the chosen gene indices, ascending: the genes to keep, and the most variable detected genes."""
    n_cells, n_genes = counts.shape
    candidates = np.flatnonzero(np.bincount(counts.indices[counts.data > 0], minlength=n_genes) >= min_cells)
    if not len(candidates):
        raise DataError(
            f"no gene is detected in at least {min_cells} of {n_cells} cells; use more cells, or pass a list of genes."
        )
    if n_top_genes is None:
        return np.union1d(candidates, kept)
    check_count("n_top_genes", n_top_genes, "genes")
    others = np.setdiff1d(candidates, kept)
    n_others = max(n_top_genes - len(kept), 0)
    if n_others < len(others):
        names = np.full(n_cells, "all") if batches is None else np.asarray(batches, dtype=object).astype(str)
        groups = [np.flatnonzero(names == name) for name in np.unique(names)]
        if alone := [str(names[rows[0]]) for rows in groups if batches is not None and len(rows) == 1]:
            warn(
                f"batch_key has batches with only one cell ({listing(alone)}); these cells are ignored when variable "
                "genes are selected."
            )
        values = sparse.csr_matrix(counts[:, candidates], dtype=np.float64)
        values.data *= np.repeat(TARGET_SUM / np.maximum(totals, 1.0), np.diff(values.indptr))
        scores = [_normalized_dispersions(values[rows]) for rows in groups if len(rows) > 1]
        scores = scores or [np.zeros(len(candidates))]
        # All candidates are ranked, so that kept genes only displace the last ones.
        n_batches = np.zeros(len(candidates))
        for score in scores:
            expressed = np.flatnonzero(score > -np.inf)  # not of genes that no cell of the batch expresses
            n_batches[expressed[np.argsort(-score[expressed], kind="stable")[:n_top_genes]]] += 1
        means = np.mean([np.nan_to_num(score, nan=0.0, neginf=-1e6) for score in scores], axis=0)
        ranked = candidates[np.lexsort((-means, -n_batches))]
        others = ranked[~np.isin(ranked, kept)][:n_others]
    return np.union1d(others, kept)


def most_variable(counts: sparse.csr_matrix, totals: np.ndarray, n_top_genes: int) -> np.ndarray:
    """Return the indices of the most variable detected genes, ascending, as in :func:`select_genes`."""
    return _chosen(counts, totals, 1, n_top_genes, None, np.array([], dtype=np.int64))


def _normalized_dispersions(values: sparse.csr_matrix) -> np.ndarray:
    """Return log(variance / mean), standardized among genes of similar mean; NaN for genes that no cell expresses.

    The method is scanpy's ``flavor="seurat"``, except for bins with few genes. The normalized dispersion in a bin of n
    genes cannot exceed (n - 1) / sqrt(n), and scanpy sets it to 1 for a single gene. A hormone gene that is alone in
    the bin of the most expressed genes would therefore be left out.
    """
    from sklearn.utils.sparsefuncs import mean_variance_axis

    n_cells, n_genes = values.shape
    scores = np.full(n_genes, np.nan)
    mean, variance = mean_variance_axis(values, axis=0)
    expressed = np.flatnonzero(mean > 0)
    mean, variance = mean[expressed], variance[expressed] * n_cells / (n_cells - 1)
    dispersions = pd.Series(np.log(np.where(variance > 0, variance / mean, np.nan)))
    bins = pd.cut(np.log1p(mean), _BINS, labels=False)
    n_above = np.bincount(bins, minlength=_BINS)[::-1].cumsum()[::-1]
    last = np.flatnonzero(n_above >= min(_MIN_OF_BIN, len(expressed)))[-1]
    of_bin = dispersions.groupby(np.minimum(bins, last))
    normalized = ((dispersions - of_bin.transform("mean")) / of_bin.transform("std")).fillna(1.0)
    scores[expressed] = np.where(dispersions.isna(), -np.inf, normalized)  # last, what is the same in all cells
    return scores


def kept_genes(names: Iterable[str], vocab: GeneVocab, what: str) -> np.ndarray:
    """Return the indices of genes to keep regardless of their variability, in ascending order."""
    listed = listed_names("keep_genes", names)
    indices = GeneMap.of(listed, vocab).columns
    if unknown := [name for name, index in zip(listed, indices, strict=True) if index < 0]:
        all_names = [*vocab.genes, *(vocab.symbols or ())]
        raise OptionError(
            f"contains {listing(unknown)}, but only genes of {what} can be kept"
            f"{did_you_mean(unknown[0], all_names) or '; remove the others.'}",
            argument="keep_genes",
        )
    return np.unique(indices)


def gene_medians(counts: sparse.csr_matrix, totals: np.ndarray) -> np.ndarray:
    """Return the median of the nonzero CP10K values of each gene, float64, shape (G,); 1 for undetected genes.

    Geneformer ranks genes by counts relative to this median. `totals` is the library size of each cell, shape (N,).
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


def measure_medians(
    source: Any, vocab: str | os.PathLike[str] | GeneVocab, *, layer: str | None = None, gene_key: str | None = None
) -> GeneVocab:
    """Return a vocabulary with the median of the nonzero CP10K values of each gene, as used by Geneformer for ranking.

    Parameters
    ----------
    source
        An AnnData in memory, for which medians are exact, or files as in :func:`scforge.data.convert`. Files of any
        size are read once, piece by piece, and their medians are accurate to 1%.
    vocab
        A vocabulary, its file, or the name of a shipped vocabulary. Existing medians are replaced.
    layer
        Key in ``adata.layers`` with raw counts. If None, reads ``adata.X``.
    gene_key
        Column of ``adata.var`` with the gene names. If None, reads ``adata.var_names``.

    Returns
    -------
    The vocabulary with medians; 1 for genes that no cell expresses. Values are counts per 10,000 of *all* counts of the
    cell, including counts outside the vocabulary.

    Examples
    --------
    >>> import scforge
    >>> vocab = measure_medians(scforge.datasets.pbmc3k(), "human_protein_coding")
    >>> vocab.medians[vocab.gene_indices(["LYZ", "CD3D"])].round(1).tolist()
    [9.6, 10.3]
    """
    streams = open_streams(source, layer=layer)
    vocab, maps = map_streams(streams, open_vocab(vocab), gene_key=gene_key)
    if len(streams) == 1 and isinstance(streams[0], AdataStream):
        counts = streams[0].counts
        return vocab.with_medians(gene_medians(maps[0].apply(counts), row_sums(counts)))
    streamed = StreamingMedians(vocab.n_genes)
    for block in _blocks(streams, maps):
        streamed.update(block)
    return vocab.with_medians(streamed.medians())


def measure_entropies(
    source: Any, vocab: str | os.PathLike[str] | GeneVocab, *, layer: str | None = None, gene_key: str | None = None
) -> GeneVocab:
    """Return a vocabulary with the entropy of each gene over cells, from 0 (one cell contains all counts) to 1.

    The tokenizer ``"entropy_ranked"`` puts genes with low entropy, which distinguish cells, before housekeeping genes.
    If necessary, a model computes entropies from its training cells. Use this function for vocabularies that several
    models share.

    Parameters
    ----------
    source, vocab, layer, gene_key
        See :func:`measure_medians`.

    Returns
    -------
    The vocabulary with entropies; 1 for genes that no cell expresses. Values are counts per 10,000 of *all* counts of
    the cell, including counts outside the vocabulary.

    Examples
    --------
    >>> import scforge
    >>> vocab = measure_entropies(scforge.datasets.pbmc3k(), "human_protein_coding")
    >>> vocab.entropies[vocab.gene_indices(["RPL13", "LYZ", "PPBP"])].round(2).tolist()
    [0.99, 0.82, 0.36]
    """
    streams = open_streams(source, layer=layer)
    vocab, maps = map_streams(streams, open_vocab(vocab), gene_key=gene_key)
    return vocab.with_entropies(_entropies(_blocks(streams, maps), vocab.n_genes))


def _blocks(streams: Sequence[ChunkReader], maps: Sequence[GeneMap]) -> Iterator[CellBlock]:
    """Yield the cells of sources over vocabulary genes."""
    for stream, gene_map in zip(streams, maps, strict=True):
        for _, chunk in stream.chunks():
            yield CellBlock.from_csr(gene_map.apply(chunk), row_sums(chunk))


def gene_entropies(cells: CellSource) -> np.ndarray:
    """Return the entropy of each gene over cells in memory, float64, shape (G,)."""
    rows = np.arange(len(cells))
    blocks = (cells.block(rows[start : start + _PIECE]) for start in range(0, len(cells), _PIECE))
    return _entropies(blocks, cells.counts.shape[1])


def _entropies(blocks: Iterable[CellBlock], n_genes: int) -> np.ndarray:
    """Return the normalized Shannon entropy of each gene over cells, float64 in [0, 1], shape (n_genes,).

    With x the CP10K values of a gene in n cells and p = x / sum(x), the entropy is ``-sum(p log p) / log n``. It is 1
    for a gene that all cells express equally or that no cell expresses, and 0 for a gene that a single cell expresses.
    It equals ``(log S - T / S) / log n`` with ``S = sum(x)`` and ``T = sum(x log x)``, so two numbers per gene suffice.
    """
    n_cells, both = 0, np.zeros((2, n_genes))
    for block in blocks:
        added = np.zeros_like(both)
        _add(added, block.indptr, block.genes, block.counts, block.totals)
        both += added
        n_cells += len(block)
    sums, products = both
    detected = sums > 0
    entropies = np.ones(n_genes)
    # In nats; a single cell has none, whatever it is divided by.
    nats = np.log(sums[detected]) - products[detected] / sums[detected]
    entropies[detected] = np.clip(nats / np.log(max(n_cells, 2)), 0.0, 1.0)
    return entropies


@numba.njit(cache=True, nogil=True)
def _add(sums, indptr, genes, counts, totals):
    for cell in range(len(indptr) - 1):
        for entry in range(indptr[cell], indptr[cell + 1]):
            value = counts[entry] / totals[cell] * TARGET_SUM
            sums[0, genes[entry]] += value
            sums[1, genes[entry]] += value * np.log(value)
