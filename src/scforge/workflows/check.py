"""Check and show configurations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scforge._checks import check_known
from scforge._registry import check_options
from scforge.config.aliases import get_option, shown, without_secrets
from scforge.config.load import dump_yaml
from scforge.config.schema import Config, DataConfig, ModelConfig
from scforge.data.paths import is_unfinished
from scforge.data.readers import is_url, open_streams
from scforge.data.sources import open_cells
from scforge.data.store import is_store
from scforge.data.vocab import FROM_DATA, GeneVocab, open_vocab
from scforge.datasets.cards import DatasetCard, get_card, list_cards
from scforge.datasets.loading import find_file
from scforge.errors import (
    ConfigError,
    GeneMismatchError,
    MissingFileError,
    OptionError,
    did_you_mean,
    warn,
)
from scforge.estimators.serialize import read_folder
from scforge.estimators.spec import (
    ArchitectureDefaults,
    ModelSpec,
    check_freeze,
    defaults_for,
    n_top_genes_of,
    named_options,
)
from scforge.eval.harness import embedding_evaluations
from scforge.finetuning.base import TASKS
from scforge.finetuning.heads import check_head
from scforge.models._utils import count_parameters, without_weights
from scforge.models.registry import MODELS, option_names
from scforge.tokenizers.base import TOKENIZERS
from scforge.training.objectives.base import OBJECTIVES, get_objective
from scforge.workflows.models import check_model_folder
from scforge.workflows.places import check_places, finetune_section, placed

_MASKED = "masked_gene_prediction"

NOT_OF_TUNING = {
    **dict.fromkeys(
        ("tokenizer", "objective", "model", "data.gene_vocab", "data.max_genes", "data.preprocessing"),
        "is determined by the base model in fine-tuning; remove it from the configuration",
    ),
    "data.pin_memory": "has no effect in fine-tuning; omit data.pin_memory",
    "data.sampling": "has no effect in fine-tuning; use finetune.class_weights instead",
    "data.split": "has no effect in fine-tuning; set finetune.split_by to the column instead",
    "training.validation_size": "has no effect in fine-tuning; set finetune.validation_size instead",
}
"""A mapping from sections and options without effect in fine-tuning to advice."""

TUNING_OF_TASKS = ("labels_key", "batch_key", "head")
"""Options of the section ``finetune`` that only some tasks have."""

FOUND_IN_CELLS = {"perturbation": ("perturbation_key", "control")}
"""Task options that are inferred from the cells if they are not set."""

_UNKNOWN_GENES = 2_048
"""Number of placeholder genes if the vocabulary comes from the data; at least the tokenizers' default maximum."""


def chosen(config: Config) -> ArchitectureDefaults:
    """Return the defaults of the architecture in a configuration."""
    return defaults_for(config.model.architecture, config.model.user_options())


def model_options(config: Config) -> dict[str, Any]:
    """Return the architecture options that the user set, except those in :func:`_unread`."""
    unread = _unread(config)
    return {name: value for name, value in config.model.user_options().items() if name not in unread}


def _unread(config: Config) -> list[str]:
    """Return shared options that the user set but that this architecture does not accept."""
    architecture = chosen(config).architecture
    known = option_names(architecture)
    if known is None:
        return []
    own = getattr(MODELS.get(architecture), "config_names", {})
    shared = set(ModelConfig.model_fields) & set(config.model.user_options())
    return sorted(name for name in shared if own.get(name, name) not in known)


