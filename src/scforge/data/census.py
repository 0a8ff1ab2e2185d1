"""Query the CELLxGENE Census and read its cells."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import keyword
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge._checks import check_known
from scforge.data.checks import listed_columns
from scforge.data.genes import GeneMap, text_columns
from scforge.data.matrix import check_chunk
from scforge.data.readers import missing_column
from scforge.errors import DataError, MissingFileError, OptionError, ScforgeError, first_line, suggest, warn

if TYPE_CHECKING:
    import pandas as pd
    from scipy import sparse

    from scforge.data.vocab import GeneVocab


Filters = Mapping[str, Any] | str | None
"""A mapping from column to a value or a list of values, a SOMA ``value_filter``, or None for all cells."""

_SPECIES = {"human": "homo_sapiens", "mouse": "mus_musculus"}

_NAMES = ("feature_id", "feature_name", "var_id")
"""Columns of ``var`` with gene names, in the Census and from ``tiledbsoma.io.from_anndata``."""

_ROWS = 1024
"""Number of cells read at a time."""

_SAMPLED = 64
"""Number of cells read to estimate the number of counts."""


@dataclass(frozen=True)
class CensusQuery:
    """Query for cells in the CELLxGENE Census or another SOMA experiment; nothing is read before it is opened.

    :func:`scforge.data.open_cells` reads the cells into memory, and :func:`scforge.data.convert` writes them to a
    store. Requires ``pip install "scforge[census]"``, in a separate environment, because the clients require pandas 2.

    Parameters
    ----------
    organism
        Organism in the Census, e.g. ``"homo_sapiens"``. It has no effect if `uri` refers to an experiment.
    filters
        Filters that select cells: a mapping from obs columns to a value or list of values, e.g. ``{"tissue": ["lung",
        "heart"], "is_primary_data": True}`` (a cell must match every column), or a SOMA ``value_filter``. If None, uses
        all cells. The Census contains many cells twice, so most queries need ``is_primary_data``.
    obs
        Columns of ``obs`` to make available, e.g. for batches and labels. If None, uses all columns.
    census_version
        Census release, e.g. ``"2025-01-30"``. The releases ``"stable"`` and ``"latest"`` change over time.
    uri
        Path or URI of a SOMA experiment, or of a folder with the Census layout. If None, opens the Census.
    measurement, layer
        Measurement of the experiment, and the layer of its X that contains raw counts.
    gene_key
        Column of ``var`` with the gene names. If None, uses ``feature_id`` or ``feature_name``, whichever matches the
        vocabulary best.
    tiledb_config
        TileDB options, e.g. ``{"vfs.s3.region": "us-west-2"}``.

    Examples
    --------
    >>> import scforge
    >>> query = CensusQuery(filters={"tissue": ["lung", "heart"], "is_primary_data": True}, obs=["cell_type"])
    >>> query.value_filter
    "(tissue in ['lung', 'heart']) and (is_primary_data == True)"
    >>> cells = scforge.data.open_cells(query, "human_protein_coding")  # doctest: +SKIP
    """

    organism: str = "homo_sapiens"
    filters: Filters = None
    obs: Sequence[str] | None = None
    census_version: str = "stable"
    uri: str | os.PathLike[str] | None = None
    measurement: str = "RNA"
    layer: str = "raw"
    gene_key: str | None = None
    tiledb_config: Mapping[str, Any] | None = field(default=None, repr=False)  # may hold secrets

    def __post_init__(self) -> None:
        if not isinstance(self.filters, Mapping | str | None):
            raise OptionError("must be a dict of columns and values, or a SOMA value_filter.", filters=self.filters)
        for column, values in self._values.items():
            if not values:
                raise OptionError(
                    f"[{column!r}]=[] is empty; pass at least one value, or remove the key.", argument="filters"
                )
        listed_columns(self.obs)

    @property
    def value_filter(self) -> str | None:
        """The condition that selects cells, in SOMA syntax."""
        conditions = list(self._conditions.values())
        if len(conditions) > 1:
            return " and ".join(f"({condition})" for condition in conditions)
        return conditions[0] if conditions else None

    @property
    def _values(self) -> dict[str, list[Any]]:
        """A mapping from column to the values that select cells."""
        filters = {} if self.filters is None or isinstance(self.filters, str) else self.filters
        # To Python's own numbers and text, which SOMA's parser knows.
        return {column: np.atleast_1d(value).tolist() for column, value in filters.items()}

    @property
    def _conditions(self) -> dict[str, str]:
        """A mapping from filter name to the condition in SOMA syntax."""
        if isinstance(self.filters, str):
            return {self.filters: self.filters}
        conditions = {}
        for column, values in self._values.items():
            name = column if column.isidentifier() and not keyword.iskeyword(column) else f"attr({column!r})"
            # SOMA parses Python's own notation, so repr() quotes whatever stands in the text.
            equal = [f"{name} == {value!r}" for value in values]
            one_by_one = len(values) == 1 or any(isinstance(value, bool) for value in values)
            conditions[column] = " or ".join(equal) if one_by_one else f"{name} in {values!r}"
        return conditions

    def streams(self, vocab: GeneVocab | None = None) -> list[SomaStream]:
        """Read the tables of matching cells and genes; counts are read when they are needed.

        Parameters
        ----------
        vocab
            Vocabulary that the gene names should match.

        Returns
        -------
        A list with one stream of cells.

        Raises
        ------
        OptionError
            If the clients are missing, or the organism or the version is unknown.
        MissingFileError
            If `uri` does not exist.
        DataError
            If the Census cannot be reached, a column is missing, or no cell matches the filters.

        Warns
        -----
        ScforgeWarning
            If a filter value does not occur in any cell.
        """
        return [SomaStream(self, vocab)]


class SomaStream:
    """A ``scforge.data.readers.ChunkReader`` for the cells of a query."""

    def __init__(self, query: CensusQuery, vocab: GeneVocab | None) -> None:
        self.query = query
        self.name, self._release, self._root = _opened(query)
        with _reading(repr(self.name)):
            experiment = _experiment(self._root, query.organism, self.name)
            self._obs = experiment.obs
            measurement = _member(experiment.ms, query.measurement, "measurement", self.name)
            self._counts = _member(measurement.X, query.layer, "layer", f"X of {self.name}")
        self._columns = [name for name in self._obs.schema.names if name != "soma_joinid"]
        self._joinids, self._n_counts = self._cells()
        self.n_cells = len(self._joinids)
        with _reading(f"var of {self.name!r}"):
            var = _read_table(measurement.var)
        if query.gene_key is not None:
            check_known("gene_key", query.gene_key, var.columns, f"var of {self.name!r}")
        self._var_joinids = np.asarray(var["soma_joinid"], dtype=np.int64)
        self.var = var.drop(columns="soma_joinid").set_index(query.gene_key or best_names(var, vocab), drop=False)
        self.var.index = self.var.index.astype(str).rename(None)

    def _cells(self) -> tuple[np.ndarray, int | None]:
        """Return the joinids of matching cells, and their number of counts if it is in obs, otherwise None."""
        filtered = self.query._values
        if missing := [name for name in filtered if name not in self._columns]:
            raise missing_column(missing[0], self.name, self._columns)
        wanted = [*filtered, "nnz"] if "nnz" in self._columns else [*filtered]
        with _reading(f"obs of {self.name!r}", "check the filters and the connection"):
            table = _read_table(self._obs, wanted, value_filter=self.query.value_filter)
            if not len(table):
                counted = [
                    f"{name!r} alone matches {len(_read_table(self._obs, [], value_filter=condition))}"
                    for name, condition in self.query._conditions.items()
                ]
                raise DataError(
                    f"no cell of {self.name!r} matches filters={self.query.filters!r}: of {self._obs.count} cells, "
                    f"{', '.join(counted) or 'no cell is selected'}; relax the filters."
                )
        for column, values in filtered.items():
            # Most are typos.
            present = set(table[column].unique())
            if absent := [value for value in values if value not in present]:
                warn(
                    f"filters[{column!r}] contains {absent[0]!r}, but no cell that matches the other filters has this "
                    "value."
                )
        n_counts = int(table["nnz"].sum()) if "nnz" in table else None
        return np.ascontiguousarray(table["soma_joinid"], dtype=np.int64), n_counts

    @property
    def address(self) -> str:
        """Identifier of the cells of this query."""
        query = self.query
        return f"soma://{self.name}?{query.value_filter}&{query.obs}&{query.measurement}&{query.layer}"

    @cached_property
    def n_entries(self) -> int:
        """Approximate number of nonzero counts."""
        if self._n_counts is not None:
            return self._n_counts
        sampled = np.unique(np.linspace(0, self.n_cells - 1, num=_SAMPLED).astype(np.int64))
        n_counts = sum(chunk.nnz for _, chunk in self._read(self._joinids[sampled]))
        return int(np.ceil(n_counts / len(sampled) * self.n_cells))

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return columns of the cell table, indexed by joinid. If None, uses the columns of the query."""
        wanted = columns if columns is not None else self._columns if self.query.obs is None else self.query.obs
        if missing := [name for name in wanted if name not in self._columns]:
            raise missing_column(missing[0], self.name, self._columns)
        with _reading(f"obs of {self.name!r}"):
            table = _read_table(self._obs, list(wanted), joinids=self._joinids)
        return table.set_index(table["soma_joinid"].astype(str).rename(None))[list(wanted)]

    def chunks(self) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Yield pieces of ``(first row, CSR matrix over all genes)``."""
        return self._read(self._joinids)

    def _read(self, joinids: np.ndarray) -> Iterator[tuple[int, sparse.csr_matrix]]:
        first, where = 0, f"X of {self.name!r}"
        with _reading(where):
            read = self._counts.read((joinids, slice(None)))
            for counts, _ in read.blockwise(axis=0, size=_ROWS, reindex_disable_on_axis=1).scipy():
                counts = counts[:, self._var_joinids]  # var may lack some genes that X has
                counts.eliminate_zeros()
                check_chunk(
                    counts,
                    where,
                    first,
                    no_counts="pass the layer that contains the raw counts",
                    empty="remove them with a filter, e.g. value_filter 'nnz > 0'",
                )
                yield first, counts
                first += counts.shape[0]

    def fingerprint(self) -> dict[str, int | float | str]:
        """Return a fingerprint of this query: cells, genes, and Census release."""
        genes = "\0".join(self.var.index).encode()
        return {
            "release": self._release,
            "counts": f"{self.query.measurement}/{self.query.layer}",
            "value_filter": self.query.value_filter or "",
            "obs": "all" if self.query.obs is None else repr(list(self.query.obs)),
            "cells": hashlib.blake2b(self._joinids.tobytes(), digest_size=16).hexdigest(),
            "genes": hashlib.blake2b(genes, digest_size=16).hexdigest(),
            "n_cells": self.n_cells,
            "n_genes": len(self.var),
        }


def _import_soma(module: str = "tiledbsoma") -> Any:
    """Import a SOMA client. Raises an :class:`~scforge.errors.OptionError` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OptionError(
            f"CensusQuery requires the package {module!r}, which cannot be imported ({first_line(error)}); install it "
            'with pip install "scforge[census]" in a separate environment, because it needs pandas 2.'
        ) from error


