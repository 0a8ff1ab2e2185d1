"""Train a model from a configuration."""

from __future__ import annotations

import logging
import os
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import Callback, LambdaCallback

from scforge._constants import OBSM_KEY
from scforge._io import atomic_path, atomic_write_text, is_unedited, signed
from scforge._version import __version__
from scforge.config.load import dump_config
from scforge.config.schema import Config, DataConfig
from scforge.data.cells import Cells
from scforge.data.checks import check_obs_column
from scforge.data.readers import open_streams, write_h5ad
from scforge.data.sources import AUTO, open_cells, read_h5ad, store_of_large
from scforge.data.store import StoreCells
from scforge.data.vocab import FROM_DATA, GeneVocab
from scforge.errors import redacted
from scforge.estimators.encoder import Encoder
from scforge.estimators.setup import class_of_architecture
from scforge.training.datamodule import CellDataModule
from scforge.training.devices import check_devices
from scforge.training.options import TrainOptions
from scforge.training.run_folder import CONFIG_FILE, FINAL, RunFolder
from scforge.workflows.check import (
    check_benchmarks,
    check_settings,
    columns_of_data,
    model_options,
    objective_of,
    tokenizer_of,
)
from scforge.workflows.places import check_start, check_trains, placed

logger = logging.getLogger("scforge")

_LARGE = 2**28
"""Size in bytes above which files may not fit into memory, because they are compressed."""


def open_source(data: DataConfig, vocab: GeneVocab | None = None, *, columns: Sequence[str] = ()) -> AnnData | Cells:
    """Open the cells, as an AnnData for plain h5ad files, so that an embedding can be written into it.

    Parameters
    ----------
    data
        The section ``data``.
    vocab
        Genes of an existing model. If None, uses the genes specified in the section.
    columns
        Obs columns to keep in addition to the columns in the section.
    """
    genes = data.gene_vocab if vocab is None and data.gene_vocab != FROM_DATA else vocab
    # Without a choice all columns of local cells are available.
    obs = None if data.obs_columns is None and data.source == "local" else columns_of_data(data, columns)
    if data.source != "local":
        from scforge.data.census import CensusQuery

        names = ("organism", "filters", "census_version", "uri", "layer", "gene_key")
        given = {name: getattr(data, name) for name in names} | {"tiledb_config": data.storage_options}
        given = {name: value for name, value in given.items() if value is not None}
        query = CensusQuery(obs=obs or [], **given)
        return open_cells(query, genes, memory=data.memory, cache=data.cache or AUTO)
    paths = data.paths or []
    elsewhere = (data.cache, data.memory, data.modality, data.storage_options)
    store: Path | None = None
    plain = all(path.endswith(".h5ad") and Path(path).is_file() for path in paths) and elsewhere == (None,) * 4
    if plain and sum(Path(path).stat().st_size for path in paths) > _LARGE:
        streams = open_streams(paths, layer=data.layer)
        store = store_of_large(streams, layer=data.layer, gene_key=data.gene_key, modality=None)
    if plain and store is None:
        logger.info("Reading %s into memory.", ", ".join(paths))
        adata = read_h5ad(paths)
        for column in data.obs_columns or []:
            check_obs_column(adata, column, argument="data.obs_columns")
        return adata
    return open_cells(
        paths,
        genes,
        layer=data.layer,
        gene_key=data.gene_key,
        modality=data.modality,
        obs=obs,
        memory=data.memory,
        cache=data.cache or store or AUTO,
        storage_options=data.storage_options,
    )


def make_datamodule(cells: Cells, config: Config) -> CellDataModule:
    """Create the data module of a configuration."""
    data, training = config.data, config.training
    names = ("max_tokens_per_batch", "batch_key", "labels_key", "num_threads", "pin_memory")
    given: dict[str, Any] = {name: getattr(data, name) for name in names} | {
        # How many fit into memory is tried out when training begins.
        "batch_size": None if training.batch_size == "auto" else training.batch_size,
        "balance_by": data.sampling.balance_key,
        "balance_epochs": data.sampling.warmup_epochs,
        "balance_start": data.sampling.start,
        "balance_end": data.sampling.end,
        "split_by": None if data.split.by == "cell" else data.split.by,
    }
    options = {name: value for name, value in given.items() if value is not None}
    return CellDataModule(cells, validation_size=training.validation_size, seed=config.seed, **options)


