"""Find query cells of types that the reference lacks, by comparison with held-out reference cells.

Shapes: R reference cells, H held-out reference cells, Q query cells, D dimensions, C classes, V views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NEIGHBORS, _SMOOTHED, _OWN = 15, 9, 0.3
"""Neighbors for distances, maximum number of neighbors that a score is averaged with, and weight of the cell itself."""
_LEAST_CELLS = 19
"""Minimum number of held-out cells of a class; with fewer, a p-value cannot be 0.05."""
_MOST_OF_QUERY = 4_000
"""Maximum number of query cells among which neighbors are searched; the reference has as many held-out cells."""
_OUTLIER = 2.0
"""Maximum distance from the median, in units of the range between the 10 % and the 90 % quantile."""
_TINY = 1e-6


@dataclass(frozen=True)
class HeldOut:
    """Held-out reference cells and how well each of them fits the reference.

    Attributes
    ----------
    rows
        Rows of these cells in the reference, shape (H,).
    classes
        Predicted class of each cell, shape (H,).
    measures
        Three measures of each cell, shape (3, H), see :func:`_measures`.
    reference
        Embeddings of the reference cells that query cells are compared with, shape (R, D).
    """

    rows: np.ndarray
    classes: np.ndarray
    measures: np.ndarray
    reference: np.ndarray

    @classmethod
    def of(
        cls,
        embeddings: np.ndarray,
        folds: Sequence[tuple[np.ndarray, np.ndarray]],
        logs: np.ndarray,
        classes: np.ndarray,
    ) -> HeldOut:
        """Compare the held-out cells of each fold with its other cells.

        Parameters
        ----------
        embeddings
            Embeddings of all reference cells.
        folds
            Rows to learn from and held-out rows of each fold, at least one fold.
        logs
            Log probabilities of the held-out cells by each view, in the order of the folds, shape (V, H, C).
        classes
            Predicted classes of the held-out cells, shape (H,).
        """
        rows = np.concatenate([held_out for _, held_out in folds])
        parts = np.split(logs, np.cumsum([len(held_out) for _, held_out in folds])[:-1], axis=1)
        measures = [
            _measures(part, embeddings[held_out], embeddings[kept])
            for part, (kept, held_out) in zip(parts, folds, strict=True)
        ]
        compared = np.unique(np.concatenate([*folds[0], rows]))
        return cls(rows, classes, np.concatenate(measures, axis=1), embeddings[compared])

    def p_values(
        self,
        embeddings: np.ndarray,
        logs: np.ndarray,
        classes: np.ndarray,
        neighborhood: tuple[np.ndarray, np.ndarray],
    ) -> np.ndarray:
        """Return the conformal p-value of each query cell that it belongs to its predicted class, float32, shape (Q,).

        The score of a cell is the sum of its standardized measures, averaged with those of its nearest neighbors. Its
        p-value is the fraction of held-out cells of the predicted class with at least this score (Vovk et al. 2005,
        Algorithmic Learning in a Random World); of all held-out cells if there are fewer than 19 of this class. The
        fraction of known cells with a p-value below 0.05 is about 0.05 if held-out and query cells differ from the
        reference in the same way, which batches never do exactly. A type that is rare in the reference and frequent in
        the query looks unknown, because its cells are much nearer to each other than to the reference.

        Parameters
        ----------
        embeddings
            Embeddings of the query cells.
        logs
            Their log probabilities by each view, shape (V, Q, C).
        classes
            Their predicted classes, shape (Q,).
        neighborhood
            Features of all reference cells and of the query cells, in which neighbors are searched for averaging.
        """
        measures = _measures(logs, embeddings, self.reference)
        # Another batch is farther from the reference than from itself.
        measures[-1] += np.median(self.measures[-1]) - np.median(measures[-1])
        low, center, high = np.quantile(self.measures, (0.1, 0.5, 0.9), axis=1)[..., None]
        scale = np.maximum(high - low, _TINY)
        k = min(_SMOOTHED, len(classes) // 10, len(self.rows) // 10)
        held_out, query = (
            _smoothed(((measure - center) / scale).clip(-_OUTLIER, _OUTLIER).sum(axis=0), features, k)
            for measure, features in (
                (self.measures, neighborhood[0][self.rows]),
                (measures, neighborhood[1]),
            )
        )
        p_values = np.empty(len(classes), dtype=np.float32)
        for label in np.unique(classes):
            of_class = held_out[self.classes == label]
            scores = np.sort(of_class if len(of_class) >= _LEAST_CELLS else held_out)
            is_class = classes == label
            n_below = np.searchsorted(scores, query[is_class])
            p_values[is_class] = (1 + len(scores) - n_below) / (1 + len(scores))
        return p_values


def _measures(logs: np.ndarray, embeddings: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return three measures of cells that are high for unknown types, shape (3, N).

    They are the sum of the entropies of the views, the log distance to the nearest reference cells, and the same minus
    the log distance to the nearest of the cells themselves.
    """
    from sklearn.neighbors import NearestNeighbors

    entropy = -(np.exp(logs) * logs).sum(axis=(0, 2))
    index = NearestNeighbors(n_neighbors=min(_NEIGHBORS, len(reference)), algorithm="brute").fit(reference)
    distance = np.log(index.kneighbors(embeddings)[0].mean(axis=1) + _TINY)
    among, _ = _neighbors(embeddings, _NEIGHBORS)
    own = np.log(among.mean(axis=1) + _TINY) if among.size else distance
    return np.stack([entropy, distance, distance - own])


def _smoothed(scores: np.ndarray, features: np.ndarray, k: int) -> np.ndarray:
    """Return the weighted mean of the score of each cell and the mean of its k nearest neighbors."""
    nearest = _neighbors(features, k)[1]
    return _OWN * scores + (1 - _OWN) * scores[nearest].mean(axis=1) if nearest.size else scores


def _neighbors(features: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return distances to and rows of the nearest of at most 4,000 other cells, whose choice ignores their order."""
    from sklearn.neighbors import NearestNeighbors

    n = len(features)
    chosen = np.arange(n)
    if n > _MOST_OF_QUERY:
        chosen = np.lexsort(features.T)[np.linspace(0, n - 1, _MOST_OF_QUERY).astype(int)]
    index = NearestNeighbors(n_neighbors=min(k + 1, len(chosen)), algorithm="brute").fit(features[chosen])
    distances, nearest = index.kneighbors(features)
    nearest = chosen[nearest]
    left_out = nearest == np.arange(n)[:, None]
    left_out[~left_out.any(axis=1), -1] = True  # of cells that are not among their own neighbors
    return distances[~left_out].reshape(n, -1), nearest[~left_out].reshape(n, -1)
