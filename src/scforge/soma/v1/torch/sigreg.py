"""soma's regulariser: each state by itself is to look like a draw from a normal distribution.

Shapes: ... states, H width, K directions, T points.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from scforge.errors import DataError
from scforge.soma.v1.configs import SIGRegConfig, check_config

_NUMBERS = {"cpu": 2**17}
"""Projections at a time. On a CPU they stay within its cache."""
_NUMBERS_ELSEWHERE = 2**24


class SIGReg(nn.Module):
    """Compares the projections of each state onto random directions with the standard normal, as published.

    For a state the characteristic function of its K projections p is compared with that of the normal::

        coefficient * K * integral over t of |mean_k exp(i t p_k) - exp(-t^2 / 2)|^2 * exp(-t^2 / 2) dt

    by the trapezoidal rule on [-t_max, t_max], and averaged over states. The mean is over *directions*, so that it
    draws the squared norm of a state to H and sees nothing of how states differ; states that all are equal suit it.
    What keeps states apart is :class:`scforge.models.components.SIGReg`, with the mean over *samples*.

    Parameters
    ----------
    config
        Sizes and weight.

    Examples
    --------
    >>> import torch
    >>> SIGReg(SIGRegConfig())(torch.zeros(3, 8))
    tensor(2.0585)
    """

    def __init__(self, config: SIGRegConfig) -> None:
        super().__init__()
        check_config(config, SIGRegConfig)
        self.config = config
        t = torch.linspace(0, config.t_max, config.points)
        step = config.t_max / (config.points - 1)
        phi = torch.exp(-0.5 * t**2)
        trapezoid = torch.full((config.points,), 2 * step)
        trapezoid[[0, -1]] = step
        self.register_buffer("t", t)
        self.register_buffer("phi", phi)
        self.register_buffer("weights", trapezoid * phi)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of states of shape (..., H) along directions drawn from torch's generator."""
        _check_states(x)
        noise = torch.randn(x.shape[-1], self.config.slices, dtype=x.dtype, device=x.device)
        return self.compute(x, noise)

    def compute(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return the loss along given directions.

        Parameters
        ----------
        x
            States, shape (..., H).
        noise
            Directions of any length, shape (H, K).

        Returns
        -------
        A scalar of float32, or of float64 if `x` is.
        """
        _check_states(x)
        if noise.dim() != 2 or len(noise) != x.shape[-1]:
            raise DataError(f"noise has shape {tuple(noise.shape)}; pass ({x.shape[-1]}, directions).")
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            directions = noise.to(wide) / noise.to(wide).norm(dim=0)
            projections_mk = x.to(wide).reshape(-1, x.shape[-1]) @ directions
            t, phi, weights = (buffer.to(wide) for buffer in (self.t, self.phi, self.weights))
            with_slope = torch.is_grad_enabled() and projections_mk.requires_grad
            return _Statistic.apply(projections_mk, t, phi, weights, with_slope)[0] * self.config.coefficient


def _check_states(x: torch.Tensor) -> None:
    if not x.is_floating_point() or x.dim() < 1:
        raise DataError(f"x has dtype {x.dtype} and shape {tuple(x.shape)}; pass states of shape (..., width).")


class _Statistic(torch.autograd.Function):
    """The mean over rows of the Epps-Pulley statistic of their projections, some rows at a time.

    The gradient is computed together with it, so that only one number a projection is kept, and not two for each of
    the points. Cosines and sines of multiples come from their recurrence, and are computed once.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        projections_mk: torch.Tensor, t: torch.Tensor, phi: torch.Tensor, weights: torch.Tensor, with_slope: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n_rows, n_slices = projections_mk.shape
        grad_mk = torch.empty_like(projections_mk) if with_slope else projections_mk.new_empty(0)
        total = projections_mk.new_zeros(())
        rows = max(1, _NUMBERS.get(projections_mk.device.type, _NUMBERS_ELSEWHERE) // max(1, n_slices))
        for start in range(0, n_rows, rows):
            part = projections_mk[start : start + rows]
            value, slope = _statistic(part, t, phi, weights, with_slope=with_slope)
            total += value
            if slope is not None:
                grad_mk[start : start + rows] = slope
        return total / n_rows, grad_mk

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.n_rows = len(inputs[0])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None
        (grad_mk,) = ctx.saved_tensors
        return grad_mk * (grad / ctx.n_rows), None, None, None, None


def _statistic(
    p_mk: torch.Tensor, t: torch.Tensor, phi: torch.Tensor, weights: torch.Tensor, *, with_slope: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sum over rows of the statistic, and its slope by the projections."""
    angle_mk = p_mk * t[1]
    cos_mk, sin_mk = angle_mk.cos(), angle_mk.sin()
    double_mk = 2 * cos_mk
    error_mt, sine_mt = _means_of_multiples(cos_mk, sin_mk, double_mk, len(t))
    error_mt -= phi
    value = ((error_mt.square() + sine_mt.square()) @ weights).sum() * p_mk.shape[1]
    if not with_slope:
        return value, None
    # d/dp of K w (C - phi)^2 + K w S^2 is 2 w t (S cos(t p) - (C - phi) sin(t p)), and t = j t_1: a sum of cosines and
    # one of sines of multiples, which Clenshaw's recurrence adds up from the last to the first.
    factors = 2 * weights * t
    of_cos_jm = (sine_mt * factors).t().unsqueeze(-1)
    of_sin_jm = (error_mt * -factors).t().unsqueeze(-1)
    both = p_mk.new_zeros((4, *p_mk.shape))
    cos_1, cos_2, sin_1, sin_2 = both
    for j in range(len(t) - 1, 0, -1):
        cos_1, cos_2 = cos_2.neg_().addcmul_(double_mk, cos_1).add_(of_cos_jm[j]), cos_1
        sin_1, sin_2 = sin_2.neg_().addcmul_(double_mk, sin_1).add_(of_sin_jm[j]), sin_1
    # The term of j = 0 is none, for t = 0 there.
    return value, cos_1 * cos_mk - cos_2 + sin_1 * sin_mk


def _means_of_multiples(
    cos_mk: torch.Tensor, sin_mk: torch.Tensor, double_mk: torch.Tensor, points: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means over K of cos(j a) and sin(j a) for j = 0 .. points - 1, each of shape (M, T)."""
    real = cos_mk.new_ones((len(cos_mk), points))
    imaginary = cos_mk.new_zeros((len(cos_mk), points))
    cos, sin = cos_mk.clone(), sin_mk.clone()
    cos_before, sin_before = torch.ones_like(cos), torch.zeros_like(sin)
    for j in range(1, points):
        real[:, j], imaginary[:, j] = cos.mean(dim=1), sin.mean(dim=1)
        cos, cos_before = cos_before.neg_().addcmul_(double_mk, cos), cos
        sin, sin_before = sin_before.neg_().addcmul_(double_mk, sin), sin
    return real, imaginary
