"""Training: one plan, pluggable objectives, Lightning's Trainer."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "BatchLoader": "scforge.training.datamodule",
    "CellDataModule": "scforge.training.datamodule",
    "JointEmbedding": "scforge.training.objectives.joint_embedding",
    "MaskedDiffusion": "scforge.training.objectives.masked_diffusion",
    "MaskedGenePrediction": "scforge.training.objectives.masked_gene_prediction",
    "MaskedValuePrediction": "scforge.training.objectives.masked_value_prediction",
    "NeighborDenoising": "scforge.training.objectives.neighbor_denoising",
    "NextGenePrediction": "scforge.training.objectives.next_gene_prediction",
    "Objective": "scforge.training.objectives.base",
    "TrainOptions": "scforge.training.options",
    "TrainingDefaults": "scforge.training.objectives.base",
    "TrainingPlan": "scforge.training.plan",
    "Variational": "scforge.training.objectives.variational",
    "get_objective": "scforge.training.objectives.base",
    "list_objectives": "scforge.training.objectives.base",
    "make_loggers": "scforge.training.monitoring",
    "register_objective": "scforge.training.objectives.base",
    "token_counts": "scforge.training.objectives.token_frequencies",
    "token_entropy": "scforge.training.objectives.token_frequencies",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "TrainingPlan",
    "CellDataModule",
    "BatchLoader",
    "make_loggers",
    "TrainOptions",
    "Objective",
    "TrainingDefaults",
    "MaskedGenePrediction",
    "MaskedValuePrediction",
    "NextGenePrediction",
    "NeighborDenoising",
    "JointEmbedding",
    "Variational",
    "MaskedDiffusion",
    "register_objective",
    "get_objective",
    "list_objectives",
    "token_counts",
    "token_entropy",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