def embedded_adata(cells: Cells, embedding: np.ndarray, key: str) -> AnnData:
    """Return an AnnData with obs and the embedding of each cell, but without counts."""
    obs = getattr(cells, "obs", None)
    obs = pd.DataFrame(index=pd.RangeIndex(len(cells))) if obs is None else obs.copy()
    obs.index = pd.Index(cells.names() if isinstance(cells, StoreCells) else obs.index.astype(str))
    return AnnData(obs=obs, obsm={key: embedding})


def training_report(model: Encoder, config: Config) -> list[str]:
    """Return a summary of a training run and the paths of its outputs, one line each.

    Parameters
    ----------
    model
        Result of :func:`scforge.workflows.train_from_config`.
    config
        Its configuration.
    """
    lines = [str(model).splitlines()[0], *best_epoch(model, "loss", "min"), *written_files(config)]
    if config.output.checkpoint_dir is not None:
        source = shlex.quote(redacted((config.data.paths or ["CELLS.h5ad"])[0]))
        model_folder = shlex.quote(str(Path(config.output.checkpoint_dir) / FINAL))
        lines.append(f"Next:        scforge embed {source} -m {model_folder} -o embedded.zarr")
    return lines


def best_epoch(model: Encoder, figure: str, mode: str) -> list[str]:
    """Return a list with a line about the epoch of a model's weights, or an empty list.

    Parameters
    ----------
    model
        A trained model.
    figure
        Metric by which the epoch was chosen, without prefix, e.g. ``"loss"`` or ``"macro_f1"``.
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
    """Return the paths of a training run's outputs, one line each."""
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


def mute_other_processes() -> bool:
    """Silence all processes except the first, and return whether this is the first process."""
    if rank_zero_only.rank == 0:
        return True
    logging.getLogger("scforge").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return False


