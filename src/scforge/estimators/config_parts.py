"""The parts that a configuration names: architecture, tokenizer and objective with their options."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from scforge.config.aliases import shown, unknown_option
from scforge.config.schema import Config, ModelConfig
from scforge.errors import ConfigError, OptionError, ScforgeError, warn
from scforge.estimators.defaults import Recipe, recipe_for
from scforge.models.registry import MODELS, option_names, own_names
from scforge.tokenizers.base import TOKENIZERS
from scforge.training.objectives.base import OBJECTIVES

_MASKED = "masked_gene_prediction"


def chosen(config: Config) -> Recipe:
    """Return the defaults of the architecture of a configuration, under its name."""
    return recipe_for(config.model.architecture, config.model.user_options())


def model_options(config: Config) -> dict[str, Any]:
    """Return the options of the architecture that the user set, without :func:`_unread` ones."""
    unread = _unread(config)
    return {name: value for name, value in config.model.user_options().items() if name not in unread}


def _unread(config: Config) -> list[str]:
    """Return fields that most architectures share, that the user set and that this architecture does not take."""
    architecture = chosen(config).architecture
    known = option_names(architecture)
    if known is None:
        return []
    own = getattr(MODELS.get(architecture), "config_names", {})
    shared = set(ModelConfig.model_fields) & set(config.model.user_options())
    return sorted(name for name in shared if own.get(name, name) not in known)


def tokenizer_of(config: Config) -> dict[str, Any]:
    """Return name and options of the tokenizer, as far as the user set them."""
    options = config.tokenizer.user_options()
    if config.data.max_genes is not None:
        options["max_len"] = config.data.max_genes
    options |= {name: value for name, value in _values_of(config).items() if name not in options}
    return options if config.tokenizer.strategy is None else {"name": config.tokenizer.strategy, **options}


def _values_of(config: Config) -> dict[str, Any]:
    """Return the options of a tokenizer that make the values of genes that ``data.preprocessing`` asks for."""
    asked = config.data.preprocessing
    transform = _TRANSFORMS[asked.normalize, asked.log1p]
    usual = transform == _TRANSFORMS["library_size", True]
    options: dict[str, Any] = {} if usual else {"transform": transform}
    return options if asked.target_sum is None else {**options, "target_sum": asked.target_sum}


_TRANSFORMS = {
    ("library_size", True): "log1p_cp10k",
    ("library_size", False): "cp10k",
    ("none", True): "log1p_counts",
    ("none", False): "counts",
}


def _check_values(config: Config, tokenizer: str) -> None:
    """Raise if the tokenizer does not make the values of genes that ``data.preprocessing`` asks for."""
    known, given = TOKENIZERS.get(tokenizer).option_names(), config.tokenizer.user_options()
    for option, value in _values_of(config).items():
        section = config.data.preprocessing
        key = option if option == "target_sum" else "normalize" if section.normalize == "none" else "log1p"
        said = f"{config.place_of(f'data.preprocessing.{key}')}data.preprocessing.{key}={shown(getattr(section, key))}"
        if option not in known:
            raise ConfigError(
                f"{said} has no use with the tokenizer {tokenizer!r}, which makes values of its own; remove it, or "
                "choose 'continuous_projection' or 'rank_value'."
            )
        if given.get(option, value) != value:
            raise ConfigError(f"{said} and tokenizer.{option}={given[option]!r} contradict each other; keep one.")


def objective_of(config: Config) -> dict[str, Any]:
    """Return name and options of the objective; the options of masking stand in the tokenizer's section."""
    options = config.objective.user_options()
    masking = config.tokenizer.masking.user_set() if "masking" in config.tokenizer.model_fields_set else {}
    name = config.objective.name or (_masked_objective(config) if masking else None)
    if masking and "mask_ratio" not in OBJECTIVES.get(str(name)).option_names():
        raise ConfigError(
            f"{config.place_of('tokenizer.masking')}tokenizer.masking is set but the objective {name!r} masks nothing; "
            f"remove it, or set objective.name to {_MASKED!r}."
        )
    for key in sorted(set(masking) & set(options)):
        if masking[key] != options[key]:
            raise ConfigError(
                f"{config.place_of(f'objective.{key}')}tokenizer.masking.{key}={masking[key]} and "
                f"objective.{key}={options[key]} mean the same; keep one of them."
            )
    options = {**masking, **options}
    return options if name is None else {"name": name, **options}


