"""A configuration with all that is not said in it: ``scforge config show``."""

from __future__ import annotations

import inspect
from typing import Any

from scforge.config.aliases import without_secrets
from scforge.config.load import dump_yaml
from scforge.config.schema import Config, FinetuneConfig, MaskingConfig, ModelConfig, Section
from scforge.estimators.config_check import model_of
from scforge.estimators.config_parts import check_names, chosen, model_options
from scforge.estimators.encoder import Encoder
from scforge.estimators.finetune_check import ELSEWHERE, OF_THE_BASE, TUNING_OF_TASKS, check_finetuning, columns_of
from scforge.estimators.vocabulary import n_top_genes_of
from scforge.finetuning.base import TASKS, with_adapters
from scforge.models.registry import MODELS, own_names
from scforge.tokenizers.base import TOKENIZERS
from scforge.training.datamodule import CellDataModule
from scforge.training.objectives.base import TrainingDefaults

_BALANCE = {"warmup_epochs": "balance_epochs", "start": "balance_start", "end": "balance_end"}
_OF_THE_DATA = ("max_seq_len", "gene_vectors")
"""Options of an architecture that follow from the vocabulary where the user does not set them."""
_OF_TOKENIZER = ("normalize", "target_sum", "log1p")
"""Options of preprocessing that the tokenizer shows as its own."""


def show_config(config: Config) -> str:
    """Return a configuration as YAML, with the defaults of the sections, and of the classes that they name.

    What the user set is marked. What depends on the data stands there as a comment, so the text can be read again, and
    means the same.

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
        If architecture, tokenizer and objective are not known, or do not fit; or the task, or the base model.

    Examples
    --------
    >>> from scforge.config import load_config, recipe_path
    >>> print(show_config(load_config(recipe_path("light"), ["seed=3"])))  # doctest: +ELLIPSIS
    data:
      source: local
      paths: [data.h5ad]  # set
      # organism:
      ...
    seed: 3  # set
    <BLANKLINE>
    """
    written = config.user_set()
    content = {name: _plain(section) for name, section in config if name != "eval" or config.eval.benchmarks}
    if config.finetune is None:
        check_names(config)
        del content["finetune"]
        _fill(content, config, written)
    else:
        check_finetuning(config)
        _fill_finetuning(content, config)
    return "\n".join(_lines(without_secrets(content), written)) + "\n"


def _plain(value: Any) -> Any:
    return {name: _plain(inner) for name, inner in value} if isinstance(value, Section) else value


def _fill(content: dict[str, Any], config: Config, written: dict[str, Any]) -> None:
    """Put the defaults of the named classes into `content`, and move what the user set to where it is shown."""
    spec, _ = model_of(config)
    aim, made = spec.build_objective(), spec.tokenizer_options
    architecture = MODELS.get(spec.architecture)

    model = _constructor_defaults(architecture) | spec.model_options
    asked = own_names(spec.architecture, model_options(config))
    for name in (*_OF_THE_DATA, *aim.model_options()):
        if name not in asked:
            model.pop(name, None)
    shared = {own: name for name, own in getattr(architecture, "config_names", {}).items()}
    content["model"] = {"architecture": spec.architecture, **_renamed(model, shared)}
    if "model" in written:
        set_ = _renamed(own_names(spec.architecture, written["model"]), shared)
        written["model"] = set_

    options = {name: value for name, value in made.items() if name not in ("max_len", "dropped")}
    content["tokenizer"] = {"strategy": spec.tokenizer, **options}
    data = content["data"]
    data["max_genes"] = made["max_len"] or TOKENIZERS.get(spec.tokenizer).default_max_len
    for name in _OF_TOKENIZER:
        if name not in written["data"].get("preprocessing", {}):
            del data["preprocessing"][name]
    if data["preprocessing"]["hvg_selection"] is None:
        data["preprocessing"]["hvg_selection"] = n_top_genes_of(config.data.gene_vocab, chosen(config).n_top_genes) or 0
    if data["sampling"]["balance_key"] is not None:
        given = inspect.signature(CellDataModule).parameters
        for name, argument in _BALANCE.items():
            if data["sampling"][name] is None:
                data["sampling"][name] = given[argument].default

    found = {name for name in spec.objective_options if name == "conditions"} - set(config.objective.user_options())
    learned = {name: value for name, value in spec.objective_options.items() if name not in found}
    masking = {name: learned.pop(name) for name in MaskingConfig.model_fields if name in learned}
    content["objective"] = {"name": spec.objective, **learned}
    if masking:
        content["tokenizer"]["masking"] = masking
        for name in masking:
            if name in written.get("objective", {}):
                holder = written.setdefault("tokenizer", {}).setdefault("masking", {})
                holder[name] = written["objective"].pop(name)

    _fill_training(content, aim.defaults)


