"""Load a configuration from YAML or TOML, with overrides."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from scforge._opening import check_plain, check_regular, unfit
from scforge.config.aliases import AliasError, Places, Source, apply_aliases, config_error, shown, without_secrets
from scforge.config.schema import Config
from scforge.errors import SECRET, ConfigError, first_line

# YAML 1.1, which PyYAML follows, asks for a dot and a sign in a number with an exponent.
_NUMBER = re.compile(r"[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$|[-+]?\.[\d_]+[eE][-+]?\d+$")

_MAX_PARTS = 100_000
"""Maximum number of keys and values of a document, where each use of an alias counts all that it stands for."""

_HINTS = {
    "cannot start any token": "indent with spaces, never with tab characters",
    "did not find expected": "check the indentation",
    "expected <block end>": "check the indentation: the keys of one section start in the same column",
    "mapping values are not allowed": "check the indentation, and quote text that contains ': '",
}
"""A mapping from PyYAML messages to advice."""


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            # Some scalars look like a date or a number but are not, e.g. 2024-13-01; PyYAML leaves that to Python.
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown(node.value)} is not a value of type {kind}; put text in quotes", node.start_mark
            ) from error
        if problem := unfit(value):
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {shown(key.value)} occurs twice in its section", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        # Unicode's own line breaks survive in double quotes only, where they and others are escaped.
        style = '"' if any(mark in data for mark in "\n\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)

for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def _parts(content: Any) -> Iterable[Any] | None:
    """Return the parts of a YAML node, or None for a scalar."""
    if isinstance(content, yaml.MappingNode):
        return chain.from_iterable(content.value)
    return content.value if isinstance(content, yaml.SequenceNode) else None


def parse_yaml(text: str, *, where: str) -> tuple[Any, yaml.Node | None]:
    """Return the content of a YAML document, and the node with the position of each part.

    Parameters
    ----------
    text
        The document.
    where
        Name of the document for error messages.

    Raises
    ------
    ConfigError
        If the text is not YAML, has a duplicate key in a section, or contains objects other than plain values.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None, None
        check_plain(root, _parts, most=_MAX_PARTS)
        return loader.construct_document(root), root
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        reason += "".join(f"; {hint}" for problem, hint in _HINTS.items() if problem in reason)
    except yaml.reader.ReaderError as error:
        position, reason = f", character {error.position + 1}", f"{error.reason}: #x{error.character:04x}"
    except RecursionError:
        position, reason = "", "brackets or sections are nested too deeply"
    except ValueError as error:
        position, reason = "", str(error)
    raise ConfigError(f"{where}{position} is not valid YAML: {' '.join(reason.split()).rstrip('.')}.")


def parse_toml(text: str, *, where: str) -> Any:
    """Return the content of a TOML document; the TOML parser does not report line numbers."""
    try:
        content = tomllib.loads(text)
        check_plain(content, most=_MAX_PARTS)
    except RecursionError:
        raise ConfigError(f"{where} is not valid TOML: brackets or sections are nested too deeply.") from None
    except ValueError as error:
        raise ConfigError(f"{where} is not valid TOML: {first_line(error)}.") from None
    return content or None


def dump_yaml(content: Any) -> str:
    """Return `content` as YAML text that :func:`parse_yaml` can read.

    Parameters
    ----------
    content
        Plain values in dicts and lists.

    Raises
    ------
    ConfigError
        If `content` contains objects other than plain values.
    """
    try:
        return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    except yaml.representer.RepresenterError as error:
        kind = type(error.args[-1]).__name__
        raise ConfigError(
            f"an option contains a value of type {kind}, which cannot be written to a file; use plain values."
        ) from error


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
        A YAML file, or a TOML file whose name ends in ``.toml``. If None, uses only `flags` and `overrides`.
    overrides
        Options that replace options in the file, e.g. ``"training.batch_size=32"``. Values are read as YAML, and a
        mapping is merged into its section. The last override of an option takes precedence.
    flags
        Options set by flags: a mapping from the name in messages to the option and its value. Flags take precedence
        over the file, and `overrides` take precedence over flags.

    Returns
    -------
    The checked configuration. Paths are not changed, so relative paths refer to the working directory.

    Raises
    ------
    ConfigError
        If the file cannot be read, is not YAML or TOML, or contains an invalid key or value. The message names the line
        of the file, or the override.

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
    given = [
        (_under(name.split("."), value), Source(where, None, tuple(name.split("."))))
        for where, (name, value) in (flags or {}).items()
    ]
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
    """Return `config` as YAML text from which :func:`load_config` creates an equal configuration.

    Only options that the user set are written, so defaults may change in later versions. Credentials in URLs and text
    in ``data.storage_options`` are replaced by ``***``; fill them in before using the file.

    Parameters
    ----------
    config
        The configuration.

    Returns
    -------
    The YAML text, without empty sections and defaults.

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
    return dump_yaml(without_secrets(config.user_set()))


def _canonical(content: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return the content of a source with canonical option names."""
    try:
        return apply_aliases(content)
    except AliasError as error:
        places = [source.find(option.split("."))[1] for option in error.options]
        lines = list(dict.fromkeys(str(line) for line in places if line is not None))
        numbered = f", line{'s' if len(lines) > 1 else ''} {' and '.join(lines)}" if lines else ""
        raise ConfigError(f"{source.where}{numbered}: {error}") from None


def _read(path: Path) -> tuple[Mapping[str, Any], Source]:
    name = str(path)
    check_regular(path, ConfigError)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot be read: {reason}; pass a YAML or TOML file.", config=name) from None
    if path.suffix == ".toml":
        content, root = parse_toml(text, where=str(path)), None
    else:
        content, root = parse_yaml(text, where=str(path))
    if content is None:
        raise ConfigError("is empty; add at least a data section with paths.", config=name)
    if not isinstance(content, Mapping):
        raise ConfigError(f"contains {shown(content)} instead of sections such as data and training.", config=name)
    return content, Source(str(path), root)


def _under(keys: Sequence[str], content: Any) -> Any:
    for key in reversed(keys):
        content = {key: content}
    return content


def _parse_override(override: str) -> tuple[dict[str, Any], Source]:
    name, equals, text = override.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys):
        raise ConfigError("is not an option; write it as section.option=value.", override=override)
    shown_override = f"{name}={SECRET}" if "storage_option" in name else override
    where = f"override {shown_override!r}"
    content, root = parse_yaml(text, where=where)
    return _under(keys, content), Source(where, root, tuple(keys))


def _merged(content: Mapping[str, Any], changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    merged = dict(content)
    for key, change in changes.items():
        old = merged.get(key)
        # An option such as finetune.lora is true, or a section.
        if isinstance(change, Mapping) and old is not None and not isinstance(old, bool):
            if not isinstance(old, Mapping):
                raise AliasError(f"{prefix}{key} must be a section of options, but is {shown(old)}.", f"{prefix}{key}")
            change = _merged(old, change, f"{prefix}{key}.")
        merged[key] = change
    return merged
