"""The LightningModule that trains every architecture with every objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from scforge._checks import check_count, check_positive
from scforge.errors import OptionError, TrainingError
from scforge.training.devices import shard
from scforge.training.layers import layer_groups, learning_rate_factors
from scforge.training.objectives.base import Objective
from scforge.training.optimizers import make_optimizer, make_schedule, warmup_length


class EpochMetrics:
    """Sum metrics over steps; the sums stay on the device, so that no step waits for them."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._cells = 0

    def add(self, figures: dict[str, torch.Tensor], n_cells: int) -> None:
        """Add the metrics of a step, averaged over its `n_cells` cells, each a tensor of any shape."""
        self._cells += n_cells
        for name, value in figures.items():
            value = value.detach()
            exact = torch.float32 if value.device.type == "mps" else torch.float64
            weighed = value.to(exact) * n_cells
            self._sums[name] = self._sums[name].to(value.device) + weighed if name in self._sums else weighed

    def take(self, total: Callable[[torch.Tensor], torch.Tensor] | None = None) -> dict[str, np.ndarray]:
        """Return the means and reset the sums; `total` sums over processes, so that means include all cells."""
        if not self._sums:
            return {}
        names = sorted(self._sums)
        flat = [self._sums[name].flatten() for name in names]
        sums = torch.cat([*flat, torch.full_like(flat[0][:1], self._cells)])
        if total is not None:
            sums = total(sums)
        means = (sums[:-1] / sums[-1]).cpu().numpy()
        parts = np.split(means, np.cumsum([len(sums) for sums in flat])[:-1])
        shapes = [tuple(self._sums[name].shape) for name in names]
        self._sums, self._cells = {}, 0
        return {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far, JSON-safe."""
        return {"sums": {name: value.tolist() for name, value in self._sums.items()}, "cells": self._cells}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums."""
        self._sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in state["sums"].items()}
        self._cells = int(state["cells"])


