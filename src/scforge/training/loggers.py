"""Where the figures of a training go, besides its history: a table, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from scforge._io import atomic_path, check_folder
from scforge.errors import DataError, OptionError, did_you_mean, listing

__all__ = ["LOGGERS", "PurgingTensorBoardLogger", "TableLogger", "make_loggers"]

LOGGERS = ("csv", "tensorboard", "wandb")
_WANDB_MODES = ("online", "offline", "disabled")


class TableLogger(Logger):
    """Writes ``metrics.csv`` into a folder: a row for each step that is logged, a column for each figure.

    A training that goes on from a saved state removes the rows behind it first, so that no step stands there twice.

    Parameters
    ----------
    folder
        Where to write; it is made.

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
        """There is one table a folder."""
        return ""

    @property
    def save_dir(self) -> str:
        """The folder."""
        return str(self.folder)

    def begin(self, n_rows: int = 0) -> None:
        """Begin a table, or go on with one of which the first rows count; the table of another training is set aside.

        Raises
        ------
        DataError
            If there is another file in its place.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        found = _read(self.path) if self.path.exists() else []
        rows = found[:n_rows]
        if found and not n_rows:
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
        """Write the settings of the training beside the table, as ``settings.json``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(self.folder / "settings.json") as temporary:
            temporary.write_text(json.dumps(dict(params), indent=2, default=str) + "\n", encoding="utf-8")

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self._columns is not None
        with atomic_path(self.path) as temporary, temporary.open("w", newline="", encoding="utf-8") as handle:
            writer = csv.DictWriter(handle, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)


class PurgingTensorBoardLogger(TensorBoardLogger):
    """TensorBoard's, which hides what came behind the state that a training goes on from."""

    def go_on_behind(self, step: int) -> None:
        """Hide what comes after a step; call it before anything is logged."""
        self._kwargs["purge_step"] = step + 1


def make_loggers(
    names: Sequence[str],
    log_dir: str | os.PathLike[str],
    *,
    project: str | None = None,
    run_name: str | None = None,
    wandb_mode: str | None = None,
) -> list[Logger]:
    """Make loggers by name.

    Parameters
    ----------
    names
        Of ``"csv"``, ``"tensorboard"`` and ``"wandb"``.
    log_dir
        Folder of the logs.
    project, run_name
        What Weights & Biases calls the project and the run; TensorBoard takes `run_name`, too.
    wandb_mode
        ``"online"``, ``"offline"`` (to send later with ``wandb sync``) or ``"disabled"``; None leaves it to wandb.

    Returns
    -------
    Loggers for :func:`fit` and ``Encoder.train``, in the order of `names`.

    Raises
    ------
    OptionError
        If a name is not known, or a package is missing.

    Examples
    --------
    >>> [type(logger).__name__ for logger in make_loggers(["csv"], "logs")]
    ['TableLogger']
    """
    loggers: list[Logger] = []
    for name in names:
        if name not in LOGGERS:
            raise OptionError(
                f"loggers={list(names)!r} has {name!r}, which is not known{did_you_mean(name, LOGGERS)} "
                f"(known: {listing(LOGGERS)})"
            )
    if wandb_mode is not None and wandb_mode not in _WANDB_MODES:
        raise OptionError(f"wandb_mode={wandb_mode!r} is not known (known: {listing(_WANDB_MODES)}).")
    check_folder("log_dir", log_dir)
    if "csv" in names:
        loggers.append(TableLogger(log_dir))
    if "tensorboard" in names:
        _check_installed("tensorboard", "tensorboard", "tensorboard")
        loggers.append(PurgingTensorBoardLogger(save_dir=str(log_dir), name="tensorboard", version=run_name or ""))
    if "wandb" in names:
        _check_installed("wandb", "wandb", "wandb")
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        given = {"mode": wandb_mode} if wandb_mode is not None else {}
        loggers.append(WandbLogger(name=run_name, project=project or "scforge", save_dir=str(log_dir), **given))
    return loggers


def _check_installed(name: str, module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise OptionError(f"loggers names {name!r}, which is not installed; pip install 'scforge[{extra}]'.")


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(newline="", encoding="utf-8") as handle:
            # A process that was killed may have left half a row.
            return [row for row in csv.DictReader(handle) if None not in row.values() and row["step"].isdecimal()]
    except (KeyError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{str(path)!r} is not a table of a training; choose another log_dir.") from error
