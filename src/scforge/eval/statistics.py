"""Intervals of figures, tests of their differences, and what these say in words.

Shapes: R draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

__all__ = ["Comparison", "bootstrap_weights", "compare_paired", "holm", "interval", "weighted_f1"]

_ENOUGH = 100
"""Draws from which on percentiles tell more than a t distribution does."""


@dataclass(frozen=True)
class Comparison:
    """How one method does against another.

    Attributes
    ----------
    baseline
        The other method.
    difference
        Its figure taken from that of the method.
    low, high
        95 % interval of the difference; NaN without draws.
    p_value
        Of no difference, two-sided; NaN without draws.
    error
        Standard error of the difference; NaN where only the interval is known.
    degrees
        Degrees of freedom of the test.
    """

    baseline: str
    difference: float
    low: float
    high: float
    p_value: float
    error: float = math.nan
    degrees: float = math.inf

    def interval(self, alpha: float = 0.05) -> tuple[float, float]:
        """Return the interval that excludes 0 exactly where the p-value is below `alpha`."""
        from scipy.stats import t

        error = (self.high - self.low) / 2 / t.isf(0.025, math.inf) if math.isnan(self.error) else self.error
        half = float(t.isf(alpha / 2, self.degrees)) * error
        return self.difference - half, self.difference + half


def interval(
    value: float, draws: np.ndarray, level: float = 0.95, *, n_units: int | None = None
) -> tuple[float, float]:
    """Return an interval around a figure from how it varies over draws of the data.

    The draws are taken as deviations from their own mean, since figures on resampled data may all lie somewhat too low.
    With 100 draws or more, and as many units, the interval runs between percentiles of the deviations (the percentile
    bootstrap, Efron and Tibshirani 1993), with fewer it is that of Student's t. Bootstraps of few units vary too
    little, which is made up for (Hesterberg 2015).

    Parameters
    ----------
    value
        The figure.
    draws
        The figure on resampled data, shape (R,); NaN where it was not defined there.
    level
        Coverage.
    n_units
        Number of independent units that were drawn among, e.g. donors; None for cells.

    Returns
    -------
    Lower and upper end; NaN where fewer than two draws, or fewer than half of them, are numbers.

    Examples
    --------
    >>> [round(end, 3) for end in interval(0.5, np.linspace(0.3, 0.5, 1001))]
    [0.405, 0.595]
    """
    found = draws[np.isfinite(draws)]
    if not np.isfinite(value) or len(found) < 2 or 2 * len(found) < len(draws):
        return float("nan"), float("nan")
    degrees = _degrees(found, n_units)
    if degrees < 1:
        return float("nan"), float("nan")
    if degrees >= _ENOUGH - 1:
        low, high = np.quantile(found - found.mean(), [(1 - level) / 2, (1 + level) / 2])
    else:
        from scipy.stats import t

        high = float(t.ppf((1 + level) / 2, degrees)) * _spread(found, n_units)
        low = -high
    return float(value + low), float(value + high)


def compare_paired(
    baseline: str,
    value: float,
    other: float,
    draws: np.ndarray | None,
    other_draws: np.ndarray | None,
    *,
    n_units: int | None = None,
) -> Comparison:
    """Compare two methods on the same draws of the data.

    The test is Student's t of the difference over its standard deviation between draws, which estimates the error of
    the difference on all data, for the bootstrap as for halves drawn without replacement. The interval is that of the
    same test, so that it excludes 0 where p is below 0.05.

    Parameters
    ----------
    baseline
        Name of the other method.
    value, other
        The figures of both.
    draws, other_draws
        The figures on the same resampled data, shape (R,) each; None where there are none.
    n_units
        As for :func:`interval`; they limit the degrees of freedom.

    Examples
    --------
    >>> same = np.random.default_rng(0).normal(size=200)
    >>> compare_paired("PCA", 0.9, 0.8, same, same + np.random.default_rng(1).normal(0, 0.02, 200)).p_value < 0.001
    True
    """
    nothing = float("nan")
    difference = value - other
    if draws is None or other_draws is None or not np.isfinite(difference):
        return Comparison(baseline, difference, nothing, nothing, nothing)
    both = np.asarray(draws) - np.asarray(other_draws)
    if np.isnan(interval(difference, both, n_units=n_units)[0]):
        return Comparison(baseline, difference, nothing, nothing, nothing)
    both = both[np.isfinite(both)]
    spread, degrees = _spread(both, n_units), _degrees(both, n_units)
    if spread == 0.0:
        return Comparison(baseline, difference, difference, difference, 1.0 if difference == 0.0 else nothing)
    from scipy.stats import t

    p_value = float(2 * t.sf(abs(difference) / spread, degrees))
    found = Comparison(baseline, difference, nothing, nothing, p_value, spread, degrees)
    low, high = found.interval()
    return replace(found, low=low, high=high)


def _degrees(draws: np.ndarray, n_units: int | None) -> int:
    return len(draws) - 1 if n_units is None else min(len(draws), n_units) - 1


def _spread(draws: np.ndarray, n_units: int | None) -> float:
    """Return the standard deviation of draws, made up for few units: that of a bootstrap is of n, not n - 1."""
    factor = 1.0 if n_units is None else np.sqrt(n_units / (n_units - 1))
    return float(draws.std(ddof=1) * factor)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Return p-values corrected for their number (Holm 1979), float64; NaN is no test and stays.

    Examples
    --------
    >>> holm([0.01, 0.04, float("nan"), 0.03]).tolist()
    [0.03, 0.06, nan, 0.06]
    """
    found = np.asarray(p_values, dtype=np.float64)
    corrected = np.full(len(found), np.nan)
    tests = np.flatnonzero(np.isfinite(found))
    order = tests[np.argsort(found[tests], kind="stable")]
    factors = len(order) - np.arange(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(found[order] * factors), 1.0)
    return corrected


