"""Loggers, metric history, progress and throughput of a training run."""

from __future__ import annotations

import csv
import datetime
import importlib.util
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from scforge._checks import check_choice
from scforge._io import atomic_path, check_files, check_folder
from scforge._progress import announce, in_notebook
from scforge._version import __version__
from scforge.errors import DataError, OptionError
from scforge.training.checkpoint import SavingError
from scforge.training.devices import unchanged
from scforge.training.objectives.base import Objective
from scforge.training.plan import NotFiniteError

LOGGERS = ("csv", "tensorboard", "wandb")
_WANDB_MODES = ("online", "offline", "disabled")

_SETTINGS = "settings.json"

_SIZE = {"cpu": 1024, "cuda": 8192}

_SECONDS = 0.1


class TableLogger(Logger):
    """Write ``metrics.csv`` into a folder, with one row per logged step and one column per metric.

    A resumed run first removes the rows after its checkpoint, so that no step occurs twice.

    Parameters
    ----------
    folder
        Output folder, which is created if it does not exist.

    Examples
    --------
    >>> logger = TableLogger("logs")
    >>> logger.log_metrics({"train_loss": 2.5}, step=0)
    >>> logger.save()
    >>> print((Path("logs") / "metrics.csv").read_text().strip())
    step,train_loss
    0,2.5
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        check_folder("log_dir", folder)
        self.folder = Path(folder)
        self.path = self.folder / "metrics.csv"
        self.n_rows = 0
        self._columns: list[str] | None = None

    @property
    def name(self) -> str:
        """Name of the logger."""
        return "csv"

    @property
    def version(self) -> str:
        """Return an empty string, because each folder contains only one table."""
        return ""

    @property
    def save_dir(self) -> str:
        """The output folder."""
        return str(self.folder)

    def begin(self, n_rows: int = 0) -> None:
        """Start a table, or resume a table after its first `n_rows`; the table of another run is renamed.

        Raises
        ------
        DataError
            If there is a different file at its path.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_settings()
        written = _read(self.path) if self.path.exists() else []
        rows = written[:n_rows]
        if written and not n_rows:
            number = next(n for n in itertools.count(1) if not (self.folder / f"metrics_{n}.csv").exists())
            self.path.rename(self.folder / f"metrics_{number}.csv")
        self._columns = list(rows[0]) if rows else ["step"]
        self.n_rows = len(rows)
        self._rewrite(rows)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a row."""
        if self._columns is None:
            self.begin()
        assert self._columns is not None
        if new := [name for name in metrics if name not in self._columns]:
            rows = _read(self.path)
            self._columns += new
            self._rewrite(rows)
        with self.path.open("a", newline="", encoding="utf-8") as handle:
            writer = csv.DictWriter(handle, self._columns, restval="")
            writer.writerow({"step": step, **{name: float(value) for name, value in metrics.items()}})
        self.n_rows += 1

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write the settings of the run next to the table, as ``settings.json``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"scforge_version": __version__, **params}
        self._check_settings()
        with atomic_path(self.folder / _SETTINGS, overwrite=True, argument="log_dir") as temporary:
            temporary.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")

    def _check_settings(self) -> None:
        """Raise an OptionError if the settings in the folder are of others, whose table this is, too."""
        check_files("log_dir", self.folder, [_SETTINGS], described_by=_SETTINGS, overwrite=True)

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self._columns is not None
        file = atomic_path(self.path, overwrite=True, argument="log_dir")
        with file as temporary, temporary.open("w", newline="", encoding="utf-8") as handle:
            writer = csv.DictWriter(handle, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)


class PurgingTensorBoardLogger(TensorBoardLogger):
    """TensorBoard logger that hides the steps after the checkpoint of a resumed run."""

    def go_on_behind(self, step: int) -> None:
        """Hide the steps logged after the given step when a run is resumed. Call this before anything is logged."""
        self._kwargs["purge_step"] = step + 1


def make_loggers(
    names: Sequence[str],
    log_dir: str | os.PathLike[str],
    *,
    project: str | None = None,
    run_name: str | None = None,
    wandb_mode: str | None = None,
) -> list[Logger]:
    """Create loggers by name.

    Parameters
    ----------
    names
        Names among ``"csv"``, ``"tensorboard"`` and ``"wandb"``.
    log_dir
        Folder for the logs.
    project, run_name
        Names of the project and the run in Weights & Biases; TensorBoard also uses `run_name`.
    wandb_mode
        ``"online"``, ``"offline"`` (to upload later with ``wandb sync``) or ``"disabled"``. If None, wandb decides.

    Returns
    -------
    Loggers for :func:`fit` and ``Encoder.train``, in the order of `names`.

    Raises
    ------
    OptionError
        If a name is unknown, or a package is missing.

    Examples
    --------
    >>> [type(logger).__name__ for logger in make_loggers(["csv"], "logs")]
    ['TableLogger']
    """
    loggers: list[Logger] = []
    if wandb_mode is not None:
        check_choice("wandb_mode", wandb_mode, _WANDB_MODES)
    for name in names:
        check_choice("loggers", name, LOGGERS)
        if name != "csv" and importlib.util.find_spec(name) is None:
            raise OptionError(
                f"contains {name!r}, which is not installed; install it with pip install 'scforge[{name}]'.",
                argument="loggers",
            )
    check_folder("log_dir", log_dir)
    if "csv" in names:
        loggers.append(TableLogger(log_dir))
    if "tensorboard" in names:
        loggers.append(PurgingTensorBoardLogger(save_dir=str(log_dir), name="tensorboard", version=run_name or ""))
    if "wandb" in names:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        given = {"mode": wandb_mode} if wandb_mode is not None else {}
        loggers.append(WandbLogger(name=run_name, project=project or "scforge", save_dir=str(log_dir), **given))
    return loggers


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(newline="", encoding="utf-8") as handle:
            # A killed process may have left an incomplete row.
            return [row for row in csv.DictReader(handle) if None not in row.values() and row["step"].isdecimal()]
    except (KeyError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{str(path)!r} is not the log table of a training run; choose another log_dir.") from error


class StepClock:
    """Estimate the remaining time of a run from the rate of the steps so far."""

    def __init__(self) -> None:
        self._start, self._first = 0.0, 0

    def begin(self, step: int) -> None:
        """Start the clock after `step` steps."""
        self._start, self._first = time.perf_counter(), step

    def seconds_left(self, step: int, total: int | None) -> float | None:
        """Return the estimated wall time until all steps are done, or None."""
        done = step - self._first
        if not total or done <= 0 or not math.isfinite(total):
            return None
        return (time.perf_counter() - self._start) / done * max(0, total - step)


class EpochProgress(Callback):
    """One progress bar over all steps, with the losses and the remaining time.

    If the output is a file, as on a cluster, it prints one line per epoch instead.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._lines = False
        self._clock = StepClock()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Open the progress bar."""
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
        """Advance the progress bar."""
        if self._bar is not None:
            self._bar.update(trainer.global_step - self._bar.n)

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Show the losses of the epoch."""
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

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    on_exception = teardown  # Lightning calls no teardown after an error


