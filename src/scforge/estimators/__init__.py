"""Front classes in the style of scvi-tools: AnnData in, AnnData out."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "Encoder": "scforge.estimators.encoder",
    "ScDiVa": "scforge.estimators.scdiva",
    "evaluate_embeddings": "scforge.estimators.evaluate",
    "evaluate_models": "scforge.estimators.evaluate",
}

__all__ = [
    "Encoder",
    "ScDiVa",
    "evaluate_embeddings",
    "evaluate_models",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
