"""How well predicted effects of perturbations fit measured ones: always on deltas, never on absolute expression.

Shapes: Q perturbations (in a context), G genes, K genes of the largest effect.

All-gene correlations of absolute expression are near 1 for a model that predicts no effect at all (on the Norman data
.99, beside .51 for deltas), so there is none here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_count
from scforge.errors import DataError
from scforge.eval.perturbation_discrimination import effect_ranks
from scforge.eval.pseudobulk import effects_of, moments_of

__all__ = [
    "METRICS",
    "calibrated",
    "comparable",
    "de_genes",
    "de_weights",
    "halves",
    "of_whole",
    "score_deltas",
    "technical_duplicate",
    "top_genes",
]

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
