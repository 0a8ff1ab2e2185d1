"""Query the CELLxGENE Census, and read its cells."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import keyword
import numbers
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from scforge._checks import check_count
from scforge.data.cells import CellBlock, CellSource, choose_chunks, column_of, sample_chunks
from scforge.data.checks import row_sums, value_problem
from scforge.data.genes import MIN_OVERLAP, GeneMap, map_names, text_columns, warn_counts_outside
from scforge.data.readers import ENTRIES, missing_column
from scforge.data.sampling import Window
from scforge.data.vocab import GeneVocab, open_vocab
from scforge.errors import DataError, MissingFileError, OptionError, ScforgeError, first_line, suggest, warn

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow


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
            near = suggest(column, columns, f"{table} has", most=30)
            raise DataError(f"{argument} names {column!r}, which is not a column of {table}{near}")
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


_SPECIES = {"human": "homo_sapiens", "mouse": "mus_musculus"}
_PIECE = 4096
"""Cells read at once: what the client returns takes 20 bytes an entry."""


@dataclass(frozen=True)
class SomaLocation:
    """An open experiment.

    Attributes
    ----------
    name
        For messages, and to say where a cell comes from.
    experiment
        The ``tiledbsoma.Experiment``.
    release
        Build of the Census, e.g. ``"2025-01-30"``; empty for a place of one's own.
    root
        What was opened to get there.
    """

    name: str
    experiment: Any
    release: str
    root: Any


def import_soma(module: str = "tiledbsoma") -> Any:
    """Return a client of SOMA, or raise :class:`~scforge.errors.OptionError` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OptionError(
            f"CensusQuery needs the package {module!r}, which cannot be imported ({first_line(error)}); install it "
            'with pip install "scforge[census]" into an environment of its own, because it needs pandas 2.'
        ) from error


@contextlib.contextmanager
def soma(what: str, advice: str = "check the connection, and try again") -> Iterator[None]:
    """Turn what the clients raise into one sentence; `what` is the object of reading."""
    tiledbsoma = import_soma()
    try:
        yield
    except ScforgeError:
        raise
    except tiledbsoma.DoesNotExistError as error:
        raise MissingFileError(f"{what} does not exist ({first_line(error)}); check the name.") from error
    # TileDB's own errors, e.g. of S3, come as RuntimeError; those of HTTP, on the way to the Census, as OSError.
    except (tiledbsoma.SOMAError, RuntimeError, OSError) as error:
        raise DataError(f"{what} cannot be read: {first_line(error)}; {advice}.") from error


def open_census(organism: str, version: str, tiledb_config: Mapping[str, Any] | None) -> SomaLocation:
    """Open an organism of the CELLxGENE Census."""
    census_client = import_soma("cellxgene_census")
    what = f"the CELLxGENE Census (census_version={version!r})"
    with soma(what, "check the connection, or name a copy of your own with uri"):
        try:
            release = census_client.get_census_version_description(version)["release_build"]
        except ValueError as error:
            known = list(census_client.get_census_version_directory())
            raise OptionError(f"census_version={version!r} is not known{suggest(version, known)}") from error
        config = None if tiledb_config is None else dict(tiledb_config)
        root = census_client.open_soma(census_version=version, tiledb_config=config)
        return SomaLocation(f"census:{release}/{organism}", _experiment(root, organism, what), release, root)


def open_uri(uri: str, organism: str, tiledb_config: Mapping[str, Any] | None) -> SomaLocation:
    """Open an experiment, or an organism of a folder laid out as the Census is."""
    tiledbsoma = import_soma()
    what = f"uri={uri!r}"
    with soma(what, "check the URI, and the options of the connection in tiledb_config"):
        context = None if tiledb_config is None else tiledbsoma.SOMATileDBContext(tiledb_config=dict(tiledb_config))
        root = tiledbsoma.open(uri, context=context)
        return SomaLocation(uri, _experiment(root, organism, what), "", root)


def _experiment(root: Any, organism: str, what: str) -> Any:
    tiledbsoma = import_soma()
    if isinstance(root, tiledbsoma.Experiment):
        return root
    if not isinstance(root, tiledbsoma.Collection):
        raise DataError(f"{what} is a SOMA {type(root).__name__}; name an experiment, or a folder like the Census.")
    organisms = root.get("census_data", root)
    name = "_".join(organism.lower().split())
    name = _SPECIES.get(name, name)
    if name not in organisms:
        known = sorted(organisms)
        raise OptionError(f"organism={organism!r} is not in {what}{suggest(organism, known, 'it has')}")
    return organisms[name]


