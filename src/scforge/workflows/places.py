"""Files, folders and outputs of a command, checked before cells are read and before slow imports."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scforge._constants import EVALUATION_FILE
from scforge._io import check_folder, check_output, check_writable, is_unedited
from scforge._lazy import process_rank
from scforge.config.aliases import ALIASES
from scforge.config.load import load_config
from scforge.config.schema import Config, FinetuneConfig
from scforge.data.paths import check_exists, is_url, stem_of
from scforge.errors import ConfigError, OptionError, ScforgeError
from scforge.training.run_folder import CONFIG_FILE, RunFolder, check_state

_AUTO = "auto"

_SAID = {
    "architecture": "model.architecture",
    "balance_by": "data.sampling.balance_key",
    "dropped": "tokenizer.dropped",
    "keep_genes": "data.preprocessing.keep_genes",
    "max_len": "data.max_genes",
    "n_top_genes": "data.preprocessing.hvg_selection",
    "objective": "objective.name",
    "schedule": "training.scheduler.name",
    "split_by": "data.split.by",
    "target_sum": "data.preprocessing.target_sum",
    "tokenizer": "tokenizer.strategy",
    "transform": "data.preprocessing",
    "vocab": "data.gene_vocab",
}
"""A mapping from arguments of `Encoder` to configuration options."""

_SECTIONS = ("finetune", "model", "tokenizer", "objective", "data", "training", "output")


@contextlib.contextmanager
def placed(config: Config, option: str | None = None) -> Iterator[None]:
    """Prefix error messages with the location of an option. If None, uses the argument that caused the error."""
    try:
        yield
    except ScforgeError as error:
        if option is None and (name := error.argument) is not None:
            written = config.user_set()
            holders = [f"{section}.{name}" for section in _SECTIONS if name in written.get(section, {})]
            is_option = name.partition(".")[0] in type(config).model_fields
            option = name if is_option else next(iter(holders), _SAID.get(name))
        error.located("" if option is None else config.place_of(option))
        raise


def check_places(config: Config, *, replaces: bool = False) -> None:
    """Check the files and folders of a configuration.

    Parameters
    ----------
    config
        See :func:`scforge.config.load_config`.
    replaces
        Whether ``output.embedding`` may be an existing file.

    Raises
    ------
    ConfigError, OptionError
        If a folder or file cannot be written, or a logger is not installed.
    MissingFileError
        If a file does not exist.
    """
    data, output = config.data, config.output
    n_steps = config.training.checkpoint_every_n_steps
    if n_steps is not None and output.checkpoint_dir is None:
        raise ConfigError(
            "has no effect without output.checkpoint_dir; set both.",
            argument="training.checkpoint_every_n_steps",
            value=n_steps,
        )
    embedding = None if output.embedding is None else os.fspath(Path(output.embedding).parent)
    folders = {"output.log_dir": output.log_dir, "output.checkpoint_dir": output.checkpoint_dir}
    for option, folder in (folders | {"output.embedding": embedding, "data.cache": data.cache}).items():
        if folder is not None:
            check_folder(option, folder)
            check_writable(option, folder)
    for package in output.loggers or []:
        if package != "csv" and importlib.util.find_spec(package) is None:
            fix = f"install with pip install 'scforge[{package}]'"
            problem = f"contains {package!r}, which is not installed; {fix}."
            raise OptionError(problem, argument="output.loggers", value=output.loggers)
    if output.embedding is not None:
        target = Path(output.embedding)
        place = target.resolve()
        read = [*(data.paths or []), *config.eval.datasets.values()]
        inputs = [Path(path).resolve() for path in read if not is_url(path)]
        if any(file == place or place.match(str(file)) for file in inputs):  # or what a pattern would find
            problem = "is an input file and would be overwritten; choose another name."
            raise ConfigError(problem, argument="output.embedding", value=str(target))
        check_output("output.embedding", target, overwrite=replaces)
    files = {f"data.paths.{index}": path for index, path in enumerate(data.paths or [])}
    files |= {f"eval.datasets.{name}": path for name, path in config.eval.datasets.items()}
    for option, path in files.items():
        with placed(config, option):
            check_exists(path, data.storage_options)


def check_start(config: Config, *, resume: Any, overwrite: bool) -> None:
    """Check places and run folder of a configuration, see :func:`check_places` and :func:`check_run`."""
    with placed(config):
        check_places(config, replaces=overwrite or resume is not None)
        check_run(config, resume=resume, overwrite=overwrite)


def check_run(config: Config, *, resume: Any, overwrite: bool) -> None:
    """Check whether a training run may start or resume, before the cells are read.

    Parameters
    ----------
    config, resume, overwrite
        See :func:`scforge.workflows.train_from_config`.

    Raises
    ------
    ConfigError, OptionError
        If `resume` and `overwrite` contradict each other, no folder is set, or the folder contains another run.
    MissingFileError
        If there is no checkpoint to resume from.
    """
    folder = config.output.checkpoint_dir
    if resume is not None and overwrite:
        raise OptionError(
            "and overwrite=True (--resume and --overwrite) contradict each other; keep only one of the two.",
            resume=str(resume),
        )
    if folder is None and (resume == _AUTO or (overwrite and config.output.embedding is None)):
        what = "overwrite=True (--overwrite)" if overwrite else "resume='auto'"
        raise ConfigError(f"{what} requires output.checkpoint_dir, the folder of the training run.")
    run = None if folder is None else RunFolder(folder)
    state = None if resume in (None, _AUTO) else Path(resume)
    if state is not None:
        check_state(state, run)
    # Of several processes the first alone looks whether the folder is free.
    if run is None or process_rank():
        return
    if os.path.lexists(run.path / CONFIG_FILE) and not is_unedited(run.path / CONFIG_FILE):
        raise OptionError(
            f"contains {CONFIG_FILE!r}, which training would replace, but which "
            "scforge did not write or which has been edited; rename the file, or choose another folder.",
            checkpoint_dir=str(run.path),
        )
    run.check_free(resumes=resume == _AUTO or (state is not None and run.holds(state)), overwrite=overwrite)
    if config.finetune is not None and config.finetune.evaluate and os.path.lexists(run.path / EVALUATION_FILE):
        check_output("evaluation", run.path / EVALUATION_FILE, overwrite=overwrite or resume is not None)
        if not is_unedited(run.path / CONFIG_FILE):
            raise OptionError(
                f"contains {EVALUATION_FILE!r}, which scforge did not write; rename "
                "the file, or choose another folder.",
                checkpoint_dir=str(run.path),
            )


def check_trains(config: Config) -> None:
    """Raise a ConfigError if a configuration fine-tunes an existing model, instead of training a new one."""
    if config.finetune is not None:
        raise ConfigError(
            f"{config.place_of('finetune')}the configuration has a finetune section; run it with scforge finetune "
            "--config, or remove the section to train a new model."
        )


def finetune_section(config: Config) -> FinetuneConfig:
    """Return the section ``finetune``.

    Raises
    ------
    ConfigError
        If the section is missing.
    """
    if config.finetune is None:
        raise ConfigError(
            "the configuration has no 'finetune' section; add finetune: {base_model: checkpoints/final, task: "
            "annotation}, or train a new model with scforge train."
        )
    return config.finetune


def finetuning_config(
    path: str | os.PathLike[str] | None, overrides: Sequence[str], *, flags: Mapping[str, tuple[str, Any]]
) -> Config:
    """Read the configuration of ``scforge finetune``, with a default folder if neither file nor flags set one.

    Parameters
    ----------
    path, overrides, flags
        See :func:`scforge.config.load_config`.
    """
    if path is None:
        given = {option for option, _ in flags.values()} | {override.partition("=")[0] for override in overrides}
        needed = {"--base-model": "finetune.base_model", "--data": "data.paths", "--task": "finetune.task"}
        missing = []
        for flag, option in needed.items():  # options may be set individually or with their section
            if not any(option == one or option.startswith(f"{one}.") or ALIASES.get(one) == option for one in given):
                missing.append(flag)
        if missing:
            raise OptionError(f"scforge finetune requires {' and '.join(missing)}; add them, or --config FILE.")
    config = load_config(path, overrides, flags=flags)
    section = finetune_section(config)
    if config.output.checkpoint_dir is None:
        first = (config.data.paths or ["census"])[0]
        config.output.checkpoint_dir = f"{stem_of(first)}_{section.task}"
    return config
