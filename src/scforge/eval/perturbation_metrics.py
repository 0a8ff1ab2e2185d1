"""Metrics of predicted perturbation responses, also those of pertpy and cell-eval."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_count
from scforge.data.checks import check_is_adata
from scforge.data.perturbation import PerturbationKeys, parse_perturbations
from scforge.errors import DataError, MissingFileError, OptionError, did_you_mean, listing
from scforge.eval.base import check_column
from scforge.eval.expression import Effects, Moments, effects_of, log_normalised, moments_of

if TYPE_CHECKING:
    from anndata import AnnData


DISCRIMINATION = ("l1", "l2", "cosine")
"""The distances."""


def discrimination_scores(
    predicted: np.ndarray,
    measured: np.ndarray,
    metric: str = "l1",
    left_out: np.ndarray | None = None,
    contexts: Sequence[object] | None = None,
) -> np.ndarray:
    """Return the perturbation discrimination score of the Virtual Cell Challenge, as cell-eval has it.

    With r the number of measured effects that are nearer to the prediction than its own one, it is ``1 - r / Q``: 1 is
    perfect, ``1 / Q`` the least, and ``(1 + 1 / Q) / 2`` chance. Ties count half, where cell-eval takes any order.

    Parameters
    ----------
    predicted, measured
        Effects, shape (Q, G).
    metric
        ``"l1"``, ``"l2"`` or ``"cosine"``.
    left_out
        Genes that are not looked at for a prediction, bool, shape (Q, G); cell-eval leaves the perturbed gene out,
        which a model knows to change (:func:`own_genes`).
    contexts
        Context of each effect, Q of them: each is compared with those of its own, the number of which is then Q above.
        Without, there is one only.

    Returns
    -------
    Float64, shape (Q,); NaN without another effect in the context.

    Raises
    ------
    OptionError
        If the metric is unknown.
    DataError
        If the shapes differ.

    Examples
    --------
    >>> effects = np.eye(4)
    >>> discrimination_scores(effects, effects).tolist(), discrimination_scores(effects * 0, effects).tolist()
    ([1.0, 1.0, 1.0, 1.0], [0.625, 0.625, 0.625, 0.625])
    """
    if metric not in DISCRIMINATION:
        raise OptionError(f"metric={metric!r} is none of {listing(DISCRIMINATION)}.")
    predicted, measured = np.asarray(predicted, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    if predicted.shape != measured.shape or (left_out is not None and np.shape(left_out) != measured.shape):
        shapes = [predicted.shape, measured.shape] + ([] if left_out is None else [np.shape(left_out)])
        raise DataError(f"predicted, measured and left_out have the shapes {listing(shapes)}; give the same for all.")
    found = np.full(len(measured), np.nan)
    for rows in within_contexts(contexts, len(measured)):
        if len(rows) > 1:
            own = None if left_out is None else left_out[rows]
            found[rows] = _scores(_distances(predicted[rows], measured[rows], metric, own))
    return found


def within_contexts(contexts: Sequence[object] | None, n_effects: int) -> list[np.ndarray]:
    """Return the rows of the effects of each context, int64; of all, where there are no contexts.

    Raises
    ------
    DataError
        If there is not one context for each effect.
    """
    if contexts is None:
        return [np.arange(n_effects)]
    if len(contexts) != n_effects:
        raise DataError(f"contexts has {len(contexts)} entries for {n_effects} effects; give one for each.")
    codes = pd.factorize(pd.Series(list(contexts), dtype=object), use_na_sentinel=False)[0]
    return [np.flatnonzero(codes == code) for code in range(int(codes.max(initial=-1)) + 1)]


def effect_ranks(predicted: np.ndarray, known: np.ndarray, contexts: Sequence[object] | None) -> np.ndarray:
    """Return the normalised rank of the own effect in its context; that of prediction i is ``known[i]``."""
    found = np.empty(len(predicted))
    for rows in within_contexts(contexts, len(predicted)):
        found[rows] = _ranks_of_all(predicted[rows], known[rows])
    return found


def _scores(distances: np.ndarray) -> np.ndarray:
    mine = np.diagonal(distances)[:, None]
    near = np.isclose(distances, mine, rtol=1e-12, atol=1e-12)
    nearer = ((distances < mine) & ~near).sum(axis=1) + 0.5 * (near.sum(axis=1) - 1)
    return 1 - nearer / len(distances)


def own_genes(targets: list[tuple[str, ...]], genes: np.ndarray) -> np.ndarray:
    """Return which genes are the targets of each perturbation, bool, shape (Q, G)."""
    number = {str(gene): column for column, gene in enumerate(genes)}
    found = np.zeros((len(targets), len(genes)), dtype=bool)
    for row, some in enumerate(targets):
        found[row, [number[target] for target in some if target in number]] = True
    return found


def _distances(predicted: np.ndarray, measured: np.ndarray, metric: str, left_out: np.ndarray | None) -> np.ndarray:
    """Return the distance of each prediction to each measured effect, shape (Q, Q)."""
    from scipy.spatial.distance import cdist

    none = np.empty(0, dtype=np.int64)
    without = [none if left_out is None else np.flatnonzero(left_out[row]) for row in range(len(predicted))]
    # The few genes that are left out are taken off, rather than distances computed anew for each prediction.
    if metric != "cosine":
        found = cdist(predicted, measured, "cityblock" if metric == "l1" else "sqeuclidean")
        for row, genes in enumerate(without):
            away = np.abs(predicted[row, genes] - measured[:, genes])
            found[row] -= (away if metric == "l1" else np.square(away)).sum(axis=1)
        return found if metric == "l1" else np.sqrt(np.maximum(found, 0.0))
    found = predicted @ measured.T
    lengths = np.tile(np.square(measured).sum(axis=1), (len(predicted), 1))
    own = np.square(predicted).sum(axis=1)
    for row, genes in enumerate(without):
        found[row] -= measured[:, genes] @ predicted[row, genes]
        lengths[row] -= np.square(measured[:, genes]).sum(axis=1)
        own[row] -= np.square(predicted[row, genes]).sum()
    lengths = np.sqrt(np.maximum(lengths, 0.0) * np.maximum(own, 0.0)[:, None])
    # No effect has no direction: it is as far from all as what is at a right angle.
    return 1 - np.divide(found, lengths, out=np.zeros_like(lengths), where=lengths > 0)


def _ranks_of_all(predicted: np.ndarray, known: np.ndarray) -> np.ndarray:
    if len(known) < 2:
        return np.full(len(predicted), np.nan)
    similarity = _unit(predicted) @ _unit(known).T
    own = np.diagonal(similarity)[:, None]
    near = np.isclose(similarity, own, rtol=0, atol=1e-9)
    above = ((similarity > own) & ~near).sum(axis=1) + 0.5 * (near.sum(axis=1) - 1)
    return above / (len(known) - 1)


def _unit(values: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return np.divide(values, lengths, out=np.zeros_like(values), where=lengths > 0)


METRICS = {
    "pearson_delta": True,
    "pearson_delta_top20": True,
    "cosine": True,
    "mse": False,
    "mae": False,
    "wmse": False,
    "weighted_r2_delta": True,
    "direction_accuracy": True,
    "rank": False,
}
"""The metrics, and whether more of one is better."""

TOP_GENES = 20

_NOISE = 2.0
"""How much larger the noise of a measured effect is under weights that grow with it."""


def de_weights(scores: np.ndarray) -> np.ndarray:
    """Return weights of genes that grow with their differential expression, mean 1 a perturbation.

    After the weighted error of Mejia et al. (arXiv:2506.22641): with s the absolute value of the score of a gene, the
    weight is ``((s - min s) / (max s - min s))^2``, divided by its mean over genes.

    Parameters
    ----------
    scores
        Scores of differential expression, e.g. Welch's t, shape (Q, G).

    Returns
    -------
    Float64, shape (Q, G); ones where all scores of a perturbation are the same.

    Examples
    --------
    >>> de_weights(np.array([[0.0, -1.0, 2.0]])).tolist()
    [[0.0, 0.6, 2.4]]
    """
    size = np.abs(np.asarray(scores, dtype=np.float64))
    least = size.min(axis=1, keepdims=True)
    spread = size.max(axis=1, keepdims=True) - least
    weights = np.square(np.divide(size - least, spread, out=np.ones_like(size), where=spread > 0))
    return weights / weights.mean(axis=1, keepdims=True)


def top_genes(scores: np.ndarray, n: int = TOP_GENES) -> np.ndarray:
    """Return the `n` genes (all if there are fewer) with the largest absolute score, int64, shape (Q, K)."""
    return np.argsort(-np.abs(scores), axis=1, kind="stable")[:, :n]


def de_genes(p_values: np.ndarray, *, fdr: float = 0.05) -> np.ndarray:
    """Return which genes change, at a rate of false discoveries after Benjamini and Hochberg (1995).

    Parameters
    ----------
    p_values
        Of each gene, e.g. of Welch's t-test, shape (Q, G).
    fdr
        Rate of false discoveries within each perturbation, over all its genes.

    Returns
    -------
    Bool, shape (Q, G).

    Examples
    --------
    >>> de_genes(np.array([[0.001, 0.02, 0.2, 0.9]])).tolist()
    [[True, True, False, False]]
    """
    from scipy import stats

    return stats.false_discovery_control(np.asarray(p_values, dtype=np.float64), axis=1) <= fdr


def score_deltas(
    predicted: np.ndarray,
    measured: np.ndarray,
    scores: np.ndarray,
    changed: np.ndarray | None = None,
    center: np.ndarray | None = None,
    contexts: Sequence[object] | None = None,
) -> pd.DataFrame:
    """Score predicted effects.

    Parameters
    ----------
    predicted, measured
        Change of the mean log1p CP10K against controls, shape (Q, G).
    scores
        Score of the differential expression of the measured effects, e.g. Welch's t, shape (Q, G).
    changed
        Genes that change, as :func:`de_genes` finds them, bool, shape (Q, G); without, there is no
        ``direction_accuracy``.
    center
        The mean effect that ``weighted_r2_delta`` is seen from, shape (Q, G), or (G,) for all; without, it is the mean
        of the measured ones.
    contexts
        Context of each effect, Q of them, within which ``rank`` compares; without, there is one only.

    Returns
    -------
    One row for each perturbation, with the columns

    ``pearson_delta``, ``pearson_delta_top20``, ``cosine``
        Correlation over all genes, over the 20 genes with the largest absolute score, and cosine similarity. A
        prediction that is the same for all genes knows nothing of them, and has 0.
    ``mse``, ``mae``, ``wmse``
        Mean squared error, mean absolute error, and mean squared error weighted by :func:`de_weights`.
    ``weighted_r2_delta``
        Share of the variance over genes that is explained, after the weighted R2 of deltas of Mejia et al.: with w the
        weights above, d the measured effect less `center`, p the predicted one less `center` and m the weighted mean of
        d, ``1 - sum w (d - p)^2 / sum w (d - m)^2``. 1 is perfect, and a prediction of the center itself has 0 or less:
        what all perturbations have in common earns nothing. NaN where d is the same for all genes, e.g. for a single
        effect without a `center`.
    ``direction_accuracy``
        Share of the genes that change for which the sign of the change is predicted; no change is a wrong sign. NaN
        where no gene changes.
    ``rank``
        Share of the measured effects of the same context that are more similar to the prediction (cosine; ties count
        half) than the own one: 0 is perfect, 0.5 chance, which is what one prediction for all of a context has on
        average. After the rank metrics of PerturBench (Wu et al., arXiv:2408.10609). NaN without another effect in the
        context. Effects of other contexts are no candidates, since who knows the context alone would be right more
        often than by chance, nor are those of the training: their own mean would be nearer to them than to any other.

    Raises
    ------
    DataError
        If the shapes differ, or a prediction is not a number.

    Examples
    --------
    >>> measured = np.array([[1.0, 0.0, -1.0], [0.0, 2.0, 0.0]])
    >>> score_deltas(measured * 2, measured, measured)["rank"].tolist()
    [0.0, 0.0]
    """
    predicted, measured = np.asarray(predicted, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    if not predicted.shape == measured.shape == np.shape(scores):
        raise DataError(
            f"predicted, measured and scores have the shapes {predicted.shape}, {measured.shape} and "
            f"{np.shape(scores)}; give one row a perturbation and one column a gene."
        )
    if not np.isfinite(predicted).all():
        raise DataError("predicted holds values that are not numbers; effects cannot be scored.")
    if changed is not None and np.shape(changed) != measured.shape:
        raise DataError(
            f"changed has the shape {np.shape(changed)}, the effects {measured.shape}; give the same genes."
        )
    top = top_genes(scores)
    error = predicted - measured
    weights = de_weights(scores)
    return pd.DataFrame(
        {
            "pearson_delta": _pearson(predicted, measured),
            "pearson_delta_top20": _pearson(
                np.take_along_axis(predicted, top, axis=1), np.take_along_axis(measured, top, axis=1)
            ),
            "cosine": _cosine(predicted, measured),
            "mse": np.square(error).mean(axis=1),
            "mae": np.abs(error).mean(axis=1),
            "wmse": (weights * np.square(error)).mean(axis=1),
            "weighted_r2_delta": _explained(error, measured, weights, center),
            "direction_accuracy": _directions(predicted, measured, changed),
            "rank": effect_ranks(predicted, measured, contexts),
        }
    )


def technical_duplicate(
    expression: sparse.csr_matrix,
    groups: np.ndarray,
    controls: np.ndarray,
    center: np.ndarray | None = None,
    contexts: Sequence[object] | None = None,
    *,
    n_splits: int = 5,
    seed: int = 0,
) -> pd.DataFrame:
    """Score a second experiment as a prediction of the first: what is left to reach under the noise of few cells.

    The cells of each group, controls included, are split into two halves at random; the effect in the one half is
    scored as a prediction of that in the other. Which genes count, and how much, is told by the half that plays the
    measured one alone: were it told by all cells, the prediction would have had a part in it. A half has half of the
    cells, so that the figures are brought to whole groups: correlations and cosines r by the formula of Spearman and
    Brown, ``2 r / (1 + r)``, squared errors by 1/2, absolute ones by 1/sqrt(2), and what is not explained,
    ``u = 1 - weighted_r2_delta``, as ``3 u / (6 - 2 u)``. This is the last: with v the noise of the predicted half, the
    weights, which grow with the measured noise, raise that to k v, so that ``u = (1 + k) v / (k v + T)`` for effects of
    the size T, and v is halved in whole groups; k is 1 for strong effects and about 3, the kurtosis of noise, for none,
    of which 2 is taken. `rank` and `direction_accuracy` are left as they are, which makes the one a little too high
    and the other a little too low.

    Parameters
    ----------
    expression
        log1p CP10K of cells, shape (N, G).
    groups
        Group of each cell: 0 to Q - 1 for perturbations, from Q on for their controls, shape (N,).
    controls
        For each perturbation the group of its controls, shape (Q,).
    center, contexts
        See :func:`score_deltas`.
    n_splits
        Splits, of which the mean is returned.
    seed
        Seed of the splits.

    Returns
    -------
    As :func:`score_deltas`; NaN where a perturbation, or its controls, has fewer than two cells.

    Examples
    --------
    >>> cells = np.random.default_rng(0).normal(1.0, 0.3, size=(80, 20))
    >>> cells[:40, 0] += 2.0
    >>> table = technical_duplicate(sparse.csr_matrix(cells), np.repeat([0, 1], 40), controls=np.array([1]))
    >>> (table["pearson_delta"] > 0.9).tolist()
    [True]
    """
    check_count("n_splits", n_splits, "splits")
    n_groups = int(max(groups.max(), controls.max())) + 1
    sizes = np.bincount(groups, minlength=n_groups)
    rng = np.random.default_rng(seed)
    perturbed = np.arange(len(controls))
    tables = []
    for _ in range(n_splits):
        half = halves(groups, sizes, rng)
        both = moments_of(expression, groups + n_groups * half, 2 * n_groups)
        one = effects_of(both, perturbed, controls).deltas
        other = effects_of(both, perturbed + n_groups, controls + n_groups)
        changed = de_genes(other.p_values)
        tables.append(of_whole(score_deltas(one, other.deltas, other.scores, changed, center, contexts)))
    mean = sum(tables[1:], start=tables[0]) / n_splits
    few = (sizes[perturbed] < 2) | (sizes[controls] < 2)
    mean.loc[few] = np.nan
    return mean


def halves(groups: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the half, 0 or 1, that each cell falls into at random within its group, int64, shape (N,)."""
    # Ranks of random numbers within a group are even for one half and odd for the other.
    order = np.lexsort([rng.random(len(groups)), groups])
    half = np.empty(len(groups), dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    half[order] = (np.arange(len(groups)) - starts[groups[order]]) % 2
    return half


def of_whole(table: pd.DataFrame) -> pd.DataFrame:
    """Bring figures of halves to whole groups, as :func:`technical_duplicate` says; others stay as they are."""
    return table.apply(lambda column: _OF_WHOLE.get(str(column.name), _as_it_is)(column))


def calibrated(table: pd.DataFrame, base: str, ceiling: str) -> pd.DataFrame:
    """Return ``(m - base) / (ceiling - base)`` of each metric: 0 is as good as `base`, 1 as `ceiling`.

    Parameters
    ----------
    table
        Metrics (columns) of methods (rows).
    base, ceiling
        Rows of the table, e.g. ``"train_mean"`` and ``"technical_duplicate"``.

    Returns
    -------
    A table like `table`, with NaN for metrics in which the ceiling is not better than the base: there is nothing that a
    method could show.

    Examples
    --------
    >>> scores = pd.DataFrame({"mse": [4.0, 2.0, 1.0]}, index=["train_mean", "scforge", "technical_duplicate"])
    >>> round(float(calibrated(scores, "train_mean", "technical_duplicate").loc["scforge", "mse"]), 3)
    0.667
    """
    columns = [name for name in table.columns if name in METRICS]
    better = np.array([1.0 if METRICS[name] else -1.0 for name in columns])
    room = table.loc[ceiling, columns].to_numpy(dtype=np.float64) - table.loc[base, columns].to_numpy(dtype=np.float64)
    gain = table[columns].to_numpy(dtype=np.float64) - table.loc[base, columns].to_numpy(dtype=np.float64)
    shown = np.where(room * better > 0, room, np.nan)
    return pd.DataFrame(gain / shown, index=table.index, columns=columns)


def comparable(effects: pd.DataFrame, ceiling: str) -> pd.DataFrame:
    """Return the scores of those effects that the ceiling has, so that means are over the same ones.

    Parameters
    ----------
    effects
        Scores (columns) of each effect by each method (rows), with the columns ``method``, ``perturbation`` and
        ``context``.
    ceiling
        The method that may lack some, e.g. ``"technical_duplicate"``, which has none for effects of single cells.

    Examples
    --------
    >>> scores = pd.DataFrame({"method": ["a", "a", "top", "top"], "perturbation": ["G1", "G2"] * 2, "context": "all"})
    >>> comparable(scores.assign(mse=[3.0, 5.0, 1.0, np.nan]), "top")["mse"].tolist()
    [3.0, 1.0]
    """
    columns = [name for name in effects.columns if name in METRICS]
    keys = pd.MultiIndex.from_frame(effects[["perturbation", "context"]])
    scored = (effects["method"] == ceiling).to_numpy() & effects[columns].notna().any(axis=1).to_numpy()
    return effects[keys.isin(keys[scored])]


def _as_it_is(values: pd.Series) -> pd.Series:
    return values


def _spearman_brown(values: pd.Series) -> pd.Series:
    # Halves that contradict each other have nothing to correct; 2 r / (1 + r) runs to minus infinity there.
    return (2 * values / (1 + values)).where(values > 0, values)


def _explained_by_whole(values: pd.Series) -> pd.Series:
    missed = 1 - values
    # With no effect at all, halves and wholes miss as much; more than that is chance.
    most = (1 + _NOISE) / _NOISE
    whole = (1 + _NOISE) * missed / (2 * (1 + _NOISE) - _NOISE * missed.clip(upper=most))
    return 1 - whole.where(missed < most, missed)


_OF_WHOLE: dict[str, Callable[[pd.Series], pd.Series]] = {
    "pearson_delta": _spearman_brown,
    "pearson_delta_top20": _spearman_brown,
    "cosine": _spearman_brown,
    "mse": lambda values: values / 2,
    "wmse": lambda values: values / 2,
    "mae": lambda values: values / np.sqrt(2),
    "weighted_r2_delta": _explained_by_whole,
}


def _explained(error: np.ndarray, measured: np.ndarray, weights: np.ndarray, center: np.ndarray | None) -> np.ndarray:
    rest = measured - (measured.mean(axis=0) if center is None else center)
    # Weights have a mean of 1.
    spread = (weights * np.square(rest - (weights * rest).mean(axis=1, keepdims=True))).mean(axis=1)
    known = spread > 1e-12 * np.square(measured).max(axis=1, initial=0.0)
    missed = (weights * np.square(error)).mean(axis=1)
    return 1 - np.divide(missed, spread, out=np.full(len(error), np.nan), where=known)


def _directions(predicted: np.ndarray, measured: np.ndarray, changed: np.ndarray | None) -> np.ndarray:
    if changed is None:
        return np.full(len(predicted), np.nan)
    n_changed = changed.sum(axis=1)
    right = (changed & (np.sign(predicted) == np.sign(measured))).sum(axis=1)
    return np.divide(right, n_changed, out=np.full(len(predicted), np.nan), where=n_changed > 0)


def _cosine(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return np.divide((one * other).sum(axis=1), lengths, out=np.zeros(len(one)), where=lengths > 0)


def _pearson(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return _cosine(_centred(one), _centred(other))


def _centred(values: np.ndarray) -> np.ndarray:
    centred = values - values.mean(axis=1, keepdims=True)
    # What rounding leaves of a constant is no direction.
    flat = np.ptp(values, axis=1) <= 1e-12 * np.abs(values).max(axis=1, initial=0.0)
    centred[flat] = 0.0
    return centred


ALL = "all"
"""Name of the context where there is one only."""


class Effect(NamedTuple):
    """A perturbation in a context."""

    targets: tuple[str, ...]
    context: str


@dataclass(frozen=True)
class EffectKeys:
    """Where an AnnData says what was done to a cell.

    Attributes
    ----------
    perturbation_key, control, separator
        As in ``scforge.data.perturbation.PerturbationKeys``.
    context_key
        Column of obs with the context, e.g. the cell type; None: there is one only.
    layer
        Key in layers with the counts or log-normalised values; None reads X.
    """

    perturbation_key: str
    control: str
    context_key: str | None = None
    separator: str | None = "+"
    layer: str | None = None

    def name_of(self, targets: Sequence[str]) -> str:
        """Return the label of a perturbation."""
        return (self.separator or "+").join(targets)

    def effect(self, label: str, context: str = ALL) -> Effect:
        """Return the effect that a label means."""
        keys = PerturbationKeys(self.perturbation_key, control=self.control, separator=self.separator)
        labels = pd.DataFrame({self.perturbation_key: [label, self.control]})
        return Effect(parse_perturbations(labels, keys).targets[0], context)


@dataclass(frozen=True)
class PerturbedCells:
    """Cells with what was done to them.

    Attributes
    ----------
    expression
        log1p CP10K, CSR, float32 or float64, shape (N, G).
    genes
        Names, G of them.
    names
        Names of the cells, N of them.
    effects
        What was done to the perturbed ones, sorted, Q of them.
    contexts
        Names of the contexts, sorted, C of them.
    groups
        Number of the effect of each cell; Q plus the number of the context for controls, int64, shape (N,).
    """

    expression: sparse.csr_matrix
    genes: pd.Index
    names: pd.Index
    effects: tuple[Effect, ...]
    contexts: tuple[str, ...]
    groups: np.ndarray

    @classmethod
    def read(cls, adata: AnnData, keys: EffectKeys, *, argument: str, made: bool = False) -> PerturbedCells:
        """Read them.

        Parameters
        ----------
        adata
            Counts, or log1p of counts per 10,000.
        keys
            Its columns.
        argument
            What it is called in messages.
        made
            Whether the cells are predicted ones, which need no controls and no exact total, and are read from X where
            they lack the layer.

        Raises
        ------
        DataError
            If a column is missing or incomplete, genes have no names of their own, or the values are of another kind.
        """
        check_is_adata(adata, argument=argument)
        check_column("perturbation_key", keys.perturbation_key, adata.obs)
        if adata.var_names.has_duplicates:
            twice = adata.var_names[adata.var_names.duplicated()]
            raise DataError(f"{argument}.var_names has {listing(twice[:3])} more than once; name each gene once.")
        labels = adata.obs[[keys.perturbation_key]].astype(object)
        if made:
            # Predicted controls are not needed, but only labels with the control among them are read.
            labels = pd.concat([labels, pd.DataFrame({keys.perturbation_key: [keys.control]}, index=["control"])])
        parsed = parse_perturbations(
            labels, PerturbationKeys(keys.perturbation_key, control=keys.control, separator=keys.separator)
        )
        targets = parsed.targets[: adata.n_obs]
        if keys.context_key is None:
            places = [ALL] * adata.n_obs
        else:
            check_column("context_key", keys.context_key, adata.obs)
            column = adata.obs[keys.context_key]
            if n_missing := int(column.isna().sum()):
                raise DataError(
                    f"{argument}.obs[{keys.context_key!r}] has no value for {n_missing} of {adata.n_obs} cells; label "
                    "them or leave them out."
                )
            places = column.astype(str).tolist()
        # Models predict into X, whatever layer the measured values are in.
        layer = None if made and keys.layer not in adata.layers else keys.layer
        pairs = [Effect(some, place) for some, place in zip(targets, places, strict=True)]
        effects = tuple(sorted({pair for pair in pairs if pair.targets}))
        contexts = tuple(sorted(set(places)))
        number = {effect: i for i, effect in enumerate(effects)}
        number |= {Effect((), place): len(effects) + i for i, place in enumerate(contexts)}
        return cls(
            log_normalised(adata, layer, argument=argument, made=made),
            adata.var_names,
            adata.obs_names,
            effects,
            contexts,
            np.array([number[pair] for pair in pairs], dtype=np.int64),
        )

    @property
    def controls(self) -> np.ndarray:
        """Group of the controls of each effect, int64, shape (Q,)."""
        return np.array([len(self.effects) + self.contexts.index(e.context) for e in self.effects], dtype=np.int64)

    @property
    def n_groups(self) -> int:
        """Number of groups, Q + C."""
        return len(self.effects) + len(self.contexts)

    def over(self, genes: pd.Index, *, argument: str) -> PerturbedCells:
        """Return the cells over these genes, in this order.

        Raises
        ------
        DataError
            If one is missing.
        """
        columns = self.genes.get_indexer(genes)
        if (missing := columns < 0).any():
            raise DataError(
                f"{argument} lacks {int(missing.sum())} of {len(genes)} genes (first: {str(genes[missing][0])!r}"
                f"{did_you_mean(genes[missing][0], self.genes[:5000])}); leave them out of the measured cells too, or "
                "use evaluate_perturbations, which scores the genes that all have."
            )
        matrix = self.expression[:, columns].tocsr()
        return PerturbedCells(matrix, genes, self.names, self.effects, self.contexts, self.groups)

    def moments(self) -> Moments:
        """Return mean and variance of each group."""
        return moments_of(self.expression, self.groups, self.n_groups)

    def measured(self, groups: Moments, *, argument: str) -> Effects:
        """Return the effects against the controls of the same context.

        Raises
        ------
        DataError
            If there is none, or a context has no controls.
        """
        if not self.effects:
            raise DataError(f"{argument} has no perturbed cells, only controls; there is no effect to measure.")
        without = sorted({e.context for e, n in zip(self.effects, groups.n[self.controls], strict=True) if not n})
        if without:
            raise DataError(
                f"{argument} has no control cell in the contexts {listing(without)}; add controls of its own there."
            )
        return effects_of(groups, np.arange(len(self.effects)), self.controls)


_PROFILES = ("full", "minimal", "vcc", "de", "anndata", "pds")


def cell_eval_scores(
    predicted: AnnData,
    real: AnnData,
    *,
    perturbation_key: str,
    control: str,
    context_key: str | None = None,
    separator: str | None = "+",
    layer: str | None = None,
    profile: str = "full",
    skip_metrics: Sequence[str] = (),
    n_threads: int = 1,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Score predicted cells with cell-eval.

    Both are handed over as log1p CP10K (cell-eval itself would scale counts to the median of their totals). Needs
    ``pip install 'scforge[eval]'``.

    Parameters
    ----------
    predicted
        Predicted cells of all perturbations that were measured; its controls are those that effects are seen from.
        Without controls, those of `real` are taken.
    real
        Measured cells with controls, over the same genes in any order.
    perturbation_key, control, context_key, separator, layer
        As for :class:`PerturbationPrediction`. Contexts are scored one by one, because cell-eval knows none.
    profile
        ``"full"``, ``"minimal"``, ``"vcc"`` (the Virtual Cell Challenge), ``"de"``, ``"anndata"`` or ``"pds"``.
    skip_metrics
        Names of metrics of cell-eval that are left out.
    n_threads
        Threads of its tests of differential expression.

    Returns
    -------
    cell-eval's two tables: one row a perturbation (with a context: the column ``context`` first), and its summary
    (count, mean, spread and quantiles in the column ``statistic``) of each metric.

    Raises
    ------
    MissingFileError
        If cell-eval is not installed.
    DataError
        If a perturbation, control or gene is missing in `predicted`, or a figure cannot be computed.
    OptionError
        If the profile is unknown.

    See Also
    --------
    PerturbationPrediction : ours: ``pearson_delta``, ``mse`` (cell-eval's ``mse_delta``), ``mae`` (``mae_delta``) and
        ``discrimination_*`` are the same figures, unless controls are of several contexts.

    Examples
    --------
    >>> import anndata, numpy as np
    >>> def experiment(seed, genes):
    ...     names = np.repeat(["control", *(f"gene{gene}" for gene in genes)], 30)
    ...     counts = np.random.default_rng(seed).poisson(5.0, size=(len(names), 20)).astype("float32")
    ...     for number, gene in enumerate(genes, start=1):
    ...         counts[30 * number : 30 * (number + 1), gene] *= 3
    ...     obs = pd.DataFrame({"target": names}, index=[f"{seed}-{i}" for i in range(len(names))])
    ...     return anndata.AnnData(counts, obs, pd.DataFrame(index=[f"gene{i}" for i in range(20)]))
    >>> keys = {"perturbation_key": "target", "control": "control"}
    >>> predicted, real = experiment(0, [3, 4]), experiment(1, [3, 4])
    >>> table, summary = cell_eval_scores(predicted, real, **keys, profile="minimal")
    >>> bool(summary.set_index("statistic").loc["mean", "pearson_delta"] > 0.5)
    True
    """
    if profile not in _PROFILES:
        raise OptionError(f"profile={profile!r} is none of {listing(_PROFILES)}.")
    check_count("n_threads", n_threads, "threads")
    with warnings.catch_warnings():
        # Its dependencies warn about each other.
        warnings.simplefilter("ignore")
        package = _package()
    keys = EffectKeys(perturbation_key, control, context_key, separator, layer)
    measured = PerturbedCells.read(real, keys, argument="real")
    made = PerturbedCells.read(predicted, keys, argument="predicted", made=True).over(
        measured.genes, argument="predicted"
    )
    tables: list[pd.DataFrame] = []
    summaries: list[pd.DataFrame] = []
    for context in sorted({effect.context for effect in measured.effects}):
        one = _adata(measured, context, keys, [e for e in measured.effects if e.context == context])
        other = _adata(made, context, keys, [e for e in measured.effects if e.context == context], measured)
        table, summary = _run(package, other, one, profile, list(skip_metrics), n_threads)
        for frame, found in ((table, tables), (summary, summaries)):
            if context_key is not None:
                frame.insert(0, "context", context)
            found.append(frame)
    return pd.concat(tables, ignore_index=True), pd.concat(summaries, ignore_index=True)


def _package() -> Any:
    try:
        return import_module("cell_eval")
    except ModuleNotFoundError as error:
        if error.name != "cell_eval":
            raise
        raise MissingFileError("cell-eval is not installed; pip install 'scforge[eval]'.") from error


def _adata(
    cells: PerturbedCells, context: str, keys: EffectKeys, effects: list[Effect], fallback: PerturbedCells | None = None
) -> AnnData:
    """Return the cells of a context as cell-eval reads them."""
    import anndata
    import numpy as np
    from scipy import sparse

    groups = [np.flatnonzero(cells.groups == _group(cells, effect)) for effect in effects]
    without = [keys.name_of(effect.targets) for effect, rows in zip(effects, groups, strict=True) if not len(rows)]
    if without:
        raise DataError(f"predicted has no cells of {listing(without)} (context {context!r}); predict all of real.")
    source = cells
    plain = np.flatnonzero(cells.groups == _group(cells, Effect((), context)))
    if not len(plain) and fallback is not None:
        source, plain = fallback, np.flatnonzero(fallback.groups == _group(fallback, Effect((), context)))
    if not len(plain):
        raise DataError(f"real has no control cell in the context {context!r}; add controls of its own there.")
    parts = [cells.expression[rows] for rows in groups] + [source.expression[plain]]
    labels = np.repeat(
        [keys.name_of(effect.targets) for effect in effects] + [keys.control], [part.shape[0] for part in parts]
    )
    obs = pd.DataFrame({"target": labels.astype(object)}, index=[f"cell {i}" for i in range(len(labels))])
    matrix = sparse.vstack(parts, format="csr")
    return anndata.AnnData(
        matrix, obs=obs, var=pd.DataFrame(index=cells.genes.astype(str)), uns={"control": keys.control}
    )


def _group(cells: PerturbedCells, effect: Effect) -> int:
    if effect.targets:
        return cells.effects.index(effect) if effect in cells.effects else -1
    return len(cells.effects) + cells.contexts.index(effect.context) if effect.context in cells.contexts else -1


def _run(
    package: Any, predicted: AnnData, real: AnnData, profile: str, skip: list[str], n_threads: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    with tempfile.TemporaryDirectory() as folder, _quiet():
        evaluator = package.MetricsEvaluator(
            predicted,
            real,
            control_pert=real.uns["control"],
            pert_col="target",
            num_threads=n_threads,
            outdir=folder,
            skip_de=profile in ("anndata", "pds"),
        )
        table, summary = evaluator.compute(
            profile=profile, skip_metrics=skip or None, write_csv=False, break_on_error=True
        )
    return table.to_pandas(), summary.to_pandas()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep its progress bars to itself, and the warnings of its dependencies."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_BLOCK = 1 << 24
"""Distances that are held at once."""


def mean_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean Euclidean distance between all pairs of rows of two arrays, shapes (N, D) and (M, D)."""
    from scipy.spatial.distance import cdist

    rows = max(1, _BLOCK // max(len(other), 1))
    total = sum(float(cdist(one[start : start + rows], other).sum()) for start in range(0, len(one), rows))
    return total / (len(one) * len(other))


def energy_distance(
    one: np.ndarray,
    other: np.ndarray,
    *,
    within: tuple[float | None, float | None] = (None, None),
    unbiased: bool = False,
) -> float:
    """Return the energy distance between two groups of cells.

    With x, x' of the one group and y, y' of the other, ``2 E|x - y| - E|x - x'| - E|y - y'|`` with Euclidean distances,
    means over all pairs, each cell with itself among them (Szekely and Rizzo 2013; the E-distance of Peidli et al., Nat
    Methods 2024, takes squared distances). This is ``edistance`` of pertpy. It is 0 for the same cells, and positive
    for two samples of the same distribution, the more so the fewer cells there are.

    Parameters
    ----------
    one, other
        Coordinates, shapes (N, D) and (M, D).
    within
        The mean distances within each group, each cell with itself among them, where they are known.
    unbiased
        Leave the distance of each cell to itself out: 0 on average for two samples of the same distribution, however
        few cells there are, and NaN for a group of one cell.

    Returns
    -------
    The distance, in the unit of the coordinates.

    Raises
    ------
    DataError
        If a group is empty or has other coordinates than the other.

    Examples
    --------
    >>> energy_distance(np.zeros((3, 2)), np.ones((4, 2)) * [3.0, 4.0])
    10.0
    """
    one, other = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if not len(one) or not len(other) or one.shape[1:] != other.shape[1:]:
        raise DataError(
            f"the groups have the shapes {one.shape} and {other.shape}; give cells with the same coordinates."
        )
    first, second = (
        mean_distance(group, group) if known is None else known
        for group, known in zip((one, other), within, strict=True)
    )
    if unbiased:
        if min(len(one), len(other)) < 2:
            return float("nan")
        first, second = first * len(one) / (len(one) - 1), second * len(other) / (len(other) - 1)
    return 2 * mean_distance(one, other) - first - second


def distances(
    real: AnnData,
    predictions: AnnData | Mapping[str, AnnData],
    *,
    perturbation_key: str,
    control: str,
    context_key: str | None = None,
    separator: str | None = "+",
    metric: str = "edistance",
    obsm_key: str | None = None,
    layer: str | None = None,
) -> pd.DataFrame:
    """Return how far predicted cells are from the measured ones of the same perturbation, by pertpy.

    Parameters
    ----------
    real
        Measured cells, with controls.
    predictions
        Predicted cells; several by name.
    perturbation_key, control, context_key, separator
        Columns of obs, as for :func:`evaluate_perturbations`.
    metric
        Name of a distance of :class:`pertpy.tl.Distance`, e.g. ``"edistance"``, ``"mmd"`` or ``"wasserstein"``.
    obsm_key
        Coordinates in obsm, e.g. an embedding of all cells by the same model; None takes log1p CP10K over the genes
        that all have, which is slow for distances between cells.
    layer
        Key in layers with counts or log1p CP10K; None reads X.

    Returns
    -------
    One row for each method and effect: ``method``, ``perturbation``, ``context`` and ``distance``. The method
    ``"control"``, what controls are away, is the baseline: a prediction that is not nearer has learnt nothing.

    Raises
    ------
    OptionError
        If pertpy does not know the metric.
    DataError
        If coordinates are missing, or an effect is not predicted.

    Examples
    --------
    >>> import anndata
    >>> def experiment(seed, genes):
    ...     names = np.repeat(["control", *(f"gene{gene}" for gene in genes)], 30)
    ...     counts = np.random.default_rng(seed).poisson(5.0, size=(len(names), 20)).astype("float32")
    ...     for number, gene in enumerate(genes, start=1):
    ...         counts[30 * number : 30 * (number + 1), gene] *= 3
    ...     obs = pd.DataFrame({"target": names}, index=[f"{seed}-{i}" for i in range(len(names))])
    ...     return anndata.AnnData(counts, obs, pd.DataFrame(index=[f"gene{i}" for i in range(20)]))
    >>> keys = {"perturbation_key": "target", "control": "control"}
    >>> table = distances(experiment(0, [3]), experiment(1, [3]), **keys)
    >>> table.sort_values("distance")["method"].tolist()
    ['prediction', 'control']
    """
    from pertpy.tools import Distance

    try:
        away: Callable[[np.ndarray, np.ndarray], float] = Distance(cast("Any", metric), obsm_key="coordinates")
    except ValueError as error:
        raise OptionError(
            f"metric={metric!r} is no distance of pertpy; see pertpy.tl.Distance for its names."
        ) from error
    keys = EffectKeys(perturbation_key, control, context_key, separator, layer)
    named = dict(predictions) if isinstance(predictions, Mapping) else {"prediction": predictions}
    measured = PerturbedCells.read(real, keys, argument="real")
    made = {name: PerturbedCells.read(adata, keys, argument=name, made=True) for name, adata in named.items()}
    if obsm_key is None:
        genes = measured.genes
        for cells in made.values():
            genes = genes[genes.isin(cells.genes)]
        if not len(genes):
            raise DataError(
                "the predicted and the measured cells have no gene in common; use the same names in var_names."
            )
        of_real = measured.over(genes, argument="real").expression.toarray()
        of_made = {name: cells.over(genes, argument=name).expression.toarray() for name, cells in made.items()}
    else:
        of_real = _coordinates(real, obsm_key, "real")
        of_made = {name: _coordinates(adata, obsm_key, name) for name, adata in named.items()}
    rows = []
    for number, effect in enumerate(measured.effects):
        target = of_real[measured.groups == number]
        plain = of_real[measured.groups == measured.controls[number]]
        if not len(plain):
            raise DataError(
                f"real has no control cell in the context {effect.context!r}; add controls of its own there."
            )
        found = {"control": plain}
        for name, cells in made.items():
            if effect not in cells.effects:
                raise DataError(
                    f"{name} lacks {keys.name_of(effect.targets)!r} (context {effect.context!r}); predict it, "
                    "or leave it out of the measured cells."
                )
            found[name] = of_made[name][cells.groups == cells.effects.index(effect)]
        rows += [
            (name, keys.name_of(effect.targets), effect.context, float(away(group, target)))
            for name, group in found.items()
        ]
    return pd.DataFrame(rows, columns=["method", "perturbation", "context", "distance"])


def _coordinates(adata: AnnData, obsm_key: str, argument: str) -> np.ndarray:
    if obsm_key not in adata.obsm:
        raise DataError(f"obsm_key={obsm_key!r} is not in {argument}.obsm ({listing(adata.obsm)}); compute it first.")
    return np.asarray(adata.obsm[obsm_key], dtype=np.float64)
