"""Labels and classes of cells."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData

from scforge._checks import check_positive
from scforge._constants import UNS_KEY
from scforge.errors import DataError, OptionError, listing


def write_probabilities(adata: AnnData, key: str, table: pd.DataFrame) -> None:
    """Write a table with one column per class into ``obsm["<key>_probabilities"]``, and its column names into uns.

    The table itself is not written, because h5ad files do not support column names such as ``"NK/T"``.
    """
    adata.obsm[f"{key}_probabilities"] = np.asarray(table)
    names = np.array([str(name) for name in table.columns], dtype=object)
    adata.uns[UNS_KEY] = {**adata.uns.get(UNS_KEY, {}), f"{key}_classes": names}


UNASSIGNED = "unassigned"
"""Label of cells with a confidence below the threshold."""

UNLABELED, UNKNOWN = -1, -2
"""Codes of cells without a label, and of cells whose label is unknown to the model."""


def text_labels(values: pd.Series, *, key: str, argument: str = "labels_key") -> pd.Categorical:
    """Return labels as text, with the categories that occur, sorted; missing values stay missing.

    Integers lose the decimal point that they have in a column with missing values, so that 1 and 1.0 are the same
    label.

    Parameters
    ----------
    values
        A column of obs: text, numbers, booleans or categories.
    key, argument
        Names of the column and of the corresponding argument, for messages.

    Raises
    ------
    DataError
        If the column contains numbers that are not integers.
    """
    codes, found = pd.factorize(values)
    fractional = [value for value in found if _is_number(value) and not float(value).is_integer()]
    if fractional and all(_is_number(value) for value in found):
        what = f"non-integer numbers (first: {float(fractional[0]):g})"
        raise DataError(f"{argument}={key!r} contains {what}; use the task 'regression', or bin them with pandas.cut.")
    texts = np.array([text_of(value) for value in found], dtype=object).astype(str)
    names, places = np.unique(texts, return_inverse=True)
    # The code of a missing value is -1, which finds the -1 at the end.
    return pd.Categorical.from_codes(np.array([*places, -1], dtype=np.int64)[codes], [str(name) for name in names])


def codes_of(values: pd.Series, classes: Sequence[str], *, key: str, argument: str = "labels_key") -> np.ndarray:
    """Return the class index of each cell, int64, shape (N,); -1 for no label, -2 for a label not in `classes`."""
    labels = text_labels(values, key=key, argument=argument)
    number = {name: i for i, name in enumerate(classes)}
    lookup = np.array([*(number.get(name, UNKNOWN) for name in labels.categories), UNLABELED], dtype=np.int64)
    return lookup[np.asarray(labels.codes)]


def check_names(argument: str, names: Any) -> list[str] | None:
    """Return an option that lists names. Raises an error if it is neither None nor a list of unique names."""
    if names is None:
        return None
    listed = pd.api.types.is_list_like(names, allow_sets=False) and all(isinstance(name, str) for name in names)
    if not listed or not 0 < len(set(names)) == len(names):
        raise OptionError(f"{argument}={names!r} is not a list of unique names; pass e.g. ['first', 'second'].")
    return list(names)


BALANCED = "balanced"


def check_weights(argument: str, weights: Any, classes: Sequence[str] | None) -> str | dict[str, float] | None:
    """Return an option that weights classes: None, ``"balanced"`` or a mapping. Raises an error for other values."""
    if weights is None or (isinstance(weights, str) and weights == BALANCED):
        return weights
    if not isinstance(weights, Mapping):
        raise OptionError(f"{argument}={weights!r} must be None, 'balanced' or a dict of weights by class.")
    found = {str(name): check_positive(f"{argument}[{name!r}]", weight) for name, weight in weights.items()}
    if classes is not None and (unknown := set(found) - set(classes)):
        raise OptionError(f"{argument} contains {min(unknown)!r}, which is not a class (classes: {listing(classes)}).")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)


def text_of(value: Any) -> str:
    """Return a label as text; integers have no decimal point, so that 1 and 1.0 are the same label."""
    whole = _is_number(value) and float(value).is_integer()
    return str(int(value)) if whole else str(value)
