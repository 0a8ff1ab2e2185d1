"""What can be checked of the section ``finetune`` of a configuration without reading the cells."""

from __future__ import annotations

from typing import Any

from scforge.config.aliases import shown, unknown_option
from scforge.config.schema import Config, FinetuneConfig
from scforge.errors import ConfigError, OptionError
from scforge.estimators.config_parts import placed
from scforge.estimators.model_folder import check_model_folder
from scforge.estimators.saving import read_folder
from scforge.estimators.tuning import check_freeze
from scforge.finetuning.base import TASKS, Task
from scforge.finetuning.heads import check_head

OF_THE_BASE = ("tokenizer", "objective", "model", "data.gene_vocab", "data.max_genes", "data.preprocessing")
ELSEWHERE = {
    "data.pin_memory": "leave it out",
    "data.sampling": "weigh classes with finetune.class_weights",
    "data.split": "name the column in finetune.split_by",
    "training.validation_size": "set finetune.validation_size",
}
"""Sections and options without use in a fine-tuning, to what to do instead."""

TUNING_OF_TASKS = ("labels_key", "batch_key", "head")
"""Options of the section that only some tasks have."""

FOUND_IN_CELLS = {"perturbation": ("perturbation_key", "control")}
"""Options of tasks that are looked for in the cells where they are not set."""


def finetune_section(config: Config) -> FinetuneConfig:
    """Return the section ``finetune``.

    Raises
    ------
    ConfigError
        If there is none.
    """
    if config.finetune is None:
        raise ConfigError(
            "the configuration has no section finetune; add finetune: {base_model: checkpoints/final, task: "
            "annotation}, or train a new model with scforge train."
        )
    return config.finetune


def check_finetuning(config: Config) -> None:
    """Check the section ``finetune``, and that the other sections go with it; quick.

    Raises
    ------
    ConfigError, OptionError
        If something is not known, or does not go together.
    MissingFileError
        If there is no base model.
    """
    section = finetune_section(config)
    _refuse_what_is_settled(config)
    place = config.place_of("finetune.base_model")
    check_model_folder(section.base_model, f"{place}finetune.base_model={section.base_model!r} (--base-model)")
    try:
        task = TASKS.get(section.task)
    except OptionError as error:
        raise OptionError(config.place_of("finetune.task") + str(error)) from error
    _check_options(config, section, task)
    with placed(config):
        check_freeze(section.freeze, section.lora, config.training.gradual_unfreezing)
        check_head(section.head)
    if isinstance(section.evaluate, str) and section.evaluate != section.task:
        raise ConfigError(
            f"{config.place_of('finetune.evaluate')}finetune.evaluate={section.evaluate!r} is no evaluation of the "
            f"task {section.task!r}; set it to true (--eval) for its own."
        )
    if section.evaluate and not section.test_size and section.split_key is None:
        raise ConfigError(
            f"{config.place_of('finetune.test_size')}finetune.test_size=0 leaves no cells to evaluate on; set it above "
            "0, or remove finetune.evaluate (--eval)."
        )


def columns_of(config: Config) -> dict[str, str]:
    """Return the options of a fine-tuning that name a column of obs, those of the section ``data`` included.

    Keys that the task does not have, are left out.
    """
    section = finetune_section(config)
    known = TASKS.get(section.task).option_names()
    named: dict[str, Any] = {}
    for key in ("labels_key", "batch_key"):
        own = getattr(section, key)
        # A file may name columns that its benchmarks need, and not its task.
        named[key] = own if own is not None else getattr(config.data, key) if key in known else None
    return {key: value for key, value in named.items() if value is not None}


def named_columns(config: Config) -> list[str]:
    """Return all columns of obs that the section ``finetune`` needs."""
    section = finetune_section(config)
    options = section.user_options()
    of_task = [options.get(key) for key in TASKS.get(section.task).keys]
    lists = [value for key, value in options.items() if key.endswith("_keys") and isinstance(value, list)]
    named = [*columns_of(config).values(), section.split_by, section.split_key, *of_task, *sum(lists, [])]
    return list(dict.fromkeys(name for name in named if isinstance(name, str)))


def described(config: Config) -> str:
    """Return what would be fine-tuned, in a few words; reads the base model.

    Raises
    ------
    ConfigError
        If the task lacks an option that neither the configuration nor the base model has.
    """
    section = finetune_section(config)
    folder = check_model_folder(section.base_model, f"finetune.base_model={section.base_model!r}")
    base, vocab, _ = read_folder(folder)
    cls = TASKS.get(section.task)
    given = {**base["setup"], **section.user_options(), **columns_of(config)}
    for option in cls.needed_options():
        if given.get(option) is None and option not in FOUND_IN_CELLS.get(section.task, ()):
            raise ConfigError(
                f"{config.place_of('finetune.task')}the task {section.task!r} needs {option}; set finetune.{option} "
                f"(--{option.replace('_', '-')})."
            )
    how = "" if section.lora is False else " with adapters"
    how = " of the head" if section.freeze is True else how
    name = base["architecture"]["name"]
    return f"{section.task}, by fine-tuning{how} on {name} of {section.base_model} with {vocab.n_genes:,} genes"


def _refuse_what_is_settled(config: Config) -> None:
    written = config.user_set()
    for name in (*OF_THE_BASE, *ELSEWHERE):
        section, _, key = name.partition(".")
        value = written.get(section)
        value = value if not key or value is None else value.get(key)
        if value is None or value == {}:
            continue
        reason = (
            "is settled by the base model of a fine-tuning; remove it"
            if name in OF_THE_BASE
            else f"has no use in a fine-tuning; {ELSEWHERE[name]}"
        )
        raise ConfigError(f"{config.place_of(name)}{name}={shown(value)} {reason}.")


def _check_options(config: Config, section: FinetuneConfig, task: type[Task]) -> None:
    fields, known = list(FinetuneConfig.model_fields), task.option_names()
    written = section.user_set()
    for key in TUNING_OF_TASKS:
        if written.get(key) is not None and key not in known:
            raise ConfigError(
                f"{config.place_of(f'finetune.{key}')}finetune.{key}={written[key]!r} is of no use to the task "
                f"{section.task!r}; remove it."
            )
    siblings = [*fields, *[name for name in known if name not in fields]]
    for key, value in section.user_options().items():
        if key not in known:
            name = f"finetune.{key}"
            text = unknown_option(name, value, Config, siblings, f"an option of {section.task!r}")
            raise ConfigError(f"{config.place_of(name)}{text}.")
