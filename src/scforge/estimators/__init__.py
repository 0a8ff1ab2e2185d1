"""Model classes in the style of scvi-tools, which read and write AnnData."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {"Encoder": "scforge.estimators.encoder", "ScDiVa": "scforge.estimators.scdiva"}

__all__ = ["Encoder", "ScDiVa"]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
