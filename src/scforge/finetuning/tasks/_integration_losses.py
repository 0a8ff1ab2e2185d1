"""What integration minimises.

Shapes: B cells, D dimensions, E batches, G genes.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from scforge.models.components.sigreg import SIGReg

__all__ = ["align", "negative_binomial"]

_FEWEST_CELLS = 8
"""Cells of a batch in a step under which its distribution is not looked at."""

_LOG_DISPERSIONS = (-7.0, 9.0)


def align(sigreg: SIGReg, z_bd: torch.Tensor, codes: torch.Tensor, n_batches: int, *, fresh: bool) -> torch.Tensor:
    """Return SIGReg within each batch, so that all batches are pulled onto the same Gaussian, scalar.

    Parameters
    ----------
    sigreg
        The statistic.
    z_bd
        Embeddings, shape (B, D).
    codes
        Batch of each cell, int64, shape (B,); cells of the code -1 are taken together as one more batch.
    n_batches
        Number of batches E.
    fresh
        Take new directions, in place of the same ones each time.

    Returns
    -------
    Mean over batches, weighted by their cells; batches of fewer than 8 cells in this step do not count.
    """
    generator = None if fresh else torch.Generator().manual_seed(0)
    noise = torch.randn(z_bd.shape[-1], sigreg.slices, generator=generator).to(z_bd.device)
    member_be = F.one_hot(torch.where(codes < 0, n_batches, codes), n_batches + 1).to(torch.float32)
    sizes = member_be.sum(dim=0)
    statistic_e = sigreg.of_groups(z_bd, noise, (member_be / sizes.clamp_min(1.0)).T)
    weights = sizes * (sizes >= _FEWEST_CELLS)
    return (statistic_e * weights).sum() / weights.sum().clamp_min(1.0)


def negative_binomial(
    logits: torch.Tensor, counts: torch.Tensor, log_dispersion: torch.Tensor, measured: torch.Tensor | None
) -> torch.Tensor:
    """Return the mean negative log-likelihood of a count, up to what does not depend on the model, scalar.

    With m = share times library size and r the dispersion: ``(y + r) log(r + m) - r log r - y log m + lgamma(r) -
    lgamma(y + r)`` (Lopez et al. 2018).

    Parameters
    ----------
    logits
        Logit of the share of each gene, shape (B, G).
    counts
        Shape (B, G).
    log_dispersion
        Logarithm of r, shape (G,).
    measured
        Genes that the data have, bool, shape (G,); the others have no share, and do not count. None: all.
    """
    logits = logits.float()
    if measured is not None:
        logits = logits.masked_fill(~measured, -torch.inf)
    library = counts.sum(dim=-1, keepdim=True).clamp_min(1.0)
    # The logarithm of nothing would be minus infinity times a count of 0.
    log_mean = (logits.log_softmax(dim=-1) + library.log()).clamp_min(-30.0)
    r = log_dispersion.clamp(*_LOG_DISPERSIONS).exp()
    per_count = torch.lgamma(r) - torch.lgamma(counts + r) - r * r.log()
    loss = (counts + r) * (r + log_mean.exp()).log() - counts * log_mean + per_count
    return loss.mean() if measured is None else (loss * measured).mean() * (len(measured) / measured.sum().clamp_min(1))
