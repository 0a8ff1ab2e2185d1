"""Cells of a SOMA experiment from first to last, as conversion reads them.

Shapes: N cells of the query, V genes of the experiment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from scforge.data.census_cells import best_names
from scforge.data.census_reading import CountReader, SomaPlace, read_table, soma
from scforge.data.stream_matrix import ENTRIES
from scforge.data.stream_stored import missing_column

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SomaStream"]

_ROWS = 1024
"""Cells of a piece where the number of their counts is not known."""

_MOST_ROWS = 4096


class SomaStream:
    """Cells of a query, as :class:`scforge.data.streams.CellStream`; made by :meth:`CensusQuery.streams`."""

    def __init__(
        self,
        reader: CountReader,
        place: SomaPlace,
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
        entries = np.cumsum(self._lengths[start : start + _MOST_ROWS], dtype=np.int64)
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
