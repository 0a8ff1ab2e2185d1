"""The beginning and the end of a training from a configuration: what may be replaced, what is kept, what is told."""

from __future__ import annotations

import logging
import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import Callback

from scforge._io import atomic_write_text
from scforge._version import __version__
from scforge.config.load import dump_config
from scforge.config.schema import Config
from scforge.errors import ConfigError, OptionError, redacted
from scforge.training.checkpoint import FINAL, RunFolder, check_state
from scforge.training.devices import ensure_devices

if TYPE_CHECKING:
    from scforge.estimators.encoder import Encoder


CONFIG_FILE = "config.yaml"
"""Name of the configuration in ``output.checkpoint_dir``."""

_AUTO = "auto"


class KeepConfig(Callback):
    """Writes the configuration beside the checkpoints once training begins, so that it can be repeated.

    Parameters
    ----------
    config
        The configuration, overrides included.
    """

    def __init__(self, config: Config) -> None:
        self.path = Path(str(config.output.checkpoint_dir)) / CONFIG_FILE
        self.text = f"# What this training was told, overrides included (scforge {__version__}).\n{dump_config(config)}"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Write it, on the first process; the folder belongs to this training by now."""
        if trainer.is_global_zero:
            atomic_write_text(self.path, self.text)


def check_gpus(config: Config) -> None:
    """Raise unless there are as many GPUs as the configuration asks for.

    Raises
    ------
    OptionError
        Naming the option as the user did.
    """
    training = config.training
    try:
        ensure_devices(training.accelerator, training.devices)
    except OptionError as error:
        option = "devices" if config.name_of("training.devices") else "accelerator"
        name = config.name_of(f"training.{option}") or f"training.{option}"
        raise OptionError(
            f"{config.place_of(f'training.{option}')}{name}={getattr(training, option)!r} cannot be had "
            f"({str(error).rstrip('.')}); without GPUs, set training.num_gpus=0 or training.accelerator=cpu "
            "training.devices=1."
        ) from error


def check_run(config: Config, *, resume: Any, overwrite: bool, first: bool = True) -> None:
    """Check whether a training may begin, or go on, before the cells are read.

    Parameters
    ----------
    config, resume, overwrite
        See :func:`scforge.estimators.train_from_config`.
    first
        Whether this is the first of several processes, which alone looks whether the folder is free.

    Raises
    ------
    ConfigError, OptionError
        If the two contradict each other, have no folder to work on, or the folder holds another run.
    MissingFileError
        If there is no state to go on with.
    """
    folder = config.output.checkpoint_dir
    if resume is not None and overwrite:
        raise OptionError(
            f"resume={str(resume)!r} and overwrite=True (--resume and --overwrite) contradict each other; keep one."
        )
    if resume == _AUTO and folder is None:
        raise ConfigError("resume='auto' looks into output.checkpoint_dir, which is not set; set it.")
    if overwrite and folder is None and config.output.embedding is None:
        raise ConfigError("overwrite=True (--overwrite) has nothing to replace; set output.checkpoint_dir.")
    run = None if folder is None else RunFolder(folder)
    state = Path(resume) if resume is not None and resume != _AUTO else None
    if state is not None:
        check_state(state, run)
    if run is None or overwrite or not first or (state is not None and run.holds(state)):
        return
    try:
        run.check_free(goes_on=resume == _AUTO)
    except OptionError as error:
        raise OptionError(config.place_of("output.checkpoint_dir") + str(error)) from error


def training_report(model: Encoder, config: Config) -> list[str]:
    """Return what a training has come to, and where it is: a line each.

    Parameters
    ----------
    model
        What :func:`scforge.estimators.train_from_config` returned.
    config
        What it was given.
    """
    lines = [str(model).splitlines()[0], *best_epoch(model, "loss", "min"), *written_files(config)]
    if config.output.checkpoint_dir is not None:
        source = shlex.quote(redacted((config.data.paths or ["CELLS.h5ad"])[0]))
        model_folder = shlex.quote(str(Path(config.output.checkpoint_dir) / FINAL))
        lines.append(f"Next:        scforge embed {source} -m {model_folder} -o embedded.zarr")
    return lines


def best_epoch(model: Encoder, figure: str, mode: str) -> list[str]:
    """Return a line about the epoch whose weights a model has, or none.

    Parameters
    ----------
    model
        A trained model.
    figure
        What chose the epoch, without the part of the cells: ``"loss"``, ``"macro_f1"``.
    mode
        ``"min"`` or ``"max"``.
    """
    monitor = f"validation_{figure}"
    if monitor not in model.history:
        monitor, mode = "train_loss", "min"
    if monitor not in model.history:
        return []
    values = model.history[monitor][monitor].to_numpy(dtype=float)
    if not np.isfinite(values).any():
        return []
    best = int(np.nanargmin(values) if mode == "min" else np.nanargmax(values))
    return [f"Best epoch:  {best + 1} of {len(values)} ({monitor} {values[best]:.4g})"]


def written_files(config: Config) -> list[str]:
    """Return where a training has left what: a line each."""
    output, lines = config.output, []
    if output.checkpoint_dir is not None:
        folder = RunFolder(output.checkpoint_dir)
        lines.append(f"Model:       {folder.path / FINAL}")
        if states := folder.states():
            lines.append(f"State:       {states[-1]}")
        if (folder.path / CONFIG_FILE).is_file():
            lines.append(f"Settings:    {folder.path / CONFIG_FILE}")
    if output.log_dir is not None and output.loggers != []:
        lines.append(f"Log:         {output.log_dir}")
    if output.embedding is not None:
        lines.append(f"Embedding:   {output.embedding}")
    return lines


def first_process_speaks() -> bool:
    """Let only the first of several processes say something; return whether this is the one."""
    if rank_zero_only.rank == 0:
        return True
    logging.getLogger("scforge").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return False
