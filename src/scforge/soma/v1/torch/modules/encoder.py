"""The stack of layers.

Shapes: B sequences, S tokens, H width, N heads, D = H / N.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scforge._checks import check_bool
from scforge.soma.v1.configs import EncoderConfig, LayerConfig, part_of
from scforge.soma.v1.torch.modules.attention import rotation_of
from scforge.soma.v1.torch.modules.layer import Layer


class Encoder(nn.Module):
    """A sequence of layers.

    Parameters
    ----------
    config
        Sizes.
    gradient_checkpointing
        Whether to store only the input of each layer, and recompute the layer for its gradient.

    Examples
    --------
    >>> from scforge.soma.v1.configs import EncoderConfig
    >>> encoder = Encoder(EncoderConfig(0.0, embedding_dim=8, pwff_hidden_dim=16, num_layers=2, num_heads=2))
    >>> encoder(torch.zeros(1, 3, 8), torch.arange(3)[None]).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, config: EncoderConfig, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.gradient_checkpointing = check_bool("gradient_checkpointing", gradient_checkpointing)
        self.head_dim = config.embedding_dim // config.num_heads
        self.max_wavelength = config.max_wavelength
        self.scale_factor = config.scale_factor
        layer = part_of(config, LayerConfig)
        self.layers = nn.ModuleList(Layer(layer) for _ in range(config.num_layers))

    def forward(
        self, input: torch.Tensor, positions: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the states (B, S, H) after all layers.

        Parameters
        ----------
        input
            States, shape (B, S, H).
        positions
            Positions of the tokens, integers, shape (B, S). The rotations are computed once for all layers.
        mask
            As in :meth:`MultiHeadAttention.forward`.
        """
        wide = torch.promote_types(input.dtype, torch.float32)
        rotation = rotation_of(positions, self.head_dim, self.max_wavelength, self.scale_factor, wide)
        again = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        states = input
        for layer in self.layers:
            if again:
                states = checkpoint(layer, states, None, rotation=rotation, mask=mask, use_reentrant=False)
            else:
                states = layer(states, None, rotation=rotation, mask=mask)
        return states
