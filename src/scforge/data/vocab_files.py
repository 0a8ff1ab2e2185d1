"""Files of gene vocabularies: JSON, with a checksum of all that is in them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scforge._io import atomic_write_text, read_json
from scforge.errors import MissingFileError, ModelFileError, OptionError, first_line

__all__ = ["MOST_BYTES", "read_vocab_file", "write_vocab_file"]

_FORMAT = 2
"""Version of the files. Files without entropies are of version 1, so that earlier releases read them."""

_CHECKSUM = "checksum"
_OPTIONAL = ("aliases", "entropies", _CHECKSUM)
MOST_BYTES, _MOST_ITEMS = 2**26, 4_000_000
"""Limits of what is read: ten times the largest vocabulary that ships."""


def write_vocab_file(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write the fields of a vocabulary, atomically, with the format and a checksum."""
    if content["entropies"] is None:
        content = {"format": 1, **{name: value for name, value in content.items() if name != "entropies"}}
    else:
        content = {"format": _FORMAT, **content}
    atomic_write_text(path, json.dumps({**content, _CHECKSUM: _checksum(content)}))


def read_vocab_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of a vocabulary, each of the type that it must have; those that a file may lack are None then.

    Raises
    ------
    OptionError
        If `path` is no path.
    MissingFileError
        If there is no such file.
    ModelFileError
        If the file is not a vocabulary, or its content does not fit the checksum in it.
    """
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"path={path!r} is not the path of a file; name a vocabulary file.")
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"vocabulary file {str(path)!r} does not exist.")
    try:
        content = read_json(path, most_bytes=MOST_BYTES, most_items=_MOST_ITEMS)
    except ValueError as error:
        raise ModelFileError(f"{str(path)!r} is not an scforge vocabulary file: {first_line(error)}.") from error
    if problem := _problem(content):
        raise ModelFileError(f"{str(path)!r} is not an scforge vocabulary file: {problem}.")
    # Files of the first releases have no checksum; the hash covers their genes.
    expected = content.pop(_CHECKSUM, None)
    if expected is not None and expected != _checksum(content):
        raise ModelFileError(
            f"{str(path)!r} is corrupted: its content does not fit the checksum in it; write it again with save."
        )
    return {"aliases": None, "entropies": None, **content}


def _checksum(content: dict[str, Any]) -> str:
    """SHA-256 over all fields in the order of the file, however the file is laid out."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _problem(content: object) -> str | None:
    """Return what is wrong with the content of a file, or None."""
    if not isinstance(content, dict):
        return "it holds no fields"
    version = content.get("format")
    if type(version) is int and version > _FORMAT:
        return f"its format {version} is of a later scforge; update scforge"
    for name, (fits, what) in _FIELDS.items():
        if name not in content and name not in _OPTIONAL:
            return f"it has no {name!r}"
        if name in content and not fits(content[name]):
            return f"its {name!r} is not {what}"
    return None


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) in (int, float) for item in value)


def _is_names(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _or_none(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or fits(value)


_FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "format": (lambda value: type(value) is int, "a whole number"),
    "release": (_is_text, "a text"),
    "hash": (_is_text, "a text"),
    "special_tokens": (_is_texts, "a list of texts"),
    "genes": (_is_texts, "a list of texts"),
    "symbols": (_or_none(_is_texts), "a list of texts or null"),
    "medians": (_or_none(_is_numbers), "a list of numbers or null"),
    "entropies": (_or_none(_is_numbers), "a list of numbers or null"),
    "aliases": (_or_none(_is_names), "names of genes or null"),
    _CHECKSUM: (_or_none(_is_text), "a text"),
}
