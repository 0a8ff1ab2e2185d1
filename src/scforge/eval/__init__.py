"""Evaluation of embeddings, always beside baselines."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "BatchIntegration": "scforge.eval.batch_integration",
    "Benchmark": "scforge.eval.base",
    "BenchmarkCallback": "scforge.eval.callback",
    "CellTypeAnnotation": "scforge.eval.cell_type_annotation",
    "CellTypeProbe": "scforge.eval.cell_type_probe",
    "Evaluation": "scforge.eval.evaluation",
    "Geometry": "scforge.eval.geometry",
    "KnownEffects": "scforge.eval.perturbation_baselines",
    "LabelPrediction": "scforge.eval.label_prediction",
    "Report": "scforge.eval.report",
    "WantedEffects": "scforge.eval.perturbation_baselines",
    "baseline_effects": "scforge.eval.perturbation_baselines",
    "calibrated": "scforge.eval.perturbation_metrics",
    "de_weights": "scforge.eval.perturbation_metrics",
    "embedding_baselines": "scforge.eval.reference_embeddings",
    "evaluate": "scforge.eval.harness",
    "get_benchmark": "scforge.eval.base",
    "integration_baselines": "scforge.eval.without_batches",
    "integration_scores": "scforge.eval.without_batches",
    "is_collapsed": "scforge.eval.geometry",
    "list_benchmarks": "scforge.eval.base",
    "pca_embedding": "scforge.eval.baselines",
    "register_benchmark": "scforge.eval.base",
    "score_deltas": "scforge.eval.perturbation_metrics",
    "technical_duplicate": "scforge.eval.perturbation_metrics",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "evaluate",
    "Report",
    "Benchmark",
    "LabelPrediction",
    "CellTypeAnnotation",
    "CellTypeProbe",
    "Geometry",
    "is_collapsed",
    "BatchIntegration",
    "BenchmarkCallback",
    "Evaluation",
    "pca_embedding",
    "embedding_baselines",
    "integration_baselines",
    "integration_scores",
    "KnownEffects",
    "WantedEffects",
    "baseline_effects",
    "score_deltas",
    "de_weights",
    "technical_duplicate",
    "calibrated",
    "register_benchmark",
    "get_benchmark",
    "list_benchmarks",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
