"""Whether a predicted effect can be told from those of other perturbations.

Shapes: Q perturbations, G genes.
"""

from __future__ import annotations

import numpy as np

from scforge.errors import DataError, OptionError, listing

__all__ = ["DISCRIMINATION", "discrimination_scores", "own_genes"]

DISCRIMINATION = ("l1", "l2", "cosine")
"""The distances."""


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
    distances = _distances(predicted, measured, metric, left_out)
    mine = np.diagonal(distances)[:, None]
    near = np.isclose(distances, mine, rtol=1e-12, atol=1e-12)
    nearer = ((distances < mine) & ~near).sum(axis=1) + 0.5 * (near.sum(axis=1) - 1)
    return 1 - nearer / n_effects


def own_genes(targets: list[tuple[str, ...]], genes: np.ndarray) -> np.ndarray:
    """Return which genes are the targets of each perturbation, bool, shape (Q, G)."""
    number = {str(gene): column for column, gene in enumerate(genes)}
    found = np.zeros((len(targets), len(genes)), dtype=bool)
    for row, some in enumerate(targets):
        found[row, [number[target] for target in some if target in number]] = True
    return found


def _distances(predicted: np.ndarray, measured: np.ndarray, metric: str, left_out: np.ndarray | None) -> np.ndarray:
    """Return the distance of each prediction to each measured effect, shape (Q, Q)."""
    from scipy.spatial.distance import cdist

    none = np.empty(0, dtype=np.int64)
    without = [none if left_out is None else np.flatnonzero(left_out[row]) for row in range(len(predicted))]
    # The few genes that are left out are taken off, rather than distances computed anew for each prediction.
    if metric != "cosine":
        found = cdist(predicted, measured, "cityblock" if metric == "l1" else "sqeuclidean")
        for row, genes in enumerate(without):
            away = np.abs(predicted[row, genes] - measured[:, genes])
            found[row] -= (away if metric == "l1" else np.square(away)).sum(axis=1)
        return found if metric == "l1" else np.sqrt(np.maximum(found, 0.0))
    found = predicted @ measured.T
    lengths = np.tile(np.square(measured).sum(axis=1), (len(predicted), 1))
    own = np.square(predicted).sum(axis=1)
    for row, genes in enumerate(without):
        found[row] -= measured[:, genes] @ predicted[row, genes]
        lengths[row] -= np.square(measured[:, genes]).sum(axis=1)
        own[row] -= np.square(predicted[row, genes]).sum()
    lengths = np.sqrt(np.maximum(lengths, 0.0) * np.maximum(own, 0.0)[:, None])
    # No effect has no direction: it is as far from all as what is at a right angle.
    return 1 - np.divide(found, lengths, out=np.zeros_like(lengths), where=lengths > 0)
