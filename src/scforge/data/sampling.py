"""Split cells for validation, and plan the batches of an epoch: shuffled chunks, balanced sampling, length buckets."""

from __future__ import annotations

import hashlib
import heapq
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from scforge._checks import check_count, check_seed, check_share
from scforge.errors import DataError, OptionError

if TYPE_CHECKING:
    import pandas as pd

_N_ORDERS = 1_000
"""Number of random group orders to try for a split by groups."""

_STREAM = 0x5CA1AB1E
"""Stream that separates the random numbers for draws from those for masks and views."""

_PIECE = 1 << 20
"""Number of cells that are weighted, compared or hashed at once, to limit memory."""

_SEQUENCE, _WINDOW = 1, 2
"""Seeds that separate the random order of chunks from the random order of cells within a window."""

_WINDOW_CELLS = 4096
"""Number of cells per window on disk: 16 chunks of 256 cells. Larger windows do not fit into the processor caches, and
the cells of a store are in random order anyway."""

_MAX_BUCKETS = 32
"""Maximum number of batches sorted together by length in memory; enough to fill batches with one length."""

_MIN_WINDOWS = 4
"""Minimum number of length-sorted windows per epoch, so that batches differ between epochs."""


@numba.njit(cache=True)
def _hash(state):
    """Scramble 64 bits with the splitmix64 finalizer (Steele, Lea and Flood 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@numba.njit(cache=True)
def _mix_keys(rows, seed, epoch, stream):
    golden = np.uint64(0x9E3779B97F4A7C15)
    keys = np.empty(len(rows), dtype=np.uint64)
    base = _hash(_hash(_hash(seed + golden) + epoch + golden) + stream + golden)
    for i in range(len(rows)):
        keys[i] = _hash(base + np.uint64(rows[i]) * golden)
    return keys


@numba.njit(cache=True)
def word(key, position):
    """Return the 64 random bits at `position` in the random sequence of `key`."""
    return _hash(key + (position + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


@numba.njit(cache=True)
def uniform(key, position):
    """Return the number in [0, 1) at `position` in the random sequence of `key`."""
    return np.float64(word(key, position) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


def cell_keys(rows: np.ndarray, *, seed: int, epoch: int, stream: int = 0) -> np.ndarray:
    """Return one random 64-bit key per cell, from which its random numbers are derived, uint64, shape (B,)."""
    return _mix_keys(np.asarray(rows, dtype=np.int64), np.uint64(seed), np.uint64(epoch), np.uint64(stream))


@dataclass(frozen=True)
class Window:
    """A group of batches whose cells are read together.

    Attributes
    ----------
    rows
        Positions of the cells in their source, batch after batch, int64, shape (W,).
    ends
        End of each batch in `rows`, ascending up to W, int64, shape (b,).
    draw
        Number of the draw, i.e. the epoch. It is part of the key for the random numbers of cells.
    """

    rows: np.ndarray
    ends: np.ndarray
    draw: int

    def batches(self) -> Iterator[np.ndarray]:
        """Yield the rows of each batch in turn."""
        start = 0
        for end in self.ends.tolist():
            yield self.rows[start:end]
            start = end


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenate ranges of integers that begin at `starts` and contain `sizes` integers each.

    Examples
    --------
    >>> ranges(np.array([10, 3]), np.array([3, 2])).tolist()
    [10, 11, 12, 3, 4]
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)


def _by_length(lengths: np.ndarray) -> np.ndarray:
    """Return a stable sort order of `lengths`, which is the same on every machine."""
    # NumPy sorts 16-bit numbers by radix, ten times faster than others; its unstable sorts depend on the processor.
    if lengths.dtype.itemsize > 2 and len(lengths) and lengths.max() < 2**16:
        lengths = lengths.astype(np.uint16)
    return np.argsort(lengths, kind="stable")


def cut_by_tokens(lengths: np.ndarray, max_tokens: int, max_cells: int | None = None) -> np.ndarray:
    """Cut sorted cells into as few batches as possible, each with at most `max_tokens` tokens including padding.

    Parameters
    ----------
    lengths
        Number of tokens of each cell, ascending, at most `max_tokens`, shape (W,).
    max_tokens
        Maximum number of tokens per batch, i.e. the number of cells times the length of the longest cell.
    max_cells
        Maximum number of cells per batch.

    Returns
    -------
    End of each batch, int64, shape (b,).

    Examples
    --------
    >>> cut_by_tokens(np.array([1, 1, 2, 2, 3, 5]), max_tokens=6).tolist()
    [3, 5, 6]
    """
    ends = []
    end = len(lengths)
    # From the longest cell down, every shorter one fits where the longest does: no search for the end of a batch.
    while end > 0:
        ends.append(end)
        fit = max_tokens // max(1, lengths.item(end - 1))
        end -= fit if max_cells is None else min(fit, max_cells)
    return np.array(ends[::-1], dtype=np.int64)


def split_largest(ends: np.ndarray, n_batches: int) -> np.ndarray:
    """Split the batches with the most cells until there are `n_batches`; there must be at least as many cells.

    Examples
    --------
    >>> split_largest(np.array([6, 8, 9]), 5).tolist()
    [2, 4, 6, 8, 9]
    """
    if len(ends) == n_batches:
        return ends
    sizes = np.diff(ends, prepend=0).tolist()
    parts = [1] * len(sizes)
    largest = [(-size, batch) for batch, size in enumerate(sizes)]
    heapq.heapify(largest)
    for _ in range(n_batches - len(sizes)):
        _, batch = largest[0]
        parts[batch] += 1
        heapq.heapreplace(largest, (-sizes[batch] // parts[batch], batch))
    starts = (ends - sizes).tolist()
    cut = [
        start + size * part // n
        for start, size, n in zip(starts, sizes, parts, strict=True)
        for part in range(1, n + 1)
    ]
    return np.array(cut, dtype=np.int64)


class CellWeights:
    """Sample cells in proportion to nonnegative weights, shape (n,)."""

    def __init__(self, weights: np.ndarray) -> None:
        self._weights = np.asarray(weights)
        if not (np.isfinite(self._weights) & (self._weights >= 0)).all() or not self._weights.any():
            raise OptionError(
                "cell weights must be finite and not negative, and at least one must be positive; correct the weights."
            )

    def __len__(self) -> int:
        return len(self._weights)

    def weights(self, cells: np.ndarray | slice, *, epoch: int) -> np.ndarray:
        """Return the weight of each of `cells`, float64, which is the same in every epoch."""
        return self._weights[cells].astype(np.float64)

    def fingerprint(self) -> str:
        """Return a digest of these weights."""
        return hashlib.blake2b(np.ascontiguousarray(self._weights).data, digest_size=8).hexdigest()


class ClassBalance:
    """Sample cells of rare classes more often: the weight is (1 / class size)^strength.

    With strength 0, classes keep their frequency in the data. With strength 1, all classes are equally frequent. The
    strength may increase over epochs, so that a model sees the natural frequencies first and more rare classes later.

    Parameters
    ----------
    codes
        Class of each cell in the order, i.e. the codes of a categorical, shape (n,). Unlabeled cells (-1) form a
        separate class.
    warmup_epochs
        Number of epochs over which the strength changes linearly from `start` to `end`. If 0, the strength is `end`
        from the first epoch on.
    start, end
        Strength in epoch 0 and from epoch `warmup_epochs` on, from 0 to 1.
    """

    def __init__(self, codes: np.ndarray, *, warmup_epochs: int = 0, start: float = 0.0, end: float = 1.0) -> None:
        check_count("warmup_epochs", warmup_epochs, "epochs", least=0)
        self._codes = np.asarray(codes)
        self.warmup_epochs = int(warmup_epochs)
        self.start = check_share("start", start)
        self.end = check_share("end", end)
        # Cells without label are counted at 0, class k at k + 1. In pieces: bincount makes int64 of what it gets.
        self._sizes = np.zeros(int(self._codes.max()) + 2, dtype=np.int64)
        for piece in range(0, len(self._codes), _PIECE):
            part = self._codes[piece : piece + _PIECE].astype(np.int64) + 1
            self._sizes += np.bincount(part, minlength=len(self._sizes))

    def __len__(self) -> int:
        return len(self._codes)

    def weights(self, cells: np.ndarray | slice, *, epoch: int) -> np.ndarray:
        """Return the weight of each of `cells` in an epoch, float64; only their ratios matter."""
        share = min(1.0, epoch / self.warmup_epochs) if self.warmup_epochs else 1.0
        strength = self.start + (self.end - self.start) * share
        table = np.where(self._sizes > 0, np.maximum(self._sizes, 1.0) ** -strength, 0.0)
        return table[self._codes[cells].astype(np.int64) + 1]

    def fingerprint(self) -> str:
        """Return a digest of the classes and options."""
        digest = hashlib.blake2b(np.ascontiguousarray(self._codes).data, digest_size=8)
        digest.update(repr((self.warmup_epochs, self.start, self.end, "keep")).encode())
        return digest.hexdigest()


Balance = CellWeights | ClassBalance


def _uniform(draws: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return one random number in [0, 1) for each draw number."""
    keys = cell_keys(draws, seed=seed, epoch=epoch, stream=_STREAM)
    return (keys >> np.uint64(11)) * 2.0**-53