def tokenizer_of(config: Config) -> dict[str, Any]:
    """Return the name and options of the tokenizer that the user set.

    Raises
    ------
    ConfigError
        If two sections contradict each other.
    """
    options = config.tokenizer.user_options()
    if config.data.max_genes is not None:
        options["max_len"] = config.data.max_genes
    strategy = config.tokenizer.strategy or chosen(config).tokenizer
    preprocessing = config.data.preprocessing
    scale = "cp10k" if preprocessing.normalize == "library_size" else "counts"
    transform = f"log1p_{scale}" if preprocessing.log1p else scale
    requested = {"transform": None if transform == "log1p_cp10k" else transform, "target_sum": preprocessing.target_sum}
    for name, value in requested.items():
        if value is None:
            continue
        if name not in TOKENIZERS.get(strategy).option_names():
            raise ConfigError(
                f"data.preprocessing requires values that the tokenizer {strategy!r} does not provide "
                f"({name}={value!r}); remove these options, or set tokenizer.strategy to 'continuous_projection'."
            )
        if options.setdefault(name, value) != value:
            raise ConfigError(
                f"contradicts data.preprocessing, which requires {value!r}; keep only one of the two.",
                argument=f"tokenizer.{name}",
                value=options[name],
            )
    return options if config.tokenizer.strategy is None else {"name": config.tokenizer.strategy, **options}


def objective_of(config: Config) -> dict[str, Any]:
    """Return the name and options of the objective, with masking options from the tokenizer section."""
    options = config.objective.user_options()
    masking = config.tokenizer.masking.user_set() if "masking" in config.tokenizer.model_fields_set else {}
    name = config.objective.name
    if name is None and masking:
        # That of the architecture, if it masks.
        name = chosen(config).objective
        name = name if "mask_ratio" in OBJECTIVES.get(name).option_names() else _MASKED
    if masking and "mask_ratio" not in OBJECTIVES.get(str(name)).option_names():
        raise ConfigError(
            f"has no effect, because the objective {name!r} does not mask; remove tokenizer.masking, or set "
            f"objective.name to {_MASKED!r}.",
            argument="tokenizer.masking",
            value=masking,
        )
    for key in sorted(set(masking) & set(options)):
        if masking[key] != options[key]:
            raise ConfigError(
                f"and objective.{key}={options[key]!r} set the same option; keep only one of the two.",
                argument=f"tokenizer.masking.{key}",
                value=masking[key],
            )
    options = {**masking, **options}
    return options if name is None else {"name": name, **options}


def planned_model(config: Config) -> tuple[ModelSpec, bool]:
    """Return the model specification of a configuration with placeholder genes, and whether their number is known.

    Raises
    ------
    OptionError
        If the architecture, tokenizer or objective is not registered, does not have an option that is set, or they are
        incompatible.
    ConfigError
        If sections contradict each other.

    Warns
    -----
    ScforgeWarning
        If a shared option has no effect on this architecture.
    """
    if config.model.vocab_size is not None:
        raise ConfigError(
            "cannot be set, because it is determined by the genes; remove model.vocab_size, and choose genes with "
            "data.gene_vocab and data.preprocessing.hvg_selection.",
            argument="model.vocab_size",
            value=config.model.vocab_size,
        )
    spec, known = _model_of(config)
    for name in _unread(config):
        prefix = f"{config.place_of(f'model.{name}')}model.{name}={shown(getattr(config.model, name))}"
        warn(f"{prefix} has no effect, because the architecture {spec.architecture!r} has no such option.")
    return spec, known


def check_finetuning(config: Config) -> None:
    """Quickly check the section ``finetune`` and its consistency with other sections.

    Raises
    ------
    ConfigError, OptionError
        If a name or an option is unknown, or options are inconsistent.
    MissingFileError
        If the base model does not exist.
    """
    section = finetune_section(config)
    written = config.user_set()
    for name, problem in NOT_OF_TUNING.items():
        if (value := get_option(written, name)) not in (None, {}):
            raise ConfigError(f"{problem}.", argument=name, value=value, subject=f"{name}={shown(value)}")
    with placed(config, "finetune.base_model"):
        check_model_folder(section.base_model, f"finetune.base_model={section.base_model!r} (--base-model)")
    of_task = {key: value for key in TUNING_OF_TASKS if (value := getattr(section, key)) is not None}
    options = {**section.user_options(), **of_task}
    check_options("task option", section.task, options, TASKS.get(section.task).option_names())
    check_freeze(section.freeze, section.lora, config.training.gradual_unfreezing)
    check_head(section.head)


