"""Metrics of predicted perturbation effects, which agree with cell-eval and pertpy to 1e-6.

Shapes: N cells, G genes, Q effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from scipy import sparse

from scforge.errors import DataError, warn
from scforge.perturbation.effects import effects_of, moments_of

DISCRIMINATION = {"l1": "cityblock", "l2": "euclidean", "cosine": "cosine"}
"""Mapping from distances to their names in SciPy."""

METRICS = {
    "pearson_delta": True,
    "pearson_delta_top20": True,
    "cosine": True,
    "mse": False,
    "mae": False,
    "wmse": False,
    "weighted_r2_delta": True,
    "direction_accuracy": True,
    "de_overlap": True,
    "rank": False,
    "rank_in_screen": False,
}
"""Mapping from metrics to whether higher is better."""

TECHNICAL_DUPLICATE = "technical_duplicate"
"""Name of the technical duplicate, the best score that noise from the limited number of cells allows."""

_TOP_GENES = 20

_FEW_EFFECTS = 10
"""Minimum number of held-out effects; with fewer, `rank` has too few values, and intervals are unreliable."""

_NOISE = 2.0
"""Factor by which weights that grow with the noise of a measured effect amplify this noise."""

_N_SPLITS = 5
"""Number of splits into halves; scores are averaged over them."""


def discrimination_scores(
    predicted: np.ndarray,
    measured: np.ndarray,
    metric: str = "l1",
    left_out: np.ndarray | None = None,
    contexts: Sequence[object] | None = None,
) -> np.ndarray:
    """Return the perturbation discrimination score of the Virtual Cell Challenge, as in cell-eval.

    If r is the number of measured effects that are closer to the prediction than its true effect, the score is ``1 - r
    / Q``: 1 is perfect, ``1 / Q`` the minimum, and ``(1 + 1 / Q) / 2`` chance. Ties count half; in cell-eval their
    order is arbitrary.

    Parameters
    ----------
    predicted, measured
        Effects, shape (Q, G).
    metric
        ``"l1"``, ``"l2"`` or ``"cosine"``.
    left_out
        Genes to ignore for each prediction, bool, shape (Q, G). cell-eval ignores the perturbed gene, because its
        change is trivial to predict (:func:`own_genes`).
    contexts
        Context of each of the Q effects. Each effect is compared with the effects in the same context, and Q above is
        their number. If None, all effects have the same context.

    Returns
    -------
    The scores, float64, shape (Q,); NaN if there is no other effect in the context.

    Examples
    --------
    >>> effects = np.eye(4)
    >>> discrimination_scores(effects, effects).tolist(), discrimination_scores(effects * 0, effects).tolist()
    ([1.0, 1.0, 1.0, 1.0], [0.625, 0.625, 0.625, 0.625])
    """
    from scipy.spatial.distance import cdist

    left_out = np.zeros(measured.shape, dtype=bool) if left_out is None else left_out
    scores = np.full(len(measured), np.nan)
    for rows in _within(contexts, len(measured)):
        if len(rows) > 1:
            candidates, distances = measured[rows], np.empty((len(rows), len(rows)))
            for number, row in enumerate(rows):
                genes = left_out[row]
                kept = candidates[:, genes]
                candidates[:, genes] = 0.0
                effect = np.where(genes, 0.0, predicted[row])[None]
                distances[number] = cdist(effect, candidates, DISCRIMINATION[metric])[0]
                candidates[:, genes] = kept
            # No effect has no direction: it is as far from all as what is at a right angle.
            scores[rows] = 1 - _nearer(np.nan_to_num(distances, nan=1.0), atol=1e-12) / len(rows)
    return scores


def _within(contexts: Sequence[object] | None, n_effects: int) -> list[np.ndarray]:
    """Return the rows of the effects in each context, int64, or of all effects if there are no contexts."""
    if contexts is None:
        return [np.arange(n_effects)]
    codes = pd.factorize(np.asarray(contexts, dtype=object), use_na_sentinel=False)[0]
    return [np.flatnonzero(codes == code) for code in range(codes.max(initial=-1) + 1)]


def _nearer(distances: np.ndarray, *, atol: float) -> np.ndarray:
    """Return how many entries in each row are smaller than the diagonal entry; ties count half."""
    mine = np.diagonal(distances)[:, None]
    near = np.isclose(distances, mine, rtol=1e-12, atol=atol)
    return ((distances < mine) & ~near).sum(axis=1) + 0.5 * (near.sum(axis=1) - 1)


def own_genes(targets: Sequence[tuple[str, ...]], genes: np.ndarray) -> np.ndarray:
    """Return which genes are the targets of each perturbation, bool, shape (Q, G)."""
    columns = {str(gene): column for column, gene in enumerate(genes)}
    is_own = np.zeros((len(targets), len(genes)), dtype=bool)
    for row, names in enumerate(targets):
        is_own[row, [columns[name] for name in names if name in columns]] = True
    return is_own


def warn_of_few(n_effects: int) -> None:
    """Warn if too few effects are scored to compare methods."""
    if n_effects < _FEW_EFFECTS:
        warn(
            f"Only {n_effects} held-out effects are scored, fewer than {_FEW_EFFECTS}: 'rank' and intervals are "
            "unreliable; hold out more effects, or pool the tables of several folds."
        )


def de_weights(scores: np.ndarray) -> np.ndarray:
    """Return gene weights that increase with differential expression, with mean 1 for each perturbation.

    The weights follow the weighted error of Mejia et al. (arXiv:2506.22641). If s is the absolute score of a gene, its
    weight is ``((s - min s) / (max s - min s))^2``, divided by its mean over genes.

    Returns
    -------
    The weights, float64, shape (Q, G); 1 if all scores of a perturbation are equal.

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


