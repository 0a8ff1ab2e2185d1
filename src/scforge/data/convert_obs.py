"""Tables of cells of several sources as one: the same columns, the same categories, each cell name once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge.data.picking import CHECK
from scforge.data.store_files import SOURCE, TOTAL
from scforge.errors import DataError, OptionError

if TYPE_CHECKING:
    import pandas as pd

    from scforge.data.streams import CellStream

__all__ = ["CellNames", "CellTable", "Column", "check_columns", "join_tables"]

logger = logging.getLogger("scforge")

_OWN = (TOTAL, SOURCE, CHECK)
_TEXT, _NUMBERS, _TRUTH, _NUMBERED = "text", "numbers", "truth values", "categories that are numbers"


@dataclass(frozen=True)
class Column:
    """A column of the table of cells.

    Attributes
    ----------
    name
        Its name.
    dtype
        Of its values, or of the codes of its categories.
    categories
        Categories of all sources, in order of their first appearance; None of a column without.
    ordered
        Whether they have an order, which they do if all sources have the same.
    """

    name: str
    dtype: np.dtype
    categories: list[Any] | None = None
    ordered: bool = False


@dataclass(frozen=True)
class CellTable:
    """The table of cells of a store-to-be.

    Attributes
    ----------
    columns
        The columns that are kept.
    sources
        Names of the sources, each once.
    n_bytes
        Size of the largest table of a source in memory.
    """

    columns: list[Column]
    sources: list[str]
    n_bytes: int

    @property
    def row_dtype(self) -> np.dtype:
        """Of a cell as it waits in a temporary file."""
        fields = [("position", "<i8"), ("length", "<u4"), ("total", "<f8"), ("source", "<i4")]
        return np.dtype(fields + [(f"c{i}", column.dtype) for i, column in enumerate(self.columns)])

    def rows(self, stream: CellStream, source: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cells of a source as rows of the temporary files, and their names."""
        obs = stream.obs([column.name for column in self.columns])
        rows = np.zeros(stream.n_cells, dtype=self.row_dtype)
        rows["source"] = source
        for i, column in enumerate(self.columns):
            rows[f"c{i}"] = _values(obs[column.name], column)
        return rows, cell_names(obs)

    def frame(self, rows: np.ndarray, names: np.ndarray) -> pd.DataFrame:
        """Return the table of some cells as it stands in the store."""
        import pandas as pd

        series: dict[str, Any] = {}
        for i, column in enumerate(self.columns):
            values = np.ascontiguousarray(rows[f"c{i}"])
            if column.categories is not None:
                dtype = pd.CategoricalDtype(column.categories, ordered=column.ordered)
                series[column.name] = pd.Categorical.from_codes(values, dtype=dtype)
            else:
                series[column.name] = values
        series[TOTAL] = np.ascontiguousarray(rows["total"])
        series[SOURCE] = pd.Categorical.from_codes(np.ascontiguousarray(rows["source"]), categories=self.sources)
        return pd.DataFrame(series, index=pd.Index(names, dtype=str))


def join_tables(streams: Sequence[CellStream], wanted: Sequence[str] | None) -> CellTable:
    """Find out which columns the store has, and their categories.

    Parameters
    ----------
    streams
        The sources.
    wanted
        Names of columns; None keeps all that every source has.

    Raises
    ------
    DataError
        If a source has no such column, or columns of one name hold text here and numbers there.
    OptionError
        If `wanted` names a column twice, or one that scforge adds.
    """
    if wanted is not None:
        _check_wanted(wanted)
    tables: list[dict[str, _Seen]] = []
    n_bytes = 0
    for stream in streams:
        obs = stream.obs(None if wanted is None else list(wanted))
        check_columns(obs, stream.name)
        names = list(wanted) if wanted is not None else [name for name in obs.columns if _is_kept(name)]
        tables.append({name: _Seen.of(obs[name]) for name in names})
        n_bytes = max(n_bytes, int(obs[names].memory_usage(deep=True).sum()))
    common = [name for name in tables[0] if all(name in table for table in tables)]
    left_out = {name: "not in every source" for table in tables for name in table if name not in common}
    columns = []
    for name in common:
        problem = _problem(name, [table[name] for table in tables], streams)
        if problem is None:
            columns.append(_join(name, [table[name] for table in tables]))
        elif wanted is not None:
            raise DataError(problem)
        else:
            left_out[name] = problem
    if left_out:
        logger.info("Columns of obs left out: %s.", "; ".join(f"{name} ({why})" for name, why in left_out.items()))
    return CellTable(columns, _unique_sources(streams), n_bytes)


def check_columns(obs: pd.DataFrame, source: str) -> None:
    """Raise unless each column of a table of cells has a name of its own."""
    if not obs.columns.is_unique:
        twice = obs.columns[obs.columns.duplicated()][0]
        raise DataError(f"obs of {source!r} has the column {twice!r} twice; rename one of them.")


