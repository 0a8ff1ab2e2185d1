"""The stack of layers."""

from __future__ import annotations

from flax import nnx
from jax import Array

from scforge.soma.v1.configs import EncoderConfig, LayerConfig, part_of
from scforge.soma.v1.flax.modules.layer import Layer


class Encoder(nnx.Module):
    """A sequence of layers.

    Parameters
    ----------
    config
        Sizes of the encoder.
    rngs
        Random streams for initial weights and dropout. If None, uses ``nnx.Rngs(0)``.
    """

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs | None = None) -> None:
        rngs = nnx.Rngs(0) if rngs is None else rngs
        layer = part_of(config, LayerConfig)
        self.layers = nnx.List([Layer(layer, rngs) for _ in range(config.num_layers)])

    def __call__(self, input: Array, positions: Array) -> Array:
        """Return the states after all layers, shape (B, S, H), for inputs of shape (B, S, H) and positions (B, S)."""
        for layer in self.layers:
            input = layer(input, positions)
        return input
