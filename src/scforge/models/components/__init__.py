"""Building blocks that architectures share."""

from scforge.models.components.attention import KeyValueCache, SelfAttention, generate_causal_mask
from scforge.models.components.dropout import Dropout
from scforge.models.components.embeddings import GeneExpressionEmbedding
from scforge.models.components.gene_vectors import GeneVectorBag, GeneVectorEmbedding, fill_gene_vectors
from scforge.models.components.heads import BinPredictionHead, ExpressionPredictionHead, MaskedGenePredictionHead
from scforge.models.components.pooling import cls_pool, last_pool, mean_pool
from scforge.models.components.sigreg import SIGReg
from scforge.models.components.transformer import TransformerBlock, TransformerStack

__all__ = [
    "BinPredictionHead",
    "Dropout",
    "ExpressionPredictionHead",
    "GeneExpressionEmbedding",
    "GeneVectorBag",
    "GeneVectorEmbedding",
    "KeyValueCache",
    "MaskedGenePredictionHead",
    "SIGReg",
    "SelfAttention",
    "TransformerBlock",
    "TransformerStack",
    "cls_pool",
    "fill_gene_vectors",
    "generate_causal_mask",
    "last_pool",
    "mean_pool",
]
