"""Ranking the genes of each cell by count / median, exactly and fast.

A cell has about a thousand keys. They are dealt into about as many buckets by a table of where keys lie, which is
learnt from a sample of the block; that leaves little to do for an insertion sort. The buckets only save time: whatever
the table says, the order is that of the exact keys, equal keys in the order of the vocabulary.

Keys are compared in single precision first. Where two differ by a few units in the last place only, they are compared
as float64 computed by the operations of Geneformer's code in their order.

Shapes: B cells, Z entries of all cells together, G genes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from scforge._constants import TARGET_SUM
from scforge.data.cells import CellBlock
from scforge.tokenizers._expression import MEMO, kept_indptr, log1p_in_place
from scforge.tokenizers._packed_ranking import CLOSE, FIRST, TABLE_CELLS, rank_packed
from scforge.tokenizers._sorting import finish_sort

__all__ = ["LARGEST", "Scales", "rank_cells", "rank_padded"]

LARGEST = 1e20
"""Medians must lie between this and its inverse, so that keys are ordinary numbers in single precision."""

_SAMPLE = 8192
"""Most entries of a block that the table is learnt from; of a small block, one in 32."""

_MOST = 2**16
"""Genes and counts below this travel with the keys."""


_APART = 1e-6
"""Share by which medians differ whose keys cannot be rounded to the same number: eight units in the last place."""


class Scales(NamedTuple):
    """What ranks multiply counts by.

    Attributes
    ----------
    inverse
        1 / median of each gene, float64, shape (G,).
    single
        The same in single precision.
    distinct
        Whether medians that differ do so by more than the keys in single precision may be wrong by.
    """

    inverse: np.ndarray
    single: np.ndarray
    distinct: bool

    @classmethod
    def of(cls, inverse: np.ndarray) -> Scales:
        """Make them of 1 / medians."""
        values = np.unique(inverse)
        distinct = bool((values[1:] > values[:-1] * (1 + _APART)).all())
        return cls(inverse, inverse.astype(np.float32), distinct)


def rank_cells(
    block: CellBlock, scales: Scales, most: int, n_special: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rank the genes of each cell.

    Parameters
    ----------
    block
        The cells.
    scales
        What counts are multiplied by.
    most
        Genes to keep.
    n_special
        Token id of the first gene.

    Returns
    -------
    Row boundaries, int64, shape (B + 1,); token ids, int32, and log1p CP10K, float32, from the highest to the lowest.
    """
    indptr, longest = kept_indptr(block.indptr, most)
    ids, values = np.empty(indptr[-1], dtype=np.int32), np.empty(indptr[-1], dtype=np.float32)
    _rank_into(block, scales, n_special, longest, indptr[:-1], np.diff(indptr), ids, values)
    return indptr, ids, values


