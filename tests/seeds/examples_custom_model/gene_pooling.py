"""Simple gene pooling baseline model for single-cell representation learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from scforge.models._utils import count_parameters, init_weights
from scforge.models.components.embeddings import GeneExpressionEmbedding
from scforge.models.components.heads import MaskedGenePredictionHead
from scforge.models.components.pooling import mean_pool
from scforge.models.protocol import ModelOutput
from scforge.models.registry import register_model

if TYPE_CHECKING:
    from scforge.config.schema import ModelConfig


@register_model("gene_pooling")
class GenePoolingModel(nn.Module):
    """Baseline model using mean pooling over gene embeddings without attention.

    This architecture processes gene expression inputs through embeddings and a
    simple feed-forward layer, then pools to create cell-level representations.
    It is much faster than transformer-based models and serves as a useful baseline.

    Parameters
    ----------
    vocab_size
        Gene vocabulary size (including special tokens).
    hidden_dim
        Hidden dimension for embeddings and feed-forward layers.
    num_layers
        Number of feed-forward transformation layers.
    dropout
        Dropout probability.
    max_seq_len
        Maximum sequence length.
    use_expression_values
        Whether to use expression value projection in embeddings.
    layer_norm_eps
        Epsilon for LayerNorm layers.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_dim: int,
        num_layers: int = 2,
        dropout: float = 0.1,
        max_seq_len: int = 2048,
        *,
        use_expression_values: bool = True,
        layer_norm_eps: float = 1e-12,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_dim = hidden_dim

        # Embedding layer (reuses existing component)
        self.embedding = GeneExpressionEmbedding(
            vocab_size=vocab_size,
            hidden_dim=hidden_dim,
            max_seq_len=max_seq_len,
            dropout=dropout,
            use_expression_values=use_expression_values,
            layer_norm_eps=layer_norm_eps,
        )

        # Stack of feed-forward layers with residual connections
        self.layers = nn.ModuleList([
            nn.Sequential(
                nn.Linear(hidden_dim, hidden_dim * 4),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(hidden_dim * 4, hidden_dim),
                nn.Dropout(dropout),
                nn.LayerNorm(hidden_dim, eps=layer_norm_eps),
            )
            for _ in range(num_layers)
        ])

        # Prediction head (reuses existing component)
        self.head = MaskedGenePredictionHead(
            hidden_dim=hidden_dim,
            vocab_size=vocab_size,
            layer_norm_eps=layer_norm_eps,
        )

        # Initialize weights using the standard utility
        self.apply(init_weights)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """Forward pass with optional masked gene prediction loss.

        Parameters
        ----------
        input_ids
            Token IDs of shape (B, S).
        attention_mask
            Mask of shape (B, S) — 1 for real tokens, 0 for padding.
        values
            Optional expression values of shape (B, S).
        labels
            Optional target token IDs of shape (B, S) for computing loss.
            Positions with value -100 are ignored.
        **kwargs
            Additional batch keys (e.g., masked_positions, bin_ids) — ignored.

        Returns
        -------
        ModelOutput
            Contains loss (if labels provided), logits, and embeddings.
        """
        # Compute embeddings
        emb = self.embedding(input_ids, values=values)  # (B, S, H)

        # Apply feed-forward layers with residual connections
        hidden = emb
        for layer in self.layers:
            hidden = hidden + layer(hidden)  # Residual connection

        # Pool to get cell-level embeddings (mean over non-padding tokens)
        embeddings = mean_pool(hidden, attention_mask)  # (B, H)

        # Predict gene tokens at each position
        logits = self.head(hidden)  # (B, S, V)

        # Compute loss if labels are provided
        loss = None
        if labels is not None:
            loss_fn = nn.CrossEntropyLoss(ignore_index=-100)
            loss = loss_fn(logits.view(-1, self.vocab_size), labels.view(-1))

        return ModelOutput(loss=loss, logits=logits, embeddings=embeddings)

    def encode(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Extract cell embeddings of shape (B, hidden_dim).

        This method is used by the assessment harness to extract embeddings
        for downstream tasks like cell type classification and batch integration.

        Parameters
        ----------
        input_ids
            Token IDs of shape (B, S).
        attention_mask
            Mask of shape (B, S).
        values
            Optional expression values of shape (B, S).
        **kwargs
            Additional batch keys — ignored.

        Returns
        -------
        torch.Tensor
            Cell embeddings of shape (B, H).
        """
        emb = self.embedding(input_ids, values=values)
        hidden = emb
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return mean_pool(hidden, attention_mask)

    @classmethod
    def from_config(cls, config: ModelConfig) -> GenePoolingModel:
        """Create a GenePoolingModel from a ModelConfig.

        Parameters
        ----------
        config
            Model configuration. vocab_size must be set (not None).

        Returns
        -------
        GenePoolingModel

        Raises
        ------
        ValueError
            If config.vocab_size is None.
        """
        if config.vocab_size is None:
            msg = "ModelConfig.vocab_size must be set before constructing a model."
            raise ValueError(msg)

        return cls(
            vocab_size=config.vocab_size,
            hidden_dim=config.hidden_dim,
            num_layers=config.num_layers,
            dropout=config.dropout,
            max_seq_len=config.max_seq_len,
            use_expression_values=config.use_expression_values,
        )

    def num_parameters(self, *, trainable_only: bool = True) -> int:
        """Count the number of parameters in this model.

        Parameters
        ----------
        trainable_only
            If True (default), count only trainable parameters.

        Returns
        -------
        int
            Total number of (trainable) parameters.
        """
        return count_parameters(self, trainable_only=trainable_only)
