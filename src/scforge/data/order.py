"""Which cells make which batch of which epoch on which rank: computed from seed and epoch, never drawn in passing.

Shape: n cells of an order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge._checks import check_bool, check_count, check_seed
from scforge.data.epoch_plan import EpochPlan, Layout, chunk_bounds, sorted_parts
from scforge.data.windows import Window
from scforge.errors import OptionError

if TYPE_CHECKING:
    from scforge.data.balance import Balance

__all__ = ["CellOrder", "Window"]

_WINDOW_CELLS = 4096
"""Cells of a window on disk: 16 chunks of 256 cells. Those of larger windows leave the caches of the processor, and
those of a store stand in random order anyway."""

_MOST_BUCKETS = 32
"""Most batches that are sorted by length together in memory: enough to fill batches of one length."""

_FEWEST_WINDOWS = 4
"""Windows sorted by length that an epoch has at least, so that which cells share a batch changes between epochs."""

_PIECE = 1 << 20
"""Rows that are compared or hashed at once: bounds the memory."""


class CellOrder:
    """The batches of every epoch on one rank.

    In each epoch the chunks that hold any of the cells are put into a random order, and each rank takes a contiguous
    part of this sequence: parts are disjoint, together complete, and differ by at most one cell. The rank's part is
    cut into windows, and cells are shuffled within a window. Every rank has the same number of batches, none empty.

    Parameters
    ----------
    rows
        Positions of the cells in their source, int64, ascending, shape (n,). Without `shuffle` any order is kept.
    batch_size
        Cells a batch; the last batches may be smaller. With `max_tokens_per_batch` the most cells a batch, or None.
    chunk_size
        Rows ``[k * chunk_size, (k + 1) * chunk_size)`` of the source stand, and are shuffled, together; 1 in memory.
    window_cells
        Cells that are read and shuffled together, rounded to whole batches. None: 4,096 cells if `chunk_size` is
        above 1, else 32 batches; with `lengths` at most a fourth of an epoch.
    lengths
        Number of tokens of each of `rows`, any integers, shape (n,). If given, cells of like length share a batch, so
        that little is padded, and a batch is no random draw of cells. Without `shuffle` cells are sorted by length
        within a window, or, if `chunk_size` is 1, over the rank's whole part.
    max_tokens_per_batch
        A batch holds as many cells as fit into this many tokens with padding, i.e. cells times the length of the
        longest. Needs `lengths`.
    shuffle
        Draw a new order each epoch.
    seed
        Seed of the order. Order, seed and epoch determine every batch.
    first_epoch
        Number that the first epoch has, e.g. the epochs of earlier trainings. None: every epoch is epoch 0, so that
        validation always sees the same masks.
    rank, world_size
        This process, and the number of processes that share the cells out.
    drop_last
        Leave out cells, others in each epoch, so that every batch has `batch_size` cells.
    balance
        Weights of the cells: an epoch then has n draws with replacement instead of each cell once.

    Raises
    ------
    OptionError
        If an argument cannot be used, or there are too few cells for the ranks.

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
        drop_last: bool = False,
        balance: Balance | None = None,
    ) -> None:
        self.rows = _checked_rows(rows, ascending=check_bool("shuffle", shuffle))
        self.lengths = None if lengths is None else _checked_lengths(lengths, len(self.rows))
        check_count("chunk_size", chunk_size, "cells")
        check_count("world_size", world_size, "processes")
        check_count("rank", rank, "processes", least=0)
        if rank >= world_size:
            raise OptionError(f"rank={rank} is not below world_size={world_size}; ranks count from 0.")
        if first_epoch is not None:
            check_count("first_epoch", first_epoch, "epochs", least=0)
        if window_cells is not None:
            check_count("window_cells", window_cells, "cells")
        if balance is not None and not shuffle:
            raise OptionError("balance draws cells at random, but shuffle=False; use one of them.")
        if balance is not None and len(balance) != len(self.rows):
            raise OptionError(f"balance is of {len(balance)} cells, but rows has {len(self.rows)}.")
        self.batch_size = batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.drop_last = check_bool("drop_last", drop_last)
        self._check_batches()
        self.chunk_size = int(chunk_size)
        self.shuffle = shuffle
        self.seed = check_seed(seed)
        self.first_epoch = first_epoch
        self.rank = int(rank)
        self.world_size = int(world_size)
        self.balance = balance
        self.layout = self._cut(window_cells)
        self.bounds = chunk_bounds(self.rows, self.chunk_size) if shuffle and chunk_size > 1 else None
        self.epoch = 0
        self.position = 0
        self._loaded: tuple[int, int] | None = None
        self._planned: EpochPlan | None = None
        self.set_epoch(0)

    def _check_batches(self) -> None:
        budget = self.max_tokens_per_batch
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size, "cells")
        if budget is None:
            if self.batch_size is None:
                raise OptionError("batch_size=None needs max_tokens_per_batch; give one of them.")
            return
        check_count("max_tokens_per_batch", budget, "tokens")
        if self.lengths is None:
            raise OptionError(f"max_tokens_per_batch={budget} needs lengths, the number of tokens of each cell.")
        if self.drop_last:
            raise OptionError("drop_last=True needs batches of batch_size cells, not max_tokens_per_batch.")
        if (longest := int(self.lengths.max())) > budget:
            raise OptionError(
                f"max_tokens_per_batch={budget} does not hold the longest cell, which has {longest} tokens; raise it."
            )

    def _cut(self, window_cells: int | None) -> Layout:
        """Set the cells of a window and return how each rank's part is cut."""
        least, extra = divmod(len(self.rows), self.world_size)
        most = least + (extra > 0)
        if least == 0:
            raise OptionError(f"rows has {len(self.rows)} cells, too few for world_size={self.world_size}.")
        size = self._typical_batch()
        n_batches = least // size if self.drop_last else -(-most // size)
        if n_batches == 0:
            raise OptionError(f"drop_last=True leaves no batch of batch_size={size}: a rank has {least} cells.")
        if window_cells is not None:
            n_together = max(1, (window_cells + size // 2) // size)
        else:
            n_together = max(1, _WINDOW_CELLS // size) if self.chunk_size > 1 else _MOST_BUCKETS
            if self.chunk_size == 1 or (self.lengths is not None and self.shuffle):
                n_together = min(n_together, max(1, n_batches // _FEWEST_WINDOWS))
        self.window_cells = n_together * size
        if self.max_tokens_per_batch is not None:
            # A window of one cell would leave none to a rank that has one cell fewer.
            self.window_cells = max(2, window_cells or self.window_cells)
            return Layout(self.window_cells, -(-most // self.window_cells), 1)
        if n_batches > least:
            raise OptionError(
                f"batch_size=1 cannot give each of world_size={self.world_size} ranks as many batches of "
                f"{len(self.rows)} cells; raise batch_size or use drop_last=True."
            )
        return Layout(size, n_batches, n_together)

    def _typical_batch(self) -> int:
        """Return the cells of a batch, roughly where batches are packed by tokens."""
        if self.max_tokens_per_batch is None:
            assert self.batch_size is not None
            return self.batch_size
        assert self.lengths is not None
        fit = int(self.max_tokens_per_batch // max(1.0, float(self.lengths.mean())))
        return fit if self.batch_size is None else min(fit, self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next; the position is kept if it is the epoch that was loaded.

        Parameters
        ----------
        epoch
            Number of the epoch, from 0.
        """
        check_count("epoch", epoch, "epochs", least=0)
        self.epoch = 0 if self.first_epoch is None else self.first_epoch + int(epoch)
        self.position = self._loaded[1] if self._loaded is not None and self._loaded[0] == self.epoch else 0

    def __len__(self) -> int:
        """Return the number of batches of the epoch that is set, the same on every rank."""
        return self._plan().n_batches()

    def windows(self) -> Iterator[Window]:
        """Return the windows of this rank in the epoch that is set.

        The first pass after :meth:`load_state_dict` begins with the batch that the state names, later ones at 0.
        """
        start = self.position if self._loaded is not None and self._loaded[0] == self.epoch else 0
        self._loaded = None
        self.position = start
        return self._plan().windows(start)

    def advance(self, n_batches: int = 1) -> None:
        """Count batches as handed out: whoever iterates calls this after each batch.

        Parameters
        ----------
        n_batches
            How many.
        """
        self.position += n_batches

    def state_dict(self) -> dict[str, Any]:
        """Return what another process needs to go on after the batches handed out; JSON-safe, the same on each rank."""
        return {"epoch": self.epoch, "position": self.position, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the order that `state` is of was.

        Parameters
        ----------
        state
            Of :meth:`state_dict`.

        Raises
        ------
        OptionError
            If the state is of another order: of other cells, another seed, batch size or number of ranks.
        """
        if missing := sorted({"epoch", "position", *self._identity} - set(state)):
            raise OptionError(f"The state of the order of cells lacks {missing[0]!r}; it is of another version.")
        for name, value in self._identity.items():
            if state[name] != value:
                raise OptionError(
                    f"The state is of another order of cells: {name} is {state[name]!r} there, but {value!r} here."
                )
        check_count("epoch", state["epoch"], "epochs", least=0)
        check_count("position", state["position"], "batches", least=0)
        self.epoch = int(state["epoch"])
        n_batches = len(self)
        if state["position"] > n_batches:
            raise OptionError(f"position={state['position']} is behind the {n_batches} batches of an epoch.")
        self.position = int(state["position"])
        self._loaded = (self.epoch, self.position)

    def _plan(self) -> EpochPlan:
        if self._planned is None or self._planned.epoch != self.epoch:
            self._planned = EpochPlan(self, self.epoch)
        return self._planned

    @cached_property
    def fixed_order(self) -> np.ndarray | None:
        """The order of the cells without `shuffle`, or None if it is that of `rows`."""
        sorts = self.chunk_size == 1 and self.lengths is not None
        return sorted_parts(self.lengths, self.world_size) if sorts and self.lengths is not None else None

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
            "drop_last": self.drop_last,
            "window_cells": self.window_cells,
            "balance": None if self.balance is None else self.balance.fingerprint(),
        }


def _checked_rows(rows: np.ndarray, *, ascending: bool) -> np.ndarray:
    rows = np.asarray(rows)
    if rows.size == 0:
        raise OptionError("rows has no cell; give at least one position.")
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise OptionError(f"rows must be a list of positions of cells, not {rows.dtype} of shape {rows.shape}.")
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    if (least := rows.min()) < 0:
        raise OptionError(f"rows has the position {least}; positions count from 0.")
    if ascending:
        for start in range(0, len(rows) - 1, _PIECE):
            piece = rows[start : start + _PIECE + 1]
            if not (piece[1:] > piece[:-1]).all():
                raise OptionError("rows is not ascending, or names a cell twice; use numpy.unique(rows) to shuffle it.")
    return rows


def _checked_lengths(lengths: np.ndarray, n_cells: int) -> np.ndarray:
    lengths = np.asarray(lengths)
    if lengths.dtype.kind not in "iu" or lengths.shape != (n_cells,):
        raise OptionError(
            f"lengths must be one whole number for each of {n_cells} cells, not {lengths.dtype} of shape "
            f"{lengths.shape}."
        )
    if (least := lengths.min()) < 0:
        raise OptionError(f"lengths has {least}; a cell has no fewer than 0 tokens.")
    return lengths


def _digest(values: np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(values), _PIECE):
        digest.update(np.ascontiguousarray(values[start : start + _PIECE], dtype=np.int64).data)
    return digest.hexdigest()
