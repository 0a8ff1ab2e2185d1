"""Means of groups of cells, and effects of perturbations on them.

Shapes: N cells, G genes of the vocabulary, P groups of cells, Q perturbed groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from scforge.data.cells import Cells
from scforge.eval.expression import log_expression

__all__ = ["Effects", "Moments", "effects_of", "moments", "moments_of"]

_BLOCK = 4096
"""Cells that are read at once."""


@dataclass(frozen=True)
class Moments:
    """Mean and spread of the log1p CP10K values of groups of cells.

    Attributes
    ----------
    n
        Cells of each group, int64, shape (P,).
    mean
        Float64, shape (P, G); 0 for a group without cells.
    variance
        With n - 1 in the denominator, float64, shape (P, G); 0 for a group of fewer than two cells.
    """

    n: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


@dataclass(frozen=True)
class Effects:
    """What perturbations do to the mean of their cells.

    Attributes
    ----------
    deltas
        Mean log1p CP10K of the perturbed cells less that of their controls, float64, shape (Q, G).
    scores
        Welch's t of each gene, float64, shape (Q, G); 0 where neither side varies.
    n_cells, n_controls
        Cells behind each of the two means, int64, shape (Q,).
    freedom
        Degrees of freedom of each t after Welch and Satterthwaite, float64, shape (Q, G); 0 where neither side varies.
    """

    deltas: np.ndarray
    scores: np.ndarray
    n_cells: np.ndarray
    n_controls: np.ndarray
    freedom: np.ndarray

    @property
    def p_values(self) -> np.ndarray:
        """Two-sided p values of Welch's t-test, float64, shape (Q, G); 1 where it is not defined.

        It is not defined for a gene that does not vary, and where a side has one cell only, the spread of which is not
        known.
        """
        from scipy import stats

        known = (self.freedom > 0) & (np.minimum(self.n_cells, self.n_controls) > 1)[:, None]
        found = np.ones_like(self.scores)
        found[known] = 2 * stats.t.sf(np.abs(self.scores[known]), self.freedom[known])
        return found


def moments(cells: Cells, rows: np.ndarray, codes: np.ndarray, n_groups: int) -> Moments:
    """Return mean and variance of groups of cells, read a few thousand at a time.

    Parameters
    ----------
    cells
        The cells, over a vocabulary.
    rows
        Those that take part, ascending, int64, shape (N,).
    codes
        Group of each of them, from 0 to `n_groups` - 1, shape (N,).
    n_groups
        Number of groups P.
    """
    assert cells.vocab is not None
    n_genes = cells.vocab.n_genes
    total, squares = np.zeros((n_groups, n_genes)), np.zeros((n_groups, n_genes))
    for start in range(0, len(rows), _BLOCK):
        taken = slice(start, start + _BLOCK)
        _add(total, squares, log_expression(cells, rows[taken]), codes[taken])
    return _moments(total, squares, np.bincount(codes, minlength=n_groups))


def moments_of(expression: sparse.csr_matrix, codes: np.ndarray, n_groups: int) -> Moments:
    """Return mean and variance of groups of the rows of a matrix of shape (N, G); a code of -1 takes no part."""
    total, squares = (np.zeros((n_groups, expression.shape[1])) for _ in range(2))
    chosen = codes >= 0
    _add(total, squares, expression[chosen], codes[chosen])
    return _moments(total, squares, np.bincount(codes[chosen], minlength=n_groups))


def effects_of(groups: Moments, perturbed: np.ndarray, controls: np.ndarray) -> Effects:
    """Compare groups of perturbed cells with their controls.

    Parameters
    ----------
    groups
        Mean and variance of all groups.
    perturbed, controls
        Numbers of the perturbed groups and, for each, of its controls, shape (Q,).
    """
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


def _add(total: np.ndarray, squares: np.ndarray, expression: sparse.csr_matrix, codes: np.ndarray) -> None:
    n_cells = len(codes)
    members = sparse.csr_matrix((np.ones(n_cells), (codes, np.arange(n_cells))), shape=(len(total), n_cells))
    total += (members @ expression).toarray()
    squares += (members @ expression.multiply(expression).tocsr()).toarray()


def _moments(total: np.ndarray, squares: np.ndarray, n: np.ndarray) -> Moments:
    mean = total / np.maximum(n, 1)[:, None]
    # Rounding must not make a variance negative.
    variance = np.maximum(squares - n[:, None] * mean**2, 0.0) / np.maximum(n - 1, 1)[:, None]
    variance[n < 2] = 0.0
    return Moments(n.astype(np.int64), mean, variance)
