"""The order of one epoch: the sequence of all cells, the parts of it that ranks take, and their windows.

Shapes: n cells of an order, m chunks that they stand in, W cells of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scforge.data.windows import Window, by_length, cut_by_tokens, part_ends, ranges, reorder_batches, split_largest
from scforge.errors import OptionError

if TYPE_CHECKING:
    from scforge.data.order import CellOrder

__all__ = ["EpochPlan", "Layout", "chunk_bounds", "sorted_parts"]

_SEQUENCE, _WINDOW = 1, 2
"""Keep the random order of chunks apart from that of the cells of a window."""

_Sequence = Callable[[int, int], np.ndarray]
"""From a range of the epoch's sequence to the cells there, as numbers from 0 to n, int64."""


class Layout(NamedTuple):
    """How the parts that ranks take are cut, the same in every epoch.

    A piece is a batch, or, where batches are packed by tokens, a window.
    """

    piece_cells: int
    n_pieces: int
    pieces_per_window: int

    @property
    def n_windows(self) -> int:
        """Number of windows of each rank."""
        return -(-self.n_pieces // self.pieces_per_window)


class EpochPlan:
    """The windows of one epoch."""

    def __init__(self, order: CellOrder, epoch: int) -> None:
        self._order = order
        self._layout = order.layout
        self._cells_at = _sequence(order, epoch)
        self._packed: dict[int, int] = {}
        self.epoch = epoch

    def n_batches(self) -> int:
        """Return the number of batches of each rank."""
        if self._order.max_tokens_per_batch is None:
            return self._layout.n_pieces
        return sum(map(self._n_batches_of, range(self._layout.n_windows)))

    def windows(self, start: int) -> Iterator[Window]:
        """Yield this rank's windows from batch `start` on."""
        first = 0
        for number in range(self._layout.n_windows):
            n_batches = self._n_batches_of(number)
            if first + n_batches > start:
                yield self._window(number).after(max(0, start - first))
            first += n_batches

    def _ends(self, number: int, rank: int) -> np.ndarray:
        """Return where the pieces of a rank's window end in the sequence, after where the first one starts."""
        order, layout = self._order, self._layout
        least, extra = divmod(len(order.rows), order.world_size)
        start = rank * least + min(rank, extra)
        n_cells = layout.n_pieces * layout.piece_cells if order.drop_last else least + (rank < extra)
        first = number * layout.pieces_per_window
        last = min(first + layout.pieces_per_window, layout.n_pieces)
        return start + part_ends(np.arange(first, last + 1), layout.piece_cells, n_cells, layout.n_pieces)

    def _n_batches_of(self, number: int) -> int:
        """Return the batches of a window: where they are packed by tokens, those of the rank that needs most."""
        order = self._order
        if order.max_tokens_per_batch is None:
            layout = self._layout
            return min(layout.pieces_per_window, layout.n_pieces - number * layout.pieces_per_window)
        assert order.lengths is not None
        if number not in self._packed:
            spans = [self._ends(number, rank).tolist() for rank in range(order.world_size)]
            lengths = (np.sort(order.lengths[self._cells_at(*span)]) for span in spans)
            most = max(len(cut_by_tokens(part, order.max_tokens_per_batch, order.batch_size)) for part in lengths)
            if most > (least := min(stop - start for start, stop in spans)):
                raise OptionError(
                    f"max_tokens_per_batch={order.max_tokens_per_batch} leaves a batch to each of the {most} cells of "
                    f"one rank, while another rank has {least} cells and cannot have as many batches; raise it."
                )
            # Passes in other threads may find it out, too: they write the same.
            self._packed[number] = most
        return self._packed[number]

    def _window(self, number: int) -> Window:
        order = self._order
        pieces = self._ends(number, order.rank)
        start, stop = int(pieces[0]), int(pieces[-1])
        cells = self._cells_at(start, stop)
        generator = np.random.default_rng([order.seed, self.epoch, _WINDOW, start])
        if order.shuffle:
            cells = cells[generator.permutation(len(cells))]
        ends = pieces[1:] - start
        if order.lengths is not None:
            lengths = order.lengths[cells]
            by = by_length(lengths)
            cells = cells[by]
            if order.max_tokens_per_batch is not None:
                packed = cut_by_tokens(lengths[by], order.max_tokens_per_batch, order.batch_size)
                ends = split_largest(packed, self._n_batches_of(number))
            if order.shuffle:
                taken, ends = reorder_batches(ends, generator.permutation(len(ends)))
                cells = cells[taken]
        return Window(order.rows[cells], ends, self.epoch)


def chunk_bounds(rows: np.ndarray, chunk_size: int) -> np.ndarray:
    """Return where the chunks that hold any of the ascending `rows` start in them, and n, int64, shape (m + 1,).

    Examples
    --------
    >>> chunk_bounds(np.array([1, 2, 3, 9]), chunk_size=3).tolist()
    [0, 2, 3, 4]
    """
    # Looking up where chunks start needs no array of n chunk numbers.
    starts = np.arange(rows[0] // chunk_size, rows[-1] // chunk_size + 1) * chunk_size
    found = np.searchsorted(rows, starts)
    return np.append(found[np.diff(found, append=len(rows)) > 0], len(rows))


def sorted_parts(lengths: np.ndarray, world_size: int) -> np.ndarray:
    """Return the order that sorts each rank's part by length, shape (n,)."""
    order = np.empty(len(lengths), dtype=_index_type(len(lengths)))
    least, extra = divmod(len(lengths), world_size)
    for rank in range(world_size):
        start = rank * least + min(rank, extra)
        part = slice(start, start + least + (rank < extra))
        order[part] = by_length(lengths[part]) + start
    return order


def _index_type(n: int) -> type[np.unsignedinteger]:
    return np.uint32 if n < 2**32 else np.uint64


def _sequence(order: CellOrder, epoch: int) -> _Sequence:
    """Return the epoch's sequence of cells."""
    n = len(order.rows)
    if not order.shuffle:
        fixed = order.fixed_order
        if fixed is None:
            return lambda start, stop: np.arange(start, stop)
        return lambda start, stop: fixed[start:stop].astype(np.int64)
    generator = np.random.default_rng([order.seed, epoch, _SEQUENCE])
    if order.bounds is not None:
        return _ChunkSequence(order, generator, epoch)
    if order.balance is not None:
        from scforge.data.balance import CellDraws

        return CellDraws(order.balance, seed=order.seed, epoch=epoch).cells
    permutation = np.arange(n, dtype=_index_type(n))
    generator.shuffle(permutation)
    return lambda start, stop: permutation[start:stop].astype(np.int64)


class _ChunkSequence:
    """The cells, or the draws, of chunks in random order."""

    def __init__(self, order: CellOrder, generator: np.random.Generator, epoch: int) -> None:
        assert order.bounds is not None
        self._bounds = order.bounds
        self._chunks = generator.permutation(len(self._bounds) - 1)
        self._draws = None
        sizes = np.diff(self._bounds)
        if order.balance is not None:
            from scforge.data.balance import ChunkDraws

            self._draws = ChunkDraws(order.balance, self._bounds, seed=order.seed, epoch=epoch)
            sizes = self._draws.sizes
            self._chunks = self._chunks[sizes[self._chunks] > 0]
        self._ends = np.cumsum(sizes[self._chunks])
        self._sizes = sizes

    def __call__(self, start: int, stop: int) -> np.ndarray:
        first = np.searchsorted(self._ends, start, side="right")
        last = np.searchsorted(self._ends, stop, side="left") + 1
        chunks, ends = self._chunks[first:last], self._ends[first:last]
        starts = ends - self._sizes[chunks]
        skipped = np.maximum(start - starts, 0)
        sizes = np.minimum(ends, stop) - starts - skipped
        if self._draws is not None:
            return self._draws.cells(chunks, skipped, sizes)
        return ranges(self._bounds[chunks] + skipped, sizes)
