"""Cell tables of several sources, joined into one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from scforge.data.readers import ChunkReader, check_columns
from scforge.data.store import OWN_COLUMNS, SOURCE
from scforge.errors import DataError, OptionError, warn

logger = logging.getLogger("scforge")


def join_obs(streams: Sequence[ChunkReader], wanted: Sequence[str] | None) -> pd.DataFrame:
    """Concatenate the cell tables of all sources, with unique names and the source of each cell as the last column.

    Text columns become categorical columns with the categories of all sources.

    Parameters
    ----------
    streams
        The sources.
    wanted
        Names of columns. If None, keeps all columns that every source has.

    Raises
    ------
    DataError
        If a source lacks a wanted column, or a column contains text in one source and numbers in another.
    OptionError
        If `wanted` contains a column twice, or a column that scforge adds.
    """
    if wanted is not None and len(set(wanted) - set(OWN_COLUMNS)) < len(wanted):
        raise OptionError("contains a duplicate, or a column that scforge adds; remove it.", obs=list(wanted))
    tables, names = [], []
    for stream in streams:
        obs = stream.obs(None if wanted is None else list(wanted))
        check_columns(obs, stream.name)
        # What scvi-tools and an earlier conversion have added is no data.
        own = [name for name in obs if isinstance(name, str) and not name.startswith("_scvi_")]
        tables.append({name: _plain(obs[name]) for name in own if name not in OWN_COLUMNS})
        names.append(obs.index.astype(str))
    columns: dict[str, Any] = {}
    left_out = {name: "not in all sources" for table in tables for name in table}
    for name in tables[0]:
        if all(name in table for table in tables):
            del left_out[name]
            parts = [table[name] for table in tables]
            kinds = [_kind(part) for part in parts]
            if problem := _problem(name, kinds, streams):
                if wanted is not None:
                    raise DataError(problem)
                if "/" in name:
                    warn(f"a column of obs cannot be stored and is skipped: {problem}")
                left_out[name] = problem
                continue
            columns[name] = _joined(parts)
    if left_out:
        logger.info("Columns of obs left out: %s.", "; ".join(f"{name} ({why})" for name, why in left_out.items()))
    sizes = [len(part) for part in names]
    numbers = np.repeat(np.arange(len(streams)), sizes)
    labels: list[str] = []
    for number, stream in enumerate(streams):
        labels.append(f"{stream.name}-{number}" if stream.name in labels else stream.name)
    columns[SOURCE] = pd.Categorical.from_codes(numbers, categories=labels)
    rows = np.concatenate([np.arange(size) for size in sizes])
    return pd.DataFrame(columns, index=_unique(names[0].append(names[1:]), numbers, rows))


def _unique(names: pd.Index, sources: np.ndarray, rows: np.ndarray) -> pd.Index:
    """Return unique names: append the number of the source to duplicates, then the row if needed."""
    for step, numbers in enumerate((sources, rows)):
        again = np.flatnonzero(names.duplicated(keep=False))
        if not len(again):
            return names
        if step == 0:
            logger.info(
                "%d cells have a duplicate name; the number of the source is appended to these names.", len(again)
            )
        changed = names.to_numpy(dtype=object, copy=True)
        changed[again] = [f"{changed[position]}-{numbers[position]}" for position in again]
        names = pd.Index(changed, dtype=names.dtype)
    return names


def _plain(values: pd.Series) -> Any:
    """Return a column as a categorical (even if it contains text) or as a NumPy array."""
    if isinstance(values.dtype, pd.CategoricalDtype):
        return values.array
    if isinstance(values.dtype, np.dtype) and values.dtype.kind != "O":
        return values.to_numpy()
    if pd.api.types.is_bool_dtype(values.dtype) and not values.hasnans:
        return values.to_numpy(dtype=bool)
    if pd.api.types.is_bool_dtype(values.dtype):
        return pd.Categorical(values.map({True: "True", False: "False"}))
    if pd.api.types.is_numeric_dtype(values.dtype):
        return values.to_numpy(dtype=np.float64, na_value=np.nan) if values.hasnans else values.to_numpy()
    if pd.api.types.infer_dtype(values, skipna=True) in ("string", "empty"):
        return pd.Categorical(values.astype(object))
    return values.to_numpy(dtype=object)


def _kind(values: Any) -> str | None:
    """Return the type of a column, or None if it cannot be stored."""
    if isinstance(values, pd.Categorical):
        categories = values.categories
        if categories.inferred_type in ("string", "empty"):
            return "text"
        numbers = isinstance(categories.dtype, np.dtype) and categories.dtype.kind in "biuf"
        return "numeric categories" if numbers else None
    return {"b": "booleans", "i": "numbers", "u": "numbers", "f": "numbers"}.get(values.dtype.kind)


def _problem(name: str, kinds: Sequence[str | None], streams: Sequence[ChunkReader]) -> str | None:
    """Return why a column cannot be stored, as one sentence, or None if it can."""
    if "/" in name:
        return f"{name!r} contains a slash, which is not allowed in column names of a store; rename or omit the column."
    for kind, stream in zip(kinds, streams, strict=True):
        if kind is None:
            return f"{name!r} of {stream.name!r} contains neither text nor numbers; convert or omit the column."
        if kind != kinds[0]:
            types = f"{kind} in {stream.name!r} and {kinds[0]} in {streams[0].name!r}"
            return f"{name!r} contains {types}; convert the column to the same type in all sources, or omit it."
    return None


def _joined(parts: Sequence[Any]) -> Any:
    """Concatenate the values of all sources, with all categories in the order of their first appearance."""
    if not isinstance(parts[0], pd.Categorical):
        return np.concatenate(parts)
    categories = pd.Index(list(dict.fromkeys(category for part in parts for category in part.categories)))
    # The code -1, of a missing value, takes the last.
    codes = [np.append(categories.get_indexer(part.categories), -1)[part.codes] for part in parts]
    ordered = all(part.ordered and part.categories.equals(parts[0].categories) for part in parts)
    return pd.Categorical.from_codes(np.concatenate(codes), categories, ordered=ordered)
