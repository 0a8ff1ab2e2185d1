"""Front classes in the style of scvi-tools: AnnData in, AnnData out."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "Encoder": "scforge.estimators.encoder",
    "train_from_config": "scforge.estimators.from_config",
}

__all__ = ["Encoder", "train_from_config"]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
