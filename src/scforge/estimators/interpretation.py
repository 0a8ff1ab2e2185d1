"""What a front class says of genes: embedded, attended to, imputed, and perturbed in silico.

Shapes: N cells, G genes of the vocabulary, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scforge._checks import check_count, check_seed
from scforge.errors import OptionError
from scforge.estimators.choices import Source, ready
from scforge.insilico.imputation import check_predicts
from scforge.training.objectives.base import Objective

if TYPE_CHECKING:
    from scforge.estimators.base import CellModel


def predicting(model: CellModel, adata: Source | None, batch_size: int, seed: int) -> tuple[Source, Objective]:
    """Return cells, and the objective of a model that predicts expression."""
    check_count("batch_size", batch_size, "cells")
    check_seed(seed)
    source, objective = ready(model, adata, "what it predicts is"), model.spec.build_pretraining()
    check_predicts(objective)
    if model.backbone is not model.module:
        raise OptionError(
            "the model was fine-tuned, which what predicts its expression has not followed; call the model that it was "
            "made of."
        )
    return source, objective