def columns_of(config: Config) -> dict[str, str]:
    """Return the fine-tuning options that name an obs column, including options of the section ``data``.

    Options of the section ``data`` that the task does not have are left out.
    """
    section = finetune_section(config)
    known = TASKS.get(section.task).option_names()
    # A file may name columns that its benchmarks need, and not its task.
    named = {
        key: getattr(section, key) or (key in known and getattr(config.data, key))
        for key in ("labels_key", "batch_key")
    }
    return {key: value for key, value in named.items() if value}


def named_columns(config: Config) -> list[str]:
    """Return all obs columns that the section ``finetune`` requires."""
    section = finetune_section(config)
    options = section.user_options()
    of_task = [options.get(key) for key in TASKS.get(section.task).keys]
    lists = [value for key, value in options.items() if key.endswith("_keys") and isinstance(value, list)]
    named = [*columns_of(config).values(), section.split_by, section.split_key, *of_task, *sum(lists, [])]
    return list(dict.fromkeys(name for name in named if isinstance(name, str)))


def columns_of_data(data: DataConfig, more: Sequence[str] = ()) -> list[str]:
    """Return the obs columns that a configuration requires, including `more`."""
    split = None if data.split.by == "cell" else data.split.by
    named = [*(data.obs_columns or []), *more, data.batch_key, data.labels_key, data.sampling.balance_key, split]
    return list(dict.fromkeys(name for name in named if name is not None))


def described(config: Config) -> str:
    """Return a short description of the fine-tuning, after reading the base model.

    Raises
    ------
    ConfigError
        If a required option of the task is set neither in the configuration nor in the base model.
    """
    section = finetune_section(config)
    with placed(config, "finetune.base_model"):
        folder = check_model_folder(section.base_model, f"finetune.base_model={section.base_model!r}")
    base = read_folder(folder)
    given = {**base.content["setup"], **section.user_options(), **columns_of(config)}
    for option in TASKS.get(section.task).needed_options():
        if given.get(option) is None and option not in FOUND_IN_CELLS.get(section.task, ()):
            flag = option.replace("_", "-")
            raise ConfigError(f"the task {section.task!r} requires {option}; set finetune.{option} (--{flag}).")
    how = "" if section.lora is False else " with adapters"
    how = " of the head" if section.freeze is True else how
    name, n_genes = base.spec.architecture, base.spec.vocab.n_genes
    return f"{section.task}, by fine-tuning{how} on {name} of {section.base_model} with {n_genes:,} genes"


def check_config(config: Config) -> str:
    """Check a configuration as far as possible without reading the cells, and without a GPU.

    The check covers names, options, sizes and compatibility of the architecture, tokenizer and objective, or of the
    base model and the task. It also covers files, their columns, folders, benchmarks and loggers.

    Parameters
    ----------
    config
        See :func:`scforge.config.load_config`.

    Returns
    -------
    A short description of the model and its training.

    Raises
    ------
    ScforgeError
        If the configuration contains an error; the message describes the first error.

    Examples
    --------
    >>> import scforge
    >>> from scforge.config import load_config, recipe_path
    >>> scforge.datasets.pbmc3k().write_h5ad("cells.h5ad")
    >>> check_config(load_config(recipe_path("light"), ["data.paths=cells.h5ad"]))
    'gene_pooling on tokens of continuous_projection, trained by neighbor_denoising, about 1.0 million parameters'
    """
    with placed(config):
        check_places(config)
        check_settings(config)
        check_benchmarks(config, absent=_absent(config))
        if config.data.source == "local":
            _check_columns(config)
        if config.finetune is not None:
            return described(config)
        spec, known = planned_model(config)
        with without_weights():
            module = spec.build_module()
    size = f", about {count_parameters(module) / 1e6:.1f} million parameters" if known else ""
    return f"{spec.architecture} on tokens of {spec.tokenizer}, trained by {spec.objective}{size}"


