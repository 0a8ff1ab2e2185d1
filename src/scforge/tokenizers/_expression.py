"""Expression values of a block of cells, and which genes of a cell are kept.

Shapes: B cells, Z entries of all cells together.
"""

from __future__ import annotations

import numba
import numpy as np

from scforge._checks import check_positive
from scforge._constants import TARGET_SUM
from scforge.data.cells import CellBlock
from scforge.data.random import content_keys, uniform
from scforge.errors import OptionError
from scforge.tokenizers._sorting import make_scratch, sort_descending

__all__ = [
    "MEMO",
    "TRANSFORMS",
    "check_transform",
    "expression",
    "keep",
    "kept_indptr",
    "log1p_cp10k",
    "log1p_in_place",
    "reorder",
    "transformed",
]

MEMO = 256
"""Counts of a cell whose values are computed once: nearly all entries of a cell are such small counts."""

TRANSFORMS = ("log1p_cp10k", "cp10k", "log1p_counts", "counts")
"""What the value of a gene can be: whether scaled to a library size, and whether the logarithm is taken."""

_STREAM = 0x73616D70  # "samp": its random numbers are others than those of masks and views


def check_transform(transform: str, target_sum: float) -> float:
    """Raise unless the values of genes are known, and their library size is used; return the latter as a float."""
    if transform not in TRANSFORMS:
        raise OptionError(f"transform={transform!r} is not known; choose {' or '.join(map(repr, TRANSFORMS))}.")
    check_positive("target_sum", target_sum)
    if target_sum != TARGET_SUM and "cp10k" not in transform:
        raise OptionError(f"target_sum={target_sum!r} has no use with transform={transform!r}; leave it out.")
    return float(target_sum)


def expression(block: CellBlock, transform: str, target_sum: float) -> np.ndarray:
    """Return the value of each entry as :data:`TRANSFORMS` name it, counts scaled to `target_sum`, float32 (Z,)."""
    if transform == "log1p_cp10k" and target_sum == TARGET_SUM:
        return log1p_cp10k(block)
    return transformed(block.counts.astype(np.float64), block.indptr, block.totals, transform, target_sum)


def transformed(
    counts: np.ndarray, indptr: np.ndarray, totals: np.ndarray, transform: str, target_sum: float
) -> np.ndarray:
    """Do what :func:`expression` does for float64 counts, which are changed, of cells with these library sizes."""
    if "cp10k" in transform:
        counts *= np.repeat(target_sum / np.maximum(totals, 1.0), np.diff(indptr))
    return (np.log1p(counts) if transform.startswith("log1p") else counts).astype(np.float32)


def log1p_cp10k(block: CellBlock) -> np.ndarray:
    """Return ``log1p(count / total * 1e4)`` of each entry, float32, shape (Z,)."""
    values = block.counts.astype(np.float32)
    _log1p_cp10k(block.indptr, block.totals, values)
    return values


@numba.njit(cache=True, nogil=True)
def _log1p_cp10k(indptr, totals, values):
    memo = np.empty(MEMO, dtype=np.float32)
    for cell in range(len(indptr) - 1):
        scale = TARGET_SUM / max(totals[cell], 1.0)  # a cell without counts has no entry to scale
        log1p_in_place(values, np.uint64(indptr[cell]), np.uint64(indptr[cell + 1]), scale, memo)


@numba.njit(cache=True, nogil=True)
def log1p_in_place(values, start, stop, scale, memo):
    """Turn the counts of one cell, entries `start` to `stop`, into ``log1p(count * scale)``; `memo` is of size MEMO."""
    memo[:] = -1.0
    for entry in range(start, stop):
        count = values[entry]
        index = np.int64(count)
        if np.uint64(index) < np.uint64(MEMO) and np.float32(index) == count:
            value = memo[index]
            if value < 0:
                value = np.float32(np.log1p(np.float64(count) * scale))
                memo[index] = value
            values[entry] = value
        else:
            values[entry] = np.log1p(np.float64(count) * scale)


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


