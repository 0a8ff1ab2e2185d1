"""Cells with some of their counts changed, before any tokenizer sees them.

Shapes: B cells of a block, N perturbed copies of cells, K genes that are perturbed together, G genes of the vocabulary,
Z nonzeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import pandas as pd

from scforge._constants import TARGET_SUM
from scforge.data.cells import CellBlock, CellSource
from scforge.data.vocab import GeneVocab
from scforge.data.windows import Window
from scforge.errors import OptionError, listing
from scforge.tokenizers.base import Tokenizer
from scforge.tokenizers.entropy_ranked import EntropyRankedTokenizer, serialisation_weights

__all__ = ["MODES", "Perturbation", "PerturbedCells", "with_counts"]

MODES = ("delete", "overexpress", "activate")

_ROUNDING = 1e-6
"""Share by which a product must be higher to be so in float32, too."""


@dataclass(frozen=True)
class Perturbation:
    """What happens to the counts of perturbed genes.

    ``"delete"`` sets them to 0. ``"overexpress"`` raises them above those of all other genes of the cell; where a
    tokenizer ranks by count over median, above the highest of these, so that the gene ranks first; where it ranks by
    log1p CP10K times weight (``"entropy_ranked"``), until the gene ranks first, but not above as many counts as the
    rest of the cell has: a gene of a weight near 0 would need any number. ``"activate"`` gives a gene without counts
    as many as is usual where it is expressed: the median share of the counts of a cell times the counts of this cell,
    rounded, at least 1.

    The library size of a cell changes by as many counts, as it would if the counts had been changed in the data. So the
    CP10K values of its other genes move a little as well.

    Attributes
    ----------
    mode
        One of the three.
    scales
        What counts are divided by before they are compared, float64, shape (G,); for ``"overexpress"``.
    weights
        What log1p CP10K is multiplied by to rank genes, float32, shape (G,); for ``"overexpress"``.
    shares
        Median share of the counts of a cell that expresses a gene, float64, shape (G,), NaN where none does; for
        ``"activate"``.

    Examples
    --------
    >>> from scipy.sparse import csr_matrix
    >>> block = CellBlock.from_csr(csr_matrix([[5, 0, 2], [0, 1, 0]]))
    >>> changed = Perturbation("delete").apply(block, np.array([[0], [1]]))
    >>> changed.indptr.tolist(), changed.genes.tolist(), changed.totals.tolist()
    ([0, 1, 1], [2], [2.0, 0.0])
    """

    mode: str
    scales: np.ndarray | None = None
    shares: np.ndarray | None = None
    weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise OptionError(f"mode={self.mode!r} is not known (known: {listing(MODES)})")

    @classmethod
    def of(cls, mode: str, cells: CellSource, tokenizer: Tokenizer) -> Self:
        """Make the perturbation for a tokenizer, with what is usual in `cells`."""
        if mode == "overexpress":
            ranks_by_median = tokenizer.needs_medians and getattr(tokenizer, "use_medians", True)
            medians = tokenizer.vocab.medians if ranks_by_median else None
            scales, weights = np.ones(tokenizer.vocab.n_genes) if medians is None else medians, None
            if isinstance(tokenizer, EntropyRankedTokenizer):
                weights = serialisation_weights(tokenizer.vocab, tokenizer.weighting)
            return cls(mode, scales=scales, weights=weights)
        return cls(mode, shares=usual_shares(cells) if mode == "activate" else None)

    def applies(self, expressed_nk: np.ndarray) -> np.ndarray:
        """Return which cells it is done to, bool, shape (N,), by which of the genes they express, bool, shape (N, K).

        Genes are deleted where all of them are expressed, activated where none of them is, and overexpressed anywhere.
        """
        if self.mode == "delete":
            return expressed_nk.all(axis=1)
        if self.mode == "activate":
            return ~expressed_nk.any(axis=1)
        return np.ones(len(expressed_nk), dtype=np.bool_)

    def apply(self, block: CellBlock, genes_bk: np.ndarray) -> CellBlock:
        """Return the cells with other counts of some genes.

        Parameters
        ----------
        block
            The cells.
        genes_bk
            Genes to perturb in each cell, each once, index among the genes of the vocabulary, shape (B, K).
        """
        found_bk, place_bk = _find(block, genes_bk)
        before_bk = np.where(found_bk, np.append(block.counts, 0)[place_bk], 0).astype(np.float64)
        return with_counts(block, genes_bk, self._after(block, genes_bk, before_bk, found_bk, place_bk))

    def _after(
        self,
        block: CellBlock,
        genes_bk: np.ndarray,
        before_bk: np.ndarray,
        found_bk: np.ndarray,
        place_bk: np.ndarray,
    ) -> np.ndarray:
        """Return the new counts, whole numbers in float64, shape (B, K)."""
        if self.scales is not None:
            ratios = block.counts / self.scales[block.genes]
            ratios[place_bk[found_bk]] = 0.0  # to be above the others, not above itself
            highest_b1 = _row_max(ratios, block.indptr)[:, None]
            raised_bk = np.maximum(before_bk, np.floor(highest_b1 * self.scales[genes_bk]) + 1)
            return raised_bk if self.weights is None else self._first(block, genes_bk, before_bk, raised_bk, ratios)
        if self.shares is not None:
            usual_bk = np.maximum(1.0, np.rint(self.shares[genes_bk] * block.totals[:, None]))
            return np.where(before_bk > 0, before_bk, usual_bk)
        return np.zeros_like(before_bk)

    def _first(
        self,
        block: CellBlock,
        genes_bk: np.ndarray,
        before_bk: np.ndarray,
        least_bk: np.ndarray,
        others_z: np.ndarray,
    ) -> np.ndarray:
        """Return the least counts, at least `least_bk`, by which each gene has the highest product of value and weight.

        `others_z` are the counts of the other genes, 0 for perturbed ones. More counts raise the value of a gene and
        lower those of the others, so the least number is found by halving. (Several genes together lower the others
        still more, by a larger share than their own, since their counts are the highest.)
        """
        assert self.weights is not None
        of_others_z, after_bk = self.weights[block.genes].astype(np.float64), np.empty_like(least_bk)
        rest_b = block.totals - before_bk.sum(axis=1)
        sizes = np.diff(block.indptr)
        for k in range(genes_bk.shape[1]):
            weight_b = self.weights[genes_bk[:, k]].astype(np.float64)
            low_b = least_bk[:, k] - 1
            high_b = most_b = np.maximum(least_bk[:, k], rest_b)
            while (high_b - low_b > 1).any():
                middle_b = np.floor((low_b + high_b) / 2)
                scale_b = TARGET_SUM / np.maximum(rest_b + middle_b, 1.0)
                highest_b = _row_max(np.log1p(others_z * np.repeat(scale_b, sizes)) * of_others_z, block.indptr)
                first_b = np.log1p(middle_b * scale_b) * weight_b > highest_b * (1 + _ROUNDING)
                low_b, high_b = np.where(first_b, low_b, middle_b), np.where(first_b, middle_b, high_b)
            after_bk[:, k] = np.minimum(high_b, most_b)
        return after_bk


@dataclass(frozen=True)
class PerturbedCells:
    """Perturbed copies of cells, made as they are read: a :class:`scforge.data.Cells` that takes no memory.

    Attributes
    ----------
    source
        The cells.
    perturbation
        What happens to them.
    rows
        Which cell each copy is of, int64, shape (N,).
    genes
        Which genes are perturbed in it, int32, shape (N, K).

    Examples
    --------
    >>> import numpy as np, scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:60, :300].copy())
    >>> delete = scforge.insilico.Perturbation("delete")
    >>> copies = scforge.insilico.PerturbedCells(cells, delete, rows=np.array([0, 0]), genes=np.array([[3], [4]]))
    >>> len(copies)
    2
    """

    source: CellSource
    perturbation: Perturbation
    rows: np.ndarray
    genes: np.ndarray
    chunk_size: ClassVar[int] = 1

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def vocab(self) -> GeneVocab | None:
        """The genes that the counts are over."""
        return self.source.vocab

    @property
    def overlap(self) -> float:
        """Share of the vocabulary's genes that the data have."""
        return self.source.overlap

    @property
    def counts_kept(self) -> float:
        """Share of all counts that lie in vocabulary genes, before anything was perturbed."""
        return self.source.counts_kept

    @property
    def measured(self) -> np.ndarray | None:
        """True for the vocabulary genes that the data have, bool, shape (G,)."""
        return self.source.measured

    @property
    def n_expressed(self) -> np.ndarray:
        """Number of expressed genes of each copy at most, int64, shape (N,)."""
        return self.source.n_expressed[self.rows] + self.genes.shape[1]

    def column(self, key: str) -> pd.Series:
        """Return a column of obs, length N."""
        return self.source.column(key).iloc[self.rows]

    def block(self, rows: np.ndarray, *, draw: int = 0) -> CellBlock:
        """Return the copies at `rows`, in that order."""
        rows = np.asarray(rows, dtype=np.int64)
        block = self.perturbation.apply(self.source.block(self.rows[rows], draw=draw), self.genes[rows])
        return replace(block, rows=rows)

    def stream(self, windows: Iterable[Window]) -> Iterator[CellBlock]:
        """Yield the copies of each batch of each window, in order."""
        for window in windows:
            for rows in window.batches():
                yield self.block(rows, draw=window.draw)

    def sample(self, n: int, *, rows: np.ndarray | None = None, seed: int = 0) -> CellSource:
        """Raise: copies are made of a sample of cells, not drawn from."""
        raise OptionError("perturbed cells are not sampled; sample the cells that they are made of.")

    def with_vocab(self, vocab: GeneVocab) -> PerturbedCells:
        """Raise unless `vocab` is that of the cells."""
        if self.vocab is None or vocab.genes != self.vocab.genes:
            raise OptionError("perturbed cells are over the genes of their source; map the source to the vocabulary.")
        return self


