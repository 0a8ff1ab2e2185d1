"""Stopping a training from outside: Ctrl-C, and the signal with which a cluster takes its machine back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

__all__ = ["GracefulStop"]


class GracefulStop(Callback):
    """Turns the first Ctrl-C into a stop after the current step; the second one breaks off that step.

    Parameters
    ----------
    saves
        Whether there is a place for the state of the training. SIGTERM (under SLURM SIGUSR1 as well) then waits until
        the state is saved; otherwise it ends the process as ever.

    Attributes
    ----------
    stopped
        Whether Ctrl-C stopped the training.
    signal
        The signal that asks this process to end, once its state is saved; None if there was none.
    """

    def __init__(self, *, saves: bool = False) -> None:
        self.saves = saves
        self.stopped = False
        self.signal: int | None = None
        self._at_once = True
        self._before: dict[int, Any] = {}

    @property
    def cuts(self) -> bool:
        """Whether Ctrl-C has cut an epoch short that can be gone on with."""
        return self.stopped and self.saves

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Listen for Ctrl-C, where signals can be listened for."""
        # Gradients that are added up over batches, and several processes, have to come to the end of a step together.
        self._at_once = trainer.world_size == 1 and trainer.accumulate_grad_batches == 1

        def interrupted(signum: int, frame: Any) -> None:
            self.stopped = True
            if self._at_once:
                trainer.should_stop = True
            self._restore(signal.SIGINT)

        self._listen(signal.SIGINT, interrupted)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Listen for the end of the process; Lightning has set its own handlers by now."""

        def ending(signum: int, frame: Any) -> None:
            self.signal = signum

        if self.saves:
            self._listen(signal.SIGTERM, ending)
            if "SLURM_JOB_ID" in os.environ:
                self._listen(signal.SIGUSR1, ending)

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
        """Let all processes stop at the same step."""
        self._agree(trainer)
        if self.stopped and not trainer.fit_loop._should_accumulate():
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Let all processes stop after the same validation."""
        self._agree(trainer)
        if self.stopped:
            trainer.should_stop = True

    def _agree(self, trainer: lightning.Trainer) -> None:
        if trainer.world_size > 1:
            self.stopped = trainer.strategy.reduce_boolean_decision(self.stopped, all=False)
            ends = trainer.strategy.reduce_boolean_decision(self.signal is not None, all=False)
            self.signal = (self.signal or signal.SIGTERM) if ends else None

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Hand the signals back."""
        self._restore(*self._before)

    def on_exception(self, *args: Any) -> None:
        """Hand the signals back; Lightning calls no teardown after an error."""
        self._restore(*self._before)

    def _listen(self, signum: int, handler: Callable[[int, Any], None]) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before[signum] = signal.signal(signum, handler)

    def _restore(self, *signums: int) -> None:
        for signum in list(signums):
            before = self._before.pop(signum, None)
            if before is not None:
                with contextlib.suppress(ValueError):  # not the main thread
                    signal.signal(signum, before)
