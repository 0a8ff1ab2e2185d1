"""Building blocks that architectures share."""

from scforge.models.components.attention import KeyValueCache, SelfAttention, generate_causal_mask
from scforge.models.components.embeddings import GeneExpressionEmbedding, SoftBins, ValueMLP
from scforge.models.components.gene_vectors import GeneVectorBag, GeneVectorEmbedding, fill_gene_vectors
from scforge.models.components.heads import (
    BinPredictionHead,
    DeepExpressionHead,
    ExpressionPredictionHead,
    MaskedGenePredictionHead,
)
from scforge.models.components.pooling import cls_pool, depth_pool, last_pool, mean_pool
from scforge.models.components.sigreg import SIGReg
from scforge.models.components.transformer import Dropout, TransformerBlock, TransformerStack

__all__ = [
    "BinPredictionHead",
    "DeepExpressionHead",
    "Dropout",
    "ExpressionPredictionHead",
    "GeneExpressionEmbedding",
    "GeneVectorBag",
    "GeneVectorEmbedding",
    "KeyValueCache",
    "MaskedGenePredictionHead",
    "SIGReg",
    "SelfAttention",
    "SoftBins",
    "TransformerBlock",
    "TransformerStack",
    "ValueMLP",
    "cls_pool",
    "depth_pool",
    "fill_gene_vectors",
    "generate_causal_mask",
    "last_pool",
    "mean_pool",
]
