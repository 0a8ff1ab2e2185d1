"""From the values of an obs column to the text of batches, labels, splits, groups and covariates.

Shapes: N cells.
"""

from __future__ import annotations

import datetime
import numbers
from collections.abc import Collection, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd

from scforge.errors import DataError, listing, suggest, warn

UNASSIGNED, HETEROGENEOUS, UNKNOWN = "unassigned", "Heterogeneous", "unknown"
"""Labels that the package itself writes for cells without one: by a threshold, majority voting, and unlike any type."""

_NO_LABEL = frozenset(
    ["", "nan", "<na>", "na", "n/a", "n.a.", "nat", "none", "null", UNKNOWN, "unlabeled", "not labeled"]
    + ["unannotated", "not annotated", "unclassified", "undefined", "undetermined", "not assigned"]
    + ["not available", "missing", UNASSIGNED, HETEROGENEOUS.casefold()]
)
"""Words that mean "no label", in American spelling, lower case, with spaces instead of underscores."""


def text_of(value: Any) -> str | None:
    """Return a value as text, or None if it is missing.

    Equal values have the same text whatever their type: 1, 1.0, ``Decimal(1)`` and ``"1"`` are "1". Other floats are
    written with their shortest digits, dates and times in ISO format (without the time at midnight), and whole days as
    "2 days".

    Raises
    ------
    TypeError
        If the value is neither text, a number, a date, a time span nor an interval.
    """
    if isinstance(value, str):
        return str.__str__(value)  # that of an enumeration has the name of its class
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, datetime.timedelta | np.timedelta64):
        return None if pd.isna(value) else str(pd.Timedelta(value)).removesuffix(" 00:00:00")
    if isinstance(value, numbers.Real | Decimal):
        if value != value:
            return None
        if isinstance(value, numbers.Integral):
            return str(int(value))
        if isinstance(value, Decimal):
            text = f"{value:f}" if value.is_finite() else str(float(value))
            return "0" if value == 0 else text.rstrip("0").rstrip(".") if "." in text else text
        if isinstance(value, float | np.floating) and np.isfinite(value) and value == np.floor(value):
            return np.format_float_positional(value, trim="-").removeprefix("-" if value == 0 else "")
        return str(value)
    if isinstance(value, np.datetime64):
        return text_of(pd.Timestamp(value))
    if isinstance(value, datetime.datetime):
        return value.isoformat().removesuffix("T00:00:00")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, pd.Period):
        return str(value)
    if isinstance(value, pd.Interval):
        left, right = "[" if value.closed_left else "(", "]" if value.closed_right else ")"
        return f"{left}{text_of(value.left)}, {text_of(value.right)}{right}"
    raise TypeError(type(value).__name__)


def check_column(argument: str, key: str, obs: pd.DataFrame) -> None:
    """Raise :class:`~scforge.errors.DataError` if obs does not contain the column `key`."""
    if key not in obs:
        columns = [column for column in obs.columns if not str(column).startswith("_scvi_")]
        raise DataError(f"is not a column of obs{suggest(key, columns, 'available')}", argument=argument, value=key)


def texts_of(values: Any, *, key: str, argument: str, fractional: bool = True) -> pd.Categorical:
    """Return a column as text, with the categories that occur, sorted; missing values stay missing.

    Parameters
    ----------
    values
        A column of obs of any type.
    key, argument
        Names of the column and of the corresponding argument, for messages.
    fractional
        Whether a column of floats may contain numbers that are not integers, as batches and groups do, but not classes.

    Raises
    ------
    DataError
        If the column contains values without an obvious text, such as lists or complex numbers.

    Examples
    --------
    >>> list(texts_of([1, 1.0, "1", None, True, 0.5], key="batch", argument="batch_key"))
    ['1', '1', '1', nan, 'True', '0.5']
    """
    values = values if isinstance(values, pd.Series) else pd.Series(values)
    codes, uniques = _factorized(values)
    if not fractional and pd.api.types.is_float_dtype(values):
        odd = [number for number in uniques if np.isinf(number) or (number == number and number != np.floor(number))]
        if odd:
            raise DataError(
                f"contains non-integer numbers (first: {odd[0]:g}) instead of classes; bin them "
                "with pandas.cut, or predict them with the task 'regression'.",
                argument=argument,
                value=key,
            )
    occurs = np.bincount(codes[codes >= 0], minlength=len(uniques)) > 0
    try:
        texts = [text_of(value) if used else None for value, used in zip(uniques, occurs, strict=True)]
    except TypeError as error:
        raise DataError(
            f"contains values of type {str(error)!r}, which have no unique text; convert the column to text.",
            argument=argument,
            value=key,
        ) from None
    names = sorted({text for text in texts if text is not None})
    number = {name: i for i, name in enumerate(names)}
    # The code of a missing value is -1, which finds the -1 at the end.
    lookup = np.array([*(-1 if text is None else number[text] for text in texts), -1], dtype=np.int64)
    return pd.Categorical.from_codes(lookup[codes], names)


