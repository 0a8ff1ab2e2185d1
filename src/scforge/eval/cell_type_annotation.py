"""How well cell types can be read off an embedding, with types too rare to tell left out.

Shapes: N cells, D dimensions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from scforge.errors import DataError, warn
from scforge.eval.base import register_benchmark
from scforge.eval.label_prediction import LabelPrediction, check_neighbors, labels_of
from scforge.eval.statistics import bootstrap_weights, weighted_f1

__all__ = ["CellTypeAnnotation"]


@register_benchmark("cell_type_annotation")
class CellTypeAnnotation(LabelPrediction):
    """Cross-validated macro-F1 and accuracy of k nearest neighbours.

    Cheap enough to run during training, where :class:`~scforge.eval.LabelPrediction` would take long. The folds are
    stratified and the same for every embedding. Cells without a label take no part, and neither do those of a label
    that has fewer cells than there are folds: a warning names these.

    Parameters
    ----------
    labels_key
        Column of obs with the cell types.
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
    >>> CellTypeAnnotation("label").run(embedding, pd.DataFrame({"label": labels}))
    {'macro_f1': 1.0, 'accuracy': 1.0}
    """

    metrics = ("macro_f1", "accuracy")
    _warned_of: tuple[str, ...] = ()

    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        """Return ``macro_f1`` (the mean over labels) and ``accuracy`` (over cells), in [0, 1].

        Raises
        ------
        DataError
            If the column is missing, or fewer than two labels have enough cells.

        Warns
        -----
        ScforgeWarning
            If labels are left out; once for each set of them.
        """
        from sklearn.metrics import accuracy_score, f1_score

        labels, predicted = self._predicted(embedding, obs)
        return {
            "macro_f1": float(f1_score(labels, predicted["knn"], average="macro")),
            "accuracy": float(accuracy_score(labels, predicted["knn"])),
        }

    def resampled(self, embedding: np.ndarray, obs: pd.DataFrame, *, n: int, seed: int) -> pd.DataFrame:
        """Return the figures on bootstrapped cells, each with the label that was predicted for it in its fold."""
        labels, predicted = self._predicted(embedding, obs)
        names, codes = np.unique(labels, return_inverse=True)
        found = np.searchsorted(names, predicted["knn"])
        weights = bootstrap_weights(len(labels), n, seed=seed)
        return pd.DataFrame(weighted_f1(codes, found, len(names), weights), columns=list(self.metrics))

    def _models(self) -> dict[str, Any]:
        from sklearn.neighbors import KNeighborsClassifier

        return {"knn": KNeighborsClassifier(self.n_neighbors)}

    def _labels(self, obs: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the cells that take part, and their labels; warn of labels that are left out."""
        labelled, labels = labels_of(obs, self.labels_key)
        names, sizes = np.unique(labels, return_counts=True)
        rare = sizes < self.n_folds
        left_out = self._left_out(obs)
        if (~rare).sum() < 2:
            raise DataError(
                f"fewer than 2 labels of obs[{self.labels_key!r}] have the {self.n_folds} cells that n_folds asks for "
                f"(too few: {', '.join(left_out)}); lower n_folds or score more cells."
            )
        if left_out and left_out != self._warned_of:
            self._warned_of = left_out
            warn(
                f"cell_type_annotation leaves out labels of obs[{self.labels_key!r}] with fewer cells than "
                f"n_folds={self.n_folds}: {', '.join(left_out)}."
            )
        common = ~np.isin(labels, names[rare])
        check_neighbors(self.n_neighbors, self.n_folds, int(common.sum()))
        return np.flatnonzero(labelled)[common], labels[common]

    def _left_out(self, obs: pd.DataFrame) -> tuple[str, ...]:
        names, sizes = np.unique(labels_of(obs, self.labels_key)[1], return_counts=True)
        pairs = zip(names.tolist(), sizes, strict=True)
        return tuple(f"{name!r} ({size})" for name, size in pairs if size < self.n_folds)
