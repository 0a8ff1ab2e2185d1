"""Evaluation of embeddings, always with baselines."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "evaluate": "scforge.eval.harness",
    "compare": "scforge.eval.harness",
    "Report": "scforge.eval.report",
    "Benchmark": "scforge.eval.base",
    "LabelPrediction": "scforge.eval.label_prediction",
    "CellTypeProbe": "scforge.eval.label_prediction",
    "Geometry": "scforge.eval.label_prediction",
    "Scib": "scforge.eval.scib",
    "BatchIntegration": "scforge.eval.scib",
    "BenchmarkCallback": "scforge.eval.callback",
    "pca_embedding": "scforge.eval.baselines",
    "embedding_baselines": "scforge.eval.baselines",
    "PerturbationPrediction": "scforge.eval.perturbation",
    "evaluate_perturbations": "scforge.eval.perturbation",
    "Generation": "scforge.eval.generation",
    "evaluate_generation": "scforge.eval.generation",
    "GeneNetwork": "scforge.eval.networks",
    "evaluate_network": "scforge.eval.networks",
    "read_network": "scforge.eval.networks",
    "edges_from_embeddings": "scforge.eval.networks",
    "edges_from_attention": "scforge.eval.networks",
    "edges_from_perturbations": "scforge.eval.networks",
    "RankReconstruction": "scforge.eval.rank_reconstruction",
    "evaluate_reconstruction": "scforge.eval.rank_reconstruction",
    "evaluate_cz": "scforge.eval.cz_benchmarks",
    "register_benchmark": "scforge.eval.base",
    "get_benchmark": "scforge.eval.base",
    "list_benchmarks": "scforge.eval.base",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
