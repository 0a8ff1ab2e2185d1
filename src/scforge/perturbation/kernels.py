"""Regression of effects on features of perturbations: by kernels with chosen scales, and the published linear model.

Shapes: N training effects, Q requested effects, G genes, T targets, D features, R components of the effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

_PENALTY = 0.1
N_COMPONENTS = 10
BANDS = (N_COMPONENTS, 20, 50)
"""Ends of the component bands of a source. Each band has a separate scale, so few or many components can be used."""

BASE = 100.0
"""Prior variance of the shared part of all effects. It is large, so that predictions shrink toward the mean."""

_PENALTIES = (1000.0, 100.0, 10.0, 1.0, 0.1, 0.01)

_SCALES = (0.0, 0.1, 1.0, 10.0)

_MAX_COMPARED = 512
"""Maximum number of effects used to choose scales and the penalty; with more effects, blocks are sampled."""

_SWEEPS = 2


def linear_effects(deltas: np.ndarray, genes: np.ndarray, seen: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Predict effects by the bilinear model of Ahlmann-Eltze, Huber and Anders (Nat Methods 2025).

    Y are the transposed training effects (N, G) minus their mean b over perturbations. A are the gene features (G, D),
    B the transposed perturbation features (N, E), and I is the identity::

        W = (A'A + 0.1 I)^-1 A' Y B' (B B' + 0.1 I)^-1,    prediction = A W B_wanted + b

    Rows of `seen` and `wanted` are NaN for perturbations without features: in training they contribute only to b, and
    their prediction is b. Returns float64, shape (Q, G).
    """
    center = deltas.mean(axis=0)
    fitted = np.isfinite(seen).all(axis=1)
    predicted = np.tile(center, (len(wanted), 1))
    is_finite = np.isfinite(wanted).all(axis=1)
    if not fitted.any() or not is_finite.any():
        return predicted
    y_gn, b_en = (deltas[fitted] - center).T, seen[fitted].T
    of_genes = np.linalg.solve(genes.T @ genes + _PENALTY * np.eye(genes.shape[1]), genes.T @ y_gn @ b_en.T)
    weights = np.linalg.solve(b_en @ b_en.T + _PENALTY * np.eye(len(b_en)), of_genes.T).T
    predicted[is_finite] += (genes @ weights @ wanted[is_finite].T).T
    return predicted


def kernel_effects(
    deltas: np.ndarray,
    noise: np.ndarray,
    counts: Sequence[np.ndarray],
    members: Sequence[np.ndarray],
    sources: Sequence[Sequence[np.ndarray]],
    blocks: np.ndarray,
) -> np.ndarray:
    """Predict effects by ridge regression on perturbation features from several sources.

    The covariance of two effects is ``100 n n' + m m' + sum over bands of a f f'``. Here, n is the number of targets, m
    contains the target indicators, and f is a band of source features (the components 1 to 10, 11 to 20 and 21 to 50),
    scaled to a mean square length of 1. The scales a and the penalty minimize the error on held-out blocks. If no
    source is informative, the prediction is the mean effect, shrunk according to the number of cells; for a
    combination, it is the sum of its parts.

    Parameters
    ----------
    deltas
        Training effects, shape (N, G).
    noise
        Relative variance of each effect, e.g. the mean number of cells divided by its own number, shape (N,).
    counts
        Number of targets of each training effect, shape (N,), and of each requested effect, shape (Q,).
    members
        Indicators of the targets of each effect, 1 for its targets among all T targets, shapes (N, T) and (Q, T).
    sources
        For each source, features of the training effects and requested effects, shapes (N, D) and (Q, D), with leading
        components first; NaN for perturbations without features.
    blocks
        Block of each effect, integers, shape (N,); the effects of a block are held out together.

    Returns
    -------
    The effects, float64, shape (Q, G).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> features = rng.normal(size=(60, 3))
    >>> effects = features @ rng.normal(size=(3, 20)) + 1.0
    >>> members, counts = (np.eye(50), np.zeros((10, 50))), (np.ones(50), np.ones(10))
    >>> sources = [(features[:50], features[50:])]
    >>> predicted = kernel_effects(effects[:50], np.ones(50), counts, members, sources, np.arange(50))
    >>> bool(np.square(predicted - effects[50:]).mean() < 0.1 * effects.var())
    True
    """
    bands = [
        tuple(np.nan_to_num(side[:, band]) for side in source)
        for source in sources
        for band in bands_of(source[0].shape[1])
    ]
    # Errors are the same in the principal components of the effects, which are fewer than genes.
    left, values, right = np.linalg.svd(deltas, full_matrices=False)
    dual, scales = fit_kernels(left * values, noise, counts[0], members[0], [seen for seen, _ in bands], blocks)
    between = BASE * np.outer(counts[1], counts[0]) + members[1] @ members[0].T
    for scale, (seen, wanted) in zip(scales, bands, strict=True):
        between = between + scale * wanted @ seen.T / mean_square_length(seen)
    return between @ dual @ right