def bootstrap_weights(n_rows: int, n: int, *, seed: int, groups: np.ndarray | None = None) -> np.ndarray:
    """Return how often each row is drawn, with replacement.

    Parameters
    ----------
    n_rows
        Number of rows.
    n
        Number of draws R.
    seed
        Seed.
    groups
        Group of each row, whole numbers from 0; whole groups are drawn. None draws rows.

    Returns
    -------
    int64, shape (R, n_rows).

    Examples
    --------
    >>> bootstrap_weights(4, 2, seed=0).sum(axis=1).tolist()
    [4, 4]
    """
    n_units = n_rows if groups is None else int(groups.max()) + 1
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(n_units, np.full(n_units, 1 / n_units), size=n)
    return counts if groups is None else counts[:, groups]


def weighted_f1(truth: np.ndarray, predicted: np.ndarray, n_classes: int, weights: np.ndarray) -> np.ndarray:
    """Return macro-F1 and accuracy for each set of weights of the cells.

    The mean of F1 is over the classes that have a true cell of positive weight.

    Parameters
    ----------
    truth, predicted
        Classes from 0 to `n_classes` - 1, shape (N,).
    n_classes
        Number of classes.
    weights
        Weight of each cell, shape (R, N).

    Returns
    -------
    Float64, shape (R, 2).

    Examples
    --------
    >>> weighted_f1(np.array([0, 0, 1]), np.array([0, 1, 1]), 2, np.ones((1, 3))).round(3).tolist()
    [[0.667, 0.667]]
    """
    places = truth * n_classes + predicted
    figures = np.empty((len(weights), 2))
    for draw, weight in enumerate(weights):
        table = np.bincount(places, weight, n_classes**2).reshape(n_classes, n_classes)
        right, of_truth = np.diagonal(table), table.sum(axis=1)
        both = of_truth + table.sum(axis=0)
        f1 = np.divide(2 * right, both, out=np.zeros(n_classes), where=both > 0)
        figures[draw] = f1[of_truth > 0].mean(), right.sum() / table.sum()
    return figures
