"""Causal attention with rotary positions.

Shapes: B sequences, S tokens, N heads, K dimensions of a head, H = N * K.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from scforge.soma.v1.configs import V1_MAX_WAVELENGTH, V1_SCALE_FACTOR, check_numbers


def apply_rope(
    inputs: Array,
    positions: Array,
    head_dim: int,
    max_wavelength: float = V1_MAX_WAVELENGTH,
    scale_factor: float = V1_SCALE_FACTOR,
) -> Array:
    """Rotate the two halves of each vector against each other by angles that grow with the position (Su et al. 2021).

    Angles are computed in float32, because bfloat16 cannot represent all integers above 256, nor float16 all integers
    above 2048.

    Parameters
    ----------
    inputs
        Queries or keys, shape (B, S, N, K).
    positions
        Positions of the tokens, shape (B, S).
    head_dim
        Head width K, even.
    max_wavelength
        Base of the frequencies: dimension i is rotated by ``position / max_wavelength ** (2 i / K) / scale_factor``.
    scale_factor
        Divisor of the positions, at least 1.

    Returns
    -------
    The rotated vectors, shape (B, S, N, K), with the dtype of `inputs`.

    Raises
    ------
    OptionError
        If `scale_factor` is below 1.

    Examples
    --------
    >>> x = jnp.ones((1, 2, 1, 2))
    >>> rotated = apply_rope(x, jnp.asarray([[0, 1]]), head_dim=2)[0, 1, 0]
    >>> bool(jnp.allclose(rotated, jnp.asarray([jnp.cos(1) - jnp.sin(1), jnp.cos(1) + jnp.sin(1)]), atol=1e-6))
    True
    """
    check_numbers(scale_factor=scale_factor)
    half = head_dim // 2
    timescales = max_wavelength ** (2 * jnp.arange(half, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32)[..., None, None] / timescales / scale_factor
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    left, right = inputs[..., :half].astype(jnp.float32), inputs[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(inputs.dtype)


class MultiHeadAttention(nnx.Module):
    """Attention of each token to itself and to previous tokens.

    Parameters
    ----------
    num_heads
        Number of heads N.
    num_features
        Width H, a multiple of twice `num_heads`.
    dropout_rate
        Dropout rate of attention weights.
    use_bias
        Whether the projections have biases.
    max_wavelength, scale_factor
        See :func:`apply_rope`.
    rngs
        Random streams for initial weights and dropout. If None, uses ``nnx.Rngs(0)``.

    Raises
    ------
    OptionError
        If the heads do not divide the features into vectors of even size, `scale_factor` is below 1, or another number
        cannot be used.
    """

    def __init__(
        self,
        num_heads: int,
        num_features: int,
        *,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        max_wavelength: float = V1_MAX_WAVELENGTH,
        scale_factor: float = V1_SCALE_FACTOR,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        check_numbers(
            num_heads=num_heads,
            num_features=num_features,
            dropout_rate=dropout_rate,
            max_wavelength=max_wavelength,
            scale_factor=scale_factor,
        )
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.num_heads, self.num_features = num_heads, num_features
        self.head_dim = num_features // num_heads
        self.dropout_rate = dropout_rate
        self.max_wavelength, self.scale_factor = max_wavelength, scale_factor

        def projection() -> Any:
            return nnx.Linear(num_features, num_features, use_bias=use_bias, rngs=rngs)

        self.query, self.key, self.value, self.output = projection(), projection(), projection(), projection()
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)

    def __call__(self, inputs: Array, positions: Array | None = None) -> Array:
        """Apply the attention, shapes (B, S, H) and (B, S); without `positions`, only the causal mask defines order."""
        shape = (*inputs.shape[:-1], self.num_heads, self.head_dim)
        query, key, value = (part(inputs).reshape(shape) for part in (self.query, self.key, self.value))
        if positions is not None:
            turn = (self.head_dim, self.max_wavelength, self.scale_factor)
            query, key = apply_rope(query, positions, *turn), apply_rope(key, positions, *turn)
        if self.dropout_rate > 0 and not self.dropout.deterministic:
            attended = self._with_dropout(query, key, value)
        else:
            attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.reshape(inputs.shape))

    def _with_dropout(self, query: Array, key: Array, value: Array) -> Array:
        """Compute attention step by step, because the fused function does not support dropout."""
        n_tokens = query.shape[1]
        scores = jnp.einsum("bsnk,btnk->bnst", query, key).astype(jnp.float32) / math.sqrt(self.head_dim)
        before = jnp.tril(jnp.ones((n_tokens, n_tokens), dtype=bool))
        weights = jax.nn.softmax(jnp.where(before, scores, -jnp.inf), axis=-1).astype(value.dtype)
        return jnp.einsum("bnst,btnk->bsnk", self.dropout(weights), value)
