"""Benchmark of reconstructed gene orders in each cell.

Shapes: N cells, S positions, G genes, R draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numba
import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from scforge.errors import DataError
from scforge.eval.base import Benchmark, register_benchmark
from scforge.eval.generation import check_copies, compare_beside
from scforge.eval.report import bootstrap_weights

if TYPE_CHECKING:
    from scforge.eval.report import Kind, Report


_LONGEST = 4
"""Maximum length of gene n-grams in BLEU."""

_PAD = -1

_MIN_GENES = 10
"""Minimum length of orders in the check for copies; shorter orders may match another cell by chance."""


@register_benchmark("rank_reconstruction")
class RankReconstruction(Benchmark):
    """Compare reconstructed gene orders with the true orders, highest gene first.

    These scores are common in papers on rank-based models.

    ``l_dist``
        Levenshtein distance [1]_: the minimum number of insertions, deletions and replacements, divided by the length
        of the longer order. 0 is the same order; 1 means that no gene is at the right position. Averaged over cells;
        lower is better. ``l_dist_edits`` is the mean of the distances themselves.
    ``bleu``
        BLEU of all cells [2]_: geometric mean of the fractions of n-grams of one to four genes that occur in the true
        order of the cell, times the brevity penalty; 1 is the same order. Cells are weighted by their length.
    ``spearman``
        Spearman correlation of the positions of the genes in the true order. Genes that are missing in the
        reconstruction share the last position; additional genes are ignored. Averaged over cells; 0 for a cell in which
        no gene is reconstructed, or in which all genes share one position. Cells with one gene are left out.

    Each score is NaN if all cells are left out.

    References
    ----------
    .. [1] Levenshtein (1966), Soviet Physics Doklady 10, 707-710.
    .. [2] Papineni et al. (2002), ACL, 311-318.

    Examples
    --------
    >>> true = np.array([[4, 2, 7, 1, 3], [2, 4, 1, -1, -1]])
    >>> RankReconstruction().run(true, true)
    {'l_dist': 0.0, 'l_dist_edits': 0.0, 'bleu': 1.0, 'spearman': 1.0}
    """

    subject = "ranking"
    metrics = ("l_dist", "l_dist_edits", "bleu", "spearman")
    lower_is_better = frozenset({"l_dist", "l_dist_edits"})
    main = "spearman"
    n_draws = 1_000

    def check(self, reference: np.ndarray) -> None:
        """Raise :class:`~scforge.errors.DataError` if orders have gaps or repeated genes, or all cells are empty."""
        _rows(reference, "the true orders", repeated=False)

    def run(self, made: np.ndarray, reference: np.ndarray) -> dict[str, float]:
        """Return one score for each of :attr:`metrics`.

        Parameters
        ----------
        made
            Reconstructed orders: indices of genes, starting at 0, int, shape (N, S), padded with -1. A gene may be
            repeated. Only its first position counts for ``spearman``.
        reference
            The true orders of the same cells, in the same format. The number of positions may differ.

        Raises
        ------
        DataError
            If the two arrays do not match, or are not valid orders.
        """
        table = self._by_cell(made, reference)
        return {name: float(values[0]) for name, values in _figures(table, np.ones((1, len(table)))).items()}

    def resampled(self, made: np.ndarray, reference: np.ndarray, *, n: int, seed: int) -> pd.DataFrame:
        """Return the scores on bootstrapped cells."""
        table = self._by_cell(made, reference)
        return pd.DataFrame(_figures(table, bootstrap_weights(len(table), n, seed=seed).astype(np.float64)))

    def _by_cell(self, made: np.ndarray, reference: np.ndarray) -> np.ndarray:
        """Return the score components of each cell, float64, shape (N, 5 + 2 * 4); see :func:`_figures`."""
        true = _rows(reference, "the true orders", repeated=False)
        orders = _rows(made, "the reconstructed orders", repeated=True)
        if len(orders) != len(true):
            raise DataError(
                f"there are {len(orders)} reconstructed and {len(true)} true gene orders; pass one of each per cell."
            )
        return np.array([_score_cell(order, other) for order, other in zip(orders, true, strict=True)])


def ranking_baselines(train: np.ndarray, reference: np.ndarray, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Return gene orders that ignore the cell, or use only its set of genes.

    ``"mean order"``
        The genes with the highest mean rank in the training cells, as many as the cell contains. The order is the same
        for all cells.
    ``"mean order of the cell's genes"``
        The genes of the cell, ordered by their mean rank in the training cells.
    ``"random order of the cell's genes"``
        The genes of the cell in random order: chance level.

    The rank of a gene decreases from 1 at the first position to 0 after the last position. It is 0 in cells without the
    gene.

    `train` are orders of training cells, int, shape (M, S), padded with -1; `reference` contains the true orders of the
    scored cells, (N, S). Returns a mapping from baseline name to orders, int64, shape (N, S).
    """
    rng = np.random.default_rng(seed)
    learned = _rows(train, "the orders in train", repeated=False)
    true = _rows(reference, "the reference orders", repeated=False)
    totals = np.zeros(max(int(np.max(train)), int(np.max(reference))) + 1)
    for row in learned:
        totals[row] += 1 - np.arange(len(row)) / len(row)
    # Genes that no training cell has come last, by their number.
    positions = np.empty(len(totals), dtype=np.int64)
    order = np.argsort(-totals, kind="stable")
    positions[order] = np.arange(len(order))
    baselines = {
        "mean order": [order[: len(row)] for row in true],
        "mean order of the cell's genes": [row[np.argsort(positions[row], kind="stable")] for row in true],
        "random order of the cell's genes": [rng.permutation(row) for row in true],
    }
    return {name: _padded(rows, np.shape(reference)[1]) for name, rows in baselines.items()}


