"""Models by name: from the Hugging Face Hub, a registry or a folder. Works on folders and knows no models."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "known_models": "scforge.hub.finding",
    "resolve": "scforge.hub.finding",
    "upload": "scforge.hub.uploading",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "resolve",
    "upload",
    "known_models",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
