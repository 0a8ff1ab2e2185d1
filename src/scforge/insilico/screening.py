"""In silico perturbation of genes, ranked against matched controls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import pandas as pd
from scipy import sparse
from scipy.stats import false_discovery_control

from scforge._constants import TARGET_SUM
from scforge.data.cells import CellBlock, Cells, CellSource
from scforge.data.sampling import Window
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, OptionError, listing
from scforge.tokenizers.base import Tokenizer
from scforge.tokenizers.entropy_ranked import EntropyRankedTokenizer, serialization_weights

_SHARES = 4
"""Maximum number of combinations with separate controls; further combinations share them."""

_TRIES = 20

MODES = ("delete", "overexpress", "activate")

_ROUNDING = 1e-6
"""Relative margin that ensures that a larger product is also larger in float32 arithmetic."""

_COPIES = 16_384
"""Number of perturbed cells whose embeddings are kept in memory at a time."""

_CONTROL_CELLS = 100
"""Maximum number of cells in which a control is perturbed. With fewer cells, p-values increase."""

_MIN_CELLS = 3
"""Minimum number of cells in which a gene must be perturbed to be compared."""

_KINDS, _CELLS_PER_KIND, _DEPTHS = 8, 100, 3

_MIN_FITTED = 5
"""Number of controls per coefficient of the regression on expression; with fewer controls, nothing is removed."""


def draw_controls(
    tested_ck: np.ndarray, places: np.ndarray, eligible: np.ndarray, n_controls: int, rng: np.random.Generator
) -> np.ndarray:
    """Choose controls: combinations in which each gene is replaced by another gene of similar expression.

    Parameters
    ----------
    tested_ck
        Genes of the tested combinations, shape (C, K).
    places
        Detection and dose of each gene, as returned by :func:`places_of`, shape (G, 2).
    eligible
        Genes to choose from, one-dimensional.
    n_controls
        Number of controls for each combination.
    rng
        Random number generator.

    Returns
    -------
    Genes of the controls, each combination once, int32, shape (R, K).
    """
    n_tested, n_genes = tested_ck.shape
    most = min(n_controls * min(n_tested, _SHARES), len(eligible) if n_genes == 1 else 10**9)
    if not n_tested or len(eligible) < n_genes or most <= 0:
        return np.empty((0, n_genes), dtype=np.int32)
    chosen: dict[tuple[int, ...], None] = {}
    free = np.ones(len(eligible), dtype=np.bool_)
    each = -(-most // n_tested)
    for row in rng.permutation(n_tested):
        if n_genes == 1:
            open_ = np.flatnonzero(free)
            like = open_[nearest(places[tested_ck[row, 0]], places[eligible[open_]], each)]
            free[like] = False
            chosen |= {(int(gene),): None for gene in eligible[like]}
            continue
        pools = [eligible[nearest(places[gene], places[eligible], max(each, 20))] for gene in tested_ck[row]]
        wanted = len(chosen) + each
        for _ in range(each * _TRIES):
            drawn = tuple(sorted(int(rng.choice(pool)) for pool in pools))
            if len(set(drawn)) == n_genes:
                chosen[drawn] = None
            if len(chosen) == wanted:
                break
    return np.array(list(chosen), dtype=np.int32).reshape(-1, n_genes)[:most]


def nearest(place: np.ndarray, places: np.ndarray, n: int) -> np.ndarray:
    """Return the indices of the `n` points closest to a point, shape (at most n,)."""
    return np.argsort(np.square(places - place).sum(axis=1), kind="stable")[:n]


def compare(value: float, controls: np.ndarray, *, two_sided: bool) -> tuple[float, float]:
    """Return the z-score of a value relative to its controls, and its p-value.

    The p-value is from a randomization test: ``(1 + number of controls at least as large) / (1 + number of
    controls)`` (Phipson and Smyth 2010); if two-sided, twice the smaller of the two tails.

    Examples
    --------
    >>> compare(9.0, np.array([1.0, 2.0, 3.0]), two_sided=False)
    (7.0, 0.25)
    """
    controls = controls[np.isfinite(controls)]
    if not np.isfinite(value) or not len(controls):
        return np.nan, np.nan
    above = (1 + (controls >= value).sum()) / (1 + len(controls))
    below = (1 + (controls <= value).sum()) / (1 + len(controls))
    p_value = min(1.0, 2 * min(above, below)) if two_sided else above
    spread = controls.std(ddof=1) if len(controls) > 1 else 0.0
    return float((value - controls.mean()) / spread) if spread > 0 else np.nan, float(p_value)


@dataclass(frozen=True)
class Perturbation:
    """A change in the counts of perturbed genes.

    ``"delete"`` sets the counts to 0. ``"overexpress"`` raises them above the counts of all other genes in the cell. If
    a tokenizer ranks by count over median, counts are raised until the gene ranks first. If it ranks by log1p CP10K
    times weight (``"entropy_ranked"``), counts are also raised until the gene ranks first, but at most to the counts of
    the rest of the cell, because genes with a weight near 0 would need arbitrarily many counts. ``"activate"`` assigns
    a gene without counts its typical count in expressing cells: the median fraction of a cell's counts times the counts
    of this cell, rounded, at least 1.

    The library size of a cell changes by the same number of counts, as if the data had been changed. The CP10K values
    of its other genes therefore change slightly.

    Attributes
    ----------
    mode
        One of the three modes.
    scales
        Divisors of counts before they are compared, float64, shape (G,); for ``"overexpress"``.
    weights
        Factors of log1p CP10K by which genes are ranked, float32, shape (G,); for ``"overexpress"``.
    shares
        Median fraction of the counts of a cell that belong to a gene, in cells that express the gene, float64, shape
        (G,); NaN if no cell expresses it. For ``"activate"``.

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
            raise OptionError(f"is not known (known: {listing(MODES)})", mode=self.mode)

    @classmethod
    def of(cls, mode: str, cells: CellSource, tokenizer: Tokenizer) -> Self:
        """Create the perturbation for a tokenizer, with the typical counts in `cells`."""
        if mode == "overexpress":
            ranks_by_median = tokenizer.needs_medians and getattr(tokenizer, "use_medians", True)
            medians = tokenizer.vocab.medians if ranks_by_median else None
            scales, weights = np.ones(tokenizer.vocab.n_genes) if medians is None else medians, None
            if isinstance(tokenizer, EntropyRankedTokenizer):
                weights = serialization_weights(tokenizer.vocab, tokenizer.weighting)
            return cls(mode, scales=scales, weights=weights)
        if mode != "activate":
            return cls(mode)
        totals = np.repeat(np.maximum(cells.totals, 1.0), np.diff(cells.counts.indptr))
        shares = pd.Series(cells.counts.data / totals).groupby(cells.counts.indices)
        return cls(mode, shares=shares.median().reindex(range(cells.counts.shape[1])).to_numpy())

    def applies(self, expressed_nk: np.ndarray) -> np.ndarray:
        """Return which cells are perturbed (bool, shape (N,)), given the genes that they express (bool, shape (N, K)).

        Genes are deleted in cells that express all of them, activated in cells that express none of them, and
        overexpressed in all cells.
        """
        if self.mode == "delete":
            return expressed_nk.all(axis=1)
        if self.mode == "activate":
            return ~expressed_nk.any(axis=1)
        return np.ones(len(expressed_nk), dtype=np.bool_)

    def apply(self, block: CellBlock, genes_bk: np.ndarray) -> CellBlock:
        """Return the cells with changed counts of some genes.

        Parameters
        ----------
        block
            The cells.
        genes_bk
            Genes to perturb in each cell, each once, as vocabulary gene indices, shape (B, K).
        """
        found_bk, place_bk = _find(block, genes_bk)
        before_bk = np.where(found_bk, np.append(block.counts, 0)[place_bk], 0).astype(np.float64)
        after_bk = np.zeros_like(before_bk)
        if self.scales is not None:
            ratios = block.counts / self.scales[block.genes]
            ratios[place_bk[found_bk]] = 0.0  # to be above the others, not above itself
            highest_b1 = _row_max(ratios, block.indptr)[:, None]
            after_bk = np.maximum(before_bk, np.floor(highest_b1 * self.scales[genes_bk]) + 1)
            if self.weights is not None:
                after_bk = self._first(block, genes_bk, before_bk, after_bk, ratios)
        elif self.shares is not None:
            usual_bk = np.maximum(1.0, np.rint(self.shares[genes_bk] * block.totals[:, None]))
            after_bk = np.where(before_bk > 0, before_bk, usual_bk)
        return with_counts(block, genes_bk, after_bk)

    def _first(
        self,
        block: CellBlock,
        genes_bk: np.ndarray,
        before_bk: np.ndarray,
        least_bk: np.ndarray,
        others_z: np.ndarray,
    ) -> np.ndarray:
        """Return the smallest counts, at least `least_bk`, for which each gene has the highest value times weight.

        `others_z` contains the counts of the other genes, and 0 for perturbed genes. More counts increase the value of
        a gene and decrease the values of the other genes, so the smallest count is found by bisection. (Several genes
        together decrease the others even more, by a larger fraction than their own, because their counts are the
        highest.)
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


class PerturbedCells:
    """Perturbed copies of cells, created when they are read: a :class:`scforge.data.Cells` that requires no memory.

    Parameters
    ----------
    source
        The cells.
    perturbation
        The perturbation.
    rows
        Original cell of each copy, int64, shape (N,).
    genes
        Genes perturbed in each copy, int32, shape (N, K).

    Examples
    --------
    >>> import numpy as np, scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:60, :300].copy())
    >>> delete = scforge.insilico.screening.Perturbation("delete")
    >>> copies = scforge.insilico.screening.PerturbedCells(
    ...     cells, delete, rows=np.array([0, 0]), genes=np.array([[3], [4]])
    ... )
    >>> len(copies)
    2
    """

    chunk_size: ClassVar[int] = 1

    def __init__(self, source: CellSource, perturbation: Perturbation, rows: np.ndarray, genes: np.ndarray) -> None:
        self.source, self.perturbation, self.rows, self.genes = source, perturbation, rows, genes
        self.vocab, self.measured = source.vocab, source.measured
        self.overlap, self.counts_kept = source.overlap, source.counts_kept
        # At most.
        self.n_expressed = source.n_expressed[rows] + genes.shape[1]

    def __len__(self) -> int:
        return len(self.rows)

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
        """Raise an error, because perturbed copies cannot be sampled."""
        raise OptionError("perturbed cells cannot be sampled; sample the original cells.")

    def with_vocab(self, vocab: GeneVocab) -> PerturbedCells:
        """Return the cells unchanged, or raise an error if `vocab` is not their vocabulary."""
        if self.vocab is None or vocab.genes != self.vocab.genes:
            raise OptionError("perturbed cells keep the genes of their source; map the source to the vocabulary first.")
        return self


def with_counts(block: CellBlock, genes_bk: np.ndarray, counts_bk: np.ndarray) -> CellBlock:
    """Return the cells with new counts for some genes, where 0 removes a gene; library sizes change accordingly.

    Parameters
    ----------
    block
        The cells.
    genes_bk
        Genes of each cell, each once, as vocabulary gene indices, shape (B, K).
    counts_bk
        New counts of these genes, at least 0, shape (B, K).
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
    cell_of = np.insert(_entry_cells(block), places, cell_bk.ravel()[new])
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


