"""Windows: cells that are read together, and how they are cut into batches.

Shapes: W cells of a window, b batches of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

__all__ = ["Window", "by_length", "cut_by_tokens", "part_ends", "ranges", "reorder_batches", "split_largest"]


@dataclass(frozen=True)
class Window:
    """Some batches whose cells are read together.

    Attributes
    ----------
    rows
        Positions of the cells in their source, batch after batch, int64, shape (W,).
    ends
        Where each batch ends in `rows`, ascending, the last is W, int64, shape (b,).
    draw
        Number of the draw, i.e. the epoch. Randomness of cells is keyed by it.

    Examples
    --------
    >>> import numpy as np
    >>> window = Window(rows=np.array([7, 2, 5]), ends=np.array([2, 3]), draw=0)
    >>> [batch.tolist() for batch in window.batches()], window.after(1).rows.tolist()
    ([[7, 2], [5]], [5])
    """

    rows: np.ndarray
    ends: np.ndarray
    draw: int

    def batches(self) -> Iterator[np.ndarray]:
        """Yield the rows of one batch after the other."""
        start = 0
        for end in self.ends.tolist():
            yield self.rows[start:end]
            start = end

    def after(self, n_batches: int) -> Window:
        """Return this window without its first `n_batches` batches.

        Parameters
        ----------
        n_batches
            Number of batches to leave out, fewer than there are.

        Returns
        -------
        The rest.
        """
        if n_batches == 0:
            return self
        start = int(self.ends[n_batches - 1])
        return Window(self.rows[start:], self.ends[n_batches:] - start, self.draw)


def part_ends(parts: np.ndarray, size: int, n_cells: int, n_parts: int) -> np.ndarray:
    """Return where the first `parts` parts end if `n_cells` cells are cut into `n_parts` parts of `size` cells.

    Where there are too few cells, the last parts are smaller, but none is empty.

    Examples
    --------
    >>> part_ends(np.arange(4), 4, 8, 3).tolist()
    [0, 4, 7, 8]
    """
    return np.minimum(parts * size, n_cells - (n_parts - parts))


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the whole numbers of the ranges from `starts` on, of `sizes` numbers each, one range after the other.

    Examples
    --------
    >>> ranges(np.array([10, 3]), np.array([3, 2])).tolist()
    [10, 11, 12, 3, 4]
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)


def by_length(lengths: np.ndarray) -> np.ndarray:
    """Return the stable order that sorts `lengths`, the same on every machine."""
    # NumPy sorts 16-bit numbers by radix, ten times faster than others; its unstable sorts depend on the processor.
    if lengths.dtype.itemsize > 2 and len(lengths) and lengths.max() < 2**16:
        lengths = lengths.astype(np.uint16)
    return np.argsort(lengths, kind="stable")


def cut_by_tokens(lengths: np.ndarray, max_tokens: int, max_cells: int | None = None) -> np.ndarray:
    """Cut sorted cells into as few batches as possible of at most `max_tokens` tokens with padding.

    Parameters
    ----------
    lengths
        Tokens of each cell, ascending, none above `max_tokens`, shape (W,).
    max_tokens
        Most tokens a batch, i.e. cells times the length of its longest cell.
    max_cells
        Most cells a batch.

    Returns
    -------
    Where each batch ends, int64, shape (b,).

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
    """Split the batches that have most cells until there are `n_batches`; there must be as many cells.

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


def reorder_batches(ends: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of cells, shape (W,), and the ends that put whole batches into another order, shape (b,)."""
    sizes = np.diff(ends, prepend=0)
    starts = ends - sizes
    return ranges(starts[order], sizes[order]), np.cumsum(sizes[order])
