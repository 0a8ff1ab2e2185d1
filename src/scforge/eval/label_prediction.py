"""How well labels can be read off an embedding.

Shapes: N cells, D dimensions.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pandas as pd

from scforge._checks import check_count, check_seed
from scforge.errors import DataError, OptionError, listing, warn
from scforge.eval.base import Benchmark, as_array, check_column, register_benchmark
from scforge.eval.statistics import bootstrap_weights, weighted_f1

__all__ = [
    "LabelPrediction",
    "check_embedding",
    "check_finite",
    "check_folds",
    "check_neighbors",
    "labels_of",
    "warn_of_missing",
]

_MISSING_TEXTS = ("nan", "NaN", "None", "<NA>", "", "unknown")
"""Labels that may stand for none."""


@register_benchmark("label_prediction")
class LabelPrediction(Benchmark):
    """Cross-validated macro-F1 of k nearest neighbours and of logistic regression.

    The folds are stratified and the same for every embedding. Cells without a label take no part. The logistic
    regression sees standardised dimensions; the scaling is fitted on the training folds.

    Parameters
    ----------
    labels_key
        Column of obs with the labels.
    n_folds
        Number of folds.
    n_neighbors
        Neighbours k.
    seed
        Seed of the folds.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> labels = np.repeat(["a", "b"], 50)
    >>> embedding = np.random.default_rng(0).normal(size=(100, 2)) + (labels == "a")[:, None] * 10
    >>> LabelPrediction("label").run(embedding, pd.DataFrame({"label": labels}))
    {'knn_macro_f1': 1.0, 'logreg_macro_f1': 1.0}
    """

    metrics = ("knn_macro_f1", "logreg_macro_f1")
    n_draws = 1_000
    _last: tuple[bytes, dict[str, np.ndarray]] | None = None

    def __init__(self, labels_key: str, n_folds: int = 5, n_neighbors: int = 15, seed: int = 0) -> None:
        check_folds(n_folds, n_neighbors)
        self.labels_key = labels_key
        self.n_folds = n_folds
        self.n_neighbors = n_neighbors
        self.seed = check_seed(seed)

    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        """Return ``knn_macro_f1`` and ``logreg_macro_f1``, in [0, 1].

        Raises
        ------
        DataError
            If the column is missing, or a label has fewer cells than there are folds.
        """
        from sklearn.metrics import f1_score

        labels, predicted = self._predicted(embedding, obs)
        return {name: float(f1_score(labels, found, average="macro")) for name, found in predicted.items()}

    def resampled(self, embedding: np.ndarray, obs: pd.DataFrame, *, n: int, seed: int) -> pd.DataFrame:
        """Return the figures on bootstrapped cells, each with the label that was predicted for it in its fold."""
        labels, predicted = self._predicted(embedding, obs)
        names, codes = np.unique(labels, return_inverse=True)
        weights = bootstrap_weights(len(labels), n, seed=seed)
        draws = {
            name: weighted_f1(codes, np.searchsorted(names, found), len(names), weights)[:, 0]
            for name, found in predicted.items()
        }
        return pd.DataFrame(draws)

    def _predicted(self, embedding: np.ndarray, obs: pd.DataFrame) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the labels, and those that each model predicts for cells that it did not see; the last are kept."""
        from sklearn.model_selection import StratifiedKFold, cross_val_predict

        kept, labels = self._labels(obs)
        cells = check_embedding(embedding, len(obs))[kept]
        asked = hashlib.blake2b(repr((cells.shape, self.seed, labels.tolist())).encode())
        asked.update(np.ascontiguousarray(cells).tobytes())
        if self._last is None or self._last[0] != asked.digest():
            folds = StratifiedKFold(self.n_folds, shuffle=True, random_state=self.seed)
            found = {name: cross_val_predict(model, cells, labels, cv=folds) for name, model in self._models().items()}
            self._last = asked.digest(), found
        return labels, self._last[1]

    def _models(self) -> dict[str, Any]:
        from sklearn.linear_model import LogisticRegression
        from sklearn.neighbors import KNeighborsClassifier
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        return {
            "knn_macro_f1": KNeighborsClassifier(self.n_neighbors),
            "logreg_macro_f1": make_pipeline(StandardScaler(), LogisticRegression(max_iter=2_000)),
        }

    def check(self, obs: pd.DataFrame) -> None:
        """Raise :class:`~scforge.errors.DataError` where :meth:`run` would."""
        self._labels(obs)
        warn_of_missing(obs, self.labels_key)

    def describe(self, obs: pd.DataFrame) -> dict[str, str]:
        """Return how many cells are scored, which labels are left out, and what is drawn again for intervals."""
        facts = {"cells scored": f"{len(self._labels(obs)[0]):,} of {len(obs):,}"}
        if left_out := self._left_out(obs):
            facts["labels left out"] = ", ".join(left_out)
        return facts | {"drawn again": "cells"}

    def _left_out(self, obs: pd.DataFrame) -> tuple[str, ...]:
        """Return the labels that take no part, each with the number of its cells; here, none."""
        return ()

    def _labels(self, obs: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the cells that take part, and their labels."""
        labelled, labels = labels_of(obs, self.labels_key)
        names, sizes = np.unique(labels, return_counts=True)
        if (sizes < self.n_folds).any():
            rarest = f"label {str(names[sizes.argmin()])!r} has {sizes.min()} cells"
            raise DataError(
                f"labels_key={self.labels_key!r}: {rarest}, fewer than n_folds={self.n_folds}; leave it out, lower "
                "n_folds, or take cell_type_annotation, which passes over rare types."
            )
        check_neighbors(self.n_neighbors, self.n_folds, len(labels))
        return np.flatnonzero(labelled), labels


def check_folds(n_folds: int, n_neighbors: int) -> None:
    """Raise :class:`~scforge.errors.OptionError` unless so many folds and neighbours make sense."""
    check_count("n_folds", n_folds, "folds")
    if n_folds < 2:
        raise OptionError(f"n_folds={n_folds} is too few; cross-validation needs at least 2.")
    check_count("n_neighbors", n_neighbors, "cells")


def check_neighbors(n_neighbors: int, n_folds: int, n_cells: int) -> None:
    """Raise :class:`~scforge.errors.DataError` if the training folds have fewer cells than neighbours are asked for."""
    fewest = n_cells - -(-n_cells // n_folds)
    if n_neighbors > fewest:
        raise DataError(
            f"n_neighbors={n_neighbors} is more than the {fewest} labelled cells that n_folds={n_folds} leaves to "
            "learn from; lower it or score more cells."
        )


def check_finite(embedding: np.ndarray) -> np.ndarray:
    """Return an embedding as an array, or raise :class:`~scforge.errors.DataError` if it holds NaN or infinity.

    A sparse matrix, or a table of numbers, is one, too.
    """
    embedding = as_array(embedding)
    if not np.isfinite(embedding).all():
        raise DataError("the embedding holds values that are not numbers; it cannot be evaluated.")
    return embedding


def check_embedding(embedding: np.ndarray, n_cells: int) -> np.ndarray:
    """Return an embedding of so many cells as floats, shape (N, D), or raise :class:`~scforge.errors.DataError`."""
    embedding = check_finite(embedding)
    if embedding.ndim != 2 or embedding.shape[0] != n_cells or embedding.shape[1] == 0:
        raise DataError(
            f"the embedding has the shape {embedding.shape}, but there are {n_cells} cells; give one row for each, in "
            "the order of obs."
        )
    return embedding if embedding.dtype in (np.float32, np.float64) else embedding.astype(np.float32)


def labels_of(obs: pd.DataFrame, key: str, *, argument: str = "labels_key") -> tuple[np.ndarray, np.ndarray]:
    """Return which cells have a label, bool, shape (N,), and the labels of those, as text.

    Raises
    ------
    DataError
        If the column is missing, there are fewer than two labels, or two of them are the same text, e.g. 1 and "1".
    """
    check_column(argument, key, obs)
    labelled = np.asarray(obs[key].notna())
    labels = np.asarray(obs[key], dtype=object)[labelled].astype(str)
    n_labels = len(np.unique(labels))
    texts: dict[str, Any] = {}
    for value in pd.unique(np.asarray(obs[key], dtype=object)[labelled]):
        if (other := texts.setdefault(str(value), value)) is not value:
            kinds = type(other).__name__, type(value).__name__
            raise DataError(
                f"{argument}={key!r} holds {str(value)!r} as {kinds[0]} and as {kinds[1]}, which are one text; rename "
                "one of them, or make all of them text."
            )
    if n_labels < 2:
        found = f"one value only ({str(labels[0])!r})" if n_labels else "no value in any cell"
        raise DataError(f"{argument}={key!r} has {found}; choose a column with two or more.")
    return labelled, labels


def warn_of_missing(obs: pd.DataFrame, key: str, *, argument: str = "labels_key") -> None:
    """Warn of labels that may stand for a missing one, e.g. the text "nan"."""
    if odd := [text for text in _MISSING_TEXTS if (obs[key].astype(object) == text).any()]:
        warn(
            f"{argument}={key!r} has the label {listing(odd)}, which is taken for a class; if it stands for a missing "
            "label, replace it by numpy.nan."
        )
