"""Matrices in h5ad files and zarr folders, read in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import zarr
from scipy import sparse

from scforge.data.checks import REPAIR, boundary_problem, index_problem, row_sums, value_problem
from scforge.data.remote import reading
from scforge.errors import DataError

ENTRIES = 2**22
"""Maximum number of entries held at a time; about 100 MB including derived arrays."""

ROWS = 2**16
"""Maximum number of rows per piece, because even empty rows have boundaries."""

_CSC_WINDOW = 8
"""Number of pieces gathered in one pass over a CSC matrix; at most about 800 MB."""

_PARTS = ("data", "indices", "indptr")
"""Names of the arrays of a compressed matrix."""


def is_array(stored: Any) -> bool:
    """Return whether an object in an h5ad file or a zarr folder is an array, not a group."""
    return hasattr(stored, "dtype")


@dataclass(frozen=True)
class Matrix:
    """A matrix in an h5ad file or a zarr folder.

    Attributes
    ----------
    stored
        The h5py or zarr group or array.
    kind
        ``"csr"``, ``"csc"`` or ``"dense"``.
    shape
        Number of cells and of genes.
    place
        Description of the matrix for messages, e.g. ``"'X' of 'cells.h5ad'"``.
    """

    stored: Any
    kind: str
    shape: tuple[int, int]
    place: str

    @classmethod
    def of(cls, stored: Any, source: str) -> Matrix:
        """Detect how a matrix is stored; `source` is the file name for messages."""
        where = f"{stored.name.removeprefix('/')!r} of {source!r}"
        if is_array(stored):
            if stored.shape is None or len(stored.shape) != 2 or stored.dtype.kind not in "biuf":
                raise DataError(f"{where} is not a 2D matrix of numbers (shape {stored.shape}, dtype {stored.dtype}).")
            return cls(stored, "dense", tuple(stored.shape), where)
        encoding = str(stored.attrs.get("encoding-type", stored.attrs.get("h5sparse_format", "")))
        kind = encoding.removesuffix("_matrix")
        if kind not in ("csr", "csc") or not {"data", "indices", "indptr"} <= set(stored):
            raise DataError(f"{where} is stored as {encoding!r}; a CSR, CSC or dense matrix is needed.")
        with reading(f"the shape of {where}", fix=REPAIR):
            n_cells, n_genes = map(int, stored.attrs.get("shape", stored.attrs.get("h5sparse_shape")))
        matrix = cls(stored, kind, (n_cells, n_genes), where)
        for name, kinds in {"data": "biuf", "indices": "iu", "indptr": "iu"}.items():
            part = stored[name]
            if not is_array(part) or part.shape is None or len(part.shape) != 1 or part.dtype.kind not in kinds:
                matrix._damaged(f"{name} is not a one-dimensional array of numbers")
        for name, needed in {"indices": matrix.n_stored, "indptr": matrix._major_minor[0] + 1}.items():
            if (n_values := matrix._parts[name].shape[0]) != needed:
                matrix._damaged(f"{name} has {n_values} values, expected {needed}")
        return matrix

    @cached_property
    def _parts(self) -> dict[str, Any]:
        """A mapping from name to data, indices and indptr, or from ``""`` to a dense matrix."""
        parts = {"": self.stored} if self.kind == "dense" else {name: self.stored[name] for name in _PARTS}
        if isinstance(self.stored, zarr.Group | zarr.Array):
            # A chunk that is gone is not a chunk of zeros.
            parts = {name: part.with_config({"read_missing_chunks": False}) for name, part in parts.items()}
        return parts

    @property
    def n_stored(self) -> int:
        """Number of stored entries; for a dense matrix, the number of all entries."""
        return self.shape[0] * self.shape[1] if self.kind == "dense" else int(self._parts["data"].shape[0])

    @property
    def _major_minor(self) -> tuple[int, int]:
        """Size of the compressed axis (CSR rows or CSC columns), and size of the indexed axis."""
        return self.shape if self.kind == "csr" else self.shape[::-1]

    def _damaged(self, problem: str | None) -> None:
        if problem is not None:
            raise DataError(f"{self.place} is corrupted: {problem}; {REPAIR}.")

    def _read(self, part: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return a slice of data, indices or indptr, or rows of a dense matrix if `part` is empty."""
        with reading(f"{part} in {self.place}" if part else self.place):
            return np.asarray(self._parts[part][start:stop])

    @cached_property
    def _boundaries(self) -> np.ndarray:
        """Start of each compressed row (or column), and end of the last one, int64."""
        boundaries = self._read("indptr").astype(np.int64)
        self._damaged(boundary_problem(boundaries, self.n_stored))
        return boundaries

    def _indices(self, start: int, stop: int) -> np.ndarray:
        indices = self._read("indices", start, stop)
        self._damaged(index_problem(indices, self._major_minor[1]))
        return indices

    def row_chunks(self, size: int = ENTRIES) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Yield the cells in order, in pieces of ``(first row, CSR matrix of all columns)``.

        `size` is the maximum number of entries per piece, unless a single row contains more. A CSC matrix is read
        completely for every eight times `size` of its entries, because its cells are scattered over the file.
        """
        if self.kind == "dense":
            step = min(max(1, size // self.shape[1]), ROWS)
            for row in range(0, self.shape[0], step):
                yield row, sparse.csr_matrix(_sparse_type(self._read("", row, row + step)))
        elif self.kind == "csc":
            yield from self._csc_chunks(size)
        else:
            boundaries, start = self._boundaries, 0
            while start < self.shape[0]:
                stop = rows_within(boundaries, start, size)
                first, last = int(boundaries[start]), int(boundaries[stop])
                values = _sparse_type(self._read("data", first, last))
                parts = (values, self._indices(first, last), boundaries[start : stop + 1] - first)
                yield start, sparse.csr_matrix(parts, shape=(stop - start, self.shape[1]))
                start = stop

    def _csc_chunks(self, size: int) -> Iterator[tuple[int, sparse.csr_matrix]]:
        n_cells, n_genes = self.shape
        filled = np.zeros(n_cells, dtype=np.int64)
        for start in range(0, int(self._boundaries[-1]), size):
            filled += np.bincount(self._indices(start, start + size), minlength=n_cells)
        before = np.concatenate([[0], np.cumsum(filled)])
        start = 0
        while start < n_cells:
            stop = rows_within(before, start, _CSC_WINDOW * size, most=n_cells)
            window = self._csc_rows(size, start, stop, int(before[stop] - before[start]))
            row = start
            while row < stop:
                after = min(rows_within(before, row, size), stop)
                yield row, sparse.csr_matrix(window[row - start : after - start], shape=(after - row, n_genes))
                row = after
            start = stop

    def _csc_rows(self, size: int, start: int, stop: int, n_entries: int) -> sparse.csr_matrix:
        """Return the rows from `start` to `stop`, which contain `n_entries` entries, as a CSR matrix."""
        rows, columns = (np.empty(n_entries, dtype=np.int32) for _ in range(2))
        values = _sparse_type(np.empty(n_entries, dtype=self._parts["data"].dtype))
        filled = 0
        for first in range(0, int(self._boundaries[-1]), size):
            all_rows = self._indices(first, first + size)
            chosen = np.flatnonzero((all_rows >= start) & (all_rows < stop))
            target = slice(filled, filled + len(chosen))
            inside = np.clip(self._boundaries, first, first + len(all_rows))
            all_columns = np.repeat(np.arange(self.shape[1]), np.diff(inside))
            all_values = self._read("data", first, first + size)
            rows[target], columns[target], values[target] = (
                all_rows[chosen] - start,
                all_columns[chosen],
                all_values[chosen],
            )
            filled += len(chosen)
        return sparse.csr_matrix((values, (rows, columns)), shape=(stop - start, self.shape[1]))


def rows_within(before: np.ndarray, start: int, size: int, *, most: int = ROWS) -> int:
    """Return the end of a piece from `start`: at least one row, and at most `size` entries and `most` rows."""
    end = int(np.searchsorted(before, before[start] + size, side="right")) - 1
    return min(max(start + 1, end), start + most)


def _sparse_type(values: np.ndarray) -> np.ndarray:
    """Convert half precision and foreign byte orders, which SciPy's sparse matrices do not support."""
    if values.dtype == np.float16:
        return values.astype(np.float32)
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def check_chunk(
    chunk: sparse.csr_matrix,
    place: str,
    first: int,
    *,
    no_counts: str = "pass the layer that contains the raw counts",
    empty: str = "remove them with sc.pp.filter_cells(adata, min_counts=1)",
) -> None:
    """Raise a DataError if values are not counts or a row is empty; `no_counts` and `empty` are the advice."""
    if problem := value_problem(chunk.data):
        raise DataError(f"{place} {problem} from row {first} onward, but raw counts are needed; {no_counts}.")
    totals = row_sums(chunk)
    if not totals.all():
        row = first + int((totals == 0).argmax())
        raise DataError(f"{place} has cells without counts (first: row {row}); {empty}.")
