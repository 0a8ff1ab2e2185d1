"""Cells of the CELLxGENE Census, or of any SOMA experiment: what is asked for, and opening it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge._checks import check_count
from scforge.data.census_cells import CHUNK_SIZE, SomaCells
from scforge.data.census_filters import Filters, check_filters, check_values, conditions, joined
from scforge.data.census_reading import (
    CountReader,
    SomaPlace,
    count_rows,
    member,
    open_census,
    open_uri,
    read_table,
    soma,
)
from scforge.data.census_stream import SomaStream
from scforge.data.mapping import MIN_OVERLAP
from scforge.data.named import open_vocab
from scforge.errors import DataError, OptionError, did_you_mean, listing, warn

if TYPE_CHECKING:
    import pandas as pd

    from scforge.data.vocab import GeneVocab

__all__ = ["CensusQuery"]

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
    ) -> SomaCells:
        """Read which cells and genes there are; counts are read when they are needed.

        Parameters
        ----------
        vocab
            Vocabulary to map the genes to, by name; None takes all genes of the query.
        min_overlap
            Smallest share of genes of `vocab` to accept.
        chunk_size
            Cells of neighbouring joinids that training reads together.

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
        return SomaCells(
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

    def _place(self) -> SomaPlace:
        if self.uri is None:
            return open_census(self.organism, self.census_version, self.tiledb_config)
        return open_uri(os.fspath(self.uri), self.organism, self.tiledb_config)

    def _cells(self, place: SomaPlace) -> tuple[pd.DataFrame, np.ndarray, np.ndarray | None]:
        """Return the wanted columns of obs, the joinids, and the number of counts of each cell if obs has it."""
        frame = place.experiment.obs
        columns = [name for name in frame.schema.names if name != "soma_joinid"]
        wanted = list(dict.fromkeys(self.obs or []))
        for name in wanted:
            if name not in frame.schema.names:
                raise DataError(
                    f"obs names {name!r}, which is not a column of obs of {place.name!r}"
                    f"{did_you_mean(name, columns)} (there is: {listing(columns, most=30)})"
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

    def _nothing(self, place: SomaPlace) -> DataError:
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

    def _genes(self, place: SomaPlace) -> tuple[pd.DataFrame, np.ndarray | None]:
        """Return the table of all genes, and which of them fit the `gene_filter`."""
        with soma(f"var of {place.name!r}", "check gene_filter and the connection"):
            frame = self._measurement(place).var
            check_values(self.gene_filter, frame.schema, table="var", argument="gene_filter")
            if self.gene_key is not None and self.gene_key not in frame.schema.names:
                raise DataError(
                    f"gene_key={self.gene_key!r} is not a column of var of {place.name!r}"
                    f"{did_you_mean(self.gene_key, frame.schema.names)} "
                    f"(there is: {listing(frame.schema.names)})"
                )
            # All genes are read, whatever gene_filter says: library sizes are those of all.
            var = read_table(frame)
            if self.gene_filter is None:
                return var, None
            kept = read_table(frame, [], value_filter=joined(conditions(self.gene_filter)))["soma_joinid"]
        if not len(kept):
            raise DataError(f"no gene of {place.name!r} fits gene_filter={self.gene_filter!r}; loosen it.")
        return var, np.asarray(var["soma_joinid"].isin(kept))

    def _measurement(self, place: SomaPlace) -> Any:
        return member(place.experiment.ms, self.measurement, "measurement", repr(place.name))

    def _reader(self, place: SomaPlace, joinids: np.ndarray, var: pd.DataFrame) -> CountReader:
        with soma(f"X of {place.name!r}"):
            array = member(self._measurement(place).X, self.layer, "layer", f"X of {place.name!r}")
        return CountReader(place, array, joinids, np.asarray(var["soma_joinid"], dtype=np.int64))


def _whole(column: pd.Series) -> np.ndarray | None:
    """Return a column of numbers of counts as int32, or None if it holds something else."""
    values = np.asarray(column)
    if values.dtype.kind not in "iu" or (values < 0).any():
        return None
    return values.astype(np.int32)
