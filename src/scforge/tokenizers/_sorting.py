"""Sorting the genes of a cell by expression, exactly and fast.

A cell has about a thousand keys. They are dealt into about as many buckets by their leading bits (the bits of positive
floats are in the order of the floats), which leaves almost nothing to do for an insertion sort.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

__all__ = ["finish_sort", "make_scratch", "sort_descending"]

_PATIENCE = 8
"""Moves an entry, on average, that the insertion sort may need before a general sort takes over."""


@numba.njit(cache=True, nogil=True)
def make_scratch(most):
    """Return working memory to sort up to `most` keys: the keys, their float32 form, starts of buckets, the order."""
    n_buckets = 64
    while n_buckets < most:
        n_buckets *= 2
    return (
        np.empty(max(most, 1), dtype=np.float64),
        np.empty(max(most, 1), dtype=np.float32),
        np.empty(2 * n_buckets + 2, dtype=np.int32),
        np.empty(max(most, 1), dtype=np.uint64),
    )


@numba.njit(cache=True, nogil=True)
def finish_sort(packed, size):
    """Sort the first `size` entries, which buckets have nearly sorted; all are uint64."""
    one: Any = np.uint64(1)
    patience = np.int64(_PATIENCE) * np.int64(size)
    last = packed[0]
    for p in range(one, size):
        entry = packed[p]
        if entry > last:
            last = entry
            continue
        q = p
        while q > 0 and packed[q - one] > entry:
            packed[q] = packed[q - one]
            q -= one
        packed[q] = entry
        patience -= np.int64(p - q)
        if patience < 0:
            packed[:size] = np.sort(packed[:size])
            break


@numba.njit(cache=True, nogil=True, error_model="numpy")
def sort_descending(scratch, n):
    """Sort the first `n` keys of the scratch from high to low, equal keys in their order.

    Keys are numbers of at least 0 and not NaN. The low 32 bits of entry ``p`` of the order are the position of the key
    that comes in place ``p``.
    """
    keys, rounded, starts, packed = scratch
    if n == 0:
        return
    bits = rounded.view(np.uint32)
    size = np.uint64(n)
    for i in range(size):
        rounded[i] = keys[i]
    low, high = bits[0], bits[0]
    for i in range(size):
        low, high = min(low, bits[i]), max(high, bits[i])
    n_buckets = np.uint32(128)
    while n_buckets < 2 * size:
        n_buckets *= np.uint32(2)
    shift = np.uint32(0)
    while ((high - low) >> shift) >= n_buckets:
        shift += np.uint32(1)
    last = ((high - low) >> shift) + np.uint32(1)

    starts[: last + np.uint32(1)] = 0
    for i in range(size):
        starts[((high - bits[i]) >> shift) + np.uint32(1)] += 1
    before = np.int32(0)
    for bucket in range(last + np.uint32(1)):
        before += starts[bucket]
        starts[bucket] = before
    for i in range(size):
        below = high - bits[i]
        place = np.uint32(starts[below >> shift])
        packed[place] = (np.uint64(below) << np.uint64(32)) | np.uint64(i)
        starts[below >> shift] = place + 1

    finish_sort(packed, size)

    # Keys that are equal as float32 may differ as float64.
    one: Any = np.uint64(1)
    mask = np.uint64(0xFFFFFFFF)
    for p in range(one, size):
        entry = packed[p]
        if (entry >> np.uint64(32)) != (packed[p - one] >> np.uint64(32)):
            continue
        key = keys[entry & mask]
        q = p
        while (
            q > 0
            and (packed[q - one] >> np.uint64(32)) == (entry >> np.uint64(32))
            and keys[packed[q - one] & mask] < key
        ):
            packed[q] = packed[q - one]
            q -= one
        packed[q] = entry