def _fill_finetuning(content: dict[str, Any], config: Config) -> None:
    """Leave out what the base model settles, and put in the defaults of the task."""
    for name in (*OF_THE_BASE, *ELSEWHERE):
        section, _, key = name.partition(".")
        (content[section] if key else content).pop(key or section, None)
    tuning = content["finetune"] | columns_of(config)
    task = TASKS.get(tuning["task"])
    options = {name: parameter.default for name, parameter in inspect.signature(task).parameters.items()}
    shown = {name: value for name, value in tuning.items() if name in FinetuneConfig.model_fields}
    for name, default in options.items():  # in the order of the task, whoever set them
        default = None if default is inspect.Parameter.empty else default
        shown[name] = default if tuning.get(name) is None else tuning[name]
    for name in set(TUNING_OF_TASKS) - set(options):
        shown.pop(name)
    content["finetune"] = shown
    _fill_training(content, with_adapters(task.defaults) if tuning.get("lora") else task.defaults)


def _fill_training(content: dict[str, Any], defaults: TrainingDefaults) -> None:
    training, data = content["training"], content["data"]
    if training["batch_size"] is None and data["max_tokens_per_batch"] is None:
        training["batch_size"] = defaults.batch_size
    if training["optimizer"]["name"] == "adamw":
        _default(training["optimizer"], lr=defaults.lr, weight_decay=defaults.weight_decay)
    _default(training["scheduler"], name=defaults.schedule)
    given = inspect.signature(Encoder.train).parameters
    _default(training, early_stopping_patience=given["early_stopping_patience"].default)
    if content["output"]["log_dir"] is not None:
        _default(content["output"], loggers=["csv"])


def _default(section: dict[str, Any], **values: Any) -> None:
    section.update({name: value for name, value in values.items() if section[name] is None})


def _constructor_defaults(cls: type) -> dict[str, Any]:
    """Return what an architecture takes where nothing is said: the defaults of its constructor, or of all."""
    fields = ModelConfig.model_fields
    options: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD or name == "vocab_size":
            continue
        if parameter.default is not parameter.empty:
            options[name] = parameter.default
        elif name in fields:
            options[name] = fields[name].default
    return options


def _renamed(options: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in options.items()}


def _lines(content: dict[str, Any], written: Any, indent: str = "") -> list[str]:
    """Return lines of YAML: None as a comment, and a mark behind what is in `written`."""
    lines: list[str] = []
    for name, value in content.items():
        is_set = isinstance(written, dict) and name in written
        if isinstance(value, dict) and value:
            lines += [f"{indent}{name}:", *_lines(value, written[name] if is_set else None, f"{indent}  ")]
        elif value is None:
            lines.append(f"{indent}# {name}:")
        else:
            lines.append(f"{indent}{_text(name)}: {_text(value)}{'  # set' if is_set else ''}")
    return lines


def _text(value: Any) -> str:
    """Return a value as YAML on one line."""
    # In a list, because a document of text alone is not quoted as it has to be behind a key.
    return dump_yaml([list(value) if isinstance(value, tuple) else value], one_line=True).strip()[1:-1]
