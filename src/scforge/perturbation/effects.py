"""Mean effects of perturbations in cells, and the effects that predictors know and are asked for.

Shapes: N cells, G genes, Q effects, C contexts, P groups of cells.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from scforge.data.cells import Cells
from scforge.data.expression import log_expression

_BLOCK = 4096
"""Number of cells that are read at once."""


@dataclass(frozen=True)
class Moments:
    """Mean and spread of the log1p CP10K values of groups of cells.

    Attributes
    ----------
    n
        Number of cells in each group, int64, shape (P,).
    mean
        Mean of each gene, float64, shape (P, G); 0 for a group without cells.
    variance
        Variance of each gene, with n - 1 in the denominator, float64, shape (P, G); 0 for groups of fewer than two
        cells.
    """

    n: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


@dataclass(frozen=True)
class Effects:
    """Mean effects of perturbations.

    Attributes
    ----------
    deltas
        Mean log1p CP10K of the perturbed cells minus the mean of their controls, float64, shape (Q, G).
    scores
        Welch's t statistic of each gene, float64, shape (Q, G); 0 if neither group varies.
    n_cells, n_controls
        Number of cells of each of the two means, int64, shape (Q,).
    freedom
        Welch-Satterthwaite degrees of freedom of each t statistic, float64, shape (Q, G); 0 if neither group varies.
    """

    deltas: np.ndarray
    scores: np.ndarray
    n_cells: np.ndarray
    n_controls: np.ndarray
    freedom: np.ndarray

    @property
    def p_values(self) -> np.ndarray:
        """Two-sided p-values of Welch's t-test, float64, shape (Q, G); 1 if the test is not defined.

        The test is not defined for genes that do not vary, and for groups of one cell, which have no standard
        deviation.
        """
        from scipy import stats

        known = (self.freedom > 0) & (np.minimum(self.n_cells, self.n_controls) > 1)[:, None]
        found = np.ones_like(self.scores)
        found[known] = 2 * stats.t.sf(np.abs(self.scores[known]), self.freedom[known])
        return found


def moments(cells: Cells, rows: np.ndarray, codes: np.ndarray, n_groups: int) -> Moments:
    """Return mean and variance of groups of cells; `rows` are ascending, and `codes` are their groups."""
    starts = range(0, max(len(rows), 1), _BLOCK)
    taken = (slice(start, start + _BLOCK) for start in starts)
    return _moments(((log_expression(cells, rows[some]), codes[some]) for some in taken), n_groups)


def moments_of(expression: sparse.csr_matrix, codes: np.ndarray, n_groups: int) -> Moments:
    """Return mean and variance of groups of rows in a matrix of shape (N, G); rows with code -1 are ignored."""
    chosen = codes >= 0
    return _moments([(expression[chosen], codes[chosen])], n_groups)


def effects_of(groups: Moments, perturbed: np.ndarray, controls: np.ndarray) -> Effects:
    """Compare each of Q groups of perturbed cells with the group of its controls."""
    deltas = groups.mean[perturbed] - groups.mean[controls]
    errors = [groups.variance[side] / np.maximum(groups.n[side], 1)[:, None] for side in (perturbed, controls)]
    spread = errors[0] + errors[1]
    scores = np.divide(deltas, np.sqrt(spread), out=np.zeros_like(deltas), where=spread > 0)
    parts = sum(
        np.square(error) / np.maximum(groups.n[side] - 1, 1)[:, None]
        for error, side in zip(errors, (perturbed, controls), strict=True)
    )
    freedom = np.divide(np.square(spread), parts, out=np.zeros_like(deltas), where=parts > 0)
    return Effects(deltas, scores, groups.n[perturbed], groups.n[controls], freedom)


def _moments(blocks: Iterable[tuple[sparse.csr_matrix, np.ndarray]], n_groups: int) -> Moments:
    """Return the moments of cells that are read in blocks; each block comes with the groups of its cells."""
    n, total, squares = np.zeros(n_groups, dtype=np.int64), np.float64(0), np.float64(0)
    for expression, codes in blocks:
        members = sparse.csr_matrix((np.ones(len(codes)), (codes, np.arange(len(codes)))), shape=(n_groups, len(codes)))
        n += np.bincount(codes, minlength=n_groups)
        total = total + (members @ expression).toarray()
        squares = squares + (members @ expression.multiply(expression).tocsr()).toarray()
    mean = total / np.maximum(n, 1)[:, None]
    # Rounding must not make a variance negative.
    variance = np.maximum(squares - n[:, None] * mean**2, 0.0) / np.maximum(n - 1, 1)[:, None]
    variance[n < 2] = 0.0
    return Moments(n, mean, variance)
