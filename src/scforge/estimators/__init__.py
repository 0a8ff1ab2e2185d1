"""Front classes in the style of scvi-tools: AnnData in, AnnData out."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "EmbeddingInfo": "scforge.estimators.bulk",
    "Encoder": "scforge.estimators.encoder",
    "ScDiVa": "scforge.estimators.scdiva",
    "check_config": "scforge.estimators.config_check",
    "embed_to": "scforge.estimators.bulk",
    "evaluate_embeddings": "scforge.estimators.evaluating",
    "evaluate_models": "scforge.estimators.evaluating_subjects",
    "evaluate_to": "scforge.estimators.evaluating_files",
    "finetune_from_config": "scforge.estimators.finetuning_from_config",
    "predict_to": "scforge.estimators.predicting",
    "show_config": "scforge.estimators.config_show",
    "train_from_config": "scforge.estimators.from_config",
}

__all__ = [
    "EmbeddingInfo",
    "Encoder",
    "ScDiVa",
    "check_config",
    "embed_to",
    "evaluate_embeddings",
    "evaluate_models",
    "evaluate_to",
    "finetune_from_config",
    "predict_to",
    "show_config",
    "train_from_config",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