def check_settings(config: Config) -> None:
    """Quickly check names and options, so that errors are found before cells are read.

    Parameters
    ----------
    config
        See :func:`scforge.config.load_config`.

    Raises
    ------
    ConfigError, OptionError
        If a name or an option is unknown, or options are inconsistent.
    MissingFileError
        If a file does not exist.
    """
    if config.finetune is None:
        planned_model(config)
    else:
        check_finetuning(config)
    data = config.data
    if data.gene_vocab != FROM_DATA:
        open_vocab(data.gene_vocab)


def _named(config: Config) -> list[tuple[str, dict[str, Any]]]:
    """Return the names of the benchmarks, each with its options."""
    entries = [{entry: None} if isinstance(entry, str) else entry for entry in config.eval.benchmarks or []]
    return [(name, options or {}) for entry in entries for name, options in entry.items()]


def _absent(config: Config) -> dict[str, DatasetCard]:
    """Return the cards of benchmark data sets that are not on this machine, and warn about each."""
    absent: dict[str, DatasetCard] = {}
    for _, options in _named(config):
        name = options.get("dataset")
        if name not in list_cards() or name in {*config.eval.datasets, *absent} or Path(name).exists():
            continue
        try:
            find_file(name)
        except MissingFileError as error:
            warn(f"{config.place_of('eval.benchmarks')}{error} Training requires this data set.")
            absent[name] = get_card(name)
    return absent


def check_benchmarks(config: Config, *, absent: Mapping[str, DatasetCard] | None = None) -> None:
    """Check the benchmarks of a configuration; `absent` contains cards of data sets whose files are missing.

    Raises
    ------
    OptionError, MissingFileError
        If a benchmark, one of its options, or a data set is unknown.
    """
    section = config.eval
    if not section.benchmarks:
        return
    keys = {"labels_key": config.data.labels_key, "batch_key": config.data.batch_key}
    with placed(config, "eval.benchmarks"):
        for benchmark in embedding_evaluations(section.benchmarks, {**section.datasets, **(absent or {})}):
            if missing := benchmark.missing(keys):
                raise ConfigError(
                    f"the benchmark {benchmark.name!r} requires {missing[0]}, a column of obs; set "
                    f"data.{missing[0]}, or set {missing[0]} in the options of the benchmark."
                )
    of_training = "training" if config.finetune is None else "finetune"
    if getattr(config, of_training).validation_size == 0:
        raise ConfigError(
            f"leaves no validation cells, but eval.benchmarks requires validation cells; set "
            f"{of_training}.validation_size above 0, or remove eval.benchmarks.",
            argument=f"{of_training}.validation_size",
            value=0,
        )
    used = [options.get("dataset") for _, options in _named(config)]
    for name, path in section.datasets.items():
        if name not in used:
            raise ConfigError(
                f"is not used by any benchmark{did_you_mean(name, used)}; remove the data set.",
                argument=f"eval.datasets.{name}",
                value=path,
            )


def _check_columns(config: Config) -> None:
    """Check that the specified layer and columns exist in local files and stores."""
    data = config.data
    paths = data.paths or []
    if any(is_url(path) for path in paths):
        return
    columns = columns_of_data(data, [] if config.finetune is None else named_columns(config))
    if len(paths) == 1 and (is_store(paths[0]) or is_unfinished(paths[0])):
        open_cells(paths[0], obs=columns, layer=data.layer, gene_key=data.gene_key, modality=data.modality)
        return
    for stream in open_streams(paths, layer=data.layer, modality=data.modality):
        stream.obs(columns)
        if data.gene_key is not None:
            check_known("gene_key", data.gene_key, stream.var.columns, f"var of {stream.name!r}", error=OptionError)