def evaluate_reconstruction(
    reconstructed: np.ndarray | Mapping[str, np.ndarray],
    true: np.ndarray,
    train: np.ndarray,
    *,
    kinds: Mapping[str, Kind] | None = None,
    seed: int = 0,
    intervals: bool = True,
    title: str = "Reconstructed orders of genes compared",
) -> Report:
    """Score reconstructed gene orders, with :func:`ranking_baselines` from the training cells.

    Parameters
    ----------
    reconstructed
        Orders from one method, or a mapping from method name to orders, int, shape (N, S), padded with -1.
    true
        The true orders of the same cells, e.g. ``input_ids`` of a tokenizer that ranks genes, without special tokens.
    train
        Orders of training cells, which must differ from the scored cells, with the same gene indices.
    kinds
        A mapping from method name to kind, e.g. ``"untrained"``. The default is ``"model"``.
    seed
        Random seed for the random order and the bootstrap draws.
    intervals
        Whether to add 95% intervals, and tests against the best baseline.
    title
        Heading of the report.

    Returns
    -------
    The report with the :class:`RankReconstruction` scores of each method and baseline.

    Raises
    ------
    DataError
        If orders do not match, or more than 1% of the true orders are orders of training cells.
    OptionError
        If a method has the name of a baseline, or `kinds` names an unknown method.

    Warns
    -----
    ScforgeWarning
        If at most 1% of the true orders are orders of training cells. Orders with fewer than ten genes are not
        checked.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> train, true = (np.stack([rng.permutation(20) for _ in range(30)]) for _ in range(2))
    >>> report = evaluate_reconstruction({"mine": true}, true, train, intervals=False)
    >>> float(report.to_table().loc["mine", "bleu"])
    1.0
    """
    methods = dict(reconstructed) if isinstance(reconstructed, Mapping) else {"reconstructed": reconstructed}
    baselines = ranking_baselines(train, true, seed=seed)
    train_orders = _rows(train, "the orders in train", repeated=False)
    rows = _rows(true, "the true orders", repeated=False)
    seen = {row.tobytes() for row in train_orders if len(row) >= _MIN_GENES}
    same = np.array([row.tobytes() in seen for row in rows])
    check_copies(same, "true orders are identical to the order of a training cell")
    report = compare_beside(
        RankReconstruction(),
        "reconstructed",
        methods,
        baselines,
        true,
        kinds=kinds,
        seeds=(seed,),
        intervals=intervals,
        title=title,
    )
    report.facts |= {"cells": len(true), "training cells": len(train)}
    return report


