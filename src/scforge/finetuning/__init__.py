"""Fine-tuning: tasks, their heads, and adapters."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "Evaluated": "scforge.finetuning.context",
    "EvaluationContext": "scforge.finetuning.context",
    "FineTunedModule": "scforge.finetuning.module",
    "PredictionHead": "scforge.finetuning.heads",
    "Predictor": "scforge.finetuning.context",
    "Split": "scforge.finetuning.splits",
    "Task": "scforge.finetuning.base",
    "get_task": "scforge.finetuning.base",
    "list_tasks": "scforge.finetuning.base",
    "register_task": "scforge.finetuning.base",
    "split_for": "scforge.finetuning.splits",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "Task",
    "register_task",
    "get_task",
    "list_tasks",
    "FineTunedModule",
    "PredictionHead",
    "Predictor",
    "EvaluationContext",
    "Evaluated",
    "Split",
    "split_for",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
