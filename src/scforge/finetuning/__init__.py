"""Fine-tuning: tasks, prediction heads, and adapters."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "Task": "scforge.finetuning.base",
    "register_task": "scforge.finetuning.base",
    "get_task": "scforge.finetuning.base",
    "list_tasks": "scforge.finetuning.base",
    "PredictionHead": "scforge.finetuning.heads",
    "Predictor": "scforge.finetuning.base",
    "EvaluationContext": "scforge.finetuning.base",
    "Evaluated": "scforge.finetuning.base",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
