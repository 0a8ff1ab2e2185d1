"""How evenly each gene is spread over cells, over more cells than fit into memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numba
import numpy as np

from scforge._constants import TARGET_SUM
from scforge.data.cells import CellBlock, CellSource
from scforge.data.mapping import MIN_OVERLAP
from scforge.data.medians import visit_blocks
from scforge.data.named import open_vocab
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["StreamingEntropies", "gene_entropies", "measure_entropies"]


class StreamingEntropies:
    """Normalised Shannon entropy of each gene over cells, from blocks of cells that come one after the other.

    With x the CP10K values of a gene in n cells and p = x / sum(x), the entropy is ``-sum(p log p) / log n``: 1 for a
    gene that all cells express alike, 0 for one that a single cell expresses. It equals
    ``(log S - T / S) / log n`` with ``S = sum(x)`` and ``T = sum(x log x)``, so two numbers a gene are kept, and the
    order of the blocks does not matter but for rounding.

    Parameters
    ----------
    n_genes
        Number of genes of the vocabulary.

    Examples
    --------
    >>> from scipy import sparse
    >>> counts = sparse.csr_matrix([[1, 9], [1, 0], [1, 0], [1, 0]])
    >>> entropies = StreamingEntropies(n_genes=2)
    >>> entropies.update(CellBlock.from_csr(counts, totals=np.full(4, 10)))
    >>> entropies.entropies().tolist()
    [1.0, 0.0]
    """

    def __init__(self, n_genes: int) -> None:
        self.n_genes = n_genes
        self.n_cells = 0
        self._sums = np.zeros((2, n_genes))

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
        added = np.zeros_like(self._sums)
        if not _add(added, block.indptr, block.genes, block.counts, block.totals):
            raise DataError(
                "block has a count that is not above zero and at most the total of its cell; "
                "pass raw counts and the totals over all genes."
            )
        self._sums += added
        self.n_cells += len(block)

    def merge(self, other: StreamingEntropies) -> None:
        """Add the cells that `other` has seen, e.g. in another process."""
        if other.n_genes != self.n_genes:
            raise DataError(f"other has {other.n_genes} genes but this has {self.n_genes}; use one vocabulary.")
        self._sums += other._sums
        self.n_cells += other.n_cells

    def entropies(self) -> np.ndarray:
        """Return the entropies, float64 in [0, 1], shape (n_genes,); 1 for a gene that no cell expresses."""
        entropies = np.ones(self.n_genes)
        sums, products = self._sums
        there = sums > 0
        # In nats; a single cell has none, whatever it is divided by.
        nats = np.log(sums[there]) - products[there] / sums[there]
        entropies[there] = np.clip(nats / np.log(max(self.n_cells, 2)), 0.0, 1.0)
        return entropies


@numba.njit(cache=True, nogil=True)
def _add(sums, indptr, genes, counts, totals):
    for cell in range(len(indptr) - 1):
        most = totals[cell] * (1.0 + 1e-6)  # counts are float32, which rounds
        for entry in range(indptr[cell], indptr[cell + 1]):
            if not 0.0 < counts[entry] <= most:
                return False
            value = counts[entry] / totals[cell] * TARGET_SUM
            sums[0, genes[entry]] += value
            sums[1, genes[entry]] += value * np.log(value)
    return True


def gene_entropies(cells: CellSource) -> np.ndarray:
    """Return the entropies of the genes over cells in memory, float64, shape (G,); see :class:`StreamingEntropies`."""
    streamed = StreamingEntropies(cells.counts.shape[1])
    for start in range(0, len(cells), 4096):
        streamed.update(cells.block(np.arange(start, min(start + 4096, len(cells)))))
    return streamed.entropies()


def measure_entropies(
    source: AnnData | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    vocab: str | os.PathLike[str] | GeneVocab,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    min_overlap: float = MIN_OVERLAP,
) -> GeneVocab:
    """Return a vocabulary with the entropy of each gene over cells, from 0 (one cell has all of it) to 1.

    The tokenizer ``"entropy_ranked"`` puts genes of low entropy, which tell cells apart, before housekeeping genes.
    A model measures what it needs of its training cells by itself; this is for vocabularies that several models share.

    Parameters
    ----------
    source
        An AnnData in memory; or one or several h5ad files, which are read once, piece by piece, whatever their size.
    vocab
        A vocabulary, the file of one, or the name of a shipped one. Entropies that it has are replaced.
    layer
        Key in ``adata.layers`` with raw counts; None reads ``adata.X``.
    gene_key
        Column of ``adata.var`` with the gene names; None reads ``adata.var_names``.
    min_overlap
        Smallest share of genes to accept, see :func:`scforge.data.map_genes`.

    Returns
    -------
    The vocabulary with entropies; 1 for a gene that no cell expresses. Values are counts per 10,000 of *all* counts of
    the cell, also of those outside of the vocabulary; the formula is at :class:`StreamingEntropies`.

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
    >>> vocab = measure_entropies(scforge.datasets.pbmc3k(), "human_protein_coding")
    >>> vocab.entropies[vocab.gene_indices(["RPL13", "LYZ", "PPBP"])].round(2).tolist()
    [0.99, 0.82, 0.36]
    """
    vocab = open_vocab(vocab)
    streamed = StreamingEntropies(vocab.n_genes)
    visit_blocks(streamed.update, source, vocab, layer=layer, gene_key=gene_key, min_overlap=min_overlap)
    return vocab.with_entropies(streamed.entropies())
