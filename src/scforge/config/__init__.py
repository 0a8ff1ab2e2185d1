"""Configuration files: what may stand in them, reading and writing them, and the recipes of the package."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "Config": "scforge.config.schema",
    "ModelConfig": "scforge.config.schema",
    "init_config": "scforge.config.editing",
    "list_recipes": "scforge.config.recipes",
    "load_config": "scforge.config.load",
    "recipe_path": "scforge.config.recipes",
}

__all__ = [
    "Config",
    "ModelConfig",
    "init_config",
    "list_recipes",
    "load_config",
    "recipe_path",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
