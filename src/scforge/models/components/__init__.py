"""Building blocks shared by architectures."""

from scforge.models.components.attention import SelfAttention, generate_causal_mask
from scforge.models.components.config import TransformerConfig
from scforge.models.components.embeddings import GeneExpressionEmbedding
from scforge.models.components.gene_vectors import GeneVectorEmbedding
from scforge.models.components.heads import BinPredictionHead, ExpressionPredictionHead, MaskedGenePredictionHead
from scforge.models.components.pooling import cls_pool, mean_pool
from scforge.models.components.sigreg import SIGReg
from scforge.models.components.transformer import TransformerBlock, TransformerStack

__all__ = [
    "BinPredictionHead",
    "ExpressionPredictionHead",
    "GeneExpressionEmbedding",
    "GeneVectorEmbedding",
    "MaskedGenePredictionHead",
    "SIGReg",
    "SelfAttention",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerStack",
    "cls_pool",
    "generate_causal_mask",
    "mean_pool",
]
