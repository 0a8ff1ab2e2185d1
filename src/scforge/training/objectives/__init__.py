"""Objectives: the losses that training minimizes, defined independently of the architecture, one per file."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "Objective": "scforge.training.objectives.base",
    "MaskedGenePrediction": "scforge.training.objectives.masked_gene_prediction",
    "MaskedValuePrediction": "scforge.training.objectives.masked_value_prediction",
    "NextGenePrediction": "scforge.training.objectives.next_gene_prediction",
    "NeighborDenoising": "scforge.training.objectives.neighbor_denoising",
    "JointEmbedding": "scforge.training.objectives.joint_embedding",
    "Variational": "scforge.training.objectives.variational",
    "MaskedDiffusion": "scforge.training.objectives.masked_diffusion",
    "register_objective": "scforge.training.objectives.base",
    "get_objective": "scforge.training.objectives.base",
    "list_objectives": "scforge.training.objectives.base",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
