"""Random numbers that belong to a cell: they depend on seed, epoch, cell and purpose, and on nothing else.

The cell is known by its row in training (:func:`cell_keys`), and by its counts in tokenizing (:func:`content_keys`),
which has to give a cell the same tokens in whatever data set it comes. So a batch, a thread count, a number of workers
or a resumed run cannot change what happens to a cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

if TYPE_CHECKING:
    from scforge.data.cells import CellBlock

__all__ = ["cell_keys", "content_keys", "uniform", "word"]


def cell_keys(rows: np.ndarray, *, seed: int, epoch: int, stream: int = 0) -> np.ndarray:
    """Return one random 64-bit key for each cell, uint64, shape (B,), as the start of its own random numbers."""
    return _mix_keys(np.asarray(rows, dtype=np.int64), np.uint64(seed), np.uint64(epoch), np.uint64(stream))


def content_keys(block: CellBlock, *, seed: int, stream: int = 0) -> np.ndarray:
    """Return one random 64-bit key for each cell that depends on its counts and on the draw, uint64, shape (B,).

    Where a cell stands does not matter: a cell of a subset, or of a reordered data set, keeps its random numbers.
    """
    keys = np.empty(len(block), dtype=np.uint64)
    _digest(block.indptr, block.genes, block.counts.view(np.uint32), keys)
    return _mix_keys(keys.view(np.int64), np.uint64(seed), np.uint64(block.draw), np.uint64(stream))


@numba.njit(cache=True, nogil=True)
def _digest(indptr, genes, bits, keys):
    """Hash the genes and counts of each cell by a sum of products, which needs no pass after the other."""
    golden, other = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
    for cell in range(len(indptr) - 1):
        digest = np.uint64(0)
        for entry in range(indptr[cell], indptr[cell + 1]):
            gene = (np.uint64(genes[entry]) + np.uint64(1)) * golden
            digest += (gene ^ (gene >> np.uint64(29))) * (np.uint64(bits[entry]) * other + golden)
        keys[cell] = digest


@numba.njit(cache=True)
def _hash(state):
    """Scramble 64 bits (the finaliser of splitmix64: Steele, Lea and Flood 2014)."""
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
    """Return the 64 random bits at `position` of the random sequence of `key`."""
    return _hash(key + (position + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


@numba.njit(cache=True)
def uniform(key, position):
    """Return the number at `position` of the random sequence of `key`, in [0, 1)."""
    return np.float64(word(key, position) >> np.uint64(11)) * (1.0 / 9007199254740992.0)
