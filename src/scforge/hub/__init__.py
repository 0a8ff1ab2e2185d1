"""Models by name: from the Hugging Face Hub, a registry or a folder. Works on folders and knows no models."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "resolve": "scforge.hub.finding",
    "upload": "scforge.hub.uploading",
    "known_models": "scforge.hub.finding",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
