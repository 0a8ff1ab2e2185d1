"""Masked gene prediction whose cell embeddings use all their dimensions.

Shapes: B cells, H dimensions.
"""

from __future__ import annotations

import torch
from torch import nn

from scforge.errors import OptionError
from scforge.training import MaskedGenePrediction


class DecorrelatedMaskedGenes(MaskedGenePrediction):
    """Add the mean squared correlation between dimensions of the cell embedding to the loss (as in Barlow Twins).

    Parameters
    ----------
    mask_ratio
        Share of the genes that are hidden.
    weight
        Weight of the correlations.
    """

    random_batches = True  # correlations over cells of like length would be others

    def __init__(self, *, mask_ratio: float = 0.15, weight: float = 0.1) -> None:
        super().__init__(mask_ratio=mask_ratio)
        if weight < 0:
            raise OptionError("is negative; pass 0 or more.", weight=weight)
        self.weight = float(weight)

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, and its second part to log."""
        output = module(**batch, return_logits=False)
        centered_bh = output.embeddings.float() - output.embeddings.float().mean(dim=0)
        scaled_bh = nn.functional.normalize(centered_bh, dim=0)
        correlations_hh = scaled_bh.T @ scaled_bh
        correlation = (correlations_hh - correlations_hh.diag().diag()).square().mean()
        return output.loss + self.weight * correlation, {"correlation": correlation.detach()}