def with_counts(block: CellBlock, genes_bk: np.ndarray, counts_bk: np.ndarray) -> CellBlock:
    """Return the cells with these counts of these genes, 0 for none; library sizes change with them.

    Parameters
    ----------
    block
        The cells.
    genes_bk
        Genes of each cell, each once, index among the genes of the vocabulary, shape (B, K).
    counts_bk
        Their new counts, at least 0, shape (B, K).
    """
    found_bk, place_bk = _find(block, genes_bk)
    counts = block.counts.copy()
    before_bk = np.where(found_bk, np.append(counts, 0)[place_bk], 0).astype(np.float64)
    counts[place_bk[found_bk]] = counts_bk[found_bk]
    cell_bk = np.broadcast_to(np.arange(len(block))[:, None], genes_bk.shape)
    new = np.flatnonzero(~found_bk & (counts_bk > 0))
    cells, genes = cell_bk.ravel()[new], genes_bk.ravel()[new]
    new = new[np.lexsort((genes, cells))]
    places = place_bk.ravel()[new]
    cell_of = np.insert(_cell_of(block), places, cell_bk.ravel()[new])
    genes = np.insert(block.genes, places, genes_bk.ravel()[new].astype(np.int32))
    counts = np.insert(counts, places, counts_bk.ravel()[new].astype(np.float32))
    kept = counts > 0
    sizes = np.bincount(cell_of[kept], minlength=len(block))
    return replace(
        block,
        indptr=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        genes=genes[kept],
        counts=counts[kept],
        totals=block.totals + (counts_bk - before_bk).sum(axis=1),
    )


