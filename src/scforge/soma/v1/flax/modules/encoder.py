"""The stack of layers."""

from __future__ import annotations

from flax import nnx
from jax import Array

from scforge.soma.v1.configs import EncoderConfig, LayerConfig, part_of
from scforge.soma.v1.flax.modules.layer import Layer


class Encoder(nnx.Module):
    """Layers one after another.

    Parameters
    ----------
    config
        Its sizes.
    rngs
        Where initial weights and dropout come from. If None, uses ``nnx.Rngs(0)``.
    """

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs | None = None) -> None:
        rngs = nnx.Rngs(0) if rngs is None else rngs
        layer = part_of(config, LayerConfig)
        self.layers = nnx.List([Layer(layer, rngs) for _ in range(config.num_layers)])

    def __call__(self, input: Array, positions: Array) -> Array:
        """Transform the tokens. Shapes (B, S, H), (B, S)."""
        for layer in self.layers:
            input = layer(input, positions)
        return input
