"""The one LightningModule: it knows modules, objectives and optimizers, and neither genes nor tokens."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn

from scforge._checks import check_count, check_positive
from scforge.training.objectives.base import Objective
from scforge.training.optimizers import make_optimizer, make_schedule, warmup_length

__all__ = ["TrainingPlan"]


class TrainingPlan(lightning.LightningModule):
    """Minimises an objective over a module.

    Parameters
    ----------
    module
        The architecture to train.
    objective
        What to minimise.
    optimizer, lr, weight_decay
        See :func:`scforge.training.optimizers.make_optimizer`; None takes the objective's own defaults.
    schedule, warmup_steps
        See :func:`scforge.training.optimizers.make_schedule`.

    Notes
    -----
    Logs ``train_loss`` and ``validation_loss`` each epoch (means over cells), and beside them what the objective
    logs, as ``train_<name>`` and ``validation_<name>``.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        *,
        optimizer: str = "adamw",
        lr: float | None = None,
        weight_decay: float | None = None,
        schedule: str | None = None,
        warmup_steps: int | None = None,
    ) -> None:
        super().__init__()
        defaults = objective.defaults
        self.module = module
        self.objective = objective
        self.optimizer_name = optimizer
        self.lr = defaults.lr if lr is None else lr
        self.weight_decay = defaults.weight_decay if weight_decay is None else weight_decay
        self.schedule = defaults.schedule if schedule is None else schedule
        self.warmup_steps = warmup_steps
        self.warmed_up_at = 0
        check_positive("lr", self.lr)
        check_positive("weight_decay", self.weight_decay, or_zero=True)
        if warmup_steps is not None:
            check_count("warmup_steps", warmup_steps, "steps", least=0)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return self._step(batch, "train")

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch of held-out cells."""
        return self._step(batch, "validation")

    def _step(self, batch: dict[str, torch.Tensor], stage: str) -> torch.Tensor:
        loss, figures = self.objective.loss(self.module, batch)
        figures = {"loss": loss.detach(), **figures}
        self.log_dict(
            {f"{stage}_{name}": value for name, value in figures.items()},
            on_step=False,
            on_epoch=True,
            batch_size=batch["input_ids"].shape[0],
            sync_dist=True,
        )
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """Make the optimizer, and a schedule over all steps of the training."""
        # Lightning refuses to clip gradients for a fused optimizer in mixed precision.
        fused = not str(self.trainer.precision).endswith("mixed")
        optimizer = make_optimizer(
            self.module, name=self.optimizer_name, lr=self.lr, weight_decay=self.weight_decay, fused=fused
        )
        total = int(self.trainer.estimated_stepping_batches)
        schedule = make_schedule(optimizer, name=self.schedule, total_steps=total, warmup_steps=self.warmup_steps)
        self.warmed_up_at = warmup_length(self.schedule, total, self.warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