def _factorized(values: pd.Series) -> tuple[np.ndarray, Sequence[Any]]:
    """Return codes, -1 for missing values, and the value of each code; a value may have several codes."""
    dtype = values.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        # An index would return its values as Python floats, which lose the shortest digits of others.
        categories = values.cat.categories
        inner, inner_values = _factorized(pd.Series(categories.array))
        return np.append(inner, -1)[values.cat.codes.to_numpy()], inner_values
    if isinstance(dtype, pd.SparseDtype):
        values = values.sparse.to_dense()
    elif pd.api.types.is_float_dtype(dtype) and pd.api.types.is_extension_array_dtype(dtype):
        values = pd.Series(values.to_numpy(dtype=dtype.numpy_dtype, na_value=np.nan))
    array = values.array
    if isinstance(values.dtype, np.dtype) and values.dtype.kind in "iufc":
        distinct, numbered = np.unique(np.asarray(array), return_inverse=True)
        return numbered, list(distinct)
    mixed = values.dtype == object and pd.api.types.infer_dtype(values, skipna=True) not in ("string", "empty")
    if mixed or getattr(dtype, "type", None) in (list, dict):
        # A hash table would merge 1 and True, and refuse lists.
        return np.arange(len(values)), list(array)
    is_plain = isinstance(values.dtype, np.dtype) and values.dtype.kind not in "mM"
    codes, uniques = pd.factorize(np.asarray(array) if is_plain else array)
    return codes, list(uniques)


def labels_of(
    values: Any,
    *,
    key: str,
    argument: str = "labels_key",
    classes: Collection[str] | None = None,
    fractional: bool = False,
    warns: bool = False,
) -> pd.Categorical:
    """Return labels as text, as :func:`texts_of` does; words such as "unknown" or "N/A" are missing labels.

    Parameters
    ----------
    values, key, argument, fractional
        See :func:`texts_of`.
    classes
        Classes that are labels, whatever their name.
    warns
        Whether to warn about words that are treated as missing labels.

    Raises
    ------
    DataError
        If the column contains values without an obvious text, or numbers that are not integers.
    """
    texts = texts_of(values, key=key, argument=argument, fractional=fractional)
    odd = [name for name in texts.categories if means_no_label(name) and name not in (classes or ())]
    if odd and warns:
        n_cells = int(np.isin(texts.codes, texts.categories.get_indexer(odd)).sum())
        warn(
            f"{argument}={key!r}: {n_cells} of {len(texts)} cells have the label {listing(odd)}, which is treated as "
            "missing; rename it if it is a class."
        )
    return texts.remove_categories(odd) if odd else texts


def means_no_label(name: str) -> bool:
    """Return whether a label is a word for a missing label.

    Examples
    --------
    >>> [means_no_label(name) for name in (" N/A ", "Not_Assigned", "NK")]
    [True, True, False]
    """
    return name.strip().casefold().replace("_", " ").replace("labell", "label") in _NO_LABEL


def codes_among(texts: pd.Categorical, names: Sequence[str], *, unknown: int = -1) -> np.ndarray:
    """Return the position of each text in `names`, int64, shape (N,); -1 if missing, `unknown` if not in `names`."""
    number = {name: i for i, name in enumerate(names)}
    lookup = np.array([*(number.get(name, unknown) for name in texts.categories), -1], dtype=np.int64)
    return lookup[np.asarray(texts.codes)]