def fit_kernels(
    scores: np.ndarray,
    noise: np.ndarray,
    counts: np.ndarray,
    members: np.ndarray,
    bands: Sequence[np.ndarray],
    blocks: np.ndarray,
) -> tuple[np.ndarray, list[float]]:
    """Fit the model of :func:`kernel_effects` in a basis; return dual weights, shape (N, R), and band scales."""
    fixed = BASE * np.outer(counts, counts) + members @ members.T
    kernels = [band @ band.T / mean_square_length(band) for band in bands]
    scales, penalty = _choose_scales(fixed, kernels, noise, scores, blocks)
    return np.linalg.solve(_weighted(fixed, kernels, scales) + penalty * np.diag(noise), scores), scales


def _choose_scales(
    fixed: np.ndarray, kernels: Sequence[np.ndarray], noise: np.ndarray, scores: np.ndarray, blocks: np.ndarray
) -> tuple[list[float], float]:
    """Return the scale of each kernel and the penalty with the smallest error on held-out blocks.

    Up to two kernels are optimized jointly, and more kernels one after the other in two sweeps. Scales of 0 are tried
    first and win ties, so uninformative sources receive the scale 0.
    """
    best, penalty, least = [0.0] * len(kernels), 1.0, np.inf
    names, sizes = np.unique(blocks, return_counts=True)
    if len(names) < 2:
        # With a single effect, scales cannot be compared.
        return best, penalty
    if len(blocks) > _MAX_COMPARED:
        order = np.random.default_rng(0).permutation(len(names))
        n_blocks = max(2, int(np.searchsorted(np.cumsum(sizes[order]), _MAX_COMPARED)))
        chosen = np.isin(blocks, names[order[:n_blocks]])
        fixed, kernels = fixed[np.ix_(chosen, chosen)], [kernel[np.ix_(chosen, chosen)] for kernel in kernels]
        noise, scores, blocks = noise[chosen], scores[chosen], blocks[chosen]
    used = [number for number, kernel in enumerate(kernels) if kernel.any()]
    for group in [used] if len(used) < 3 else [[], *([number] for number in used * _SWEEPS)]:
        scales = list(best)
        for *values, tried in product(*[_SCALES] * len(group), _PENALTIES):
            for number, value in zip(group, values, strict=True):
                scales[number] = value
            inverse = np.linalg.inv(_weighted(fixed, kernels, scales) + tried * np.diag(noise))
            error = _held_out_error(inverse, noise, scores, blocks)
            if error < least * (1 - 1e-9):
                best, penalty, least = list(scales), tried, error
    return best, penalty


def _weighted(fixed: np.ndarray, kernels: Sequence[np.ndarray], scales: Sequence[float]) -> np.ndarray:
    """Return the covariance for these scales, shape (N, N)."""
    return fixed + sum((scale * kernel for scale, kernel in zip(scales, kernels, strict=True) if scale), start=0.0)


def _held_out_error(inverse: np.ndarray, noise: np.ndarray, scores: np.ndarray, blocks: np.ndarray) -> float:
    """Return the squared error of held-out blocks, divided by noise, without refitting.

    For kernel ridge regression with ``A = (K + noise)^-1`` the residuals of a left-out block S are
    ``A[S, S]^-1 (A Y)[S]``.
    """
    dual, names = inverse @ scores, np.unique(blocks)
    if len(names) == len(blocks):
        return float((np.square(dual / np.diagonal(inverse)[:, None]).sum(axis=1) / noise).sum())
    error = 0.0
    for block in names:
        rows = np.flatnonzero(blocks == block)
        residuals = np.linalg.solve(inverse[np.ix_(rows, rows)], dual[rows])
        error += float((np.square(residuals).sum(axis=1) / noise[rows]).sum())
    return error


def bands_of(n_comps: int) -> list[slice]:
    """Return the bands that cover this number of components."""
    return [slice(start, end) for start, end in zip((0, *BANDS), BANDS, strict=False) if start < n_comps]


def mean_square_length(features: np.ndarray) -> float:
    """Return the mean squared length of features, shape (N, D)."""
    return max(float(np.square(features).sum(axis=1).mean()), 1e-300)
