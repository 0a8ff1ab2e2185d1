"""Whether a predicted effect can be told from those of other perturbations.

Shapes: Q perturbations, G genes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scforge.errors import DataError, OptionError, listing

__all__ = ["DISCRIMINATION", "discrimination_scores", "own_genes"]

DISCRIMINATION: Mapping[str, str] = {"l1": "cityblock", "l2": "euclidean", "cosine": "cosine"}
"""The distances, and what scipy calls them."""


def discrimination_scores(
    predicted: np.ndarray, measured: np.ndarray, metric: str = "l1", left_out: np.ndarray | None = None
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

    Returns
    -------
    Float64, shape (Q,); NaN without another effect.

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
    n_effects = len(measured)
    if n_effects < 2:
        return np.full(n_effects, np.nan)
    found = np.empty(n_effects)
    plain = np.ones(n_effects, dtype=bool) if left_out is None else ~left_out.any(axis=1)
    if plain.any():
        found[plain] = _scores(_distances(predicted[plain], measured, metric), np.flatnonzero(plain))
    for row in np.flatnonzero(~plain):
        assert left_out is not None
        genes = ~left_out[row]
        one = _distances(predicted[row : row + 1, genes], measured[:, genes], metric)
        found[row] = _scores(one, np.array([row]))[0]
    return found


def own_genes(targets: list[tuple[str, ...]], genes: np.ndarray) -> np.ndarray:
    """Return which genes are the targets of each perturbation, bool, shape (Q, G)."""
    number = {str(gene): column for column, gene in enumerate(genes)}
    found = np.zeros((len(targets), len(genes)), dtype=bool)
    for row, some in enumerate(targets):
        found[row, [number[target] for target in some if target in number]] = True
    return found


def _distances(predicted: np.ndarray, measured: np.ndarray, metric: str) -> np.ndarray:
    from scipy.spatial.distance import cdist

    if metric != "cosine":
        return cdist(predicted, measured, DISCRIMINATION[metric])
    # No effect has no direction: it is as far from all as what is at a right angle.
    lengths = np.linalg.norm(predicted, axis=1)[:, None] * np.linalg.norm(measured, axis=1)
    return 1 - np.divide(predicted @ measured.T, lengths, out=np.zeros_like(lengths), where=lengths > 0)


def _scores(distances: np.ndarray, own: np.ndarray) -> np.ndarray:
    mine = distances[np.arange(len(own)), own][:, None]
    near = np.isclose(distances, mine, rtol=1e-12, atol=1e-12)
    nearer = ((distances < mine) & ~near).sum(axis=1) + 0.5 * (near.sum(axis=1) - 1)
    return 1 - nearer / distances.shape[1]
