"""Configuration files: what may stand in them, reading and writing them, and the recipes of the package."""

from __future__ import annotations

from scforge._lazy import lazy_names

_SCHEMA = "scforge.config.schema"
_NAMES = {
    "Config": _SCHEMA,
    "DataConfig": _SCHEMA,
    "EvalConfig": _SCHEMA,
    "FinetuneConfig": _SCHEMA,
    "MaskingConfig": _SCHEMA,
    "ModelConfig": _SCHEMA,
    "ObjectiveConfig": _SCHEMA,
    "OptimizerConfig": _SCHEMA,
    "OutputConfig": _SCHEMA,
    "PreprocessingConfig": _SCHEMA,
    "SamplingConfig": _SCHEMA,
    "SchedulerConfig": _SCHEMA,
    "SplitConfig": _SCHEMA,
    "TokenizerConfig": _SCHEMA,
    "TrainingConfig": _SCHEMA,
    "config_schema": "scforge.config.editing",
    "dump_config": "scforge.config.load",
    "init_config": "scforge.config.editing",
    "list_recipes": "scforge.config.recipes",
    "load_config": "scforge.config.load",
    "recipe_path": "scforge.config.recipes",
}

__all__ = [
    "Config",
    "DataConfig",
    "EvalConfig",
    "FinetuneConfig",
    "MaskingConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "OutputConfig",
    "PreprocessingConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "SplitConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "config_schema",
    "dump_config",
    "init_config",
    "list_recipes",
    "load_config",
    "recipe_path",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
