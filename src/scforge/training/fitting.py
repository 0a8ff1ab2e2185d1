"""Fitting a plan with the Lightning Trainer, and choosing the batch size and precision."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from scforge.errors import OptionError, TrainingError, warn
from scforge.training.checkpoint import (
    BestWeights,
    GracefulStop,
    MovingAverage,
    PreemptedError,
    SaveOptions,
    SaveState,
    SavingError,
    is_better,
    kept_weights,
    restoring,
    worst,
)
from scforge.training.datamodule import CellDataModule
from scforge.training.devices import (
    check_devices,
    copy_of_weights,
    is_sharded,
    make_strategy,
    n_processes,
    out_of_memory,
)
from scforge.training.monitoring import EpochProgress, History, Monitor, PurgingTensorBoardLogger
from scforge.training.objectives.base import TrainingDefaults
from scforge.training.options import TrainOptions
from scforge.training.plan import GradualUnfreezing, NotFiniteError, TrainingPlan

logger = logging.getLogger("scforge")

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]

_REFERENCE_CELLS = 2_500

_MIN_EPOCHS = 3

_FEW_CELLS = 50

_MAX_TIMES = 10

_RANK_ZERO = ".utilities.rank_zero"

_REMARKS = (
    "does not have many workers",
    "in eval mode at the start of training",  # a frozen encoder stays in it on purpose
    "LeafSpec.*is deprecated",  # Lightning's own use of a part of torch that torch has renamed
    "is smaller than the logging interval",
    "find_unused_parameters=True was specified",
    "Total length of.*across ranks is zero",
    "It is recommended to use.*sync_dist=True",  # the plan adds up over processes itself
)
"""Lightning and torch warnings that are not informative for users."""


class StopAfterWarmup(EarlyStopping):
    """Early stopping that ignores the learning-rate warm-up, during which the loss may rise.

    Parameters
    ----------
    monitor, mode
        Name of the metric, and whether ``"min"`` or ``"max"`` is better.
    patience
        Number of epochs without improvement before training stops.
    """

    def __init__(self, monitor: str, *, mode: str = "min", patience: int) -> None:
        # Otherwise Lightning would check at the end of the epoch and include the warm-up. The plan itself stops
        # training if the loss is NaN.
        super().__init__(monitor, mode=mode, patience=patience, check_finite=False, check_on_train_epoch_end=False)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Count an epoch after the warm-up."""
        if trainer.global_step > pl_module.warmed_up_at:
            super().on_validation_end(trainer, pl_module)


class SaveBest(Callback):
    """Save the model after each epoch that is among the best, and remove epochs that no longer are.

    Parameters
    ----------
    save
        Called on the first process with a folder name, e.g. ``"epoch=03"``, the number of completed epochs, and the
        weights.
    remove
        Called on the first process with the name of a previously saved folder.
    top_k
        Number of epochs to keep; -1 keeps all.
    monitor, mode
        Name of the metric, and whether ``"min"`` or ``"max"`` is better.
    first_epoch
        Number of epochs trained previously, so that a second run continues the numbering.
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
        stops = [callback for callback in trainer.callbacks if isinstance(callback, GracefulStop)]
        if not trainer.is_last_batch and any(stop.stopped and stop.saves for stop in stops):
            return  # Ctrl-C cut the epoch short, and it will come again
        value = float(trainer.callback_metrics.get(self.monitor, worst(self.mode)))
        if len(self.kept) == self.top_k and not is_better(value, self.kept[-1][0], self.mode):
            return
        name = f"epoch={self.first_epoch + trainer.current_epoch:02d}"
        weights = kept_weights(trainer, pl_module)
        if trainer.is_global_zero:
            self.save(name, trainer.current_epoch + 1, weights)
        sign = 1 if self.mode == "min" else -1
        self.kept = sorted([*self.kept, (value, name)], key=lambda epoch: (sign * epoch[0], epoch[1]))
        if self.top_k < 0:
            return
        for _, surplus in self.kept[self.top_k :]:
            if trainer.is_global_zero:
                self.remove(surplus)
        self.kept = self.kept[: self.top_k]

    def state_dict(self) -> dict[str, Any]:
        """Return the saved epochs."""
        return {"kept": [list(epoch) for epoch in self.kept]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the list of saved epochs."""
        self.kept = [(value, name) for value, name in state_dict["kept"]]


