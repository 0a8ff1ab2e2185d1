"""Callbacks that end a training in time and keep its best epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping

from scforge.training.signals import GracefulStop
from scforge.training.weights import is_better, kept_weights, worst

__all__ = ["SaveBest", "StopAfterWarmup"]


class StopAfterWarmup(EarlyStopping):
    """Early stopping that does not count the epochs in which the learning rate still rises: the loss may rise too.

    Parameters
    ----------
    monitor, mode
        Name of the figure, and whether ``"min"`` or ``"max"`` is better.
    patience
        Epochs without improvement to wait.
    """

    def __init__(self, monitor: str, *, mode: str = "min", patience: int) -> None:
        # Else Lightning would look at the end of the epoch, and not leave out the epochs of the warm-up. The plan
        # itself ends a training whose loss is not a number.
        super().__init__(monitor, mode=mode, patience=patience, check_finite=False, check_on_train_epoch_end=False)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Count an epoch."""
        if trainer.global_step > pl_module.warmed_up_at:
            super().on_validation_end(trainer, pl_module)


class SaveBest(Callback):
    """Saves the model after each epoch that is among the best, and removes what is not any more.

    Parameters
    ----------
    save
        Called on the first process with the name of a folder, e.g. ``"epoch=03"``, the number of epochs done, and the
        weights.
    remove
        Called there with the name of a folder saved before.
    top_k
        How many to keep; -1 keeps all.
    monitor, mode
        Name of the figure, and whether ``"min"`` or ``"max"`` is better.
    first_epoch
        Number of epochs trained before, so that a second training goes on with the numbers.
    """

    def __init__(
        self,
        save: Callable[[str, int, dict[str, torch.Tensor]], None],
        remove: Callable[[str], None],
        *,
        top_k: int,
        monitor: str,
        mode: str = "min",
        first_epoch: int = 0,
    ) -> None:
        self.save = save
        self.remove = remove
        self.top_k = top_k
        self.monitor = monitor
        self.mode = mode
        self.first_epoch = first_epoch
        self.kept: list[tuple[float, str]] = []

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Save the epoch if it is among the `top_k` best."""
        if not trainer.is_last_batch and any(isinstance(one, GracefulStop) and one.cuts for one in trainer.callbacks):
            return  # Ctrl-C cut the epoch short, and it will come again
        value = float(trainer.callback_metrics.get(self.monitor, worst(self.mode)))
        if len(self.kept) == self.top_k and not is_better(value, self.kept[-1][0], self.mode):
            return
        name = f"epoch={self.first_epoch + trainer.current_epoch:02d}"
        weights = kept_weights(trainer, pl_module)
        if trainer.is_global_zero:
            self.save(name, trainer.current_epoch + 1, weights)
        sign = 1 if self.mode == "min" else -1
        self.kept = sorted([*self.kept, (value, name)], key=lambda one: (sign * one[0], one[1]))
        if self.top_k < 0:
            return
        for _, surplus in self.kept[self.top_k :]:
            if trainer.is_global_zero:
                self.remove(surplus)
        self.kept = self.kept[: self.top_k]

    def state_dict(self) -> dict[str, Any]:
        """Return which epochs are kept."""
        return {"kept": [list(one) for one in self.kept]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the epochs that were kept."""
        self.kept = [(value, name) for value, name in state_dict["kept"]]
