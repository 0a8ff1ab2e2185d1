"""An MLP on gene expression, the simplest cell encoder.

Shapes: B cells, L latent, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from scforge._constants import N_SPECIAL
from scforge.models.gene_pooling import GenePoolingModel
from scforge.models.registry import register_model


@register_model("mlp")
class MLPEncoder(GenePoolingModel):
    """An MLP on the values of all genes in the vocabulary, like the scVI encoder on highly variable genes.

    The first layer maps the V values of a cell to `hidden_dim`. Because most values are zero, it is computed as a sum
    over the tokens of the cell. LayerNorm, GELU, dropout and a linear layer follow, `num_layers` times and once more to
    `latent_dim`. The network is the same as :class:`GenePoolingModel` with ``pooling="weighted_sum"``, with the same
    decoder, projector and methods. With the tokenizer ``continuous_projection``, the values are log1p of counts per
    10,000 counts of all genes of the cell.

    Parameters
    ----------
    vocab_size
        Number of tokens V, including special tokens.
    hidden_dim
        Width of the first layer.
    num_layers
        Number of hidden layers after the first layer.
    latent_dim
        Width L of the cell embedding.
    ffn_dim
        Width of the hidden layers. If None, uses `hidden_dim`.
    dropout
        Dropout probability.
    layer_norm_eps
        Epsilon of the layer norms.
    gene_vectors, n_batches, decoder_dim, n_special, projector_dim
        See :class:`GenePoolingModel`.

    Examples
    --------
    >>> import torch
    >>> model = MLPEncoder(vocab_size=50, hidden_dim=8, latent_dim=3)
    >>> ids, mask = torch.randint(4, 50, (2, 5)), torch.ones(2, 5)
    >>> model.encode(ids, mask, values=torch.rand(2, 5)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_dim: int = 512,
        num_layers: int = 1,
        latent_dim: int = 32,
        *,
        ffn_dim: int | None = None,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-12,
        gene_vectors: dict[str, Any] | None = None,
        n_batches: int | None = None,
        decoder_dim: int = 128,
        n_special: int = N_SPECIAL,
        projector_dim: int | None = None,
    ) -> None:
        super().__init__(
            vocab_size,
            hidden_dim,
            num_layers,
            dropout,
            pooling="weighted_sum",
            ffn_dim=hidden_dim if ffn_dim is None else ffn_dim,
            latent_dim=latent_dim,
            layer_norm_eps=layer_norm_eps,
            gene_vectors=gene_vectors,
            n_batches=n_batches,
            decoder_dim=decoder_dim,
            n_special=n_special,
            projector_dim=projector_dim,
        )
