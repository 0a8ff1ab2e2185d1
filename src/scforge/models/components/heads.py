"""Prediction heads.

Shapes: B cells, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["MaskedGenePredictionHead"]


class MaskedGenePredictionHead(nn.Module):
    """Logits over the vocabulary: Linear, GELU, LayerNorm, Linear.

    Parameters
    ----------
    hidden_dim
        Width H of what comes in.
    vocab_size
        Number of tokens V.
    layer_norm_eps
        Epsilon of the layer norm.

    Examples
    --------
    >>> head = MaskedGenePredictionHead(hidden_dim=8, vocab_size=50)
    >>> head(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 50])
    """

    def __init__(self, hidden_dim: int, vocab_size: int, layer_norm_eps: float = 1e-12) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_dim, hidden_dim)
        self.layer_norm = nn.LayerNorm(hidden_dim, eps=layer_norm_eps)
        self.decoder = nn.Linear(hidden_dim, vocab_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (..., V) for hidden states of shape (..., H)."""
        return self.decoder(self.layer_norm(F.gelu(self.dense(hidden_states))))

    @torch.no_grad()
    def init_bias(self, token_counts: torch.Tensor) -> None:
        """Start from the token frequencies: the bias becomes ``log((count + 1) / sum)``, shape (V,).

        Training then begins at about the entropy of the token frequencies instead of ``log V``, and every step goes
        into what depends on the cell.
        """
        smoothed = token_counts.double() + 1.0
        self.decoder.bias.copy_((smoothed / smoothed.sum()).log())
