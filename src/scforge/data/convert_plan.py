"""How much of a conversion is in memory at a time, and into how many datasets the cells go."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from scforge.data.scatter import gene_dtype
from scforge.data.store_files import CHUNK_SIZE
from scforge.errors import OptionError

__all__ = ["Layout", "parse_bytes"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

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


def parse_bytes(argument: str, value: Any) -> int:
    """Return a size in bytes, given as a number or as e.g. ``"4GB"`` (powers of ten) or ``"4GiB"`` (powers of two).

    Examples
    --------
    >>> parse_bytes("memory", "1.5GB"), parse_bytes("memory", "512 MiB")
    (1500000000, 536870912)
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", value, flags=re.IGNORECASE)
        if match and match[2].lower() in _UNITS and float(match[1]) > 0:
            return int(float(match[1]) * _UNITS[match[2].lower()])
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise OptionError(f"{argument}={value!r} is no size; give e.g. '4GB', or a number of bytes.")


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
