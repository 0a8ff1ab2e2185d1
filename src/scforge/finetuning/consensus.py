"""Label query cells by classifiers on several views of the cells, and combine their probabilities.

Shapes: R reference cells, Q query cells, D dimensions, G genes, C classes, V views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from scforge.data.checks import log1p_cp10k_rows
from scforge.data.neighbors import components_of, harmony_correct
from scforge.data.statistics import most_variable
from scforge.finetuning.heads import balanced_weights, fit_logistic, fit_temperature, probabilities_of
from scforge.finetuning.new_cells import choose_labeled
from scforge.finetuning.unknown import HeldOut

if TYPE_CHECKING:
    from scforge.data.cells import Cells, CellSource

VIEWS = ("embedding", "harmony", "genes")
_N_GENES = 2_000
_AT_ONCE = 50_000
"""Number of query cells that are corrected together with the reference."""
_MOST_HELD_OUT, _LEAST_HELD_OUT, _FOLDS = 4_000, 50, 5
"""Maximum and minimum number of reference cells in folds, and number of folds."""
_STRENGTHS, _DEFAULT_STRENGTH = (0.01, 0.1, 1.0), 0.1
"""Inverse strengths of regularization to choose from, and the one for references that are too small for folds."""
_OF_FEW = {"embedding": 0.5, "harmony": 0.25, "genes": 0.25}
"""Weights of the views for such references, from which principal components and genes learn less than the embedding."""
_STEPS, _EQUAL = 10, 0.5
"""Steps of the search for the weights of views, and share of equal weights in the result."""
_TINY = 1e-6


@dataclass(frozen=True)
class Labeled:
    """Reference cells with labels, over the vocabulary of the query.

    Attributes
    ----------
    embeddings
        Embeddings of the cells, float32, shape (R, D).
    cells
        Their counts.
    batches
        Batch of each cell, str, shape (R,).
    classes
        Class of each cell, int64, shape (R,).
    """

    embeddings: np.ndarray
    cells: CellSource
    batches: np.ndarray
    classes: np.ndarray


@dataclass(frozen=True)
class Consensus:
    """Class probabilities of query cells, and how far the views agree.

    Attributes
    ----------
    probabilities
        Weighted geometric mean of the class probabilities of the views, scaled with `temperature`, float64, shape
        (Q, C).
    agreement
        Fraction of the views whose most probable class is that of `probabilities`, float32, shape (Q,). It is 0 if this
        class is the second choice of each view.
    weights
        Weight of each view.
    temperature
        Temperature of the probabilities, fitted on held-out reference cells.
    p_values
        Conformal p-value of each cell that it belongs to its most probable class, float32, shape (Q,), see
        :meth:`~scforge.finetuning.unknown.HeldOut.p_values`. Of cells of types that the reference contains, about 5 %
        have a p-value below 0.05. All are NaN if no reference cells are held out, e.g. of fewer than 50 cells.
    """

    probabilities: np.ndarray
    agreement: np.ndarray
    weights: dict[str, float]
    temperature: float
    p_values: np.ndarray


def consensus(
    reference: Labeled,
    embeddings: np.ndarray,
    cells: Cells,
    batches: np.ndarray,
    n_classes: int,
    *,
    views: Sequence[str] = VIEWS,
    seed: int = 0,
) -> Consensus:
    """Label query cells by a logistic regression on each of several views of the cells.

    The views are the embedding, principal components of reference and query that Harmony [1]_ corrects for batches, and
    the log1p CP10K values of variable genes that both measure. Their errors differ, so their geometric mean is more
    accurate than each of them (``benchmarks/label_transfer.py``). All classes have the same weight in training. The
    regularization, the weights of the views and the temperature are chosen on held-out reference batches, or on random
    folds if there is a single batch. The weights are then moved halfway to equal weights, because the encoder has been
    trained on the batches that are held out.

    Cells of types that the reference lacks have low p-values. The p-values compare each query cell with held-out
    reference cells of its predicted class: by the entropies of the views, by the distance to the nearest reference
    cells in the embedding, and by this distance relative to the nearest query cells. The latter is corrected for the
    difference between the medians of held-out and query cells. The sum of the three is averaged over neighboring cells.

    Parameters
    ----------
    reference
        The labeled cells.
    embeddings
        Embeddings of the query cells in the space of the reference, float32, shape (Q, D).
    cells
        The query cells. At most 50,000 of them are in memory at a time, and are corrected together.
    batches
        Batch of each query cell, str, shape (Q,). Batches of the reference with the same name are other batches.
    n_classes
        Number of classes C.
    views
        Which of "embedding", "harmony" and "genes" to use.
    seed
        Random seed for Harmony, the folds, and the groups of a large query.

    References
    ----------
    .. [1] Korsunsky et al. (2019), Nature Methods 16, 1289-1296.
    """
    classes, n_query = reference.classes, len(embeddings)
    shared = np.arange(reference.cells.counts.shape[1])
    for measured in (reference.cells.measured, cells.measured):
        shared = shared if measured is None else shared[measured[shared]]
    genes = shared[most_variable(reference.cells.counts[:, shared], reference.cells.totals, _N_GENES)]
    values = _values(reference.cells, genes)
    groups = np.array_split(np.random.default_rng(seed).permutation(n_query), -(-n_query // _AT_ONCE))
    heads: Any = None  # a _Heads after the first group
    held_out: HeldOut | None = None
    p_values = np.full(n_query, np.nan, dtype=np.float32)
    logs = {name: np.empty((n_query, n_classes)) for name in views}
    for rows in map(np.sort, groups):
        # Features of reference and query cells.
        features: dict[str, tuple[Any, Any]] = {}
        if len(views) > 1:
            part = cells.sample(len(rows), rows=rows)
            order = part.content_order()  # Harmony depends on the order
            part, rows = part.take(order), rows[order]
            features["genes"] = values, _values(part, genes)
            both = sparse.vstack(features["genes"]).tocsr()
            in_batches = np.concatenate([reference.batches, [f"query:{batch}" for batch in batches[rows]]])
            corrected = harmony_correct(components_of(both)[0], in_batches, seed=seed)
            features["harmony"] = corrected[: len(classes)], corrected[len(classes) :]
        features["embedding"] = reference.embeddings, embeddings[rows]
        if heads is None:
            learned = {name: features[name][0] for name in views}
            heads, folds, of_folds = _Heads.chosen(learned, classes, n_classes, reference.batches, seed)
            if folds:
                held_out = HeldOut.of(reference.embeddings, folds, of_folds, heads.combined(of_folds).argmax(axis=1))
        for name in views:
            learned_from, to_label = features[name]
            logs[name][rows] = _log_probabilities(learned_from, classes, n_classes, heads.strengths[name], to_label)
        if held_out is not None:
            log_probabilities = np.stack([logs[name][rows] for name in views])
            neighborhood = features["harmony" if "harmony" in features else "embedding"]
            p_values[rows] = held_out.p_values(
                embeddings[rows], log_probabilities, heads.combined(log_probabilities).argmax(axis=1), neighborhood
            )
    combined = np.sum([weight * logs[name] for name, weight in heads.weights.items()], axis=0)
    labels = combined.argmax(axis=1)
    agreement = np.mean([of_view.argmax(axis=1) == labels for of_view in logs.values()], axis=0, dtype=np.float32)
    return Consensus(
        probabilities_of(combined, heads.temperature), agreement, heads.weights, heads.temperature, p_values
    )


@dataclass(frozen=True)
class _Heads:
    """Regularization of each view, their weights, and the temperature of their mean."""

    strengths: dict[str, float]
    weights: dict[str, float]
    temperature: float

    @classmethod
    def chosen(
        cls, features: Mapping[str, Any], classes: np.ndarray, n_classes: int, batches: np.ndarray, seed: int
    ) -> tuple[_Heads, list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
        """Choose them by the log loss of held-out cells, with the same weight for each class.

        Returns
        -------
        The heads, the folds, and the log probabilities of their held-out cells by each view, shape (V, H, C).
        """
        logs: dict[str, dict[float, np.ndarray]] = {name: {} for name in features}
        folds = list(_folds(classes, batches, seed))
        equal = dict.fromkeys(features, 1 / len(features))
        if not folds:
            weights = {name: _OF_FEW[name] / sum(_OF_FEW[feature] for feature in features) for name in features}
            heads = cls(dict.fromkeys(features, _DEFAULT_STRENGTH), weights, 1.0)
            return heads, folds, np.empty((len(features), 0, n_classes))
        truth = classes[np.concatenate([held_out for _, held_out in folds])]
        of_cells = balanced_weights(truth, n_classes)[truth]

        def loss(logits: np.ndarray) -> float:
            normalized = np.log(probabilities_of(logits))
            return float(-(of_cells * normalized[np.arange(len(truth)), truth]).mean())

        for (name, view), strength in product(features.items(), _STRENGTHS):
            parts = [
                _log_probabilities(view[kept], classes[kept], n_classes, strength, view[held_out])
                for kept, held_out in folds
            ]
            logs[name][strength] = np.concatenate(parts)
        strengths = {}
        for name, of_view in logs.items():
            losses = {strength: loss(values) for strength, values in of_view.items()}
            strengths[name] = min(losses, key=losses.__getitem__)
        best = np.stack([logs[name][strengths[name]] for name in features])
        candidates = [shares for shares in product(range(_STEPS + 1), repeat=len(best)) if sum(shares) == _STEPS]
        shares = min(candidates, key=lambda candidate: loss(np.tensordot(candidate, best, axes=1) / _STEPS))
        weights = {
            name: _EQUAL * equal[name] + (1 - _EQUAL) * share / _STEPS
            for name, share in zip(features, shares, strict=True)
        }
        heads = cls(strengths, weights, 1.0)
        return replace(heads, temperature=fit_temperature(heads.combined(best), truth)), folds, best

    def combined(self, logs: np.ndarray) -> np.ndarray:
        """Return the weighted mean of the log probabilities of the views, shape (N, C)."""
        return np.tensordot(list(self.weights.values()), logs, axes=1)


def _folds(classes: np.ndarray, batches: np.ndarray, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows to learn from and rows to predict: of other batches, or of random folds of a single batch."""
    from sklearn.model_selection import GroupKFold, KFold

    rows = choose_labeled(classes, seed=seed, most=_MOST_HELD_OUT)
    n_batches = len(np.unique(batches[rows]))
    if len(rows) < _LEAST_HELD_OUT:
        return
    several = n_batches > 1
    folds = GroupKFold(min(_FOLDS, n_batches)) if several else KFold(_FOLDS, shuffle=True, random_state=seed)
    for kept, held_out in folds.split(rows, groups=batches[rows] if several else None):
        kept, held_out = rows[kept], rows[held_out]
        held_out = held_out[np.isin(classes[held_out], classes[kept])]
        if len(held_out):
            yield kept, held_out


def _log_probabilities(features: Any, classes: np.ndarray, n_classes: int, strength: float, others: Any) -> np.ndarray:
    """Return log probabilities of other cells by a logistic regression, in which each class has the same weight."""
    if sparse.issparse(features):  # centered, it would be dense
        center: Any = 0.0
        scale = np.maximum(np.abs(features).max(axis=0).toarray().ravel(), _TINY)
        scaled = features @ sparse.diags_array(1 / scale)
    else:
        center, scale = features.mean(axis=0), np.maximum(features.std(axis=0), _TINY)
        scaled = (features - center) / scale
    balanced = balanced_weights(classes, n_classes)
    weights, biases = fit_logistic(scaled, classes, n_classes, balanced, strength)
    weights = weights / scale
    logits = others @ weights.T + (biases - (weights * center).sum(axis=1))
    return np.log(probabilities_of(np.asarray(logits)) + _TINY)


def _values(cells: CellSource, genes: np.ndarray) -> sparse.csr_matrix:
    """Return log1p CP10K values of some genes, shape (N, number of genes)."""
    return log1p_cp10k_rows(sparse.csr_matrix(cells.counts)[:, genes], np.maximum(cells.totals, 1.0))
