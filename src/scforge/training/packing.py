"""Nested states as JSON and tensors, so that nothing has to be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from scforge.errors import TrainingError

__all__ = ["pack", "unpack"]

_TENSOR, _ITEMS, _TUPLE = "__tensor__", "__items__", "__tuple__"


def pack(content: Any, *, where: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split `content` into what JSON can hold and the tensors in it.

    Parameters
    ----------
    content
        Mappings, lists, tuples, plain values, tensors and arrays, nested as they like.
    where
        What to call it in an error, and the prefix of the tensors' names.

    Returns
    -------
    JSON-safe content, and tensors (on the CPU, contiguous) by name.

    Raises
    ------
    TrainingError
        If there is anything else in it.

    Examples
    --------
    >>> plain, tensors = pack({"step": 3, 0: (torch.ones(2), None)}, where="state")
    >>> list(tensors)
    ['state.0']
    >>> unpack(plain, tensors)
    {'step': 3, 0: (tensor([1., 1.]), None)}
    """
    tensors: dict[str, torch.Tensor] = {}
    return _pack(content, where, tensors), tensors


def unpack(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return what :func:`pack` was given."""
    if isinstance(plain, list):
        return [unpack(value, tensors) for value in plain]
    if not isinstance(plain, dict):
        return plain
    if _TENSOR in plain:
        return tensors[plain[_TENSOR]]
    if _TUPLE in plain:
        return tuple(unpack(value, tensors) for value in plain[_TUPLE])
    if _ITEMS in plain:
        return {key: unpack(value, tensors) for key, value in plain[_ITEMS]}
    return {key: unpack(value, tensors) for key, value in plain.items()}


def _pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        # Tensors that share memory cannot stand in one file of safetensors, hence the copy.
        key = f"{name.partition('.')[0]}.{len(tensors)}"
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: key}
    if isinstance(value, Mapping):
        items = [(key, _pack(part, f"{name}.{key}", tensors)) for key, part in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("__") for key, _ in items)
        if not all(isinstance(key, str | int) for key, _ in items):
            raise TrainingError(f"{name} has a key that is neither text nor a whole number, which cannot be saved.")
        return dict(items) if plain else {_ITEMS: [list(item) for item in items]}
    if isinstance(value, list | tuple):
        parts = [_pack(part, f"{name}.{i}", tensors) for i, part in enumerate(value)]
        return parts if isinstance(value, list) else {_TUPLE: parts}
    raise TrainingError(
        f"{name} is of type {type(value).__name__!r}, which cannot be saved in a checkpoint; keep numbers, text, "
        "lists, dictionaries and tensors in the state of a callback."
    )
