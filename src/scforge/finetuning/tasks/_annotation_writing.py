"""Predicted classes of cells, and where they are written.

Shapes: N cells, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scforge._checks import check_bool, check_share
from scforge.data.cells import column_of
from scforge.errors import OptionError, warn
from scforge.finetuning.calibration import normalised_entropy, probabilities_of
from scforge.finetuning.voting import HETEROGENEOUS, majority_vote, over_cluster
from scforge.finetuning.writing import write_probabilities

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.finetuning.context import Predictor
    from scforge.finetuning.tasks.annotation import Annotation

__all__ = ["UNASSIGNED", "class_probabilities", "predict_classes"]

UNASSIGNED = "unassigned"
"""What cells are called whose confidence is below the threshold."""


def class_probabilities(predictor: Predictor, rows: np.ndarray | None = None) -> np.ndarray:
    """Return calibrated probabilities of each class, float64, shape (N, C)."""
    temperature = float(predictor.module.head.temperature)
    return probabilities_of(predictor.outputs(rows), temperature)


def predict_classes(
    task: Annotation,
    predictor: Predictor,
    adata: AnnData | None,
    *,
    key_added: str | None,
    soft: bool,
    threshold: float | None,
    majority_voting: bool | str,
    min_share: float,
) -> pd.DataFrame:
    """See :meth:`scforge.finetuning.tasks.annotation.Annotation.predict`."""
    check_bool("soft", soft)
    if threshold is not None:
        check_share("threshold", threshold)
    if not isinstance(majority_voting, bool | str):
        raise OptionError(
            f"majority_voting={majority_voting!r} is neither True, False nor the name of a column of obs."
        )
    check_share("min_share", min_share)
    clusters = _clusters_given(predictor, adata, majority_voting)
    if threshold is not None and float(predictor.module.head.temperature) == 1.0:
        warn(
            f"threshold={threshold}: the confidence of this model is not calibrated: it had no validation cells "
            "or is a state of its training, and may be too high; use what finetune returned, with validation_size > 0."
        )
    probabilities = class_probabilities(predictor)
    names = np.array(task.known_classes, dtype=object)
    labels, confidence = names[probabilities.argmax(axis=1)], probabilities.max(axis=1)
    categories = list(task.known_classes)
    if threshold is not None:
        labels[confidence < threshold] = UNASSIGNED
        categories += [UNASSIGNED] * (UNASSIGNED not in categories)
    index = pd.RangeIndex(len(labels)) if adata is None else adata.obs_names
    found = pd.DataFrame(
        {
            "label": pd.Categorical(labels, categories=categories),
            "confidence": confidence.astype(np.float32),
            "entropy": normalised_entropy(probabilities).astype(np.float32),
        },
        index=index,
    )
    if majority_voting is not False:
        if clusters is None:
            clusters = over_cluster(predictor.embedding())
        voted = majority_vote(labels, clusters, min_share=min_share)
        more = [HETEROGENEOUS] * (min_share > 0 and HETEROGENEOUS not in categories)
        found["voted"] = pd.Categorical(voted, categories=[*categories, *more])
    table = pd.DataFrame(probabilities.astype(np.float32), index=index, columns=task.known_classes)
    if adata is not None:
        _write(adata, found, f"scforge_{task.labels_key}", key_added)
        if soft:
            write_probabilities(adata, key_added or f"scforge_{task.labels_key}", table)
    return table if soft else found


def _clusters_given(predictor: Predictor, adata: AnnData | None, majority_voting: bool | str) -> pd.Series | None:
    if isinstance(majority_voting, bool):
        return None
    if adata is not None:
        return column_of(adata.obs, majority_voting)
    return predictor.cells.column(majority_voting)


def _write(adata: AnnData, found: pd.DataFrame, usual: str, key_added: str | None) -> None:
    key = key_added or usual
    for name in found:
        adata.obs[key if name == "label" else f"{key}_{name}"] = found[name]
    if key_added is None:
        for name in ("confidence", "entropy"):  # of the latest annotator, which may be one of several
            adata.obs[f"scforge_{name}"] = found[name]
