"""Alignment of batches: SIGReg within each batch pulls all of them onto the same Gaussian."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from scforge.models.components.sigreg import SIGReg

N_SLICES = 256
"""Number of random directions."""
_MIN_CELLS = 8
"""Minimum number of cells from a batch in a step to regularize its distribution."""


def align(sigreg: SIGReg, z_bd: torch.Tensor, codes: torch.Tensor, n_batches: int, *, fresh: bool) -> torch.Tensor:
    """Return SIGReg within each batch, a scalar, so that all batches are pulled onto the same Gaussian.

    Parameters
    ----------
    sigreg
        The statistic.
    z_bd
        Embeddings, shape (B, D).
    codes
        Batch of each cell, int64, shape (B,); cells with the code -1 form one additional batch.
    n_batches
        Number of batches E.
    fresh
        Whether to sample new directions instead of using the same directions each time.

    Returns
    -------
    The statistic averaged over batches, weighted by the number of cells; batches with fewer than 8 cells in this step
    are ignored.
    """
    generator = None if fresh else torch.Generator().manual_seed(0)
    noise = torch.randn(z_bd.shape[-1], sigreg.slices, generator=generator).to(z_bd.device)
    member_be = F.one_hot(torch.where(codes < 0, n_batches, codes), n_batches + 1).to(torch.float32)
    sizes = member_be.sum(dim=0)
    statistic_e = sigreg.of_groups(z_bd, noise, (member_be / sizes.clamp_min(1.0)).T)
    weights = sizes * (sizes >= _MIN_CELLS)
    return (statistic_e * weights).sum() / weights.sum().clamp_min(1.0)
