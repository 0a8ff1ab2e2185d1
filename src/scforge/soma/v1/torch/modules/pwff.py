"""The feed-forward block of a layer.

Shapes: B sequences, S tokens, H width, F hidden units.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from scforge.soma.v1.configs import PositionWiseFeedForwardConfig, check_config
from scforge.soma.v1.torch.modules.dropout import Dropout

__all__ = ["PositionWiseFeedForward"]


class PositionWiseFeedForward(nn.Module):
    """Linear, GELU, dropout, linear, at each token by itself.

    Parameters
    ----------
    config
        Sizes.
    """

    def __init__(self, config: PositionWiseFeedForwardConfig) -> None:
        super().__init__()
        check_config(config)
        self.linear_inner = nn.Linear(config.embedding_dim, config.pwff_hidden_dim)
        self.linear_outer = nn.Linear(config.pwff_hidden_dim, config.embedding_dim)
        self.dropout = Dropout(config.dropout_rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block of `x`, both of shape (..., H)."""
        return self.linear_outer(self.dropout(F.gelu(self.linear_inner(x))))
