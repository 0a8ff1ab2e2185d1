"""Matrices of an h5ad file, read piece by piece: CSR, CSC or dense, larger than memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from scipy import sparse

from scforge.data.compressed import REPAIR, boundary_problem, index_problem
from scforge.errors import DataError, MissingFileError, ScforgeError, did_you_mean, first_line, listing

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["H5adFile", "Matrix", "open_h5ad"]

_ENTRIES = 2**22
"""Entries that are held at a time, some 100 MB with what is made of them."""

_DAMAGE = (OSError, KeyError, ValueError, TypeError, IndexError, AttributeError)
"""What h5py and anndata raise for a file with missing or odd parts."""


@dataclass(frozen=True)
class Matrix:
    """A matrix in an h5ad file.

    Attributes
    ----------
    stored
        The group or data set of the file.
    kind
        ``"csr"``, ``"csc"`` or ``"dense"``.
    shape
        Number of cells and of genes.
    """

    stored: Any
    kind: str
    shape: tuple[int, int]

    @classmethod
    def of(cls, stored: h5py.Group | h5py.Dataset) -> Matrix:
        """Recognise how a matrix is stored.

        Raises
        ------
        DataError
            If it is no matrix of numbers, or its parts do not fit together.
        """
        if isinstance(stored, h5py.Dataset):
            if stored.shape is None or len(stored.shape) != 2 or stored.dtype.kind not in "biuf":
                raise DataError(f"{_place(stored)} is no matrix of numbers (shape {stored.shape}, {stored.dtype}).")
            return cls(stored, "dense", stored.shape)
        encoding = str(stored.attrs.get("encoding-type", stored.attrs.get("h5sparse_format", "")))
        kind = encoding.removesuffix("_matrix")
        if kind not in ("csr", "csc") or not {"data", "indices", "indptr"} <= set(stored):
            raise DataError(f"{_place(stored)} is stored as {encoding!r}; a CSR, CSC or dense matrix is needed.")
        try:
            n_rows, n_columns = map(int, stored.attrs.get("shape", stored.attrs.get("h5sparse_shape")))
        except (TypeError, ValueError) as error:
            raise DataError(f"{_place(stored)} is damaged: it has no shape of two numbers; {REPAIR}.") from error
        matrix = cls(stored, kind, (n_rows, n_columns))
        if min(matrix.shape) < 0:
            matrix._damaged(f"its shape is {matrix.shape}")
        matrix._check_parts()
        return matrix

    def _check_parts(self) -> None:
        """Raise unless data, indices and indptr are lists of numbers of lengths that fit; they are not read yet."""
        for name, kinds in {"data": "biuf", "indices": "iu", "indptr": "iu"}.items():
            part = self.stored[name]
            if not isinstance(part, h5py.Dataset) or part.ndim != 1 or part.dtype.kind not in kinds:
                self._damaged(f"{name} is no list of numbers")
        n_entries, n_indices = len(self.stored["data"]), len(self.stored["indices"])
        if n_entries != n_indices:
            self._damaged(f"it has {n_entries} values and {n_indices} indices")
        boundaries, needed = self.stored["indptr"], self._major_minor[0] + 1
        if len(boundaries) != needed:
            self._damaged(f"it has {len(boundaries)} boundaries (indptr) and needs {needed}")
        if int(boundaries[0]) != 0 or int(boundaries[-1]) != n_entries:
            self._damaged(
                f"its boundaries (indptr) run from {boundaries[0]} to {boundaries[-1]}, "
                f"but there are {n_entries} entries"
            )

    @property
    def _major_minor(self) -> tuple[int, int]:
        """Number of compressed rows (or columns), and of what the indices name."""
        return self.shape if self.kind == "csr" else self.shape[::-1]

    def _damaged(self, problem: str | None) -> None:
        if problem is not None:
            raise DataError(f"{_place(self.stored)} is damaged: {problem}; {REPAIR}.")

    def _boundaries(self, start: int = 0, stop: int | None = None, *, first: int = 0) -> np.ndarray:
        """Return some of the boundaries, of which the first is known."""
        boundaries = self.stored["indptr"][start:stop].astype(np.int64)
        self._damaged(boundary_problem(boundaries, len(self.stored["data"]), first=first))
        return boundaries

    def _indices(self, start: int, stop: int) -> np.ndarray:
        indices = self.stored["indices"][start:stop]
        self._damaged(index_problem(indices, self._major_minor[1]))
        return indices

    def entries(self, size: int = _ENTRIES) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield all stored entries in the order of the file.

        Yields
        ------
        Rows, columns and values, each of shape (k,) with k at most `size` or one dense row.
        """
        if self.kind == "dense":
            step = max(1, size // max(self.shape[1], 1))
            for start in range(0, self.shape[0], step):
                block = self.stored[start : start + step]
                rows, columns = np.nonzero(block)
                yield rows + start, columns, block[rows, columns]
            return
        boundaries = self._boundaries()
        for start in range(0, int(boundaries[-1]), size):
            minor, values = self._indices(start, start + size), self.stored["data"][start : start + size]
            stop = start + len(values)
            first = int(np.searchsorted(boundaries, start, side="right")) - 1
            last = int(np.searchsorted(boundaries, stop, side="left"))
            inside = np.clip(boundaries[first : last + 1], start, stop)
            major = np.repeat(np.arange(first, last), np.diff(inside))
            yield (major, minor, values) if self.kind == "csr" else (minor, major, values)

    def row_chunks(self, size: int = _ENTRIES) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Yield the cells in order, some rows at a time, as ``(first row, CSR matrix of all columns)``.

        A CSC matrix is read once for every `size` entries that it has, because its cells lie scattered over the file.
        """
        if self.kind == "dense":
            step = max(1, size // self.shape[1])
            for start in range(0, self.shape[0], step):
                yield start, sparse.csr_matrix(self.stored[start : start + step])
        elif self.kind == "csr":
            yield from self._csr_chunks(size)
        else:
            yield from self._csc_chunks(size)

    def _csr_chunks(self, size: int) -> Iterator[tuple[int, sparse.csr_matrix]]:
        n_cells, n_genes = self.shape
        start, last = 0, 0
        while start < n_cells:
            # The boundaries alone may be many; a chunk has at most 65,536 rows.
            boundaries = self._boundaries(start, start + 2**16 + 1, first=last)
            stop = max(1, int(np.searchsorted(boundaries, boundaries[0] + size, side="right")) - 1)
            first, last = int(boundaries[0]), int(boundaries[stop])
            parts = (self.stored["data"][first:last], self._indices(first, last), boundaries[: stop + 1] - first)
            yield start, sparse.csr_matrix(parts, shape=(stop, n_genes))
            start += stop

    def _csc_chunks(self, size: int) -> Iterator[tuple[int, sparse.csr_matrix]]:
        n_cells, n_genes = self.shape
        filled = np.zeros(n_cells, dtype=np.int64)
        for rows, _, _ in self.entries(size):
            filled += np.bincount(rows, minlength=n_cells)
        before = np.concatenate([[0], np.cumsum(filled)])
        start = 0
        while start < n_cells:
            stop = max(start + 1, int(np.searchsorted(before, before[start] + size, side="right")) - 1)
            parts = []
            for rows, columns, values in self.entries(size):
                here = (rows >= start) & (rows < stop)
                parts.append((values[here], rows[here] - start, columns[here]))
            chunk = sparse.csr_matrix((stop - start, n_genes), dtype=self.stored["data"].dtype)
            if parts:
                values, rows, columns = map(np.concatenate, zip(*parts, strict=True))
                chunk = sparse.csr_matrix((values, (rows, columns)), shape=chunk.shape)
            yield start, chunk
            start = stop


@dataclass(frozen=True)
class H5adFile:
    """An open h5ad file, of which nothing is in memory but what is asked for.

    Attributes
    ----------
    path
        Path of the file.
    file
        The open file.
    """

    path: Path
    file: h5py.File

    @cached_property
    def var(self) -> pd.DataFrame:
        """The table of genes."""
        import pandas as pd
        from anndata._io.specs.registry import IORegistryError  # a way of storing that this anndata does not know
        from anndata.io import read_elem

        try:
            table = read_elem(self.file["var"])
        except (*_DAMAGE, IORegistryError) as error:
            raise DataError(
                f"the table of genes (var) of {str(self.path)!r} cannot be read: {first_line(error)}; "
                "write the file again."
            ) from error
        if not isinstance(table, pd.DataFrame):
            raise DataError(f"var of {str(self.path)!r} is no table of genes; write the file again with anndata.")
        return table

    @property
    def layers(self) -> list[str]:
        """Names of the layers."""
        group = self.file.get("layers")
        return list(group) if isinstance(group, h5py.Group) else []

    def has(self, name: str) -> bool:
        """Whether the file has a part of that name, e.g. ``"X"`` or ``"raw/X"``."""
        # A matrix that is not there may be stored as an empty one.
        return name in self.file and not (
            isinstance(self.file[name], h5py.Dataset) and self.file[name].shape in (None, ())
        )

    def matrix(self, layer: str | None = None) -> Matrix:
        """Return a layer, or X if `layer` is None.

        Raises
        ------
        DataError
            If it is not there, or no matrix of numbers.
        """
        if layer is not None and layer not in self.layers:
            raise DataError(
                f"layer={layer!r} is not in the layers of {str(self.path)!r}{did_you_mean(layer, self.layers) or ';'} "
                f"(layers: {listing(self.layers)}; layer=None reads X)"
            )
        name = "X" if layer is None else f"layers/{layer}"
        if not self.has(name):
            raw = " or use raw, which adata.raw.to_adata() makes an AnnData of" if self.has("raw/X") else ""
            raise DataError(
                f"{str(self.path)!r} has no {name}; name a layer with counts{raw} (layers: {listing(self.layers)})."
            )
        matrix = Matrix.of(self.file[name])
        if matrix.shape[1] != len(self.var) or not min(matrix.shape):
            raise DataError(
                f"{name} of {str(self.path)!r} has {matrix.shape[0]} cells x {matrix.shape[1]} genes, and the table of "
                f"genes {len(self.var)} rows; a matrix with cells and as many genes is needed."
            )
        return matrix


@contextlib.contextmanager
def open_h5ad(path: str | Path) -> Iterator[H5adFile]:
    """Open an h5ad file for reading piece by piece.

    Raises
    ------
    MissingFileError
        If there is no such file.
    DataError
        If it is no h5ad file, or has no cells or no genes.
    """
    path = Path(path)
    if not path.exists():
        raise MissingFileError(f"the file {str(path)!r} does not exist.")
    if not path.is_file():
        raise DataError(f"{str(path)!r} is not a file; name an h5ad file.")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read as an h5ad file: {first_line(error)}.") from error
    with file:
        tables = (file.get("obs"), file.get("var"))
        if not all(isinstance(table, h5py.Group) and "_index" in table.attrs for table in tables):
            raise DataError(
                f"{str(path)!r} cannot be read as an h5ad file: it has no tables obs and var of a current anndata; "
                "write it again with anndata.read_h5ad(path).write_h5ad(path)."
            )
        try:
            yield H5adFile(path, file)
        except ScforgeError:
            raise
        except OSError as error:  # e.g. a damaged block
            raise DataError(f"{str(path)!r} cannot be read as an h5ad file: {first_line(error)}.") from error


def _place(stored: Any) -> str:
    return f"{stored.name.removeprefix('/')!r} of {stored.file.filename!r}"
