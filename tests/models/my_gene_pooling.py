"""A user's own architecture in one file, of the parts that the package's models are made of."""

from __future__ import annotations

import torch.nn as nn

from scforge.models._utils import count_parameters, init_weights
from scforge.models.components.embeddings import GeneExpressionEmbedding
from scforge.models.components.heads import MaskedGenePredictionHead
from scforge.models.components.pooling import mean_pool
from scforge.models.protocol import ModelOutput
from scforge.models.registry import register_model


@register_model("my_gene_pooling")
class MyGenePooling(nn.Module):
    """The mean over tokens, each of which goes through residual layers."""

    def __init__(self, vocab_size, hidden_dim, num_layers=2, dropout=0.1, max_seq_len=2048, use_expression_values=True):
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_dim = hidden_dim
        self.embedding = GeneExpressionEmbedding(
            vocab_size=vocab_size,
            hidden_dim=hidden_dim,
            max_seq_len=max_seq_len,
            dropout=dropout,
            use_expression_values=use_expression_values,
            layer_norm_eps=1e-12,
        )
        self.layers = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Linear(hidden_dim, hidden_dim * 4),
                    nn.GELU(),
                    nn.Dropout(dropout),
                    nn.Linear(hidden_dim * 4, hidden_dim),
                    nn.LayerNorm(hidden_dim, eps=1e-12),
                )
                for _ in range(num_layers)
            ]
        )
        self.head = MaskedGenePredictionHead(hidden_dim=hidden_dim, vocab_size=vocab_size, layer_norm_eps=1e-12)
        self.apply(init_weights)

    def states(self, input_ids, values):
        hidden = self.embedding(input_ids, values=values)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden

    def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
        hidden = self.states(input_ids, values)
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = nn.CrossEntropyLoss(ignore_index=-100)(logits.view(-1, self.vocab_size), labels.view(-1))
        return ModelOutput(loss=loss, logits=logits, embeddings=mean_pool(hidden, attention_mask))

    def encode(self, input_ids, attention_mask, values=None, **kwargs):
        return mean_pool(self.states(input_ids, values), attention_mask)

    @classmethod
    def from_config(cls, config):
        if config.vocab_size is None:
            raise ValueError("ModelConfig.vocab_size must be set before constructing a model.")
        return cls(
            vocab_size=config.vocab_size,
            hidden_dim=config.hidden_dim,
            num_layers=config.num_layers,
            dropout=config.dropout,
            max_seq_len=config.max_seq_len,
            use_expression_values=config.use_expression_values,
        )

    def num_parameters(self, *, trainable_only=True):
        return count_parameters(self, trainable_only=trainable_only)