def _model_of(config: Config) -> tuple[ModelSpec, bool]:
    default = chosen(config)
    tokenizer = named_options("tokenizer", tokenizer_of(config), default.tokenizer)
    objective, options = named_options("objective", objective_of(config), default.objective)
    data, n_genes = config.data, config.data.preprocessing.hvg_selection
    if n_genes is None:
        n_genes = n_top_genes_of(data.gene_vocab, default.n_top_genes)
    if data.gene_vocab != FROM_DATA:
        vocab, known = open_vocab(data.gene_vocab), True
        vocab = vocab.subset(range(min(n_genes, vocab.n_genes))) if n_genes else vocab
    else:
        known, n_names = bool(n_genes), n_genes or max(_UNKNOWN_GENES, tokenizer[1].get("max_len") or 0)
        vocab = GeneVocab.from_genes([f"gene{number}" for number in range(n_names)])
    if TOKENIZERS.get(tokenizer[0]).needs_medians and vocab.medians is None:
        vocab = vocab.with_medians(np.ones(vocab.n_genes))
    if TOKENIZERS.get(tokenizer[0]).needs_entropies and vocab.entropies is None:
        vocab = vocab.with_entropies(np.ones(vocab.n_genes))
    # Options that are found in the cells, e.g. classes, are of no matter here.
    found = get_objective(objective, **options).options_from(lambda key: pd.Series(["a", "b"], dtype="category"))
    parts: dict[str, Any] = {"objective": (objective, options | found), "options": model_options(config)}
    try:
        return ModelSpec.resolve(default, vocab, tokenizer=tokenizer, **parts)[0], known
    except GeneMismatchError:
        if data.gene_vocab != FROM_DATA:
            raise
    # The genes of a table of vectors cannot be compared with those of cells that are not read.
    plain = {name: value for name, value in tokenizer[1].items() if name != "table"}
    return ModelSpec.resolve(default, vocab, tokenizer=(tokenizer[0], plain), **parts)[0], False


def show_config(config: Config) -> str:
    """Return a configuration as YAML, including defaults of its sections and of the classes that they name.

    The result is meant for reading. Options are left out if they depend on the data, or are neither set nor have a
    default.

    Parameters
    ----------
    config
        See :func:`scforge.config.load_config`.

    Returns
    -------
    The YAML text.

    Raises
    ------
    ScforgeError
        If the architecture, tokenizer, objective, task or base model is unknown, or they are incompatible.

    Examples
    --------
    >>> from scforge.config import load_config, recipe_path
    >>> print(show_config(load_config(recipe_path("light"), ["seed=3"])))  # doctest: +ELLIPSIS
    data:
      source: local
      paths:
      - data.h5ad
    ...
    seed: 3
    <BLANKLINE>
    """
    content = _shown_options(config.model_dump())
    if config.finetune is not None:
        with placed(config):
            check_finetuning(config)
        for name in NOT_OF_TUNING:
            section, _, key = name.partition(".")
            (content.get(section, {}) if key else content).pop(key or section, None)
        return dump_yaml(without_secrets(content))
    with placed(config):
        spec, _ = planned_model(config)
    parameters = inspect.signature(MODELS.get(spec.architecture)).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    parts = {
        "model": {"architecture": spec.architecture, **defaults, **spec.model_options},
        "tokenizer": {"strategy": spec.tokenizer, **spec.tokenizer_options},
        "objective": {"name": spec.objective, **spec.objective_options},
    }
    return dump_yaml(without_secrets(content | _shown_options(parts)))


def _shown_options(content: Any) -> Any:
    """Return nested options without None and empty sections, with tuples converted to lists."""
    if isinstance(content, Mapping):
        inner = {name: _shown_options(value) for name, value in content.items() if value is not None}
        return {name: value for name, value in inner.items() if value != {}}
    return list(content) if isinstance(content, tuple) else content