@contextlib.contextmanager
def _reading(what: str, advice: str = "check the connection, and try again") -> Iterator[None]:
    """Convert client errors into one sentence; `what` names the object being read."""
    tiledbsoma = _import_soma()
    try:
        yield
    except ScforgeError:
        raise
    except tiledbsoma.DoesNotExistError as error:
        raise MissingFileError(f"{what} does not exist ({first_line(error)}); check the name.") from error
    # TileDB's own errors, e.g. of S3, come as RuntimeError; those of HTTP, on the way to the Census, as OSError.
    except (tiledbsoma.SOMAError, RuntimeError, OSError) as error:
        raise DataError(f"{what} cannot be read: {first_line(error)}; {advice}.") from error


def _opened(query: CensusQuery) -> tuple[str, str, Any]:
    """Return the name of a query's cells, the Census release (empty for a `uri`), and the opened root object.

    Keep the root object: the client closes an experiment when its root is garbage-collected.
    """
    config = None if query.tiledb_config is None else dict(query.tiledb_config)
    if query.uri is not None:
        tiledbsoma, uri = _import_soma(), os.fspath(query.uri)
        with _reading(f"uri={uri!r}", "check the URI and the connection options in tiledb_config"):
            context = None if config is None else tiledbsoma.SOMATileDBContext(tiledb_config=config)
            return uri, "", tiledbsoma.open(uri, context=context)
    client, version = _import_soma("cellxgene_census"), query.census_version
    what = f"the CELLxGENE Census (census_version={version!r})"
    with _reading(what, "check the connection, or pass the address of a copy as uri"):
        try:
            release = client.get_census_version_description(version)["release_build"]
        except ValueError as error:
            releases = list(client.get_census_version_directory())
            raise OptionError(f"is unknown{suggest(version, releases)}", census_version=version) from error
        root = client.open_soma(census_version=version, tiledb_config=config)
    return f"census:{release}/{query.organism}", release, root


