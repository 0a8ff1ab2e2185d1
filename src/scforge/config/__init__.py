"""Configuration files: schema, loading and writing, and shipped recipes."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "Config": "scforge.config.schema",
    "ModelConfig": "scforge.config.schema",
    "list_recipes": "scforge.config.recipes",
    "load_config": "scforge.config.load",
    "recipe_path": "scforge.config.recipes",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