def usual_shares(cells: CellSource) -> np.ndarray:
    """Return the median share of the counts of a cell that each gene has where it is expressed, NaN where nowhere.

    Float64, shape (G,).
    """
    by_gene = cells.counts.tocsc()
    shares = by_gene.data / np.maximum(cells.totals[by_gene.indices], 1.0)
    usual = np.full(by_gene.shape[1], np.nan)
    for gene in np.flatnonzero(np.diff(by_gene.indptr)):
        usual[gene] = np.median(shares[by_gene.indptr[gene] : by_gene.indptr[gene + 1]])
    return usual


def _cell_of(block: CellBlock) -> np.ndarray:
    return np.repeat(np.arange(len(block)), np.diff(block.indptr))


def _find(block: CellBlock, genes_bk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return whether genes have an entry, bool (B, K), and at which place it is or would be, int64 (B, K)."""
    # Entries ascend by gene within a cell, so that cell and gene as one number ascend over the block.
    n_genes = 1 + max(int(block.genes.max(initial=0)), int(genes_bk.max(initial=0)))
    keys = _cell_of(block) * np.int64(n_genes) + block.genes
    wanted_bk = np.arange(len(block))[:, None] * np.int64(n_genes) + genes_bk
    place_bk = np.searchsorted(keys, wanted_bk)
    return np.append(keys, -1)[place_bk] == wanted_bk, place_bk


def _row_max(values: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """Return the largest value of each cell, 0 without any, shape (B,)."""
    result = np.zeros(len(indptr) - 1)
    filled = np.diff(indptr) > 0
    if filled.any():
        result[filled] = np.maximum.reduceat(values, indptr[:-1][filled])
    return result
