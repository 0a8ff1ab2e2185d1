"""How well labels can be read off an embedding.

Shapes: N cells, D dimensions.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from scforge.errors import DataError, OptionError, did_you_mean, listing
from scforge.eval.base import Benchmark, register_benchmark

__all__ = ["LabelPrediction"]


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
        if n_folds < 2:
            raise OptionError(f"n_folds={n_folds} is too few; cross-validation needs at least 2.")
        self.labels_key = labels_key
        self.n_folds = n_folds
        self.n_neighbors = n_neighbors
        self.seed = seed

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

        labelled, labels = self._labels(obs)
        cells = np.asarray(embedding)[labelled]
        if not np.isfinite(cells).all():
            raise DataError("the embedding holds values that are not numbers; it cannot be evaluated.")
        folds = StratifiedKFold(self.n_folds, shuffle=True, random_state=self.seed)
        models = {
            "knn_macro_f1": KNeighborsClassifier(self.n_neighbors),
            "logreg_macro_f1": make_pipeline(StandardScaler(), LogisticRegression(max_iter=2_000)),
        }
        return {
            name: float(f1_score(labels, cross_val_predict(model, cells, labels, cv=folds), average="macro"))
            for name, model in models.items()
        }

    def _labels(self, obs: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        if self.labels_key not in obs:
            columns = list(obs.columns)
            raise DataError(
                f"labels_key={self.labels_key!r} is not a column of obs{did_you_mean(self.labels_key, columns) or ';'} "
                f"(obs has: {listing(columns)})"
            )
        column = obs[self.labels_key]
        labelled = np.asarray(column.notna())
        labels = np.asarray(column, dtype=object)[labelled].astype(str)
        names, sizes = np.unique(labels, return_counts=True)
        if len(names) < 2:
            raise DataError(f"obs[{self.labels_key!r}] has {len(names)} different labels; at least 2 are needed.")
        if (sizes < self.n_folds).any():
            raise DataError(
                f"label {str(names[sizes.argmin()])!r} has {sizes.min()} cells, fewer than n_folds={self.n_folds}; "
                "leave it out or lower n_folds."
            )
        return labelled, labels
