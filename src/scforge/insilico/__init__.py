"""What a trained model says of genes: perturbed cells, gene embeddings, attention, imputed expression."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "Perturbation": "scforge.insilico.screening",
    "attention_between_genes": "scforge.insilico.attention",
    "contextual_gene_embeddings": "scforge.insilico.gene_embeddings",
    "input_gene_embeddings": "scforge.insilico.gene_embeddings",
    "screen": "scforge.insilico.screening",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "Perturbation",
    "screen",
    "input_gene_embeddings",
    "contextual_gene_embeddings",
    "attention_between_genes",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
