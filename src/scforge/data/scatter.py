"""Cells on their way into a store: mapped onto the vocabulary, and written to a file for each dataset-to-be.

Such a file is a list of segments. A segment has a header, a table of its cells (position, number of entries, total,
values of obs), their names, and the genes and counts of all their entries: raw little-endian numbers, with a checksum.

Shapes: n cells of a chunk or segment, G genes of the vocabulary, Z entries.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numba
import numpy as np
from scipy import sparse

from scforge.errors import DataError

__all__ = ["MOST", "Buffer", "Segment", "TooLarge", "append_segment", "gather", "gene_dtype", "read_segments"]

MOST = 2**32 - 1
"""Largest count that a store can hold."""

_HEADER = struct.Struct("<8sIIQQQI")
_MAGIC = b"scforge1"


def gene_dtype(n_genes: int) -> np.dtype:
    """Return the smallest unsigned integer for indices of genes, as anndata chooses it."""
    return np.dtype(np.uint8 if n_genes <= 0xFF else np.uint16 if n_genes <= 0xFFFF else np.uint32)


@dataclass
class TooLarge(Exception):
    """A count that does not fit into the numbers of a buffer.

    Attributes
    ----------
    row
        Row of the chunk.
    gene
        Index of the gene.
    count
        The count.
    """

    row: int
    gene: int
    count: float


class Buffer:
    """Cells that wait in memory until they are written to the files of their datasets.

    Parameters
    ----------
    n_entries
        Number of entries that it holds; one chunk may make it larger.
    n_genes
        Number of genes of the vocabulary.
    row_dtype
        Of the table of cells; ``"length"`` and ``"total"`` are filled in here.
    """

    def __init__(self, n_entries: int, n_genes: int, row_dtype: np.dtype) -> None:
        self.genes = np.empty(n_entries, dtype=gene_dtype(n_genes))
        self.counts = np.empty(n_entries, dtype=np.uint16)
        self._sums = np.zeros(n_genes, dtype=np.float64)
        self._seen = np.zeros((n_genes + 63) // 64, dtype=np.uint64)
        self._row_dtype = row_dtype
        self.clear()

    def clear(self) -> None:
        """Forget the cells."""
        self.n_entries = 0
        self._rows: list[np.ndarray] = []
        self._names: list[np.ndarray] = []
        self._buckets: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(map(len, self._rows))

    def takes(self, n_entries: int) -> bool:
        """Whether there is room for so many entries, or nothing in it yet."""
        return not self._rows or self.n_entries + n_entries <= len(self.counts)

    def widen(self) -> None:
        """Use numbers of 32 bits for the counts from now on; it must be empty."""
        self.counts = np.empty(len(self.counts), dtype=np.uint32)

    def add(
        self,
        chunk: sparse.csr_matrix,
        columns: np.ndarray,
        rows: np.ndarray,
        names: np.ndarray,
        buckets: np.ndarray,
    ) -> tuple[np.ndarray, float]:
        """Add cells, their counts mapped onto the vocabulary: genes ascending, columns of one gene summed, no zeros.

        Parameters
        ----------
        chunk
            Whole numbers, shape (n, n_vars).
        columns
            Gene of each column or -1, int32, shape (n_vars,).
        rows
            Table of the cells, shape (n,).
        names
            Names of the cells, object, shape (n,).
        buckets
            The dataset of each cell, integer, shape (n,).

        Returns
        -------
        The table of the cells with ``"length"`` and ``"total"``, and the sum of the counts in genes of the vocabulary.

        Raises
        ------
        TooLarge
            If a count does not fit; nothing is added then.
        """
        if self.n_entries + chunk.nnz > len(self.counts):
            self.genes = np.concatenate([self.genes[: self.n_entries], np.empty(chunk.nnz, self.genes.dtype)])
            self.counts = np.concatenate([self.counts[: self.n_entries], np.empty(chunk.nnz, self.counts.dtype)])
        rows = rows.copy()
        lengths, totals, kept = (np.zeros(len(rows), dtype=dtype) for dtype in (np.int64, np.float64, np.float64))
        most = float(np.iinfo(self.counts.dtype).max)
        row, gene, count = _map_rows(
            chunk.indptr,
            chunk.indices,
            chunk.data,
            columns,
            self._sums,
            self._seen,
            self.genes[self.n_entries :],
            self.counts[self.n_entries :],
            lengths,
            totals,
            kept,
            most,
        )
        if row >= 0:
            self._sums[:], self._seen[:] = 0.0, 0
            raise TooLarge(row, gene, count)
        rows["length"], rows["total"] = lengths, totals
        self.n_entries += int(lengths.sum())
        self._rows.append(rows)
        self._names.append(names)
        self._buckets.append(buckets)
        return rows, float(kept.sum())

    def segments(self) -> Iterator[tuple[int, Segment]]:
        """Yield the cells of each dataset that has some, in the order in which they were added."""
        if not self._rows:
            return
        rows, names, buckets = map(np.concatenate, (self._rows, self._names, self._buckets))
        lengths = rows["length"].astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        order = np.argsort(buckets, kind="stable")
        edges = np.flatnonzero(np.diff(buckets[order])) + 1
        for of_bucket in np.split(order, edges):
            genes, counts = gather(starts[of_bucket], lengths[of_bucket], self.genes, self.counts)
            yield int(buckets[of_bucket[0]]), Segment(rows[of_bucket], names[of_bucket], genes, counts)


@dataclass(frozen=True)
class Segment:
    """Cells of one dataset, one after the other.

    Attributes
    ----------
    rows
        Table of the cells, shape (n,), with the fields ``"position"``, ``"length"``, ``"total"`` and those of obs.
    names
        Names of the cells, object, shape (n,).
    genes, counts
        Gene and count of each entry, unsigned integers, shape (Z,).
    """

    rows: np.ndarray
    names: np.ndarray
    genes: np.ndarray
    counts: np.ndarray


def append_segment(path: Path, segment: Segment) -> int:
    """Write a segment behind those that are in a file; return the size of the file, bytes."""
    encoded = [name.encode() for name in segment.names]
    lengths = np.array([len(name) for name in encoded], dtype="<u4")
    parts: list[Any] = [segment.rows.tobytes(), lengths.tobytes(), b"".join(encoded), segment.genes, segment.counts]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    header = _HEADER.pack(
        _MAGIC,
        segment.counts.itemsize,
        len(segment.rows),
        len(parts[0]) + len(parts[1]),
        len(parts[2]),
        len(segment.genes),
        checksum,
    )
    with path.open("ab") as file:
        file.write(header)
        for part in parts:
            file.write(part)
        return file.tell()


def read_segments(path: Path, row_dtype: np.dtype, genes: np.dtype, *, entries: bool = True) -> Iterator[Segment]:
    """Yield the segments of a file, one in memory at a time; without `entries` only their tables of cells.

    Raises
    ------
    DataError
        If the file is damaged.
    """
    with path.open("rb") as file:
        while header := file.read(_HEADER.size):
            if len(header) < _HEADER.size:
                raise _damaged(path)
            magic, itemsize, n_rows, n_table, n_names, n_entries, checksum = _HEADER.unpack(header)
            if magic != _MAGIC or itemsize not in (2, 4) or n_table != n_rows * (row_dtype.itemsize + 4):
                raise _damaged(path)
            n_bytes = n_entries * (genes.itemsize + itemsize)
            if not entries:
                rows = _read(file, n_rows * row_dtype.itemsize, path)
                file.seek(n_table - len(rows) + n_names + n_bytes, 1)
                nothing = np.empty(0, dtype=object)
                yield Segment(np.frombuffer(rows, dtype=row_dtype), nothing, nothing, nothing)
                continue
            content = _read(file, n_table + n_names + n_bytes, path)
            if zlib.crc32(content) != checksum:
                raise _damaged(path)
            table = np.frombuffer(content, dtype=row_dtype, count=n_rows)
            lengths = np.frombuffer(content, dtype="<u4", count=n_rows, offset=n_rows * row_dtype.itemsize)
            start = n_table + n_names
            yield Segment(
                table,
                _names(content[n_table:start], lengths),
                np.frombuffer(content, dtype=genes, count=n_entries, offset=start),
                np.frombuffer(content, dtype=f"<u{itemsize}", offset=start + n_entries * genes.itemsize),
            )


def _read(file: BinaryIO, n_bytes: int, path: Path) -> bytes:
    content = file.read(n_bytes)
    if len(content) < n_bytes:
        raise _damaged(path)
    return content


def _names(encoded: bytes, lengths: np.ndarray) -> np.ndarray:
    names = np.empty(len(lengths), dtype=object)
    stops = np.cumsum(lengths, dtype=np.int64)
    names[:] = [encoded[stop - length : stop].decode() for stop, length in zip(stops, lengths, strict=True)]
    return names


def _damaged(path: Path) -> DataError:
    return DataError(
        f"the temporary file {str(path)!r} is damaged, so the conversion cannot go on; start it again with "
        "overwrite=True (--overwrite)."
    )


def gather(
    starts: np.ndarray, lengths: np.ndarray, genes: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries of some cells, cell after cell."""
    n_entries = int(lengths.sum())
    some_genes, some_counts = np.empty(n_entries, genes.dtype), np.empty(n_entries, counts.dtype)
    place(np.cumsum(lengths) - lengths, starts, lengths, genes, counts, some_genes, some_counts)
    return some_genes, some_counts


