"""The feed-forward half of a layer."""

from __future__ import annotations

from flax import nnx
from jax import Array

from scforge.soma.v1.configs import PositionWiseFeedForwardConfig


class PositionWiseFeedForward(nnx.Module):
    """Linear, GELU (exact, with erf), dropout, linear; applied to each token separately.

    Parameters
    ----------
    config
        Its sizes.
    rngs
        Where initial weights and dropout come from. If None, uses ``nnx.Rngs(0)``.
    """

    def __init__(self, config: PositionWiseFeedForwardConfig, rngs: nnx.Rngs | None = None) -> None:
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.linear_inner = nnx.Linear(config.embedding_dim, config.pwff_hidden_dim, rngs=rngs)
        self.linear_outer = nnx.Linear(config.pwff_hidden_dim, config.embedding_dim, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs)

    def __call__(self, inputs: Array) -> Array:
        """Transform each token. Shape (B, S, H)."""
        hidden = nnx.gelu(self.linear_inner(inputs), approximate=False)
        return self.linear_outer(self.dropout(hidden))
