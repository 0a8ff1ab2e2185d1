# src/scforge/models/__init__.py

from scforge.models.autoregressive import AutoregressiveTransformer
from scforge.models.gene_pooling import GenePoolingModel
from scforge.models.masked_autoencoder import MaskedAutoencoder
from scforge.models.transformer_encoder import TransformerEncoder

__all__ = [
    "AutoregressiveTransformer",
    "GenePoolingModel",
    "MaskedAutoencoder",
    "TransformerEncoder",
]
