"""Objectives: what a training step minimizes, one a file, independent of the architecture."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "JointEmbedding": "scforge.training.objectives.joint_embedding",
    "MaskedDiffusion": "scforge.training.objectives.masked_diffusion",
    "MaskedGenePrediction": "scforge.training.objectives.masked_gene_prediction",
    "MaskedValuePrediction": "scforge.training.objectives.masked_value_prediction",
    "NeighborDenoising": "scforge.training.objectives.neighbor_denoising",
    "NextGenePrediction": "scforge.training.objectives.next_gene_prediction",
    "Objective": "scforge.training.objectives.base",
    "Variational": "scforge.training.objectives.variational",
    "get_objective": "scforge.training.objectives.base",
    "list_objectives": "scforge.training.objectives.base",
    "register_objective": "scforge.training.objectives.base",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "Objective",
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
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
