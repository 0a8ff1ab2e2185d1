"""Everything about a configuration that can be checked without reading the cells: ``scforge config check``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch.overrides import TorchFunctionMode

from scforge._io import check_folder, put_back
from scforge.config.schema import Config, DataConfig
from scforge.data.readers import is_url, open_streams, similar_file
from scforge.data.sources import open_cells
from scforge.data.store import is_store, partial_path
from scforge.data.vocab import FROM_DATA, GeneVocab, open_vocab
from scforge.datasets.cards import DatasetCard, get_card, list_cards
from scforge.datasets.loading import find_file
from scforge.errors import (
    ConfigError,
    GeneMismatchError,
    MissingFileError,
    OptionError,
    ScforgeError,
    did_you_mean,
    listing,
    warn,
)
from scforge.estimators.config_parts import check_names, chosen, model_options, objective_of, placed, tokenizer_of
from scforge.estimators.finetune_check import check_finetuning, described, named_columns
from scforge.estimators.spec import ModelSpec, named_options
from scforge.estimators.vocabulary import n_top_genes_of
from scforge.models._utils import count_parameters
from scforge.tokenizers.base import TOKENIZERS
from scforge.training.objectives.base import get_objective

if TYPE_CHECKING:
    from scforge.eval.base import Evaluation


_UNKNOWN_GENES = 2_048
"""Genes of a model whose vocabulary comes from the data: at least what a tokenizer keeps of a cell by default."""


def check_config(config: Config) -> str:
    """Check what can be checked without reading the cells, and without a GPU.

    Names, options and sizes of architecture, tokenizer and objective, and whether they fit, or the base model and the
    task; files, their columns, and folders; benchmarks and loggers.

    Parameters
    ----------
    config
        See :func:`scforge.config.load_config`.

    Returns
    -------
    What would be trained, in a few words.

    Raises
    ------
    ScforgeError
        With the first mistake.

    Examples
    --------
    >>> import scforge
    >>> from scforge.config import load_config, recipe_path
    >>> scforge.datasets.pbmc3k().write_h5ad("cells.h5ad")
    >>> check_config(load_config(recipe_path("light"), ["data.paths=cells.h5ad"]))
    'gene_pooling on tokens of continuous_projection, trained by neighbor_denoising, about 1.0 million parameters'
    """
    check_settings(config)
    benchmark_callbacks(config, absent=_absent(config))
    if config.data.source == "local":
        _check_columns(config)
    if config.finetune is not None:
        return described(config)
    spec, known = model_of(config)
    with placed(config), torch.device("meta"), _Unfilled():
        module = spec.build_module()
    size = f", about {count_parameters(module) / 1e6:.1f} million parameters" if known else ""
    return f"{spec.architecture} on tokens of {spec.tokenizer}, trained by {spec.objective}{size}"


def check_settings(config: Config, *, replaces: bool = False) -> None:
    """Check names, options, files and folders; quick, so that no mistake comes to light after minutes of reading.

    Parameters
    ----------
    config
        See :func:`scforge.config.load_config`.
    replaces
        Whether ``output.embedding`` may be a file that exists.

    Raises
    ------
    ConfigError, OptionError
        If something is not known, or does not go together.
    MissingFileError
        If a file does not exist.
    """
    if config.finetune is None:
        check_names(config)
    else:
        check_finetuning(config)
    output = config.output
    if config.training.checkpoint_every_n_steps is not None and output.checkpoint_dir is None:
        raise ConfigError(
            f"{config.place_of('training.checkpoint_every_n_steps')}training.checkpoint_every_n_steps="
            f"{config.training.checkpoint_every_n_steps} has no use without output.checkpoint_dir; set both."
        )
    embedding = None if output.embedding is None else os.fspath(Path(output.embedding).parent)
    cache = None if config.data.cache is None else os.fspath(Path(config.data.cache).parent)
    folders = {"output.log_dir": output.log_dir, "output.checkpoint_dir": output.checkpoint_dir}
    for option, folder in (folders | {"output.embedding": embedding, "data.cache": cache}).items():
        if folder is not None:
            _check_writable(config, option, folder)
    for package in output.loggers or []:
        if package != "csv" and importlib.util.find_spec(package) is None:
            raise OptionError(
                f"{config.place_of('output.loggers')}output.loggers names {package!r}, which is not installed; "
                f"pip install 'scforge[{package}]'."
            )
    _check_embedding(config, replaces=replaces)
    for index, path in enumerate(config.data.paths or []):
        _check_file(config, ["data", "paths", index], path)
    for name, path in config.eval.datasets.items():
        _check_file(config, ["eval", "datasets", name], path)
    if config.data.gene_vocab != FROM_DATA:
        with placed(config):
            open_vocab(config.data.gene_vocab)


def _absent(config: Config) -> dict[str, DatasetCard]:
    """Return the cards of data sets that benchmarks name and that are not on this machine; warn about each."""
    absent: dict[str, DatasetCard] = {}
    for entry in config.eval.benchmarks or []:
        ((_, options),) = entry.items() if isinstance(entry, Mapping) else [("", None)]
        name = (options or {}).get("dataset")
        if name not in list_cards() or name in {*config.eval.datasets, *absent} or Path(name).exists():
            continue
        try:
            find_file(name)
        except MissingFileError as error:
            place = config.place_of("eval.benchmarks")
            warn(f"{place}{error} Training needs it.")
            absent[name] = get_card(name)
    return absent


def benchmark_callbacks(config: Config, *, absent: Mapping[str, DatasetCard] | None = None) -> list[Any]:
    """Return the callback that runs the benchmarks of a configuration, or nothing.

    `absent` are cards of data sets whose files are elsewhere, for a callback that is not run.

    Raises
    ------
    OptionError, MissingFileError
        If a benchmark, an option of it or a data set is not known.
    """
    section = config.eval
    if not section.benchmarks:
        return []
    from scforge.eval.callback import BenchmarkCallback

    try:
        callback = BenchmarkCallback(
            section.benchmarks,
            every_n_epochs=section.every_n_epochs,
            datasets={**section.datasets, **(absent or {})},
            labels_key=config.data.labels_key,
            batch_key=config.data.batch_key,
        )
    except ScforgeError as error:
        raise type(error)(config.place_of("eval.benchmarks") + str(error)) from error
    _check_benchmarks(config, callback.evaluations)
    return [callback]


def _check_benchmarks(config: Config, evaluations: list[Evaluation]) -> None:
    """Find what benchmarks lack, which the training would refuse when all cells are read."""
    place = config.place_of("eval.benchmarks")
    keys = {"labels_key": config.data.labels_key, "batch_key": config.data.batch_key}
    for one in evaluations:
        if missing := one.missing(keys):
            raise ConfigError(
                f"{place}the benchmark {one.name!r} needs a column of obs, {missing[0]}; set data.{missing[0]}, or "
                f"{missing[0]} below the benchmark."
            )
    size = "training.validation_size" if config.finetune is None else "finetune.validation_size"
    if (config.training if config.finetune is None else config.finetune).validation_size == 0:
        raise ConfigError(
            f"{config.place_of(size)}{size}=0 leaves no cells for a validation, after which eval.benchmarks run; set "
            f"{size} above 0, or remove them."
        )
    entries = [entry for entry in config.eval.benchmarks if isinstance(entry, Mapping)]
    used = [options["dataset"] for entry in entries for options in entry.values() if "dataset" in (options or {})]
    for name in config.eval.datasets:
        if name not in used:
            raise ConfigError(
                f"{config.place_of(f'eval.datasets.{name}')}eval.datasets.{name} is used by no benchmark"
                f"{did_you_mean(name, used)}; name it as the dataset of one, or remove it."
            )


class _Unfilled(TorchFunctionMode):
    """Leaves random weights undrawn: drawing those of the meta device imports a compiler, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn = getattr(func, "__name__", "") in ("normal_", "uniform_")
        tensor = args[0] if args else kwargs.get("tensor")
        return tensor if drawn and tensor is not None and tensor.is_meta else func(*args, **kwargs)