_trained_alone = False
"""Whether this process already ran training on one device, which additional Lightning processes would repeat."""


@dataclass(frozen=True)
class FitResult:
    """Result of a training run.

    Attributes
    ----------
    history
        A mapping from metric name to one value per epoch.
    best_epoch
        Epoch from which the module's weights come; -1 if no epoch ended.
    stopped
        Whether the user stopped training with Ctrl-C.
    interrupted
        Whether a second Ctrl-C interrupted a step.
    n_epochs
        Number of epochs that ended, including an epoch that Ctrl-C ended early.
    device
        Device that the training ran on.
    weights
        The gathered weights on the first process if the module is sharded (FSDP), otherwise None.
    signal
        Number of the signal that requested the process to end after saving a checkpoint, or None if no signal arrived.

    Examples
    --------
    >>> history = {"train_loss": [2.0, 1.0], "validation_loss": [2.1, 1.4]}
    >>> device = torch.device("cpu")
    >>> result = FitResult(history, best_epoch=1, stopped=False, interrupted=False, n_epochs=2, device=device)
    >>> result.history["validation_loss"][result.best_epoch]
    1.4
    """

    history: dict[str, list[float]]
    best_epoch: int
    stopped: bool
    interrupted: bool
    n_epochs: int
    device: torch.device
    weights: dict[str, torch.Tensor] | None = None
    signal: int | None = None


