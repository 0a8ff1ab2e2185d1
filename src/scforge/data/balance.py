"""Rare cells more often: weights of cells, and draws of cells by weight.

Shapes: n cells of an order, m chunks of cells that stand together.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np

from scforge._checks import check_count, check_share
from scforge.data.random import cell_keys
from scforge.data.windows import ranges
from scforge.errors import OptionError

__all__ = ["Balance", "CellDraws", "CellWeights", "ChunkDraws", "ClassBalance"]

_STREAM = 0x5CA1AB1E
"""Keeps the random numbers of draws apart from those of masks and views."""

_PIECE = 1 << 20
"""Cells whose weights are computed at once where all are needed: bounds the memory."""


class Balance(Protocol):
    """Weights of the cells of an order."""

    def __len__(self) -> int:
        """Return the number of cells."""
        ...

    def weights(self, cells: np.ndarray | slice, *, epoch: int) -> np.ndarray:
        """Return the weight of each of `cells`, float64: how often it is drawn, relative to others."""
        ...

    def fingerprint(self) -> str:
        """Return a text that tells these weights from others."""
        ...


class CellWeights:
    """Draw cells in proportion to given weights.

    Parameters
    ----------
    weights
        Weight of each cell of the order, zero or above, shape (n,).

    Raises
    ------
    OptionError
        If a weight is negative or not finite, or all are zero.

    Examples
    --------
    >>> CellWeights([1, 1, 2]).weights(slice(None), epoch=0).tolist()
    [1.0, 1.0, 2.0]
    """

    def __init__(self, weights: np.ndarray) -> None:
        self._weights = np.asarray(weights)
        if self._weights.ndim != 1 or self._weights.dtype.kind not in "iuf":
            raise OptionError(f"weights must be one number a cell, not {self._weights.dtype} {self._weights.shape}.")
        bad = np.flatnonzero(~np.isfinite(self._weights) | (self._weights < 0))
        if len(bad):
            raise OptionError(f"weights[{bad[0]}]={self._weights[bad[0]]} is not zero or above; give finite weights.")
        if not self._weights.any():
            raise OptionError("weights has no weight above zero, so that no cell can be drawn; give one.")

    def __len__(self) -> int:
        return len(self._weights)

    def weights(self, cells: np.ndarray | slice, *, epoch: int) -> np.ndarray:
        """Return the weight of each of `cells`, float64; it is the same in each epoch.

        Parameters
        ----------
        cells
            Positions in the order, integers, or a slice.
        epoch
            Number of the epoch.

        Returns
        -------
        Weights; only their ratios matter.
        """
        return self._weights[cells].astype(np.float64)

    def fingerprint(self) -> str:
        """Return a digest of the weights."""
        return hashlib.blake2b(np.ascontiguousarray(self._weights).data, digest_size=8).hexdigest()


class ClassBalance:
    """Draw cells of rare classes more often: a cell has the weight (1 / size of its class)^strength.

    With strength 0 classes come as often as they are in the data, with strength 1 all classes come equally often. The
    strength may grow from epoch to epoch, so that a model first sees the natural frequencies and later rare classes.

    Parameters
    ----------
    codes
        Class of each cell of the order, e.g. the codes of a categorical; -1 is a cell without label. Shape (n,).
    warmup_epochs
        Epochs in which the strength runs linearly from `start` to `end`; 0: it is `end` from the first epoch on.
    start, end
        Strength in epoch 0 and from epoch `warmup_epochs` on, from 0 to 1.
    missing
        ``"keep"``: cells without label are a class of their own. ``"drop"``: they are never drawn.

    Raises
    ------
    OptionError
        If an argument cannot be used, or no cell has a label and cells without label are dropped.

    Examples
    --------
    >>> balance = ClassBalance([0, 0, 0, 1], warmup_epochs=2)
    >>> [balance.strength(epoch) for epoch in range(4)]
    [0.0, 0.5, 1.0, 1.0]
    >>> balance.weights(slice(2, 4), epoch=2).tolist()
    [0.3333333333333333, 1.0]
    """

    def __init__(
        self,
        codes: np.ndarray,
        *,
        warmup_epochs: int = 0,
        start: float = 0.0,
        end: float = 1.0,
        missing: str = "keep",
    ) -> None:
        check_count("warmup_epochs", warmup_epochs, "epochs", least=0)
        if missing not in ("keep", "drop"):
            raise OptionError(f"missing={missing!r} is neither 'keep' nor 'drop'.")
        self._codes = np.asarray(codes)
        if self._codes.ndim != 1 or self._codes.dtype.kind not in "iu":
            raise OptionError(f"codes must be one whole number a cell, not {self._codes.dtype} {self._codes.shape}.")
        if not len(self._codes):
            raise OptionError("codes has no cell; give the class of each cell.")
        if self._codes.min() < -1:
            raise OptionError(f"codes has {self._codes.min()}; give -1 for no label and classes from 0 on.")
        self.warmup_epochs = int(warmup_epochs)
        self.start = check_share("start", start)
        self.end = check_share("end", end)
        self.missing = missing
        # Cells without label are counted at 0, class k at k + 1. In pieces: bincount makes int64 of what it gets.
        sizes = np.zeros(int(self._codes.max()) + 2, dtype=np.int64)
        for piece in range(0, len(self._codes), _PIECE):
            sizes += np.bincount(self._codes[piece : piece + _PIECE].astype(np.int64) + 1, minlength=len(sizes))
        if missing == "drop":
            sizes[0] = 0
        if not sizes.any():
            raise OptionError("codes has no cell with a label; give labels or missing='keep'.")
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._codes)

    def strength(self, epoch: int) -> float:
        """Return the strength in an epoch.

        Parameters
        ----------
        epoch
            Number of the epoch, from 0.

        Returns
        -------
        From 0 to 1.
        """
        share = min(1.0, epoch / self.warmup_epochs) if self.warmup_epochs else 1.0
        return self.start + (self.end - self.start) * share

    def weights(self, cells: np.ndarray | slice, *, epoch: int) -> np.ndarray:
        """Return the weight of each of `cells` in an epoch, float64.

        Parameters
        ----------
        cells
            Positions in the order, integers, or a slice.
        epoch
            Number of the epoch, which the strength depends on.

        Returns
        -------
        Weights; only their ratios matter.
        """
        table = np.where(self._sizes > 0, np.maximum(self._sizes, 1.0) ** -self.strength(epoch), 0.0)
        return table[self._codes[cells].astype(np.int64) + 1]

    def fingerprint(self) -> str:
        """Return a digest of classes and options."""
        digest = hashlib.blake2b(np.ascontiguousarray(self._codes).data, digest_size=8)
        digest.update(repr((self.warmup_epochs, self.start, self.end, self.missing)).encode())
        return digest.hexdigest()


class CellDraws:
    """The sequence of one epoch's draws from all cells, with replacement.

    Parameters
    ----------
    balance
        Weights of the n cells.
    seed, epoch
        They determine the draws.
    """

    def __init__(self, balance: Balance, *, seed: int, epoch: int) -> None:
        self._seed, self._epoch = seed, epoch
        self._cumulated = np.cumsum(balance.weights(slice(None), epoch=epoch))

    def cells(self, start: int, stop: int) -> np.ndarray:
        """Return the cells of the draws from `start` to `stop`, int64."""
        shares = _uniform(np.arange(start, stop), self._seed, self._epoch)
        return _inverse(self._cumulated, 0.0, self._cumulated[-1], shares)


class ChunkDraws:
    """The sequence of one epoch's draws, chunk after chunk: as many from each chunk as draws from all cells would give.

    First the number of draws of each chunk is drawn (a multinomial), then that many cells of the chunk, so that cells
    that stand together are read together and the memory does not grow with the number of cells.

    Parameters
    ----------
    balance
        Weights of the n cells.
    bounds
        Where the chunks start among the cells, and n at the end, int64, shape (m + 1,).
    seed, epoch
        They determine the draws.
    """

    def __init__(self, balance: Balance, bounds: np.ndarray, *, seed: int, epoch: int) -> None:
        self._balance, self._bounds, self._seed, self._epoch = balance, bounds, seed, epoch
        sums = self._chunk_sums()
        generator = np.random.default_rng([seed, epoch, _STREAM])
        self.sizes = np.zeros(len(sums), dtype=np.int64)
        """Number of draws of each chunk, int64, shape (m,)."""
        # NumPy gives the last one what rounding leaves over: a chunk of weight zero must not be there.
        possible = np.flatnonzero(sums)
        self.sizes[possible] = generator.multinomial(len(balance), sums[possible] / sums.sum())
        self._first_draw = np.cumsum(self.sizes) - self.sizes

    def _chunk_sums(self) -> np.ndarray:
        sums = np.empty(len(self._bounds) - 1)
        mean = max(1, len(self._balance) // len(sums))
        step = max(1, _PIECE // mean)
        for first in range(0, len(sums), step):
            bounds = self._bounds[first : first + step + 1]
            weights = self._balance.weights(slice(bounds[0], bounds[-1]), epoch=self._epoch)
            sums[first : first + step] = np.add.reduceat(weights, bounds[:-1] - bounds[0])
        return sums

    def cells(self, chunks: np.ndarray, skipped: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the cells of some draws of some chunks, chunk after chunk, int64.

        Parameters
        ----------
        chunks
            Numbers of the chunks.
        skipped
            Draws of each chunk that are left out before the first that is wanted.
        sizes
            Number of draws of each chunk that are wanted.
        """
        starts = self._bounds[chunks]
        n_cells = self._bounds[chunks + 1] - starts
        cells = ranges(starts, n_cells)
        ends = np.cumsum(n_cells)
        weights = self._balance.weights(cells, epoch=self._epoch)
        # Each chunk sums to 1: the cumulated sum of many chunks would lose the digits of light ones.
        weights /= np.repeat(np.add.reduceat(weights, ends - n_cells), n_cells)
        cumulated = np.cumsum(weights)
        highs = cumulated[ends - 1]
        lows = np.concatenate([[0.0], highs[:-1]])
        shares = _uniform(ranges(self._first_draw[chunks] + skipped, sizes), self._seed, self._epoch)
        return cells[_inverse(cumulated, np.repeat(lows, sizes), np.repeat(highs, sizes), shares)]


def _uniform(draws: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return one random number in [0, 1) for each number of a draw."""
    keys = cell_keys(draws, seed=seed, epoch=epoch, stream=_STREAM)
    return (keys >> np.uint64(11)) * 2.0**-53


def _inverse(
    cumulated: np.ndarray, lows: np.ndarray | float, highs: np.ndarray | float, shares: np.ndarray
) -> np.ndarray:
    """Return where the cumulated weights pass `lows` + `shares` * (`highs` - `lows`), in any order."""
    # Rounding up to the end would give the cell behind it, or one of weight zero.
    targets = np.minimum(lows + shares * (highs - lows), np.nextafter(highs, 0.0))
    # Nearly sorted places are found four times as fast, and 16 bits are sorted fast; the window is shuffled anyway.
    rough = (targets * ((2**16 - 1) / cumulated[-1])).astype(np.uint16)
    return np.searchsorted(cumulated, targets[np.argsort(rough, kind="stable")], side="right")
