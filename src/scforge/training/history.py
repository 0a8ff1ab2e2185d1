"""What a training tells of each epoch."""

from __future__ import annotations

import math
import time
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from scforge.training.plan import NotFiniteError

__all__ = ["History"]


class History(Callback):
    """Keeps the figures of each epoch and stops a training whose loss is not a number.

    It has to come first among the callbacks, so that such a training ends before anything is saved.

    Attributes
    ----------
    epochs
        Name to one value an epoch, NaN where a figure was not taken; also ``seconds``, the wall time since training
        began.
    n_epochs
        Number of epochs that ended.
    """

    def __init__(self) -> None:
        self.epochs: dict[str, list[float]] = {}
        self.n_epochs = 0
        self._start = time.perf_counter()
        self._before = 0.0

    @property
    def seconds(self) -> float:
        """Wall time of the training so far, that of earlier processes included."""
        return self._before + time.perf_counter() - self._start

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Take down the figures of the epoch (validation has run by now)."""
        means = pl_module.train_figures()
        trainer.callback_metrics.update({f"train_{name}": torch.tensor(value) for name, value in means.items()})
        figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
        figures |= {f"train_{name}": value for name, value in means.items()}
        if not pl_module.validated:  # what stands there is of an earlier epoch
            figures = {name: value for name, value in figures.items() if not name.startswith("validation_")}
        pl_module.validated = False
        for name, value in figures.items():
            if name.endswith("_loss") and not math.isfinite(value):
                raise NotFiniteError(
                    f"{name} is {value} in epoch {trainer.current_epoch}; lower the learning rate (lr) "
                    "or check the counts for extreme values."
                )
        figures |= {name: float(value) for name, value in pl_module.figures.items()}
        pl_module.figures.clear()
        figures["seconds"] = self.seconds
        for name, value in figures.items():
            self.epochs.setdefault(name, [math.nan] * self.n_epochs).append(value)
        self.n_epochs += 1
        for values in self.epochs.values():
            values.extend([math.nan] * (self.n_epochs - len(values)))

    def last(self) -> dict[str, float]:
        """Return the figures of the last epoch that were taken."""
        return {name: values[-1] for name, values in self.epochs.items() if not math.isnan(values[-1])}

    def state_dict(self) -> dict[str, Any]:
        """Return the figures and the clock."""
        return {"epochs": self.epochs, "n_epochs": self.n_epochs, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with figures."""
        self.epochs = {name: list(values) for name, values in state_dict["epochs"].items()}
        self.n_epochs, self._before = state_dict["n_epochs"], state_dict["seconds"]
