"""The state of a training: all that is needed to go on with it bit for bit, whenever its process ended.

A state stands between two optimizer steps. To go on with it is a training like any other, whose first epoch begins with
the batch that comes next: no step is taken twice, and none is left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping
from lightning.pytorch.strategies import ModelParallelStrategy

from scforge._version import __version__
from scforge.errors import ModelFileError, OptionError, ScforgeError, TrainingError, first_line, listing, warn
from scforge.training.datamodule import CellDataModule
from scforge.training.plan import NotFiniteError
from scforge.training.signals import GracefulStop
from scforge.training.strategies import copy_of_weights
from scforge.training.weights import MovingAverage

__all__ = ["Preempted", "SaveState", "Saving", "SavingError", "check_format", "check_settings", "restoring"]

_FORMAT = 1


class Preempted(Exception):
    """A signal asked the process to end, and the state is saved."""


class SavingError(TrainingError):
    """A state that could not be written.

    Attributes
    ----------
    result
        The :class:`~scforge.training.FitResult` of the training up to there.
    """

    result: Any = None


@dataclass(frozen=True)
class Saving:
    """Where the state of a training goes, and what it goes on with.

    Attributes
    ----------
    write
        Called on the first process with a name, e.g. ``"step=00000120"``, the state and the weights; None saves
        nothing.
    every_n_steps
        Save after so many optimizer steps as well; a state is saved at the end of each epoch anyway.
    best
        Makes the callback that keeps the best epochs, of the name of the figure that says which these are, and
        ``"min"`` or ``"max"``; None keeps none.
    settings
        What must not change until the training goes on, JSON-safe.
    resume
        A state to go on with.
    begin
        Called on the first process right before the first step.
    """

    write: Callable[[str, dict[str, Any], dict[str, torch.Tensor]], None] | None = None
    every_n_steps: int | None = None
    best: Callable[[str, str], Callback] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    resume: dict[str, Any] | None = None
    begin: Callable[[], None] | None = None

    def is_over(self, max_epochs: int, max_steps: int, patience: int | None) -> bool:
        """Return whether the training that is to go on has come to its end; `patience` is that of early stopping."""
        if self.resume is None or self.resume["finished"] is None:
            return False
        stopped = [state for key, state in self.resume["callbacks"].items() if key.startswith("StopAfterWarmup")]
        if self.resume["finished"] == "early" and stopped and (patience is None or patience > stopped[0]["patience"]):
            return False
        epochs_left = max_epochs == -1 or self.resume["epoch"] < max_epochs
        steps_left = max_steps == -1 or self.resume["step"] < max_steps
        return self.resume["finished"] == "early" or not (epochs_left and steps_left)


class SaveState(Checkpoint):
    """Saves the state of a training as it goes, and puts a saved one back before the first step.

    It has to come last, after whatever may end the training; Lightning calls what is a ``Checkpoint`` last.

    Parameters
    ----------
    saving
        Where to, and what to go on with.
    data
        The data module of the training.
    stop
        Says when the training has to end.
    """

    def __init__(self, saving: Saving, *, data: CellDataModule, stop: GracefulStop) -> None:
        self.saving = saving
        self.data = data
        self.stop = stop
        self._seen = 0

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Tell what is needed before the optimizer is made."""
        if self.saving.resume is None:
            return
        pl_module.total_steps = self.saving.resume["total_steps"]
        with restoring():
            self.data.go_on_with(self.saving.resume["data"])
        # The first epoch may be shorter, and Lightning asks a loader once how many batches it has.
        trainer.reload_dataloaders_every_n_epochs = 1

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Put back what does not depend on the moment: optimizer, schedule, counters, callbacks."""
        state = self.saving.resume
        if state is None:
            return
        with restoring():
            _load_optimizer(trainer, pl_module, state["optimizer"])
            for config, saved in zip(trainer.lr_scheduler_configs, state["schedules"], strict=True):
                config.scheduler.load_state_dict(saved)
            trainer.precision_plugin.load_state_dict(state["precision"])
            pl_module.train_means.load_state_dict(state["means"][trainer.global_rank])
            _set_counters(trainer, epoch=state["epoch"], step=state["step"])
            for key, callback in self._stateful(trainer).items():
                if key in state["callbacks"]:
                    saved = dict(state["callbacks"][key])
                    if isinstance(callback, EarlyStopping):
                        saved["patience"] = callback.patience  # it may have been changed
                    callback.load_state_dict(saved)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Put back the random numbers, right before the first step."""
        if trainer.is_global_zero and self.saving.begin is not None:
            self.saving.begin()
        self._seen = trainer.global_step
        if self.saving.resume is not None:
            with restoring():
                _set_random_state(self.saving.resume["random"][trainer.global_rank])

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Save where it is due, or where the training has to end."""
        step, every = trainer.global_step, self.saving.every_n_steps
        at_end = trainer.is_last_batch or step == trainer.max_steps
        if self.saving.write is None or at_end or trainer.fit_loop._should_accumulate():
            return  # at the end of an epoch the state is saved after the validation
        ends = self.stop.signal is not None
        due = every is not None and step // every > self._seen // every
        self._seen = step
        if due or ends or trainer.should_stop:
            self._save(trainer, pl_module, epoch=trainer.current_epoch, finished=None)
        if ends:
            raise Preempted

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Save the end of a whole epoch."""
        epoch, at_most = trainer.current_epoch + 1, trainer.global_step == trainer.max_steps
        if self.saving.write is None or not (trainer.is_last_batch or at_most):
            return  # an epoch that was cut short goes on from its middle
        finished = None
        if epoch == trainer.max_epochs or at_most:
            finished = "limit"
        elif any(_has_stopped(callback) for callback in trainer.callbacks):
            finished = "early"
        self._seen = trainer.global_step
        self._save(trainer, pl_module, epoch=epoch, finished=finished)
        if self.stop.signal is not None:
            raise Preempted

    def _save(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *, epoch: int, finished: str | None
    ) -> None:
        weights = copy_of_weights(pl_module.module)
        if not all(bool(torch.isfinite(value).all()) for value in weights.values()):
            # On a GPU losses are looked at now and then only, see TrainingPlan.
            raise NotFiniteError(
                f"the weights are no numbers any more in step {trainer.global_step}, and are not saved; lower the "
                "learning rate (lr), or check the counts for extreme values."
            )
        state = {
            "format": _FORMAT,
            "scforge_version": __version__,
            "settings": dict(self.saving.settings),
            "epoch": epoch,
            "step": trainer.global_step,
            "total_steps": pl_module.total_steps,
            "finished": finished,
            "optimizer": _optimizer_state(trainer, pl_module),
            "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            # The means of a process are added to those of the others at the end of the epoch only.
            "means": _gathered(trainer, pl_module.train_means.state_dict()),
            "callbacks": {key: callback.state_dict() for key, callback in self._stateful(trainer).items()},
            "data": self.data.position(begins_epoch=epoch > trainer.current_epoch),
            "random": _gathered(trainer, _random_state()),
        }
        name = f"step={trainer.global_step:08d}"
        if trainer.is_global_zero and self.saving.write is not None:
            self.saving.write(name, state, weights)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Take the moving average out again, now that all callbacks have seen it."""
        for one in trainer.callbacks:
            if isinstance(one, MovingAverage):
                one.put_back(pl_module)

    def _stateful(self, trainer: lightning.Trainer) -> dict[str, Callback]:
        keyed: dict[str, Callback] = {}
        for callback in trainer.callbacks:
            if callback is self or not callback.state_dict():
                continue
            if callback.state_key in keyed:
                raise OptionError(
                    f"callbacks has two of {callback.state_key!r} with a state to save; give them different state_key."
                )
            keyed[callback.state_key] = callback
        return keyed


def check_settings(saved: Mapping[str, Any], now: Mapping[str, Any], *, where: str) -> None:
    """Raise if a training is not the one that a state is of.

    Raises
    ------
    OptionError
        Naming what differs.
    """
    names = [name for name in [*saved, *(set(now) - set(saved))] if saved.get(name) != now.get(name)]
    if not names:
        return
    shown = ", ".join(f"{name}={_short(saved.get(name))} there, {_short(now.get(name))} here" for name in names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    raise OptionError(
        f"resume: the training in {where!r} had other settings ({shown}{more}); "
        "use those to go on with it, or another folder (or overwrite=True) to start anew."
    )


def _has_stopped(callback: Callback) -> bool:
    return isinstance(callback, EarlyStopping) and (
        callback.stopped_epoch > 0 or callback.wait_count >= callback.patience
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _set_counters(trainer: lightning.Trainer, *, epoch: int, step: int) -> None:
    """Let Lightning's loops count on from here."""
    loop = trainer.fit_loop
    for progress in (loop.epoch_progress.current, loop.epoch_progress.total):
        progress.ready = progress.started = progress.processed = progress.completed = epoch
    steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    steps.ready = steps.completed = step
    loop.epoch_loop._batches_that_stepped = step


