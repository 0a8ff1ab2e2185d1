"""Reading and writing configuration files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from scforge.config._messages import config_error, shown, without_secrets
from scforge.config._places import Places, Source
from scforge.config._yaml import dump_yaml, parse_toml, parse_yaml
from scforge.config.aliases import AliasError, apply_aliases
from scforge.config.schema import Config
from scforge.errors import SECRET, ConfigError

__all__ = ["dump_config", "load_config"]


def load_config(
    path: str | os.PathLike[str] | None,
    overrides: Sequence[str] = (),
    *,
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> Config:
    """Read a configuration file.

    Parameters
    ----------
    path
        A YAML file, or a TOML file, whose name ends in ``.toml``; None for a configuration that `flags` and
        `overrides` make.
    overrides
        Options that take the place of those in the file, as ``"training.batch_size=32"``. Values are read as YAML; a
        mapping is merged into its section. The last of several for one option counts.
    flags
        Options that are said in other ways: what to call each in a message, to the option and its value. They count
        more than the file, and less than `overrides`.

    Returns
    -------
    The checked configuration. Paths in it stay as written, so relative ones start at the working directory.

    Raises
    ------
    ConfigError
        If the file cannot be read, is not YAML or TOML, or has a key or a value that cannot be used. The message names
        the line of the file, or the override.

    Examples
    --------
    >>> from scforge.config import load_config, recipe_path
    >>> config = load_config(recipe_path("light"), ["training.batch_size=64"])
    >>> config.model.architecture, config.training.batch_size
    ('gene_pooling', 64)
    """
    content, source = ({}, Source("the command line", None)) if path is None else _read(Path(path))
    content = _canonical(content, source)
    sources = [source]
    given = [_of_flag(where, *option) for where, option in (flags or {}).items()]
    for changes, source in [*given, *map(_parse_override, overrides)]:
        try:
            content = _merged(content, _canonical(changes, source))
        except AliasError as error:
            raise ConfigError(Places(sources).of(error.options[0].split(".")) + str(error)) from None
        sources.append(source)
    places = Places(sources)
    try:
        config = Config.model_validate(content)
    except ValidationError as error:
        raise config_error(error, Config, places) from None
    config._places = places
    return config


def dump_config(config: Config) -> str:
    """Return `config` as YAML text that :func:`load_config` reads back to an equal configuration.

    Only what the user set is written, so that defaults may improve with the package. Credentials are not: ``***``
    stands for those in URLs and for text in ``data.storage_options``; it has to be replaced before the text is used.

    Parameters
    ----------
    config
        The configuration.

    Returns
    -------
    The text; empty sections and defaults are left out.

    Examples
    --------
    >>> from scforge.config import Config
    >>> print(dump_config(Config(data={"paths": "cells.h5ad"}, training={"lr": 1e-4})))
    data:
      paths:
      - cells.h5ad
    training:
      optimizer:
        lr: 0.0001
    <BLANKLINE>
    """
    content = config.user_set()
    with contextlib.suppress(RecursionError):  # dump_yaml reports what contains itself
        content = without_secrets(content)
    return dump_yaml(content)


def _canonical(content: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return the content of a source with each option in the place where the schema has it."""
    try:
        return apply_aliases(content)
    except AliasError as error:
        found = [source.find(option.split("."))[1] for option in error.options]
        lines = list(dict.fromkeys(str(line) for line in found if line is not None))
        numbered = f", line{'s' if len(lines) > 1 else ''} {' and '.join(lines)}" if lines else ""
        raise ConfigError(f"{source.where}{numbered}: {error}") from None


def _read(path: Path) -> tuple[Mapping[str, Any], Source]:
    name = repr(str(path))
    if path.is_dir():
        raise ConfigError(f"config={name} is a folder; name the file in it.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"config={name} does not exist; check the path.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config={name} is not a text file; name a YAML or TOML file.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"config={name} cannot be read: {reason}.") from None
    parse = parse_toml if path.suffix == ".toml" else parse_yaml
    content, root = parse(text, where=str(path))
    if content is None:
        raise ConfigError(f"config={name} is empty; it needs at least a section data with paths.")
    if not isinstance(content, Mapping):
        raise ConfigError(f"config={name} holds {shown(content)} instead of sections such as data and training.")
    return content, Source(str(path), root)


def _of_flag(where: str, name: str, value: Any) -> tuple[dict[str, Any], Source]:
    keys = name.split(".")
    content = value
    for key in reversed(keys):
        content = {key: content}
    return content, Source(where, None, tuple(keys))


def _parse_override(override: str) -> tuple[dict[str, Any], Source]:
    name, equals, text = override.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"override={override!r} is not an option; write it as section.option=value.")
    said = f"{name}={SECRET}" if "storage_option" in name else override
    where = f"override {said!r}"
    content, root = parse_yaml(text, where=where)
    for key in reversed(keys):
        content = {key: content}
    return content, Source(where, root, tuple(keys))


def _merged(content: Mapping[str, Any], changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    merged = dict(content)
    for key, change in changes.items():
        old = merged.get(key)
        # An option such as finetune.lora is true, or a section.
        if isinstance(change, Mapping) and old is not None and not isinstance(old, bool):
            if not isinstance(old, Mapping):
                raise AliasError(f"{prefix}{key}={shown(old)} is not a section with options.", f"{prefix}{key}")
            change = _merged(old, change, f"{prefix}{key}.")
        merged[key] = change
    return merged
