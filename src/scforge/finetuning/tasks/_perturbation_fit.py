"""The linear model of effects that fine-tuning starts from.

Shapes: N training effects, V tokens, F features of a gene, T targets of the training, D dimensions of an embedding,
R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

__all__ = ["LinearStart", "Observed", "blocks_of", "fit_linear"]

_BASE = 100.0
"""Prior variance of the effect that all targets share: next to no shrinkage."""

_PENALTIES = (1000.0, 100.0, 10.0, 1.0, 0.1, 0.01)
_SCALES = (0.0, 0.1, 1.0, 10.0)
_MOST_COMPARED = 512
"""Effects among which scales and penalty are chosen; where there are more, among some of the blocks."""


@dataclass(frozen=True)
class Observed:
    """Training effects, and what they are explained by.

    Attributes
    ----------
    deltas
        Shape (N, V).
    n_cells
        Cells behind each effect, shape (N,).
    members
        1 for the targets of each effect, shape (N, T).
    features
        Sum of the features of its targets, shape (N, F).
    cells
        Mean standardised embedding of the controls of its context, shape (N, D).
    blocks
        What is held out together when scales are compared, integers, shape (N,).
    """

    deltas: np.ndarray
    n_cells: np.ndarray
    members: np.ndarray
    features: np.ndarray
    cells: np.ndarray
    blocks: np.ndarray


@dataclass(frozen=True)
class LinearStart:
    """A linear model: parameters of :class:`PerturbationHead`, whose shapes they have.

    Attributes
    ----------
    base, of_features, own, of_cell, basis
        The parameters.
    scales
        Prior variance of the part that features explain, that of the part that cells explain, and the penalty.
    """

    base: np.ndarray
    of_features: np.ndarray
    own: np.ndarray
    of_cell: np.ndarray
    basis: np.ndarray
    scales: tuple[float, float, float]


def blocks_of(groups: np.ndarray, trained: np.ndarray, *, by_context: bool) -> np.ndarray:
    """Return what is left out together to compare scales: what was held out, perturbations or contexts.

    Parameters
    ----------
    groups
        Perturbation and context of each effect, integers, shape (P, 2).
    trained
        Those that are trained on, bool, shape (P,).
    by_context
        Contexts were held out by name. Otherwise they were if a held-out perturbation is trained on elsewhere.

    Returns
    -------
    Block of each of the N trained effects, shape (N,). Where the training has only one of what was held out, e.g. one
    context, blocks are of the other kind: its perturbations.
    """
    own = groups[trained]
    axis = int(by_context or np.isin(groups[~trained, 0], own[:, 0]).any())
    several = [len(np.unique(own[:, side])) > 1 for side in (0, 1)]
    return own[:, axis if several[axis] or not several[1 - axis] else 1 - axis]


def fit_linear(observed: Observed, rank: int) -> LinearStart:
    """Fit the linear part of the head by ridge regression.

    The basis is that of the principal components of the effects, not centred. In it the effects are regressed on the
    number of targets, the features of the targets, the targets themselves and the cells. How far features and cells
    count, down to not at all, and the penalty, which is divided by the number of cells of an effect, are those with
    the least error when one block after the other is left out: so a model without use for them predicts the mean.

    Parameters
    ----------
    observed
        The training effects.
    rank
        Rank R of the basis; rows of zeros where there are fewer effects.
    """
    deltas = observed.deltas.astype(np.float64)
    _, values, axes = np.linalg.svd(deltas, full_matrices=False)
    kept = int((values[:rank] > 1e-10 * max(values[0], 1e-300)).sum())
    basis = np.zeros((rank, deltas.shape[1]))
    basis[:kept] = axes[:kept]
    scores = deltas @ basis.T
    kernels = _kernels(observed)
    noise = observed.n_cells.mean() / np.maximum(observed.n_cells, 1)
    of_features, of_cells, penalty = _choose(kernels, noise, scores, observed)
    kernel = _BASE * kernels[0] + of_features * kernels[1] + kernels[2] + of_cells * kernels[3]
    dual = np.linalg.solve(kernel + penalty * np.diag(noise), scores)
    own = np.zeros((observed.members.shape[1] + 1, rank))
    own[1:] = observed.members.T @ dual
    n_dims = observed.cells.shape[1]
    return LinearStart(
        base=_BASE * observed.members.sum(axis=1) @ dual,
        of_features=of_features * dual.T @ observed.features,
        own=own,
        of_cell=of_cells / n_dims * dual.T @ observed.cells,
        basis=basis,
        scales=(of_features, of_cells, penalty),
    )


def _kernels(observed: Observed) -> list[np.ndarray]:
    """Return the covariances that the four parts of the model give the effects, each of shape (N, N)."""
    counts = observed.members.sum(axis=1)
    return [
        np.outer(counts, counts),
        observed.features @ observed.features.T,
        observed.members @ observed.members.T,
        observed.cells @ observed.cells.T / observed.cells.shape[1],
    ]


def _choose(
    kernels: list[np.ndarray], noise: np.ndarray, scores: np.ndarray, observed: Observed
) -> tuple[float, float, float]:
    """Return the scales and the penalty with the least error on blocks that are left out."""
    blocks = observed.blocks
    if len(np.unique(blocks)) < 2:
        # A single effect: nothing to compare scales with.
        return 0.0, 0.0, 1.0
    if len(blocks) > _MOST_COMPARED:
        order = np.random.default_rng(0).permutation(np.unique(blocks))
        sizes = np.cumsum(np.bincount(blocks)[order])
        chosen = np.isin(blocks, order[: max(2, int(np.searchsorted(sizes, _MOST_COMPARED)))])
        kernels = [kernel[np.ix_(chosen, chosen)] for kernel in kernels]
        noise, scores, blocks = noise[chosen], scores[chosen], blocks[chosen]
    cells_differ = np.ptp(observed.cells, axis=0).any()
    tried = product(_SCALES if observed.features.any() else (0.0,), _SCALES if cells_differ else (0.0,), _PENALTIES)
    best, least = (0.0, 0.0, 1.0), np.inf
    for of_features, of_cells, penalty in tried:
        kernel = _BASE * kernels[0] + of_features * kernels[1] + kernels[2] + of_cells * kernels[3]
        error = _left_out(np.linalg.inv(kernel + penalty * np.diag(noise)), scores, blocks)
        if error < least * (1 - 1e-9):
            best, least = (of_features, of_cells, penalty), error
    return best


def _left_out(inverse: np.ndarray, scores: np.ndarray, blocks: np.ndarray) -> float:
    """Return the squared error of blocks that are predicted from the others, without fitting anew.

    For kernel ridge regression with ``A = (K + noise)^-1`` the residuals of a left-out block S are
    ``A[S, S]^-1 (A Y)[S]``.
    """
    dual = inverse @ scores
    error = 0.0
    for block in np.unique(blocks):
        rows = np.flatnonzero(blocks == block)
        error += float(np.square(np.linalg.solve(inverse[np.ix_(rows, rows)], dual[rows])).sum())
    return error