def member(collection: Any, name: str, argument: str, what: str) -> Any:
    """Return a part of a collection, or raise :class:`~scforge.errors.DataError` with the names that are there."""
    if name not in collection:
        known = sorted(collection)
        raise DataError(f"{argument}={name!r} is not in {what}{suggest(name, known, 'it has')}")
    return collection[name]


def read_table(
    frame: Any,
    columns: Sequence[str] | None = None,
    *,
    value_filter: str | None = None,
    joinids: np.ndarray | None = None,
) -> pd.DataFrame:
    """Return rows of a SOMA table in the order of their joinids; text that repeats is categorical.

    Parameters
    ----------
    frame
        A ``tiledbsoma.DataFrame``.
    columns
        Which, besides ``soma_joinid``; None takes all.
    value_filter
        Condition of the rows.
    joinids
        The rows.
    """
    import pandas as pd

    names = None if columns is None else list(dict.fromkeys(["soma_joinid", *columns]))
    coords = () if joinids is None else (joinids,)
    table = frame.read(coords, column_names=names, value_filter=value_filter).concat()
    # A query of a condition returns the column of the condition, too.
    table = (table if names is None else table.select(names)).to_pandas().sort_values("soma_joinid", ignore_index=True)
    for name in table:
        if isinstance(table[name].dtype, pd.CategoricalDtype):
            table[name] = table[name].cat.remove_unused_categories()
    return table


def count_rows(frame: Any, value_filter: str | None) -> int:
    """Return how many rows of a SOMA table fit a condition."""
    return sum(len(part) for part in frame.read(column_names=["soma_joinid"], value_filter=value_filter))