@numba.njit(cache=True, nogil=True)
def place(targets, starts, lengths, genes, counts, into_genes, into_counts):
    """Copy the entries of each cell from its start to its target."""
    for cell in range(len(targets)):
        target, start = targets[cell], starts[cell]
        for entry in range(lengths[cell]):
            into_genes[target + entry] = genes[start + entry]
            into_counts[target + entry] = counts[start + entry]


@numba.njit(cache=True, nogil=True)
def _map_rows(indptr, indices, data, columns, sums, seen, genes, counts, lengths, totals, kept, most):
    """Fill genes, counts, lengths, totals, kept; return row, gene and count of one above `most`, or -1.

    The genes of a cell are marked in a row of bits, which gives them back in ascending order without sorting.
    """
    bits = np.zeros(64, dtype=np.int64)  # which bit is set, by a perfect hash (Leiserson, Prokop and Randall 1998)
    factor = np.uint64(0x03F79D71B4CB0A89)
    one, six, low_six, shift = np.uint64(1), np.uint64(6), np.uint64(63), np.uint64(58)
    for bit in range(64):
        bits[((one << np.uint64(bit)) * factor) >> shift] = bit
    target = 0
    for row in range(len(indptr) - 1):
        total = 0.0
        for entry in range(indptr[row], indptr[row + 1]):
            count = float(data[entry])
            total += count
            gene = columns[indices[entry]]
            if gene >= 0 and count > 0:
                sums[gene] += count
                seen[np.uint64(gene) >> six] |= one << (np.uint64(gene) & low_six)
        first, inside = target, 0.0
        for word in range(len(seen)):
            left = seen[word]
            seen[word] = np.uint64(0)
            while left != 0:
                lowest = left & (~left + one)
                left ^= lowest
                gene = word * 64 + bits[(lowest * factor) >> shift]
                count = sums[gene]
                sums[gene] = 0.0
                if count > most:
                    return row, gene, count
                genes[target] = gene
                counts[target] = count
                target += 1
                inside += count
        lengths[row], totals[row], kept[row] = target - first, total, inside
    return -1, -1, 0.0
