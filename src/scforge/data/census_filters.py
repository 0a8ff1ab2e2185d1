"""Filters of cells as SOMA understands them: ``{"tissue": ["lung", "heart"]}`` becomes text of a query."""

from __future__ import annotations

import keyword
import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge.errors import DataError, OptionError, did_you_mean, listing

if TYPE_CHECKING:
    import pyarrow

__all__ = ["Filters", "check_filters", "check_values", "conditions", "joined"]

Filters = Mapping[str, Any] | str | None
"""Column to a value or a list of values; or a SOMA ``value_filter``; or None for everything."""


def check_filters(filters: Filters, argument: str = "filters") -> None:
    """Raise :class:`~scforge.errors.OptionError` unless `filters` is of a kind that a query can be made of."""
    if filters is None:
        return
    if isinstance(filters, str):
        if not filters.strip():
            raise OptionError(f"{argument}={filters!r} is empty; leave it out to take everything.")
        return
    if not isinstance(filters, Mapping):
        raise OptionError(
            f"{argument} is of type {type(filters).__name__!r}; give columns with their values, "
            'e.g. {"tissue": ["lung", "heart"]}, or the text of a SOMA value_filter.'
        )
    for column, value in filters.items():
        if not isinstance(column, str) or not column:
            raise OptionError(f"{argument} has the key {column!r}, which is not the name of a column.")
        values = _values(value)
        if not values:
            raise OptionError(f"{argument}[{column!r}]=[] allows no value; name at least one, or remove the key.")
        for one in values:
            if not isinstance(one, str | bool | np.bool_ | numbers.Real):
                raise OptionError(
                    f"{argument}[{column!r}] holds {one!r}, which is no text, number, true or false; "
                    "other conditions can be given as the text of a SOMA value_filter."
                )


def conditions(filters: Filters) -> dict[str, str]:
    """Return the condition of each filter, by its name.

    Examples
    --------
    >>> conditions({"tissue": ["lung", "heart"], "cell type": "B cell"})
    {'tissue': "tissue in ['lung', 'heart']", 'cell type': "attr('cell type') == 'B cell'"}
    """
    if filters is None:
        return {}
    if isinstance(filters, str):
        return {filters: filters}
    return {column: _condition(column, _values(value)) for column, value in filters.items()}


def joined(parts: Mapping[str, str]) -> str | None:
    """Return the query that asks for all conditions at once; None if there is none."""
    if len(parts) <= 1:
        return next(iter(parts.values()), None)
    return " and ".join(f"({part})" for part in parts.values())


def check_values(filters: Filters, schema: pyarrow.Schema, *, table: str, argument: str = "filters") -> None:
    """Raise unless the columns of `filters` are in a table, and their values of its types.

    Parameters
    ----------
    filters
        As :func:`check_filters` accepts them.
    schema
        Of the table.
    table
        ``"obs"`` or ``"var"``.
    argument
        Name of the argument.

    Raises
    ------
    DataError
        If there is no such column.
    OptionError
        If a value is not of the type of its column.
    """
    if not isinstance(filters, Mapping):
        return
    columns = [name for name in schema.names if name != "soma_joinid"]
    for column, value in filters.items():
        if column not in schema.names:
            raise DataError(
                f"{argument} names {column!r}, which is not a column of {table}{did_you_mean(column, columns)} "
                f"({table} has: {listing(columns, most=30)})"
            )
        kind, fits = _kind(schema.field(column).type)
        for one in _values(value):
            if not fits(one):
                raise OptionError(f"{argument}[{column!r}]={one!r} does not fit: the column holds {kind}.")


def _values(value: Any) -> list[Any]:
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes):
        return [one.item() if isinstance(one, np.generic) else one for one in value]
    return [value.item() if isinstance(value, np.generic) else value]


def _condition(column: str, values: list[Any]) -> str:
    name = column if column.isidentifier() and not keyword.iskeyword(column) else f"attr({column!r})"
    # SOMA parses Python's own notation, so repr() quotes whatever stands in the text.
    if len(values) == 1:
        return f"{name} == {values[0]!r}"
    if any(isinstance(value, bool) for value in values):
        return " or ".join(f"{name} == {value!r}" for value in values)
    return f"{name} in [{', '.join(repr(value) for value in values)}]"


def _kind(type_: pyarrow.DataType) -> tuple[str, Any]:
    import pyarrow.types as kinds

    if kinds.is_dictionary(type_):
        type_ = type_.value_type
    if kinds.is_string(type_) or kinds.is_large_string(type_):
        return "text", lambda value: isinstance(value, str)
    if kinds.is_boolean(type_):
        return "true or false", lambda value: isinstance(value, bool)
    if kinds.is_integer(type_):
        return "whole numbers", lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if kinds.is_floating(type_):
        return "numbers", lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool)
    return str(type_), lambda value: True
