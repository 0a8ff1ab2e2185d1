"""SIGReg: cell embeddings are pulled toward an isotropic Gaussian, so that they cannot collapse.

Shapes: N cells, D dimensions, K directions, T points, G groups of cells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scforge._checks import check_bool, check_count, check_positive


class SIGReg(nn.Module):
    """Sketched isotropic Gaussian regularization over cells (LeJEPA: Balestriero and LeCun 2025, arXiv:2511.08544).

    The cells are projected onto random unit directions. For each direction, the Epps-Pulley statistic compares the
    empirical characteristic function of the N projections with the characteristic function of the standard normal::

        N * integral over t of |mean_n exp(i t p_n) - exp(-t^2 / 2)|^2 * exp(-t^2 / 2) dt

    The integral uses the trapezoidal rule on [-t_max, t_max] (symmetric, so points on [0, t_max] are sufficient). The
    statistic is averaged over directions. Its expectation for Gaussian cells does not depend on N.

    If several processes train together, each with different cells, the means are taken over the cells of all processes,
    along the same directions. Gradients averaged over processes, as in DDP, then equal those of one process with all
    cells.

    Parameters
    ----------
    slices
        Number of random directions K, resampled at each call.
    points
        Number of points T.
    t_max
        Maximum value of t.
    sync
        Whether to use the cells of all processes when a gradient is needed. All processes must then call the module.

    The computation is in float32, even under autocast and in a module of another dtype, because the recurrence and the
    small differences between means lose a fifth of the value in 16 bits.

    Raises
    ------
    OptionError
        If `slices` or `points` (at least 2) is not a valid number, or `t_max` is not positive.

    Examples
    --------
    >>> import torch
    >>> generator = torch.Generator().manual_seed(0)
    >>> cells = torch.randn(500, 16, generator=generator)
    >>> sigreg = SIGReg()
    >>> bool(sigreg(cells) < 2), bool(sigreg(torch.zeros(500, 16)) > 100)  # Gaussian, and collapsed
    (True, True)
    """

    def __init__(self, slices: int = 256, points: int = 17, t_max: float = 3.0, *, sync: bool = True) -> None:
        super().__init__()
        check_count("slices", slices, "directions")
        check_count("points", points, "points", least=2)
        check_positive("t_max", t_max)
        self.slices, self.points, self.t_max = slices, points, t_max
        self.sync = check_bool("sync", sync)
        t, phi, weights = _quadrature(points, t_max)
        self.register_buffer("t", t, persistent=False)
        self.register_buffer("phi", phi, persistent=False)
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the statistic for embeddings of shape (..., N, D), averaged over the leading dimensions.

        Parameters
        ----------
        x
            Embeddings, shape (..., N, D).

        Returns
        -------
        The statistic, a float32 scalar.
        """
        noise = torch.randn(x.shape[-1], self.slices, device=x.device, dtype=torch.float32)
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        several = self.sync and torch.is_grad_enabled() and together and torch.distributed.get_world_size() > 1
        if several:
            torch.distributed.broadcast(noise, src=0)
        return self._statistic(x, noise, several=several)

    def compute(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return the statistic along the directions of `noise`, shape (D, K), for the cells of this process only.

        Parameters
        ----------
        x
            Embeddings, shape (..., N, D).
        noise
            Directions, not necessarily of unit length, shape (D, K).

        Returns
        -------
        The statistic, a float32 scalar.
        """
        return self._statistic(x, noise, several=False)

    def _statistic(self, x: torch.Tensor, noise: torch.Tensor, *, several: bool) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            t, phi, weights = self._quadrature()
            real_kt, imaginary_kt = _means_of_multiples(_angles(x.float(), noise.float(), t), self.points)
            n_cells: int | torch.Tensor = x.shape[-2]
            if several:
                n_own = n_cells
                n_cells = torch.tensor(float(n_own), device=x.device)
                torch.distributed.all_reduce(n_cells)
                shares = torch.stack([real_kt, imaginary_kt]) * (n_own / n_cells)
                real_kt, imaginary_kt = _SumOverProcesses.apply(shares)
            error_kt = (real_kt - phi).square() + imaginary_kt.square()
            return (error_kt @ weights).mean() * n_cells

    def of_groups(self, x: torch.Tensor, noise: torch.Tensor, shares_gn: torch.Tensor) -> torch.Tensor:
        """Return the statistic of each group of cells in this process, computed only from the cells in the group.

        Nothing is summed over processes, regardless of `sync`: each process uses only its own cells.

        Parameters
        ----------
        x
            Embeddings, shape (..., N, D).
        noise
            Directions, shape (D, K).
        shares_gn
            Weight of each cell in each group, shape (G, N): e.g. one over the number of cells in the group, and 0 for
            other cells.

        Returns
        -------
        The statistic, shape (..., G); the value for a group without cells is meaningless.
        """
        with torch.autocast(x.device.type, enabled=False):
            t, phi, weights = self._quadrature()
            shares = shares_gn.float()
            angles_nk = _angles(x.float(), noise.float(), t)
            real_gkt, imaginary_gkt = _means_of_multiples(angles_nk, self.points, lambda values: shares @ values)
            error_gkt = (real_gkt - phi).square() + imaginary_gkt.square()
            return (error_gkt @ weights).mean(dim=-1) * (shares > 0).sum(dim=1)

    def _quadrature(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the points, the characteristic function of the normal, and the weights, float32, shape (T,)."""
        if self.t.dtype == torch.float32:
            return self.t, self.phi, self.weights
        t, phi, weights = (values.to(self.t.device) for values in _quadrature(self.points, self.t_max))
        return t, phi, weights


def _quadrature(points: int, t_max: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    t = torch.linspace(0.0, t_max, points, dtype=torch.float32)
    phi = torch.exp(-(t**2) / 2)
    step = t_max / (points - 1)
    trapezoid = torch.full((points,), 2.0 * step, dtype=torch.float32)
    trapezoid[[0, -1]] = step
    return t, phi, trapezoid * phi


def _angles(x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (x @ (noise / noise.norm(dim=0, keepdim=True))) * t[1]


class _SumOverProcesses(torch.autograd.Function):
    """A sum over processes whose gradient equals the gradient of the summed losses of all processes."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total)
        return total


def _means_of_multiples(
    angles_nk: torch.Tensor, points: int, mean: Callable[[torch.Tensor], torch.Tensor] = lambda values: values.mean(-2)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means over N of cos(j a) and sin(j a) for j = 0 .. points - 1, each of shape (..., K, T).

    The recurrence f((j + 1) a) = 2 cos(a) f(j a) - f((j - 1) a) computes cosine and sine once instead of for each
    point, which would be most of the cost of a training step.
    """
    cos, sin = angles_nk.cos(), angles_nk.sin()
    double = 2 * cos
    cos_before, sin_before = torch.ones_like(cos), torch.zeros_like(sin)
    real, imaginary = [mean(cos_before)], [mean(sin_before)]
    for _ in range(points - 1):
        real.append(mean(cos))
        imaginary.append(mean(sin))
        cos, cos_before = torch.addcmul(-cos_before, double, cos), cos
        sin, sin_before = torch.addcmul(-sin_before, double, sin), sin
    return torch.stack(real, dim=-1), torch.stack(imaginary, dim=-1)