class History(Callback):
    """Record the metrics of each epoch, and stop training if the loss is NaN or infinite.

    It must be the first callback, so that training stops before anything is saved.

    Attributes
    ----------
    epochs
        A mapping from metric name to one value per epoch, NaN if the metric was not computed. It includes ``seconds``,
        the wall time since the start.
    n_epochs
        Number of epochs that ended.
    """

    def __init__(self) -> None:
        self.epochs: dict[str, list[float]] = {}
        self.n_epochs = 0
        self._start = time.perf_counter()

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Record the metrics of the epoch, after validation."""
        means = pl_module.summary(pl_module.train_means)
        trainer.callback_metrics.update({f"train_{name}": torch.tensor(value) for name, value in means.items()})
        figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
        figures |= {f"train_{name}": value for name, value in means.items()}
        if not pl_module.validated:  # the value is of an earlier epoch
            figures = {name: value for name, value in figures.items() if not name.startswith("validation_")}
        pl_module.validated = False
        for name, value in figures.items():
            if name.endswith("_loss") and not math.isfinite(value):
                raise NotFiniteError(
                    f"{name} is {value} in epoch {trainer.current_epoch}; lower lr, or check the counts for extreme "
                    "values."
                )
        figures |= {name: float(value) for name, value in pl_module.figures.items()}
        pl_module.figures.clear()
        figures["seconds"] = time.perf_counter() - self._start
        for name, value in figures.items():
            self.epochs.setdefault(name, [math.nan] * self.n_epochs).append(value)
        self.n_epochs += 1
        for values in self.epochs.values():
            values.extend([math.nan] * (self.n_epochs - len(values)))

    def last(self) -> dict[str, float]:
        """Return the metrics recorded in the last epoch."""
        return {name: values[-1] for name, values in self.epochs.items() if not math.isnan(values[-1])}

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics and the elapsed time."""
        seconds = time.perf_counter() - self._start
        return {"epochs": self.epochs, "n_epochs": self.n_epochs, "seconds": seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the metrics and the elapsed time."""
        self.epochs = {name: list(values) for name, values in state_dict["epochs"].items()}
        self.n_epochs = state_dict["n_epochs"]
        self._start -= state_dict["seconds"]


def flops_per_token(module: nn.Module, objective: Objective, batch: dict[str, torch.Tensor]) -> float:
    """Return the floating-point operations of a training step on `batch`, per token without padding.

    The random state of the training run does not change.
    """
    with unchanged(module), torch.no_grad(), FlopCounterMode(display=False) as counter:
        objective.loss(module, batch)
    return 3.0 * counter.get_total_flops() / max(1, int(batch["attention_mask"].sum()))


def peak_flops(device: torch.device, precision: str) -> float:
    """Return the operations per second for a large matrix product on a device."""
    size = _SIZE.get(device.type, 2048)
    kinds = {"bf16": torch.bfloat16, "16-": torch.float16}
    dtype = next((kind for name, kind in kinds.items() if str(precision).startswith(name)), torch.float32)
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    out = left @ right
    best, end = 0.0, time.perf_counter() + _SECONDS
    while time.perf_counter() < end or not best:
        _wait(device)
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        _wait(device)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Monitor(Callback):
    """Log a row every few steps, and a row at the end of each epoch.

    The row of a step contains ``step_loss`` (of its last batch), ``learning_rate``, ``gradient_norm``,
    ``cells_per_second``, ``tokens_per_second`` (of all processes, without padding), ``waiting`` (fraction of the time
    that the model waits for a batch), ``utilization`` (operations per second of the model divided by those of a large
    matrix product on the device; see :mod:`scforge.training.monitoring`) and ``seconds_left``. The row of an epoch
    contains the metrics of the history.

    Parameters
    ----------
    history
        History callback with the metrics of the epochs.
    every_n_steps
        Number of optimizer steps between two rows.
    settings
        Run settings to log.
    """

    def __init__(self, history: History, *, every_n_steps: int, settings: dict[str, Any]) -> None:
        self.history = history
        self.every_n_steps = every_n_steps
        self.settings = settings
        self._clock = StepClock()
        self._per_token, self._peak = 0.0, 0.0
        self._rows = 0
        self._loggers: list[Any] = []
        self._lr = 0.0
        self._seen = 0
        self._began = self._stopped = self._waited = 0.0
        self._cells = 0
        self._tokens: Any = 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Start or resume the tables."""
        self._loggers = trainer.loggers
        self._seen = trainer.global_step
        self._clock.begin(trainer.global_step)
        for log in trainer.loggers:
            if trainer.is_global_zero and isinstance(log, TableLogger):
                log.begin(self._rows)
            log.log_hyperparams(self.settings)
        self._clear(trainer)

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the operations of the first batch, before the clock starts."""
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]  # the schedule moves it before the row is written
        if trainer.loggers and not self._per_token:
            self._per_token = flops_per_token(pl_module.module, pl_module.objective, batch)
            self._peak = peak_flops(trainer.strategy.root_device, trainer.precision)
            self._clear(trainer)

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: dict[str, torch.Tensor],
        batch_idx: int,
    ) -> None:
        """Count cells and tokens, and log a row if one is due."""
        if not trainer.loggers:
            return
        self._cells += pl_module.objective.n_cells(batch)
        self._tokens = self._tokens + batch["attention_mask"].sum()
        before, self._seen = self._seen, trainer.global_step
        if self._seen // self.every_n_steps <= before // self.every_n_steps:
            return
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        loss_value = float(loss) * trainer.accumulate_grad_batches  # Lightning divides it
        tokens = float(self._tokens) * trainer.world_size  # reading it waits for the device
        seconds = time.perf_counter() - self._began
        row = {
            "epoch": float(trainer.current_epoch),
            "step_loss": loss_value,
            "learning_rate": float(self._lr),
            "gradient_norm": float(pl_module.gradient_norm),
            "cells_per_second": self._cells * trainer.world_size / seconds,
            "tokens_per_second": tokens / seconds,
            "waiting": max(0.0, trainer.datamodule.waited - self._waited) / seconds,
            "utilization": tokens / seconds * self._per_token / (self._peak * trainer.world_size),
        }
        if (left := self._clock.seconds_left(trainer.global_step, pl_module.total_steps)) is not None:
            row["seconds_left"] = left
        self._log(trainer, row)
        self._clear(trainer)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Stop the clock."""
        self._stopped = time.perf_counter()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Resume the clock."""
        self._began += time.perf_counter() - self._stopped

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Log the row of the epoch."""
        self._log(trainer, {"epoch": float(trainer.current_epoch), **self.history.last()})

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows logged so far."""
        tables = [log for log in self._loggers if isinstance(log, TableLogger)]
        return {"rows": tables[0].n_rows if tables else 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of saved rows."""
        self._rows = state_dict["rows"]

    def _clear(self, trainer: lightning.Trainer) -> None:
        self._began = self._stopped = time.perf_counter()
        self._waited, self._cells, self._tokens = trainer.datamodule.waited, 0, 0

    def _log(self, trainer: lightning.Trainer, row: dict[str, float]) -> None:
        for log in trainer.loggers:
            try:
                log.log_metrics(row, step=trainer.global_step)
            except OSError as error:
                raise SavingError(
                    f"logger {type(log).__name__} cannot write its logs ({error.strerror or error}); free some disk "
                    "space and resume the training."
                ) from error