def _optimizer_state(trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> dict[str, Any]:
    optimizer = trainer.optimizers[0]
    if isinstance(trainer.strategy, ModelParallelStrategy):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_optimizer_state_dict(pl_module.module, optimizer, options=options)
    return optimizer.state_dict()


def _load_optimizer(trainer: lightning.Trainer, pl_module: lightning.LightningModule, state: dict[str, Any]) -> None:
    optimizer = trainer.optimizers[0]
    if isinstance(trainer.strategy, ModelParallelStrategy):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(pl_module.module, optimizer, state, options=options)
    else:
        optimizer.load_state_dict(state)


def _gathered(trainer: lightning.Trainer, value: Any) -> list[Any]:
    if trainer.world_size == 1:
        return [value]
    values: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(values, value)
    return values


def _random_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    else:
        warn(
            f"The state is of {len(state['cuda'])} GPUs, and there are {torch.cuda.device_count()}; random numbers on "
            "them begin anew."
        )
    numpy_state = state["numpy"]
    inner = {**numpy_state["state"], "key": np.asarray(numpy_state["state"]["key"])}
    np.random.set_state({**numpy_state, "state": inner})
    random.setstate(state["python"])


@contextmanager
def restoring() -> Iterator[None]:
    """Say in a sentence that the content of a state does not fit; its checksum finds accidents, not this."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ScforgeError):
            raise
        raise ModelFileError(
            f"resume: the state of the training does not fit it ({first_line(error)}); take another state, or train "
            "anew in another folder (or with overwrite=True)."
        ) from error


_CONTENT: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("settings", "optimizer", "precision", "callbacks", "data"), (dict,)),
    **dict.fromkeys(("schedules", "means", "random"), (list,)),
    **{"epoch": (int,), "step": (int,), "total_steps": (int, NoneType), "finished": (str, NoneType)},
}
"""What a state consists of, and the types."""


def check_format(state: Any, *, where: str) -> None:
    """Raise if a state is of a later version, or lacks a part.

    Raises
    ------
    TrainingError
        If it is of a later version.
    TypeError
        If it is no state, saying what it lacks.
    """
    if not isinstance(state, dict):
        raise TypeError(f"it is a {type(state).__name__}")
    if state.get("format") != _FORMAT:
        raise TrainingError(
            f"the state of the training in {where!r} is of scforge {state.get('scforge_version')}, this is "
            f"{__version__}; go on with that version."
        )
    if wrong := [name for name, kinds in _CONTENT.items() if not isinstance(state.get(name, ...), kinds)]:
        raise TypeError(f"it lacks {listing(wrong)}")
    if odd := [name for name in ("epoch", "step") if state[name] < 0]:
        raise TypeError(f"{odd[0]} is {state[odd[0]]}")