def default_max_epochs(defaults: TrainingDefaults, n_cells: int) -> int:
    """Return the number of epochs with about as many steps as the default takes on 2,500 cells, within limits.

    Examples
    --------
    >>> from scforge.training import JointEmbedding
    >>> [default_max_epochs(JointEmbedding.defaults, n) for n in (250, 2_430, 25_000, 1_000_000)]
    [400, 42, 4, 3]
    """
    epochs = math.ceil(defaults.max_epochs * _REFERENCE_CELLS / n_cells)
    most = _MAX_TIMES * defaults.max_epochs if defaults.most_epochs is None else defaults.most_epochs
    return max(_MIN_EPOCHS, min(epochs, most))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning messages about hardware and loaders."""
    names = ("lightning", *(f"lightning.{part}{rest}" for part in ("pytorch", "fabric") for rest in ("", _RANK_ZERO)))
    levels = {log: log.level for log in map(logging.getLogger, names)}
    for log in levels:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for message in _REMARKS:
                warnings.filterwarnings("ignore", message=f".*{message}")
            yield
    finally:
        for log, level in levels.items():
            log.setLevel(level)


def fit(
    plan: TrainingPlan, data: CellDataModule, options: TrainOptions, *, saving: SaveOptions | None = None
) -> FitResult:
    """Train a module and load the weights of its best epoch.

    Parameters
    ----------
    plan, data
        The module with its objective, and the data to train on.
    options
        Options of the training run, except those of the plan, the data and the saving. If ``max_epochs`` is None, it
        depends on the number of cells (see :func:`default_max_epochs`); -1 sets no limit except ``max_steps``.
    saving
        Checkpoint folder and the checkpoint to resume from, or None.

    Returns
    -------
    Result of the training run.

    Raises
    ------
    OptionError
        If an argument cannot be used.
    TrainingError
        If a loss is NaN, a checkpoint cannot be saved, or memory runs out. In the first two cases, the module contains
        the weights of the best epoch, if any, and the error has an attribute ``result``. Otherwise the module is
        unchanged.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:60, :300].copy())
    >>> tokenizer = scforge.tokenizers.get_tokenizer("continuous_projection", cells.vocab)
    >>> sizes = {"hidden_dim": 8, "pooling": "weighted_sum", "latent_dim": 4}
    >>> module = scforge.models.GenePoolingModel(len(cells.vocab), **sizes)
    >>> objective = scforge.training.JointEmbedding()
    >>> data = scforge.training.CellDataModule(cells, tokenizer, objective, batch_size=20)
    >>> plan = scforge.training.TrainingPlan(module, objective)
    >>> result = fit(plan, data, TrainOptions(max_epochs=2, progress_bar=False, accelerator="cpu"))
    >>> result.n_epochs, len(result.history["validation_loss"])
    (2, 2)
    """
    max_epochs, max_steps, trainer_options = options.max_epochs, options.max_steps, options.of_trainer()
    patience = options.early_stopping_patience if options.early_stopping else None
    if (n_train := len(data.train_rows)) < _FEW_CELLS:
        warn(
            f"The model is trained on {n_train} cells, which are too few to select the best epoch; pass at least "
            f"{_FEW_CELLS} cells."
        )
    if max_epochs is None:
        max_epochs = default_max_epochs(plan.objective.defaults, n_train) if max_steps < 0 else -1
    callbacks: Any = options.callbacks
    for callback in (callbacks := [callbacks] if isinstance(callbacks, Callback) else list(callbacks)):
        if not isinstance(callback, Callback):
            raise OptionError(
                f"contains an object of type {type(callback).__name__!r}; pass lightning.pytorch callbacks.",
                argument="callbacks",
            )
    loggers = list(options.logger) if isinstance(options.logger, list | tuple) else [options.logger]
    for log in loggers:
        if not isinstance(log, bool | Logger | None):
            raise OptionError(
                "is not a Lightning logger; create a logger with scforge.training.make_loggers(['csv'], 'logs').",
                logger=log,
            )
    has_validation = len(data.validation_rows) > 0 and trainer_options.get("limit_val_batches") != 0
    # Without held-out cells only the loss is informative, because other metrics change while the model learns.
    objective = plan.objective
    monitor, mode = "train_loss", "min"
    if has_validation:
        monitor, mode = f"validation_{objective.monitor}", objective.monitor_mode
    saving = SaveOptions() if saving is None else saving
    history, best = History(), BestWeights(monitor, mode)
    stop = GracefulStop(saves=saving.write is not None)
    # History comes first, so a loss of NaN stops the run before anything is saved.
    own: list[Callback] = [history]
    if options.ema_decay is not None:
        if options.strategy == "fsdp":
            raise OptionError(
                "needs unsharded weights and does not work with strategy='fsdp'; omit "
                "ema_decay, or use strategy='ddp'.",
                ema_decay=options.ema_decay,
            )
        own.append(MovingAverage(options.ema_decay))
    own += [best, stop]
    if options.gradual_unfreezing is not None:
        own.append(GradualUnfreezing(options.gradual_unfreezing))
    if options.progress_bar:
        own.append(EpochProgress())
    if patience is not None and has_validation:
        own.append(StopAfterWarmup(monitor, mode=mode, patience=patience))
    if saving.best is not None:
        own.append(saving.best(monitor, mode))
    if options.logger:
        own.append(Monitor(history, every_n_steps=options.log_every_n_steps, settings=dict(saving.settings)))
    state = SaveState(saving, data=data, stop=stop)
    plan.begin()
    device, interrupted, error = torch.device("cpu"), False, None
    if saving.is_over(max_epochs, max_steps, patience):
        assert saving.resume is not None
        with restoring():
            history.load_state_dict(saving.resume["callbacks"]["History"])
            best.load_state_dict(saving.resume["callbacks"]["BestWeights"])
    else:
        if data.max_tokens_per_batch is not None:
            # Epochs then have different numbers of batches, and Lightning reads this number once.
            trainer_options.setdefault("reload_dataloaders_every_n_epochs", 1)
        for log in loggers:
            if saving.resume is not None and isinstance(log, PurgingTensorBoardLogger):
                log.go_on_behind(saving.resume["step"])
        with _quiet():
            trainer = _trainer(
                max_epochs=max_epochs,
                max_steps=max_steps,
                callbacks=[*own, *callbacks, state],
                strategy=options.strategy,
                log_every_n_steps=options.log_every_n_steps,
                **trainer_options,
            )
            interrupted, error = _run(trainer, plan, data)
        device = trainer.strategy.root_device
    weights = None
    if is_sharded(plan.module):
        # After an error the other processes may no longer be able to send their shards.
        weights = best.state if best.state is not None or error is not None else copy_of_weights(plan.module)
    elif best.state is not None:
        plan.module.load_state_dict(best.state)
    plan.module.eval()
    n_epochs = history.n_epochs
    if stop.stopped or interrupted:
        of_best = f"the weights of epoch {best.epoch + 1} ({monitor} {best.value:.4g})"
        kept = of_best if n_epochs else "the current weights"
        logger.warning("Training was stopped by Ctrl-C in epoch %d; the model has %s.", n_epochs + interrupted, kept)
    result = FitResult(
        history=history.epochs,
        best_epoch=best.epoch,
        stopped=stop.stopped,
        interrupted=interrupted,
        n_epochs=n_epochs,
        device=device,
        weights=weights,
        signal=stop.signal,
    )
    if error is not None:
        error.result = result
        raise error
    return result


def _trainer(*, strategy: str, accelerator: str, devices: Any, num_nodes: int, **options: Any) -> Any:
    global _trained_alone
    check_devices(accelerator, devices)
    processes = n_processes(accelerator, devices, num_nodes)
    if processes == 1:
        _trained_alone = True
    elif _trained_alone and not ("WORLD_SIZE" in os.environ or SLURMEnvironment.detect()):
        raise OptionError(
            f"cannot be used, because this script has already trained on one device and new "
            f"processes would repeat that training; pass devices={devices!r} to the first call as well, or start the "
            f"script with torchrun --nproc-per-node {processes}.",
            devices=devices,
        )
    parallel = make_strategy(strategy, n_processes=processes)
    try:
        # On SLURM's signal we save our own checkpoint; Lightning would save another one and requeue the job.
        slurm = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
        plugins = [SLURMEnvironment(auto_requeue=False)] if slurm else []
        return lightning.Trainer(
            logger=options.pop("logger", None) or False,
            plugins=[*plugins, *(options.pop("plugins", None) or [])],
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            strategy=parallel,
            enable_checkpointing=True,  # SaveState is the one
            enable_progress_bar=False,
            enable_model_summary=options.pop("enable_model_summary", False),
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            **options,
        )
    except (MisconfigurationException, RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"invalid training option: {' '.join(str(error).split())}") from error


def _run(
    trainer: lightning.Trainer, plan: TrainingPlan, data: CellDataModule
) -> tuple[bool, NotFiniteError | SavingError | None]:
    """Fit the plan; return whether a second Ctrl-C interrupted training, and the error that stopped training.

    After an error outside training itself, the module is unchanged.
    """
    before = {name: value.detach().cpu().clone() for name, value in plan.module.state_dict().items()}
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    # Modules that were used for inference are in eval mode, and Lightning leaves them so.
    plan.train()

    def as_before() -> None:
        if is_sharded(plan.module):
            return  # whole weights do not fit into shares
        plan.module.float().load_state_dict(before)
        plan.module.eval()

    try:
        trainer.fit(plan, datamodule=data)
    except PreemptedError:
        return False, None
    except (NotFiniteError, SavingError) as error:
        if isinstance(error, NotFiniteError):
            as_before()  # unless a best epoch is loaded later; the weights of the last step may be useless
        return False, error
    except BaseException as error:
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            return True, None  # Lightning answers Ctrl-C by leaving the process
        as_before()
        if out_of_memory(error):
            tokens = data.objective.max_tokens(data.tokenizer)
            size = data.batch_size or data.objective.defaults.batch_size
            batch = f"{size} cells" if data.max_tokens_per_batch is None else f"{data.max_tokens_per_batch} tokens"
            raise TrainingError(
                f"memory ran out with batches of {batch} (cells have up to {tokens} tokens); lower batch_size "
                "(training.batch_size) and increase accumulate_grad_batches by the same factor, lower the tokenizer's "
                "max_len (data.max_genes), or pass gradient_checkpointing=True (training.gradient_checkpointing)."
            ) from error
        raise
    finally:
        # Lightning ignores further Ctrl-Cs after the first, and restores its handlers before GracefulStop does.
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None:
                    signal.signal(number, handler)
    return False, None
