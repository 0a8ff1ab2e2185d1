"""What a trained model says of genes: perturbed cells, gene embeddings, attention, imputed expression."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "Perturbation": "scforge.insilico.screening",
    "PerturbedCells": "scforge.insilico.screening",
    "attention_between_genes": "scforge.insilico.attention",
    "contextual_gene_embeddings": "scforge.insilico.gene_embeddings",
    "input_gene_embeddings": "scforge.insilico.gene_embeddings",
    "mean_moves": "scforge.insilico.screening",
    "predict_counted": "scforge.insilico.imputation",
    "predict_uncounted": "scforge.insilico.imputation",
    "screen": "scforge.insilico.screening",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "Perturbation",
    "PerturbedCells",
    "screen",
    "mean_moves",
    "input_gene_embeddings",
    "contextual_gene_embeddings",
    "attention_between_genes",
    "predict_uncounted",
    "predict_counted",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
