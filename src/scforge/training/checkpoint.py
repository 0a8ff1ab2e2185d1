"""What a training run keeps: its best weights, their moving average, and resumable checkpoints."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping
from lightning.pytorch.strategies import ModelParallelStrategy

from scforge._checks import check_share
from scforge._version import __version__
from scforge.errors import ModelFileError, OptionError, ScforgeError, TrainingError, first_line, warn
from scforge.training.datamodule import CellDataModule
from scforge.training.devices import copy_of_weights
from scforge.training.plan import NotFiniteError
from scforge.training.run_folder import FORMAT

OF_DATA = "data: "
"""Prefix of the settings that are hashes of the data."""

_GENES = {"vocab": "genes", "genes_per_cell": "genes of each cell"}
"""Settings that describe the data although they lack the prefix, and their names in messages."""


class GracefulStop(Callback):
    """Stop training after the current step at the first Ctrl-C; a second Ctrl-C interrupts that step.

    Parameters
    ----------
    saves
        Whether checkpoints are saved. If true, SIGTERM (under SLURM also SIGUSR1) ends the process after a checkpoint
        is saved. Otherwise it ends the process as usual.

    Attributes
    ----------
    stopped
        Whether Ctrl-C stopped the training.
    signal
        The signal that requested this process to end after saving a checkpoint, or None if no signal arrived.
    """

    def __init__(self, *, saves: bool = False) -> None:
        self.saves = saves
        self.stopped = False
        self.signal: int | None = None
        self._at_once = True
        self._before: dict[int, Any] = {}

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Install the Ctrl-C handler, if this thread can handle signals."""
        # With accumulated gradients or several processes, a step must be completed.
        self._at_once = trainer.world_size == 1 and trainer.accumulate_grad_batches == 1

        def interrupted(signum: int, frame: Any) -> None:
            self.stopped = True
            if self._at_once:
                trainer.should_stop = True
            if (before := self._before.pop(signal.SIGINT, None)) is not None:
                signal.signal(signal.SIGINT, before)

        self._listen(signal.SIGINT, interrupted)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Install the handlers of termination signals, after Lightning has set its own."""

        def ending(signum: int, frame: Any) -> None:
            self.signal = signum

        if self.saves:
            for signum in (signal.SIGTERM, *([signal.SIGUSR1] if "SLURM_JOB_ID" in os.environ else [])):
                self._listen(signum, ending)

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
        """Make all processes stop at the same step, or after the same validation."""
        if trainer.world_size > 1:
            self.stopped = trainer.strategy.reduce_boolean_decision(self.stopped, all=False)
            ends = trainer.strategy.reduce_boolean_decision(self.signal is not None, all=False)
            self.signal = (self.signal or signal.SIGTERM) if ends else None
        if self.stopped and not trainer.fit_loop._should_accumulate():
            trainer.should_stop = True

    on_train_epoch_end = on_train_batch_end

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Restore the previous signal handlers."""
        for signum in tuple(self._before):  # Ctrl-C may remove its own at any moment
            if (before := self._before.pop(signum, None)) is not None:
                signal.signal(signum, before)

    on_exception = teardown  # Lightning calls no teardown after an error

    def _listen(self, signum: int, handler: Callable[[int, Any], None]) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before[signum] = signal.signal(signum, handler)


