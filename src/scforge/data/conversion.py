"""Convert files of cells into a store, in two passes that can be resumed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numba
import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_bool, check_seed, check_share
from scforge._io import atomic_write_text, check_folder, put_back, swap_in
from scforge._version import __version__
from scforge.data.cells import CellBlock, StreamingMedians
from scforge.data.checks import (
    CHECK,
    row_checks,
)
from scforge.data.genes import (
    MIN_OVERLAP,
    WARN_OUTSIDE,
    GeneMap,
    map_names,
    stream_genes,
    union_vocab,
)
from scforge.data.readers import AdataStream, CellStream, is_url, open_streams, parse_bytes
from scforge.data.store import (
    CHUNK_SIZE,
    CODECS,
    DATASET,
    SOURCE,
    TOTAL,
    StoreInfo,
    column_check,
    content_hash,
    dataset_hash,
    is_store,
    may_be_replaced,
    partial_path,
    write_root,
)
from scforge.data.vocab import GeneVocab, open_vocab
from scforge.errors import (
    DataError,
    GeneMismatchError,
    OptionError,
    ScforgeError,
    first_line,
    warn,
)

if TYPE_CHECKING:
    import pandas as pd


logger = logging.getLogger("scforge")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""No space, no quota left; a file larger than the file system or the limits of the process allow."""


def check_space(folder: Path, n_bytes: float) -> None:
    """Raise if there is not enough space for so many bytes of temporary files.

    Raises
    ------
    DataError
        If there is not.
    """
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise DataError(
            f"{str(folder.parent)!r} has {_size(free)} of free space, but the conversion needs about "
            f"{_size(n_bytes)}; make room, or choose a path on a larger disk."
        )