def de_genes(p_values: np.ndarray) -> np.ndarray:
    """Return which genes change, at a false discovery rate of 5% (Benjamini and Hochberg 1995), bool, (Q, G).

    Examples
    --------
    >>> de_genes(np.array([[0.001, 0.02, 0.2, 0.9]])).tolist()
    [[True, True, False, False]]
    """
    from scipy import stats

    return stats.false_discovery_control(p_values, axis=1) <= 0.05


def score_deltas(
    predicted: np.ndarray,
    measured: np.ndarray,
    scores: np.ndarray,
    changed: np.ndarray | None = None,
    center: np.ndarray | None = None,
    contexts: Sequence[object] | None = None,
    trained: tuple[np.ndarray, Sequence[object]] | None = None,
) -> pd.DataFrame:
    """Score predicted effects.

    Parameters
    ----------
    predicted, measured
        Change in mean log1p CP10K relative to controls, shape (Q, G).
    scores
        Differential expression score of the measured effects, e.g. Welch's t, shape (Q, G).
    changed
        Genes that change, as returned by :func:`de_genes`, bool, shape (Q, G). If None, ``direction_accuracy`` is not
        computed.
    center
        Mean effect that ``weighted_r2_delta`` subtracts, shape (Q, G), or (G,) for all effects. If None, uses the mean
        of the measured effects.
    contexts
        Context of each of the Q effects, within which ``rank`` compares effects. If None, all effects have the same
        context.
    trained
        Measured training effects, shape (N, G), and their N contexts, for ``rank_in_screen``.

    Returns
    -------
    One row for each perturbation, with the columns

    ``pearson_delta``, ``pearson_delta_top20``, ``cosine``
        Correlation over all genes, over the 20 genes with the largest absolute score, and cosine similarity. Scores are
        0 for a prediction that is the same for all genes.
    ``mse``, ``mae``, ``wmse``
        Mean squared error, mean absolute error, and mean squared error weighted by :func:`de_weights`.
    ``weighted_r2_delta``
        Fraction of the variance over genes that is explained, like the weighted R2 of deltas of Mejia et al. Let w be
        the weights above, d the measured effect minus `center`, p the predicted effect minus `center` and m the
        weighted mean of d. The metric is ``1 - sum w (d - p)^2 / sum w (d - m)^2``. 1 is perfect; predicting the center
        itself scores 0 or less. NaN if d is the same for all genes, e.g. for a single effect without a `center`.
    ``direction_accuracy``
        Fraction of the changed genes for which the sign of the change is predicted correctly; predicting no change
        counts as wrong. NaN if no gene changes.
    ``de_overlap``
        Fraction of the K changed genes that are among the K largest predicted changes; ties share their ranks.
        Predicting no change scores K / G, which is chance. NaN if no gene changes.
    ``rank``
        Fraction of the measured effects in the same context that are more similar to the prediction (cosine; ties count
        half) than its true effect. 0 is perfect, and 0.5 is chance: the mean if one prediction is used for all effects
        of a context. The metric follows the rank metrics of PerturBench (Wu et al., arXiv:2408.10609). NaN if there is
        no other effect in the context. Effects of other contexts are not candidates, because knowing only the context
        would then be better than chance. Training effects are not candidates either, because the mean training effect
        is closer to them than to other effects.
    ``rank_in_screen``
        The same fraction, with the training effects of the same context as additional candidates, so that folds with
        few held-out effects also have a rank. Compare it with the score of the mean, not with 0.5. NaN without
        `trained`.

    Raises
    ------
    DataError
        If a prediction is NaN or infinite.

    Examples
    --------
    >>> measured = np.array([[1.0, 0.0, -1.0], [0.0, 2.0, 0.0]])
    >>> score_deltas(measured * 2, measured, measured)["rank"].tolist()
    [0.0, 0.0]
    """
    from sklearn.metrics.pairwise import cosine_distances

    if not np.isfinite(predicted).all():
        raise DataError(
            "contains NaN or infinite values, so effects cannot be scored; pass finite values.", argument="predicted"
        )
    top = np.argsort(-np.abs(scores), axis=1, kind="stable")[:, :_TOP_GENES]
    weights, error, nothing = de_weights(scores), predicted - measured, np.full(len(predicted), np.nan)
    rest = measured - (measured.mean(axis=0) if center is None else center)
    # Weights have a mean of 1.
    spread = (weights * np.square(rest - (weights * rest).mean(axis=1, keepdims=True))).mean(axis=1)
    varies = spread > 1e-12 * np.square(measured).max(axis=1, initial=0.0)
    wmse = (weights * np.square(error)).mean(axis=1)
    directions, overlap, rank, in_screen = (nothing.copy() for _ in range(4))
    if changed is not None:
        right = (changed & (np.sign(predicted) == np.sign(measured))).sum(axis=1)
        n_changed = changed.sum(axis=1)
        np.divide(right, n_changed, out=directions, where=n_changed > 0)
        for row, (size, genes) in enumerate(zip(np.abs(predicted), changed, strict=True)):
            if n_changed[row]:
                least = np.partition(size, -n_changed[row])[-n_changed[row]]
                larger, equal = size > least, size == least
                places = (n_changed[row] - larger.sum()) / equal.sum()
                overlap[row] = (larger[genes].sum() + places * equal[genes].sum()) / n_changed[row]
    for rows in _within(contexts, len(measured)):
        if len(rows) > 1:
            rank[rows] = _nearer(cosine_distances(predicted[rows], measured[rows]), atol=1e-9) / (len(rows) - 1)
        if trained is not None:
            here = [contexts is None or context == contexts[rows[0]] for context in trained[1]]
            screened = np.concatenate([measured[rows], trained[0][here]])
            if len(screened) > 1:
                away = cosine_distances(predicted[rows], screened)
                in_screen[rows] = _nearer(away, atol=1e-9) / (len(screened) - 1)
    return pd.DataFrame(
        {
            "pearson_delta": _cosine(_centered(predicted), _centered(measured)),
            "pearson_delta_top20": _cosine(
                *(_centered(np.take_along_axis(deltas, top, axis=1)) for deltas in (predicted, measured))
            ),
            "cosine": _cosine(predicted, measured),
            "mse": np.square(error).mean(axis=1),
            "mae": np.abs(error).mean(axis=1),
            "wmse": wmse,
            "weighted_r2_delta": 1 - np.divide(wmse, spread, out=nothing.copy(), where=varies),
            "direction_accuracy": directions,
            "de_overlap": overlap,
            "rank": rank,
            "rank_in_screen": in_screen,
        }
    )


