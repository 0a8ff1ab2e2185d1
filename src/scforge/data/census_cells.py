"""Cells of a SOMA experiment, read when they are needed; joinids and what is known of each cell are in memory.

Shapes: N cells of the query, B cells of a block, G genes of the vocabulary, V genes of the experiment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from scforge._checks import check_count
from scforge.data.cells import CellBlock, CellSource, choose_chunks, column_of, sample_chunks
from scforge.data.census_reading import CountReader
from scforge.data.compressed import row_sums
from scforge.data.mapping import MIN_OVERLAP, GeneMap, map_names, text_columns, warn_counts_outside
from scforge.data.vocab import GeneVocab
from scforge.data.windows import Window
from scforge.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CHUNK_SIZE", "SomaCells"]

CHUNK_SIZE = 256
"""Cells of neighbouring joinids that are read together."""

_SAMPLED = 1024
"""Cells that are looked at to tell how many counts lie outside of a vocabulary."""

_NAMES = ("feature_id", "feature_name", "var_id")
"""Columns of var that hold names of genes: those of the Census, and that of ``tiledbsoma.io.from_anndata``."""


class SomaCells:
    """Cells of a :class:`scforge.data.CensusQuery`, as :class:`scforge.data.cells.Cells`; made by its ``open``.

    Attributes
    ----------
    vocab
        The genes that the counts are over.
    overlap, counts_kept, measured
        As of :class:`~scforge.data.CellSource`. `counts_kept` is that of some cells.
    chunk_size
        Cells that are read together.
    obs
        The wanted columns of obs; cells are numbered.
    joinids
        ``soma_joinid`` of each cell, ascending, int64, shape (N,).
    place
        What was opened, for messages.

    Examples
    --------
    >>> from scforge.data import CensusQuery
    >>> query = CensusQuery(filters={"tissue": "lung", "is_primary_data": True}, obs=["cell_type"])
    >>> query.value_filter
    "(tissue == 'lung') and (is_primary_data == True)"
    >>> cells = query.open("human_protein_coding")  # doctest: +SKIP
    >>> cells.sample(1000, seed=0).counts.shape  # doctest: +SKIP
    (1000, 20120)
    """

    def __init__(
        self,
        reader: CountReader,
        joinids: np.ndarray,
        obs: pd.DataFrame,
        var: pd.DataFrame,
        vocab: GeneVocab | None,
        *,
        chosen: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        gene_key: str | None = None,
        min_overlap: float = MIN_OVERLAP,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        check_count("chunk_size", chunk_size, "cells")
        self.joinids, self.obs, self.place, self.chunk_size = joinids, obs, reader.name, chunk_size
        self._reader, self._lengths, self._var, self._genes = reader, lengths, var, chosen
        self._gene_key = gene_key
        known = var if chosen is None else var[chosen]
        key = gene_key or best_names(known, vocab)
        names = _texts(known[key])
        self.vocab = GeneVocab.from_genes(list(dict.fromkeys(names))) if vocab is None else vocab
        whole = not self.vocab.chosen_from_data
        gene_map = map_names(names, self.vocab, min_overlap=min_overlap, whole=whole, var=known, gene_key=key)
        columns = np.full(len(var), -1, dtype=np.int32)
        columns[slice(None) if chosen is None else chosen] = gene_map.columns
        self._gene_map = GeneMap(columns, self.vocab.n_genes)
        self.overlap, self.measured = self._gene_map.overlap, self._gene_map.measured
        some = self.block(choose_chunks(len(self), _SAMPLED, chunk_size))
        self.counts_kept = float(some.counts.sum(dtype=np.float64) / some.totals.sum())
        warn_counts_outside(self.counts_kept, self.vocab)

    def with_vocab(self, vocab: GeneVocab, *, min_overlap: float = MIN_OVERLAP) -> SomaCells:
        """Return the same cells over the genes of another vocabulary.

        Parameters
        ----------
        vocab
            The other vocabulary.
        min_overlap
            Smallest share of its genes to accept.

        Returns
        -------
        The cells of the same query.

        Raises
        ------
        GeneMismatchError
            If too few genes of `vocab` are in the experiment.
        """
        return SomaCells(
            self._reader,
            self.joinids,
            self.obs,
            self._var,
            vocab,
            chosen=self._genes,
            lengths=self._lengths,
            gene_key=self._gene_key,
            min_overlap=min_overlap,
            chunk_size=self.chunk_size,
        )

    def __len__(self) -> int:
        return len(self.joinids)

    def __repr__(self) -> str:
        return f"SomaCells({len(self)} cells of {self.place!r}, {self.vocab.n_genes} genes)"

    @cached_property
    def n_expressed(self) -> np.ndarray:
        """Number of expressed genes of each cell, int32, shape (N,).

        It is the column ``nnz`` of obs where there is one, as in the Census. That counts genes outside of the
        vocabulary, too, so it is an upper bound. Else all counts are read once, piece by piece.
        """
        if self._lengths is not None:
            return self._lengths
        lengths = np.zeros(len(self), dtype=np.int32)
        for start in range(0, len(self), self.chunk_size):
            rows = np.arange(start, min(start + self.chunk_size, len(self)))
            lengths[rows] = np.diff(self._gene_map.apply(self._reader.counts(rows)).indptr)
        return lengths

    def column(self, key: str) -> pd.Series:
        """Return the column `key` of obs, length N.

        Raises
        ------
        DataError
            If there is no such column, or the query did not name it in `obs`.
        """
        return column_of(self.obs, key)

    def block(self, rows: np.ndarray, *, draw: int = 0) -> CellBlock:
        """Return the cells at `rows`, in that order; a row may come several times. `draw` keys random choices."""
        rows = np.asarray(rows, dtype=np.int64)
        if not len(rows):
            empty = sparse.csr_matrix((0, self.vocab.n_genes), dtype=np.float32)
            return CellBlock.from_csr(empty, measured=self.measured)
        return next(self._batches(Window(rows, np.array([len(rows)]), draw), *self._read(rows)))

    def stream(self, windows: Iterable[Window]) -> Iterator[CellBlock]:
        """Yield the cells of each batch of each of `windows`, in order; the next window is read meanwhile."""
        waiting: tuple[Window, Future] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="scforge-soma") as pool:
            for window in windows:
                reading = pool.submit(self._read, window.rows)
                if waiting is not None:
                    yield from self._batches(waiting[0], *waiting[1].result())
                waiting = window, reading
            if waiting is not None:
                yield from self._batches(waiting[0], *waiting[1].result())

    def sample(self, n: int, *, rows: np.ndarray | None = None, seed: int = 0) -> CellSource:
        """Return at most `n` cells (of those at `rows`), drawn by `seed`, in memory, in the order of the query.

        Of more cells whole chunks are drawn, because they are read in one go.
        """
        return sample_chunks(self, n, rows=rows, seed=seed)

    def _read(self, rows: np.ndarray) -> tuple[np.ndarray, sparse.csr_matrix, np.ndarray]:
        """Return distinct rows, their counts of vocabulary genes, and their counts of all genes."""
        distinct = np.unique(rows)
        if len(distinct) and not 0 <= distinct[0] <= distinct[-1] < len(self):
            raise DataError(f"rows holds a position that is not from 0 to {len(self) - 1}.")
        counts = self._reader.counts(distinct)
        return distinct, self._gene_map.apply(counts), row_sums(counts)

    def _batches(
        self, window: Window, distinct: np.ndarray, counts: sparse.csr_matrix, totals: np.ndarray
    ) -> Iterator[CellBlock]:
        for rows in window.batches():
            place = np.searchsorted(distinct, rows)
            part = counts[place]
            yield CellBlock(
                indptr=part.indptr.astype(np.int64),
                genes=part.indices.astype(np.int32, copy=False),
                counts=part.data.astype(np.float32, copy=False),
                totals=totals[place],
                rows=rows,
                draw=window.draw,
                measured=self.measured,
            )


def best_names(var: pd.DataFrame, vocab: GeneVocab | None) -> str:
    """Return the column of var that holds the names of genes, of several the one that fits the vocabulary best."""
    known = [name for name in _NAMES if name in var] or [str(name) for name in text_columns(var) if name is not None]
    if not known:
        raise DataError("var has no column of text, so genes have no names; name the column with gene_key.")
    if vocab is None:
        return known[0]
    return max(known, key=lambda name: GeneMap.of(_texts(var[name]), vocab).n_matched)


def _texts(column: pd.Series) -> np.ndarray:
    return np.asarray(column, dtype=object).astype(str)
