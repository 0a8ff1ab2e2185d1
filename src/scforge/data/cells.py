"""Blocks of cells (CSR rows over vocabulary genes), cells in memory, and random numbers per cell."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

import numba
import numpy as np
import pandas as pd
from scipy import sparse

from scforge.data.checks import canonical, row_checksums, row_sums, sound_csr
from scforge.data.genes import MIN_OVERLAP, map_names
from scforge.data.sampling import _mix_keys
from scforge.errors import DataError, OptionError, suggest

if TYPE_CHECKING:
    from scforge.data.sampling import Window
    from scforge.data.vocab import GeneVocab


def content_keys(block: CellBlock, *, seed: int, stream: int = 0) -> np.ndarray:
    """Return a random key for each cell, which depends on its counts and the draw, uint64, shape (B,).

    The position of a cell does not matter: it keeps its random numbers in a subset or a reordered data set.
    """
    keys = np.empty(len(block), dtype=np.uint64)
    _digest(block.indptr, block.genes, block.counts.view(np.uint32), keys)
    return _mix_keys(keys.view(np.int64), np.uint64(seed), np.uint64(block.draw), np.uint64(stream))


@numba.njit(cache=True, nogil=True)
def _digest(indptr, genes, bits, keys):
    """Hash the genes and counts of each cell with a sum of products, which requires only one pass."""
    golden, other = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
    for cell in range(len(indptr) - 1):
        digest = np.uint64(0)
        for entry in range(indptr[cell], indptr[cell + 1]):
            gene = (np.uint64(genes[entry]) + np.uint64(1)) * golden
            digest += (gene ^ (gene >> np.uint64(29))) * (np.uint64(bits[entry]) * other + golden)
        keys[cell] = digest


@dataclass(frozen=True)
class CellBlock:
    """Counts of a group of cells over vocabulary genes, in compressed sparse row (CSR) format.

    Attributes
    ----------
    indptr
        Row boundaries, int64, shape (B + 1,).
    genes
        Vocabulary gene index of each entry, ascending within a cell, int32, shape (Z,).
    counts
        Count of each entry, positive, float32, shape (Z,).
    totals
        Total counts of each cell over all genes of the data, including genes outside the vocabulary, float64, shape
        (B,).
    rows
        Position of each cell in its source, int64, shape (B,). It is part of the key for random numbers.
    draw
        Number of the draw, e.g. the epoch. It is part of the key for random numbers.
    measured
        True for the vocabulary genes that are in the data, bool, shape (G,); None if unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.sparse import csr_matrix
    >>> block = CellBlock.from_csr(csr_matrix([[1, 0, 3], [0, 2, 0]]))
    >>> len(block), block.indptr.tolist(), block.genes.tolist(), block.counts.tolist(), block.totals.tolist()
    (2, [0, 2, 3], [0, 2, 1], [1.0, 3.0, 2.0], [4.0, 2.0])
    """

    indptr: np.ndarray
    genes: np.ndarray
    counts: np.ndarray
    totals: np.ndarray
    rows: np.ndarray
    draw: int = 0
    measured: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @classmethod
    def from_csr(
        cls, matrix: sparse.csr_matrix, totals: np.ndarray | None = None, *, measured: np.ndarray | None = None
    ) -> CellBlock:
        """Create a block from a CSR matrix of counts.

        Parameters
        ----------
        matrix
            Counts, shape (B, G).
        totals
            Total counts of each cell over all genes of the data, shape (B,). If None, uses the row sums.
        measured
            True for the vocabulary genes that are in the data, bool, shape (G,).

        Returns
        -------
        The block, with cells numbered from 0.

        Raises
        ------
        DataError
            If the matrix is inconsistent, or the length of `totals` differs from the number of cells.
        """
        matrix = sound_csr(matrix, "matrix")
        if not matrix.has_canonical_format or (matrix.data == 0).any():
            matrix = canonical(matrix)
        sums = row_sums(matrix)
        if totals is not None and np.shape(totals) != sums.shape:
            raise DataError(
                f"has shape {np.shape(totals)}, but there are {len(sums)} cells; pass one per cell.", argument="totals"
            )
        return cls(
            indptr=matrix.indptr.astype(np.int64),
            genes=matrix.indices.astype(np.int32, copy=False),
            counts=matrix.data.astype(np.float32, copy=False),
            totals=sums if totals is None else np.asarray(totals, dtype=np.float64),
            rows=np.arange(matrix.shape[0], dtype=np.int64),
            measured=measured,
        )


class Cells(Protocol):
    """Interface for cells to sample batches from: in memory, in a store, or in a remote collection.

    Attributes
    ----------
    vocab
        The vocabulary of the counts; None if the cells were created from counts without gene names.
    overlap
        Fraction of the vocabulary genes that are in the data.
    counts_kept
        Fraction of all counts that are in vocabulary genes.
    measured
        True for the vocabulary genes that are in the data, bool, shape (G,); None if unknown.
    chunk_size
        Number of consecutive cells that should be read together; 1 in memory.

    Examples
    --------
    >>> import numpy as np, scforge
    >>> vocab = scforge.data.GeneVocab.from_genes(["B2M", "MALAT1", "TMSB4X"])
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k(), vocab)
    >>> len(cells), cells.measured.tolist(), cells.chunk_size
    (2700, [True, True, True], 1)
    >>> cells.column("cell_type").iloc[:2].tolist(), cells.block(np.array([0, 1])).counts.tolist()
    (['Memory CD4 T', 'B'], [76.0, 49.0, 47.0, 75.0, 142.0, 62.0])
    """

    @property
    def vocab(self) -> GeneVocab | None: ...  # noqa: D102 -- see the attributes above

    @property
    def overlap(self) -> float: ...  # noqa: D102

    @property
    def counts_kept(self) -> float: ...  # noqa: D102

    @property
    def measured(self) -> np.ndarray | None: ...  # noqa: D102

    @property
    def chunk_size(self) -> int: ...  # noqa: D102

    def __len__(self) -> int:
        """Return the number of cells."""
        ...

    @property
    def n_expressed(self) -> np.ndarray:
        """Number of expressed vocabulary genes of each cell, or slightly more, integer, shape (N,)."""
        ...

    def column(self, key: str) -> pd.Series:
        """Return a column of obs, length N.

        Parameters
        ----------
        key
            Name of the column.
        """
        ...

    def block(self, rows: np.ndarray, *, draw: int = 0) -> CellBlock:
        """Return the cells at `rows`, in that order; a row may occur several times.

        Parameters
        ----------
        rows
            Positions of the cells, integers, shape (B,).
        draw
            Number of the draw, e.g. the epoch, which is part of the key for random numbers.
        """
        ...

    def stream(self, windows: Iterable[Window]) -> Iterator[CellBlock]:
        """Yield the cells of each batch of each window, in order.

        Parameters
        ----------
        windows
            Windows to read, e.g. from :meth:`scforge.data.CellOrder.windows`.
        """
        ...

    def sample(self, n: int, *, rows: np.ndarray | None = None, seed: int = 0) -> CellSource:
        """Load at most `n` random cells (from those at `rows`) into memory, in the order of the source.

        Parameters
        ----------
        n
            Maximum number of cells.
        rows
            Positions of the cells to sample from. If None, samples from all cells.
        seed
            Random seed.
        """
        ...

    def with_vocab(self, vocab: GeneVocab) -> Cells:
        """Return the same cells over the genes of another vocabulary, mapped by name.

        Parameters
        ----------
        vocab
            The other vocabulary.
        """
        ...


@dataclass(frozen=True)
class CellSource:
    """Cells in memory.

    Attributes
    ----------
    counts
        Counts over vocabulary genes, canonical CSR matrix of any numeric type, shape (N, G).
    totals
        Total counts of each cell over all genes of the data, float64, shape (N,).
    overlap
        Fraction of the vocabulary genes that are in the data.
    counts_kept
        Fraction of all counts that are in vocabulary genes.
    measured
        True for the vocabulary genes that are in the data, bool, shape (G,); None if unknown.
    vocab
        The vocabulary; None if the cells were created from counts without gene names.
    obs
        Metadata of each cell, N rows; None if there is no metadata.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> from scipy.sparse import csr_matrix
    >>> obs = pd.DataFrame({"cell_type": ["T", "B"]})
    >>> cells = CellSource(csr_matrix([[1, 0, 3], [0, 2, 0]]), totals=np.array([4.0, 2.0]), obs=obs)
    >>> len(cells), cells.n_expressed.tolist(), cells.column("cell_type").tolist()
    (2, [2, 1], ['T', 'B'])
    >>> cells.take(np.array([1])).block(np.array([0])).genes.tolist()
    [1]
    """

    counts: sparse.csr_matrix
    totals: np.ndarray
    overlap: float = 1.0
    counts_kept: float = 1.0
    measured: np.ndarray | None = None
    vocab: GeneVocab | None = None
    obs: pd.DataFrame | None = None
    chunk_size: ClassVar[int] = 1

    def __len__(self) -> int:
        return self.counts.shape[0]

    @property
    def n_expressed(self) -> np.ndarray:
        """Number of expressed vocabulary genes of each cell, int64, shape (N,)."""
        return np.diff(self.counts.indptr).astype(np.int64)

    def counts_digest(self) -> str:
        """Return a hash of the counts and totals of all cells, in their order."""
        counts = self.counts
        sums = row_checksums(counts.indptr, counts.indices, counts.data, self.totals)
        return hashlib.blake2b(sums.data, digest_size=16).hexdigest()

    def content_order(self) -> np.ndarray:
        """Return the positions of the cells in an order that depends on their counts, not on their order here."""
        counts = self.counts
        # Of one type, because the checksum of a number depends on its type.
        data = counts.data.astype(np.float32).view(np.uint32)
        return np.argsort(row_checksums(counts.indptr, counts.indices, data, self.totals), kind="stable")

    def take(self, rows: np.ndarray) -> CellSource:
        """Return the cells at `rows` as a separate source."""
        obs = None if self.obs is None else self.obs.iloc[rows]
        return replace(self, counts=self.counts[rows], totals=self.totals[rows], obs=obs)

    def sample(self, n: int, *, rows: np.ndarray | None = None, seed: int = 0) -> CellSource:
        """Return at most `n` random cells (from those at `rows`), in the order of the source."""
        return self.take(choose_rows(len(self), n, rows=rows, seed=seed))

    def with_vocab(self, vocab: GeneVocab, *, min_overlap: float = MIN_OVERLAP) -> CellSource:
        """Return the same cells over the genes of another vocabulary, mapped by name.

        Raises
        ------
        OptionError
            If the cells have no vocabulary.
        GeneMismatchError
            If the fraction of `vocab` genes in the data is below `min_overlap`.
        """
        if self.vocab is None:
            raise OptionError("the cells have no vocabulary; open them with scforge.data.open_cells(source, vocab).")
        if self.vocab.genes == vocab.genes:
            return replace(self, vocab=vocab)
        names = np.array(self.vocab.genes, dtype=object).astype(str)
        gene_map = map_names(names, vocab, min_overlap=min_overlap)
        counts = gene_map.apply(self.counts)
        columns = gene_map.columns if self.measured is None else gene_map.columns[self.measured]
        measured = np.isin(np.arange(vocab.n_genes), columns)
        return replace(
            self,
            counts=counts,
            overlap=float(measured.mean()),
            counts_kept=float(counts.sum(dtype=np.float64) / max(self.totals.sum(), 1.0)),
            measured=measured,
            vocab=vocab,
        )

    def over_vocabulary(self) -> CellSource:
        """Return the same cells, whose library sizes are the counts in vocabulary genes."""
        return replace(self, totals=row_sums(self.counts))

    def column(self, key: str) -> pd.Series:
        """Return the column `key` of obs.

        Raises
        ------
        DataError
            If there is no such column.
        """
        return column_of(self.obs, key)

    def stream(self, windows: Iterable[Window]) -> Iterator[CellBlock]:
        """Yield the cells of each batch in each of `windows`, in order."""
        for window in windows:
            for rows in window.batches():
                yield self.block(rows, draw=window.draw)

    def block(self, rows: np.ndarray, *, draw: int = 0) -> CellBlock:
        """Return the cells at `rows`, in that order; `draw` is part of the key for random numbers."""
        rows = np.asarray(rows, dtype=np.int64)
        starts = self.counts.indptr[rows].astype(np.int64)
        lengths = self.counts.indptr[rows + 1] - starts
        indptr = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        # One gather for all rows: position within the block, shifted to where its row starts in the source.
        take = np.arange(indptr[-1]) + np.repeat(starts - indptr[:-1], lengths)
        return CellBlock(
            indptr=indptr,
            genes=self.counts.indices[take].astype(np.int32, copy=False),
            counts=self.counts.data[take].astype(np.float32, copy=False),
            totals=self.totals[rows],
            rows=rows,
            draw=draw,
            measured=self.measured,
        )


def choose_rows(n_cells: int, n: int, *, rows: np.ndarray | None = None, seed: int = 0) -> np.ndarray:
    """Sample at most `n` of `rows` (of all cells if None), ascending, int64."""
    rows = np.arange(n_cells, dtype=np.int64) if rows is None else np.asarray(rows, dtype=np.int64)
    if len(rows) <= n:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, n, replace=False, shuffle=False))


def choose_chunks(
    n_cells: int,
    n: int,
    chunk_size: int,
    *,
    rows: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Sample at most `n` of `rows` (of all cells if None) from random chunks, ascending, int64.

    `groups` contains the group of each of `rows`. If given, chunks are taken from each group in turn, so that small
    groups are not left out. A chunk belongs to the group of its first row.
    """
    rows = np.arange(n_cells, dtype=np.int64) if rows is None else np.asarray(rows, dtype=np.int64)
    if len(rows) <= n:
        return rows
    chunks, first = np.unique(rows // chunk_size, return_index=True)
    parts = np.split(rows, first[1:])
    order = np.random.default_rng(seed).permutation(len(chunks))
    if groups is not None:
        turn = pd.Series(groups[first][order]).groupby(groups[first][order]).cumcount()
        order = order[np.argsort(turn.to_numpy(), kind="stable")]
    sizes = np.array([len(part) for part in parts])[order]
    enough = np.sort(order[: int(np.searchsorted(np.cumsum(sizes), n)) + 1])
    return choose_rows(n_cells, n, rows=np.concatenate([parts[chunk] for chunk in enough]), seed=seed)


def column_of(obs: pd.DataFrame | None, key: str) -> pd.Series:
    """Return a column of a cell table. Raises a :class:`~scforge.errors.DataError` if it is missing."""
    columns = [] if obs is None else [str(column) for column in obs.columns if not str(column).startswith("_scvi_")]
    if obs is None or key not in obs:
        raise DataError(f"is not a column of obs{suggest(key, columns, 'available')}", value=key)
    values = obs[key]
    if isinstance(values.dtype, np.dtype) and not values.dtype.isnative:  # pandas selects no rows of it
        return values.astype(values.dtype.newbyteorder("="))
    return values


def cell_names(cells: Cells) -> pd.Index:
    """Return the name of each cell; cells that were created without obs are numbered."""
    if hasattr(cells, "names"):  # a store, which reads them on demand
        return pd.Index(cells.names())
    obs = getattr(cells, "obs", None)
    return pd.RangeIndex(len(cells)) if obs is None else obs.index


def named_column(cells: Cells, key: str, *, argument: str | None) -> pd.Series:
    """Return an obs column of cells; if it is missing, the error message names `argument`."""
    try:
        return cells.column(key)
    except DataError as error:
        if argument is None or error.value != key:
            raise
        raise DataError(error.problem, argument=argument, value=key) from error
