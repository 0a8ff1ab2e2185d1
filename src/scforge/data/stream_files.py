"""AnnData on disk or behind a URL, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from scipy import sparse

from scforge.data.h5ad import open_h5ad
from scforge.data.stream_adata import table_digest
from scforge.data.stream_counts import checked_chunks, estimated_entries
from scforge.data.stream_errors import reading
from scforge.data.stream_stored import StoredAdata, missing_column
from scforge.errors import DataError

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

__all__ = ["BackedStream", "FileStream", "H5adPlace", "Place"]


class Place(Protocol):
    """Where an AnnData is stored, and how it is opened; `name` is `address` without credentials."""

    name: str
    address: str

    def open(self) -> AbstractContextManager[StoredAdata]:
        """Open it for reading."""

    def identity(self) -> dict[str, int | float | str]:
        """Return what changes when the file does."""


class H5adPlace:
    """An h5ad file, or a modality of an h5mu file."""

    def __init__(self, path: Path, modality: str | None = None) -> None:
        self.path, self.modality = path, modality
        self.name = self.address = str(path)

    def open(self) -> AbstractContextManager[StoredAdata]:
        """Open it for reading."""
        return open_h5ad(self.path, self.modality)

    def identity(self) -> dict[str, int | float | str]:
        """Return size and time of change."""
        found = self.path.stat()
        return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


class FileStream:
    """An AnnData on disk or behind a URL, as :class:`scforge.data.streams.CellStream`.

    It is opened anew for each question, so that it can be handed to another process.
    """

    def __init__(self, place: Place, layer: str | None = None) -> None:
        self._place, self._layer, self.name, self.address = place, layer, place.name, place.address
        with reading(repr(place.name), fix="write the file again"), place.open() as opened:
            matrix = opened.matrix(layer)
            self.n_cells, self._n_genes = matrix.shape
            self._var = opened.var
            if opened.n_obs != self.n_cells:
                raise DataError(
                    f"{matrix.place} has {self.n_cells} cells, and the table of cells (obs) {opened.n_obs} rows; "
                    "write the file again."
                )

    @property
    def var(self) -> pd.DataFrame:
        """The table of genes."""
        return self._var

    @cached_property
    def n_entries(self) -> int:
        """Number of counts above zero, about."""
        with self._place.open() as opened:
            return estimated_entries(opened.matrix(self._layer))

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the table of cells, or some columns of it."""
        with self._place.open() as opened:
            return opened.obs(columns)

    def chunks(self, start: int = 0) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Yield rows from `start` on, as ``(first row, CSR matrix of all genes)``."""
        with self._place.open() as opened:
            yield from checked_chunks(opened.matrix(self._layer), start)

    def fingerprint(self) -> dict[str, int | float | str]:
        """Return what tells this file from others, and from itself after a change."""
        return {**self._place.identity(), "n_cells": self.n_cells, "n_genes": self._n_genes}


class BackedStream(FileStream):
    """A backed AnnData: counts are those of its file, tables those in memory, which may have changed."""

    def __init__(self, adata: AnnData, layer: str | None = None) -> None:
        super().__init__(H5adPlace(Path(adata.filename)), layer)
        self._adata, self._var = adata, adata.var

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the table of cells, or some columns of it."""
        obs = self._adata.obs
        if columns is None:
            return obs
        if missing := [column for column in columns if column not in obs]:
            raise missing_column(missing[0], self.name, list(obs.columns))
        return obs[list(columns)]

    def fingerprint(self) -> dict[str, int | float | str]:
        """Return what tells these cells from others."""
        return {**super().fingerprint(), "obs": table_digest(self._adata.obs), "var": table_digest(self._adata.var)}
