"""What the baselines of an evaluation learn from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from scforge.errors import warn
from scforge.eval.baselines import BaselineInputs

if TYPE_CHECKING:
    from scforge.finetuning.base import EvaluationContext


FROZEN = "frozen_embedding"
"""Name of the baseline that learns from the embedding of the model before fine-tuning."""


def baseline_inputs(context: EvaluationContext, rows: np.ndarray) -> BaselineInputs | None:
    """Return what baselines see of the training cells and of the scored cells `rows`; None if they are not wanted.

    Warns
    -----
    ScforgeWarning
        If the training cells, or the model before fine-tuning, are not at hand, so that baselines are missing.
    """
    if not context.baselines:
        return None
    if context.train_cells is None or context.train_rows is None:
        warn(
            "the cells of the fine-tuning are not at hand, so that no baseline can learn from them and the figures "
            "stand alone; evaluate where the model was fine-tuned."
        )
        return None
    inputs = BaselineInputs.of(context.train_cells, context.train_rows, context.cells, rows, seed=context.seed)
    if context.base is None or context.base_train is None:
        warn(
            "the model before fine-tuning is not at hand, so that the baseline of its frozen embedding is missing; "
            "pass base= (--base-model), the model or its folder."
        )
        return inputs
    frozen = context.base_train.embedding(inputs.rows), context.base.embedding(rows)
    return replace(inputs, embeddings={FROZEN: frozen})