def keep(
    indptr: np.ndarray, counts: np.ndarray, block: CellBlock, most: int, *, sample: bool = False, seed: int = 0
) -> tuple[np.ndarray, np.ndarray | slice]:
    """Choose at most `most` entries of each cell: those with the highest counts, or a sample.

    What is drawn depends on the seed, the cell and the draw of the block.

    Parameters
    ----------
    indptr, counts
        Row boundaries, shape (B + 1,), and counts of the entries to choose from, which may be those of `block` or more.
    block
        The cells.
    most
        Entries to keep.
    sample
        Draw without replacement. Otherwise equal counts go to the earlier entries, but zeros are drawn.
    seed
        Seed of what is drawn.

    Returns
    -------
    Row boundaries, shape (B + 1,), and positions of the kept entries in their order, int64; a slice where all are kept.
    """
    if np.diff(indptr).max(initial=0) <= most:
        return indptr, slice(None)
    kept_to, longest = kept_indptr(indptr, most)
    kept = np.empty(kept_to[-1] + 1, dtype=np.int64)
    keys = content_keys(block, seed=seed, stream=_STREAM)
    if sample:
        _draw(indptr, keys, kept_to, kept)
    else:
        _keep_highest(indptr, counts, keys, kept_to, longest, kept)
    return kept_to, kept[:-1]


@numba.njit(cache=True, nogil=True)
def _draw(indptr, keys, kept_to, kept):
    """Draw entries by selection sampling (Knuth, algorithm S): all sets are equally likely, and order is kept."""
    for cell in range(len(indptr) - 1):
        pool = indptr[cell + 1] - indptr[cell]
        left = kept_to[cell + 1] - kept_to[cell]
        out = kept_to[cell]
        for entry in range(indptr[cell], indptr[cell + 1]):
            take = uniform(keys[cell], np.uint64(pool)) * pool < left
            # Written in any case and overwritten unless taken, which spares a branch that nobody can predict.
            kept[out] = entry
            out += take
            left -= take
            pool -= 1


@numba.njit(cache=True, nogil=True)
def _keep_highest(indptr, counts, keys, kept_to, longest, kept):
    scratch = make_scratch(longest)
    for cell in range(len(indptr) - 1):
        start, size = indptr[cell], indptr[cell + 1] - indptr[cell]
        out = kept_to[cell]
        n_kept = kept_to[cell + 1] - out
        n_above = 0
        for entry in range(start, start + size):
            n_above += counts[entry] > 0
        if n_kept < size and n_above > n_kept:
            for i in range(size):
                scratch[0][i] = counts[start + i]
            sort_descending(scratch, size)
            chosen = np.sort(scratch[3][:n_kept] & np.uint64(0xFFFFFFFF))
            for i in range(n_kept):
                kept[out + i] = start + np.int64(chosen[i])
            continue
        pool, left = size - n_above, n_kept - n_above  # all with counts stay, and so many of those without
        for entry in range(start, start + size):
            if counts[entry] == 0:
                take = uniform(keys[cell], np.uint64(pool)) * pool < left
                pool -= 1
                left -= take
                if not take:
                    continue
            kept[out] = entry
            out += 1


def reorder(indptr: np.ndarray, counts: np.ndarray, keys: np.ndarray | None) -> np.ndarray:
    """Return the positions of all entries, int64, shape (Z,), by count within each cell, from high to low.

    With random `keys` of the cells, uint64, shape (B,), they stand in random order instead.
    """
    order = np.empty(len(counts), dtype=np.int64)
    _, longest = kept_indptr(indptr, np.iinfo(np.int64).max)
    _reorder(indptr, counts, np.empty(0, dtype=np.uint64) if keys is None else keys, longest, order)
    return order


@numba.njit(cache=True, nogil=True)
def _reorder(indptr, counts, keys, longest, order):
    scratch = make_scratch(longest)
    for cell in range(len(indptr) - 1):
        start, size = indptr[cell], indptr[cell + 1] - indptr[cell]
        for i in range(size):
            scratch[0][i] = uniform(keys[cell], np.uint64(i)) if len(keys) else counts[start + i]
        sort_descending(scratch, size)
        for i in range(size):
            order[start + i] = start + np.int64(scratch[3][i] & np.uint64(0xFFFFFFFF))