def _entry_cells(block: CellBlock) -> np.ndarray:
    return np.repeat(np.arange(len(block)), np.diff(block.indptr))


def _find(block: CellBlock, genes_bk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return whether genes have an entry, bool (B, K), and the position where it is or would be, int64 (B, K)."""
    # Entries ascend by gene within a cell, so that cell and gene as one number ascend over the block.
    n_genes = 1 + max(int(block.genes.max(initial=0)), int(genes_bk.max(initial=0)))
    keys = _entry_cells(block) * np.int64(n_genes) + block.genes
    wanted_bk = np.arange(len(block))[:, None] * np.int64(n_genes) + genes_bk
    place_bk = np.searchsorted(keys, wanted_bk)
    return np.append(keys, -1)[place_bk] == wanted_bk, place_bk


def _row_max(values: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """Return the largest value of each cell, shape (B,), or 0 if there are no values."""
    result = np.zeros(len(indptr) - 1)
    filled = np.diff(indptr) > 0
    if filled.any():
        result[filled] = np.maximum.reduceat(values, indptr[:-1][filled])
    return result


def screen(
    cells: CellSource,
    embed_cells: Callable[[Cells], np.ndarray],
    perturbation: Perturbation,
    combinations: np.ndarray,
    *,
    goal: np.ndarray | None = None,
    n_controls: int = 100,
    strata: np.ndarray | None = None,
    embedding: np.ndarray | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Perturb genes in cells, and compare the shift of the cells with that of matched control genes.

    Genes, not cells, are the units of comparison: all cells shift in a similar way, and every perturbation shifts them
    somewhat. The test is whether cells shift further than with other genes. Controls are matched on the fraction of
    cells that express them and on their dose, the root mean square of log1p CP10K in these cells (the cosine decreases
    with the square of a change). Each control is perturbed in the same way, in up to 100 of the cells that the
    perturbation applies to. The mean shift and dose of a control are standardized to the strata (type and depth) of the
    cells in which the tested gene was perturbed. The remaining difference in expression is removed by a linear
    regression of the log shift (of the goal shift itself) over the controls. The p-value is the fraction of controls
    with at least this shift. Tested genes are also controls of each other, because the genes most similar to a highly
    expressed gene may all be tested.

    `combinations` contains genes that are perturbed together, as indices in the vocabulary, shape (C, K). `goal` is the
    :func:`centroid` of the cells to move toward. `strata` contains the strata within which cells are compared, int64,
    shape (N,), from :func:`strata_of`; if None, there is one stratum. `embedding` is the embedding of the cells, if
    already computed.

    Returns
    -------
    One row per combination, in the same order: ``n_cells``, ``n_controls``, ``shift``, ``shift_sd``, ``shift_z``,
    ``p_value``; with a goal ``goal_shift``, ``goal_shift_sd``, ``goal_z``, ``goal_p_value``. Values are NaN if nothing
    was perturbed; z-scores and p-values are also NaN for fewer than 3 perturbed cells. :func:`with_rates` adds false
    discovery rates over all tests.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:60, :300].copy())
    >>> tokenizer = scforge.tokenizers.get_tokenizer("continuous_projection", cells.vocab)
    >>> sizes = {"hidden_dim": 8, "pooling": "weighted_sum", "latent_dim": 4}
    >>> module = scforge.models.GenePoolingModel(len(cells.vocab), **sizes)
    >>> embed = lambda part: scforge.training.predict.embed(module, part, tokenizer)
    >>> delete, genes = scforge.insilico.screening.Perturbation("delete"), np.array([[0], [1], [2]])
    >>> table = screen(cells, embed, delete, genes, n_controls=5)
    >>> table.columns.tolist()
    ['n_cells', 'n_controls', 'shift', 'shift_sd', 'shift_z', 'p_value']
    """
    if not len(cells):
        raise DataError("there are no cells to perturb; choose other cells.")
    combinations = np.asarray(combinations, dtype=np.int32).reshape(len(combinations), -1)
    strata = np.zeros(len(cells), dtype=np.int64) if strata is None else strata
    rng = np.random.default_rng(seed)
    if perturbation.mode != "delete" and cells.measured is not None:
        # A gene that gets counts was measured, in the copies as in what they are compared with.
        embedding = None
        measured = cells.measured.copy()
        measured[combinations.ravel()] = True
        cells = replace(cells, measured=measured)
    before = units(embed_cells(cells) if embedding is None else embedding)
    tested = _measure(cells, embed_cells, before, perturbation, combinations, goal, strata)
    near = []
    if n_controls:
        places, scale = places_of(cells)
        eligible = _eligible(cells, perturbation, combinations)
        drawn = draw_controls(combinations, places, eligible, n_controls, rng)
        controls = _measure(
            cells, embed_cells, before, perturbation, drawn, goal, strata, most=_CONTROL_CELLS, rng=rng
        ).joined(tested)
        n_drawn, drawn = len(drawn), np.concatenate([drawn, combinations])
        # Genes of a pair are in no order.
        shares = np.sort(places[drawn, 0], axis=1)
    for number in range(len(combinations) if n_controls else 0):
        own, weights = n_drawn + number, tested.counts[number]
        doses = controls.standardized("dose", np.arange(len(drawn)), weights)
        with np.errstate(divide="ignore", invalid="ignore"):
            away = np.column_stack([shares, np.log(doses) / 2 / scale])
            away -= away[own]
        shares_genes = np.isin(drawn, combinations[number]).any(axis=1)
        usable = (controls.n_cells >= _MIN_CELLS) & np.isfinite(away).all(axis=1) & ~shares_genes
        others = np.flatnonzero(usable)
        others = others[nearest(np.zeros(away.shape[1]), away[others], n_controls)]
        near.append((others, away[others]))
    used = [len(others) for others, _ in near] or 0
    table = pd.DataFrame({"n_cells": tested.n_cells, "n_controls": used})
    for name, prefix, two_sided in [("shift", "", False), ("goal", "goal_", True)][: 1 if goal is None else 2]:
        value, spread = tested.moments(name)
        results = []
        for number, (others, away) in enumerate(near):
            like = controls.standardized(name, others, tested.counts[number])
            statistic = value[number] if tested.n_cells[number] >= _MIN_CELLS else np.nan
            results.append(compare(statistic, _at_origin(like, away, logs=not two_sided), two_sided=two_sided))
        results = results or [(np.nan, np.nan)] * len(combinations)
        table[f"{prefix}shift"], table[f"{prefix}shift_sd"] = value, spread
        table[f"{prefix or 'shift_'}z"], table[f"{prefix}p_value"] = np.array(results).reshape(-1, 2).T
    return table


def strata_of(cells: CellSource, embedding: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Return the stratum of each cell, int64, shape (N,): clusters of the embedding (types), split by depth.

    There is one cluster for every 100 cells, at most 8 clusters, and each cluster is split into thirds by library size.
    """
    from sklearn.cluster import KMeans

    n_kinds = min(_KINDS, max(1, len(cells) // _CELLS_PER_KIND))
    kinds = KMeans(n_kinds, n_init=1, random_state=seed).fit_predict(units(embedding))
    depths = pd.Series(np.asarray(cells.totals)).groupby(kinds).rank(pct=True, method="first").to_numpy()
    return kinds.astype(np.int64) * _DEPTHS + np.minimum((depths * _DEPTHS).astype(np.int64), _DEPTHS - 1)


def _at_origin(values: np.ndarray, away: np.ndarray, *, logs: bool) -> np.ndarray:
    """Return control values corrected for their expression difference `away`, by least squares."""
    is_usable = np.isfinite(values) & ((values > 0) if logs else True)
    if is_usable.sum() < _MIN_FITTED * (1 + away.shape[1]):
        return values
    response = np.log(values[is_usable]) if logs else values[is_usable]
    design = np.column_stack([np.ones(len(response)), away[is_usable]])
    moved = response - away[is_usable] @ np.linalg.lstsq(design, response, rcond=None)[0][1:]
    corrected = values.copy()
    corrected[is_usable] = np.exp(moved) if logs else moved
    return corrected


def mean_moves(
    cells: CellSource,
    embed_cells: Callable[[Cells], np.ndarray],
    perturbation: Perturbation,
    combinations: np.ndarray,
) -> np.ndarray:
    """Return the mean shift of the cell directions under each combination, float64, shape (C, D).

    Genes with similar effects have shifts with a high cosine similarity. Subtract the mean over genes before comparing
    shifts, because the shift shared by all perturbations is not specific to a gene.

    Returns
    -------
    The embedding after minus before the perturbation, both of length 1, averaged over cells; NaN if nothing was
    perturbed.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:60, :300].copy())
    >>> tokenizer = scforge.tokenizers.get_tokenizer("continuous_projection", cells.vocab)
    >>> sizes = {"hidden_dim": 8, "pooling": "weighted_sum", "latent_dim": 4}
    >>> module = scforge.models.GenePoolingModel(len(cells.vocab), **sizes)
    >>> embed = lambda part: scforge.training.predict.embed(module, part, tokenizer)
    >>> delete, genes = scforge.insilico.screening.Perturbation("delete"), np.array([[0], [1], [2]])
    >>> mean_moves(cells, embed, delete, genes).shape
    (3, 4)
    """
    combinations = np.asarray(combinations, dtype=np.int32).reshape(len(combinations), -1)
    before = units(embed_cells(cells))
    sums, n_cells = np.zeros((len(combinations), before.shape[1])), np.zeros(len(combinations))
    for which, rows in _pairs(cells, perturbation, combinations, None, None):
        after = units(embed_cells(PerturbedCells(cells, perturbation, rows, combinations[which])))
        np.add.at(sums, which, after - before[rows])
        n_cells += np.bincount(which, minlength=len(combinations))
    return sums / np.where(n_cells > 0, n_cells, np.nan)[:, None]


def with_rates(table: pd.DataFrame) -> pd.DataFrame:
    """Add ``fdr`` (and ``goal_fdr``) over all rows to a table of tests (Benjamini and Hochberg 1995)."""
    table = table.copy()
    for name in ("p_value", "goal_p_value"):
        if name in table:
            column = int(table.columns.get_loc(name)) + 1
            p_values = table[name].dropna()
            rates = pd.Series(false_discovery_control(p_values), p_values.index, dtype=np.float64)
            table.insert(column, name.replace("p_value", "fdr"), rates.reindex(table.index))
    return table


def units(embedding: np.ndarray) -> np.ndarray:
    """Return the rows scaled to length 1, float64; rows of zeros do not change."""
    from sklearn.preprocessing import normalize

    return normalize(embedding.astype(np.float64))


def centroid(embedding: np.ndarray) -> np.ndarray:
    """Return the mean direction of cells, length 1, shape (D,); vectors are normalized first, for equal weights."""
    return units(units(embedding).mean(axis=0, keepdims=True))[0]


def places_of(cells: CellSource) -> tuple[np.ndarray, float]:
    """Return the values on which genes are matched, float64, shape (G, 2), and the divisor of the second value.

    The values are the logarithms of the fraction of cells that express a gene, and of the root mean square of its log1p
    CP10K in these cells, both in units of their standard deviations over the expressed genes. Genes that no cell
    expresses have the lowest values.
    """
    n_genes = cells.counts.shape[1]
    n_expressing = np.bincount(cells.counts.indices, minlength=n_genes).astype(np.float64)
    squares = np.bincount(cells.counts.indices, np.square(_logs(cells).data), minlength=n_genes)
    on, places, spread = n_expressing > 0, np.zeros((n_genes, 2)), np.ones(2)
    if on.any():
        places[on] = np.log(
            np.column_stack([n_expressing / len(cells), np.sqrt(squares / np.maximum(n_expressing, 1))])[on]
        )
        spread = np.maximum(places[on].std(axis=0), 1e-9)
        places[~on] = places[on].min(axis=0)
    return places / spread, float(spread[1])


def _logs(cells: CellSource) -> sparse.csr_matrix:
    """Return log1p CP10K, float64, CSR."""
    scale = np.repeat(TARGET_SUM / np.maximum(cells.totals, 1.0), np.diff(cells.counts.indptr))
    counts = cells.counts
    return sparse.csr_matrix((np.log1p(counts.data * scale), counts.indices, counts.indptr), shape=counts.shape)


def _eligible(cells: CellSource, perturbation: Perturbation, combinations: np.ndarray) -> np.ndarray:
    """Return the genes that may serve as controls: expressed, perturbed in some cells, and not tested."""
    n_expressing = np.bincount(cells.counts.indices, minlength=cells.counts.shape[1])
    n_cells = {"delete": n_expressing, "activate": len(cells) - n_expressing}.get(perturbation.mode, n_expressing)
    fit = (n_expressing > 0) & (n_cells >= min(_MIN_CELLS, len(cells)))
    fit[combinations.ravel()] = False
    return np.flatnonzero(fit)


@dataclass(frozen=True)
class _Measured:
    """Sums over the cells for each of C combinations in each of S strata, float64, shape (C, S) each."""

    counts: np.ndarray
    sums: Mapping[str, np.ndarray]
    squares: Mapping[str, np.ndarray]

    @property
    def n_cells(self) -> np.ndarray:
        """Number of cells per combination, int64, shape (C,)."""
        return self.counts.sum(axis=1).astype(np.int64)

    def joined(self, other: _Measured) -> _Measured:
        """Return the sums of both sets of combinations."""
        pairs = ((self.sums, other.sums), (self.squares, other.squares))
        parts = ({name: np.concatenate([ours[name], theirs[name]]) for name in ours} for ours, theirs in pairs)
        return _Measured(np.concatenate([self.counts, other.counts]), *parts)

    def moments(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation over the cells of each combination, or NaN if there are too few cells."""
        n_cells = self.counts.sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self.sums[name].sum(axis=1) / n_cells
            left = np.maximum(0, self.squares[name].sum(axis=1) - n_cells * mean**2)
            return mean, np.where(n_cells < 2, np.nan, np.sqrt(left / (n_cells - 1)))

    def standardized(self, name: str, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the mean of each combination in `rows`, averaged over strata with the weights `weights`.

        Strata without cells of a combination are ignored; the mean is NaN if no stratum remains.
        """
        counts = self.counts[rows]
        there = np.where(counts > 0, weights, 0.0)
        means = np.divide(self.sums[name][rows], counts, out=np.zeros_like(counts), where=counts > 0)
        total = there.sum(axis=1)
        return np.divide((there * means).sum(axis=1), total, out=np.full(len(rows), np.nan), where=total > 0)


def _measure(
    cells: CellSource,
    embed_cells: Callable[[Cells], np.ndarray],
    before: np.ndarray,
    perturbation: Perturbation,
    combinations: np.ndarray,
    goal: np.ndarray | None,
    strata: np.ndarray,
    *,
    most: int | None = None,
    rng: np.random.Generator | None = None,
) -> _Measured:
    """Perturb each combination in the cells that it applies to, or in `most` of them, and sum up the effects."""
    shape = len(combinations), int(strata.max(initial=0)) + 1
    near = None if goal is None else before @ goal
    sums = np.zeros((6, shape[0] * shape[1]))
    logs, usual = _logs(cells), None
    if perturbation.mode != "delete":
        # Cells that a gene is activated in have none of it: its dose is what is usual.
        squares = np.asarray(logs.power(2).sum(axis=0)).ravel()
        usual = np.sqrt(squares / np.maximum(logs.getnnz(axis=0), 1))
        usual = np.maximum(usual, usual[usual > 0].min(initial=1.0))  # a gene that none of these cells expresses
    for which, rows in _pairs(cells, perturbation, combinations, most, rng):
        after = units(embed_cells(PerturbedCells(cells, perturbation, rows, combinations[which])))
        shift = 1.0 - np.einsum("nd,nd->n", after, before[rows])
        closer = np.zeros(len(rows)) if near is None or goal is None else after @ goal - near[rows]
        doses = [
            np.asarray(logs[rows, genes]).ravel() if usual is None else usual[genes] for genes in combinations[which].T
        ]
        places = which * shape[1] + strata[rows]
        weights = (np.ones(len(rows)), np.square(np.sum(doses, axis=0)), shift, shift**2, closer, closer**2)
        sums += np.array([np.bincount(places, weights=weight, minlength=sums.shape[1]) for weight in weights])
    counts, squares, *rest = sums.reshape(6, *shape)
    return _Measured(counts, {"dose": squares, "shift": rest[0], "goal": rest[2]}, {"shift": rest[1], "goal": rest[3]})


def _pairs(
    cells: CellSource,
    perturbation: Perturbation,
    combinations: np.ndarray,
    most: int | None,
    rng: np.random.Generator | None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of a combination and a cell in which it is perturbed, a bounded number of pairs at a time."""
    by_gene = cells.counts.tocsc()
    waiting: list[tuple[np.ndarray, np.ndarray]] = []
    n_waiting = 0
    for number, genes in enumerate(combinations):
        expressed = np.zeros((len(cells), len(genes)), dtype=np.bool_)
        for column, gene in enumerate(genes):
            expressed[by_gene.indices[by_gene.indptr[gene] : by_gene.indptr[gene + 1]], column] = True
        rows = np.flatnonzero(perturbation.applies(expressed))
        if most is not None and rng is not None and len(rows) > most:
            rows = np.sort(rng.choice(rows, most, replace=False))
        for start in range(0, len(rows), _COPIES):
            batch = rows[start : start + _COPIES]
            if n_waiting + len(batch) > _COPIES:
                yield _joined(waiting)
                waiting, n_waiting = [], 0
            waiting.append((np.full(len(batch), number), batch))
            n_waiting += len(batch)
    if waiting:
        yield _joined(waiting)


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