class CountReader:
    """Reads rows of the counts of a query.

    Parameters
    ----------
    place
        The open experiment.
    array
        Its ``tiledbsoma.SparseNDArray`` of counts.
    joinids
        Joinid of each cell of the query, ascending, int64, shape (N,).
    var_joinids
        Joinid of each gene, ascending, int64, shape (V,).

    Attributes
    ----------
    n_reads, n_read
        How often counts were read, and of how many cells.
    """

    def __init__(self, place: SomaLocation, array: Any, joinids: np.ndarray, var_joinids: np.ndarray) -> None:
        # The client closes what is open when the root goes, so the place is kept.
        self._place, self.name = place, place.name
        self._array, self._joinids, self._var_joinids = array, joinids, var_joinids
        self.n_reads = self.n_read = 0

    def counts(self, rows: np.ndarray) -> sparse.csr_matrix:
        """Return the counts of all genes of the cells at `rows`, ascending positions, checked, shape (R, V).

        Raises
        ------
        DataError
            If values are no counts, a cell has none, or reading fails.
        """
        pieces = [self._read(rows[start : start + _PIECE]) for start in range(0, len(rows), _PIECE)]
        return pieces[0] if len(pieces) == 1 else sparse.vstack(pieces, format="csr")

    def _read(self, rows: np.ndarray) -> sparse.csr_matrix:
        joinids = self._joinids[rows]
        first, last = int(joinids[0]), int(joinids[-1])
        # A slice, whose ends are both meant, spares the client a list of points.
        cells = slice(first, last) if last - first + 1 == len(joinids) else joinids
        with soma(f"X of {self.name!r}"):
            table = self._array.read((cells, slice(None))).tables().concat()
        self.n_reads += 1
        self.n_read += len(rows)
        values = table["soma_data"].to_numpy()
        place = np.searchsorted(joinids, table["soma_dim_0"].to_numpy())
        genes, found = self._columns(table["soma_dim_1"].to_numpy())
        shape = (len(rows), len(self._var_joinids))
        matrix = sparse.coo_matrix((values[found], (place[found], genes[found])), shape=shape).tocsr()
        matrix.eliminate_zeros()
        if problem := value_problem(matrix.data):
            raise DataError(f"X of {self.name!r} {problem}, but raw counts are needed; name their layer.")
        totals = row_sums(matrix)
        if not totals.all():
            empty = int(joinids[int((totals == 0).argmax())])
            raise DataError(
                f"X of {self.name!r} has cells without any count (first: soma_joinid {empty}); "
                "leave them out with a filter, e.g. value_filter 'nnz > 0'."
            )
        return matrix

    def _columns(self, joinids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the place of each gene, and which genes there are: var may lack some that X has."""
        place = np.searchsorted(self._var_joinids, joinids)
        place[place == len(self._var_joinids)] = 0
        return place, self._var_joinids[place] == joinids


CHUNK_SIZE = 256
"""Cells of neighboring joinids that are read together."""

_SAMPLED = 1024
"""Cells that are looked at to tell how many counts lie outside of a vocabulary."""

_NAMES = ("feature_id", "feature_name", "var_id")
"""Columns of var that hold names of genes: those of the Census, and that of ``tiledbsoma.io.from_anndata``."""


class CensusCells:
    """Cells of a :class:`scforge.data.CensusQuery`, as :class:`scforge.data.cells.Cells`; made by its ``open``.

    Attributes
    ----------
    vocab
        The genes that the counts are over.
    overlap, counts_kept, measured
        As of ``scforge.data.cells.CellSource``. `counts_kept` is that of some cells.
    chunk_size
        Cells that are read together.
    obs
        The wanted columns of obs; cells are numbered.
    joinids
        ``soma_joinid`` of each cell, ascending, int64, shape (N,).
    place
        What was opened, for messages.

    Examples
    --------
    >>> from scforge.data import CensusQuery
    >>> query = CensusQuery(filters={"tissue": "lung", "is_primary_data": True}, obs=["cell_type"])
    >>> query.value_filter
    "(tissue == 'lung') and (is_primary_data == True)"
    >>> cells = query.open("human_protein_coding")  # doctest: +SKIP
    >>> cells.sample(1000, seed=0).counts.shape  # doctest: +SKIP
    (1000, 20120)
    """

    def __init__(
        self,
        reader: CountReader,
        joinids: np.ndarray,
        obs: pd.DataFrame,
        var: pd.DataFrame,
        vocab: GeneVocab | None,
        *,
        chosen: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        gene_key: str | None = None,
        min_overlap: float = MIN_OVERLAP,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        check_count("chunk_size", chunk_size, "cells")
        self.joinids, self.obs, self.place, self.chunk_size = joinids, obs, reader.name, chunk_size
        self._reader, self._lengths, self._var, self._genes = reader, lengths, var, chosen
        self._gene_key = gene_key
        known = var if chosen is None else var[chosen]
        key = gene_key or best_names(known, vocab)
        names = _texts(known[key])
        self.vocab = GeneVocab.from_genes(list(dict.fromkeys(names))) if vocab is None else vocab
        whole = not self.vocab.chosen_from_data
        gene_map = map_names(names, self.vocab, min_overlap=min_overlap, whole=whole, var=known, gene_key=key)
        columns = np.full(len(var), -1, dtype=np.int32)
        columns[slice(None) if chosen is None else chosen] = gene_map.columns
        self._gene_map = GeneMap(columns, self.vocab.n_genes)
        self.overlap, self.measured = self._gene_map.overlap, self._gene_map.measured
        some = self.block(choose_chunks(len(self), _SAMPLED, chunk_size))
        self.counts_kept = float(some.counts.sum(dtype=np.float64) / some.totals.sum())
        warn_counts_outside(self.counts_kept, self.vocab)

    def with_vocab(self, vocab: GeneVocab, *, min_overlap: float = MIN_OVERLAP) -> CensusCells:
        """Return the same cells over the genes of another vocabulary.

        Parameters
        ----------
        vocab
            The other vocabulary.
        min_overlap
            Smallest share of its genes to accept.

        Returns
        -------
        The cells of the same query.

        Raises
        ------
        GeneMismatchError
            If too few genes of `vocab` are in the experiment.
        """
        return CensusCells(
            self._reader,
            self.joinids,
            self.obs,
            self._var,
            vocab,
            chosen=self._genes,
            lengths=self._lengths,
            gene_key=self._gene_key,
            min_overlap=min_overlap,
            chunk_size=self.chunk_size,
        )

    def __len__(self) -> int:
        return len(self.joinids)

    def __repr__(self) -> str:
        return f"CensusCells({len(self)} cells of {self.place!r}, {self.vocab.n_genes} genes)"

    @cached_property
    def n_expressed(self) -> np.ndarray:
        """Number of expressed genes of each cell, int32, shape (N,).

        It is the column ``nnz`` of obs where there is one, as in the Census. That counts genes outside of the
        vocabulary, too, so it is an upper bound. Else all counts are read once, piece by piece.
        """
        if self._lengths is not None:
            return self._lengths
        lengths = np.zeros(len(self), dtype=np.int32)
        for start in range(0, len(self), self.chunk_size):
            rows = np.arange(start, min(start + self.chunk_size, len(self)))
            lengths[rows] = np.diff(self._gene_map.apply(self._reader.counts(rows)).indptr)
        return lengths

    def column(self, key: str) -> pd.Series:
        """Return the column `key` of obs, length N.

        Raises
        ------
        DataError
            If there is no such column, or the query did not name it in `obs`.
        """
        return column_of(self.obs, key)

    def block(self, rows: np.ndarray, *, draw: int = 0) -> CellBlock:
        """Return the cells at `rows`, in that order; a row may come several times. `draw` keys random choices."""
        rows = np.asarray(rows, dtype=np.int64)
        if not len(rows):
            empty = sparse.csr_matrix((0, self.vocab.n_genes), dtype=np.float32)
            return CellBlock.from_csr(empty, measured=self.measured)
        return next(self._batches(Window(rows, np.array([len(rows)]), draw), *self._read(rows)))

    def stream(self, windows: Iterable[Window]) -> Iterator[CellBlock]:
        """Yield the cells of each batch of each of `windows`, in order; the next window is read meanwhile."""
        waiting: tuple[Window, Future] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="scforge-soma") as pool:
            for window in windows:
                reading = pool.submit(self._read, window.rows)
                if waiting is not None:
                    yield from self._batches(waiting[0], *waiting[1].result())
                waiting = window, reading
            if waiting is not None:
                yield from self._batches(waiting[0], *waiting[1].result())

    def sample(self, n: int, *, rows: np.ndarray | None = None, seed: int = 0) -> CellSource:
        """Return at most `n` cells (of those at `rows`), drawn by `seed`, in memory, in the order of the query.

        Of more cells whole chunks are drawn, because they are read in one go.
        """
        return sample_chunks(self, n, rows=rows, seed=seed)

    def _read(self, rows: np.ndarray) -> tuple[np.ndarray, sparse.csr_matrix, np.ndarray]:
        """Return distinct rows, their counts of vocabulary genes, and their counts of all genes."""
        distinct = np.unique(rows)
        if len(distinct) and not 0 <= distinct[0] <= distinct[-1] < len(self):
            raise DataError(f"rows holds a position that is not from 0 to {len(self) - 1}.")
        counts = self._reader.counts(distinct)
        return distinct, self._gene_map.apply(counts), row_sums(counts)

    def _batches(
        self, window: Window, distinct: np.ndarray, counts: sparse.csr_matrix, totals: np.ndarray
    ) -> Iterator[CellBlock]:
        for rows in window.batches():
            place = np.searchsorted(distinct, rows)
            part = counts[place]
            yield CellBlock(
                indptr=part.indptr.astype(np.int64),
                genes=part.indices.astype(np.int32, copy=False),
                counts=part.data.astype(np.float32, copy=False),
                totals=totals[place],
                rows=rows,
                draw=window.draw,
                measured=self.measured,
            )


def best_names(var: pd.DataFrame, vocab: GeneVocab | None) -> str:
    """Return the column of var that holds the names of genes, of several the one that fits the vocabulary best."""
    known = [name for name in _NAMES if name in var] or [str(name) for name in text_columns(var) if name is not None]
    if not known:
        raise DataError("var has no column of text, so genes have no names; name the column with gene_key.")
    if vocab is None:
        return known[0]

    def fit(name: str) -> tuple[int, bool]:
        found = GeneMap.of(_texts(var[name]), vocab)
        return found.n_matched, not found.notes  # of two that match alike, names as the vocabulary has them

    return max(known, key=fit)


def _texts(column: pd.Series) -> np.ndarray:
    return np.asarray(column, dtype=object).astype(str)


_ROWS = 1024
"""Cells of a piece where the number of their counts is not known."""

_MAX_ROWS = 4096


class SomaStream:
    """Cells of a query, as ``scforge.data.readers.ChunkReader``; made by :meth:`CensusQuery.streams`."""

    def __init__(
        self,
        reader: CountReader,
        place: SomaLocation,
        joinids: np.ndarray,
        columns: list[str] | None,
        var: pd.DataFrame,
        *,
        lengths: np.ndarray | None,
        gene_key: str | None,
        value_filter: str | None,
    ) -> None:
        self.name, self.n_cells = place.name, len(joinids)
        self._reader, self._place, self._joinids, self._columns = reader, place, joinids, columns
        self._lengths, self._value_filter = lengths, value_filter
        key = gene_key or best_names(var, None)
        self._var = var.drop(columns="soma_joinid").set_index(key, drop=False)
        self._var.index = self._var.index.astype(str)
        self._var.index.name = None

    @property
    def var(self) -> pd.DataFrame:
        """The table of genes; its index holds their names."""
        return self._var

    @cached_property
    def n_entries(self) -> int:
        """Number of counts above zero, about."""
        if self._lengths is not None:
            return int(self._lengths.sum(dtype=np.int64))
        rows = np.unique(np.linspace(0, self.n_cells - 1, num=min(self.n_cells, 64)).astype(np.int64))
        return int(np.ceil(self._reader.counts(rows).nnz / len(rows) * self.n_cells))

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the table of cells (index: their joinids), or some columns of it.

        None returns the columns that the query names; all if it names none.
        """
        frame = self._place.experiment.obs
        names = [name for name in frame.schema.names if name != "soma_joinid"]
        wanted = list(columns) if columns is not None else (names if self._columns is None else self._columns)
        if missing := [name for name in wanted if name not in names]:
            raise missing_column(missing[0], self.name, names)
        with soma(f"obs of {self.name!r}"):
            table = read_table(frame, wanted, joinids=self._joinids)
        return table.set_index(table["soma_joinid"].astype(str).rename(None))[wanted]

    def chunks(self, start: int = 0) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Yield ``(first row, CSR matrix over all genes)`` from row `start` on."""
        while start < self.n_cells:
            stop = self._end(start)
            yield start, self._reader.counts(np.arange(start, stop))
            start = stop

    def _end(self, start: int) -> int:
        if self._lengths is None:
            return min(start + _ROWS, self.n_cells)
        entries = np.cumsum(self._lengths[start : start + _MAX_ROWS], dtype=np.int64)
        return start + max(1, int(np.searchsorted(entries, ENTRIES, side="right")))

    def fingerprint(self) -> dict[str, int | float | str]:
        """Return what tells this query from others: its cells, its genes, and the release of the Census."""
        genes = "\0".join(self._var.index).encode()
        return {
            "release": self._place.release,
            "value_filter": self._value_filter or "",
            "cells": hashlib.blake2b(self._joinids.tobytes(), digest_size=16).hexdigest(),
            "genes": hashlib.blake2b(genes, digest_size=16).hexdigest(),
            "n_cells": self.n_cells,
            "n_genes": len(self._var),
        }


_LENGTHS = "nnz"


@dataclass(frozen=True)
class CensusQuery:
    """Cells of the CELLxGENE Census, or of a SOMA experiment of one's own. Nothing is read before it is opened.

    Needs ``pip install "scforge[census]"``, in an environment of its own: the clients need pandas 2.

    Parameters
    ----------
    organism
        Organism of the Census, e.g. ``"homo_sapiens"``. An experiment that `uri` names directly has only one.
    filters
        Which cells: columns of obs with a value or a list of values, all of which must fit, e.g.
        ``{"tissue": ["lung", "heart"], "is_primary_data": True}``; or the text of a SOMA ``value_filter``. None takes
        all cells. The Census holds many cells twice, so most queries need ``is_primary_data``.
    obs
        Columns of obs to have at hand, e.g. for batches and labels. None has none.
    gene_filter
        Which genes count as measured, given as `filters` are, of columns of var. Library sizes stay those of all
        genes.
    census_version
        Release of the Census, e.g. ``"2025-01-30"``; ``"stable"`` and ``"latest"`` change with time.
    uri
        Path or URI of a SOMA experiment, or of a folder laid out as the Census is; None opens the Census.
    measurement, layer
        Measurement of the experiment, and layer of its X, with raw counts.
    gene_key
        Column of var with the gene names. None takes ``feature_id`` or ``feature_name``, whichever fits the
        vocabulary best.
    tiledb_config
        Options of TileDB, e.g. ``{"vfs.s3.region": "us-west-2"}``.

    Examples
    --------
    >>> query = CensusQuery(filters={"tissue": ["lung", "heart"], "is_primary_data": True}, obs=["cell_type"])
    >>> query.value_filter
    "(tissue in ['lung', 'heart']) and (is_primary_data == True)"
    >>> cells = query.open("human_protein_coding")  # doctest: +SKIP
    """

    organism: str = "homo_sapiens"
    filters: Filters = None
    obs: Sequence[str] | None = None
    gene_filter: Filters = None
    census_version: str = "stable"
    uri: str | os.PathLike[str] | None = None
    measurement: str = "RNA"
    layer: str = "raw"
    gene_key: str | None = None
    tiledb_config: Mapping[str, Any] | None = field(default=None, repr=False)  # may hold secrets

    def __post_init__(self) -> None:
        check_filters(self.filters)
        check_filters(self.gene_filter, "gene_filter")
        if isinstance(self.obs, str):
            raise OptionError(f"obs={self.obs!r} is text; give a list of columns, [{self.obs!r}].")
        for name in ("organism", "census_version", "measurement", "layer"):
            if not isinstance(getattr(self, name), str):
                raise OptionError(f"{name}={getattr(self, name)!r} is not text.")

    @property
    def value_filter(self) -> str | None:
        """The condition of the cells, as SOMA takes it."""
        return joined(conditions(self.filters))

    def open(
        self,
        vocab: str | os.PathLike[str] | GeneVocab | None = None,
        *,
        min_overlap: float = MIN_OVERLAP,
        chunk_size: int = CHUNK_SIZE,
    ) -> CensusCells:
        """Read which cells and genes there are; counts are read when they are needed.

        Parameters
        ----------
        vocab
            Vocabulary to map the genes to, by name; None takes all genes of the query.
        min_overlap
            Smallest share of genes of `vocab` to accept.
        chunk_size
            Cells of neighboring joinids that training reads together.

        Raises
        ------
        OptionError
            If the clients are missing, the organism or the version is unknown, or a filter cannot be used.
        MissingFileError
            If there is nothing at `uri`.
        DataError
            If the Census cannot be reached, a column is missing, or no cell fits the filters.
        GeneMismatchError
            If too few genes of `vocab` are in the experiment.

        Warns
        -----
        ScforgeWarning
            If no cell has one of the values of a filter, or as :func:`scforge.data.open_cells` does for genes.
        """
        check_count("chunk_size", chunk_size, "cells")
        wanted = None if vocab is None else open_vocab(vocab)
        place = self._place()
        obs, joinids, lengths = self._cells(place)
        var, chosen = self._genes(place)
        return CensusCells(
            self._reader(place, joinids, var),
            joinids,
            obs,
            var,
            wanted,
            chosen=chosen,
            lengths=lengths,
            gene_key=self.gene_key,
            min_overlap=min_overlap,
            chunk_size=chunk_size,
        )

    def streams(self) -> list[SomaStream]:
        """Return the cells for reading from first to last, as conversion does.

        Raises
        ------
        OptionError
            If there is a `gene_filter`: which genes are converted is for the vocabulary to say.
        """
        if self.gene_filter is not None:
            raise OptionError(
                f"gene_filter={self.gene_filter!r} is not for conversion; choose the genes with its vocabulary."
            )
        place = self._place()
        obs, joinids, lengths = self._cells(place)
        var, _ = self._genes(place)
        return [
            SomaStream(
                self._reader(place, joinids, var),
                place,
                joinids,
                list(obs.columns) if self.obs is not None else None,
                var,
                lengths=lengths,
                gene_key=self.gene_key,
                value_filter=self.value_filter,
            )
        ]

    def _place(self) -> SomaLocation:
        if self.uri is None:
            return open_census(self.organism, self.census_version, self.tiledb_config)
        return open_uri(os.fspath(self.uri), self.organism, self.tiledb_config)

    def _cells(self, place: SomaLocation) -> tuple[pd.DataFrame, np.ndarray, np.ndarray | None]:
        """Return the wanted columns of obs, the joinids, and the number of counts of each cell if obs has it."""
        frame = place.experiment.obs
        columns = [name for name in frame.schema.names if name != "soma_joinid"]
        wanted = list(dict.fromkeys(self.obs or []))
        for name in wanted:
            if name not in frame.schema.names:
                raise DataError(
                    f"obs names {name!r}, which is not a column of obs of {place.name!r}"
                    f"{suggest(name, columns, 'there is', most=30)}"
                )
        check_values(self.filters, frame.schema, table="obs")
        filtered = list(self.filters) if isinstance(self.filters, Mapping) else []
        lengths = [_LENGTHS] if _LENGTHS in columns else []
        with soma(f"obs of {place.name!r}", "check filters and the connection"):
            table = read_table(frame, [*wanted, *filtered, *lengths], value_filter=self.value_filter)
            if not len(table):
                raise self._nothing(place)
        self._check_occurring(table)
        joinids = np.ascontiguousarray(table["soma_joinid"], dtype=np.int64)
        return table[wanted], joinids, _whole(table[_LENGTHS]) if lengths else None

    def _nothing(self, place: SomaLocation) -> DataError:
        frame = place.experiment.obs
        total = count_rows(frame, None)
        if not total:
            return DataError(f"{place.name!r} has no cells.")
        alone = {name: count_rows(frame, part) for name, part in conditions(self.filters).items()}
        found = ", ".join(f"{name!r} {count}" for name, count in alone.items())
        return DataError(
            f"no cell of {place.name!r} fits filters={self.filters!r}: of {total} cells, each filter alone leaves "
            f"{found}; loosen them."
        )

    def _check_occurring(self, table: pd.DataFrame) -> None:
        """Warn of values that no cell has: most are typos."""
        if not isinstance(self.filters, Mapping):
            return
        for column, value in self.filters.items():
            if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
                continue
            found = set(table[column].unique())
            if absent := [one for one in value if one not in found]:
                warn(
                    f"filters[{column!r}] names {absent[0]!r}, which no cell has that fits the other filters; "
                    "check how it is written."
                )

    def _genes(self, place: SomaLocation) -> tuple[pd.DataFrame, np.ndarray | None]:
        """Return the table of all genes, and which of them fit the `gene_filter`."""
        with soma(f"var of {place.name!r}", "check gene_filter and the connection"):
            frame = self._measurement(place).var
            check_values(self.gene_filter, frame.schema, table="var", argument="gene_filter")
            if self.gene_key is not None and self.gene_key not in frame.schema.names:
                raise DataError(
                    f"gene_key={self.gene_key!r} is not a column of var of {place.name!r}"
                    f"{suggest(self.gene_key, frame.schema.names, 'there is')}"
                )
            # All genes are read, whatever gene_filter says: library sizes are those of all.
            var = read_table(frame)
            if self.gene_filter is None:
                return var, None
            kept = read_table(frame, [], value_filter=joined(conditions(self.gene_filter)))["soma_joinid"]
        if not len(kept):
            raise DataError(f"no gene of {place.name!r} fits gene_filter={self.gene_filter!r}; loosen it.")
        return var, np.asarray(var["soma_joinid"].isin(kept))

    def _measurement(self, place: SomaLocation) -> Any:
        return member(place.experiment.ms, self.measurement, "measurement", repr(place.name))

    def _reader(self, place: SomaLocation, joinids: np.ndarray, var: pd.DataFrame) -> CountReader:
        with soma(f"X of {place.name!r}"):
            array = member(self._measurement(place).X, self.layer, "layer", f"X of {place.name!r}")
        return CountReader(place, array, joinids, np.asarray(var["soma_joinid"], dtype=np.int64))


def _whole(column: pd.Series) -> np.ndarray | None:
    """Return a column of numbers of counts as int32, or None if it holds something else."""
    values = np.asarray(column)
    if values.dtype.kind not in "iu" or (values < 0).any():
        return None
    return values.astype(np.int32)
