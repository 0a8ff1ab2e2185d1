"""Building blocks that architectures share."""

from scforge.models.components.attention import SelfAttention, TransformerBlock, generate_causal_mask
from scforge.models.components.embeddings import GeneExpressionEmbedding
from scforge.models.components.gene_vectors import GeneVectorBag, GeneVectorEmbedding, fill_gene_vectors
from scforge.models.components.heads import MaskedGenePredictionHead
from scforge.models.components.pooling import cls_pool, mean_pool
from scforge.models.components.sigreg import SIGReg

__all__ = [
    "GeneExpressionEmbedding",
    "GeneVectorBag",
    "GeneVectorEmbedding",
    "MaskedGenePredictionHead",
    "SIGReg",
    "SelfAttention",
    "TransformerBlock",
    "cls_pool",
    "fill_gene_vectors",
    "generate_causal_mask",
    "mean_pool",
]
