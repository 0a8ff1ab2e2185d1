"""Speed, gradients and losses while training runs, for the loggers."""

from __future__ import annotations

import time
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from scforge.training.history import History
from scforge.training.loggers import TableLogger
from scforge.training.progress import StepClock
from scforge.training.resuming import SavingError
from scforge.training.utilisation import flops_per_token, peak_flops

__all__ = ["Monitor"]


class Monitor(Callback):
    """Gives the loggers a row every few steps and one at the end of each epoch.

    A row of a step has ``step_loss`` (of its last batch), ``learning_rate``, ``gradient_norm``, ``cells_per_second``,
    ``tokens_per_second`` (of all processes, padding not counted), ``waiting`` (share of the time in which the model
    waits for a batch), ``utilisation`` (operations of the model over those that matrix products reach there; see
    :mod:`scforge.training.utilisation`) and ``seconds_left``. A row of an epoch has what the history has.

    Parameters
    ----------
    history
        The figures of the epochs.
    every_n_steps
        Optimizer steps between two rows.
    settings
        What the loggers are told of the training.
    """

    def __init__(self, history: History, *, every_n_steps: int, settings: dict[str, Any]) -> None:
        self.history = history
        self.every_n_steps = every_n_steps
        self.settings = settings
        self._clock = StepClock()
        self._per_token, self._peak = 0.0, 0.0
        self._rows = 0
        self._loggers: list[Any] = []
        self._lr = 0.0
        self._seen = 0
        self._began = self._stopped = self._waited = 0.0
        self._cells = 0
        self._tokens: Any = 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Begin the tables, or go on with them."""
        self._loggers = trainer.loggers
        self._seen = trainer.global_step
        self._clock.begin(trainer.global_step)
        for one in trainer.loggers:
            if trainer.is_global_zero and isinstance(one, TableLogger):
                one.begin(self._rows)
            one.log_hyperparams(self.settings)
        self._clear(trainer)

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the operations of the first batch, before the clock starts."""
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]  # the schedule moves it before the row is written
        if trainer.loggers and not self._per_token:
            self._per_token = flops_per_token(pl_module.module, pl_module.objective, batch)
            self._peak = peak_flops(trainer.strategy.root_device, trainer.precision)
            self._clear(trainer)

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: dict[str, torch.Tensor],
        batch_idx: int,
    ) -> None:
        """Count, and give a row where it is due."""
        if trainer.loggers:
            self._cells += pl_module.objective.n_cells(batch)
            self._tokens = self._tokens + batch["attention_mask"].sum()
            step = trainer.global_step
            due = step // self.every_n_steps > self._seen // self.every_n_steps
            self._seen = step
            if due:
                self._log(trainer, self._row(trainer, pl_module, outputs))
                self._clear(trainer)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Stop the clock."""
        self._stopped = time.perf_counter()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Let it go on."""
        self._began += time.perf_counter() - self._stopped

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Give the row of the epoch."""
        self._log(trainer, {"epoch": float(trainer.current_epoch), **self.history.last()})

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows there are; others may write some, too."""
        tables = [one for one in self._loggers if isinstance(one, TableLogger)]
        return {"rows": tables[0].n_rows if tables else 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind so many rows."""
        self._rows = state_dict["rows"]

    def _clear(self, trainer: lightning.Trainer) -> None:
        self._began = self._stopped = time.perf_counter()
        self._waited, self._cells, self._tokens = trainer.datamodule.waited, 0, 0

    def _row(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any) -> dict[str, float]:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        loss_value = float(loss) * trainer.accumulate_grad_batches  # Lightning divides it
        tokens = float(self._tokens) * trainer.world_size  # reading it waits for the device
        seconds = time.perf_counter() - self._began
        row = {
            "epoch": float(trainer.current_epoch),
            "step_loss": loss_value,
            "learning_rate": float(self._lr),
            "gradient_norm": float(pl_module.gradient_norm),
            "cells_per_second": self._cells * trainer.world_size / seconds,
            "tokens_per_second": tokens / seconds,
            "waiting": max(0.0, trainer.datamodule.waited - self._waited) / seconds,
            "utilisation": tokens / seconds * self._per_token / (self._peak * trainer.world_size),
        }
        left = self._clock.seconds_left(trainer.global_step, pl_module.total_steps)
        return row if left is None else {**row, "seconds_left": left}

    def _log(self, trainer: lightning.Trainer, row: dict[str, float]) -> None:
        for one in trainer.loggers:
            try:
                one.log_metrics(row, step=trainer.global_step)
            except OSError as error:
                raise SavingError(
                    f"logger {type(one).__name__} cannot write ({error.strerror or error}); make room and go on."
                ) from error
