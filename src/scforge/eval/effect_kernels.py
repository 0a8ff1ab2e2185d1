"""Ridge regression of effects on several kernels, with scales that are chosen by leaving blocks out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np

BASE = 100.0
"""Prior variance of what all effects share: next to no shrinkage, so that the rest shrinks to the mean."""

_PENALTIES = (1000.0, 100.0, 10.0, 1.0, 0.1, 0.01)
_SCALES = (0.0, 0.1, 1.0, 10.0)
_MAX_COMPARED = 512
"""Effects among which scales and penalty are chosen; where there are more, among some of the blocks."""

_SWEEPS = 2


def choose_scales(
    fixed: np.ndarray, kernels: Sequence[np.ndarray], noise: np.ndarray, scores: np.ndarray, blocks: np.ndarray
) -> tuple[list[float], float]:
    """Return the scale of each kernel and the penalty with the least error on blocks that are left out.

    Two kernels are tried together, more of them one after the other in two sweeps. Scales of 0 come first and win ties:
    a source that tells nothing has none.

    Parameters
    ----------
    fixed
        Sum of the kernels of a known scale, shape (N, N).
    kernels
        Those that a scale is chosen for, shape (N, N) each.
    noise
        Variance of each effect, in units of the penalty, shape (N,).
    scores
        The effects, shape (N, R).
    blocks
        What is left out together, integers, shape (N,).
    """
    if len(np.unique(blocks)) < 2:
        # A single effect: nothing to compare scales with.
        return [0.0] * len(kernels), 1.0
    if len(blocks) > _MAX_COMPARED:
        names, sizes = np.unique(blocks, return_counts=True)
        order = np.random.default_rng(0).permutation(len(names))
        n_blocks = max(2, int(np.searchsorted(np.cumsum(sizes[order]), _MAX_COMPARED)))
        chosen = np.isin(blocks, names[order[:n_blocks]])
        fixed, kernels = fixed[np.ix_(chosen, chosen)], [kernel[np.ix_(chosen, chosen)] for kernel in kernels]
        noise, scores, blocks = noise[chosen], scores[chosen], blocks[chosen]
    best, penalty, least = [0.0] * len(kernels), 1.0, np.inf
    told = [number for number, kernel in enumerate(kernels) if kernel.any()]
    for scales, tried in _candidates(best, told):
        kernel = fixed + sum((scale * one for scale, one in zip(scales, kernels, strict=True) if scale), start=0.0)
        error = _left_out(np.linalg.inv(kernel + tried * np.diag(noise)), noise, scores, blocks)
        if error < least * (1 - 1e-9):
            best[:], penalty, least = scales, tried, error
    return best, penalty


def _candidates(best: list[float], told: list[int]) -> Iterator[tuple[list[float], float]]:
    """Yield scales and penalties to try; `best` is what was found so far."""
    groups = [told] if len(told) < 3 else [[], *([number] for number in told * _SWEEPS)]
    for group in groups:
        start = list(best)
        for *values, penalty in product(*[_SCALES] * len(group), _PENALTIES):
            scales = list(start)
            for number, value in zip(group, values, strict=True):
                scales[number] = value
            yield scales, penalty


def _left_out(inverse: np.ndarray, noise: np.ndarray, scores: np.ndarray, blocks: np.ndarray) -> float:
    """Return the squared error, over noise, of blocks that are predicted from the others, without fitting anew.

    For kernel ridge regression with ``A = (K + noise)^-1`` the residuals of a left-out block S are
    ``A[S, S]^-1 (A Y)[S]``.
    """
    dual = inverse @ scores
    error = 0.0
    for block in np.unique(blocks):
        rows = np.flatnonzero(blocks == block)
        residuals = np.linalg.solve(inverse[np.ix_(rows, rows)], dual[rows])
        error += float((np.square(residuals).sum(axis=1) / noise[rows]).sum())
    return error


def kernel_effects(
    deltas: np.ndarray,
    noise: np.ndarray,
    counts: Sequence[np.ndarray],
    members: Sequence[np.ndarray],
    sources: Mapping[str, tuple[np.ndarray, np.ndarray]],
    blocks: np.ndarray,
) -> tuple[np.ndarray, dict[str, float]]:
    """Predict effects by ridge regression on several sources of what is known about perturbations.

    The covariance of two effects is ``100 n n' + m m' + sum over sources of a f f'``, with n the number of targets, m
    the targets themselves and f the features of a source, scaled to a mean square length of 1. The scales a and the
    penalty are those with the least error when one block after the other is left out. Without a source that helps, the
    prediction is the mean effect, shrunken by the number of cells; of a combination the sum of its parts.

    Parameters
    ----------
    deltas
        Training effects, shape (N, G).
    noise
        Relative variance of each, e.g. the mean number of cells divided by its own, shape (N,).
    counts
        Number of targets of the training effects, shape (N,), and of the wanted ones, shape (Q,).
    members
        1 for the targets of each among the T that have a part of their own, shapes (N, T) and (Q, T).
    sources
        Features of the training effects and of the wanted ones by name, shapes (N, D) and (Q, D); NaN where nothing is
        known.
    blocks
        What is left out together, integers, shape (N,).

    Returns
    -------
    The effects, float64, shape (Q, G), and the scale of each source.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> features = rng.normal(size=(60, 3))
    >>> effects = features @ rng.normal(size=(3, 20)) + 1.0
    >>> own, sources = (np.eye(50), np.zeros((10, 50))), {"told": (features[:50], features[50:])}
    >>> counts = np.ones(50), np.ones(10)
    >>> made, scales = kernel_effects(effects[:50], counts[0], counts, own, sources, np.arange(50))
    >>> bool(scales["told"] > 0)
    True
    """
    fixed = BASE * np.outer(counts[0], counts[0]) + members[0] @ members[0].T
    kernels, across = [], []
    for seen, wanted in sources.values():
        seen, wanted = np.nan_to_num(seen), np.nan_to_num(wanted)
        size = max(float(np.square(seen).sum(axis=1).mean()), 1e-300)
        kernels.append(seen @ seen.T / size)
        across.append(wanted @ seen.T / size)
    # Errors are the same in the principal components of the effects, which are fewer than genes.
    left, values, right = np.linalg.svd(deltas, full_matrices=False)
    scores = left * values
    scales, penalty = choose_scales(fixed, kernels, noise, scores, blocks)
    whole, between = fixed, BASE * np.outer(counts[1], counts[0]) + members[1] @ members[0].T
    for scale, kernel, other in zip(scales, kernels, across, strict=True):
        whole, between = whole + scale * kernel, between + scale * other
    made = between @ np.linalg.solve(whole + penalty * np.diag(noise), scores) @ right
    return made, dict(zip(sources, scales, strict=True))
