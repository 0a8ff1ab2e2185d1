"""Expression values of a block of cells, and which genes of a cell are kept.

Shapes: B cells, Z entries of all cells together.
"""

from __future__ import annotations

import numba
import numpy as np

from scforge._constants import TARGET_SUM
from scforge.data.cells import CellBlock
from scforge.data.random import cell_keys, uniform
from scforge.tokenizers._sorting import make_scratch, sort_descending

__all__ = ["highest", "kept_indptr", "log1p_cp10k", "log1p_memo", "sampled"]

_MEMO = 256
_STREAM = 0x73616D70  # "samp": its random numbers are others than those of masks and views


def log1p_cp10k(block: CellBlock) -> np.ndarray:
    """Return ``log1p(count / total * 1e4)`` of each entry, float32, shape (Z,)."""
    return _log1p_cp10k(block.indptr, block.counts, block.totals)


@numba.njit(cache=True, nogil=True, inline="always")
def log1p_memo(count, scale, memo):
    """Return ``log1p(count * scale)``, looked up where the cell had that count before (`memo` starts at -1)."""
    if count < _MEMO:
        index = np.uint32(count)
        value = memo[index]
        if value >= 0 and np.float32(index) == count:
            return value
        value = np.float32(np.log1p(np.float64(count) * scale))
        if np.float32(index) == count:
            memo[index] = value
        return value
    return np.float32(np.log1p(np.float64(count) * scale))


@numba.njit(cache=True, nogil=True)
def _log1p_cp10k(indptr, counts, totals):
    values = np.empty(len(counts), dtype=np.float32)
    memo = np.empty(_MEMO, dtype=np.float32)
    for cell in range(len(indptr) - 1):
        scale = TARGET_SUM / max(totals[cell], 1.0)  # a cell without counts has no entry to scale
        memo[:] = -1.0
        for entry in range(np.uint64(indptr[cell]), np.uint64(indptr[cell + 1])):
            values[entry] = log1p_memo(counts[entry], scale, memo)
    return values


@numba.njit(cache=True, nogil=True)
def kept_indptr(indptr, most):
    """Return the row boundaries of cells that keep at most `most` entries each, and the longest cell before that."""
    out = np.zeros(len(indptr), dtype=np.int64)
    longest = 0
    for cell in range(len(indptr) - 1):
        size = indptr[cell + 1] - indptr[cell]
        longest = max(longest, size)
        out[cell + 1] = out[cell] + min(size, most)
    return out, longest


def highest(block: CellBlock, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries of each cell that have the `most` highest counts, in their order; ties go to earlier ones.

    Returns
    -------
    Row boundaries, shape (B + 1,), and positions among the entries, int64.
    """
    if np.diff(block.indptr).max(initial=0) <= most:
        return block.indptr, np.arange(len(block.genes))
    return _highest(block.indptr, block.counts, most)


@numba.njit(cache=True, nogil=True)
def _highest(indptr, counts, most):
    out_indptr, longest = kept_indptr(indptr, most)
    scratch = make_scratch(longest)
    kept = np.empty(out_indptr[-1], dtype=np.int64)
    for cell in range(len(indptr) - 1):
        start, size = indptr[cell], indptr[cell + 1] - indptr[cell]
        out = out_indptr[cell]
        n_kept = out_indptr[cell + 1] - out
        if n_kept == size:
            kept[out : out + size] = np.arange(start, start + size)
            continue
        for i in range(size):
            scratch[0][i] = counts[start + i]
        sort_descending(scratch, size)
        chosen = np.sort(scratch[3][:n_kept] & np.uint64(0xFFFFFFFF))
        for i in range(n_kept):
            kept[out + i] = start + np.int64(chosen[i])
    return out_indptr, kept


def sampled(indptr: np.ndarray, block: CellBlock, most: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `most` entries of each cell drawn without replacement, in their order; seeded by cell and draw.

    `indptr` holds the row boundaries of the entries to draw from. The result is that of :func:`highest`.
    """
    if np.diff(indptr).max(initial=0) <= most:
        return indptr, np.arange(indptr[-1])
    return _sampled(indptr, cell_keys(block.rows, seed=seed, epoch=block.draw, stream=_STREAM), most)


@numba.njit(cache=True, nogil=True)
def _sampled(indptr, keys, most):
    out_indptr, _ = kept_indptr(indptr, most)
    kept = np.empty(out_indptr[-1], dtype=np.int64)
    for cell in range(len(indptr) - 1):
        size = indptr[cell + 1] - indptr[cell]
        left = out_indptr[cell + 1] - out_indptr[cell]
        out = out_indptr[cell]
        # Selection sampling (Knuth, algorithm S): each set of `left` entries is equally likely, in order.
        for i in range(size):
            if left == 0:
                break
            if uniform(keys[cell], np.uint64(i)) * (size - i) < left:
                kept[out] = indptr[cell] + i
                out += 1
                left -= 1
    return out_indptr, kept