def _check_wanted(wanted: Sequence[str]) -> None:
    if own := [name for name in wanted if name in _OWN]:
        raise OptionError(f"obs names {own[0]!r}, which scforge adds itself; leave it out.")
    if len(set(wanted)) < len(wanted):
        raise OptionError(f"obs={list(wanted)!r} names a column twice; name each once.")


def _is_kept(name: Any) -> bool:
    # What scvi-tools and an earlier conversion have added is no data.
    return isinstance(name, str) and not name.startswith("_scvi_") and name not in _OWN


def _unique_sources(streams: Sequence[CellStream]) -> list[str]:
    names: list[str] = []
    for i, stream in enumerate(streams):
        names.append(f"{stream.name}-{i}" if stream.name in names else stream.name)
    return names


@dataclass(frozen=True)
class _Seen:
    """What a source has in a column: the kind of its values, and their dtype or categories."""

    kind: str | None
    dtype: np.dtype
    categories: list[Any] | None = None
    ordered: bool = False

    @classmethod
    def of(cls, values: pd.Series) -> _Seen:
        import pandas as pd

        plain = _plain(values)
        if isinstance(plain, pd.Categorical):
            categories = plain.categories
            text = categories.inferred_type in ("string", "empty")
            numbers = isinstance(categories.dtype, np.dtype) and categories.dtype.kind in "biuf"
            kind = _TEXT if text else _NUMBERED if numbers else None
            return cls(kind, np.dtype("<i4"), categories.tolist(), bool(plain.ordered))
        kind = _TRUTH if plain.dtype.kind == "b" else _NUMBERS if plain.dtype.kind in "iuf" else None
        return cls(kind, plain.dtype)


def _plain(values: pd.Series) -> Any:
    """Return a column as categories (also if it holds text) or as a NumPy array."""
    import pandas as pd

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


def _problem(name: str, seen: list[_Seen], streams: Sequence[CellStream]) -> str | None:
    """Return why a column cannot be joined, one sentence, or None."""
    for one, stream in zip(seen, streams, strict=True):
        if one.kind is None:
            return f"{name!r} of {stream.name!r} holds neither text nor numbers; convert it or leave it out."
        if one.kind != seen[0].kind:
            return (
                f"{name!r} holds {one.kind} in {stream.name!r} and {seen[0].kind} in {streams[0].name!r}; "
                "make it the same in all sources, or leave it out."
            )
    return None


def _join(name: str, seen: list[_Seen]) -> Column:
    if seen[0].categories is None:
        return Column(name, np.result_type(*(one.dtype for one in seen)))
    categories = list(dict.fromkeys(category for one in seen for category in one.categories or []))
    ordered = all(one.ordered and one.categories == seen[0].categories for one in seen)
    return Column(name, np.dtype("<i4"), categories, ordered)


def _values(values: pd.Series, column: Column) -> np.ndarray:
    """Return the values of a source, or the codes of its categories among those of all sources."""
    import pandas as pd

    plain = _plain(values)
    if column.categories is None:
        return plain
    codes = pd.Index(column.categories).get_indexer(plain.categories).astype(np.int32)
    return np.append(codes, np.int32(-1))[plain.codes]  # the code -1, of a missing value, takes the last


def cell_names(obs: pd.DataFrame) -> np.ndarray:
    """Return the names of cells, object, shape (n,)."""
    return np.asarray(obs.index.astype(str), dtype=object)


class CellNames:
    """Gives each cell of a store a name of its own: where names clash, the number of the source is added.

    Parameters
    ----------
    streams
        The sources.

    Attributes
    ----------
    n_changed
        Number of cells whose name is changed.
    """

    def __init__(self, streams: Sequence[CellStream]) -> None:
        self._clashing: list[np.ndarray] = []
        self.n_changed = 0
        # A name may clash again after the number was added; then the row in the source is added, too.
        for _ in range(3):
            hashes = np.concatenate([_hashes(self(cell_names(s.obs([])), i)) for i, s in enumerate(streams)])
            hashes.sort()
            again = hashes[1:] == hashes[:-1]
            if not again.any():
                return
            repeated = np.unique(hashes[1:][again])
            if not self._clashing:
                self.n_changed = int(np.searchsorted(hashes, repeated, side="right").sum())
                self.n_changed -= int(np.searchsorted(hashes, repeated, side="left").sum())
            self._clashing.append(repeated)
        raise DataError("obs_names of the sources repeat even with numbers added; make them unique before converting.")

    def __call__(self, names: np.ndarray, source: int) -> np.ndarray:
        """Return the names in the store of all cells of a source, object, shape (n,)."""
        for level, clashing in enumerate(self._clashing):
            rows = np.flatnonzero(np.isin(_hashes(names), clashing))
            names = names.copy()
            names[rows] = [f"{names[row]}-{source if level == 0 else row}" for row in rows]
        return names


def _hashes(names: np.ndarray) -> np.ndarray:
    """Return 64 bits for each name: in 10^8 names two different ones are the same in one of 4,000 cases.

    The only harm is a number behind a name that needs none.
    """
    import pandas as pd

    return pd.util.hash_array(names, categorize=False)
