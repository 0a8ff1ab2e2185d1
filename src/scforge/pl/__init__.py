"""Matplotlib plots of scforge results in an AnnData, and of scforge tables."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "annotation": "scforge.pl.transferred",
    "attention_heatmap": "scforge.pl.networks",
    "calibration": "scforge.pl.predictions",
    "confusion_matrix": "scforge.pl.predictions",
    "embeddings": "scforge.pl.umap",
    "in_silico_ranking": "scforge.pl.perturbations",
    "integration": "scforge.pl.umap",
    "metrics": "scforge.pl.scores",
    "perturbation_ranks": "scforge.pl.perturbations",
    "perturbation_scatter": "scforge.pl.perturbations",
    "precision_recall": "scforge.pl.networks",
    "scib_table": "scforge.pl.scores",
    "training_curves": "scforge.pl.curves",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
