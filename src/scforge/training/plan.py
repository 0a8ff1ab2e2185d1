"""The one LightningModule: it knows modules, objectives and optimizers, and neither genes nor tokens."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from scforge._checks import check_count, check_positive
from scforge.errors import OptionError, TrainingError
from scforge.training.layers import learning_rate_factors
from scforge.training.means import EpochMeans
from scforge.training.objectives.base import Objective
from scforge.training.optimizers import make_optimizer, make_schedule, warmup_length
from scforge.training.strategies import shard

__all__ = ["NotFiniteError", "TrainingPlan"]


class NotFiniteError(TrainingError):
    """A loss or a gradient that is not a number; the step was not taken.

    Attributes
    ----------
    result
        The :class:`~scforge.training.FitResult` of the training up to there.
    """

    result: Any = None


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
    layer_lr_decay
        See :func:`scforge.training.layers.learning_rate_factors`; None gives all layers the same learning rate.

    Attributes
    ----------
    figures
        Further figures of the epoch, by name, that a callback puts there: they go into the history and the loggers
        beside the loss at its end.
    gradient_norm
        Norm of all gradients in the last step, before clipping, scalar.
    total_steps
        Optimizer steps of the whole training, once they are known.
    validated
        Whether held-out cells were looked at in this epoch.

    Notes
    -----
    Leaves ``train_loss`` and ``validation_loss`` of each epoch (means over cells) in the trainer's callback metrics,
    beside them what the objective logs, as ``train_<name>`` and ``validation_<name>``.

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
        """Forget an earlier training."""
        self.total_steps: int | None = None
        self.figures: dict[str, float] = {}
        self.train_means, self.validation_means = EpochMeans(), EpochMeans()
        self.validated = False

    def configure_model(self) -> None:
        """Shard the module if the processes share it."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            shard(self.module, self.trainer.strategy.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = self._step(batch, self.train_means)
        self._check("loss", loss, batch_idx)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch of held-out cells."""
        return self._step(batch, self.validation_means)

    def on_validation_epoch_end(self) -> None:
        """Leave the means over the held-out cells where callbacks look for them."""
        self.validated = True
        figures = self._summary(self.validation_means)
        self.log_dict({f"validation_{name}": value for name, value in figures.items()}, logger=False)

    def train_figures(self) -> dict[str, float]:
        """Return the figures of the training cells of the epoch, and begin anew."""
        return self._summary(self.train_means)

    def _summary(self, means: EpochMeans) -> dict[str, float]:
        taken = means.take(self.over_processes)
        return self.objective.summarise(taken) if taken else {}

    def over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all processes."""
        return self.trainer.strategy.reduce(tensor.to(self.trainer.strategy.root_device), reduce_op="sum").cpu()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip, keep the norm, and stop before a step that would spoil the weights."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        by_value = gradient_clip_algorithm == "value" and gradient_clip_val
        most = float("inf") if by_value or not gradient_clip_val else gradient_clip_val
        norm = nn.utils.clip_grad_norm_(parameters, most)
        self.gradient_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if by_value:
            nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        if not self._scales_losses:
            self._check("gradient", self.gradient_norm, self.trainer.fit_loop.epoch_loop.batch_idx)

    @property
    def _scales_losses(self) -> bool:
        # With 16-bit floats gradients overflow now and then; the scaler of the loss leaves such steps out.
        return self.trainer.precision == "16-mixed"

    def _check(self, what: str, value: torch.Tensor, batch_idx: int) -> None:
        # Elsewhere than on a CPU looking at a value waits for the device, so there one step in some is looked at.
        if value.device.type != "cpu" and self.global_step % max(1, self.trainer.log_every_n_steps):
            return
        if not torch.isfinite(value):
            raise NotFiniteError(
                f"the {what} is {value.item()} in batch {batch_idx} of epoch {self.current_epoch} "
                f"(step {self.global_step}); lower the learning rate (lr), or check the counts for extreme values."
            )

    def _step(self, batch: dict[str, torch.Tensor], means: EpochMeans) -> torch.Tensor:
        loss, figures = self.objective.loss(self.module, batch)
        means.add({"loss": loss, **figures}, self.objective.n_cells(batch))
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """Make the optimizer, and a schedule over all steps of the training."""
        # The scaler of 16-bit losses needs gradients that nobody else scales; fused kernels take no sharded tensors.
        sharded = isinstance(self.trainer.strategy, ModelParallelStrategy)
        if sharded and self.optimizer_name == "muon":
            raise OptionError("optimizer='muon' needs whole matrices, not strategy='fsdp'; choose 'adamw', or 'ddp'.")
        fused = not self._scales_losses and not sharded
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
