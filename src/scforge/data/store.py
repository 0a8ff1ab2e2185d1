"""Cells of a store on disk or behind a URL: only row boundaries and what is known of each cell are in memory.

Shapes: N cells of the store, B cells of a block, G genes of the vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from scforge.data.cells import CellBlock, CellSource, choose_chunks, column_of, sample_chunks
from scforge.data.checks import value_problem
from scforge.data.compressed import index_problem, row_sums
from scforge.data.mapping import MIN_OVERLAP, GeneMap, map_names, warn_counts_outside
from scforge.data.named import open_vocab
from scforge.data.picking import first_damaged, pick_genes
from scforge.data.store_files import AGAIN
from scforge.data.store_opening import Opened, open_collection, read_names
from scforge.data.store_reading import StoreReader
from scforge.data.stream_errors import reading
from scforge.data.vocab import GeneVocab
from scforge.data.windows import Window
from scforge.errors import DataError, warn

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["StoreCells"]

_SAMPLED = 4096
"""Cells that are looked at to tell how many counts lie outside of a vocabulary."""


@dataclass(frozen=True, eq=False)
class StoreCells:
    """Cells of a store that :func:`scforge.data.convert` wrote, or of another annbatch collection of counts.

    Open one with :meth:`open` or :func:`scforge.data.open_cells`. In memory are a few bytes a cell (row boundaries,
    number of genes, library size, check number, and the wanted columns of obs), however many counts there are.

    Attributes
    ----------
    vocab
        The genes that the counts are over.
    overlap, counts_kept, measured
        As of :class:`~scforge.data.CellSource`. In a store made of several files, a gene counts as measured if any of
        them has it.
    obs
        The wanted columns of obs; cells are numbered.
    chunk_size
        Cells that stand together.
    place
        Path or URL.
    shuffled
        Whether the cells stand in random order.

    Examples
    --------
    >>> import tempfile, numpy as np, scforge
    >>> adata = scforge.datasets.pbmc3k()[:200]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     info = scforge.data.convert(adata, f"{folder}/store.zarr")
    ...     cells = StoreCells.open(f"{folder}/store.zarr", obs=["cell_type"])
    ...     block = cells.block(np.arange(10))
    >>> len(cells), cells.vocab.n_genes, len(block), list(cells.obs)
    (200, 16634, 10, ['cell_type'])
    """

    vocab: GeneVocab
    overlap: float
    counts_kept: float
    measured: np.ndarray | None
    obs: pd.DataFrame = field(repr=False)
    chunk_size: int
    place: str = field(repr=False)  # a URL may hold credentials
    shuffled: bool
    _opened: Opened = field(repr=False)
    _reader: StoreReader = field(repr=False)
    _lengths: np.ndarray = field(repr=False)
    _gene_map: GeneMap | None = field(repr=False)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        vocab: str | os.PathLike[str] | GeneVocab | None = None,
        *,
        obs: Sequence[str] | None = None,
        min_overlap: float = MIN_OVERLAP,
        storage_options: Mapping[str, Any] | None = None,
    ) -> StoreCells:
        """Open a store.

        Parameters
        ----------
        path
            Folder, or a URL that fsspec knows, e.g. ``"s3://bucket/store.zarr"``.
        vocab
            Vocabulary to map the genes to, by name; None takes that of the store.
        obs
            Columns of obs to have at hand; None takes all.
        min_overlap
            Smallest share of genes of `vocab` to accept.
        storage_options
            Options for the file system of a URL, as for fsspec.

        Raises
        ------
        MissingFileError
            If there is nothing of that name.
        DataError
            If it is no store, is incomplete or damaged, or has no such column.
        GeneMismatchError
            If too few genes of `vocab` are in the store.

        Warns
        -----
        ScforgeWarning
            If cells express no gene of the vocabulary, or as :func:`scforge.data.open_cells` does for genes.
        """
        with reading(repr(os.fspath(path)), how="as a store", fix=AGAIN):
            opened = open_collection(path, obs=obs, storage_options=storage_options)
            reader = StoreReader(opened.datasets, opened.place)
        cells = cls(
            vocab=opened.vocab,
            overlap=1.0,
            counts_kept=opened.counts_kept,
            measured=None,
            obs=opened.obs,
            chunk_size=opened.chunk_size,
            place=opened.place,
            shuffled=opened.shuffled,
            _opened=opened,
            _reader=reader,
            _lengths=reader.lengths,
            _gene_map=None,
        )
        return cells.with_vocab(opened.vocab if vocab is None else open_vocab(vocab), min_overlap=min_overlap)

    def with_vocab(self, vocab: GeneVocab, *, min_overlap: float = MIN_OVERLAP) -> StoreCells:
        """Return the same cells over the genes of another vocabulary, mapped by name.

        Parameters
        ----------
        vocab
            The other vocabulary.
        min_overlap
            Smallest share of its genes to accept.

        Returns
        -------
        The cells, on the same store.

        Raises
        ------
        GeneMismatchError
            If too few genes of `vocab` are in the store.
        """
        opened = self._opened
        if len(opened.genes) == vocab.n_genes and np.array_equal(opened.genes, np.array(vocab.genes)):
            measured = opened.measured
            cells = replace(self, vocab=vocab, counts_kept=opened.counts_kept, measured=measured, _gene_map=None)
            if empty := int((self._lengths == 0).sum()):
                warn(f"{empty} of {len(self)} cells express no gene of the vocabulary; their embedding tells nothing.")
        else:
            gene_map = map_names(opened.genes, vocab, min_overlap=min_overlap, whole=not vocab.chosen_from_data)
            measured = gene_map.measured_of(opened.measured)
            cells = replace(self, vocab=vocab, measured=measured, _gene_map=gene_map)
            some = cells.block(choose_chunks(len(cells), _SAMPLED, cells.chunk_size))
            cells = replace(cells, counts_kept=float(some.counts.sum(dtype=np.float64) / max(some.totals.sum(), 1.0)))
            warn_counts_outside(cells.counts_kept, vocab)
        return replace(cells, overlap=float(measured.mean()))

    def __len__(self) -> int:
        return len(self._reader)

    @property
    def n_expressed(self) -> np.ndarray:
        """Number of expressed genes of each cell in the store, unsigned, shape (N,).

        Where the vocabulary is a part of that of the store, a cell may have fewer.
        """
        return self._lengths

    def column(self, key: str) -> pd.Series:
        """Return the column `key` of obs, length N.

        Raises
        ------
        DataError
            If there is no such column, or it was not wanted when the store was opened.
        """
        return column_of(self.obs, key)

    def names(self) -> np.ndarray:
        """Return the names of the cells, read when asked for, array of str, shape (N,)."""
        return read_names(self._opened)

    def block(self, rows: np.ndarray, *, draw: int = 0) -> CellBlock:
        """Return the cells at `rows`, in that order; a row may come several times. `draw` keys random choices."""
        rows = np.asarray(rows, dtype=np.int64)
        if not len(rows):
            empty = sparse.csr_matrix((0, self.vocab.n_genes), dtype=np.uint16)
            return CellBlock.from_csr(empty, measured=self.measured)
        (block,) = self.stream([Window(rows=rows, ends=np.array([len(rows)]), draw=draw)])
        return block

    def stream(self, windows: Iterable[Window]) -> Iterator[CellBlock]:
        """Yield the cells of each batch of each of `windows`, in order, read window by window.

        Raises
        ------
        DataError
            If what is read is damaged; the message names the data set and the cell.
        """
        for rows, draw, counts in self._reader.batches(windows):
            counts = self._checked(rows, counts)
            totals = self._opened.totals
            sums = row_sums(counts) if totals is None else totals[rows].astype(np.float64)
            indptr, genes, values = self._mapped(counts)
            yield CellBlock(indptr, genes, values, sums, rows, draw=draw, measured=self.measured)

    def sample(self, n: int, *, rows: np.ndarray | None = None, seed: int = 0) -> CellSource:
        """Return at most `n` cells (of those at `rows`), drawn by `seed`, in memory, in the order of the store.

        Of more cells whole chunks are drawn, because they are read in one go.
        """
        return sample_chunks(self, n, rows=rows, seed=seed)

    def _checked(self, rows: np.ndarray, counts: sparse.csr_matrix) -> sparse.csr_matrix:
        """Return counts that are as they were written, sorted and without zeros."""
        checks = self._opened.checks
        if checks is not None:
            if (damaged := first_damaged(counts, checks[rows])) >= 0:
                raise DataError(self._damage(rows[damaged], "its counts are not those that were written"))
            return counts
        # Missing chunks come as zeros.
        empty = np.flatnonzero((np.diff(counts.indptr) > 0) & (row_sums(counts) == 0))
        if len(empty):
            raise DataError(self._damage(rows[empty[0]], "it has no counts"))
        if problem := index_problem(counts.indices, len(self._opened.genes)):
            raise DataError(self._damage(rows[0], problem))
        if counts.dtype.kind != "u" and (problem := value_problem(counts.data)):
            name, _ = self._reader.where(int(rows[0]))
            raise DataError(f"X of {name} of {self.place!r} {problem}, but raw counts are needed.")
        if not counts.has_canonical_format or (counts.data == 0).any():
            # Repeated entries are summed, which may not fit into e.g. uint8.
            counts = counts.astype(np.int64 if counts.dtype.kind in "iu" else counts.dtype, copy=True)
            counts.sum_duplicates()
            counts.eliminate_zeros()
        return counts

    def _damage(self, row: int, problem: str) -> str:
        name, cell = self._reader.where(int(row))
        return f"{name} of {self.place!r} is damaged at cell {cell}: {problem}; {AGAIN}."

    def _mapped(self, counts: sparse.csr_matrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self._gene_map is not None:
            if self._gene_map.ascends:
                return pick_genes(counts, self._gene_map.columns)
            counts = self._gene_map.apply(counts)
        return (
            counts.indptr.astype(np.int64),
            counts.indices.astype(np.int32, copy=False),
            counts.data.astype(np.float32, copy=False),
        )
