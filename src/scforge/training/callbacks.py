"""What happens around the steps: history, the best weights, a clean stop, a progress bar."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping

from scforge.errors import TrainingError

__all__ = ["BestWeights", "EpochProgress", "GracefulStop", "History", "SaveBest", "StopAfterWarmup"]


def _epoch_figures(trainer: lightning.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class History(Callback):
    """Keeps the figures of each epoch and stops a training whose loss is not a number.

    Attributes
    ----------
    epochs
        Name to one value an epoch; also ``seconds``, the wall time since training began.
    """

    def __init__(self) -> None:
        self.epochs: dict[str, list[float]] = {}
        self._start = 0.0

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Take down the figures of the epoch (validation has run by now)."""
        figures = _epoch_figures(trainer)
        for name, value in figures.items():
            if name.endswith("_loss") and not math.isfinite(value):
                raise TrainingError(
                    f"{name} is {value} in epoch {trainer.current_epoch}; lower the learning rate (lr) "
                    "or check the counts for extreme values."
                )
        figures["seconds"] = time.perf_counter() - self._start
        for name, value in figures.items():
            self.epochs.setdefault(name, []).append(value)


class BestWeights(Callback):
    """Keeps a copy of the weights of the epoch with the lowest monitored loss.

    Parameters
    ----------
    monitor
        Name of the loss.

    Attributes
    ----------
    epoch, loss, state
        Of the best epoch so far; `state` is None before the first epoch has ended.
    """

    def __init__(self, monitor: str) -> None:
        self.monitor = monitor
        self.epoch = -1
        self.loss = math.inf
        self.state: dict[str, torch.Tensor] | None = None

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
        """End in the way that runs a validation where `max_steps` cuts an epoch short."""
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Copy the weights if they are better than all before."""
        loss = _epoch_figures(trainer).get(self.monitor, math.inf)
        if loss < self.loss:
            module = pl_module.module
            self.epoch, self.loss = trainer.current_epoch, loss
            self.state = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


class StopAfterWarmup(EarlyStopping):
    """Early stopping that does not count the epochs in which the learning rate still rises: the loss may rise too."""

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Count an epoch."""
        if trainer.global_step > pl_module.warmed_up_at:
            super().on_validation_end(trainer, pl_module)


class SaveBest(Callback):
    """Saves the model after each epoch that is among the best, and removes what is not any more.

    Parameters
    ----------
    save
        Called with the name of a folder, e.g. ``"epoch=03"``, and the number of epochs done.
    remove
        Called with the name of a folder saved before.
    top_k
        How many to keep; -1 keeps all.
    monitor
        Name of the loss.
    first_epoch
        Number of epochs trained before, so that a second training goes on with the numbers.
    """

    def __init__(
        self,
        save: Callable[[str, int], None],
        remove: Callable[[str], None],
        *,
        top_k: int,
        monitor: str,
        first_epoch: int = 0,
    ) -> None:
        self.save = save
        self.remove = remove
        self.top_k = top_k
        self.monitor = monitor
        self.first_epoch = first_epoch
        self.kept: list[tuple[float, str]] = []

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Save the epoch if its loss is among the `top_k` lowest."""
        loss = _epoch_figures(trainer).get(self.monitor, math.inf)
        if len(self.kept) == self.top_k and loss >= self.kept[-1][0]:
            return
        name = f"epoch={self.first_epoch + trainer.current_epoch:02d}"
        self.save(name, trainer.current_epoch + 1)
        self.kept = sorted([*self.kept, (loss, name)])
        if self.top_k < 0:
            return
        for _, surplus in self.kept[self.top_k :]:
            self.remove(surplus)
        self.kept = self.kept[: self.top_k]


class GracefulStop(Callback):
    """Turns the first Ctrl-C into a stop after the current step; the second one breaks off that step.

    Attributes
    ----------
    stopped
        Whether training was stopped this way.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._before: Any = None

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Listen for Ctrl-C, where signals can be listened for."""
        if threading.current_thread() is not threading.main_thread():
            return

        def handler(signum: int, frame: Any) -> None:
            self.stopped = True
            trainer.should_stop = True
            self._restore()

        self._before = signal.signal(signal.SIGINT, handler)

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Hand Ctrl-C back."""
        self._restore()

    def on_exception(self, *args: Any) -> None:
        """Hand Ctrl-C back; Lightning calls no teardown after an error."""
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGINT, self._before)
            self._before = None


class EpochProgress(Callback):
    """One progress bar over all steps, with epoch and losses behind it."""

    def __init__(self) -> None:
        self._bar: Any = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Open the bar."""
        if not trainer.is_global_zero:
            return
        # The notebook bar needs ipywidgets; without it tqdm.auto would only warn.
        if importlib.util.find_spec("ipywidgets"):
            from tqdm.auto import tqdm
        else:
            from tqdm import tqdm

        total = trainer.estimated_stepping_batches
        self._bar = tqdm(total=int(total) if math.isfinite(total) else None, desc="Training", unit="step")

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update()

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Show the losses."""
        if self._bar is not None:
            losses = {k: f"{v:.4g}" for k, v in _epoch_figures(trainer).items() if k.endswith("_loss")}
            self._bar.set_description(f"Epoch {trainer.current_epoch + 1}/{trainer.max_epochs}")
            self._bar.set_postfix(losses)

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, *args: Any) -> None:
        """Close the bar; Lightning calls no teardown after an error."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
