"""How well labels can be read off an embedding.

Shapes: N cells, D dimensions.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from scforge._checks import check_count, check_seed
from scforge.errors import DataError, OptionError
from scforge.eval.base import Benchmark, check_column, register_benchmark

__all__ = ["LabelPrediction", "check_finite", "check_folds", "check_neighbors", "labels_of"]


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
        from sklearn.linear_model import LogisticRegression
        from sklearn.metrics import f1_score
        from sklearn.model_selection import StratifiedKFold, cross_val_predict
        from sklearn.neighbors import KNeighborsClassifier
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        kept, labels = self._labels(obs)
        cells = check_finite(embedding)[kept]
        folds = StratifiedKFold(self.n_folds, shuffle=True, random_state=self.seed)
        models = {
            "knn_macro_f1": KNeighborsClassifier(self.n_neighbors),
            "logreg_macro_f1": make_pipeline(StandardScaler(), LogisticRegression(max_iter=2_000)),
        }
        return {
            name: float(f1_score(labels, cross_val_predict(model, cells, labels, cv=folds), average="macro"))
            for name, model in models.items()
        }

    def check(self, obs: pd.DataFrame) -> None:
        """Raise :class:`~scforge.errors.DataError` where :meth:`run` would."""
        self._labels(obs)

    def _labels(self, obs: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the cells that take part, and their labels."""
        labelled, labels = labels_of(obs, self.labels_key)
        names, sizes = np.unique(labels, return_counts=True)
        if (sizes < self.n_folds).any():
            raise DataError(
                f"label {str(names[sizes.argmin()])!r} has {sizes.min()} cells, fewer than n_folds={self.n_folds}; "
                "leave it out, lower n_folds, or take cell_type_annotation, which passes over rare types."
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
    """Return an embedding as an array, or raise :class:`~scforge.errors.DataError` if it holds NaN or infinity."""
    embedding = np.asarray(embedding)
    if not np.isfinite(embedding).all():
        raise DataError("the embedding holds values that are not numbers; it cannot be evaluated.")
    return embedding


def labels_of(obs: pd.DataFrame, key: str, *, argument: str = "labels_key") -> tuple[np.ndarray, np.ndarray]:
    """Return which cells have a label, bool, shape (N,), and the labels of those, as text.

    Raises
    ------
    DataError
        If the column is missing, or there are fewer than two labels.
    """
    check_column(argument, key, obs)
    labelled = np.asarray(obs[key].notna())
    labels = np.asarray(obs[key], dtype=object)[labelled].astype(str)
    n_labels = len(np.unique(labels))
    if n_labels < 2:
        what = argument.removesuffix("_key").replace("batch", "batches")
        raise DataError(f"obs[{key!r}] has {n_labels} different {what}; at least 2 are needed.")
    return labelled, labels
