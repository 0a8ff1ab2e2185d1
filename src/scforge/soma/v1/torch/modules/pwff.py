"""The feed-forward block of a layer.

Shapes: ... tokens, H width.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from scforge.soma.v1.configs import PositionWiseFeedForwardConfig


class PositionWiseFeedForward(nn.Module):
    """Linear, GELU, dropout and linear, applied to each token separately.

    Parameters
    ----------
    config
        Sizes.

    Examples
    --------
    >>> from scforge.soma.v1.configs import PositionWiseFeedForwardConfig
    >>> PositionWiseFeedForward(PositionWiseFeedForwardConfig(0.0, 8, 16))(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, config: PositionWiseFeedForwardConfig) -> None:
        super().__init__()
        self.linear_inner = nn.Linear(config.embedding_dim, config.pwff_hidden_dim)
        self.linear_outer = nn.Linear(config.pwff_hidden_dim, config.embedding_dim)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the block for `x`; both have shape (..., H)."""
        return self.linear_outer(self.dropout(F.gelu(self.linear_inner(x))))