class GradualUnfreezing(Callback):
    """Train only the top layer at first, then unfreeze the next lower layer every few epochs (Howard and Ruder, 2018).

    The gradients of layers that are still frozen are discarded immediately before each optimizer step, so processes
    need no synchronization and resuming needs no saved state.

    Parameters
    ----------
    every_n_epochs
        Number of epochs after which the next layer is unfrozen.
    """

    def __init__(self, every_n_epochs: int) -> None:
        check_count("gradual_unfreezing", every_n_epochs, "epochs")
        self.every_n_epochs = every_n_epochs

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Drop the gradients of layers that are not trained yet."""
        groups = layer_groups(pl_module.module)
        n_trained = 1 + trainer.current_epoch // self.every_n_epochs
        for group in groups[: max(0, len(groups) - n_trained)]:
            for parameter in group:
                parameter.grad = None


class NotFiniteError(TrainingError):
    """A loss or a gradient is NaN or infinite; the step was not taken.

    Attributes
    ----------
    result
        The :class:`~scforge.training.fitting.FitResult` of the training so far.
    """

    result: Any = None


class TrainingPlan(lightning.LightningModule):
    """Train a module by minimizing an objective.

    Parameters
    ----------
    module
        The architecture to train.
    objective
        The objective to minimize.
    optimizer, lr, weight_decay
        See :func:`scforge.training.optimizers.make_optimizer`. If None, uses the objective's defaults.
    schedule, warmup_steps
        See :func:`scforge.training.optimizers.make_schedule`.
    layer_lr_decay
        See :func:`scforge.training.plan.learning_rate_factors`. If None, all layers have the same learning rate.

    Attributes
    ----------
    figures
        A mapping from name to additional metrics of the epoch. Callbacks set them, and they are logged with the loss at
        the end of the epoch.
    gradient_norm
        Norm of all gradients in the last step, before clipping, scalar.
    total_steps
        Number of optimizer steps in the whole training run, once it is known.
    validated
        Whether validation ran in this epoch.

    Notes
    -----
    The trainer's callback metrics contain ``train_loss`` and ``validation_loss`` of each epoch (averaged over cells),
    and the metrics that the objective logs, as ``train_<name>`` and ``validation_<name>``.

    Examples
    --------
    >>> import scforge
    >>> module = scforge.models.GenePoolingModel(50, hidden_dim=8, pooling="weighted_sum", latent_dim=4)
    >>> plan = TrainingPlan(module, scforge.training.JointEmbedding(), lr=1e-3)
    >>> plan.module is module
    True
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
        layer_lr_decay: float | None = None,
    ) -> None:
        super().__init__()
        defaults = objective.defaults
        self.module = module
        self.objective = objective
        objective.check_architecture(module)
        self.optimizer_name = optimizer
        self.lr = defaults.lr if lr is None else lr
        self.weight_decay = defaults.weight_decay if weight_decay is None else weight_decay
        self.schedule = defaults.schedule if schedule is None else schedule
        self.warmup_steps = warmup_steps
        self.layer_lr_decay = layer_lr_decay
        self.warmed_up_at = 0
        self.gradient_norm = torch.zeros(())
        self.begin()
        check_positive("lr", self.lr)
        check_positive("weight_decay", self.weight_decay, or_zero=True)
        if warmup_steps is not None:
            check_count("warmup_steps", warmup_steps, "steps", least=0)

    def begin(self) -> None:
        """Reset the state of an earlier training run."""
        self.total_steps: int | None = None
        self.figures: dict[str, float] = {}
        self.train_means, self.validation_means = EpochMetrics(), EpochMetrics()
        self.validated = False

    def configure_model(self) -> None:
        """Shard the module over processes if the strategy requires it."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            shard(self.module, self.trainer.strategy.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss, figures = self.objective.loss(self.module, batch)
        self.train_means.add({"loss": loss, **figures}, self.objective.n_cells(batch))
        self._check("loss", loss, batch_idx)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch of validation cells."""
        loss, figures = self.objective.loss(self.module, batch)
        self.validation_means.add({"loss": loss, **figures}, self.objective.n_cells(batch))
        return loss

    def on_validation_epoch_end(self) -> None:
        """Add the metrics averaged over the validation cells to the metrics that callbacks read."""
        self.validated = True
        figures = self.summary(self.validation_means)
        self.log_dict({f"validation_{name}": value for name, value in figures.items()}, logger=False)

    def summary(self, means: EpochMetrics) -> dict[str, float]:
        """Return the metrics of the epoch over the cells of all processes, and reset them."""
        strategy = self.trainer.strategy
        taken = means.take(lambda sums: strategy.reduce(sums.to(strategy.root_device), reduce_op="sum").cpu())
        return self.objective.summarize(taken) if taken else {}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients, record their norm, and raise an error before a step with NaN or infinite gradients."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        by_value = gradient_clip_algorithm == "value" and gradient_clip_val
        most = float("inf") if by_value or not gradient_clip_val else gradient_clip_val
        norm = nn.utils.clip_grad_norm_(parameters, most)
        self.gradient_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if by_value:
            nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        # With 16-bit floats gradients overflow now and then; the scaler of the loss leaves such steps out.
        if self.trainer.precision != "16-mixed":
            self._check("gradient", self.gradient_norm, self.trainer.fit_loop.epoch_loop.batch_idx)

    def _check(self, what: str, value: torch.Tensor, batch_idx: int) -> None:
        # Elsewhere than on a CPU looking at a value waits for the device, so there one step in some is looked at.
        if value.device.type != "cpu" and self.global_step % max(1, self.trainer.log_every_n_steps):
            return
        if not torch.isfinite(value):
            raise NotFiniteError(
                f"the {what} is {value.item()} in batch {batch_idx} of epoch {self.current_epoch} "
                f"(step {self.global_step}); lower the learning rate (lr), or check the counts for extreme values."
            )

    def configure_optimizers(self) -> dict[str, Any]:
        """Create the optimizer, and a schedule over all training steps."""
        # The scaler of 16-bit losses needs gradients that nobody else scales; fused kernels take no sharded tensors.
        sharded = isinstance(self.trainer.strategy, ModelParallelStrategy)
        if sharded and self.optimizer_name == "muon":
            raise OptionError(
                "needs unsharded weight matrices and does not work with strategy='fsdp'; use "
                "optimizer='adamw' or strategy='ddp'.",
                optimizer="muon",
            )
        fused = self.trainer.precision != "16-mixed" and not sharded
        optimizer = make_optimizer(
            self.module,
            name=self.optimizer_name,
            lr=self.lr,
            weight_decay=self.weight_decay,
            fused=fused,
            factors=learning_rate_factors(self.module, self.layer_lr_decay),
        )
        if self.total_steps is None:
            self.total_steps = int(self.trainer.estimated_stepping_batches)
        total = self.total_steps
        schedule = make_schedule(optimizer, name=self.schedule, total_steps=total, warmup_steps=self.warmup_steps)
        self.warmed_up_at = warmup_length(self.schedule, total, self.warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
