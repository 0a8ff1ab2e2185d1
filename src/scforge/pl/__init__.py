"""Plots (matplotlib) of what scforge wrote into an AnnData."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {"embeddings": "scforge.pl.umap", "training_curves": "scforge.pl.curves"}

__all__ = ["embeddings", "training_curves"]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