def rank_padded(
    block: CellBlock, scales: Scales, most: int, n_special: int, first: int, last: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rank the genes of each cell straight into padded arrays, which spares writing them twice.

    Parameters
    ----------
    block, scales, most, n_special
        See :func:`rank_cells`.
    first, last
        Ids of the tokens before and behind each cell; -1 for none.

    Returns
    -------
    Token ids, int64, attention mask, bool, and values, float32, each of shape (B, S).
    """
    indptr, longest = kept_indptr(block.indptr, most)
    sizes = np.diff(indptr)
    before, around = int(first >= 0), int(first >= 0) + int(last >= 0)
    width = max(1, int(sizes.max(initial=0)) + around)
    ids = np.empty((len(sizes), width), dtype=np.int64)
    mask, values = np.empty(ids.shape, dtype=np.bool_), np.empty(ids.shape, dtype=np.float32)
    starts = np.arange(len(sizes), dtype=np.int64) * width + before
    _rank_into(block, scales, n_special, longest, starts, sizes, ids.reshape(-1), values.reshape(-1))
    _fill_around(sizes, first, last, ids, mask, values)
    return ids, mask, values


def _rank_into(
    block: CellBlock,
    scales: Scales,
    n_special: int,
    longest: int,
    starts: np.ndarray,
    sizes: np.ndarray,
    ids: np.ndarray,
    values: np.ndarray,
) -> None:
    """Write the `sizes` highest genes of each cell to `ids` and `values` from `starts` on."""
    n_buckets = max(64, 1 << int(longest - 1).bit_length()) if longest else 64
    inverse, single, distinct = scales
    table = _learn(block.indptr, block.genes, block.counts, single, n_buckets)
    if len(inverse) <= _MOST and block.counts.max(initial=0) < _MOST:
        rank_packed(
            block.indptr, block.genes, block.counts, block.totals, inverse, single, distinct, table, n_buckets,
            longest, n_special, starts, sizes, ids, values,
        )  # fmt: skip
        return
    _rank(
        block.indptr, block.genes, block.counts, block.totals, inverse, single, table, n_buckets, longest, n_special,
        starts, sizes, ids, values,
    )  # fmt: skip


@numba.njit(cache=True, nogil=True)
def _fill_around(sizes, first, last, ids, mask, values):
    before = 1 if first >= 0 else 0
    for cell in range(len(sizes)):
        if before:
            ids[cell, 0] = first
            values[cell, 0] = 0
        stop = before + sizes[cell]
        if last >= 0:
            ids[cell, stop] = last
            values[cell, stop] = 0
            stop += 1
        ids[cell, stop:] = 0
        values[cell, stop:] = 0
        mask[cell, :stop] = True
        mask[cell, stop:] = False


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _learn(indptr, genes, counts, single, n_buckets):
    """Return the bucket of the lowest key of each cell of the table, and the buckets that a unit of its bits spans."""
    seen = np.zeros(TABLE_CELLS, dtype=np.float64)
    key = np.empty(1, dtype=np.float32)
    bits = key.view(np.uint32)
    n_seen = 0
    for entry in range(0, indptr[-1], max(indptr[-1] // _SAMPLE, min(32, 1 + indptr[-1] // 1024))):
        key[0] = counts[entry] * single[genes[entry]]
        place: Any = min(max(np.int64(bits[0] >> np.uint32(16)) - FIRST, 0), TABLE_CELLS - 1)
        seen[place] += 1
        n_seen += 1
    used = np.flatnonzero(seen)
    first, last = (used[0], used[-1]) if n_seen else (0, 0)
    table = np.zeros((2, TABLE_CELLS), dtype=np.float32)
    above = 0.0
    for cell in range(TABLE_CELLS - 1, -1, -1):
        # A tenth is spread evenly, for keys that the sample has missed.
        share = 0.9 * seen[cell] / max(n_seen, 1) + (0.1 / (last - first + 1) if first <= cell <= last else 0.0)
        above += share
        table[0, cell] = above * (n_buckets - 1)
        table[1, cell] = share * (n_buckets - 1) / 65536.0
    return table


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _rank(
    indptr, genes, counts, totals, inverse, single, table, n_buckets, longest, n_special,
    out_starts, out_sizes, out_ids, out_values,
):  # fmt: skip
    one: Any = np.uint64(1)
    low32, shift32 = np.uint64(0xFFFFFFFF), np.uint64(32)
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
            packed[slot] = (np.uint64(~bits[i]) << shift32) | np.uint64(i)
            starts[np.uint32(places[i])] = slot + 1

        finish_sort(packed, size)

        # Compare close keys exactly. They are collected first, since no processor could guess which are close.
        n_close = np.uint64(0)
        for p in range(one, size):
            places[n_close] = p
            n_close += np.uint64((packed[p] >> shift32) - (packed[p - one] >> shift32) <= np.uint64(CLOSE))
        share = 1.0 / max(totals[cell], 1.0)
        for c in range(n_close):
            at: Any = np.uint64(places[c])
            entry = packed[at]
            here, above = start + (entry & low32), start + (packed[at - one] & low32)
            median = inverse[np.uint32(genes[here])]
            if (counts[here] == counts[above]) & (median == inverse[np.uint32(genes[above])]):
                continue  # equal, and in the order of the vocabulary
            key = ((np.float64(counts[here]) * share) * TARGET_SUM) * median
            q = at
            while q > 0 and np.int64(entry >> shift32) - np.int64(packed[q - one] >> shift32) <= CLOSE:
                above = start + (packed[q - one] & low32)
                other = ((np.float64(counts[above]) * share) * TARGET_SUM) * inverse[np.uint32(genes[above])]
                if other > key or (other == key and above < here):
                    break
                packed[q] = packed[q - one]
                q -= one
            packed[q] = entry

        out = np.uint64(out_starts[cell])
        stop = out + np.uint64(out_sizes[cell])
        for p in range(stop - out):
            here = start + (packed[p] & low32)
            out_ids[out + p] = genes[here] + n_special
            out_values[out + p] = counts[here]
        log1p_in_place(out_values, out, stop, TARGET_SUM * share, memo)
