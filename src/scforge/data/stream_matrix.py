"""Matrices of an AnnData on disk (h5ad or zarr), read piece by piece: CSR, CSC or dense, larger than memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import sparse

from scforge.data.compressed import REPAIR, boundary_problem, index_problem
from scforge.data.stream_errors import reading
from scforge.data.stream_memory import check_stored
from scforge.errors import DataError

__all__ = ["ENTRIES", "ROWS", "Matrix", "is_array"]

ENTRIES = 2**22
"""Entries that are held at a time, some 100 MB with what is made of them."""

ROWS = 2**16
"""Most rows of a piece: the boundaries of empty rows alone may be many."""

_CSC_WINDOW = 8
"""How many pieces of a CSC matrix are gathered in one reading of it, which is all of it: some 800 MB at the most."""


def is_array(stored: Any) -> bool:
    """Whether something in an h5ad file or a zarr folder is an array, and no group."""
    return hasattr(stored, "dtype")


@dataclass(frozen=True)
class Matrix:
    """A matrix in an h5ad file or a zarr folder.

    Attributes
    ----------
    stored
        The group or the array (h5py or zarr).
    kind
        ``"csr"``, ``"csc"`` or ``"dense"``.
    shape
        Number of cells and of genes.
    place
        What the matrix is, for messages, e.g. ``"'X' of 'cells.h5ad'"``.
    """

    stored: Any
    kind: str
    shape: tuple[int, int]
    place: str

    @classmethod
    def of(cls, stored: Any, source: str | None = None) -> Matrix:
        """Recognise how a matrix is stored; `source` names the file in messages.

        Raises
        ------
        DataError
            If it is no matrix of numbers, or its parts do not fit together.
        """
        name = repr(stored.name.removeprefix("/"))
        place = f"{name} of {source or stored.file.filename!r}"
        if is_array(stored):
            if stored.shape is None or len(stored.shape) != 2 or stored.dtype.kind not in "biuf":
                raise DataError(f"{place} is no matrix of numbers (shape {stored.shape}, {stored.dtype}).")
            check_stored(stored, f"a piece of {place}", whole=False)
            return cls(stored, "dense", tuple(stored.shape), place)
        encoding = str(stored.attrs.get("encoding-type", stored.attrs.get("h5sparse_format", "")))
        kind = encoding.removesuffix("_matrix")
        if kind not in ("csr", "csc") or not {"data", "indices", "indptr"} <= set(stored):
            raise DataError(f"{place} is stored as {encoding!r}; a CSR, CSC or dense matrix is needed.")
        try:
            n_rows, n_columns = map(int, stored.attrs.get("shape", stored.attrs.get("h5sparse_shape")))
        except (TypeError, ValueError) as error:
            raise DataError(f"{place} is damaged: it has no shape of two numbers; {REPAIR}.") from error
        matrix = cls(stored, kind, (n_rows, n_columns), place)
        if min(matrix.shape) < 0:
            matrix._damaged(f"its shape is {matrix.shape}")
        matrix._check_parts()
        return matrix

    def _check_parts(self) -> None:
        """Raise unless data, indices and indptr are lists of numbers of lengths that fit; they are not read yet."""
        for name, kinds in {"data": "biuf", "indices": "iu", "indptr": "iu"}.items():
            part = self.stored[name]
            if not is_array(part) or part.shape is None or len(part.shape) != 1 or part.dtype.kind not in kinds:
                self._damaged(f"{name} is no list of numbers")
            check_stored(part, f"a piece of {name} of {self.place}", whole=False)
        n_indices = self._parts["indices"].shape[0]
        if self.n_stored != n_indices:
            self._damaged(f"it has {self.n_stored} values and {n_indices} indices")
        n_boundaries, needed = self._parts["indptr"].shape[0], self._major_minor[0] + 1
        if n_boundaries != needed:
            self._damaged(f"it has {n_boundaries} boundaries (indptr) and needs {needed}")
        first, last = (int(self._read("indptr", place, place + 1)[0]) for place in (0, needed - 1))
        if first != 0 or last != self.n_stored:
            self._damaged(f"its boundaries (indptr) run from {first} to {last}, but there are {self.n_stored} entries")

    @cached_property
    def _parts(self) -> dict[str, Any]:
        """Data, indices and indptr; the rows of a dense matrix under an empty name."""
        if self.kind == "dense":
            return {"": self.stored}
        return {name: _complete(self.stored[name]) for name in ("data", "indices", "indptr")}

    @property
    def n_stored(self) -> int:
        """Number of entries that are stored; of a dense matrix all."""
        return self.shape[0] * self.shape[1] if self.kind == "dense" else int(self._parts["data"].shape[0])

    @property
    def _major_minor(self) -> tuple[int, int]:
        """Number of compressed rows (or columns), and of what the indices name."""
        return self.shape if self.kind == "csr" else self.shape[::-1]

    def _damaged(self, problem: str | None) -> None:
        if problem is not None:
            raise DataError(f"{self.place} is damaged: {problem}; {REPAIR}.")

    def _read(self, part: str, start: int, stop: int | None) -> np.ndarray:
        """Return a piece of data, indices or indptr, or rows of a dense matrix (`part` is empty)."""
        with reading(f"{part} in {self.place}" if part else self.place):
            return np.asarray(self._parts[part][start:stop])

    def _boundaries(self, start: int = 0, stop: int | None = None, *, first: int | None = 0) -> np.ndarray:
        """Return some of the boundaries, of which the first is known unless `first` is None."""
        boundaries = self._read("indptr", start, stop).astype(np.int64)
        first = int(boundaries[0]) if first is None else first
        self._damaged(boundary_problem(boundaries, self.n_stored, first=first))
        self._damaged("a boundary (indptr) is negative" if first < 0 else None)
        return boundaries

    def _indices(self, start: int, stop: int) -> np.ndarray:
        indices = self._read("indices", start, stop)
        self._damaged(index_problem(indices, self._major_minor[1]))
        return indices

    def entries(self, size: int = ENTRIES) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield all stored entries in the order of the file.

        Yields
        ------
        Rows, columns and values, each of shape (k,) with k at most `size` or one dense row.
        """
        if self.kind == "dense":
            step = max(1, size // max(self.shape[1], 1))
            for start in range(0, self.shape[0], step):
                block = self._read("", start, start + step)
                rows, columns = np.nonzero(block)
                yield rows + start, columns, block[rows, columns]
            return
        boundaries = self._boundaries()
        for start in range(0, int(boundaries[-1]), size):
            minor, values = self._indices(start, start + size), self._read("data", start, start + size)
            stop = start + len(values)
            first = int(np.searchsorted(boundaries, start, side="right")) - 1
            last = int(np.searchsorted(boundaries, stop, side="left"))
            inside = np.clip(boundaries[first : last + 1], start, stop)
            major = np.repeat(np.arange(first, last), np.diff(inside))
            yield (major, minor, values) if self.kind == "csr" else (minor, major, values)

    def row_chunks(self, size: int = ENTRIES, *, start: int = 0) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Yield the cells in order, some rows at a time, as ``(first row, CSR matrix of all columns)``.

        A CSC matrix is read once for every eight times `size` entries that it has, because its cells lie scattered
        over the file.

        Parameters
        ----------
        size
            Most entries of a piece, unless one row has more.
        start
            First row. What lies before it is not read, save of a CSC matrix.
        """
        if self.kind == "dense":
            step = min(max(1, size // self.shape[1]), ROWS)
            for row in range(start, self.shape[0], step):
                yield row, sparse.csr_matrix(_sparse_type(self._read("", row, row + step)))
        elif self.kind == "csr":
            yield from self._csr_chunks(size, start)
        else:
            yield from self._csc_chunks(size, start)

    def _csr_chunks(self, size: int, start: int) -> Iterator[tuple[int, sparse.csr_matrix]]:
        n_cells, n_genes = self.shape
        last: int | None = None if start else 0
        while start < n_cells:
            boundaries = self._boundaries(start, start + ROWS + 1, first=last)
            stop = _rows_within(boundaries, 0, size)
            first, last = int(boundaries[0]), int(boundaries[stop])
            values = _sparse_type(self._read("data", first, last))
            parts = (values, self._indices(first, last), boundaries[: stop + 1] - first)
            yield start, sparse.csr_matrix(parts, shape=(stop, n_genes))
            start += stop

    def _csc_chunks(self, size: int, start: int) -> Iterator[tuple[int, sparse.csr_matrix]]:
        n_cells, n_genes = self.shape
        filled = np.zeros(n_cells, dtype=np.int64)
        for rows, _, _ in self.entries(size):
            filled += np.bincount(rows, minlength=n_cells)
        before = np.concatenate([[0], np.cumsum(filled)])
        while start < n_cells:
            stop = _rows_within(before, start, _CSC_WINDOW * size)
            window = self._csc_rows(size, start, stop, int(before[stop] - before[start]))
            row = start
            while row < stop:
                after = min(_rows_within(before, row, size), row + ROWS, stop)
                yield row, sparse.csr_matrix(window[row - start : after - start], shape=(after - row, n_genes))
                row = after
            start = stop

    def _csc_rows(self, size: int, start: int, stop: int, n_entries: int) -> sparse.csr_matrix:
        """Return the rows from `start` to `stop`, which have `n_entries` entries, as CSR."""
        rows, columns = (np.empty(n_entries, dtype=np.int32) for _ in range(2))
        values = _sparse_type(np.empty(n_entries, dtype=self._parts["data"].dtype))
        filled = 0
        for all_rows, all_columns, all_values in self.entries(size):
            here = np.flatnonzero((all_rows >= start) & (all_rows < stop))
            place = slice(filled, filled + len(here))
            rows[place], columns[place], values[place] = all_rows[here] - start, all_columns[here], all_values[here]
            filled += len(here)
        return sparse.csr_matrix((values, (rows, columns)), shape=(stop - start, self.shape[1]))


def _complete(stored: Any) -> Any:
    """Return an array that does not make up what is missing: zarr takes a chunk that is gone for zeros."""
    if not hasattr(stored, "with_config"):  # of h5py
        return stored
    import zarr

    if zarr.config.get("array.read_missing_chunks", None) is None:  # a zarr that has no choice
        return stored
    return stored.with_config({"read_missing_chunks": False})


def _rows_within(before: np.ndarray, start: int, size: int) -> int:
    """Return the row up to which there are at most `size` entries from row `start` on, or the next row."""
    return max(start + 1, int(np.searchsorted(before, before[start] + size, side="right")) - 1)


def _sparse_type(values: np.ndarray) -> np.ndarray:
    """Return values in a type that SciPy's sparse matrices know: no half precision, no other byte order."""
    if values.dtype == np.float16:
        return values.astype(np.float32)
    return values.astype(values.dtype.newbyteorder("="), copy=False)