def train_from_config(
    config: Config,
    *,
    progress_bar: bool = True,
    resume: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Encoder:
    """Read the cells, train, and write the outputs of ``config.output``.

    Parameters
    ----------
    config
        See :func:`scforge.config.load_config`.
    progress_bar
        Whether to show a progress bar during training.
    resume
        ``"auto"`` resumes from the last checkpoint in ``output.checkpoint_dir``, or starts a new run if there is no
        checkpoint. A path resumes from this checkpoint. If None, starts a new run, and raises an error if the folder
        contains another run.
    overwrite
        Whether to replace the run in ``output.checkpoint_dir``, and the file ``output.embedding``.

    Returns
    -------
    The trained model. With ``output.checkpoint_dir``, it is saved in this folder as ``final``, next to the best epochs
    and the configuration (``config.yaml``). Otherwise nothing is saved, except by ``scforge train``, which uses
    ``checkpoints/NAME`` for a file ``NAME.yaml``. With several processes, only the first process writes.

    Raises
    ------
    ConfigError, OptionError
        If an option is invalid.
    MissingFileError, DataError
        If the cells cannot be read or are invalid.

    Examples
    --------
    >>> from scforge.config import load_config
    >>> train_from_config(load_config("recipe.yaml"))  # doctest: +SKIP
    """
    check_trains(config)
    arguments = checked_arguments(config, resume=resume, overwrite=overwrite)
    source = open_source(config.data)
    model, module = _model(source, config)
    model.train(datamodule=module, **arguments, progress_bar=progress_bar)
    if not rank_zero_only.rank:
        outputs_of(model, source, config, overwrite=overwrite or resume is not None)
    return model


def checked_arguments(config: Config, *, resume: Any, overwrite: bool) -> dict[str, Any]:
    """Check a configuration before the cells are read, and return the arguments for training."""
    check_start(config, resume=resume, overwrite=overwrite)
    with placed(config):
        check_settings(config)
        check_devices(config.training.accelerator, config.training.devices)
        arguments = train_arguments(config)
    if resume is not None:
        arguments["resume"] = resume
    if config.output.checkpoint_dir is not None:
        path = Path(config.output.checkpoint_dir) / CONFIG_FILE
        header = f"# Resolved configuration, including overrides (scforge {__version__}).\n"
        text = signed(header + dump_config(config))

        def keep_config(trainer: Any, _: Any) -> None:
            """Write the configuration in the first process, now that the folder belongs to this training run."""
            if trainer.is_global_zero:
                atomic_write_text(path, text, overwrite=is_unedited(path), argument="checkpoint_dir")

        arguments["callbacks"] = [*arguments["callbacks"], LambdaCallback(on_train_start=keep_config)]
        arguments |= {"overwrite": True} if overwrite else {}
    return arguments


def outputs_of(model: Encoder, source: AnnData | Cells, config: Config, *, overwrite: bool) -> None:
    """Write the model and the embedding of its cells, as configured; `overwrite` concerns the embedding."""
    output = config.output
    if output.checkpoint_dir is not None:
        model.save(Path(output.checkpoint_dir) / FINAL, overwrite=True)
    if output.embedding is not None:
        embedding = model.get_latent_representation()
        adata = source if isinstance(source, AnnData) else embedded_adata(source, embedding, OBSM_KEY)
        write(output.embedding, adata, overwrite=overwrite)


def train_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of ``Encoder.train`` in a configuration, including loggers and callbacks."""
    training, output = config.training, config.output
    written = config.user_set()
    # Where the user set nothing, the default of the training holds. The data module takes sizes of batches.
    arguments = {
        name: written[section][name]
        for section in ("training", "output")
        for name in TrainOptions.names()
        if name not in ("batch_size", "validation_size", "optimizer") and written.get(section, {}).get(name) is not None
    }
    if training.batch_size == "auto":
        arguments["batch_size"] = "auto"
    loggers: Any = False
    if output.log_dir is not None and output.loggers != []:
        from scforge.training.monitoring import make_loggers

        names = ["csv"] if output.loggers is None else output.loggers
        options = {name: getattr(output, name) for name in ("project", "run_name", "wandb_mode")}
        loggers = make_loggers(names, output.log_dir, **options)
    callbacks: list[Callback] = []
    if config.eval.benchmarks:
        from scforge.eval.callback import BenchmarkCallback

        check_benchmarks(config)
        options = {name: getattr(config.eval, name) for name in ("every_n_epochs", "datasets")}
        options |= {name: getattr(config.data, name) for name in ("labels_key", "batch_key")}
        with placed(config, "eval.benchmarks"):
            callbacks.append(BenchmarkCallback(config.eval.benchmarks, **options))
    return arguments | {
        "optimizer": training.optimizer.name,
        "lr": training.optimizer.lr,
        "weight_decay": training.optimizer.weight_decay,
        "schedule": training.scheduler.name,
        "warmup_steps": training.scheduler.warmup_steps,
        "logger": loggers,
        "callbacks": callbacks,
    }


def _model(source: AnnData | Cells, config: Config) -> tuple[Encoder, CellDataModule]:
    data = config.data
    parts = (config.model.architecture, tokenizer_of(config), objective_of(config))
    front = class_of_architecture(config.model.architecture)
    options = {
        "vocab": data.gene_vocab,
        "n_top_genes": data.preprocessing.hvg_selection,
        "keep_genes": data.preprocessing.keep_genes,
        "seed": config.seed,
        **model_options(config),
    }
    with placed(config):
        if isinstance(source, AnnData):
            front.setup_anndata(
                source, layer=data.layer, gene_key=data.gene_key, batch_key=data.batch_key, labels_key=data.labels_key
            )
            model = front(source, *parts, **options)
            return model, make_datamodule(model.open_cells(), config)
        module = make_datamodule(source, config)
        return front(None, *parts, datamodule=module, **options), module


def write(path: str | os.PathLike[str], content: AnnData | pd.DataFrame, *, overwrite: bool) -> None:
    """Write cells or a table atomically; `overwrite` as in :func:`scforge._io.atomic_path`."""
    with atomic_path(path, overwrite=overwrite, argument="output") as temporary:
        if isinstance(content, AnnData):
            write_h5ad(temporary, content)
        else:
            content.to_csv(temporary)
