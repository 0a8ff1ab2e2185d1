"""Whether a predicted effect can be told from those of other perturbations.

Shapes: Q perturbations, G genes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from scforge.errors import DataError, OptionError, listing

__all__ = ["DISCRIMINATION", "discrimination_scores", "effect_ranks", "own_genes", "within_contexts"]

DISCRIMINATION = ("l1", "l2", "cosine")
"""The distances."""


def discrimination_scores(
    predicted: np.ndarray,
    measured: np.ndarray,
    metric: str = "l1",
    left_out: np.ndarray | None = None,
    contexts: Sequence[object] | None = None,
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
    contexts
        Context of each effect, Q of them: each is compared with those of its own, the number of which is then Q above.
        Without, there is one only.

    Returns
    -------
    Float64, shape (Q,); NaN without another effect in the context.

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
    found = np.full(len(measured), np.nan)
    for rows in within_contexts(contexts, len(measured)):
        if len(rows) > 1:
            own = None if left_out is None else left_out[rows]
            found[rows] = _scores(_distances(predicted[rows], measured[rows], metric, own))
    return found


def within_contexts(contexts: Sequence[object] | None, n_effects: int) -> list[np.ndarray]:
    """Return the rows of the effects of each context, int64; of all, where there are no contexts.

    Raises
    ------
    DataError
        If there is not one context for each effect.
    """
    if contexts is None:
        return [np.arange(n_effects)]
    if len(contexts) != n_effects:
        raise DataError(f"contexts has {len(contexts)} entries for {n_effects} effects; give one for each.")
    codes = pd.factorize(pd.Series(list(contexts), dtype=object), use_na_sentinel=False)[0]
    return [np.flatnonzero(codes == code) for code in range(int(codes.max(initial=-1)) + 1)]


def effect_ranks(predicted: np.ndarray, known: np.ndarray, contexts: Sequence[object] | None) -> np.ndarray:
    """Return the normalised rank of the own effect in its context; that of prediction i is ``known[i]``."""
    found = np.empty(len(predicted))
    for rows in within_contexts(contexts, len(predicted)):
        found[rows] = _ranks_of_all(predicted[rows], known[rows])
    return found


def _scores(distances: np.ndarray) -> np.ndarray:
    mine = np.diagonal(distances)[:, None]
    near = np.isclose(distances, mine, rtol=1e-12, atol=1e-12)
    nearer = ((distances < mine) & ~near).sum(axis=1) + 0.5 * (near.sum(axis=1) - 1)
    return 1 - nearer / len(distances)


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


def _ranks_of_all(predicted: np.ndarray, known: np.ndarray) -> np.ndarray:
    if len(known) < 2:
        return np.full(len(predicted), np.nan)
    similarity = _unit(predicted) @ _unit(known).T
    own = np.diagonal(similarity)[:, None]
    near = np.isclose(similarity, own, rtol=0, atol=1e-9)
    above = ((similarity > own) & ~near).sum(axis=1) + 0.5 * (near.sum(axis=1) - 1)
    return above / (len(known) - 1)


def _unit(values: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return np.divide(values, lengths, out=np.zeros_like(values), where=lengths > 0)
