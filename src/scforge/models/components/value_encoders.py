"""From the expression value of a token to a vector, as published models do it.

Shapes: B cells, S tokens, H hidden, K bins.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_count, check_positive

__all__ = ["SoftBins", "ValueMLP"]


class _Biased(nn.Linear):
    """Starts with biases, as torch does: without, the norm behind two layers would make all values alike."""

    initialises_itself = True


class ValueMLP(nn.Module):
    """Linear, ReLU, Linear, LayerNorm of a value that is cut off at `most`, as in scGPT (Cui et al. 2024).

    Parameters
    ----------
    hidden_dim
        Width H.
    layer_norm_eps
        Epsilon of the layer norm.
    most
        Larger values count as this.

    Examples
    --------
    >>> ValueMLP(hidden_dim=8)(torch.rand(2, 5)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, hidden_dim: int, layer_norm_eps: float = 1e-5, most: float = 512.0) -> None:
        super().__init__()
        check_count("hidden_dim", hidden_dim, "dimensions")
        check_positive("most", most)
        self.most = most
        self.linear_in = _Biased(1, hidden_dim)
        self.linear_out = nn.Linear(hidden_dim, hidden_dim)
        self.layer_norm = nn.LayerNorm(hidden_dim, eps=layer_norm_eps)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return vectors of shape (B, S, H) for values of shape (B, S)."""
        x = values.unsqueeze(-1).clamp(max=self.most).to(self.linear_in.weight.dtype)
        return self.layer_norm(self.linear_out(F.relu(self.linear_in(x))))


class SoftBins(nn.Module):
    """A mean of learned vectors of K bins, with weights that are learned from the value, as in scFoundation.

    With ``x = leaky_relu(Linear(value))``, of slope 0.1 below zero, the weights are ``softmax(alpha * x + Linear(x))``
    (Hao et al. 2024, the embedding of expression values).

    Parameters
    ----------
    hidden_dim
        Width H.
    n_bins
        Number of bins K.
    alpha
        Weight of the first layer beside the second.

    Examples
    --------
    >>> SoftBins(hidden_dim=8, n_bins=4)(torch.rand(2, 5)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, hidden_dim: int, n_bins: int, alpha: float = 1.0) -> None:
        super().__init__()
        check_count("n_value_bins", n_bins, "bins", least=2)
        self.alpha = alpha
        self.linear_in = nn.Linear(1, n_bins)
        self.linear_out = nn.Linear(n_bins, n_bins)
        self.bins = nn.Embedding(n_bins, hidden_dim)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return vectors of shape (B, S, H) for values of shape (B, S)."""
        x = F.leaky_relu(self.linear_in(values.unsqueeze(-1).to(self.linear_in.weight.dtype)), 0.1)
        return (self.alpha * x + self.linear_out(x)).softmax(dim=-1) @ self.bins.weight
