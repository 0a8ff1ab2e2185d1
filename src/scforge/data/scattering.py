"""Scatter the counts of all cells over temporary files, each of which becomes a dataset of a store.

Shapes: N cells, G genes, E entries.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pandas as pd
from scipy import sparse

from scforge.data.cells import CellBlock
from scforge.data.checks import row_checksums, row_sums
from scforge.data.genes import GeneMap
from scforge.data.medians import StreamingMedians
from scforge.data.readers import ChunkReader
from scforge.data.store import CHECKED, CHUNK_SIZE, CODECS, DATASET, TOTAL, dataset_hash
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError

_MAX_COUNT = 2**32 - 1
"""Largest count that a store can hold."""

COUNT_BYTES = 4
"""Size of a count in the temporary files."""

_SHARD = 2**16
"""Number of cells per dataset file: a multiple of the chunk size, and about 300 MB before compression."""

_PIECE = 4096
"""Number of cells that are gathered and added to the medians at a time."""

_MAX_TOTAL = 1e9
"""Largest library size for which the histograms of the medians have bins."""

_LOW_BIT = np.uint64(0x03F79D71B4CB0A89)
"""A de Bruijn sequence: the first six bits of its product with a word of one bit differ for each place of this bit."""

_BITS = np.zeros(64, dtype=np.int64)
_BITS[[((int(_LOW_BIT) << number) & (2**64 - 1)) >> 58 for number in range(64)]] = np.arange(64)


def gene_dtype(n_genes: int) -> np.dtype:
    """Return the smallest unsigned integer type for gene indices, as anndata chooses it."""
    return np.dtype(np.uint8 if n_genes <= 0xFF else np.uint16 if n_genes <= 0xFFFF else np.uint32)


class Scattered:
    """The counts of all cells in temporary files, two files per dataset, in the order of the sources.

    Parameters
    ----------
    folder
        Folder of the files.
    order
        Index of the cell, counted across all sources, at each position of the store, shape (N,).
    size
        Number of cells per dataset.
    vocab
        The vocabulary.
    counts_dtype
        Type of the counts of the store to which cells are appended, whose datasets all have the same. If None, the
        smallest that holds the counts.
    """

    def __init__(
        self, folder: Path, order: np.ndarray, size: int, vocab: GeneVocab, counts_dtype: str | None = None
    ) -> None:
        self.folder, self.vocab = folder, vocab
        self.parts = [order[start : start + size] for start in range(0, len(order), size)]
        self.genes_dtype = gene_dtype(vocab.n_genes)
        self.counts_dtype: np.dtype = np.dtype(counts_dtype or np.uint16)
        self.largest = _MAX_COUNT if counts_dtype is None else int(np.iinfo(counts_dtype).max)
        self.lengths = np.empty(len(order), dtype=np.uint32)
        self.wide = np.zeros(len(order), dtype=bool)
        """Whether the counts of a cell have 32 bits in the files, not 16."""
        self.totals = np.empty(len(order), dtype=np.float64)
        self.kept: list[float] = []
        """Sum of all counts in vocabulary genes, for each source."""
        self.sums: list[float] = []
        """Sum of all counts, for each source."""
        self.sum_of_partial = 0.0
        """Sum of all counts in vocabulary genes that some source does not measure."""
        self.checksums: list[np.ndarray] = []
        """Checksums of the cells of each dataset."""

    def read(
        self,
        streams: Sequence[ChunkReader],
        maps: Sequence[GeneMap],
        table: pd.DataFrame,
        *,
        partial: np.ndarray,
        progress: bool,
    ) -> None:
        """Write the counts of the sources to the files; `partial` are the genes that some source does not measure."""
        dataset_of = np.empty(len(table), dtype=np.uint32)
        for number, cells in enumerate(self.parts):
            dataset_of[cells] = number
        first = 0
        with _bar("Reading", len(table), progress) as bar:
            for stream, gene_map in zip(streams, maps, strict=True):
                kept, before = 0.0, first
                for chunk in _ahead(stream):
                    rows = slice(first, first + chunk.shape[0])
                    self.totals[rows] = row_sums(chunk)
                    chunk_kept, of_partial = self._append(chunk, gene_map, rows, dataset_of[rows], partial, stream.name)
                    kept, self.sum_of_partial = kept + chunk_kept, self.sum_of_partial + of_partial
                    first = rows.stop
                    bar.update(chunk.shape[0])
                self.kept.append(kept)
                self.sums.append(float(self.totals[before:first].sum()))
        if not sum(self.kept):
            raise DataError("no cell expresses a gene of the vocabulary; choose another vocabulary.")

    def _append(
        self,
        chunk: sparse.csr_matrix,
        gene_map: GeneMap,
        rows: slice,
        dataset_of: np.ndarray,
        partial: np.ndarray,
        source: str,
    ) -> tuple[float, float]:
        """Map the genes of a chunk and append its cells to the files; return the sums of counts, also in `partial`."""
        data = chunk.data
        if float(data.max(initial=0)) > _MAX_COUNT:  # which may be outside of the vocabulary
            self._check_largest(gene_map.apply(chunk).data.max(initial=0), source)
            data = np.minimum(data.astype(np.float64), _MAX_COUNT)
        order = np.argsort(dataset_of, kind="stable")
        genes, counts = np.empty(len(data), self.genes_dtype), np.empty(len(data), np.uint32)
        parts = chunk.indptr.astype(np.int64), chunk.indices.astype(np.int32, copy=False), data.astype(np.uint32)
        lengths = np.empty(len(order), dtype=np.uint32)
        columns = gene_map.columns.astype(np.int32)
        largest, kept, of_partial = _map_rows(*parts, columns, partial, order, genes, counts, lengths)
        self._check_largest(largest, source)
        wide = largest > np.iinfo(np.uint16).max
        if wide:
            self.counts_dtype = np.dtype(np.uint32)
        self.lengths[rows], self.wide[rows] = lengths, wide
        cells_before = np.searchsorted(dataset_of[order], np.arange(len(self.parts) + 1))
        before = np.concatenate([[0], np.cumsum(lengths[order], dtype=np.int64)])[cells_before]
        for number, (start, stop) in enumerate(itertools.pairwise(before.tolist())):
            if stop > start:
                with (self.folder / f"genes_{number}").open("ab") as file:
                    file.write(genes[start:stop])
                with (self.folder / f"counts_{number}").open("ab") as file:
                    file.write(counts[start:stop].astype(_counts_dtype(wide)))
        return float(kept), float(of_partial)

    def _check_largest(self, largest: float, source: str) -> None:
        if float(largest) > self.largest:
            fix = "check that these are raw counts" if self.largest == _MAX_COUNT else "convert all data again"
            raise DataError(
                f"{source!r} contains the count {largest:.0f}, but the largest count of the store is "
                f"{self.largest:,}; {fix}."
            )

    def write(
        self, store: Path, table: pd.DataFrame, *, first: int, progress: bool
    ) -> tuple[list[dict[str, Any]], GeneVocab]:
        """Write the datasets, numbered from `first`, and return their metadata and the vocabulary with medians."""
        medians = StreamingMedians(self.vocab.n_genes) if self.vocab.medians is None else None
        datasets = []
        with _bar("Writing", len(table), progress) as bar, ThreadPoolExecutor(2) as threads:
            for number, cells in enumerate(self.parts):
                matrix, totals = self._gathered(number, cells), self.totals[cells]
                obs = table.iloc[cells]
                obs.insert(len(obs.columns) - 1, TOTAL, totals)
                parts = matrix.indptr, matrix.indices, matrix.data
                # These wait neither for each other nor for the compression of the counts.
                digest = threads.submit(dataset_hash, *parts, obs)
                measured = threads.submit(_add_to_medians, medians, matrix, totals)
                _write_dataset(store / DATASET.format(first + number), matrix, obs, self.vocab)
                self.checksums.append(row_checksums(*parts, totals))
                measured.result()
                datasets.append({"n_cells": len(cells), "n_nonzeros": int(parts[0][-1]), "hash": digest.result()})
                bar.update(len(cells))
        return datasets, self.vocab if medians is None else self.vocab.with_medians(medians.medians())

    def _gathered(self, number: int, cells: np.ndarray) -> sparse.csr_matrix:
        """Return the counts of a dataset in store order, and remove the temporary files."""
        in_file = np.sort(cells)
        sizes, wide = self.lengths[in_file].astype(np.int64), self.wide[in_file]
        indptr = np.concatenate([[0], np.cumsum(self.lengths[cells], dtype=np.int64)])
        targets = np.empty(len(cells), dtype=np.int64)
        targets[np.searchsorted(in_file, cells)] = indptr[:-1]
        # SciPy's constructor would make the indices wider, in a copy. Who reads holds the boundaries in memory.
        matrix = sparse.csr_matrix((len(cells), self.vocab.n_genes), dtype=self.counts_dtype)
        matrix.indices, matrix.data = np.empty(indptr[-1], self.genes_dtype), np.empty(indptr[-1], self.counts_dtype)
        matrix.indptr = indptr.astype(np.int32) if indptr[-1] < 2**31 else indptr
        # Piece by piece, because memory that a process uses for the first time takes longer than the rest.
        cuts = np.union1d(np.arange(0, len(cells), _PIECE), np.flatnonzero(np.diff(wide)) + 1)
        for name, values in (("genes", matrix.indices), ("counts", matrix.data)):
            path = self.folder / f"{name}_{number}"
            path.touch()  # where all cells are empty
            with path.open("rb", buffering=0) as file:
                for start, stop in itertools.pairwise([*cuts.tolist(), len(cells)]):
                    dtype = self.genes_dtype if name == "genes" else _counts_dtype(wide[start])
                    n_entries = int(sizes[start:stop].sum())
                    piece = np.fromfile(file, dtype, n_entries)
                    if len(piece) != n_entries:
                        raise DataError(f"the temporary file {str(path)!r} was shortened; convert again.")
                    _put_rows(piece, sizes[start:stop], targets[start:stop], values)
            path.unlink()
        return matrix


def _ahead(stream: ChunkReader) -> Iterator[sparse.csr_matrix]:
    """Yield the pieces of a source, the next of which is read meanwhile."""
    chunks = iter(stream.chunks())
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, chunks, None)
        while (piece := following.result()) is not None:
            following = thread.submit(next, chunks, None)
            yield piece[1]


def _counts_dtype(wide: bool) -> type[np.unsignedinteger]:
    """Return the type of counts in a temporary file."""
    return np.uint32 if wide else np.uint16


def _add_to_medians(medians: StreamingMedians | None, matrix: sparse.csr_matrix, totals: np.ndarray) -> None:
    if medians is None:
        return
    for start in range(0, len(totals), _PIECE):
        stop = min(start + _PIECE, len(totals))
        indptr = matrix.indptr[start : stop + 1].astype(np.int64)
        entries = slice(int(indptr[0]), int(indptr[-1]))
        parts = matrix.data[entries].astype(np.float32), matrix.indices[entries].astype(np.int32), indptr - indptr[0]
        block = CellBlock(parts[2], parts[1], parts[0], totals[start:stop], np.arange(start, stop))
        usual = block.totals <= _MAX_TOTAL
        if not usual.all():
            cells = sparse.csr_matrix(parts, shape=(stop - start, matrix.shape[1]))[usual]
            block = CellBlock.from_csr(cells, block.totals[usual])
        medians.update(block)


@numba.njit(cache=True, nogil=True)
def _map_rows(indptr, indices, data, columns, partial, order, genes, counts, lengths):
    """Write the rows in `order` over vocabulary genes, sorted, with sums of columns of the same gene, without zeros.

    Returns the largest count, the sum of all counts, and the sum of those in `partial` genes.
    """
    one, zero = np.uint64(1), np.uint64(0)
    sums = np.zeros(len(partial), dtype=np.uint64)
    words = np.zeros((len(partial) + 63) // 64, dtype=np.uint64)  # a bit for each gene that the cell expresses
    largest, kept, of_partial, end = zero, zero, zero, 0
    for row in order:
        begin = end
        for entry in range(indptr[row], indptr[row + 1]):
            gene = columns[indices[entry]]
            if gene >= 0 and data[entry] > 0:
                sums[gene] += np.uint64(data[entry])
                words[gene >> 6] |= one << np.uint64(gene & 63)
        for word in range(len(words)):
            bits = words[word]
            words[word] = zero
            while bits != zero:
                lowest = bits & (~bits + one)
                bits ^= lowest
                gene = 64 * word + _BITS[np.int64((lowest * _LOW_BIT) >> np.uint64(58))]
                count = sums[gene]
                sums[gene] = zero
                genes[end], counts[end] = gene, count
                end += 1
                largest = max(largest, count)
                kept += count
                if partial[gene]:
                    of_partial += count
        lengths[row] = end - begin
    return largest, kept, of_partial


@numba.njit(cache=True, nogil=True)
def _put_rows(stored, sizes, targets, values):
    """Copy consecutive rows to where they begin in `values`."""
    entry = 0
    for row in range(len(sizes)):
        target = targets[row]
        for place in range(sizes[row]):
            values[target + place] = stored[entry]
            entry += 1


def _write_dataset(folder: Path, matrix: sparse.csr_matrix, obs: pd.DataFrame, vocab: GeneVocab) -> None:
    import zarr
    from annbatch import write_sharded
    from anndata import AnnData
    from anndata.io import write_elem
    from zarr.codecs import BloscCodec, Crc32cCodec

    adata = AnnData(matrix, obs=obs[[]], var=pd.DataFrame(index=pd.Index(vocab.genes, dtype=str)))
    # Every chunk is written, because a missing chunk is an error; zarrs leaves out chunks of zeros.
    codecs = CODECS if matrix.indices.any() else {}
    with zarr.config.set({"array.write_empty_chunks": True}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        with zarr.config.set(codecs):
            write_sharded(
                zarr.open_group(folder, mode="w", zarr_format=3),
                adata,
                n_obs_per_chunk=CHUNK_SIZE,
                shard_size=_SHARD,
                compressors=(BloscCodec(cname="lz4", clevel=9, shuffle="shuffle"), Crc32cCodec()),
            )
        # annbatch writes the tables without checksums.
        group = zarr.open_group(folder, mode="r+", use_consolidated=False)
        for name, table in (("obs", obs), ("var", adata.var)):
            write_elem(group, name, table, dataset_kwargs={"compressors": CHECKED})
        zarr.consolidate_metadata(group.store)


def _bar(what: str, n_cells: int, progress: bool) -> Any:
    from tqdm import tqdm

    # None: no bar where standard error is no terminal.
    return tqdm(total=n_cells, desc=what, unit="cell", unit_scale=True, disable=None if progress else True)
