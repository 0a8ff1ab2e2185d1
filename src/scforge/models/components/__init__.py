"""Building blocks that architectures share."""

from scforge.models.components.attention import SelfAttention, TransformerBlock, generate_causal_mask
from scforge.models.components.embeddings import GeneExpressionEmbedding
from scforge.models.components.heads import MaskedGenePredictionHead
from scforge.models.components.pooling import cls_pool, mean_pool
from scforge.models.components.sigreg import SIGReg

__all__ = [
    "GeneExpressionEmbedding",
    "MaskedGenePredictionHead",
    "SIGReg",
    "SelfAttention",
    "TransformerBlock",
    "cls_pool",
    "generate_causal_mask",
    "mean_pool",
]