def _experiment(root: Any, organism: str, name: str) -> Any:
    """Return the opened experiment, or the experiment of an organism in a folder with the Census layout."""
    tiledbsoma = _import_soma()
    if isinstance(root, tiledbsoma.Experiment):
        return root
    if not isinstance(root, tiledbsoma.Collection):
        raise DataError(f"{name!r} is a SOMA {type(root).__name__}; pass an experiment, or a folder in Census layout.")
    key = "_".join(organism.lower().split())
    return _member(root.get("census_data", root), _SPECIES.get(key, key), "organism", name, OptionError)


def _member(collection: Any, key: str, argument: str, where: str, error: type[ScforgeError] = DataError) -> Any:
    """Return a member of a collection. Raises `error` with the available names if it is missing."""
    check_known(argument, key, sorted(collection), repr(where), error=error)
    return collection[key]


def _read_table(
    frame: Any,
    columns: Sequence[str] | None = None,
    *,
    value_filter: str | None = None,
    joinids: np.ndarray | None = None,
) -> pd.DataFrame:
    """Return rows of a SOMA table, sorted by joinid; repetitive text becomes categorical."""
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


def best_names(var: pd.DataFrame, vocab: GeneVocab | None) -> str:
    """Return the column of var with gene names; of several columns, the one that matches the vocabulary best."""
    columns = {name: column for name, column in text_columns(var).items() if name is not None}
    candidates = [name for name in _NAMES if name in columns] or list(columns)
    if not candidates:
        raise DataError(
            "has no text column with gene names; set gene_key to the column that contains the names.", argument="var"
        )
    if vocab is None:
        return candidates[0]

    def fit(name: str) -> tuple[int, bool]:
        gene_map = GeneMap.of(columns[name], vocab)
        return gene_map.n_matched, not gene_map.notes  # of two that match alike, names as the vocabulary has them

    return max(candidates, key=fit)