def kept_weights(trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> dict[str, torch.Tensor]:
    """Return a copy of the trained weights, or of their moving average if one is kept.

    All processes must call this function; see :func:`scforge.training.devices.copy_of_weights`.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, MovingAverage) and callback.average is not None:
            return {name: value.detach().cpu().clone() for name, value in callback.average.items()}
    return copy_of_weights(pl_module.module)


def worst(mode: str) -> float:
    """Return the worst possible value of a metric in the mode ``"min"`` or ``"max"``."""
    return math.inf if mode == "min" else -math.inf


def is_better(value: float, other: float, mode: str) -> bool:
    """Return whether a metric value is better than another value."""
    return value < other if mode == "min" else value > other


class BestWeights(Callback):
    """Keep a copy of the weights from the best epoch.

    Parameters
    ----------
    monitor
        Name of the metric that selects the best epoch, e.g. ``"validation_loss"``.
    mode
        ``"min"`` or ``"max"``.

    Attributes
    ----------
    epoch, value, state
        Index, metric and weights of the best epoch so far; `state` is None before the first epoch has ended.
    """

    def __init__(self, monitor: str, mode: str = "min") -> None:
        self.monitor = monitor
        self.mode = mode
        self.epoch = -1
        self.value = worst(mode)
        self.state: dict[str, torch.Tensor] | None = None

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
        """Stop in such a way that validation still runs if `max_steps` is reached within an epoch."""
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Copy the weights if the epoch is the best so far."""
        value = float(trainer.callback_metrics.get(self.monitor, worst(self.mode)))
        if is_better(value, self.value, self.mode):
            self.epoch, self.value = trainer.current_epoch, value
            self.state = kept_weights(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the best epoch, its metric and its weights."""
        return {"epoch": self.epoch, "value": self.value, "state": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the previous best epoch."""
        self.epoch, self.value, self.state = state_dict["epoch"], state_dict["value"], state_dict["state"]


class MovingAverage(Callback):
    """Keep an exponential moving average of the weights, which is validated and saved.

    After step t the average is ``d * average + (1 - d) * weights`` with ``d = min(decay, (1 + t) / (10 + t))``, so that
    it does not start from the random weights (as in the moving averages of TensorFlow and timm).

    Parameters
    ----------
    decay
        Decay d of the average, between 0 and 1, e.g. 0.999.

    Attributes
    ----------
    average
        The average so far; None before training starts.
    """

    def __init__(self, decay: float) -> None:
        check_share("ema_decay", decay)
        if decay in (0, 1):
            raise OptionError("is invalid; pass a number between 0 and 1, e.g. 0.999.", ema_decay=decay)
        self.decay = decay
        self.steps = 0
        self._seen = 0
        self.average: dict[str, torch.Tensor] | None = None
        self._raw: dict[str, torch.Tensor] | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Start from the current weights, or move a loaded average to their device."""
        weights = pl_module.module.state_dict()
        source = weights if self.average is None else self.average
        self.average = {name: source[name].detach().to(value.device).clone() for name, value in weights.items()}
        self._seen = trainer.global_step

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Move the average toward the weights after an optimizer step."""
        if trainer.global_step == self._seen:
            return  # gradients are accumulated, no step was taken
        self._seen = trainer.global_step
        self.steps += 1
        keep = min(self.decay, (1 + self.steps) / (10 + self.steps))
        assert self.average is not None
        for name, value in pl_module.module.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value, 1.0 - keep)
            else:
                self.average[name].copy_(value)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Load the average, so that it is validated."""
        if self.average is not None:
            self._raw = {name: value.detach().clone() for name, value in pl_module.module.state_dict().items()}
            pl_module.module.load_state_dict(self.average)

    def put_back(self, pl_module: lightning.LightningModule) -> None:
        """Restore the trained weights after all callbacks have used the validated average."""
        if self._raw is not None:
            pl_module.module.load_state_dict(self._raw)
            self._raw = None

    def state_dict(self) -> dict[str, Any]:
        """Return the average and its number of steps."""
        return {"steps": self.steps, "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the average."""
        self.steps, self.average = state_dict["steps"], state_dict["average"]


class PreemptedError(Exception):
    """A signal requested the process to end, and a checkpoint has been saved."""


class SavingError(TrainingError):
    """A checkpoint could not be written.

    Attributes
    ----------
    result
        The :class:`~scforge.training.fitting.FitResult` of training so far.
    """

    result: Any = None


@dataclass(frozen=True)
class SaveOptions:
    """Folder for the checkpoints of a run, and the checkpoint to resume from.

    Attributes
    ----------
    write
        Called on the first process with a name, e.g. ``"step=00000120"``, the training state and the weights. If None,
        saves no checkpoints.
    every_n_steps
        Number of optimizer steps between checkpoints, which are saved in addition to those at the end of each epoch.
    best
        Function that creates the callback to keep the best epochs, from the name of the selection metric and ``"min"``
        or ``"max"``. If None, no best epochs are kept.
    settings
        JSON-safe settings that must be the same when training resumes.
    resume
        A checkpoint to resume from.
    begin
        Called on the first process directly before the first step.
    """

    write: Callable[[str, dict[str, Any], dict[str, torch.Tensor]], None] | None = None
    every_n_steps: int | None = None
    best: Callable[[str, str], Callback] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    resume: dict[str, Any] | None = None
    begin: Callable[[], None] | None = None

    def is_over(self, max_epochs: int, max_steps: int, patience: int | None) -> bool:
        """Return whether the training run to resume is already finished; `patience` is the early-stopping patience."""
        if self.resume is None:
            return False
        with restoring():
            finished, callbacks = self.resume["finished"], self.resume["callbacks"]
            stopped = [state["patience"] for key, state in callbacks.items() if key.startswith("StopAfterWarmup")]
            if finished is None or (finished == "early" and stopped and (patience is None or patience > stopped[0])):
                return False
        epochs_left = max_epochs == -1 or self.resume["epoch"] < max_epochs
        steps_left = max_steps == -1 or self.resume["step"] < max_steps
        return finished == "early" or not (epochs_left and steps_left)


class SaveState(Checkpoint):
    """Save checkpoints during a training run, and restore one before the first step.

    This callback must run last, after all callbacks that may end training; Lightning runs subclasses of ``Checkpoint``
    last.

    Parameters
    ----------
    saving
        The folder, and the checkpoint to resume from.
    data
        The data module of the training run.
    stop
        Callback that reports when training has to end.
    """

    def __init__(self, saving: SaveOptions, *, data: CellDataModule, stop: GracefulStop) -> None:
        self.saving = saving
        self.data = data
        self.stop = stop
        self._seen = 0

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Restore the state that is required before the optimizer is created."""
        if self.saving.resume is None:
            return
        with restoring():
            pl_module.total_steps = self.saving.resume["total_steps"]
            self.data.go_on_with(self.saving.resume["data"])
        # The first epoch may be shorter, and Lightning reads the number of batches once.
        trainer.reload_dataloaders_every_n_epochs = 1

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Restore the optimizer, the schedule, counters and callbacks."""
        state = self.saving.resume
        if state is None:
            return
        with restoring():
            optimizer = trainer.optimizers[0]
            if isinstance(trainer.strategy, ModelParallelStrategy):
                from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

                whole = StateDictOptions(full_state_dict=True)
                set_optimizer_state_dict(pl_module.module, optimizer, state["optimizer"], options=whole)
            else:
                optimizer.load_state_dict(state["optimizer"])
            for config, saved in zip(trainer.lr_scheduler_configs, state["schedules"], strict=True):
                config.scheduler.load_state_dict(saved)
            trainer.precision_plugin.load_state_dict(state["precision"])
            pl_module.train_means.load_state_dict(state["means"][trainer.global_rank])
            loop = trainer.fit_loop
            for progress in (loop.epoch_progress.current, loop.epoch_progress.total):
                progress.ready = progress.started = progress.processed = progress.completed = state["epoch"]
            steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
            steps.ready = steps.completed = loop.epoch_loop._batches_that_stepped = state["step"]
            for key, callback in self._stateful(trainer).items():
                if key in state["callbacks"]:
                    saved = dict(state["callbacks"][key])
                    if isinstance(callback, EarlyStopping):
                        saved["patience"] = callback.patience  # it may have been changed
                    callback.load_state_dict(saved)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Restore the random number generators immediately before the first step."""
        if trainer.is_global_zero and self.saving.begin is not None:
            self.saving.begin()
        self._seen = trainer.global_step
        if self.saving.resume is None:
            return
        with restoring():
            state = self.saving.resume["random"][trainer.global_rank]
            torch.set_rng_state(state["torch"])
            if len(state["cuda"]) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all(state["cuda"])
            else:
                warn(
                    f"The checkpoint was saved with {len(state['cuda'])} GPUs, but {torch.cuda.device_count()} are "
                    "available; the random states of the GPUs are not restored."
                )
            np.random.set_state(state["numpy"])
            random.setstate(state["python"])

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Save a checkpoint if one is due, or if training has to end."""
        step, every = trainer.global_step, self.saving.every_n_steps
        at_end = trainer.is_last_batch or step == trainer.max_steps
        if self.saving.write is None or at_end or trainer.fit_loop._should_accumulate():
            return  # at the end of an epoch, the checkpoint is saved after validation
        ends = self.stop.signal is not None
        due = every is not None and step // every > self._seen // every
        self._seen = step
        if due or ends or trainer.should_stop:
            self._save(trainer, pl_module, epoch=trainer.current_epoch, finished=None)
        if ends:
            raise PreemptedError

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Save a checkpoint at the end of a complete epoch."""
        epoch, at_most = trainer.current_epoch + 1, trainer.global_step == trainer.max_steps
        if self.saving.write is None or not (trainer.is_last_batch or at_most):
            return  # an interrupted epoch resumes from its middle
        stops = [callback for callback in trainer.callbacks if isinstance(callback, EarlyStopping)]
        finished = None
        if epoch == trainer.max_epochs or at_most:
            finished = "limit"
        elif any(callback.stopped_epoch > 0 or callback.wait_count >= callback.patience for callback in stops):
            finished = "early"
        self._seen = trainer.global_step
        self._save(trainer, pl_module, epoch=epoch, finished=finished)
        if self.stop.signal is not None:
            raise PreemptedError

    def _save(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *, epoch: int, finished: str | None
    ) -> None:
        weights = copy_of_weights(pl_module.module)
        if not all(bool(torch.isfinite(value).all()) for value in weights.values()):
            # On a GPU losses are looked at now and then only, see TrainingPlan.
            raise NotFiniteError(
                f"the weights contain NaN or infinite values in step {trainer.global_step} and are not saved; lower "
                "the learning rate (lr), or check the counts for extreme values."
            )
        random_state = {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": np.random.get_state(legacy=False),
            "python": random.getstate(),
        }
        state = {
            "format": FORMAT,
            "scforge_version": __version__,
            "settings": dict(self.saving.settings),
            "epoch": epoch,
            "step": trainer.global_step,
            "total_steps": pl_module.total_steps,
            "finished": finished,
            "optimizer": trainer.strategy.optimizer_state(trainer.optimizers[0]),
            "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            # The means are added up over processes only at the end of an epoch.
            "means": _gathered(trainer, pl_module.train_means.state_dict()),
            "callbacks": {key: callback.state_dict() for key, callback in self._stateful(trainer).items()},
            "data": self.data.position(begins_epoch=epoch > trainer.current_epoch),
            "random": _gathered(trainer, random_state),
        }
        name = f"step={trainer.global_step:08d}"
        if trainer.is_global_zero and self.saving.write is not None:
            self.saving.write(name, state, weights)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Restore the trained weights after all callbacks have used the moving average."""
        for callback in trainer.callbacks:
            if isinstance(callback, MovingAverage):
                callback.put_back(pl_module)

    def _stateful(self, trainer: lightning.Trainer) -> dict[str, Callback]:
        keyed: dict[str, Callback] = {}
        for callback in trainer.callbacks:
            if callback is self or not callback.state_dict():
                continue
            if callback.state_key in keyed:
                raise OptionError(
                    f"contains two callbacks with the state_key {callback.state_key!r}, and both have a "
                    "state to save; set a different state_key for one of them.",
                    argument="callbacks",
                )
            keyed[callback.state_key] = callback
        return keyed


def check_settings(saved: Mapping[str, Any], now: Mapping[str, Any], *, where: str) -> None:
    """Raise an error if the settings or the data of a training run differ from those of a checkpoint.

    Raises
    ------
    OptionError
        If a setting or a part of the data differs; the message names it.

    Warns
    -----
    ScforgeWarning
        If the checkpoint was saved by an earlier version, without hashes of the data.
    """
    unknown = [name.removeprefix(OF_DATA) for name in now if name.startswith(OF_DATA)]
    if any(name.startswith(OF_DATA) for name in saved):
        unknown = []
    names = [name for name in [*saved, *sorted(set(now) - set(saved))] if saved.get(name) != now.get(name)]
    names = [name for name in names if name.removeprefix(OF_DATA) not in unknown]
    options = [name for name in names if not name.startswith(OF_DATA) and name not in _GENES]
    data = ", ".join(_GENES.get(name, name.removeprefix(OF_DATA)) for name in names if name not in options)
    if not names and unknown:
        warn(
            f"{where!r} was saved by an earlier version of scforge, so it is not known whether the data are the same "
            f"({', '.join(unknown)})."
        )
    if not names:
        return
    ways = "start a new run in another folder or with overwrite=True"
    if not options:
        raise OptionError(
            f": the data differ from the data of the training run in {where!r} ({data}); use the same "
            f"data to resume, or {ways}.",
            argument="resume",
        )
    shown = ", ".join(
        f"{name}={saved.get(name)!r:.40} in the checkpoint, but {now.get(name)!r:.40} now" for name in options[:4]
    )
    more = f", and {len(options) - 4} more" if len(options) > 4 else ""
    more += f"; and in the data: {data}" if data else ""
    raise OptionError(
        f": the settings differ from the settings of the training run in {where!r} ({shown}{more}); use the same "
        f"settings to resume, or {ways}.",
        argument="resume",
    )


def _gathered(trainer: lightning.Trainer, value: Any) -> list[Any]:
    if trainer.world_size == 1:
        return [value]
    values: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(values, value)
    return values


@contextmanager
def restoring() -> Iterator[None]:
    """Raise a clear error for a checkpoint with intact checksums but content that does not fit."""
    try:
        yield
    except ScforgeError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ModelFileError(
            f": the checkpoint does not match this training run ({first_line(error)}); use another checkpoint, "
            "or start a new run in another folder or with overwrite=True.",
            argument="resume",
        ) from error