def _cosine(first: np.ndarray, other: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(other, axis=1)
    return np.divide((first * other).sum(axis=1), lengths, out=np.zeros(len(first)), where=lengths > 0)


def _centered(values: np.ndarray) -> np.ndarray:
    centered = values - values.mean(axis=1, keepdims=True)
    # What rounding leaves of a constant is no direction.
    flat = np.ptp(values, axis=1) <= 1e-12 * np.abs(values).max(axis=1, initial=0.0)
    centered[flat] = 0.0
    return centered


def technical_duplicate(
    expression: sparse.csr_matrix,
    groups: np.ndarray,
    controls: np.ndarray,
    center: np.ndarray | None = None,
    contexts: Sequence[object] | None = None,
    trained: tuple[np.ndarray, Sequence[object]] | None = None,
    *,
    seed: int = 0,
    more: Callable[[np.ndarray, np.ndarray, np.ndarray, np.random.Generator], dict[str, np.ndarray]] | None = None,
) -> pd.DataFrame:
    """Score a second experiment as a prediction of the first: the best score that noise from few cells allows.

    The cells of each group, controls included, are split into two halves at random; the effect in one half is scored as
    a prediction of the effect in the other half. Gene weights come only from the measured half, so that they are
    independent of the prediction. A half contains only half of the cells, so the scores are corrected to whole groups.
    Correlations and cosines r become ``2 r / (1 + r)`` (Spearman and Brown), squared errors are divided by 2, and
    absolute errors by sqrt(2). The unexplained fraction ``u = 1 - weighted_r2_delta`` becomes ``3 u / (6 - 2 u)``. The
    reason is as follows. Let v be the noise of the predicted half. The weights, which grow with the measured noise,
    increase the measured noise to k v. So ``u = (1 + k) v / (k v + T)`` for effects of size T, and v is halved in whole
    groups. k is 1 for strong effects and about 3, the kurtosis of noise, without effects; the function uses 2. Ranks,
    `direction_accuracy` and `de_overlap` are not corrected, so ranks are slightly too high and the other two slightly
    too low.

    Parameters
    ----------
    expression
        log1p CP10K of cells, shape (N, G).
    groups
        Group of each cell, shape (N,): 0 to Q - 1 for perturbations, Q and higher for their controls.
    controls
        Group of the controls of each perturbation, shape (Q,).
    center, contexts, trained
        See :func:`score_deltas`.
    seed
        Seed for the splits.
    more
        Function that returns additional metrics, which are not corrected, from the effects in both halves, shape (Q,
        G), and the half (0 or 1) of each cell.

    Returns
    -------
    A table as from :func:`score_deltas`; NaN if a perturbation or its controls have fewer than two cells.

    Examples
    --------
    >>> cells = np.random.default_rng(0).normal(1.0, 0.3, size=(80, 20))
    >>> cells[:40, 0] += 2.0
    >>> table = technical_duplicate(sparse.csr_matrix(cells), np.repeat([0, 1], 40), controls=np.array([1]))
    >>> (table["pearson_delta"] > 0.9).tolist()
    [True]
    """
    n_groups = int(max(groups.max(), controls.max())) + 1
    sizes = np.bincount(groups, minlength=n_groups)
    rng = np.random.default_rng(seed)
    perturbed = np.arange(len(controls))
    starts = np.cumsum(sizes) - sizes
    tables = []
    for _ in range(_N_SPLITS):
        # Ranks of random numbers within a group are even for one half and odd for the other.
        order = np.lexsort([rng.random(len(groups)), groups])
        half = np.empty(len(groups), dtype=np.int64)
        half[order] = (np.arange(len(groups)) - starts[groups[order]]) % 2
        both = moments_of(expression, groups + n_groups * half, 2 * n_groups)
        predicted = effects_of(both, perturbed, controls).deltas
        measured = effects_of(both, perturbed + n_groups, controls + n_groups)
        reference = (measured.deltas, measured.scores, de_genes(measured.p_values))
        table = _correct_to_whole(score_deltas(predicted, *reference, center, contexts, trained))
        tables.append(table if more is None else table.assign(**more(predicted, measured.deltas, half, rng)))
    mean = sum(tables[1:], start=tables[0]) / _N_SPLITS
    mean.loc[(sizes[perturbed] < 2) | (sizes[controls] < 2)] = np.nan
    return mean


def _correct_to_whole(table: pd.DataFrame) -> pd.DataFrame:
    """Convert metrics of halves to whole groups (see :func:`technical_duplicate`); other metrics do not change."""
    whole = table.copy()
    for name in ("pearson_delta", "pearson_delta_top20", "cosine"):
        # Halves that contradict each other have nothing to correct; 2 r / (1 + r) runs to minus infinity there.
        whole[name] = (2 * table[name] / (1 + table[name])).where(table[name] > 0, table[name])
    whole[["mse", "wmse"]] /= 2
    whole["mae"] /= np.sqrt(2)
    missed = 1 - table["weighted_r2_delta"]
    # With no effect at all, halves and wholes miss as much; more than that is chance.
    most = (1 + _NOISE) / _NOISE
    explained = (1 + _NOISE) * missed / (2 * (1 + _NOISE) - _NOISE * missed.clip(upper=most))
    whole["weighted_r2_delta"] = 1 - explained.where(missed < most, missed)
    return whole


def calibrated(table: pd.DataFrame, base: str, ceiling: str) -> pd.DataFrame:
    """Return ``(m - base) / (ceiling - base)`` for each metric: 0 is as good as `base`, 1 as good as `ceiling`.

    The result is NaN for metrics in which the ceiling is not better than the base.

    Examples
    --------
    >>> scores = pd.DataFrame({"mse": [4.0, 2.0, 1.0]}, index=["train_mean", "scforge", "technical_duplicate"])
    >>> round(float(calibrated(scores, "train_mean", "technical_duplicate").loc["scforge", "mse"]), 3)
    0.667
    """
    columns = [name for name in table.columns if name in METRICS]
    better = [1.0 if METRICS[name] else -1.0 for name in columns]
    gains = table[columns].astype(np.float64) - table.loc[base, columns].astype(np.float64)
    room = gains.loc[ceiling]
    return gains / room.where(room * better > 0)


def comparable(effects: pd.DataFrame, ceiling: str) -> pd.DataFrame:
    """Return the scores of the effects that the ceiling covers, so that means are over the same effects.

    `effects` contains the scores of each effect for each method, and the columns ``method``, ``perturbation`` and
    ``context``.

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


def energy_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the unbiased energy distance between two groups of cells.

    It is twice the mean Euclidean distance between cells of different groups, minus the mean distance between two cells
    of each group. It is 0 on average for equal distributions and may be negative by chance. pertpy's ``edistance``
    includes the distance of each cell to itself, which makes the distances within small groups too small.

    Parameters
    ----------
    one, other
        Coordinates of cells, shapes (N, D) and (M, D).

    Returns
    -------
    The energy distance; NaN if a group has only one cell.

    Examples
    --------
    >>> cells = np.array([[0.0], [2.0]])
    >>> energy_distance(cells, cells + 10), energy_distance(cells[:1], cells)
    (16.0, nan)
    """
    from scipy.spatial.distance import cdist, pdist

    if min(len(one), len(other)) < 2:
        return float("nan")
    return float(2 * cdist(one, other).mean() - pdist(one).mean() - pdist(other).mean())
