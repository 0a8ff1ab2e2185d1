"""One layer: attention and a feed-forward block, each after a norm and with a residual connection.

Shapes: B sequences, S tokens, H width.
"""

from __future__ import annotations

import torch
from torch import nn

from scforge.soma.v1.configs import LayerConfig, PositionWiseFeedForwardConfig, part_of
from scforge.soma.v1.torch.modules.attention import MultiHeadAttention, Rotation
from scforge.soma.v1.torch.modules.pwff import PositionWiseFeedForward


class Layer(nn.Module):
    """Pre-norm transformer layer.

    Parameters
    ----------
    config
        Sizes.

    Examples
    --------
    >>> from scforge.soma.v1.configs import LayerConfig
    >>> layer = Layer(LayerConfig(0.0, embedding_dim=8, pwff_hidden_dim=16, num_heads=2))
    >>> layer(torch.zeros(1, 3, 8), torch.arange(3)[None]).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.embedding_dim, eps=1e-5)
        self.attention = MultiHeadAttention(
            config.num_heads,
            config.embedding_dim,
            dropout_rate=config.dropout_rate,
            max_wavelength=config.max_wavelength,
            scale_factor=config.scale_factor,
        )
        self.norm_2 = nn.LayerNorm(config.embedding_dim, eps=1e-5)
        self.pwff = PositionWiseFeedForward(part_of(config, PositionWiseFeedForwardConfig))
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(
        self,
        context: torch.Tensor,
        positions: torch.Tensor | None,
        *,
        rotation: Rotation | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the states (B, S, H) after the layer.

        Parameters
        ----------
        context
            States, shape (B, S, H).
        positions, rotation, mask
            As in :meth:`MultiHeadAttention.forward`.
        """
        mixed = self.attention(self.norm_1(context), positions=positions, rotation=rotation, mask=mask)
        context = context + self.dropout(mixed)
        return context + self.dropout(self.pwff(self.norm_2(context)))
