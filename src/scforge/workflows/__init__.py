"""Train, fine-tune, embed, predict and evaluate from files, with a configuration or on the command line."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "annotate_to": "scforge.workflows.annotate",
    "check_config": "scforge.workflows.check",
    "embed_to": "scforge.workflows.embed",
    "evaluate_models": "scforge.estimators.evaluate",
    "evaluate_to": "scforge.workflows.evaluate",
    "finetune_from_config": "scforge.workflows.finetune",
    "predict_to": "scforge.workflows.predict",
    "train_from_config": "scforge.workflows.train",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
