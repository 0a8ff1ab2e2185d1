"""Predicted classes of cells beside those of baselines.

Shapes: N cells, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scforge.errors import DataError, listing
from scforge.eval.prediction_baselines import classification_baselines
from scforge.finetuning.baselines import baseline_inputs
from scforge.finetuning.context import Evaluated
from scforge.finetuning.labels import UNKNOWN, UNLABELLED
from scforge.finetuning.metrics import calibration_error, class_table, confusion_figures, confusion_of
from scforge.finetuning.tasks._annotation_writing import class_probabilities

if TYPE_CHECKING:
    from scforge.finetuning.context import EvaluationContext
    from scforge.finetuning.tasks.annotation import Annotation

__all__ = ["evaluate_classes"]


def evaluate_classes(task: Annotation, context: EvaluationContext) -> Evaluated:
    """See :meth:`scforge.finetuning.tasks.annotation.Annotation.evaluate`."""
    column = context.cells.column(task.labels_key).iloc[context.rows]
    codes = task.codes_of(column)
    rows, truth = context.rows[codes >= 0], codes[codes >= 0]
    if not len(rows):
        raise DataError(
            f"labels_key={task.labels_key!r} has no label that the model knows among the {len(codes)} scored cells "
            f"(it knows: {listing(task.known_classes)}); rename the labels of the data."
        )
    methods = {"scforge": class_probabilities(context.predictor, rows)}
    inputs = baseline_inputs(context, rows)
    if inputs is not None:
        assert context.train_cells is not None
        training = task.codes_of(context.train_cells.column(task.labels_key).iloc[inputs.rows])
        methods |= classification_baselines(inputs, training, len(task.known_classes))
    counts = {
        "n_scored": len(rows),
        "n_unknown_label": int((codes == UNKNOWN).sum()),
        "n_unlabelled": int((codes == UNLABELLED).sum()),
    }
    table = {name: {**_figures(truth, found), **counts} for name, found in methods.items()}
    confusion = confusion_of(truth, methods["scforge"].argmax(axis=1), len(task.known_classes))
    names = pd.Index(task.known_classes, name=task.labels_key)
    return Evaluated(
        pd.DataFrame.from_dict(table, orient="index").rename_axis("method"),
        {
            "per_class": pd.DataFrame(class_table(confusion), index=names),
            "confusion": _pairs(confusion, task.known_classes),
        },
    )


def _pairs(confusion: np.ndarray, classes: list[str]) -> pd.DataFrame:
    """Return a confusion matrix as a table that an h5ad file takes: names of classes may hold a slash."""
    names = np.array(classes, dtype=object)
    n_classes = len(names)
    return pd.DataFrame(
        {"label": np.repeat(names, n_classes), "predicted": np.tile(names, n_classes), "n_cells": confusion.ravel()}
    )


def _figures(truth: np.ndarray, probabilities: np.ndarray) -> dict[str, float]:
    predicted = probabilities.argmax(axis=1)
    return {
        **confusion_figures(confusion_of(truth, predicted, probabilities.shape[1])),
        "calibration_error": calibration_error(probabilities.max(axis=1), predicted == truth),
    }
