"""Datasets of a store, each from the temporary file with its cells."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from scforge.data.cells import CellBlock
from scforge.data.medians import StreamingMedians
from scforge.data.picking import CHECK, row_checks
from scforge.data.scatter import gene_dtype, place, read_segments
from scforge.data.store_files import CHUNK_SIZE, CODECS, TOTAL
from scforge.data.store_hash import column_check, dataset_hash

if TYPE_CHECKING:
    from scforge.data.convert_obs import CellTable

__all__ = ["Cells", "add_medians", "add_stored_medians", "load_cells", "write_dataset"]

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
