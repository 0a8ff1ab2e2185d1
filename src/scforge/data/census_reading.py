"""Reading a SOMA experiment: opening it, its tables, and rows of its counts. The client is tiledbsoma.

Shapes: N cells of a query, V genes of the experiment, R rows that are read.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from scforge.data.checks import value_problem
from scforge.data.compressed import row_sums
from scforge.errors import DataError, MissingFileError, OptionError, ScforgeError, did_you_mean, first_line, listing

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CountReader", "SomaPlace", "count_rows", "import_soma", "open_census", "open_uri", "read_table", "soma"]

_SPECIES = {"human": "homo_sapiens", "mouse": "mus_musculus"}
_PIECE = 4096
"""Cells read at once: what the client returns takes 20 bytes an entry."""


@dataclass(frozen=True)
class SomaPlace:
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


def open_census(organism: str, version: str, tiledb_config: Mapping[str, Any] | None) -> SomaPlace:
    """Open an organism of the CELLxGENE Census."""
    census_client = import_soma("cellxgene_census")
    what = f"the CELLxGENE Census (census_version={version!r})"
    with soma(what, "check the connection, or name a copy of your own with uri"):
        try:
            release = census_client.get_census_version_description(version)["release_build"]
        except ValueError as error:
            known = list(census_client.get_census_version_directory())
            raise OptionError(
                f"census_version={version!r} is not known{did_you_mean(version, known)} (known: {listing(known)})"
            ) from error
        config = None if tiledb_config is None else dict(tiledb_config)
        root = census_client.open_soma(census_version=version, tiledb_config=config)
        return SomaPlace(f"census:{release}/{organism}", _experiment(root, organism, what), release, root)


def open_uri(uri: str, organism: str, tiledb_config: Mapping[str, Any] | None) -> SomaPlace:
    """Open an experiment, or an organism of a folder laid out as the Census is."""
    tiledbsoma = import_soma()
    what = f"uri={uri!r}"
    with soma(what, "check the URI, and the options of the connection in tiledb_config"):
        context = None if tiledb_config is None else tiledbsoma.SOMATileDBContext(tiledb_config=dict(tiledb_config))
        root = tiledbsoma.open(uri, context=context)
        return SomaPlace(uri, _experiment(root, organism, what), "", root)


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
        raise OptionError(
            f"organism={organism!r} is not in {what}{did_you_mean(organism, known)} (it has: {listing(known)})"
        )
    return organisms[name]


def member(collection: Any, name: str, argument: str, what: str) -> Any:
    """Return a part of a collection, or raise :class:`~scforge.errors.DataError` with the names that are there."""
    if name not in collection:
        known = sorted(collection)
        raise DataError(f"{argument}={name!r} is not in {what}{did_you_mean(name, known)} (it has: {listing(known)})")
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

    def __init__(self, place: SomaPlace, array: Any, joinids: np.ndarray, var_joinids: np.ndarray) -> None:
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
