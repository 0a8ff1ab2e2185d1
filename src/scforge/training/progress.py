"""How far a training is: a bar where somebody looks at it, a line an epoch in a log file."""

from __future__ import annotations

import datetime
import importlib.util
import math
import sys
import time
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from scforge._progress import announce, in_notebook

__all__ = ["EpochProgress", "StepClock"]


class StepClock:
    """Says how long the steps of a training will still take, at the rate of those that this process took."""

    def __init__(self) -> None:
        self._start, self._first = 0.0, 0

    def begin(self, step: int) -> None:
        """Start with `step` steps taken."""
        self._start, self._first = time.perf_counter(), step

    def seconds_left(self, step: int, total: int | None) -> float | None:
        """Return an estimate of the wall time until all steps are done, or None."""
        done = step - self._first
        if not total or done <= 0 or not math.isfinite(total):
            return None
        return (time.perf_counter() - self._start) / done * max(0, total - step)


class EpochProgress(Callback):
    """One progress bar over all steps, with the losses and the time left behind it.

    Where the output is a file, as on a cluster, there is a line an epoch instead.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._lines = False
        self._clock = StepClock()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Open the bar."""
        if not trainer.is_global_zero:
            return
        self._clock.begin(trainer.global_step)
        if not in_notebook() and not sys.stderr.isatty():
            self._lines = True
            return
        # The notebook bar needs ipywidgets; without it tqdm.auto would only warn.
        if importlib.util.find_spec("ipywidgets"):
            from tqdm.auto import tqdm
        else:
            from tqdm import tqdm

        total = pl_module.total_steps
        self._bar = tqdm(total=total, initial=trainer.global_step, desc="Training", unit="step")

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(trainer.global_step - self._bar.n)

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Show the losses."""
        losses = {k: f"{float(v):.4g}" for k, v in trainer.callback_metrics.items() if k.endswith("_loss")}
        most = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
        epoch = f"Epoch {trainer.current_epoch + 1}{most}"
        if self._bar is not None:
            self._bar.set_description(epoch)
            self._bar.set_postfix(losses)
        elif self._lines:
            shown = ", ".join(f"{name} {value}" for name, value in losses.items())
            left = self._clock.seconds_left(trainer.global_step, pl_module.total_steps)
            tail = "" if left is None else f", about {datetime.timedelta(seconds=round(left))} left"
            announce(f"{epoch}: {shown}{tail}.")

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
