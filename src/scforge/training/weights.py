"""Copies of weights that are kept while training goes on: the best, and a moving average."""

from __future__ import annotations

import math
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from scforge._checks import check_share
from scforge.errors import OptionError
from scforge.training.strategies import copy_of_weights

__all__ = ["BestWeights", "MovingAverage", "is_better", "kept_weights", "worst"]


def kept_weights(trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> dict[str, torch.Tensor]:
    """Return a copy of the weights that a training is about: their moving average if there is one.

    All processes have to call it; see :func:`scforge.training.strategies.copy_of_weights`.
    """
    average = next((one for one in trainer.callbacks if isinstance(one, MovingAverage)), None)
    return copy_of_weights(pl_module.module) if average is None else average.copy()


def worst(mode: str) -> float:
    """Return what any figure is better than, in the mode ``"min"`` or ``"max"``."""
    return math.inf if mode == "min" else -math.inf


def is_better(value: float, other: float, mode: str) -> bool:
    """Whether a figure is better than another."""
    return value < other if mode == "min" else value > other


class BestWeights(Callback):
    """Keeps a copy of the weights of the best epoch.

    Parameters
    ----------
    monitor
        Name of the figure that says which is the best, e.g. ``"validation_loss"``.
    mode
        ``"min"`` or ``"max"``.

    Attributes
    ----------
    epoch, value, state
        Of the best epoch so far; `state` is None before the first epoch has ended.
    """

    def __init__(self, monitor: str, mode: str = "min") -> None:
        self.monitor = monitor
        self.mode = mode
        self.epoch = -1
        self.value = worst(mode)
        self.state: dict[str, torch.Tensor] | None = None

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
        """End in the way that runs a validation where `max_steps` cuts an epoch short."""
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Copy the weights if they are better than all before."""
        value = float(trainer.callback_metrics.get(self.monitor, worst(self.mode)))
        if is_better(value, self.value, self.mode):
            self.epoch, self.value = trainer.current_epoch, value
            self.state = kept_weights(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the best epoch, its figure and its weights."""
        return {"epoch": self.epoch, "value": self.value, "state": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was best before."""
        self.epoch, self.value, self.state = state_dict["epoch"], state_dict["value"], state_dict["state"]


class MovingAverage(Callback):
    """Keeps an exponential moving average of the weights; it is what is validated and kept.

    After step t the average is ``d * average + (1 - d) * weights`` with ``d = min(decay, (1 + t) / (10 + t))``, so that
    it does not begin with the random weights (as in TensorFlow's and timm's moving averages).

    Parameters
    ----------
    decay
        Between 0 and 1, e.g. 0.999.
    """

    def __init__(self, decay: float) -> None:
        check_share("ema_decay", decay)
        if decay in (0, 1):
            raise OptionError(f"ema_decay={decay!r} averages nothing; give a number between 0 and 1, e.g. 0.999.")
        self.decay = decay
        self.steps = 0
        self._seen = 0
        self._average: dict[str, torch.Tensor] | None = None
        self._raw: dict[str, torch.Tensor] | None = None

    def copy(self) -> dict[str, torch.Tensor]:
        """Return a copy of the average on the CPU."""
        assert self._average is not None
        return {name: value.detach().cpu().clone() for name, value in self._average.items()}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Begin with the weights, or put what was loaded where the weights are."""
        weights = pl_module.module.state_dict()
        source = weights if self._average is None else self._average
        self._average = {name: source[name].detach().to(value.device).clone() for name, value in weights.items()}
        self._seen = trainer.global_step

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Move the average towards the weights after a step of the optimizer."""
        if trainer.global_step == self._seen:
            return  # a batch whose gradients are only added up
        self._seen = trainer.global_step
        self.steps += 1
        keep = min(self.decay, (1 + self.steps) / (10 + self.steps))
        assert self._average is not None
        for name, value in pl_module.module.state_dict().items():
            if value.is_floating_point():
                self._average[name].lerp_(value, 1.0 - keep)
            else:
                self._average[name].copy_(value)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Validate the average."""
        if self._average is not None:
            self._raw = {name: value.detach().clone() for name, value in pl_module.module.state_dict().items()}
            pl_module.module.load_state_dict(self._average)

    def put_back(self, pl_module: lightning.LightningModule) -> None:
        """Go on training the weights themselves, once all callbacks have seen the average that was validated."""
        if self._raw is not None:
            pl_module.module.load_state_dict(self._raw)
            self._raw = None

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of its steps."""
        return {"steps": self.steps, "average": self._average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with an average."""
        self.steps, self._average = state_dict["steps"], state_dict["average"]
