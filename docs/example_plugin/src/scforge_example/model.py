"""Cells as weighted means of their genes, where the weights are learned.

Shapes: B cells, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scforge.models import ModelOutput, init_weights

if TYPE_CHECKING:
    from scforge.config import ModelConfig


class AttentionPooling(nn.Module):
    """Embed each gene with its value, and pool the genes of a cell by a learned attention.

    Parameters
    ----------
    vocab_size
        Number of tokens V.
    hidden_dim
        Width H of the genes and of the cell embedding.
    num_layers
        Feed-forward layers that each gene goes through.
    dropout
        Dropout probability.
    """

    uses_order = False

    def __init__(self, vocab_size: int, hidden_dim: int = 64, num_layers: int = 1, dropout: float = 0.1) -> None:
        super().__init__()
        self.genes = nn.Embedding(vocab_size, hidden_dim)
        self.value = nn.Linear(1, hidden_dim)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(hidden_dim),
                nn.Linear(hidden_dim, 2 * hidden_dim),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(2 * hidden_dim, hidden_dim),
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_dim)
        self.score = nn.Linear(hidden_dim, 1)
        self.head = nn.Linear(hidden_dim, vocab_size)
        self.apply(init_weights)

    def _run(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states of the tokens, (B, S, H), and of the cells, (B, H)."""
        tokens_bs = attention_mask != 0
        states_bsh = self.genes(input_ids)
        if values is not None:
            states_bsh = states_bsh + self.value(values.masked_fill(~tokens_bs, 0).unsqueeze(-1))
        for layer in self.layers:
            states_bsh = states_bsh + layer(states_bsh)
        states_bsh = self.norm(states_bsh)
        # The lowest finite score instead of minus infinity: a cell without tokens gets numbers, too.
        scores_bs1 = self.score(states_bsh).masked_fill(~tokens_bs.unsqueeze(-1), torch.finfo(states_bsh.dtype).min)
        weights_bs1 = scores_bs1.softmax(dim=1) * tokens_bs.unsqueeze(-1)
        return states_bsh, (weights_bs1 * states_bsh).sum(dim=1)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        return_logits: bool = True,
        **kwargs: Any,
    ) -> ModelOutput:
        """Predict the genes at labeled positions from their cell."""
        states_bsh, cells_bh = self._run(input_ids, attention_mask, values)
        states_bsh = states_bsh + cells_bh.unsqueeze(1)
        loss = None
        if labels is not None:
            # In training the head runs only where there is something to predict.
            labeled = (labels >= 0) & (attention_mask != 0)
            logits = self.head(states_bsh[labeled]).float()
            total = nn.functional.cross_entropy(logits, labels[labeled], reduction="sum")
            loss = total / labeled.sum().clamp(min=1)
        return ModelOutput(loss=loss, logits=self.head(states_bsh) if return_logits else None, embeddings=cells_bh)

    def encode(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, values: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Return cell embeddings, shape (B, H)."""
        return self._run(input_ids, attention_mask, values)[1]

    @classmethod
    def from_config(cls, config: ModelConfig) -> AttentionPooling:
        """Make the model that a configuration describes."""
        return cls(config.vocab_size, config.hidden_dim, num_layers=config.num_layers, dropout=config.dropout)