def check_names(config: Config) -> None:
    """Raise unless architecture, tokenizer and objective are registered, and have the options that are set.

    Raises
    ------
    OptionError
        If a name is not known.
    ConfigError
        If there is no such option.
    """
    default = chosen(config)
    names = (
        ("model.architecture", MODELS, default.architecture),
        ("tokenizer.strategy", TOKENIZERS, config.tokenizer.strategy or default.tokenizer),
        ("objective.name", OBJECTIVES, objective_of(config).get("name", default.objective)),
    )
    for option, registry, name in names:
        try:
            registry.get(name)
        except OptionError as error:
            raise OptionError(config.place_of(option) + str(error)) from error
    (_, _, architecture), (_, _, tokenizer), (_, _, objective) = names
    known = option_names(architecture)
    if known is not None:
        own = getattr(MODELS.get(architecture), "config_names", {})
        shared = [name for name in known if name not in own.values()] + list(own)
        unknown = [option for option in model_options(config) if own.get(option, option) not in known]
        _refuse(config, "model", unknown, shared, architecture)
        for name in _unread(config):
            said = f"model.{name}={shown(getattr(config.model, name))}"
            place = config.place_of(f"model.{name}")
            warn(f"{place}{said} has no effect, as {architecture!r} has no such option.")
    for section, name, options in (
        ("tokenizer", tokenizer, TOKENIZERS.get(tokenizer).option_names()),
        ("objective", objective, OBJECTIVES.get(objective).option_names()),
    ):
        unknown = [option for option in getattr(config, section).user_options() if option not in options]
        _refuse(config, section, unknown, options, name)
    _check_values(config, tokenizer)
    with placed(config):
        own_names(architecture, model_options(config))
    if config.model.vocab_size is not None:
        raise ConfigError(
            f"{config.place_of('model.vocab_size')}model.vocab_size={config.model.vocab_size} follows from the genes; "
            "remove it, and choose them with data.gene_vocab and data.preprocessing.hvg_selection."
        )


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
    "tokenizer": "tokenizer.strategy",
    "vocab": "data.gene_vocab",
}
"""Arguments of the front class to where a configuration has them."""

_SECTIONS = ("finetune", "model", "tokenizer", "objective", "data", "training")


@contextlib.contextmanager
def placed(config: Config) -> Iterator[None]:
    """Put the place of the option before the message of an error that begins with ``option=value``."""
    try:
        yield
    except ScforgeError as error:
        place = _place(config, str(error))
        if not place:
            raise
        raise type(error)(place + str(error)) from error


def _place(config: Config, message: str) -> str:
    begin = re.match(r"(\w+)=", message)
    if begin is None:
        return ""
    name = begin[1]
    written = config.user_set()
    holders = [section for section in _SECTIONS if name in written.get(section, {})]
    if holders:
        return config.place_of(f"{holders[0]}.{name}")
    return config.place_of(_SAID[name]) if name in _SAID else ""


def _refuse(config: Config, section: str, unknown: list[str], known: list[str], owner: str) -> None:
    for option in unknown:
        name = f"{section}.{option}"
        value = getattr(config, section).user_options()[option]
        text = unknown_option(name, value, Config, known, f"an option of {owner!r}")
        raise ConfigError(f"{config.place_of(name)}{text}.")


def _masked_objective(config: Config) -> str:
    """Return the objective that masking is meant for where none is named: that of the architecture, if it masks."""
    default = chosen(config).objective
    return default if "mask_ratio" in OBJECTIVES.get(default).option_names() else _MASKED