def _inverse(
    cumulated: np.ndarray, lows: np.ndarray | float, highs: np.ndarray | float, shares: np.ndarray
) -> np.ndarray:
    """Return where the cumulative weights exceed `lows` + `shares` * (`highs` - `lows`), in any order."""
    # Rounding up to the end would give the cell behind it, or one of weight zero.
    targets = np.minimum(lows + shares * (highs - lows), np.nextafter(highs, 0.0))
    # Nearly sorted places are found four times as fast, and 16 bits are sorted fast; the window is shuffled anyway.
    rough = (targets * ((2**16 - 1) / cumulated[-1])).astype(np.uint16)
    return np.searchsorted(cumulated, targets[np.argsort(rough, kind="stable")], side="right")


class _ChunkSequence:
    """The cells of chunks in random order, or draws from chunks that are distributed like draws from all cells.

    The number of draws from each chunk is sampled first (multinomial), then this number of cells from the chunk.
    Neighboring cells are therefore read together, and memory does not grow with the number of cells.
    """

    def __init__(self, order: CellOrder, generator: np.random.Generator, epoch: int) -> None:
        self._balance, self._seed, self._epoch = order.balance, order.seed, epoch
        # Where the chunks that contain any of the ascending rows start in them, and n: no array of n chunk numbers.
        rows, size = order.rows, order.chunk_size
        starts = np.searchsorted(rows, np.arange(rows[0] // size, rows[-1] // size + 1) * size)
        self._bounds = np.append(starts[np.diff(starts, append=len(rows)) > 0], len(rows))
        self._sizes = np.diff(self._bounds)
        chunks = generator.permutation(len(self._sizes))
        if order.balance is not None:
            sums = np.empty(len(self._sizes))
            step = max(1, _PIECE // max(1, len(order.balance) // len(sums)))
            for first in range(0, len(sums), step):
                bounds = self._bounds[first : first + step + 1]
                weights = order.balance.weights(slice(bounds[0], bounds[-1]), epoch=epoch)
                sums[first : first + step] = np.add.reduceat(weights, bounds[:-1] - bounds[0])
            self._sizes = np.zeros(len(sums), dtype=np.int64)
            # NumPy gives the last one what rounding leaves over: a chunk of weight zero must not be there.
            possible = np.flatnonzero(sums)
            draws = np.random.default_rng([order.seed, epoch, _STREAM])
            self._sizes[possible] = draws.multinomial(len(rows), sums[possible] / sums.sum())
            chunks = chunks[self._sizes[chunks] > 0]
        self._chunks = chunks
        self._ends = np.cumsum(self._sizes[chunks])
        self._first_draw = np.cumsum(self._sizes) - self._sizes

    def __call__(self, start: int, stop: int) -> np.ndarray:
        first = np.searchsorted(self._ends, start, side="right")
        last = np.searchsorted(self._ends, stop, side="left") + 1
        chunks, ends = self._chunks[first:last], self._ends[first:last]
        starts = ends - self._sizes[chunks]
        skipped = np.maximum(start - starts, 0)
        sizes = np.minimum(ends, stop) - starts - skipped
        if self._balance is None:
            return ranges(self._bounds[chunks] + skipped, sizes)
        # `sizes` draws from each chunk, after its first `skipped` draws.
        n_cells = np.diff(self._bounds)[chunks]
        cells = ranges(self._bounds[chunks], n_cells)
        ends = np.cumsum(n_cells)
        weights = self._balance.weights(cells, epoch=self._epoch)
        # Each chunk sums to 1: the cumulated sum of many chunks would lose the digits of light ones.
        weights /= np.repeat(np.add.reduceat(weights, ends - n_cells), n_cells)
        cumulated = np.cumsum(weights)
        highs = cumulated[ends - 1]
        lows = np.concatenate([[0.0], highs[:-1]])
        shares = _uniform(ranges(self._first_draw[chunks] + skipped, sizes), self._seed, self._epoch)
        return cells[_inverse(cumulated, np.repeat(lows, sizes), np.repeat(highs, sizes), shares)]


class EpochPlan:
    """The windows of one epoch, divided into batches, or kept whole if batches are packed by tokens."""

    def __init__(self, order: CellOrder, epoch: int) -> None:
        self._order, self.epoch = order, epoch
        self._packed: dict[int, int] = {}
        # From a range of the epoch's sequence to the cell indices in that range, int64.
        self._cells_at: Callable[[int, int], np.ndarray]
        generator = np.random.default_rng([order.seed, epoch, _SEQUENCE])
        if not order.shuffle:
            self._cells_at = np.arange
            if order.chunk_size == 1 and order.lengths is not None:
                # The cells of each rank, sorted by length.
                by_length = np.empty(len(order.rows), dtype=order.index_type)
                for rank in range(order.world_size):
                    start, stop = _share(len(order.rows), rank, order.world_size)
                    by_length[start:stop] = _by_length(order.lengths[start:stop]) + start
                self._cells_at = lambda start, stop: by_length[start:stop].astype(np.int64)
        elif order.chunk_size > 1:
            self._cells_at = _ChunkSequence(order, generator, epoch)
        elif order.balance is not None:
            cumulated = np.cumsum(order.balance.weights(slice(None), epoch=epoch))
            self._cells_at = lambda start, stop: _inverse(
                cumulated, 0.0, cumulated[-1], _uniform(np.arange(start, stop), order.seed, epoch)
            )
        else:
            permutation = np.arange(len(order.rows), dtype=order.index_type)
            generator.shuffle(permutation)
            self._cells_at = lambda start, stop: permutation[start:stop].astype(np.int64)

    def windows(self, first_batch: int) -> Iterator[Window]:
        """Yield the windows of this rank, without the batches before `first_batch`."""
        order = self._order
        for number in range(order.n_windows):
            n_batches = self.n_batches_of(number)
            n_skipped, first_batch = min(first_batch, n_batches), max(0, first_batch - n_batches)
            if n_skipped == n_batches:
                continue
            pieces = self._ends(number, order.rank)
            start, stop = int(pieces[0]), int(pieces[-1])
            cells = self._cells_at(start, stop)
            generator = np.random.default_rng([order.seed, self.epoch, _WINDOW, start])
            if order.shuffle:
                cells = cells[generator.permutation(len(cells))]
            ends = pieces[1:] - start
            if order.lengths is not None:
                lengths = order.lengths[cells]
                by = _by_length(lengths)
                cells = cells[by]
                if order.max_tokens_per_batch is not None:
                    packed = cut_by_tokens(lengths[by], order.max_tokens_per_batch, order.batch_size)
                    ends = split_largest(packed, n_batches)
                if order.shuffle:
                    # Batches come in random order.
                    batches = generator.permutation(len(ends))
                    sizes = np.diff(ends, prepend=0)
                    cells = cells[ranges((ends - sizes)[batches], sizes[batches])]
                    ends = np.cumsum(sizes[batches])
            skipped = int(ends[n_skipped - 1]) if n_skipped else 0
            yield Window(order.rows[cells[skipped:]], ends[n_skipped:] - skipped, self.epoch)

    def _ends(self, number: int, rank: int) -> np.ndarray:
        """Return where the first piece of a rank's window starts in the sequence, and where each piece ends."""
        order = self._order
        start, stop = _share(len(order.rows), rank, order.world_size)
        first = number * order.pieces_per_window
        pieces = np.arange(first, min(first + order.pieces_per_window, order.n_pieces) + 1)
        # Where there are too few cells, the last pieces are smaller, but none is empty.
        return start + np.minimum(pieces * order.piece_cells, stop - start - (order.n_pieces - pieces))

    def n_batches_of(self, number: int) -> int:
        """Return the number of batches in a window; if packed by tokens, the maximum over all ranks."""
        order = self._order
        if order.max_tokens_per_batch is None:
            return min(order.pieces_per_window, order.n_pieces - number * order.pieces_per_window)
        assert order.lengths is not None
        if number not in self._packed:
            spans = [self._ends(number, rank).tolist() for rank in range(order.world_size)]
            lengths = (np.sort(order.lengths[self._cells_at(*span)]) for span in spans)
            most_tokens = order.max_tokens_per_batch
            most = max(len(cut_by_tokens(part, most_tokens, order.batch_size)) for part in lengths)
            # Another rank must have as many batches.
            if most > min(stop - start for start, stop in spans):
                raise OptionError(
                    f"requires {most} batches, one per cell; increase max_tokens_per_batch.",
                    max_tokens_per_batch=most_tokens,
                )
            # Passes in other threads may find it out, too: they write the same.
            self._packed[number] = most
        return self._packed[number]


def _share(n_cells: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the start and stop of a rank's part of the sequence; part sizes differ by at most one cell."""
    least, extra = divmod(n_cells, world_size)
    start = rank * least + min(rank, extra)
    return start, start + least + (rank < extra)


class CellOrder:
    """The batches of every epoch on one rank.

    In each epoch, the chunks that contain any of the cells are put into random order, and each rank takes a contiguous
    part of this sequence. The parts are disjoint, together contain all cells, and differ in size by at most one cell.
    The part of each rank is cut into windows, and cells are shuffled within each window. All ranks have the same number
    of batches, and no batch is empty.

    Parameters
    ----------
    rows
        Positions of the cells in their source, int64, ascending, shape (n,). Without `shuffle`, rows may be in any
        order, which is kept.
    batch_size
        Number of cells per batch; the last batches may be smaller. With `max_tokens_per_batch`, the maximum number of
        cells per batch, or None for no maximum.
    chunk_size
        Number of consecutive rows of the source that are stored and shuffled together, starting at a multiple of
        `chunk_size`; 1 for cells in memory.
    window_cells
        Number of cells that are read and shuffled together, rounded to whole batches. If None, uses 4,096 cells if
        `chunk_size` is above 1, and 32 batches otherwise; with `lengths`, at most a quarter of an epoch.
    lengths
        Number of tokens of each of `rows`, any integer type, shape (n,). If given, cells of similar length share a
        batch. This reduces padding, but a batch is then not a random sample of cells. Without `shuffle`, cells are
        sorted by length within a window, or, if `chunk_size` is 1, over the whole part of the rank.
    max_tokens_per_batch
        Maximum number of tokens per batch including padding, i.e. the number of cells times the length of the longest
        cell. A batch contains as many cells as fit. Requires `lengths`.
    shuffle
        Whether to use a new random order in each epoch.
    seed
        Random seed for the order. The options, the seed and the epoch determine every batch.
    first_epoch
        Number of the first epoch, e.g. the number of epochs of earlier training runs. If None, every epoch is epoch 0,
        so that validation always sees the same masks.
    rank, world_size
        Index of this process, and the number of processes that share the cells.
    balance
        Weights of the cells. If given, an epoch consists of n draws with replacement, instead of each cell once.

    Raises
    ------
    OptionError
        If an argument is invalid, or there are too few cells for the ranks.

    Examples
    --------
    >>> import numpy as np
    >>> order = CellOrder(np.arange(10), batch_size=4, shuffle=False)
    >>> [batch.tolist() for window in order.windows() for batch in window.batches()]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(
        self,
        rows: np.ndarray,
        batch_size: int | None,
        *,
        chunk_size: int = 1,
        window_cells: int | None = None,
        lengths: np.ndarray | None = None,
        max_tokens_per_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        first_epoch: int | None = 0,
        rank: int = 0,
        world_size: int = 1,
        balance: Balance | None = None,
    ) -> None:
        if not len(rows):
            raise OptionError("is empty; pass at least one position.", argument="rows")
        self.rows = np.ascontiguousarray(rows, dtype=np.int64)
        pieces = (self.rows[start : start + _PIECE + 1] for start in range(0, len(rows) - 1, _PIECE))
        if shuffle and not all((piece[1:] > piece[:-1]).all() for piece in pieces):
            raise OptionError(
                "is not in ascending order or contains duplicates; to shuffle the cells, pass numpy.unique(rows).",
                argument="rows",
            )
        self.index_type = np.uint32 if len(rows) < 2**32 else np.uint64
        self.lengths = None if lengths is None else np.asarray(lengths)
        self.batch_size = batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.chunk_size = int(chunk_size)
        self.shuffle = shuffle
        self.first_epoch = first_epoch
        self.rank = int(rank)
        self.world_size = int(world_size)
        self.balance = balance
        self._cut(window_cells)
        self.seed = check_seed(seed)
        self.epoch = 0
        self.position = 0
        self._loaded: tuple[int, int] | None = None
        self._planned: EpochPlan | None = None
        self.set_epoch(0)

    def _cut(self, window_cells: int | None) -> None:
        """Set how the parts of the ranks are cut into pieces in every epoch, see :class:`EpochPlan`."""
        size, budget = self.batch_size, self.max_tokens_per_batch
        if budget is None or size is not None:
            size = check_count("batch_size", size, "cells")
        if budget is not None:
            if self.lengths is None:
                raise OptionError("requires lengths, the number of tokens of each cell.", max_tokens_per_batch=budget)
            if (longest := int(self.lengths.max())) > budget:
                raise OptionError(
                    f"is too small for a cell with {longest} tokens; pass at least {longest}.",
                    max_tokens_per_batch=budget,
                )
            fit = int(budget // max(1.0, float(self.lengths.mean())))  # an estimate
            size = fit if size is None else min(fit, size)
        assert size is not None
        n, world_size = len(self.rows), self.world_size
        least, most = n // world_size, -(-n // world_size)
        if least == 0:
            raise OptionError(
                f"has {n} cells, which are too few for world_size={world_size}; use more cells or fewer ranks.",
                argument="rows",
            )
        n_batches = -(-most // size)
        if window_cells is not None:
            n_together = max(1, (window_cells + size // 2) // size)
        else:
            n_together = max(1, _WINDOW_CELLS // size) if self.chunk_size > 1 else _MAX_BUCKETS
            if self.chunk_size == 1 or (self.lengths is not None and self.shuffle):
                n_together = min(n_together, max(1, n_batches // _MIN_WINDOWS))
        self.window_cells = n_together * size
        self.piece_cells, self.n_pieces, self.pieces_per_window = size, n_batches, n_together
        if budget is not None:
            # A window of one cell would leave none to a rank that has one cell fewer.
            self.window_cells = max(2, window_cells or self.window_cells)
            self.piece_cells, self.pieces_per_window = self.window_cells, 1
            self.n_pieces = -(-most // self.window_cells)
        elif n_batches > least:
            raise OptionError(f"cannot be divided among world_size={world_size} ranks; raise batch_size.", batch_size=1)
        self.n_windows = -(-self.n_pieces // self.pieces_per_window)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; the position is kept if this epoch was loaded.

        Parameters
        ----------
        epoch
            Number of the epoch, from 0.
        """
        self.epoch = 0 if self.first_epoch is None else self.first_epoch + int(epoch)
        self.position = self._loaded[1] if self._loaded is not None and self._loaded[0] == self.epoch else 0

    def __len__(self) -> int:
        """Return the number of batches of the current epoch, the same on every rank."""
        return sum(map(self._plan().n_batches_of, range(self.n_windows)))

    def windows(self) -> Iterator[Window]:
        """Return the windows of this rank in the current epoch.

        The first pass after :meth:`load_state_dict` begins at the batch of the state, and later passes begin at 0.
        """
        start = self.position if self._loaded is not None and self._loaded[0] == self.epoch else 0
        self._loaded = None
        self.position = start
        return self._plan().windows(start)

    def advance(self, n_batches: int = 1) -> None:
        """Count returned batches; call this method after each batch.

        Parameters
        ----------
        n_batches
            Number of batches.
        """
        self.position += n_batches

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-safe state to resume after the batches returned so far, which is equal on all ranks."""
        return {"epoch": self.epoch, "position": self.position, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of `state`.

        Parameters
        ----------
        state
            Output of :meth:`state_dict`.

        Raises
        ------
        OptionError
            If the state belongs to an order with different cells, seed, batch size or number of ranks.
        """
        for name, value in self._identity.items():
            if (there := state.get(name)) != value:
                raise OptionError(
                    f"is from a different order of cells: its {name} is {there!r}, expected {value!r}; pass the "
                    "state of the same order.",
                    argument="state",
                )
        if missing := {"epoch", "position"} - state.keys():
            raise OptionError(f"has no {missing.pop()}; pass the output of state_dict.", argument="state")
        self.epoch = state["epoch"]
        n_batches = len(self)
        if not 0 <= state["position"] <= n_batches:
            raise OptionError(
                f"has position {state['position']}, but an epoch has {n_batches} batches; pass the state of the "
                "same order.",
                argument="state",
            )
        self.position = state["position"]
        self._loaded = (self.epoch, self.position)

    def _plan(self) -> EpochPlan:
        if self._planned is None or self._planned.epoch != self.epoch:
            self._planned = EpochPlan(self, self.epoch)
        return self._planned

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "n_cells": len(self.rows),
            "rows_hash": _digest(self.rows),
            "lengths_hash": None if self.lengths is None else _digest(self.lengths),
            "batch_size": None if self.batch_size is None else int(self.batch_size),
            "max_tokens_per_batch": None if self.max_tokens_per_batch is None else int(self.max_tokens_per_batch),
            "world_size": self.world_size,
            "chunk_size": self.chunk_size,
            "shuffle": self.shuffle,
            "window_cells": self.window_cells,
            "balance": None if self.balance is None else self.balance.fingerprint(),
        }


def _digest(values: np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(values), _PIECE):
        digest.update(np.ascontiguousarray(values[start : start + _PIECE], dtype=np.int64).data)
    return digest.hexdigest()


def split_cells(
    n_cells: int,
    validation_size: float,
    seed: int,
    *,
    groups: pd.Series | pd.Categorical | np.ndarray | None = None,
    rows: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Split cells at random into disjoint, sorted training and validation rows.

    Parameters
    ----------
    n_cells
        Number of cells.
    validation_size
        Fraction of cells in the validation set, from 0 to below 1.
    seed
        Random seed.
    groups
        Group of each cell, e.g. its donor or data set, as an obs column or as codes, shape (n_cells,). If given, entire
        groups are held out. Among many random choices, the choice whose fraction of cells is closest to
        `validation_size` is used, with at least one group in each part.
    rows
        Rows to split; other rows are in neither part. If None, splits all cells.

    Returns
    -------
    Training rows and validation rows, int64.

    Raises
    ------
    OptionError
        If `validation_size` is not in [0, 1), it leaves no cells for training, or `rows` are not valid cells.
    DataError
        If a cell has no group, or there is only one group.

    Examples
    --------
    >>> train, validation = split_cells(6, 0.3, seed=0, groups=["a", "a", "a", "b", "b", "b"])
    >>> len(train), len(validation)
    (3, 3)
    """
    if not isinstance(validation_size, numbers.Real) or not 0 <= validation_size < 1:
        raise OptionError("must be at least 0 and less than 1.", validation_size=validation_size)
    if rows is not None:
        rows = np.unique(rows)
        if rows.size and (rows.dtype.kind not in "iu" or not 0 <= rows[0] <= rows[-1] < n_cells):
            raise OptionError(f"contains a value that is not a cell position from 0 to {n_cells - 1}.", rows=rows)
        rows = rows.astype(np.int64)
    codes, names = (None, None) if groups is None else _codes(groups, n_cells, rows)
    if codes is None or names is None or validation_size == 0:
        n = n_cells if rows is None else len(rows)
        n_validation = round(n * validation_size)
        if validation_size > 0 and n_validation == 0 and n > 1:
            n_validation = 1
        if n_validation >= n:
            raise OptionError(
                f"leaves none of the {n} cells for training; reduce validation_size.", validation_size=validation_size
            )
        order = np.random.default_rng(seed).permutation(n)
        train, validation = np.sort(order[n_validation:]), np.sort(order[:n_validation])
    else:
        if len(names) < 2:
            raise DataError(
                f"contains only one group, {str(names[0])!r}; use two or more, or split by cell.", argument="groups"
            )
        # The best of many random choices of groups for this fraction of cells; a group is left to train on.
        rng, sizes, best = np.random.default_rng(seed), np.bincount(codes), np.inf
        for _ in range(_N_ORDERS):
            order = rng.permutation(len(sizes))
            off = np.abs(np.cumsum(sizes[order])[:-1] - sizes.sum() * validation_size)
            if off.min() < best:
                best, chosen = off.min(), order[: off.argmin() + 1]
        held_out = np.isin(codes, chosen)
        train, validation = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    return (train, validation) if rows is None else (rows[train], rows[validation])


def _codes(groups: Any, n_cells: int, rows: np.ndarray | None) -> tuple[np.ndarray, Any]:
    """Return the group code of each cell to split, and the group names."""
    import pandas as pd

    if len(groups) != n_cells:
        raise OptionError(f"has {len(groups)} values for {n_cells} cells; pass one value per cell.", argument="groups")
    from scforge._columns import texts_of

    values = pd.Series(groups)
    texts = texts_of(values, key="split_by", argument="groups")
    codes, names = pd.factorize(texts if rows is None else texts[rows])
    without = codes < 0
    if isinstance(groups, np.ndarray) and groups.dtype.kind in "iu":
        # Codes of a categorical: -1 stands for a missing value.
        without |= (groups if rows is None else groups[rows]) < 0
    if without.any():
        first = np.flatnonzero(without)[0] if rows is None else rows[without][0]
        raise DataError(
            f"(split_by) is missing for {without.sum()} of {len(codes)} cells, e.g. cell {first}; fill in the "
            "values or drop these cells.",
            argument="groups",
        )
    return codes, names
