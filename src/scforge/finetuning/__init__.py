"""Fine-tuning: tasks, their heads, and adapters."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "Evaluated": "scforge.finetuning.base",
    "EvaluationContext": "scforge.finetuning.base",
    "PredictionHead": "scforge.finetuning.heads",
    "Predictor": "scforge.finetuning.base",
    "Task": "scforge.finetuning.base",
    "get_task": "scforge.finetuning.base",
    "list_tasks": "scforge.finetuning.base",
    "register_task": "scforge.finetuning.base",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "Task",
    "register_task",
    "get_task",
    "list_tasks",
    "PredictionHead",
    "Predictor",
    "EvaluationContext",
    "Evaluated",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
