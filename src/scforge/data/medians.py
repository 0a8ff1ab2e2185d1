"""Medians of the values of each gene, over more cells than fit into memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from scforge._constants import TARGET_SUM
from scforge.data.cells import CellBlock, CellSource
from scforge.data.checks import check_adata, value_problem
from scforge.data.compressed import row_sums
from scforge.data.h5ad import open_h5ad
from scforge.data.mapping import MIN_OVERLAP, map_names, names_of
from scforge.data.named import open_vocab
from scforge.data.selection import gene_medians
from scforge.data.sources import open_cells
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, OptionError

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["StreamingMedians", "cells_in_memory", "measure_medians", "visit_blocks"]

_RATIO = 1.02
"""Ratio of the edges of a bin; a value differs from the middle of its bin by less than 1 %."""

_LOWEST = 1e-5
"""Smallest value: one count of a cell with a thousand million of them."""

_IN_MEMORY = 4096
"""Cells of a block of an AnnData."""

_N_BINS = int(np.ceil(np.log(TARGET_SUM / _LOWEST) / np.log(_RATIO))) + 1


class StreamingMedians:
    """Median of the nonzero CP10K values of each gene, from blocks of cells that come one after the other.

    A histogram for each gene with bins of equal ratio: its size does not grow with the number of cells (4.2 kB a gene),
    the order of the blocks does not matter, and the relative error is below 1 %.

    Parameters
    ----------
    n_genes
        Number of genes of the vocabulary.

    Examples
    --------
    >>> from scipy import sparse
    >>> counts = sparse.csr_matrix([[1, 9], [2, 8], [3, 0]])
    >>> medians = StreamingMedians(n_genes=2)
    >>> medians.update(CellBlock.from_csr(counts, totals=np.full(3, 100)))
    >>> np.allclose(medians.medians(), [200, 850], rtol=0.01)  # of 100, 200, 300 and of 900, 800
    True
    """

    def __init__(self, n_genes: int) -> None:
        self.n_genes = n_genes
        self._counts = np.zeros((n_genes, _N_BINS), dtype=np.uint32)

    def update(self, block: CellBlock) -> None:
        """Add the cells of a block.

        Parameters
        ----------
        block
            The cells; every cell once.

        Raises
        ------
        DataError
            If a gene is not among the `n_genes`, or a count is larger than the total of its cell.
        """
        if len(block.genes) and int(block.genes.max()) >= self.n_genes:
            raise DataError(f"block has the gene {block.genes.max()} but there are n_genes={self.n_genes}.")
        if not _fill(self._counts, block.indptr, block.genes, block.counts, block.totals):
            raise DataError(
                "block has a count that is not above zero and at most the total of its cell (itself at most 1e9); "
                "pass raw counts and the totals over all genes."
            )

    def merge(self, other: StreamingMedians) -> None:
        """Add the cells that `other` has seen, e.g. in another process."""
        if other.n_genes != self.n_genes:
            raise DataError(f"other has {other.n_genes} genes but this has {self.n_genes}; use one vocabulary.")
        self._counts += other._counts

    def medians(self) -> np.ndarray:
        """Return the medians, float64, shape (n_genes,); 1 for a gene that no cell expresses."""
        parts = [_middle(self._counts[start : start + 1024]) for start in range(0, self.n_genes, 1024)]
        return np.concatenate(parts)


def _middle(histogram: np.ndarray) -> np.ndarray:
    """Return the median of each row of a histogram, shape (g, n_bins); 1 where it is empty."""
    below = np.cumsum(histogram, axis=1, dtype=np.int64)
    n = below[:, -1]
    # Of an even number of values the median is the mean of the two in the middle, as NumPy has it.
    low, high = ((below > ((n - shift) // 2)[:, None]).argmax(axis=1) for shift in (1, 0))
    return np.where(n > 0, (_centre(low) + _centre(high)) / 2, 1.0)


def _centre(bins: np.ndarray) -> np.ndarray:
    """Return the value of a bin whose largest relative error is the smallest."""
    low = _LOWEST * _RATIO ** bins.astype(np.float64)
    return 2 * low * _RATIO / (1 + _RATIO)


@numba.njit(cache=True, nogil=True)
def _fill(histogram, indptr, genes, counts, totals):
    n_cells = len(indptr) - 1
    for cell in range(n_cells):
        most = totals[cell] * (1.0 + 1e-6)  # counts are float32, which rounds
        least = totals[cell] * _LOWEST / TARGET_SUM
        for entry in range(indptr[cell], indptr[cell + 1]):
            if not (0.0 < counts[entry] <= most and least <= counts[entry]):
                return False
    # Gene by gene: the histograms of all genes are too large for the caches of a processor.
    stops = np.zeros(len(histogram) + 1, dtype=np.int64)
    for entry in range(indptr[0], indptr[n_cells]):
        stops[genes[entry] + 1] += 1
    stops = np.cumsum(stops)
    places = np.empty(stops[-1], dtype=np.int16)
    scale = 1.0 / np.log(_RATIO)
    logs = np.log(np.arange(1, 256)) * scale  # most counts are small
    for cell in range(n_cells):
        log_factor = np.log(TARGET_SUM / totals[cell] / _LOWEST) * scale if totals[cell] > 0 else 0.0
        for entry in range(indptr[cell], indptr[cell + 1]):
            count = counts[entry]
            small = count < 256 and count == int(count)
            place = int(log_factor + (logs[int(count) - 1] if small else np.log(count) * scale))
            places[stops[genes[entry]]] = min(max(place, 0), histogram.shape[1] - 1)
            stops[genes[entry]] += 1
    first = 0
    for gene in range(len(histogram)):
        for place in places[first : stops[gene]]:
            histogram[gene, place] += 1
        first = stops[gene]
    return True


def measure_medians(
    source: AnnData | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    vocab: str | os.PathLike[str] | GeneVocab,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    min_overlap: float = MIN_OVERLAP,
) -> GeneVocab:
    """Return a vocabulary with the median of each gene, as Geneformer scales its ranks (nonzero CP10K values).

    Parameters
    ----------
    source
        An AnnData in memory, whose medians are exact; or one or several h5ad files, which are read once, piece by
        piece, whatever their size, and whose medians are right to 1 % (see :class:`StreamingMedians`).
    vocab
        A vocabulary, the file of one, or the name of a shipped one. Medians that it has are replaced.
    layer
        Key in ``adata.layers`` with raw counts; None reads ``adata.X``.
    gene_key
        Column of ``adata.var`` with the gene names; None reads ``adata.var_names``.
    min_overlap
        Smallest share of genes to accept, see :func:`scforge.data.map_genes`.

    Returns
    -------
    The vocabulary with medians; 1 for a gene that no cell expresses. Values are counts per 10,000 of *all* counts of
    the cell, also of those outside of the vocabulary.

    Raises
    ------
    MissingFileError
        If a file does not exist.
    DataError
        If a file is no h5ad, or its counts or gene names cannot be used.
    GeneMismatchError
        If too few genes of the vocabulary are in a file.

    Examples
    --------
    >>> import scforge
    >>> vocab = measure_medians(scforge.datasets.pbmc3k(), "human_protein_coding")
    >>> vocab.medians[vocab.gene_indices(["LYZ", "CD3D"])].round(1).tolist()
    [9.6, 10.3]
    """
    vocab = open_vocab(vocab)
    if isinstance(source, str | os.PathLike | Sequence):
        streamed = StreamingMedians(vocab.n_genes)
        visit_blocks(streamed.update, source, vocab, layer=layer, gene_key=gene_key, min_overlap=min_overlap)
        return vocab.with_medians(streamed.medians())
    cells = cells_in_memory(source, vocab, layer=layer, gene_key=gene_key, min_overlap=min_overlap)
    return vocab.with_medians(gene_medians(cells.counts, cells.totals))


def cells_in_memory(source: AnnData, vocab: GeneVocab, **options: Any) -> CellSource:
    """Return the cells of an AnnData over the genes of a vocabulary; options are those of `open_cells`."""
    check_adata(source, argument="source")
    cells = open_cells(source, vocab, **options)
    assert isinstance(cells, CellSource)
    return cells


def visit_blocks(
    visit: Callable[[CellBlock], None],
    source: AnnData | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    vocab: GeneVocab,
    *,
    layer: str | None,
    gene_key: str | None,
    min_overlap: float,
) -> None:
    """Call `visit` with all cells of an AnnData or of h5ad files, block by block, over the genes of a vocabulary."""
    if not isinstance(source, str | os.PathLike | Sequence):
        cells = cells_in_memory(source, vocab, layer=layer, gene_key=gene_key, min_overlap=min_overlap)
        for start in range(0, len(cells), _IN_MEMORY):
            visit(cells.block(np.arange(start, min(start + _IN_MEMORY, len(cells)))))
        return
    paths = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not paths:
        raise OptionError("source=[] names no file; name at least one h5ad file.")
    for path in paths:
        _visit_file(visit, Path(path), vocab, layer, gene_key, min_overlap)


def _visit_file(
    visit: Callable[[CellBlock], None],
    path: Path,
    vocab: GeneVocab,
    layer: str | None,
    gene_key: str | None,
    least: float,
) -> None:
    with open_h5ad(path) as opened:
        var, matrix = opened.var, opened.matrix(layer)
        names = names_of(var, gene_key)
        gene_map = map_names(
            names, vocab, min_overlap=least, whole=not vocab.chosen_from_data, var=var, gene_key=gene_key
        )
        for start, chunk in matrix.row_chunks():
            where = f"{str(path)!r}, {'X' if layer is None else f'layers[{layer!r}]'}"
            if problem := value_problem(chunk.data):
                raise DataError(f"{where} {problem}, but raw counts are needed; name the layer that holds them.")
            totals = row_sums(chunk)
            if not totals.all():
                raise DataError(
                    f"{where} has cells without any count (first: row {start + int((totals == 0).argmax())}); "
                    "remove them with sc.pp.filter_cells(adata, min_counts=1)."
                )
            visit(CellBlock.from_csr(gene_map.apply(chunk), totals))