def _rows(orders: np.ndarray, what: str, *, repeated: bool) -> list[np.ndarray]:
    """Return the genes of each cell, without padding."""
    orders = np.asarray(orders)
    if orders.ndim != 2 or orders.dtype.kind not in "iu" or orders.min(initial=0) < _PAD:
        raise DataError(
            f"{what} have dtype {orders.dtype} and shape {orders.shape}; pass gene indices from 0, with one row per "
            "cell and -1 for padding."
        )
    orders = orders.astype(np.int64)
    sizes = (orders != _PAD).sum(axis=1)
    gaps = ((orders != _PAD) != (np.arange(orders.shape[1]) < sizes[:, None])).any(axis=1)
    rows = [order[:size] for order, size in zip(orders, sizes, strict=True)]
    empty = np.zeros_like(gaps) if repeated else sizes == 0
    twice = [not repeated and len(np.unique(row)) < len(row) for row in rows]
    for wrong, problem in ((gaps, "-1 before a gene"), (empty, "no gene"), (twice, "a duplicate gene")):
        if np.any(wrong):
            raise DataError(f"{what} have {problem} in row {int(np.argmax(wrong))}; correct this row, or leave it out.")
    return rows


def _padded(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    padded = np.full((len(rows), width), _PAD, dtype=np.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def _score_cell(made: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Return edits, edits divided by length, both lengths, Spearman, n-gram matches and n-gram counts; (5 + 2 * 4,)."""
    edits = _edits(made, true)
    longest = max(len(made), len(true))
    matches, numbers = [], []
    for length in range(1, _LONGEST + 1):
        both = ([row[i:].tolist() for i in range(length)] for row in (made, true))
        of_made, of_true = (Counter(zip(*shifted, strict=False)) for shifted in both)
        matches.append((of_made & of_true).total())  # clipped
        numbers.append(of_made.total())
    return np.array([edits, edits / longest, len(made), len(true), _spearman(made, true), *matches, *numbers])


def _figures(table: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Return each score for each draw of cells, shape (R,)."""
    total = weights.sum(axis=1)
    spearman = np.isfinite(table[:, 4])
    of_spearman = weights[:, spearman].sum(axis=1)
    length, expected = (weights @ table[:, 2:4]).T
    matches, numbers = weights @ table[:, 5 : 5 + _LONGEST], weights @ table[:, 5 + _LONGEST :]
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.exp(np.log(matches / numbers).mean(axis=1))
        penalty = np.exp(np.minimum(0.0, 1 - expected / length))
        return {
            "l_dist": weights @ table[:, 1] / total,
            "l_dist_edits": weights @ table[:, 0] / total,
            # No run of four anywhere, neither there nor to be had, leaves nothing to average.
            "bleu": np.where((numbers > 0).all(axis=1), precision * penalty, np.where(length > 0, np.nan, 0.0)),
            "spearman": weights[:, spearman] @ table[spearman, 4] / of_spearman,
        }


def _spearman(made: np.ndarray, true: np.ndarray) -> float:
    """Return the correlation of the true genes' positions: NaN for a single gene, 0 if all share one position."""
    if len(true) < 2:
        return float("nan")
    # The first place of each gene counts.
    positions = dict(zip(made[::-1].tolist(), range(len(made) - 1, -1, -1), strict=True))
    places = [positions.get(gene, len(made)) for gene in true.tolist()]
    return float(spearmanr(places, np.arange(len(true))).statistic) if len(set(places)) > 1 else 0.0


@numba.njit(cache=True)
def _edits(first: np.ndarray, other: np.ndarray) -> int:
    """Return the Levenshtein distance, computed one row of the table at a time."""
    row = np.arange(len(other) + 1)
    for i in range(len(first)):
        corner = row[0]
        row[0] = i + 1
        for j in range(len(other)):
            above = row[j + 1]
            row[j + 1] = min(above + 1, row[j] + 1, corner + (first[i] != other[j]))
            corner = above
    return row[len(other)]
