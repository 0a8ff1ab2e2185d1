"""Renaming, flattening and nesting of weight dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from scforge.errors import DataError


def remap(d: dict[str, Any], rename_map: Mapping[str, str], keys_to_delete: Iterable[str]) -> None:
    """Delete keys of `d`, then rename other keys, in place.

    Parameters
    ----------
    d
        The dictionary to change.
    rename_map
        A mapping from old to new names, applied one after the other. Names that are not in `d` are ignored. An existing
        value under the new name is replaced.
    keys_to_delete
        Names to remove first. Names that are not in `d` are ignored.

    Examples
    --------
    >>> weights = {"norm.gamma": 1, "step": 7}
    >>> remap(weights, rename_map={"norm.gamma": "norm.weight"}, keys_to_delete=["step"])
    >>> weights
    {'norm.weight': 1}
    """
    for key in keys_to_delete:
        d.pop(key, None)
    for old, new in rename_map.items():
        if old in d:
            d[new] = d.pop(old)


def flatten_dict(nested_dict: Mapping[str, Any], parent_key: str = "", sep: str = ".") -> dict[str, Any]:
    """Return a flat dictionary, whose keys are the paths in `nested_dict`.

    Parameters
    ----------
    nested_dict
        Nested dictionaries; an empty dictionary is a value.
    parent_key
        Prefix of all keys.
    sep
        Separator between the parts of a path.

    Returns
    -------
    A mapping from path to value.

    Examples
    --------
    >>> flatten_dict({"a": {"b": 1, "c": {}}})
    {'a.b': 1, 'a.c': {}}
    """
    flat: dict[str, Any] = {}
    for key, value in nested_dict.items():
        path = f"{parent_key}{sep}{key}" if parent_key else key
        if isinstance(value, dict) and value:
            flat |= flatten_dict(value, path, sep)
        else:
            flat[path] = value
    return flat


def unflatten_dict(flat_dict: Mapping[str, Any], sep: str = ".") -> dict[str, Any]:
    """Invert :func:`flatten_dict`.

    Parameters
    ----------
    flat_dict
        A mapping from path to value.
    sep
        Separator between the parts of a path.

    Returns
    -------
    Nested dictionaries.

    Raises
    ------
    DataError
        If a path is both a value and the parent of other paths. This error is a ``ValueError``.

    Examples
    --------
    >>> unflatten_dict({"a.b": 1, "a.c": {}})
    {'a': {'b': 1, 'c': {}}}
    """
    nested: dict[str, Any] = {}
    for path, value in flat_dict.items():
        *parents, last = path.split(sep)
        node = nested
        for depth, part in enumerate(parents, start=1):
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                shorter = sep.join(parents[:depth])
                raise DataError(
                    f"has a value at {shorter!r} and another value below it, at {path!r}; rename one of the two.",
                    argument="flat_dict",
                )
        if isinstance(node.get(last), dict) and not isinstance(value, dict):
            raise DataError(
                f"has a value at {path!r} and other values below it; rename one of these keys.", argument="flat_dict"
            )
        node[last] = value
    return nested
