"""Find models by name on the Hugging Face Hub, in a registry or in a folder. This package handles only folders."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "resolve": "scforge.hub.finding",
    "upload": "scforge.hub.uploading",
    "known_models": "scforge.hub.finding",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
