"""The feed-forward block of a layer."""

from __future__ import annotations

from flax import nnx
from jax import Array

from scforge.soma.v1.configs import PositionWiseFeedForwardConfig


class PositionWiseFeedForward(nnx.Module):
    """Linear, GELU (exact, with erf), dropout and linear, applied to each token separately.

    Parameters
    ----------
    config
        Sizes of the block.
    rngs
        Random streams for initial weights and dropout. If None, uses ``nnx.Rngs(0)``.
    """

    def __init__(self, config: PositionWiseFeedForwardConfig, rngs: nnx.Rngs | None = None) -> None:
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.linear_inner = nnx.Linear(config.embedding_dim, config.pwff_hidden_dim, rngs=rngs)
        self.linear_outer = nnx.Linear(config.pwff_hidden_dim, config.embedding_dim, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs)

    def __call__(self, inputs: Array) -> Array:
        """Transform each token; input and output have shape (B, S, H)."""
        hidden = nnx.gelu(self.linear_inner(inputs), approximate=False)
        return self.linear_outer(self.dropout(hidden))
