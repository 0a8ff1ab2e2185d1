"""Classes of cells that an objective learns from: the type, the batch, a condition.

Shapes: N cells of a source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge.errors import DataError, OptionError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["check_classes", "check_key", "classes_found", "classes_of", "numbers_of"]


def check_key(argument: str, key: Any) -> str | None:
    """Return the name of a column of obs, or None.

    Raises
    ------
    OptionError
        If it is no name.
    """
    if key is not None and not (isinstance(key, str) and key):
        raise OptionError(f"{argument}={key!r} is not the name of a column of obs.")
    return key


def check_classes(argument: str, classes: Any, key_argument: str, key: str | None) -> list[str] | None:
    """Return a list of the names of classes, or None.

    Raises
    ------
    OptionError
        If it is no such list, names a class twice, or there is no column for them.
    """
    if classes is None:
        return None
    listed = isinstance(classes, Sequence) and not isinstance(classes, str)
    if not listed or not classes or not all(isinstance(name, str) for name in classes):
        raise OptionError(f"{argument}={classes!r} is not a list of the names of classes.")
    if len(set(classes)) < len(classes):
        raise OptionError(f"{argument}={list(classes)!r} names a class twice; name each once.")
    if key is None:
        raise OptionError(f"{argument}={list(classes)!r} needs {key_argument}, the column of obs with the classes.")
    return list(classes)


def classes_of(argument: str, key: str, column: Callable[[str], pd.Series]) -> pd.Series:
    """Return a column of obs, or raise :class:`~scforge.errors.DataError` that says which argument names it."""
    try:
        return column(key)
    except DataError as error:
        raise DataError(f"{argument}={key!r}: {error}") from error


def classes_found(argument: str, key: str, column: Callable[[str], pd.Series]) -> list[str]:
    """Return the names of the classes of a column of obs, sorted.

    Raises
    ------
    OptionError
        If it holds numbers that are no classes, or nothing.
    """
    classes = classes_of(argument, key, column).dropna()
    if classes.dtype.kind == "f":
        raise OptionError(f"{argument}={key!r} holds numbers, not classes; make them categories.")
    names = classes.astype(str).unique()
    if not len(names):
        raise OptionError(f"{argument}={key!r} has no value for any cell; choose another column.")
    return sorted(map(str, names))


def numbers_of(classes: pd.Series, names: Sequence[str]) -> np.ndarray:
    """Return the place of each class among `names`, -1 where it is missing or unknown, int64, shape (N,)."""
    number = {name: i for i, name in enumerate(names)}
    categories = classes.astype("category").cat
    # The code of a missing value is -1, which finds the last.
    lookup = np.array([*(number.get(str(name), -1) for name in categories.categories), -1], dtype=np.int64)
    return lookup[np.asarray(categories.codes)]
