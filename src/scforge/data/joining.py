"""Cell tables of several sources, joined into one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from scforge.data.readers import ChunkReader, check_columns
from scforge.data.store import OWN_COLUMNS, SOURCE, joined_categories
from scforge.errors import DataError, OptionError, warn

logger = logging.getLogger("scforge")


@dataclass(frozen=True)
class StoredObs:
    """The cell table of a store, to which cells are appended.

    Attributes
    ----------
    columns
        A mapping from each column to an array of its type, without values: a categorical or a NumPy array.
    sources
        Names of the sources.
    has
        Function that returns whether each of some names is that of a cell in the store.
    """

    columns: Mapping[str, Any]
    sources: Sequence[str]
    has: Callable[[pd.Index], np.ndarray]


def join_obs(
    streams: Sequence[ChunkReader], wanted: Sequence[str] | None, onto: StoredObs | None = None
) -> pd.DataFrame:
    """Concatenate the cell tables of all sources, with unique names and the source of each cell as the last column.

    Text columns become categorical columns with the categories of all sources.

    Parameters
    ----------
    streams
        The sources.
    wanted
        Names of columns. If None, keeps all columns that every source has.
    onto
        The cell table of a store to which the cells are appended. Its categories come first, and its names and sources
        remain unique.

    Raises
    ------
    DataError
        If a source lacks a wanted column, or a column contains text in one source and numbers in another, or in `onto`.
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
    places = [repr(stream.name) for stream in streams]
    left_out = {name: "not in all sources" for table in tables for name in table}
    for name in tables[0]:
        if all(name in table for table in tables):
            del left_out[name]
            parts = [*([] if onto is None else [onto.columns[name]]), *(table[name] for table in tables)]
            kinds = [_kind(part) for part in parts]
            if problem := _problem(name, kinds, [*([] if onto is None else ["the store"]), *places]):
                if wanted is not None:
                    raise DataError(problem)
                if "/" in name:
                    warn(f"a column of obs cannot be stored and is skipped: {problem}")
                left_out[name] = problem
                continue
            joined = isinstance(parts[0], pd.Categorical)
            columns[name] = joined_categories(parts) if joined else np.concatenate(parts)
    if left_out:
        logger.info("Columns of obs left out: %s.", "; ".join(f"{name} ({why})" for name, why in left_out.items()))
    sizes = [len(part) for part in names]
    labels = [] if onto is None else list(onto.sources)
    numbers = np.repeat(np.arange(len(labels), len(labels) + len(streams)), sizes)
    for number, stream in enumerate(streams, start=len(labels)):
        labels.append(f"{stream.name}-{number}" if stream.name in labels else stream.name)
    columns[SOURCE] = pd.Categorical.from_codes(numbers, categories=labels)
    rows = np.concatenate([np.arange(size) for size in sizes])
    taken = None if onto is None else onto.has
    return pd.DataFrame(columns, index=_unique(names[0].append(names[1:]), labels, numbers, rows, taken))


def _unique(
    names: pd.Index,
    labels: Sequence[str],
    sources: np.ndarray,
    rows: np.ndarray,
    taken: Callable[[pd.Index], np.ndarray] | None,
) -> pd.Index:
    """Return unique names: append the number of the source to duplicates and `taken` names, then the row if needed.

    Warns of sources, most of whose names are taken.
    """
    for step, numbers in enumerate((sources, rows)):
        in_store = np.zeros(len(names), dtype=bool) if taken is None else taken(names)
        again = np.flatnonzero(names.duplicated(keep=False) | in_store)
        if not len(again):
            return names
        if step == 0:
            n_cells, n_taken = np.bincount(sources), np.bincount(sources, in_store)
            for source in np.flatnonzero(2 * n_taken > n_cells):
                warn(
                    f"{labels[int(source)]!r}: the names of {n_taken[source]:,.0f} of {n_cells[source]:,} cells are in "
                    "the store already; check that these are not the same cells."
                )
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


def _problem(name: str, kinds: Sequence[str | None], places: Sequence[str]) -> str | None:
    """Return why a column cannot be stored, as one sentence, or None if it can."""
    if "/" in name:
        return f"{name!r} contains a slash, which is not allowed in column names of a store; rename or omit the column."
    for kind, place in zip(kinds, places, strict=True):
        if kind is None:
            return f"{name!r} of {place} contains neither text nor numbers; convert or omit the column."
        if kind != kinds[0]:
            types = f"{kind} in {place} and {kinds[0]} in {places[0]}"
            return f"{name!r} contains {types}; convert the column to the same type in all sources, or omit it."
    return None
