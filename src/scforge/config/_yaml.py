"""YAML as configurations use it: safe, without duplicate keys, and with ``1e-4`` a number; and TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

import yaml

from scforge.config._messages import shown
from scforge.errors import ConfigError

__all__ = ["dump_yaml", "parse_toml", "parse_yaml"]

# YAML 1.1, which PyYAML follows, asks for a dot and a sign in a number with an exponent.
_NUMBER = re.compile(r"[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$|[-+]?\.[\d_]+[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            # Some scalars look like a date or a number and are none, e.g. 2024-13-01; PyYAML leaves that to Python.
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown(node.value)} is not a value of type {kind}; put text in quotes", node.start_mark
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {shown(key.value)} stands twice in its section", key.start_mark
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


_HINTS = {
    "cannot start any token": "indent with spaces, never with tab characters",
    "did not find expected": "check the indentation",
    "expected <block end>": "check the indentation: the keys of one section start in the same column",
    "mapping values are not allowed": "check the indentation, and put text that holds ': ' in quotes",
}
"""What PyYAML says, to what is mostly meant."""


def parse_yaml(text: str, *, where: str) -> tuple[Any, yaml.Node | None]:
    """Return the content of a YAML document, and the node that says where each part of it stands.

    Parameters
    ----------
    text
        The document.
    where
        What to call it in an error.

    Raises
    ------
    ConfigError
        If the text is not YAML, has a key twice in one section, or holds objects other than plain values.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        return (None, None) if root is None else (loader.construct_document(root), root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        reason += "".join(f"; {hint}" for problem, hint in _HINTS.items() if problem in reason)
    except yaml.reader.ReaderError as error:
        place, reason = f", character {error.position + 1}", f"{error.reason}: #x{error.character:04x}"
    except RecursionError:
        place, reason = "", "it is nested too deeply"
    raise ConfigError(f"{where}{place} is not valid YAML: {' '.join(reason.split()).rstrip('.')}.")


_TOML_LINE = re.compile(
    r"""\s*(?:(\[\[?)\s*)?((?:"[^"]*"|'[^']*'|[\w-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w-]+))*)\s*(?:=|\])"""
)
_TOML_KEY = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([\w-]+))\s*(?:\.|$)""")


def parse_toml(text: str, *, where: str) -> tuple[Any, yaml.Node | None]:
    """Do what :func:`parse_yaml` does, with a TOML document.

    The module of Python tells no lines, so that those of keys are looked up in the text; a key inside an inline table
    has the line of the table.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at (line \d+, column \d+)\)", str(error))
        reason = re.sub(r"\s*\(at [^)]*\)", "", str(error)).rstrip(".")
        raise ConfigError(f"{where}{f', {place[1]}' if place else ''} is not valid TOML: {reason}.") from None
    except RecursionError:
        raise ConfigError(f"{where} is not valid TOML: it is nested too deeply.") from None
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines()):
        if (found := _TOML_LINE.match(line)) is None:
            continue
        keys = tuple(next(part for part in key if part) for key in _TOML_KEY.findall(found[2]))
        if found[1] is not None:
            table, keys = keys, ()
        for depth in range(1, len(table + keys) + 1):
            lines.setdefault((table + keys)[:depth], number)
    return content or None, _toml_node(content, (), lines, 0)


def _toml_node(value: Any, path: tuple[str, ...], lines: Mapping[tuple[str, ...], int], line: int) -> yaml.Node:
    """Return a node as PyYAML would compose it, as far as places are told from it."""
    mark = yaml.Mark("", 0, line, 0, None, 0)
    if isinstance(value, Mapping):
        pairs = []
        for key, inner in value.items():
            at = lines.get((*path, key), line)
            name = yaml.ScalarNode("tag:yaml.org,2002:str", key, yaml.Mark("", 0, at, 0, None, 0))
            pairs.append((name, _toml_node(inner, (*path, key), lines, at)))
        return yaml.MappingNode("tag:yaml.org,2002:map", pairs, mark)
    if isinstance(value, list):
        return yaml.SequenceNode("tag:yaml.org,2002:seq", [_toml_node(one, path, lines, line) for one in value], mark)
    return yaml.ScalarNode("tag:yaml.org,2002:str", str(value), mark)


def dump_yaml(content: Any, *, one_line: bool = False) -> str:
    """Return `content` as YAML that :func:`parse_yaml` reads back.

    Parameters
    ----------
    content
        Plain values in dicts and lists.
    one_line
        Whether all stands on one line, however long it is.

    Raises
    ------
    ConfigError
        If `content` holds something other than plain values.
    """
    try:
        options = {"default_flow_style": True, "width": float("inf")} if one_line else {"width": 120}
        return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options)
    except yaml.representer.RepresenterError as error:
        kind = type(error.args[-1]).__name__
        raise ConfigError(
            f"an option holds a value of type {kind}, which has no place in a file; use plain values."
        ) from error
    except RecursionError as error:
        raise ConfigError("an option holds itself, which has no place in a file; use plain values.") from error
