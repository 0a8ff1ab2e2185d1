"""Joint embedding: views of one cell share an embedding, and all cells together fill the space.

Shapes: B cells, K views, D dimensions.
"""

from __future__ import annotations

import torch
from torch import nn

from scforge._checks import check_count, check_share
from scforge.data.cells import CellBlock
from scforge.data.thinning import thin
from scforge.errors import OptionError
from scforge.models.components.sigreg import SIGReg
from scforge.tokenizers.base import Tokenizer
from scforge.tokenizers.batch import concatenate, pad
from scforge.training.objectives.base import Objective, TrainingDefaults
from scforge.training.objectives.registry import register_objective

__all__ = ["JointEmbedding"]


@register_objective("joint_embedding")
class JointEmbedding(Objective):
    """Agreement of the views of a cell plus SIGReg over cells (after LeJEPA, arXiv:2511.08544).

    Each cell is seen several times: its counts thinned to a random depth and some genes hidden. With z the embedding
    of a view::

        loss = (1 - weight) * mean((z - mean of the cell's views)^2) + weight * SIGReg(z)

    where SIGReg is taken over the cells of the batch for each view, those of all processes in training, and averaged
    over the views.

    Parameters
    ----------
    views
        Views of each cell, at least 2.
    keep_min, keep_max
        Range of the share of counts that a view keeps, drawn for each view.
    gene_dropout
        Largest rate of hidden genes; the rate is drawn between 0 and this for each view.
    weight
        Weight of SIGReg, in (0, 1).
    slices
        Random directions of SIGReg.
    """

    defaults = TrainingDefaults(batch_size=256, lr=2e-3, weight_decay=0.01, schedule="one_cycle", max_epochs=40)
    # SIGReg takes a batch for a sample of all cells.
    random_batches = True

    def __init__(
        self,
        *,
        views: int = 4,
        keep_min: float = 0.3,
        keep_max: float = 1.0,
        gene_dropout: float = 0.4,
        weight: float = 0.05,
        slices: int = 256,
    ) -> None:
        check_count("views", views, "views of a cell", least=2)
        for name, value in {"keep_min": keep_min, "keep_max": keep_max, "gene_dropout": gene_dropout}.items():
            check_share(name, value)
        check_share("weight", weight)
        if not 0 < keep_min <= keep_max <= 1:
            raise OptionError(
                f"keep_min={keep_min} and keep_max={keep_max} must satisfy 0 < keep_min <= keep_max <= 1."
            )
        if not 0 <= gene_dropout < 1:
            raise OptionError(f"gene_dropout={gene_dropout} is not in [0, 1).")
        if not 0 < weight < 1:
            raise OptionError(f"weight={weight} is not between 0 and 1.")
        check_count("slices", slices, "directions")
        self.views = int(views)
        self.keep_min = float(keep_min)
        self.keep_max = float(keep_max)
        self.gene_dropout = float(gene_dropout)
        self.weight = float(weight)
        self.slices = int(slices)
        self._sigreg = SIGReg(self.slices)

    def prepare(self, block: CellBlock, tokenizer: Tokenizer, *, epoch: int, seed: int) -> dict[str, torch.Tensor]:
        """Tokenise all views of all cells, view after view: tensors of shape (K * B, S)."""
        parts = [
            tokenizer.ragged(
                thin(
                    block,
                    keep=(self.keep_min, self.keep_max),
                    gene_dropout=(0.0, self.gene_dropout),
                    seed=seed,
                    epoch=epoch,
                    view=view,
                )
            )
            for view in range(self.views)
        ]
        return dict(pad(concatenate(parts)))

    def n_cells(self, batch: dict[str, torch.Tensor]) -> int:
        """Return the number of cells, each of which stands there once a view."""
        return batch["input_ids"].shape[0] // self.views

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss; log its two parts and the spread of the embedding."""
        z_kbd = module.encode(**batch).float().unflatten(0, (self.views, -1))
        agreement = (z_kbd - z_kbd.mean(dim=0)).square().mean()
        sigreg = self._statistic(z_kbd, fresh=module.training)
        loss = (1 - self.weight) * agreement + self.weight * sigreg
        spread = z_kbd.detach().std(dim=1, correction=0).mean()
        return loss, {"agreement": agreement.detach(), "sigreg": sigreg.detach(), "spread": spread}

    def _statistic(self, z_kbd: torch.Tensor, *, fresh: bool) -> torch.Tensor:
        """Return SIGReg, along fresh directions in training and always the same ones in validation."""
        sigreg = self._sigreg.to(z_kbd.device)
        if fresh:
            return sigreg(z_kbd)
        generator = torch.Generator().manual_seed(0)
        return sigreg.compute(z_kbd, torch.randn(z_kbd.shape[-1], self.slices, generator=generator).to(z_kbd.device))