@contextlib.contextmanager
def full_disk(target: Path, n_bytes: float) -> Iterator[None]:
    """Turn the error of a full disk into one sentence.

    Parameters
    ----------
    target
        Path of the store.
    n_bytes
        What the conversion needs, about.

    Raises
    ------
    DataError
        If the disk of `target` is full.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        # zarrs tells what the system says in a text.
        told = re.search(r"\(os error (\d+)\)", str(error))
        number = int(told[1]) if told else getattr(error, "errno", None)
        if number not in _FULL:
            raise
        free = shutil.disk_usage(target.parent).free
        raise DataError(
            f"the disk of {str(target)!r} is full ({first_line(error)}): {_size(free)} are free, and the conversion "
            f"needs about {_size(n_bytes)} in all; make room, and run the same conversion again to continue."
        ) from error


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:,.2f} MB"


_FORMAT = 1
_AGAIN = "pass overwrite=True (--overwrite) to start again, or remove {!r}"


@dataclass
class Journal:
    """How far a conversion is.

    Attributes
    ----------
    plan
        What is converted and how; a conversion goes on with the same only.
    source, row
        The first cell that is not in the temporary files.
    sizes, entries
        Size of each temporary file, bytes, and the number of its entries.
    wide
        Whether a count needs 32 bits.
    kept, totals
        Of each source the sum of all counts in genes of the vocabulary, and of all genes.
    n_empty
        Number of cells that express no gene of the vocabulary.
    datasets
        Of each dataset that is written: ``n_cells``, ``n_nonzeros``, ``hash``.
    scattered, finished
        Whether all cells are in the temporary files; whether the store is in its place.
    """

    plan: dict[str, Any]
    sizes: list[int]
    entries: list[int]
    kept: list[float]
    totals: list[float]
    source: int = 0
    row: int = 0
    wide: bool = False
    n_empty: int = 0
    datasets: list[dict[str, Any]] = field(default_factory=list)
    scattered: bool = False
    finished: bool = False

    @classmethod
    def begin(cls, plan: dict[str, Any], *, n_buckets: int, n_sources: int) -> Journal:
        """Return the journal of a conversion that has done nothing yet."""
        return cls(plan, [0] * n_buckets, [0] * n_buckets, [0.0] * n_sources, [0.0] * n_sources)


class Staging:
    """The folder of a conversion.

    Parameters
    ----------
    folder
        Its path.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self._journal = folder / "journal.json"

    def bucket(self, number: int) -> Path:
        """Return the temporary file with the cells of a dataset-to-be."""
        return self.folder / f"cells_{number}"

    def load(self) -> Journal | None:
        """Return the journal, or None if nothing was done yet.

        Raises
        ------
        DataError
            If it is damaged or of another version.
        """
        try:
            content = json.loads(self._journal.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataError(
                f"the journal {str(self._journal)!r} cannot be read ({first_line(error)}); {self._again()}."
            ) from error
        known = {one.name for one in fields(Journal)}
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT or set(content) != known:
            raise DataError(f"the journal {str(self._journal)!r} is of another scforge; {self._again()}.")
        return Journal(**content)

    def save(self, journal: Journal) -> None:
        """Write the journal, atomically."""
        atomic_write_text(self._journal, json.dumps({"format": _FORMAT, **asdict(journal)}))

    def resume(self, plan: dict[str, Any]) -> Journal | None:
        """Return the journal of an interrupted conversion after cutting back its files; None if nothing is to continue.

        Raises
        ------
        OptionError
            If the conversion was begun with other options, or of other sources.
        DataError
            If a source has changed, or a temporary file is too short.
        """
        journal = self.load()
        if journal is None or self.is_over(journal):
            self.clear()
            return None
        self._check_plan(journal.plan, plan)
        self.cut_back(journal)
        return journal

    def is_over(self, journal: Journal) -> bool:
        """Whether a conversion cannot go on, because a dataset that it has written is no longer here.

        So it is when the store has got its place, also if the process was killed before the journal said so.
        """
        folders = (self.store / DATASET.format(number) for number in range(len(journal.datasets)))
        return journal.finished or not all(folder.exists() for folder in folders)

    def cut_back(self, journal: Journal) -> None:
        """Cut off what the journal does not know of.

        Raises
        ------
        DataError
            If a temporary file is shorter than the journal says.
        """
        for path in self.folder.glob(".journal.*"):
            path.unlink()  # of a process that was killed while it wrote its journal
        for number, size in enumerate(journal.sizes):
            path = self.bucket(number)
            actual = path.stat().st_size if path.exists() else 0
            if size > actual:
                raise DataError(f"{str(path)!r} has lost {size - actual} bytes; {self._again()}.")
            if size < actual:
                os.truncate(path, size)

    def clear(self) -> None:
        """Remove everything but the lock."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def remove_if_empty(self) -> None:
        """Remove the folder, whose lock is held, unless there are cells in it."""
        if self.store.exists() or any(path.stat().st_size for path in self.folder.glob("cells_*")):
            return
        self.clear()
        (self.folder / "lock").unlink()
        with contextlib.suppress(OSError):  # from here on it may be the folder of another process
            self.folder.rmdir()

    def _again(self) -> str:
        return _AGAIN.format(str(self.folder))

    def _check_plan(self, begun: dict[str, Any], plan: dict[str, Any]) -> None:
        if begun == plan:
            return
        old, new = begun.get("sources", []), plan["sources"]
        if [one["name"] for one in old] != [one["name"] for one in new]:
            raise OptionError(
                f"an unfinished conversion of other sources is in {str(self.folder)!r}; "
                f"name those to go on with it ({', '.join(repr(one['name']) for one in old)}), or {self._again()}."
            )
        for one, other in zip(old, new, strict=True):
            if one != other:
                raise DataError(
                    f"{other['name']!r} has changed since the unfinished conversion in {str(self.folder)!r} read it; "
                    f"{self._again()}."
                )
        name = next(key for key in {**begun, **plan} if begun.get(key) != plan.get(key))
        raise OptionError(
            f"an unfinished conversion in {str(self.folder)!r} was begun with {name}={begun.get(name)!r}, not "
            f"{plan.get(name)!r}; give the same to go on with it, or {self._again()}."
        )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder, and hold its lock, which the system takes back if the process dies.

    Raises
    ------
    OptionError
        If another conversion is at work in it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # the other process has just finished and removed the folder
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise OptionError(
                f"another conversion is writing to {str(folder)!r}; wait until it is done, or choose another name."
            ) from error
        if _is_still_there(handle, folder / "lock"):
            break
        os.close(handle)
    try:
        yield
    finally:
        os.close(handle)


def _is_still_there(handle: int, path: Path) -> bool:
    """Whether an open file still has its name: a process that finishes removes the lock that it holds."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


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


_LIBRARIES = 900_000_000
"""What Python and the libraries take, torch among them, which annbatch brings; bytes."""

_READING = 300_000_000
"""A piece of a source with what is made of it."""

_MEDIANS = 4_400
"""Histogram of a gene."""

_NAME = 150
"""Name of a cell, as Python holds it."""

_LEAST = 150_000_000
"""What has to be left for cells."""


@dataclass(frozen=True)
class Layout:
    """Sizes of a conversion.

    Attributes
    ----------
    n_cells
        Number of cells of all sources.
    bucket_size, n_buckets
        Cells of a dataset (the last may have fewer), and number of those.
    buffer_entries
        Entries that wait in memory until they are written to temporary files.
    bucket_bytes
        Size of the cells of a dataset in memory from which on it is written as several.
    entry_bytes, row_bytes
        Size of an entry, and of a row of the table of cells with its name.
    n_entries
        Entries of all sources, about.
    """

    n_cells: int
    bucket_size: int
    n_buckets: int
    buffer_entries: int
    bucket_bytes: int
    entry_bytes: int
    row_bytes: int
    n_entries: int

    @classmethod
    def of(
        cls,
        memory: int,
        *,
        n_cells: int,
        most_cells: int,
        n_entries: int,
        n_genes: int,
        row_bytes: int,
        table_bytes: int,
        medians: bool,
    ) -> Layout:
        """Divide `memory` bytes.

        Parameters
        ----------
        memory
            Most that the process may take.
        n_cells, n_entries
            Number of cells and (about) of entries of all sources.
        most_cells
            Number of cells of the largest source.
        n_genes
            Number of genes of the vocabulary.
        row_bytes
            Size of a row of the table of cells in a temporary file.
        table_bytes
            Size of the largest table of cells of a source.
        medians
            Whether medians are measured.

        Raises
        ------
        OptionError
            If it is too little.
        """
        fixed = (
            _LIBRARIES
            + _READING
            + _MEDIANS * n_genes * medians
            + 16 * n_cells
            + table_bytes
            + most_cells * (row_bytes + _NAME)
        )
        left = memory - fixed
        if left < _LEAST:
            raise OptionError(
                f"memory={memory / 1e9:.2f}GB is too little for {n_cells:,} cells and {n_genes:,} genes; "
                f"give at least {(fixed + _LEAST) / 1e9:.1f}GB."
            )
        entry_bytes = gene_dtype(n_genes).itemsize + 2
        row_bytes += _NAME
        bucket_bytes = min(memory // 4, left // 3)
        n_bytes = n_entries * entry_bytes + n_cells * row_bytes
        n_buckets = max(1, -(-n_bytes // bucket_bytes))
        # Whole chunks in every dataset but the last.
        size = -(-n_cells // n_buckets)
        size = -(-size // CHUNK_SIZE) * CHUNK_SIZE
        return cls(
            n_cells=n_cells,
            bucket_size=size,
            n_buckets=-(-n_cells // size),
            buffer_entries=min(left // 4 // entry_bytes, n_entries + 1),
            bucket_bytes=bucket_bytes,
            entry_bytes=entry_bytes,
            row_bytes=row_bytes,
            n_entries=n_entries,
        )

    def n_parts(self, bucket: int, n_entries: int, *, wide: bool) -> int:
        """Return as how many datasets the cells of a temporary file are written: several if they are many."""
        n_bytes = n_entries * (self.entry_bytes + 2 * wide) + self.bucket_cells(bucket) * self.row_bytes
        return min(max(1, -(-2 * n_bytes // (3 * self.bucket_bytes))), self.bucket_cells(bucket))

    def bucket_cells(self, bucket: int) -> int:
        """Return the number of cells of a temporary file."""
        return min(self.bucket_size, self.n_cells - bucket * self.bucket_size)


_OWN = (TOTAL, SOURCE, CHECK)
_TEXT, _NUMBERS, _TRUTH, _NUMBERED = "text", "numbers", "truth values", "categories that are numbers"


@dataclass(frozen=True)
class Column:
    """A column of the table of cells.

    Attributes
    ----------
    name
        Its name.
    dtype
        Of its values, or of the codes of its categories.
    categories
        Categories of all sources, in order of their first appearance; None of a column without.
    ordered
        Whether they have an order, which they do if all sources have the same.
    """

    name: str
    dtype: np.dtype
    categories: list[Any] | None = None
    ordered: bool = False


@dataclass(frozen=True)
class CellTable:
    """The table of cells of a store-to-be.

    Attributes
    ----------
    columns
        The columns that are kept.
    sources
        Names of the sources, each once.
    n_bytes
        Size of the largest table of a source in memory.
    """

    columns: list[Column]
    sources: list[str]
    n_bytes: int

    @property
    def row_dtype(self) -> np.dtype:
        """Of a cell as it waits in a temporary file."""
        fields = [("position", "<i8"), ("length", "<u4"), ("total", "<f8"), ("source", "<i4")]
        return np.dtype(fields + [(f"c{i}", column.dtype) for i, column in enumerate(self.columns)])

    def rows(self, stream: CellStream, source: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cells of a source as rows of the temporary files, and their names."""
        obs = stream.obs([column.name for column in self.columns])
        rows = np.zeros(stream.n_cells, dtype=self.row_dtype)
        rows["source"] = source
        for i, column in enumerate(self.columns):
            rows[f"c{i}"] = _values(obs[column.name], column)
        return rows, cell_names(obs)

    def frame(self, rows: np.ndarray, names: np.ndarray) -> pd.DataFrame:
        """Return the table of some cells as it stands in the store."""
        import pandas as pd

        series: dict[str, Any] = {}
        for i, column in enumerate(self.columns):
            values = np.ascontiguousarray(rows[f"c{i}"])
            if column.categories is not None:
                dtype = pd.CategoricalDtype(column.categories, ordered=column.ordered)
                series[column.name] = pd.Categorical.from_codes(values, dtype=dtype)
            else:
                series[column.name] = values
        series[TOTAL] = np.ascontiguousarray(rows["total"])
        series[SOURCE] = pd.Categorical.from_codes(np.ascontiguousarray(rows["source"]), categories=self.sources)
        return pd.DataFrame(series, index=pd.Index(names, dtype=str))


def join_tables(streams: Sequence[CellStream], wanted: Sequence[str] | None) -> CellTable:
    """Find out which columns the store has, and their categories.

    Parameters
    ----------
    streams
        The sources.
    wanted
        Names of columns; None keeps all that every source has.

    Raises
    ------
    DataError
        If a source has no such column, or columns of one name hold text here and numbers there.
    OptionError
        If `wanted` names a column twice, or one that scforge adds.
    """
    if wanted is not None:
        _check_wanted(wanted)
    tables: list[dict[str, _Seen]] = []
    n_bytes = 0
    for stream in streams:
        obs = stream.obs(None if wanted is None else list(wanted))
        check_columns(obs, stream.name)
        names = list(wanted) if wanted is not None else [name for name in obs.columns if _is_kept(name)]
        tables.append({name: _Seen.of(obs[name]) for name in names})
        n_bytes = max(n_bytes, int(obs[names].memory_usage(deep=True).sum()))
    common = [name for name in tables[0] if all(name in table for table in tables)]
    left_out = {name: "not in every source" for table in tables for name in table if name not in common}
    columns = []
    for name in common:
        problem = _problem(name, [table[name] for table in tables], streams)
        if problem is None:
            columns.append(_join(name, [table[name] for table in tables]))
        elif wanted is not None:
            raise DataError(problem)
        else:
            left_out[name] = problem
    if left_out:
        logger.info("Columns of obs left out: %s.", "; ".join(f"{name} ({why})" for name, why in left_out.items()))
    return CellTable(columns, _unique_sources(streams), n_bytes)


def check_columns(obs: pd.DataFrame, source: str) -> None:
    """Raise unless each column of a table of cells has a name of its own."""
    if not obs.columns.is_unique:
        twice = obs.columns[obs.columns.duplicated()][0]
        raise DataError(f"obs of {source!r} has the column {twice!r} twice; rename one of them.")


def _check_wanted(wanted: Sequence[str]) -> None:
    if own := [name for name in wanted if name in _OWN]:
        raise OptionError(f"obs names {own[0]!r}, which scforge adds itself; leave it out.")
    if len(set(wanted)) < len(wanted):
        raise OptionError(f"obs={list(wanted)!r} names a column twice; name each once.")


def _is_kept(name: Any) -> bool:
    # What scvi-tools and an earlier conversion have added is no data.
    return isinstance(name, str) and not name.startswith("_scvi_") and name not in _OWN


def _unique_sources(streams: Sequence[CellStream]) -> list[str]:
    names: list[str] = []
    for i, stream in enumerate(streams):
        names.append(f"{stream.name}-{i}" if stream.name in names else stream.name)
    return names


@dataclass(frozen=True)
class _Seen:
    """What a source has in a column: the kind of its values, and their dtype or categories."""

    kind: str | None
    dtype: np.dtype
    categories: list[Any] | None = None
    ordered: bool = False

    @classmethod
    def of(cls, values: pd.Series) -> _Seen:
        import pandas as pd

        plain = _plain(values)
        if isinstance(plain, pd.Categorical):
            categories = plain.categories
            text = categories.inferred_type in ("string", "empty")
            numbers = isinstance(categories.dtype, np.dtype) and categories.dtype.kind in "biuf"
            kind = _TEXT if text else _NUMBERED if numbers else None
            return cls(kind, np.dtype("<i4"), categories.tolist(), bool(plain.ordered))
        kind = _TRUTH if plain.dtype.kind == "b" else _NUMBERS if plain.dtype.kind in "iuf" else None
        return cls(kind, plain.dtype)


def _plain(values: pd.Series) -> Any:
    """Return a column as categories (also if it holds text) or as a NumPy array."""
    import pandas as pd

    if isinstance(values.dtype, pd.CategoricalDtype):
        return values.array
    if isinstance(values.dtype, np.dtype) and values.dtype.kind != "O":
        return values.to_numpy()
    if pd.api.types.is_bool_dtype(values.dtype) and not values.hasnans:
        return values.to_numpy(dtype=bool)
    if pd.api.types.is_bool_dtype(values.dtype):
        return pd.Categorical(values.map({True: "True", False: "False"}))
    if pd.api.types.is_numeric_dtype(values.dtype):
        return values.to_numpy(dtype=np.float64, na_value=np.nan) if values.hasnans else values.to_numpy()
    if pd.api.types.infer_dtype(values, skipna=True) in ("string", "empty"):
        return pd.Categorical(values.astype(object))
    return values.to_numpy(dtype=object)


def _problem(name: str, seen: list[_Seen], streams: Sequence[CellStream]) -> str | None:
    """Return why a column cannot be joined, one sentence, or None."""
    for one, stream in zip(seen, streams, strict=True):
        if one.kind is None:
            return f"{name!r} of {stream.name!r} holds neither text nor numbers; convert it or leave it out."
        if one.kind != seen[0].kind:
            return (
                f"{name!r} holds {one.kind} in {stream.name!r} and {seen[0].kind} in {streams[0].name!r}; "
                "make it the same in all sources, or leave it out."
            )
    return None


def _join(name: str, seen: list[_Seen]) -> Column:
    if seen[0].categories is None:
        return Column(name, np.result_type(*(one.dtype for one in seen)))
    categories = list(dict.fromkeys(category for one in seen for category in one.categories or []))
    ordered = all(one.ordered and one.categories == seen[0].categories for one in seen)
    return Column(name, np.dtype("<i4"), categories, ordered)


def _values(values: pd.Series, column: Column) -> np.ndarray:
    """Return the values of a source, or the codes of its categories among those of all sources."""
    import pandas as pd

    plain = _plain(values)
    if column.categories is None:
        return plain
    codes = pd.Index(column.categories).get_indexer(plain.categories).astype(np.int32)
    return np.append(codes, np.int32(-1))[plain.codes]  # the code -1, of a missing value, takes the last


def cell_names(obs: pd.DataFrame) -> np.ndarray:
    """Return the names of cells, object, shape (n,)."""
    return np.asarray(obs.index.astype(str), dtype=object)


class CellNames:
    """Gives each cell of a store a name of its own: where names clash, the number of the source is added.

    Parameters
    ----------
    streams
        The sources.

    Attributes
    ----------
    n_changed
        Number of cells whose name is changed.
    """

    def __init__(self, streams: Sequence[CellStream]) -> None:
        self._clashing: list[np.ndarray] = []
        self.n_changed = 0
        # A name may clash again after the number was added; then the row in the source is added, too.
        for _ in range(3):
            hashes = np.concatenate([_hashes(self(cell_names(s.obs([])), i)) for i, s in enumerate(streams)])
            hashes.sort()
            again = hashes[1:] == hashes[:-1]
            if not again.any():
                return
            repeated = np.unique(hashes[1:][again])
            if not self._clashing:
                self.n_changed = int(np.searchsorted(hashes, repeated, side="right").sum())
                self.n_changed -= int(np.searchsorted(hashes, repeated, side="left").sum())
            self._clashing.append(repeated)
        raise DataError("obs_names of the sources repeat even with numbers added; make them unique before converting.")

    def __call__(self, names: np.ndarray, source: int) -> np.ndarray:
        """Return the names in the store of all cells of a source, object, shape (n,)."""
        for level, clashing in enumerate(self._clashing):
            rows = np.flatnonzero(np.isin(_hashes(names), clashing))
            names = names.copy()
            names[rows] = [f"{names[row]}-{source if level == 0 else row}" for row in rows]
        return names


def _hashes(names: np.ndarray) -> np.ndarray:
    """Return 64 bits for each name: in 10^8 names two different ones are the same in one of 4,000 cases.

    The only harm is a number behind a name that needs none.
    """
    import pandas as pd

    return pd.util.hash_array(names, categorize=False)


@dataclass(frozen=True)
class SourceGenes:
    """The genes of a source.

    Attributes
    ----------
    columns
        Gene of each column among those of the vocabulary, or -1, int32, shape (n_vars,).
    measured
        True for the genes of the vocabulary that the source has, bool, shape (n_genes,).
    overlap
        Share of the genes of the vocabulary that it has.
    """

    columns: np.ndarray
    measured: np.ndarray
    overlap: float

    @property
    def share(self) -> float:
        """Share of its columns that are genes of the vocabulary."""
        return float((self.columns >= 0).mean())


def map_sources(
    streams: Sequence[CellStream],
    vocab: str | os.PathLike[str] | GeneVocab | None,
    *,
    gene_key: str | None,
    min_overlap: float,
) -> tuple[GeneVocab, list[SourceGenes]]:
    """Return the vocabulary, and the genes of each source over it; log the overlap of each.

    Parameters
    ----------
    streams
        The sources.
    vocab
        As for :func:`scforge.data.convert`.
    gene_key
        Column of ``var`` with the gene names.
    min_overlap
        Smallest share of genes.

    Raises
    ------
    GeneMismatchError
        If a source has too few genes of the vocabulary.

    Warns
    -----
    ScforgeWarning
        If one has less than half of them, or columns that mean one gene.
    """
    taken = union_vocab(streams, gene_key) if vocab is None else open_vocab(vocab)
    found = []
    for stream in streams:
        names = stream_genes(stream, gene_key)
        gene_map = _map(stream, names, taken, gene_key, 0.0 if vocab is None else min_overlap)
        logger.info(
            "%r: %d cells, %d genes; it has %d of the %d genes of the vocabulary (%.1f%%).",
            stream.name,
            stream.n_cells,
            len(names),
            gene_map.n_matched,
            taken.n_genes,
            100 * gene_map.overlap,
        )
        found.append(SourceGenes(gene_map.columns, gene_map.measured, gene_map.overlap))
    return taken, found


def _map(stream: CellStream, names: np.ndarray, vocab: GeneVocab, gene_key: str | None, min_overlap: float) -> GeneMap:
    """Map the names, and tell which source an error or a warning is about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            gene_map = map_names(
                names,
                vocab,
                min_overlap=min_overlap,
                whole=not vocab.chosen_from_data,
                var=stream.var,
                gene_key=gene_key,
            )
        except GeneMismatchError as error:
            raise GeneMismatchError(f"{stream.name!r}: {error}") from error
    for warning in caught:
        warn(f"{stream.name!r}: {warning.message}", warning.category)
    return gene_map


def warn_outside(genes: Sequence[SourceGenes], journal: Journal, vocab: GeneVocab, names: Sequence[str]) -> None:
    """Warn about cells and counts outside of the vocabulary, once all are seen."""
    if journal.n_empty:
        warn(f"{journal.n_empty} cells express no gene of the vocabulary; their embedding tells nothing.")
    if vocab.chosen_from_data:
        return
    for name, kept, total in zip(names, journal.kept, journal.totals, strict=True):
        if kept < (1 - WARN_OUTSIDE) * total:
            warn(
                f"{name!r}: {1 - kept / total:.0%} of the counts lie in genes outside of the vocabulary "
                f"({vocab.release})."
            )


_SHARD = 2**16
"""Cells of a file of a dataset: a multiple of the cells of a chunk, and some 300 MB before they are packed."""

_PIECE = 4096
"""Cells whose medians are measured at a time."""

_MOST_TOTAL = 1e9
"""Largest number of counts of a cell that the histograms of the medians have bins for."""


@dataclass(frozen=True)
class Cells:
    """Cells of a dataset in the order of the store.

    Attributes
    ----------
    indptr
        Row boundaries, int64, shape (n + 1,).
    genes, counts
        Gene and count of each entry, unsigned integers, shape (Z,).
    rows
        Their rows in the table of cells, see :attr:`CellTable.row_dtype`.
    names
        Their names, object, shape (n,).
    """

    indptr: np.ndarray
    genes: np.ndarray
    counts: np.ndarray
    rows: np.ndarray
    names: np.ndarray


def load_cells(path: Path, table: CellTable, n_genes: int, *, wide: bool, part: int, n_parts: int) -> Cells:
    """Read the cells of a dataset into memory, in the order of their positions in the store.

    Parameters
    ----------
    path
        Temporary file.
    table
        Columns of the table of cells.
    n_genes
        Number of genes of the vocabulary.
    wide
        Whether counts have 32 bits.
    part, n_parts
        Which part of the cells of the file, in how many equal ones.
    """
    genes_dtype = gene_dtype(n_genes)
    rows = np.concatenate([one.rows for one in read_segments(path, table.row_dtype, genes_dtype, entries=False)])
    order = np.argsort(rows["position"])
    order = order[part * len(order) // n_parts : (part + 1) * len(order) // n_parts]
    lengths = rows["length"].astype(np.int64)
    indptr = np.concatenate([[0], np.cumsum(lengths[order])])
    targets = np.full(len(rows), -1, dtype=np.int64)
    targets[order] = indptr[:-1]
    genes = np.empty(indptr[-1], dtype=genes_dtype)
    counts = np.empty(indptr[-1], dtype=np.uint32 if wide else np.uint16)
    names = np.empty(len(rows), dtype=object)
    first = 0
    for segment in read_segments(path, table.row_dtype, genes_dtype):
        here = slice(first, first + len(segment.rows))
        names[here] = segment.names
        starts = np.cumsum(lengths[here]) - lengths[here]
        chosen = np.flatnonzero(targets[here] >= 0)
        into = targets[here][chosen]
        place(into, starts[chosen], lengths[here][chosen], segment.genes, segment.counts, genes, counts)
        first += len(segment.rows)
    return Cells(indptr, genes, counts, rows[order], names[order])


def write_dataset(folder: Path, cells: Cells, genes: tuple[str, ...], table: CellTable) -> dict[str, Any]:
    """Write a dataset, in place of what may be there; return what its store says of it."""
    import pandas as pd
    import zarr
    from annbatch import write_sharded
    from anndata import AnnData
    from zarr.codecs import BloscCodec, Crc32cCodec

    matrix = sparse.csr_matrix((len(cells.rows), len(genes)), dtype=cells.counts.dtype)
    # SciPy's constructor would make the indices wider, in a copy.
    # Who reads holds the boundaries of all rows in memory.
    boundaries = cells.indptr.astype(np.int32) if cells.indptr[-1] < 2**31 else cells.indptr
    matrix.data, matrix.indices, matrix.indptr = cells.counts, cells.genes, boundaries
    obs = table.frame(cells.rows, cells.names)
    obs[CHECK] = row_checks(matrix)
    adata = AnnData(matrix, obs=obs, var=pd.DataFrame(index=pd.Index(genes, dtype=str)))
    with zarr.config.set(CODECS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        write_sharded(
            zarr.open_group(folder, mode="w", zarr_format=3),
            adata,
            n_obs_per_chunk=CHUNK_SIZE,
            shard_size=_SHARD,
            # The check number of each cell finds what this checksum misses: zarrs looks at it in whole pieces only.
            compressors=(BloscCodec(cname="lz4", clevel=9, shuffle="shuffle"), Crc32cCodec()),
        )
    found = dataset_hash(cells.indptr, cells.genes, cells.counts, obs)
    columns = {"_index": column_check(cells.names), **{str(name): column_check(obs[name].array) for name in obs}}
    return {"n_cells": len(cells.rows), "n_nonzeros": int(cells.indptr[-1]), "hash": found, "columns": columns}


def add_medians(medians: StreamingMedians, cells: Cells) -> None:
    """Add cells to the histograms."""
    for start in range(0, len(cells.rows), _PIECE):
        indptr = cells.indptr[start : start + _PIECE + 1]
        entries = slice(int(indptr[0]), int(indptr[-1]))
        totals = cells.rows["total"][start : start + _PIECE]
        _add(medians, indptr - indptr[0], cells.genes[entries], cells.counts[entries], totals)


def _stored_blocks(group: Any) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield row boundaries, genes, counts and totals of the cells of a dataset, some at a time."""
    matrix, totals = group["X"], group[f"obs/{TOTAL}"][...]
    boundaries = matrix["indptr"][...].astype(np.int64)
    for start in range(0, len(totals), _PIECE):
        indptr = boundaries[start : start + _PIECE + 1]
        entries = slice(int(indptr[0]), int(indptr[-1]))
        yield indptr - indptr[0], matrix["indices"][entries], matrix["data"][entries], totals[start : start + _PIECE]


def add_stored_medians(medians: StreamingMedians, folder: Path) -> None:
    """Add the cells of a dataset that is written already."""
    import zarr

    with zarr.config.set(CODECS):
        for block in _stored_blocks(zarr.open_group(folder, mode="r")):
            _add(medians, *block)


def _add(
    medians: StreamingMedians, indptr: np.ndarray, genes: np.ndarray, counts: np.ndarray, totals: np.ndarray
) -> None:
    if (totals > _MOST_TOTAL).any():
        few = sparse.csr_matrix((counts, genes, indptr), shape=(len(totals), medians.n_genes))[totals <= _MOST_TOTAL]
        indptr, genes, counts, totals = few.indptr, few.indices, few.data, totals[totals <= _MOST_TOTAL]
    medians.update(
        CellBlock(
            indptr=indptr.astype(np.int64),
            genes=genes.astype(np.int32),
            counts=counts.astype(np.float32),
            totals=np.ascontiguousarray(totals),
            rows=np.arange(len(totals)),
        )
    )


class Conversion:
    """One conversion: its plan, and its steps.

    Parameters
    ----------
    streams
        The sources.
    target
        Path of the store.
    staging
        The folder of the conversion, whose lock is held.
    options
        Arguments of :func:`scforge.data.convert` that the content depends on, and `memory` in bytes.
    vocab, overwrite, progress
        As there.
    """

    def __init__(
        self,
        streams: Sequence[CellStream],
        target: Path,
        staging: Staging,
        options: dict[str, Any],
        vocab: str | os.PathLike[str] | GeneVocab | None,
        *,
        overwrite: bool,
        progress: bool,
    ) -> None:
        self.streams, self.target, self.staging, self.options = streams, target, staging, options
        self.overwrite, self.progress = overwrite, progress
        self.journal: Journal
        self.vocab, self.genes = map_sources(
            streams, vocab, gene_key=options["gene_key"], min_overlap=options["min_overlap"]
        )
        self.table: CellTable = join_tables(streams, options["obs"])
        self.n_cells = sum(stream.n_cells for stream in streams)
        self.layout = Layout.of(
            options["memory"],
            n_cells=self.n_cells,
            most_cells=max(stream.n_cells for stream in streams),
            n_entries=sum(stream.n_entries for stream in streams),
            n_genes=self.vocab.n_genes,
            row_bytes=self.table.row_dtype.itemsize,
            table_bytes=self.table.n_bytes,
            medians=self.vocab.medians is None,
        )
        self.plan = {
            "sources": [{"name": stream.name, **stream.fingerprint()} for stream in streams],
            **options,
            "vocab": self.vocab.hash,
            "bucket_size": self.layout.bucket_size,
            "n_buckets": self.layout.n_buckets,
            "numpy": np.__version__,  # whose generators may give other numbers in another release
            # Commits between releases write the same.
            "scforge": __version__.partition(".dev")[0],
        }

    def run(self) -> StoreInfo:
        """Go on from what is done already."""
        self.journal = self._begin()
        if not self.journal.scattered:
            self._scatter()
        vocab = self._write()
        return self._finish(vocab)

    def _begin(self) -> Journal:
        try:
            journal = self.staging.resume(self.plan)
        except (DataError, OptionError):
            if not self.overwrite:
                raise
            self.staging.clear()
            journal = None
        if journal is not None:
            logger.info("Going on with an unfinished conversion: %d datasets are written.", len(journal.datasets))
            return journal
        self.staging.clear()
        check_space(self.staging.folder, self.n_bytes)
        journal = Journal.begin(self.plan, n_buckets=self.layout.n_buckets, n_sources=len(self.streams))
        self.staging.save(journal)
        return journal

    @property
    def n_bytes(self) -> float:
        """Size of all temporary files, about: each goes when its dataset, which is smaller, is written."""
        entries = sum(genes.share * stream.n_entries for genes, stream in zip(self.genes, self.streams, strict=True))
        return self.layout.entry_bytes * entries + self.table.row_dtype.itemsize * self.n_cells

    def _positions(self) -> np.ndarray | None:
        """Return the place of each cell in the store, shape (n_cells,); None if they keep their order."""
        if not self.options["shuffle"]:
            return None
        positions = np.arange(self.n_cells, dtype=np.uint32 if self.n_cells < 2**32 else np.uint64)
        # Not the seed alone: whoever permutes the cells of the store with the same would bring back the old order.
        np.random.default_rng([self.options["seed"], *b"store"]).shuffle(positions)
        return positions

    def _scatter(self) -> None:
        names = CellNames(self.streams)
        if names.n_changed:
            logger.info(
                "%d cells have a name that another one has; the number of their source is added.", names.n_changed
            )
        positions = self._positions()
        buffer = Buffer(self.layout.buffer_entries, self.vocab.n_genes, self.table.row_dtype)
        if self.journal.wide:
            buffer.widen()
        first = sum(stream.n_cells for stream in self.streams[: self.journal.source]) + self.journal.row
        with self._bar("Reading", first) as bar:
            for number in range(self.journal.source, len(self.streams)):
                before = sum(stream.n_cells for stream in self.streams[:number])
                self._scatter_source(number, before, names, positions, buffer, bar)
        self._flush(buffer, len(self.streams), 0)
        self.journal.scattered = True
        self.staging.save(self.journal)

    def _scatter_source(
        self, number: int, before: int, names: CellNames, positions: np.ndarray | None, buffer: Buffer, bar: Any
    ) -> None:
        stream, genes = self.streams[number], self.genes[number]
        start = self.journal.row if number == self.journal.source else 0
        rows, raw_names = self.table.rows(stream, number)
        cell_names = names(raw_names, number)
        place = np.arange(before, before + stream.n_cells)
        rows["position"] = place if positions is None else positions[place]
        for first, chunk in stream.chunks(start):
            here = slice(first, first + chunk.shape[0])
            if not buffer.takes(chunk.nnz):
                self._flush(buffer, number, first)
            buckets = rows["position"][here] // self.layout.bucket_size
            added, kept = self._add(
                buffer, number, first, (chunk, genes.columns, rows[here], cell_names[here], buckets)
            )
            self.journal.kept[number] += kept
            self.journal.totals[number] += float(added["total"].sum())
            self.journal.n_empty += int((added["length"] == 0).sum())
            bar.update(chunk.shape[0])

    def _add(self, buffer: Buffer, number: int, first: int, cells: tuple[Any, ...]) -> tuple[np.ndarray, float]:
        """Add cells to the buffer, with counts of 32 bits from the first one on that needs them."""
        try:
            return buffer.add(*cells)
        except TooLarge as found:
            stream, gene = self.streams[number], self.vocab.genes[found.gene]
            if found.count > MOST:
                raise DataError(
                    f"{stream.name!r} has the count {found.count:.0f} of {gene!r} in the cell "
                    f"{cells[3][found.row]!r}, but a store holds counts up to {MOST:,}; correct it or remove the cell."
                ) from found
            logger.info("%r has the count %d of %r: the store has counts of 32 bits.", stream.name, found.count, gene)
        self._flush(buffer, number, first)
        buffer.widen()
        self.journal.wide = True
        return self._add(buffer, number, first, cells)

    def _flush(self, buffer: Buffer, number: int, row: int) -> None:
        """Write the cells of the buffer to their files, and then that they are there."""
        for bucket, segment in buffer.segments():
            self.journal.sizes[bucket] = append_segment(self.staging.bucket(bucket), segment)
            self.journal.entries[bucket] += len(segment.genes)
        buffer.clear()
        self.journal.source, self.journal.row = number, row
        self.staging.save(self.journal)

    def _write(self) -> GeneVocab:
        """Write the datasets; return the vocabulary with medians."""
        journal, layout = self.journal, self.layout
        if not sum(journal.entries):
            self.staging.clear()  # there is nothing to continue
            raise DataError("no cell expresses a gene of the vocabulary; choose another one with vocab.")
        medians = StreamingMedians(self.vocab.n_genes) if self.vocab.medians is None else None
        parts = [
            (bucket, part, n_parts)
            for bucket, n_entries in enumerate(journal.entries)
            for n_parts in [layout.n_parts(bucket, n_entries, wide=journal.wide)]
            for part in range(n_parts)
        ]
        with self._bar("Writing", sum(dataset["n_cells"] for dataset in journal.datasets)) as bar:
            for number, (bucket, part, n_parts) in enumerate(parts):
                folder = self.staging.store / DATASET.format(number)
                if number < len(journal.datasets):
                    if medians is not None:
                        add_stored_medians(medians, folder)
                else:
                    self._write_one(folder, bucket, part, n_parts, medians)
                    bar.update(journal.datasets[-1]["n_cells"])
                if not journal.sizes[bucket]:
                    self.staging.bucket(bucket).unlink(missing_ok=True)
        return self.vocab if medians is None else self.vocab.with_medians(medians.medians())

    def _write_one(self, folder: Path, bucket: int, part: int, n_parts: int, medians: StreamingMedians | None) -> None:
        cells = load_cells(
            self.staging.bucket(bucket),
            self.table,
            self.vocab.n_genes,
            wide=self.journal.wide,
            part=part,
            n_parts=n_parts,
        )
        with ThreadPoolExecutor(max_workers=1) as pool:
            measured = None if medians is None else pool.submit(add_medians, medians, cells)
            dataset = write_dataset(folder, cells, self.vocab.genes, self.table)
        if measured is not None:
            measured.result()
        self.journal.datasets.append(dataset)
        if part == n_parts - 1:
            self.journal.sizes[bucket] = 0
        self.staging.save(self.journal)

    def _finish(self, vocab: GeneVocab) -> StoreInfo:
        """Describe the store and give it its name."""
        journal, plan = self.journal, self.plan
        info = StoreInfo(
            n_cells=self.n_cells,
            n_nonzeros=sum(dataset["n_nonzeros"] for dataset in journal.datasets),
            n_genes=vocab.n_genes,
            vocab_hash=vocab.hash,
            counts_dtype="uint32" if journal.wide else "uint16",
            shuffled=plan["shuffle"],
            seed=plan["seed"] if plan["shuffle"] else None,
            chunk_size=CHUNK_SIZE,
            obs_columns=[column.name for column in self.table.columns],
            content_hash=content_hash(vocab.hash, [dataset["hash"] for dataset in journal.datasets]),
            datasets=journal.datasets,  # type: ignore[arg-type]
            sources=[
                {**source, "name": name, "overlap": genes.overlap, "counts_kept": kept / total}  # type: ignore[typeddict-item]
                for source, name, genes, kept, total in zip(
                    plan["sources"], self.table.sources, self.genes, journal.kept, journal.totals, strict=True
                )
            ],
            counts_kept=sum(journal.kept) / sum(journal.totals),
            options={key: plan[key] for key in ("layer", "gene_key", "modality", "min_overlap", "obs", "memory")},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            scforge_version=__version__,
        )
        write_root(self.staging.store, info, vocab, np.stack([genes.measured for genes in self.genes]))
        warn_outside(self.genes, journal, vocab, [stream.name for stream in self.streams])
        new = self.staging.store
        if self.target.exists():
            if not self.overwrite:
                raise OptionError(f"path={str(self.target)!r} exists now; pass overwrite=True (--overwrite).")
            if not may_be_replaced(self.target):
                raise OptionError(f"path={str(self.target)!r} exists now and is no store; move it away.")
            # By another name: a conversion that goes on would take what was replaced for its own.
            new = self.staging.folder / "replaced"
            self.staging.store.rename(new)
        swap_in(new, self.target)
        journal.finished = True
        self.staging.save(journal)
        shutil.rmtree(self.staging.folder)
        return info

    def _bar(self, what: str, first: int) -> Any:
        from tqdm import tqdm

        # None: no bar where standard error is no terminal.
        hidden = None if self.progress else True
        return tqdm(total=self.n_cells, initial=first, desc=what, unit="cell", unit_scale=True, disable=hidden)


def convert(
    sources: Any,
    path: str | os.PathLike[str],
    *,
    vocab: str | os.PathLike[str] | GeneVocab | None = None,
    obs: Sequence[str] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    memory: int | str = "4GB",
    layer: str | None = None,
    gene_key: str | None = None,
    modality: str | None = None,
    min_overlap: float = MIN_OVERLAP,
    overwrite: bool = False,
    progress: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> StoreInfo:
    """Convert cells into a store, from which models train however many cells there are.

    The cells of all sources come into one random order, over the genes of one vocabulary. A conversion that was
    interrupted goes on where it was when it is called again with the same arguments. Nothing stands under `path`
    before all of it is written.

    Parameters
    ----------
    sources
        What :func:`scforge.data.open_streams` opens: an AnnData, a path, pattern or URL of h5ad or zarr, or a list.
    path
        Folder of the store, e.g. ``"store.zarr"``, on a local disk.
    vocab
        A vocabulary, the file of one, or the name of a shipped one (see :func:`scforge.data.list_vocabs`). None takes
        all genes of all sources, in order of their first appearance.
    obs
        Columns of ``obs`` to keep; None keeps all that every source has. Columns of text become categories.
    shuffle
        Whether to bring the cells into random order. Without it they stay in the order of the sources.
    seed
        Seed of that order.
    memory
        Most memory that the process may take, e.g. ``"4GB"``, or a number of bytes. More makes larger datasets.
    layer
        Layer with raw counts; None reads X.
    gene_key
        Column of ``var`` with the gene names; None reads ``var_names``.
    modality
        Modality of a MuData.
    min_overlap
        Smallest share of genes of `vocab` that a source must have, see :func:`scforge.data.map_genes`.
    overwrite
        Whether to replace a store that is there, and to drop an unfinished conversion that does not fit this one.
    progress
        Whether to show a bar, where standard error is a terminal.
    storage_options
        Options of a remote file system for the sources, see fsspec.

    Returns
    -------
    The description of the store.

    Raises
    ------
    OptionError
        If `path` exists (with `overwrite`: and is no store), or is, contains or lies in a source or lies in a zarr
        folder; if another conversion is writing to it, an unfinished one was begun with other options, or `memory` is
        too little.
    MissingFileError
        If a source does not exist.
    DataError
        If a source cannot be used, or has changed since the conversion began, or if the disk is full.
    GeneMismatchError
        If a source has too few genes of the vocabulary.

    Warns
    -----
    ScforgeWarning
        As :func:`scforge.data.open_cells` does, with the name of the source.

    Examples
    --------
    >>> import scforge
    >>> info = convert(scforge.datasets.pbmc3k(), "store.zarr", obs=["cell_type"])
    >>> info.n_cells, info.counts_dtype, info.obs_columns
    (2700, 'uint16', ['cell_type'])
    """
    target = _check_target(path)
    check_bool("shuffle", shuffle)
    check_bool("overwrite", overwrite)
    check_bool("progress", progress)
    check_share("min_overlap", min_overlap)
    options = {
        "layer": layer,
        "gene_key": gene_key,
        "modality": modality,
        "min_overlap": float(min_overlap),
        "obs": None if obs is None else _listed(obs),
        "shuffle": shuffle,
        "seed": check_seed(seed),
        "memory": parse_bytes("memory", memory),
    }
    staging = Staging(partial_path(target))
    _check_free(target, staging, overwrite)
    streams = open_streams(sources, layer=layer, modality=modality, storage_options=storage_options)
    _check_apart(target, streams)
    with locked(staging.folder):
        try:
            conversion = Conversion(streams, target, staging, options, vocab, overwrite=overwrite, progress=progress)
            with full_disk(target, conversion.n_bytes):
                return conversion.run()
        except ScforgeError:
            staging.remove_if_empty()  # a rejected conversion leaves nothing that seems to be one to continue
            raise


_FILES = {".h5ad", ".h5", ".h5mu", ".hdf5", ".loom", ".csv", ".tsv", ".txt", ".json", ".yaml", ".parquet", ".zip"}
"""Endings that no folder has."""


def _check_target(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise OptionError(f"path={path!r} is not the path of a folder; name one such as 'store.zarr'.")
    if is_url(path):
        raise OptionError(f"path={os.fspath(path)!r} is a URL; convert to a local disk, and copy the store there.")
    target = Path(path).resolve()
    if not target.name:
        raise OptionError(f"path={os.fspath(path)!r} is the root of the disk; name a folder such as 'store.zarr'.")
    check_folder("path", target)
    put_back(target)
    if target.suffix in _FILES and not target.is_dir():
        raise OptionError(
            f"path={os.fspath(path)!r} is named like a file, and a store is a folder; name one such as 'store.zarr'."
        )
    for folder in target.parents:
        if any((folder / name).exists() for name in ("zarr.json", ".zgroup")):
            raise OptionError(
                f"path={str(target)!r} lies in the zarr folder {str(folder)!r}; choose a path outside of it."
            )
    return target


def _check_apart(target: Path, streams: Sequence[CellStream]) -> None:
    """Raise if the store would stand in the place of a source, above or below it."""
    for stream in streams:
        name = stream.name.removeprefix("file://")
        # The name of cells in memory or of the Census is no path, even if there is a file of that name.
        if isinstance(stream, AdataStream) or is_url(name) or not Path(name).exists():
            continue
        source = Path(name).resolve()
        if target == source or target in source.parents or source in target.parents:
            raise OptionError(
                f"path={str(target)!r} is, contains or lies in the source {name!r}; choose a path apart from it."
            )


def _listed(obs: Sequence[str]) -> list[str]:
    if isinstance(obs, str) or not all(isinstance(name, str) for name in obs):
        raise OptionError(f"obs={obs!r} is no list of columns; give e.g. obs=['cell_type'].")
    return list(obs)


def _check_free(target: Path, staging: Staging, overwrite: bool) -> None:
    """Raise if a store must not be replaced, after removing what a conversion that was killed at its end has left."""
    if not target.exists():
        return
    if not may_be_replaced(target):
        raise OptionError(
            f"path={str(target)!r} exists and is no store, so it is not replaced; choose another name, or remove it."
        )
    if overwrite:
        return
    if is_store(target) and staging.folder.exists():
        with locked(staging.folder):
            journal = staging.load()
            if journal is not None and staging.is_over(journal):
                shutil.rmtree(staging.folder)
    raise OptionError(f"path={str(target)!r} exists; pass overwrite=True (--overwrite) or choose another name.")
