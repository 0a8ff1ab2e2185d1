"""Training: one plan, pluggable objectives, Lightning's Trainer."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "BatchLoader": "scforge.training.loading",
    "CellDataModule": "scforge.training.datamodule",
    "FitResult": "scforge.training.fitting",
    "JointEmbedding": "scforge.training.objectives.joint_embedding",
    "MaskedGenePrediction": "scforge.training.objectives.masked_gene_prediction",
    "MaskedValuePrediction": "scforge.training.objectives.masked_value_prediction",
    "NextGenePrediction": "scforge.training.objectives.next_gene_prediction",
    "Objective": "scforge.training.objectives.base",
    "TrainingDefaults": "scforge.training.objectives.base",
    "TrainingPlan": "scforge.training.plan",
    "embed": "scforge.training.predict",
    "fit": "scforge.training.fitting",
    "get_objective": "scforge.training.objectives.registry",
    "list_objectives": "scforge.training.objectives.registry",
    "register_objective": "scforge.training.objectives.registry",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "TrainingPlan",
    "CellDataModule",
    "BatchLoader",
    "fit",
    "FitResult",
    "embed",
    "Objective",
    "TrainingDefaults",
    "MaskedGenePrediction",
    "MaskedValuePrediction",
    "NextGenePrediction",
    "JointEmbedding",
    "register_objective",
    "get_objective",
    "list_objectives",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
