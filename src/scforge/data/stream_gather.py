"""Cells of several sources in memory, over one vocabulary: they are never there as a whole in any other form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import sparse

from scforge.data.cells import CellSource
from scforge.data.compressed import row_sums
from scforge.data.mapping import GeneMap
from scforge.data.vocab import GeneVocab

if TYPE_CHECKING:
    import pandas as pd

    from scforge.data.streams import CellStream

__all__ = ["gather", "joined_obs"]


class _Piece(NamedTuple):
    """Some cells: counts in the smallest type that holds them, genes likewise, number of genes of each cell."""

    counts: np.ndarray
    genes: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, mapped: sparse.csr_matrix) -> _Piece:
        return cls(
            mapped.data.astype(np.min_scalar_type(int(mapped.data.max(initial=0)))),
            mapped.indices.astype(np.min_scalar_type(mapped.shape[1])),
            np.diff(mapped.indptr).astype(np.int32),
        )


def gather(
    streams: Sequence[CellStream], maps: Sequence[GeneMap], vocab: GeneVocab, *, obs: Sequence[str] | None
) -> CellSource:
    """Read sources into memory, mapped piece by piece.

    Parameters
    ----------
    streams
        The sources.
    maps
        Where the genes of each are in the vocabulary.
    vocab
        The vocabulary.
    obs
        Columns of obs to keep; None keeps all that every source has.

    Returns
    -------
    The cells, source after source. A gene counts as measured if any source has it.

    Raises
    ------
    DataError
        If a source is damaged, holds no counts, or lacks a column.
    """
    table = joined_obs(streams, obs)
    pieces, totals = [], []
    for stream, gene_map in zip(streams, maps, strict=True):
        for _, chunk in stream.chunks():
            totals.append(row_sums(chunk))
            pieces.append(_Piece.of(gene_map.apply(chunk)))
    counts = _joined(pieces, vocab.n_genes)
    measured = np.any([gene_map.measured for gene_map in maps], axis=0)
    all_totals = np.concatenate(totals)
    return CellSource(
        counts=counts,
        totals=all_totals,
        overlap=float(measured.mean()),
        counts_kept=float(counts.data.sum(dtype=np.float64) / all_totals.sum()),
        measured=measured,
        vocab=vocab,
        obs=table,
    )


def joined_obs(streams: Sequence[CellStream], columns: Sequence[str] | None) -> pd.DataFrame:
    """Return the tables of cells of all sources as one; of one source as it is.

    Of several sources the categories of a column are united, ``"scforge_source"`` says where a cell comes from (if it
    is among `columns`, or those are None), and cell names that repeat get the number of their source.

    Raises
    ------
    DataError
        If a source lacks a column, or one holds text where another holds numbers.
    """
    from scforge.data.convert_obs import CellNames, check_columns, join_tables
    from scforge.data.store_files import SOURCE, TOTAL

    if len(streams) == 1:
        table = streams[0].obs(columns)
        check_columns(table, streams[0].name)
        return table.copy(deep=False)
    own = None if columns is None else [column for column in columns if column != SOURCE]
    joining, names = join_tables(streams, own), CellNames(streams)
    read = [joining.rows(stream, source) for source, stream in enumerate(streams)]
    unique = np.concatenate([names(found, source) for source, (_, found) in enumerate(read)])
    joined = joining.frame(np.concatenate([rows for rows, _ in read]), unique)
    return joined.drop(columns=TOTAL) if columns is None else joined[list(columns)]


def _joined(pieces: list[_Piece], n_genes: int) -> sparse.csr_matrix:
    """Return the pieces as one matrix; each is given back as soon as it is copied, so that two of all never exist."""
    lengths = np.concatenate([piece.lengths for piece in pieces])
    indptr = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    # SciPy keeps boundaries and indices in one type.
    index_type = np.int32 if indptr[-1] < 2**31 else np.int64
    counts = np.empty(indptr[-1], dtype=np.result_type(*{piece.counts.dtype for piece in pieces}))
    genes = np.empty(indptr[-1], dtype=index_type)
    filled = 0
    pieces.reverse()
    while pieces:
        piece = pieces.pop()
        place = slice(filled, filled + len(piece.counts))
        counts[place], genes[place] = piece.counts, piece.genes
        filled = place.stop
    return sparse.csr_matrix((counts, genes, indptr.astype(index_type)), shape=(len(lengths), n_genes))
