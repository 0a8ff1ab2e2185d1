"""How well scores of pairs of genes find the known targets of transcription factors.

Shapes: T transcription factors, G genes, P pairs of both that are scored, R draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numba
import numpy as np
import pandas as pd

from scforge.errors import DataError, OptionError, listing
from scforge.eval.base import Benchmark, register_benchmark
from scforge.eval.statistics import bootstrap_weights

__all__ = ["GeneNetwork", "RankedPairs", "Universe"]

_TARGETS = ("truth", "measured")


@dataclass(frozen=True)
class Universe:
    """The pairs that are scored.

    Attributes
    ----------
    tfs, genes
        Names of the T transcription factors and of the G genes.
    edges
        True edges, bool, shape (T, G).
    pairs
        Pairs that take part: all but those of a gene with itself, bool, shape (T, G).
    n_left_out
        True edges that were given and take no part.
    """

    tfs: pd.Index
    genes: pd.Index
    edges: np.ndarray
    pairs: np.ndarray
    n_left_out: int

    def describe(self) -> dict[str, int | float]:
        """Return how many transcription factors, genes, pairs and true edges there are."""
        n_pairs, n_edges = int(self.pairs.sum()), int(self.edges.sum())
        return {
            "transcription factors": len(self.tfs),
            "genes": len(self.genes),
            "pairs": n_pairs,
            "true edges": n_edges,
            "share of true edges": round(n_edges / n_pairs, 6),
            "true edges left out": self.n_left_out,
        }

    def matrix(self, made: pd.DataFrame) -> np.ndarray:
        """Return the weights of edges as float64, shape (T, G); -inf for pairs without one.

        Raises
        ------
        DataError
            If columns are missing, a weight is not a number, or a pair stands there twice.
        """
        _check_edges("the scores", made, "weight")
        rows, columns = _places(made["source"], self.tfs), _places(made["target"], self.genes)
        inside = (rows >= 0) & (columns >= 0)
        if not pd.api.types.is_numeric_dtype(made["weight"]):
            raise DataError(f"the weights of the scores have the dtype {made['weight'].dtype}; give numbers.")
        weights = made["weight"].to_numpy(dtype=np.float64)[inside]
        if not np.isfinite(weights).all():
            raise DataError(
                f"{int((~np.isfinite(weights)).sum())} weights of the scores are not numbers; leave those edges out."
            )
        places = rows[inside].astype(np.int64) * len(self.genes) + columns[inside]
        found = np.full(len(self.tfs) * len(self.genes), -np.inf)
        found[places] = weights
        n_found = int(np.isfinite(found).sum())
        if n_found < len(places):
            raise DataError(
                f"{len(places) - n_found} edges of the scores stand there twice; give one weight for each source and "
                "target, e.g. with scores.groupby(['source', 'target'], as_index=False)['weight'].max()."
            )
        return found.reshape(len(self.tfs), len(self.genes))


@dataclass(frozen=True)
class RankedPairs:
    """Pairs by falling weight.

    Attributes
    ----------
    tfs
        Number of the transcription factor of each pair, int32, shape (P,).
    true
        Whether it is a true edge, bool, shape (P,).
    ties
        Number of the group of pairs of the same weight, int32, ascending, shape (P,).
    n_scored
        Pairs that had a weight; those without stand behind and tie with each other.
    of_tf
        True edges, and pairs, of each transcription factor, float64, shape (2, T).
    """

    tfs: np.ndarray
    true: np.ndarray
    ties: np.ndarray
    n_scored: int
    of_tf: np.ndarray

    @classmethod
    def of(cls, made: pd.DataFrame, universe: Universe) -> RankedPairs:
        """Rank the pairs of a universe by the weights of edges."""
        kept = np.flatnonzero(universe.pairs.ravel())
        weights = universe.matrix(made).ravel()[kept]
        order = np.argsort(-weights)
        ranked = weights[order]
        ties = np.zeros(len(ranked), dtype=np.int32)
        np.cumsum(ranked[1:] != ranked[:-1], out=ties[1:])
        kept = kept[order]
        tfs = (kept // len(universe.genes)).astype(np.int32)
        of_tf = np.array([universe.edges.sum(axis=1), universe.pairs.sum(axis=1)], dtype=np.float64)
        return cls(tfs, universe.edges.ravel()[kept], ties, int(np.isfinite(ranked).sum()), of_tf)

    def figures(self, weights: np.ndarray, within: np.ndarray) -> dict[str, float]:
        """Return the metrics where each transcription factor counts as often as `weights` (T,) says."""
        n_true, n_pairs = float(weights @ self.of_tf[0]), float(weights @ self.of_tf[1])
        auroc, auprc, early, share = _figures(self.tfs, self.true, self.ties, self.n_scored, weights, n_true, n_pairs)
        defined = np.isfinite(within) & (weights > 0)
        return {
            "auprc_ratio": auprc / share,
            "auprc": auprc,
            "auroc": auroc,
            "early_precision_ratio": early / share,
            "early_precision": early,
            "auroc_within_tf": float(np.average(within[defined], weights=weights[defined]))
            if defined.any()
            else float("nan"),
        }

    def within(self) -> np.ndarray:
        """Return the AUROC among the pairs of each transcription factor, shape (T,); NaN where all are true."""
        return _within(self.tfs, self.true, self.ties, self.of_tf.shape[1])


@register_benchmark("gene_network")
class GeneNetwork(Benchmark):
    """Known edges found among all pairs of a transcription factor and a gene.

    The pairs are those of all transcription factors that regulate something in the truth, with all genes that something
    regulates there (or all measured ones), without pairs of a gene with itself. What is not in the truth counts as
    wrong, although many true edges are unknown: figures compare methods, and are no error rates. Edges with more than
    one row in the truth count once; signs take no part.

    **Pairs without a score** get the lowest of all, and tie with each other. So a method that names few edges is not
    scored on these alone.

    Parameters
    ----------
    genes
        Genes that were measured. Others take no part, neither as targets nor as transcription factors, since no method
        could score them; None restricts nothing.
    tfs
        Transcription factors to restrict the pairs to; None takes all of the truth.
    targets
        ``"truth"``: genes with an edge in the truth. ``"measured"``: all of `genes`; then what is well studied, and
        highly expressed, is found without knowing any edge.

    Notes
    -----
    ``auprc_ratio``
        ``auprc`` over the share of true edges, which is what random scores have.
    ``auprc``
        Average precision: ``sum_n (R_n - R_(n-1)) P_n`` over the distinct weights, as in scikit-learn. No trapezoids,
        which would credit ties, and pairs without a score, with more than they know (Davis and Goadrich 2006).
    ``auroc``
        Share of pairs of a true and another edge that are in the right order; ties count half.
    ``early_precision``, ``early_precision_ratio``
        Precision among the k pairs of highest weight, k the number of true edges; all pairs that tie with the last of
        them are taken (Pratapa et al., Nat Methods 2020, BEELINE). Where fewer than k have a score, BEELINE takes these
        alone; here the missing ones are taken at random from the pairs without a score, in expectation. The ratio is
        that to random.
    ``auroc_within_tf``
        Mean over transcription factors of the AUROC among their own pairs. That some have more known targets than
        others does not help here.

    :meth:`resampled` is a bootstrap of transcription factors: the edges of one are no independent observations.

    Examples
    --------
    >>> truth = pd.DataFrame({"source": ["A", "A", "B"], "target": ["x", "y", "z"]})
    >>> scores = pd.DataFrame({"source": ["A", "A", "B"], "target": ["x", "y", "x"], "weight": [3.0, 2.0, 1.0]})
    >>> figures = GeneNetwork().run(scores, truth)
    >>> round(figures["auroc"], 3), round(figures["early_precision"], 3)
    (0.778, 0.667)
    """

    subject: ClassVar[str] = "network"
    metrics = ("auprc_ratio", "auprc", "auroc", "early_precision_ratio", "early_precision", "auroc_within_tf")
    n_draws: ClassVar[int] = 100

    def __init__(
        self, genes: Sequence[str] | None = None, tfs: Sequence[str] | None = None, targets: str = "truth"
    ) -> None:
        for argument, names in {"genes": genes, "tfs": tfs}.items():
            if names is not None and (isinstance(names, str) or not len(names)):
                raise OptionError(f"{argument}={names!r} is not a list of gene names; name at least one, or None.")
        if targets not in _TARGETS:
            raise OptionError(f"targets={targets!r} is none of {listing(_TARGETS)}.")
        if targets == "measured" and genes is None:
            raise OptionError("targets='measured' needs to know what was measured; give genes.")
        self.genes = None if genes is None else list(genes)
        self.tfs = None if tfs is None else list(tfs)
        self.targets = targets

    def check(self, reference: pd.DataFrame) -> None:
        """Raise :class:`~scforge.errors.DataError` where :meth:`run` would for any scores."""
        self.universe(reference)

    def universe(self, reference: pd.DataFrame) -> Universe:
        """Return the pairs that are scored against these true edges.

        Parameters
        ----------
        reference
            True edges, with the columns ``source`` and ``target``.

        Raises
        ------
        DataError
            If columns or names are missing, or no true edge is left, or nothing else.
        """
        _check_edges("the truth", reference)
        given = reference[["source", "target"]].astype(str).drop_duplicates()
        kept = given[given["source"] != given["target"]]
        if self.tfs is not None:
            kept = kept[kept["source"].isin(self.tfs)]
        if self.genes is not None:
            kept = kept[kept["source"].isin(self.genes) & kept["target"].isin(self.genes)]
        if kept.empty:
            raise DataError(
                f"none of the {len(given)} true edges is left{self._why_empty(given)}; name genes as the truth does, "
                f"e.g. by symbols (its sources: {listing(given['source'].unique(), most=3)})."
            )
        tfs = pd.Index(np.sort(kept["source"].unique()))
        targets = kept["target"] if self.targets == "truth" or self.genes is None else pd.Series(self.genes)
        genes = pd.Index(np.sort(targets.unique()))
        edges = np.zeros((len(tfs), len(genes)), dtype=np.bool_)
        edges[tfs.get_indexer(kept["source"]), genes.get_indexer(kept["target"])] = True
        own = genes.get_indexer(tfs)
        pairs = np.ones(edges.shape, dtype=np.bool_)
        pairs[np.flatnonzero(own >= 0), own[own >= 0]] = False
        if edges.sum() == pairs.sum():
            raise DataError("all pairs are true edges, so that there is nothing to tell them from; give more edges.")
        return Universe(tfs, genes, edges, pairs, len(given) - len(kept))

    def run(self, made: pd.DataFrame, reference: pd.DataFrame) -> dict[str, float]:
        """Return the figures; ``auroc_within_tf`` is NaN where each transcription factor regulates all genes.

        Parameters
        ----------
        made
            Scores of edges, with the columns ``source``, ``target`` and ``weight``: more is more likely. Edges outside
            the pairs that are scored do no harm. Categorical columns are the quickest.
        reference
            True edges, with the columns ``source`` and ``target``.
        """
        universe = self.universe(reference)
        ranked = RankedPairs.of(made, universe)
        return ranked.figures(np.ones(len(universe.tfs)), ranked.within())

    def resampled(self, made: pd.DataFrame, reference: pd.DataFrame, *, n: int, seed: int) -> pd.DataFrame:
        """Return the figures on bootstrapped transcription factors; NaN where those drawn regulate all genes."""
        universe = self.universe(reference)
        ranked = RankedPairs.of(made, universe)
        within = ranked.within()
        draws = bootstrap_weights(len(universe.tfs), n, seed=seed).astype(np.float64)
        return pd.DataFrame([ranked.figures(weights, within) for weights in draws], columns=list(self.metrics))

    def n_units(self, reference: pd.DataFrame) -> int:
        """Return the number of transcription factors."""
        return len(self.universe(reference).tfs)

    def _why_empty(self, given: pd.DataFrame) -> str:
        reasons = []
        if self.tfs is not None and not given["source"].isin(self.tfs).any():
            reasons.append(f"none of tfs ({listing(self.tfs, most=3)}) is a source")
        if self.genes is not None:
            n_known = len(set(self.genes) & (set(given["source"]) | set(given["target"])))
            reasons.append(f"{n_known} of the {len(self.genes)} genes ({listing(self.genes, most=3)}) are in the truth")
        return f": {' and '.join(reasons)}" if reasons else ""


def _check_edges(what: str, edges: Any, *more: str) -> None:
    """Raise unless this is a table with ``source``, ``target`` and more columns, without missing names."""
    if not isinstance(edges, pd.DataFrame):
        raise OptionError(f"{what} are of type {type(edges).__name__!r}; give a pandas.DataFrame of edges.")
    for column in ("source", "target", *more):
        if column not in edges:
            raise DataError(
                f"{what} have no column {column!r} (there is: {listing(edges.columns)}); rename the one that it is."
            )
        n_missing = int(edges[column].isna().sum())
        if n_missing and column not in more:
            raise DataError(f"{n_missing} edges of {what} have no {column}; leave them out.")


def _places(names: pd.Series, index: pd.Index) -> np.ndarray:
    """Return where names stand in an index, -1 for nowhere."""
    if not isinstance(names.dtype, pd.CategoricalDtype):
        names = names.astype("category")
    of_categories = index.get_indexer(pd.Index(names.cat.categories.astype(str)))
    return of_categories[names.cat.codes.to_numpy()]


@numba.njit(cache=True, nogil=True)
def _figures(tfs, true, ties, n_scored, weights, n_true, n_pairs):
    """Return AUROC, average precision, early precision and the share of true edges."""
    if n_true == 0.0 or n_true == n_pairs:
        return np.nan, np.nan, np.nan, np.nan
    hits, misses, some_hits, some_misses = 0.0, 0.0, 0.0, 0.0
    ordered, precisions, early = 0.0, 0.0, -1.0
    for pair in range(len(tfs)):
        if true[pair]:
            some_hits += weights[tfs[pair]]
        else:
            some_misses += weights[tfs[pair]]
        if pair + 1 < len(tfs) and ties[pair + 1] == ties[pair]:
            continue
        taken = hits + misses
        some = some_hits + some_misses
        ordered += some_misses * (hits + some_hits / 2.0)
        if some_hits > 0.0:
            precisions += some_hits * (hits + some_hits) / (taken + some)
        if early < 0.0 and some > 0.0 and taken + some >= n_true:
            expected = (hits + (n_true - taken) * some_hits / some) / n_true
            early = (hits + some_hits) / (taken + some) if pair < n_scored else expected
        hits += some_hits
        misses += some_misses
        some_hits, some_misses = 0.0, 0.0
    return ordered / (n_true * (n_pairs - n_true)), precisions / n_true, early, n_true / n_pairs


@numba.njit(cache=True, nogil=True)
def _within(tfs, true, ties, n_tfs):
    """Return the AUROC of each transcription factor, in one pass over all pairs."""
    hits, misses, ordered = np.zeros(n_tfs), np.zeros(n_tfs), np.zeros(n_tfs)
    some_hits, some_misses, tie = np.zeros(n_tfs), np.zeros(n_tfs), np.full(n_tfs, -1)
    for pair in range(len(tfs)):
        tf = tfs[pair]
        if tie[tf] != ties[pair]:
            ordered[tf] += some_misses[tf] * (hits[tf] + some_hits[tf] / 2.0)
            hits[tf] += some_hits[tf]
            misses[tf] += some_misses[tf]
            some_hits[tf], some_misses[tf], tie[tf] = 0.0, 0.0, ties[pair]
        if true[pair]:
            some_hits[tf] += 1.0
        else:
            some_misses[tf] += 1.0
    ordered += some_misses * (hits + some_hits / 2.0)
    n_true, n_other = hits + some_hits, misses + some_misses
    found = np.full(n_tfs, np.nan)
    for tf in range(n_tfs):
        if n_true[tf] > 0 and n_other[tf] > 0:
            found[tf] = ordered[tf] / (n_true[tf] * n_other[tf])
    return found