def _check_writable(config: Config, option: str, folder: str) -> None:
    try:
        check_folder(option, folder)
    except OptionError as error:
        raise OptionError(config.place_of(option) + str(error)) from error
    place = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        raise OptionError(
            f"{config.place_of(option)}{option}={folder!r}: {str(place)!r} cannot be written into; "
            "choose another folder, or change its permissions."
        )


def _check_embedding(config: Config, *, replaces: bool) -> None:
    """Refuse to write an embedding over the cells, or over a file that nobody said may go."""
    if config.output.embedding is None:
        return
    output = Path(config.output.embedding)
    place = output.resolve()
    said = f"{config.place_of('output.embedding')}output.embedding={str(output)!r}"
    named = [("data.paths", config.data.paths or []), ("eval.datasets", list(config.eval.datasets.values()))]
    for option, paths in named:
        files = [Path(path).resolve() for path in paths if not is_url(path)]
        if any(file == place or place.match(str(file)) for file in files):  # or what a pattern would find
            raise ConfigError(f"{said} is one of {option}, and would be overwritten; give another name.")
    if output.exists() and not replaces:
        raise ConfigError(f"{said} exists; give another name, or pass overwrite=True (--overwrite) to replace it.")


def _check_file(config: Config, location: list[str | int], path: str) -> None:
    if is_url(path) or any(mark in path for mark in "*?["):
        return
    put_back(path)
    if not Path(path).exists() and not partial_path(path).exists():
        place = config._places.of(location)
        raise MissingFileError(f"{place}the file {path!r} does not exist{similar_file(Path(path))}")


