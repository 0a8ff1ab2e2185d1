"""The soma regularizer: the values of each state should follow a normal distribution.

Shapes: ... states, H width, K directions, T points.
"""

from __future__ import annotations

import torch
from torch import nn

from scforge.soma.v1.configs import SIGRegConfig, check_config, check_states


class SIGReg(nn.Module):
    """Compare the projections of each state onto random directions with the standard normal, as published.

    For each state, the characteristic function of its K projections p is compared with that of the standard normal::

        coefficient * K * integral over t of |mean_k exp(i t p_k) - exp(-t^2 / 2)|^2 * exp(-t^2 / 2) dt

    The integral uses the trapezoidal rule on [-t_max, t_max], and is averaged over states. The mean is over
    *directions*, so the regularizer pulls the squared norm of a state to H and cannot detect that all states are equal.
    In contrast, :class:`scforge.models.components.SIGReg`, with the mean over *samples*, keeps states apart.

    Parameters
    ----------
    config
        Sizes and weight of the regularizer.

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
        """Return the loss for states of shape (..., H), using directions sampled with torch's default generator."""
        check_states(x)
        noise = torch.randn(x.shape[-1], self.config.slices, dtype=x.dtype, device=x.device)
        return self.compute(x, noise)

    def compute(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return the loss along given directions.

        Parameters
        ----------
        x
            States, shape (..., H).
        noise
            Directions, not necessarily of unit length, shape (H, K).

        Returns
        -------
        A float32 scalar, or float64 if `x` is float64.
        """
        check_states(x, noise)
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            directions = noise.to(wide) / noise.to(wide).norm(dim=0)
            projections_mk = x.to(wide).reshape(-1, x.shape[-1]) @ directions
            t, phi, weights = (buffer.to(wide) for buffer in (self.t, self.phi, self.weights))
            statistic_m = projections_mk.new_zeros(len(projections_mk))
            for at, normal, weight in zip(t, phi, weights, strict=True):
                angles_mk = projections_mk * at
                real_m, imaginary_m = angles_mk.cos().mean(dim=1), angles_mk.sin().mean(dim=1)
                statistic_m = statistic_m + weight * ((real_m - normal).square() + imaginary_m.square())
            return statistic_m.mean() * noise.shape[1] * self.config.coefficient
