"""The order in which cells are visited: shuffled, cut into batches of cells of like length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

__all__ = ["BatchRows", "CellSampler"]

_MOST_BUCKETS = 32
"""Most batches that are drawn together before they are sorted by length: enough to fill batches of one length."""

_FEWEST_GROUPS = 4
"""Groups that an epoch has at least, so that which cells share a batch changes from epoch to epoch."""


class BatchRows(NamedTuple):
    """Which cells make up a batch, and in which epoch."""

    epoch: int
    rows: np.ndarray


class CellSampler:
    """Yields each cell once an epoch, in batches.

    Parameters
    ----------
    rows
        Positions of the cells in the source, shape (n,).
    batch_size
        Cells a batch; the last batch may be smaller.
    lengths
        Number of tokens of each of `rows`. If given, cells of like length share a batch, so that little is padded; a
        batch then is no random draw of cells.
    shuffle
        Draw a new order each epoch, determined by `seed` and the epoch alone.
    seed
        Seed of the order.
    first_epoch
        Number that the first epoch has, e.g. the epochs of earlier trainings. None: every epoch is epoch 0, so that
        validation always sees the same masks.
    """

    def __init__(
        self,
        rows: np.ndarray,
        batch_size: int,
        *,
        lengths: np.ndarray | None = None,
        shuffle: bool = True,
        seed: int = 0,
        first_epoch: int | None = 0,
    ) -> None:
        self.rows = np.asarray(rows, dtype=np.int64)
        self.batch_size = int(batch_size)
        self.lengths = None if lengths is None else np.asarray(lengths)
        self.shuffle = shuffle
        self.seed = seed
        self.first_epoch = first_epoch
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is yielded next. Lightning calls it before each epoch."""
        self.epoch = 0 if self.first_epoch is None else self.first_epoch + epoch

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __iter__(self) -> Iterator[BatchRows]:
        generator = np.random.default_rng([self.seed, self.epoch])
        order = generator.permutation(len(self.rows)) if self.shuffle else np.arange(len(self.rows))
        if self.lengths is not None:
            order = self._bucketed(order)
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        if self.shuffle:
            generator.shuffle(batches)
        for batch in batches:
            yield BatchRows(self.epoch, self.rows[batch])

    def _bucketed(self, order: np.ndarray) -> np.ndarray:
        """Sort by length within groups of batches, or as a whole where the order is free."""
        assert self.lengths is not None
        buckets = max(1, min(_MOST_BUCKETS, len(self) // _FEWEST_GROUPS))
        size = self.batch_size * buckets if self.shuffle else len(order)
        groups = [order[start : start + size] for start in range(0, len(order), size)]
        return np.concatenate([group[np.argsort(self.lengths[group], kind="stable")] for group in groups])