def _check_columns(config: Config) -> None:
    """Look for the layer and the columns that are named, in files and stores that are here."""
    data = config.data
    paths = data.paths or []
    if any(is_url(path) for path in paths):
        return
    named = [data.batch_key, data.labels_key, data.sampling.balance_key, *(data.obs_columns or [])]
    named += [] if data.split.by == "cell" else [data.split.by]
    named += [] if config.finetune is None else named_columns(config)
    columns = list(dict.fromkeys(name for name in named if name is not None))
    with placed(config):
        if len(paths) == 1 and (is_store(paths[0]) or partial_path(paths[0]).exists()):
            open_cells(paths[0], obs=columns, layer=data.layer, gene_key=data.gene_key, modality=data.modality)
            return
        for stream in open_streams(paths, layer=data.layer, modality=data.modality):
            stream.obs(columns)
            if data.gene_key is not None and data.gene_key not in stream.var:
                raise OptionError(
                    f"gene_key={data.gene_key!r} is not a column of var of {stream.name!r}"
                    f"{did_you_mean(data.gene_key, stream.var.columns)} (var has: {listing(stream.var.columns)})"
                )


def model_of(config: Config) -> tuple[ModelSpec, bool]:
    """Return the model of a configuration over a stand-in of its genes, and whether their number is known."""
    default = chosen(config)
    tokenizer = named_options("tokenizer", tokenizer_of(config), default.tokenizer)
    objective, options = named_options("objective", objective_of(config), default.objective)
    vocab, known = _genes(config.data, default.n_top_genes, tokenizer[1])
    if TOKENIZERS.get(tokenizer[0]).needs_medians and vocab.medians is None:
        vocab = vocab.with_medians(np.ones(vocab.n_genes))
    if TOKENIZERS.get(tokenizer[0]).needs_entropies and vocab.entropies is None:
        vocab = vocab.with_entropies(np.ones(vocab.n_genes))
    with placed(config):
        # Options that are found in the cells, e.g. classes, are of no matter here.
        found = get_objective(objective, **options).options_from(lambda key: pd.Series(["a", "b"], dtype="category"))
        try:
            return _resolved(config, vocab, tokenizer, (objective, options | found)), known
        except GeneMismatchError:
            if config.data.gene_vocab != FROM_DATA:
                raise
        # The genes of a table of vectors cannot be compared with those of cells that are not read.
        plain = {name: value for name, value in tokenizer[1].items() if name != "table"}
        return _resolved(config, vocab, (tokenizer[0], plain), (objective, options | found)), False


def _resolved(config: Config, vocab: GeneVocab, tokenizer: Any, objective: Any) -> ModelSpec:
    options = model_options(config)
    return ModelSpec.resolve(chosen(config), vocab, tokenizer=tokenizer, objective=objective, options=options)[0]


def _genes(data: DataConfig, n_default: int | None, tokenizer: dict[str, Any]) -> tuple[GeneVocab, bool]:
    n_genes = data.preprocessing.hvg_selection
    if n_genes is None:
        n_genes = n_top_genes_of(data.gene_vocab, n_default)
    if data.gene_vocab != FROM_DATA:
        vocab = open_vocab(data.gene_vocab)
        return vocab.subset(range(min(n_genes, vocab.n_genes))) if n_genes else vocab, True
    known = bool(n_genes)
    n_genes = n_genes or max(_UNKNOWN_GENES, tokenizer.get("max_len") or 0)
    return GeneVocab.from_genes([f"gene{number}" for number in range(n_genes)]), known
