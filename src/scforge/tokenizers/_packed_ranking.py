"""Ranking where gene and count fit into 16 bits each, which is nearly always: they travel with the key.

So nothing has to be looked up after the sort, and genes whose counts and medians are equal, the most frequent close
case, are seen as such without computing anything.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from scforge._constants import TARGET_SUM
from scforge.tokenizers._expression import MEMO
from scforge.tokenizers._sorting import finish_sort

__all__ = ["CLOSE", "FIRST", "TABLE_CELLS", "rank_packed"]

TABLE_CELLS = 4096
"""Cells of the table: 128 for each power of two from 2^-16 to 2^16. Keys beyond it are dealt into its ends."""

FIRST = (127 - 16) << 7
"""Leading bits (sign, exponent and seven of the mantissa) of the first cell of the table."""

CLOSE = 8
"""Units in the last place that single precision may be wrong by, and more."""


@numba.njit(cache=True, nogil=True, error_model="numpy")
def rank_packed(
    indptr, genes, counts, totals, inverse, single, distinct, table, n_buckets, longest, n_special,
    out_starts, out_sizes, out_ids, out_values,
):  # fmt: skip
    """Write the highest genes of each cell, as ``_rank`` does.

    If `distinct`, equal keys of equal counts mean equal medians.
    """
    one: Any = np.uint64(1)
    low16, shift16, shift32 = np.uint64(0xFFFF), np.uint64(16), np.uint64(32)
    keys = np.empty(longest, dtype=np.float32)
    bits = keys.view(np.uint32)
    places = np.empty(longest + 1, dtype=np.int32)
    starts = np.empty(n_buckets + 2, dtype=np.int32)
    packed = np.empty(longest, dtype=np.uint64)
    memo = np.empty(MEMO, dtype=np.float32)
    lowest_bucket, slope = table[0], table[1]
    for cell in range(len(indptr) - 1):
        start = np.uint64(indptr[cell])
        size = np.uint64(indptr[cell + 1]) - start
        if size == 0:
            continue
        for i in range(size):
            keys[i] = counts[start + i] * single[np.uint32(genes[start + i])]

        # Deal the keys into buckets, from high to low.
        starts[:] = 0
        for i in range(size):
            place = np.uint32(
                min(max(np.int32(bits[i] >> np.uint32(16)) - np.int32(FIRST), np.int32(0)), np.int32(TABLE_CELLS - 1))
            )
            within = np.float32(np.int32(bits[i] & np.uint32(0xFFFF)))
            bucket = np.int32(lowest_bucket[place] - within * slope[place])
            places[i] = bucket
            starts[np.uint32(bucket) + np.uint32(1)] += 1
        before = np.int32(0)
        for b in range(np.uint32(n_buckets + 1)):
            before += starts[b]
            starts[b] = before
        for i in range(size):
            slot = np.uint32(starts[np.uint32(places[i])])
            payload = (np.uint64(np.int32(counts[start + i])) << shift16) | np.uint64(genes[start + i])
            packed[slot] = (np.uint64(~bits[i]) << shift32) | payload
            starts[np.uint32(places[i])] = slot + 1

        finish_sort(packed, size)

        # Compare close keys exactly. They are collected first, since no processor could guess which are close.
        n_close = np.uint64(0)
        for p in range(one, size):
            places[n_close] = p
            close = (packed[p] >> shift32) - (packed[p - one] >> shift32) <= np.uint64(CLOSE)
            equal = distinct & ((packed[p] >> shift16) == (packed[p - one] >> shift16))
            n_close += np.uint64(close & (not equal))
        share = 1.0 / max(totals[cell], 1.0)
        for c in range(n_close):
            at: Any = np.uint64(places[c])
            following = True
            while following:
                entry = packed[at]
                above = packed[at - one]
                gene, count = np.uint32(entry & low16), (entry >> shift16) & low16
                median = inverse[gene]
                q = at
                if count != (above >> shift16) & low16 or median != inverse[np.uint32(above & low16)]:
                    key = ((np.float64(count) * share) * TARGET_SUM) * median
                    while q > 0 and np.int64(entry >> shift32) - np.int64(packed[q - one] >> shift32) <= CLOSE:
                        above = packed[q - one]
                        higher = np.uint32(above & low16)
                        other = ((np.float64((above >> shift16) & low16) * share) * TARGET_SUM) * inverse[higher]
                        if other > key or (other == key and higher < gene):
                            break
                        packed[q] = above
                        q -= one
                    packed[q] = entry
                # What equals an entry that went up has to follow it.
                at += one
                following = q + one < at and at < size and (packed[at] >> shift16) == (entry >> shift16)

        out = np.uint64(out_starts[cell])
        n_kept = np.uint64(out_sizes[cell])
        for p in range(n_kept):
            out_ids[out + p] = np.int64(packed[p] & low16) + n_special
        # Nearly all entries of a cell are small counts, whose values are computed once.
        memo[:] = -1.0
        scale = TARGET_SUM * share
        for p in range(n_kept):
            count = (packed[p] >> shift16) & low16
            if count >= np.uint64(MEMO):
                out_values[out + p] = np.log1p(np.float64(count) * scale)
                continue
            if memo[count] < 0:
                memo[count] = np.log1p(np.float64(count) * scale)
            out_values[out + p] = memo[count]
