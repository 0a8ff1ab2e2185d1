"""Controls of a screen: other genes of like expression, and what is unusual beside them.

Shapes: G genes of the vocabulary, C combinations that are tested, R combinations that serve as controls, K genes of a
combination.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import false_discovery_control

__all__ = ["adjust", "compare", "draw_controls", "nearest"]

_SHARES = 4
"""Controls are as many as are wanted for this many combinations at most; further combinations share them."""

_TRIES = 20


def draw_controls(
    tested_ck: np.ndarray, levels: np.ndarray, eligible: np.ndarray, n_controls: int, rng: np.random.Generator
) -> np.ndarray:
    """Choose controls: combinations in which each gene is replaced by another one of like expression.

    Parameters
    ----------
    tested_ck
        Genes of the tested combinations, shape (C, K).
    levels
        Expression of each gene, shape (G,).
    eligible
        Genes to choose from, shape (any,).
    n_controls
        Controls wanted for a combination.
    rng
        Generator of the choice.

    Returns
    -------
    Genes of the controls, each combination once, int32, shape (R, K).
    """
    n_tested, n_genes = tested_ck.shape
    eligible = eligible[np.argsort(levels[eligible], kind="stable")]
    most = min(n_controls * min(n_tested, _SHARES), len(eligible) if n_genes == 1 else 10**9)
    if not n_tested or len(eligible) < n_genes or most <= 0:
        return np.empty((0, n_genes), dtype=np.int32)
    chosen: dict[tuple[int, ...], None] = {}
    free = np.ones(len(eligible), dtype=np.bool_)
    each = -(-most // n_tested)
    for row in rng.permutation(n_tested):
        if n_genes == 1:
            open_ = np.flatnonzero(free)
            like = open_[_closest(levels[eligible[open_]], levels[tested_ck[row, 0]], each)]
            free[like] = False
            chosen |= {(int(gene),): None for gene in eligible[like]}
            continue
        pools = [eligible[_closest(levels[eligible], levels[gene], max(each, 20))] for gene in tested_ck[row]]
        wanted = len(chosen) + each
        for _ in range(each * _TRIES):
            drawn = tuple(sorted(int(rng.choice(pool)) for pool in pools))
            if len(set(drawn)) == n_genes:
                chosen[drawn] = None
            if len(chosen) == wanted:
                break
    return np.array(list(chosen), dtype=np.int32).reshape(-1, n_genes)[:most]


def _closest(levels: np.ndarray, level: float, n: int) -> np.ndarray:
    """Return the positions of the `n` levels that are closest to `level`."""
    return np.argsort(np.abs(levels - level), kind="stable")[:n]


def nearest(level: float, levels: np.ndarray, usable: np.ndarray, n: int) -> np.ndarray:
    """Return the positions of the `n` usable controls whose level is closest, as many by rank below as above."""
    positions = np.flatnonzero(usable)
    order = positions[np.argsort(levels[positions], kind="stable")]
    middle = int(np.searchsorted(levels[order], level))
    start = min(max(0, middle - n // 2), max(0, len(order) - n))
    return order[start : start + n]


def compare(value: float, controls: np.ndarray, *, two_sided: bool) -> tuple[float, float]:
    """Return the z-score of a value among those of its controls, and its p-value.

    The p-value is that of a randomisation test: ``(1 + number of controls at least as large) / (1 + number of
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


def adjust(p_values: np.ndarray) -> np.ndarray:
    """Return the false discovery rates of p-values (Benjamini and Hochberg 1995); NaN stays."""
    adjusted = np.full(len(p_values), np.nan)
    known = np.isfinite(p_values)
    if known.any():
        adjusted[known] = false_discovery_control(p_values[known])
    return adjusted
