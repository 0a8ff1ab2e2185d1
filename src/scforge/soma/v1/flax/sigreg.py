"""The soma regularizer in flax: per token, over the slices.

It regularizes the length of each vector, and cannot detect that all vectors are equal. The statistic over samples is
:class:`scforge.models.components.SIGReg`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from scforge.soma.v1.configs import SIGRegConfig, check_config, check_states


class SIGReg(nnx.Module):
    """Compare the projections of each token onto random directions with a normal distribution (Epps and Pulley 1983).

    Let p be the projections of one token onto N directions of length 1, w the trapezoidal weights of `points` points t
    from 0 to `t_max`, each counted twice, and phi(t) = exp(-t^2 / 2)::

        N * sum over t of w(t) phi(t) ((mean cos(t p) - phi(t))^2 + (mean sin(t p))^2)

    The statistic is averaged over the tokens and multiplied by `coefficient`.

    Parameters
    ----------
    config
        Numbers of points and slices, and weight.
    rngs
        Random streams for directions (stream ``noise``). If None, uses ``nnx.Rngs(0)``.

    Examples
    --------
    >>> sig_reg = SIGReg(SIGRegConfig(slices=8), nnx.Rngs(0))
    >>> sig_reg(jnp.zeros((2, 3, 4))).shape
    ()
    """

    def __init__(self, config: SIGRegConfig, rngs: nnx.Rngs | None = None) -> None:
        check_config(config, SIGRegConfig)
        self.config = config
        self.rngs = nnx.Rngs(0) if rngs is None else rngs
        step = config.t_max / (config.points - 1)
        self.t = jnp.linspace(0, config.t_max, config.points)
        self.phi = jnp.exp(-0.5 * self.t**2)
        ends = (jnp.arange(config.points) % (config.points - 1)) == 0
        self.weights = jnp.where(ends, step, 2 * step) * self.phi

    def __call__(self, x: Array) -> Array:
        """Return the loss for representations of shape (..., H), a scalar, along newly sampled directions."""
        check_states(x)
        shape = (x.shape[-1], self.config.slices)
        return self.compute(x, jax.random.normal(self.rngs.noise(), shape=shape, dtype=x.dtype))

    def compute(self, x: Array, noise: Array) -> Array:
        """Return the loss for representations of shape (..., H) along the columns of `noise`, shape (H, N)."""
        check_states(x, noise)
        projected = x @ (noise / jnp.linalg.norm(noise, axis=0))
        angles = projected[..., None] * self.t
        error = (jnp.cos(angles).mean(axis=-2) - self.phi) ** 2 + jnp.sin(angles).mean(axis=-2) ** 2
        statistic = (error * self.weights).sum(axis=-1) * projected.shape[-1]
        return statistic.mean() * self.config.coefficient
