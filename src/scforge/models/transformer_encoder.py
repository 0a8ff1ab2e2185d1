"""A bidirectional transformer over gene tokens, trained to predict masked genes.

Shapes: B cells, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scforge.models._utils import build_from_config, check_choice, count_parameters, init_weights, token_loss
from scforge.models.components.attention import TransformerBlock, key_mask
from scforge.models.components.embeddings import GeneExpressionEmbedding
from scforge.models.components.heads import MaskedGenePredictionHead
from scforge.models.components.pooling import POOLINGS
from scforge.models.protocol import ModelOutput
from scforge.models.registry import register_model

if TYPE_CHECKING:
    from scforge.config.schema import ModelConfig

__all__ = ["TransformerEncoder"]


@register_model("transformer_encoder")
class TransformerEncoder(nn.Module):
    """BERT-style encoder: gene embedding, pre-norm transformer blocks, final norm, masked gene head.

    Parameters
    ----------
    vocab_size
        Number of tokens V, special tokens included.
    hidden_dim
        Width H; a multiple of `num_heads`.
    num_layers
        Number of transformer blocks.
    num_heads
        Number of attention heads.
    ffn_dim
        Width of the feed-forward layers; ``4 * hidden_dim`` if None.
    dropout
        Dropout on embeddings and residual branches.
    max_seq_len
        Most tokens of a cell.
    pooling
        ``"cls"`` (state of the first token) or ``"mean"`` (mean over tokens).
    activation
        ``"gelu"``, ``"relu"`` or ``"silu"``.
    use_expression_values
        Add the projected expression value of each token.
    layer_norm_eps
        Epsilon of the layer norms.
    gene_vectors
        Embed genes by pretrained vectors: the arguments ``dim``, ``learned`` and ``frozen`` of
        :class:`scforge.models.components.GeneVectorEmbedding`. ``Encoder`` sets it for tokenizers with gene vectors.

    Examples
    --------
    >>> model = TransformerEncoder(vocab_size=50, hidden_dim=8, num_layers=1, num_heads=2)
    >>> ids, mask = torch.randint(4, 50, (2, 5)), torch.ones(2, 5)
    >>> output = model(ids, mask, labels=ids)
    >>> output.loss.shape, output.logits.shape, output.embeddings.shape
    (torch.Size([]), torch.Size([2, 5, 50]), torch.Size([2, 8]))
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_dim: int,
        num_layers: int,
        num_heads: int,
        ffn_dim: int | None = None,
        dropout: float = 0.1,
        max_seq_len: int = 2048,
        pooling: str = "cls",
        activation: str = "gelu",
        use_expression_values: bool = True,
        layer_norm_eps: float = 1e-12,
        gene_vectors: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_choice("pooling", pooling, sorted(POOLINGS))
        self.vocab_size = vocab_size
        self.hidden_dim = hidden_dim
        self.pooling = pooling
        self.embedding = GeneExpressionEmbedding(
            vocab_size, hidden_dim, max_seq_len, dropout, use_expression_values, layer_norm_eps, gene_vectors
        )
        self.layers = nn.ModuleList(
            TransformerBlock(hidden_dim, num_heads, ffn_dim, dropout, activation, layer_norm_eps)
            for _ in range(num_layers)
        )
        self.final_norm = nn.LayerNorm(hidden_dim, eps=layer_norm_eps)
        self.head = MaskedGenePredictionHead(hidden_dim, vocab_size, layer_norm_eps)
        self.apply(init_weights)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        attention_bias: torch.Tensor | None = None,
        return_logits: bool = True,
        **kwargs: Any,
    ) -> ModelOutput:
        """Predict the genes of a batch.

        Parameters
        ----------
        input_ids
            Token ids, shape (B, S).
        attention_mask
            Bool, int or float of shape (B, S), nonzero for tokens.
        values
            Expression values, shape (B, S).
        labels
            Token ids to predict, shape (B, S); -100 where there is nothing to predict.
        attention_bias
            Number to add to the attention scores of each token as a key, shape (B, S).
        return_logits
            If false, the vocabulary head runs at labelled positions only and ``logits`` is None.
        **kwargs
            Other keys of the batch, ignored.

        Returns
        -------
        ``loss`` (with `labels`), ``logits`` (B, S, V) and ``embeddings`` (B, H).
        """
        hidden_bsh = self._hidden(input_ids, attention_mask, values, attention_bias)
        loss, logits = token_loss(self.head, hidden_bsh, labels, return_logits=return_logits)
        return ModelOutput(loss=loss, logits=logits, embeddings=self._pool(hidden_bsh, attention_mask))

    def encode(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        *,
        attention_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return cell embeddings, shape (B, H). The arguments are those of :meth:`forward`."""
        return self._pool(self._hidden(input_ids, attention_mask, values, attention_bias), attention_mask)

    def _hidden(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        attention_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mask = key_mask(attention_mask, attention_bias)
        hidden_bsh = self.embedding(input_ids, values)
        for layer in self.layers:
            hidden_bsh = layer(hidden_bsh, mask)
        return self.final_norm(hidden_bsh)

    def _pool(self, hidden_bsh: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return POOLINGS[self.pooling](hidden_bsh, attention_mask)

    def init_token_prior(self, token_counts: torch.Tensor) -> None:
        """Start the prediction head at the token frequencies, see :meth:`MaskedGenePredictionHead.init_bias`."""
        self.head.init_bias(token_counts)

    @classmethod
    def from_config(cls, config: ModelConfig) -> TransformerEncoder:
        """Make the model that `config` describes; raises ``ValueError`` if ``config.vocab_size`` is None."""
        return build_from_config(cls, config)

    def num_parameters(self, *, trainable_only: bool = True) -> int:
        """Return the number of parameters."""
        return count_parameters(self, trainable_only=trainable_only)
