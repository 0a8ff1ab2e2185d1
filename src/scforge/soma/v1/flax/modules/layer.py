"""A single encoder layer."""

from __future__ import annotations

from flax import nnx
from jax import Array

from scforge.soma.v1.configs import LayerConfig, PositionWiseFeedForwardConfig, part_of
from scforge.soma.v1.flax.modules.attention import MultiHeadAttention
from scforge.soma.v1.flax.modules.pwff import PositionWiseFeedForward

_EPSILON = 1e-5


def layer_norm(embedding_dim: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Return the LayerNorm used by all parts; the variance is computed from differences to the mean, as in torch."""
    return nnx.LayerNorm(embedding_dim, epsilon=_EPSILON, use_fast_variance=False, rngs=rngs)


class Layer(nnx.Module):
    """An attention and a feed-forward block, each after a LayerNorm and with a residual connection (pre-norm).

    Parameters
    ----------
    config
        Sizes of the layer.
    rngs
        Random streams for initial weights and dropout. If None, uses ``nnx.Rngs(0)``.
    """

    def __init__(self, config: LayerConfig, rngs: nnx.Rngs | None = None) -> None:
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.norm_1 = layer_norm(config.embedding_dim, rngs)
        self.attention = MultiHeadAttention(
            config.num_heads,
            config.embedding_dim,
            dropout_rate=config.dropout_rate,
            max_wavelength=config.max_wavelength,
            scale_factor=config.scale_factor,
            rngs=rngs,
        )
        self.norm_2 = layer_norm(config.embedding_dim, rngs)
        self.pwff = PositionWiseFeedForward(part_of(config, PositionWiseFeedForwardConfig), rngs)
        self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs)

    def __call__(self, context: Array, positions: Array) -> Array:
        """Return the states after the layer, shape (B, S, H), for inputs of shape (B, S, H) and positions (B, S)."""
        context = context + self.dropout(self.attention(self.norm_1(context), positions))
        return context + self.dropout(self.pwff(self.norm_2(context)))
