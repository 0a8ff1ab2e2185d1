"""Running a training plan on Lightning's Trainer."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from scforge._checks import check_count
from scforge.errors import OptionError
from scforge.training.callbacks import BestWeights, EpochProgress, GracefulStop, History, StopAfterWarmup
from scforge.training.datamodule import CellDataModule
from scforge.training.objectives.base import TrainingDefaults
from scforge.training.plan import TrainingPlan

__all__ = ["FitResult", "default_max_epochs", "fit"]

logger = logging.getLogger("scforge")

_REFERENCE_CELLS = 2_500
_FEWEST_EPOCHS = 3
_MOST_TIMES = 10


@dataclass(frozen=True)
class FitResult:
    """What a training left behind.

    Attributes
    ----------
    history
        Name of a figure to one value an epoch.
    best_epoch
        Epoch whose weights the module now has; -1 if no epoch ended.
    stopped
        Whether the user stopped it with Ctrl-C.
    interrupted
        Whether a second Ctrl-C broke off a step.
    n_epochs
        Epochs that ended, one that Ctrl-C cut short included.
    device
        Where it ran.
    """

    history: dict[str, list[float]]
    best_epoch: int
    stopped: bool
    interrupted: bool
    n_epochs: int
    device: torch.device


def default_max_epochs(defaults: TrainingDefaults, n_cells: int) -> int:
    """Return about as many steps as the objective's epochs mean on 2,500 cells, within reason.

    Examples
    --------
    >>> from scforge.training import JointEmbedding
    >>> [default_max_epochs(JointEmbedding.defaults, n) for n in (250, 2_430, 25_000, 1_000_000)]
    [400, 42, 4, 3]
    """
    epochs = math.ceil(defaults.max_epochs * _REFERENCE_CELLS / n_cells)
    return max(_FEWEST_EPOCHS, min(epochs, _MOST_TIMES * defaults.max_epochs))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's remarks on hardware and on loaders that are as they should be."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    rank_zero = [logging.getLogger(f"lightning.{part}.utilities.rank_zero") for part in ("pytorch", "fabric")]
    levels = {log: log.level for log in loggers + rank_zero}
    for log in levels:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            # Lightning's own use of a part of torch that torch has renamed.
            warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
            warnings.filterwarnings("ignore", message=".*is smaller than the logging interval.*")
            warnings.filterwarnings("ignore", category=UserWarning, message=".*Total length of.*across ranks is zero.*")
            yield
    finally:
        for log, level in levels.items():
            log.setLevel(level)


def fit(
    plan: TrainingPlan,
    data: CellDataModule,
    *,
    max_epochs: int | None = None,
    max_steps: int = -1,
    early_stopping: bool = True,
    early_stopping_patience: int = 10,
    progress_bar: bool = True,
    callbacks: Sequence[Callback] = (),
    **trainer_options: Any,
) -> FitResult:
    """Train, and leave the module with the weights of its best epoch.

    Parameters
    ----------
    plan, data
        What to train on what.
    max_epochs
        Most epochs; None chooses by the number of cells, see :func:`default_max_epochs`.
    max_steps
        Most optimizer steps; -1 for no limit.
    early_stopping
        Stop when the validation loss has not improved for `early_stopping_patience` epochs after the warm-up of the
        learning rate. Needs validation cells.
    early_stopping_patience
        Epochs without improvement to wait.
    progress_bar
        Show a bar.
    callbacks
        Further Lightning callbacks.
    **trainer_options
        For :class:`lightning.Trainer`, e.g. ``accelerator``, ``devices``, ``precision``, ``logger``.

    Raises
    ------
    TrainingError
        If the loss is not a number.
    """
    if max_epochs is not None:
        check_count("max_epochs", max_epochs, "epochs")
    if max_steps != -1:
        check_count("max_steps", max_steps, "steps")
    check_count("early_stopping_patience", early_stopping_patience, "epochs")
    if max_epochs is None:
        max_epochs = default_max_epochs(plan.objective.defaults, len(data.train_rows)) if max_steps < 0 else -1
    has_validation = len(data.validation_rows) > 0
    monitor = "validation_loss" if has_validation else "train_loss"
    history, best, stop = History(), BestWeights(monitor), GracefulStop()
    # History stands first so that a loss that is not a number ends the run before anything is saved.
    own: list[Callback] = [history, best, stop]
    if progress_bar:
        own.append(EpochProgress())
    if early_stopping and has_validation:
        own.append(StopAfterWarmup(monitor, patience=early_stopping_patience, check_finite=False))
    if data.max_tokens_per_batch is not None:
        # Epochs have different numbers of batches then, and Lightning asks a loader once how many it has.
        trainer_options.setdefault("reload_dataloaders_every_n_epochs", 1)
    with _quiet():
        trainer = _trainer(max_epochs=max_epochs, max_steps=max_steps, callbacks=[*own, *callbacks], **trainer_options)
        if trainer.world_size > 1:
            raise OptionError(
                f"devices={trainer.num_devices} on {trainer.num_nodes} node(s) is not supported yet: "
                "checkpoints and figures would come from one of them only; pass devices=1."
            )
        interrupted = _run(trainer, plan, data)
    if best.state is not None:
        plan.module.load_state_dict(best.state)
    plan.module.eval()
    n_epochs = len(next(iter(history.epochs.values()), []))
    if stop.stopped or interrupted:
        kept = (
            f"the weights of epoch {best.epoch + 1} ({monitor} {best.loss:.4g})" if n_epochs else "the current weights"
        )
        logger.warning("Training was stopped by Ctrl-C in epoch %d; the model has %s.", n_epochs + interrupted, kept)
    return FitResult(history.epochs, best.epoch, stop.stopped, interrupted, n_epochs, trainer.strategy.root_device)


def _trainer(**options: Any) -> lightning.Trainer:
    try:
        return lightning.Trainer(
            logger=options.pop("logger", False),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            **options,
        )
    except (MisconfigurationException, TypeError, ValueError) as error:
        raise OptionError(f"an option of training cannot be used: {' '.join(str(error).split())}") from error


def _run(trainer: lightning.Trainer, plan: TrainingPlan, data: CellDataModule) -> bool:
    """Fit; return whether a second Ctrl-C interrupted it. An error leaves the module as it was before."""
    before = {name: value.detach().cpu().clone() for name, value in plan.module.state_dict().items()}
    handler = signal.getsignal(signal.SIGINT)
    # Modules that were used for inference are in eval mode, and Lightning leaves them so.
    plan.train()
    try:
        trainer.fit(plan, datamodule=data)
    except BaseException as error:
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            return True  # Lightning answers Ctrl-C by leaving the process
        plan.module.float().load_state_dict(before)
        plan.module.eval()
        raise
    finally:
        # Lightning ignores further Ctrl-Cs after one, and else puts back what it found, the handler of GracefulStop.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
    return False
