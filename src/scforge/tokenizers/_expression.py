"""Kernels shared by several tokenizers to sort, normalize and sample the expressed genes of a cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from scforge._checks import check_choice, check_positive
from scforge._constants import TARGET_SUM
from scforge.data.cells import CellBlock, content_keys
from scforge.data.sampling import uniform
from scforge.errors import OptionError

_PATIENCE = 8
"""Maximum average number of moves per entry in insertion sort before switching to a general sort."""

MEMO = 256
"""Counts below this limit are transformed only once per cell, because nearly all counts are small."""

TRANSFORMS = ("log1p_cp10k", "cp10k", "log1p_counts", "counts")
"""Transformations of gene counts, with or without scaling to a library size and logarithm."""

_STREAM = 0x73616D70  # "samp": its random numbers are others than those of masks and views


@numba.njit(cache=True, nogil=True)
def make_scratch(most):
    """Return scratch memory to sort up to `most` keys: keys, float32 keys, bucket starts, and order."""
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
    """Sort the first `size` entries, which are nearly sorted by buckets; all entries are uint64."""
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
    """Sort the first `n` keys of the scratch memory from high to low; equal keys keep their original order.

    Keys must be nonnegative and not NaN. The low 32 bits of entry ``p`` of the order are the original position of the
    key at rank ``p``.
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
        slot = np.uint32(starts[below >> shift])
        packed[slot] = (np.uint64(below) << np.uint64(32)) | np.uint64(i)
        starts[below >> shift] = slot + 1

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


def check_transform(transform: str, target_sum: float) -> float:
    """Return `target_sum` as a float. Raises an OptionError if the transform is unknown or ignores `target_sum`."""
    check_choice("transform", transform, TRANSFORMS)
    if check_positive("target_sum", target_sum) != TARGET_SUM and "cp10k" not in transform:
        raise OptionError(f"has no effect with transform={transform!r}; omit target_sum.", target_sum=target_sum)
    return float(target_sum)


def expression(block: CellBlock, transform: str, target_sum: float) -> np.ndarray:
    """Return the value of each entry for one of :data:`TRANSFORMS`, scaled to `target_sum`, float32, shape (Z,)."""
    if transform == "log1p_cp10k" and target_sum == TARGET_SUM:
        return log1p_cp10k(block)
    counts = block.counts.astype(np.float64)
    if "cp10k" in transform:
        counts *= np.repeat(target_sum / np.maximum(block.totals, 1.0), np.diff(block.indptr))
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
    """Convert the counts of one cell, from `start` to `stop`, to ``log1p(count * scale)``; `memo` has size MEMO."""
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
    """Return row boundaries with at most `most` entries per cell, and the original length of the longest cell."""
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
    """Choose at most `most` entries of each cell, either the highest counts or a random sample.

    Samples depend on the seed, the cell and ``block.draw``.

    Parameters
    ----------
    indptr, counts
        Row boundaries, shape (B + 1,), and counts of the entries to choose from, which may include zeros.
    block
        The cells.
    most
        Maximum number of entries to keep per cell.
    sample
        Whether to sample without replacement. If false, the highest counts are kept; among equal counts, earlier
        entries are preferred, except that zeros are sampled.
    seed
        Random seed.

    Returns
    -------
    Row boundaries (shape (B + 1,)), and ordered positions of the kept entries (int64, or a slice if all are kept).
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
    """Draw entries with selection sampling (Knuth, algorithm S): all subsets are equally likely, and order is kept."""
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
    """Return the positions of all entries, sorted by decreasing count within each cell, int64, shape (Z,).

    With random `keys` of cells, uint64, shape (B,), the order is random instead.
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


def ranked(
    block: CellBlock, amounts: np.ndarray, weights: np.ndarray, values: np.ndarray, most: int, n_special: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rank the genes of each cell by decreasing amount times gene weight; ties keep their order.

    Parameters
    ----------
    block
        The cells.
    amounts, values
        Nonnegative amount, and value, of each entry, shape (Z,).
    weights
        Nonnegative weight of each gene, shape (G,).
    most
        Maximum number of genes to keep per cell.
    n_special
        Token id of the first gene.

    Returns
    -------
    Row boundaries (int64, shape (B + 1,)), token ids (int32) and values.
    """
    indptr, longest = kept_indptr(block.indptr, most)
    ids, ranked_values = np.empty(indptr[-1], dtype=np.int32), np.empty(indptr[-1], dtype=values.dtype)
    _rank(block.indptr, block.genes, amounts, weights, values, n_special, longest, indptr, ids, ranked_values)
    return indptr, ids, ranked_values


@numba.njit(cache=True, nogil=True)
def _rank(indptr, genes, amounts, weights, values, n_special, longest, out_indptr, ids, ranked_values):
    scratch = make_scratch(longest)
    keys, order = scratch[0], scratch[3]
    for cell in range(len(indptr) - 1):
        start, size = indptr[cell], indptr[cell + 1] - indptr[cell]
        for i in range(size):
            keys[i] = amounts[start + i] * weights[genes[start + i]]
        sort_descending(scratch, size)
        out = out_indptr[cell]
        for p in range(out_indptr[cell + 1] - out):
            entry = start + np.int64(order[p] & np.uint64(0xFFFFFFFF))
            ids[out + p] = genes[entry] + n_special
            ranked_values[out + p] = values[entry]


def with_zeros(
    block: CellBlock, n_genes: int, columns: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """List all measured genes of each cell in vocabulary order.

    Parameters
    ----------
    block
        The cells. All genes are treated as measured unless the block specifies the measured genes.
    n_genes
        Number of vocabulary genes.
    columns
        Properties of the entries of `block`, arrays of shape (Z,).

    Returns
    -------
    Row boundaries (int64, shape (B + 1,)), the gene of each entry (int32, shape (B * M,)), and the columns, with zeros
    for genes without counts in a cell.
    """
    measured = np.arange(n_genes) if block.measured is None else np.flatnonzero(block.measured)
    indptr, genes, entries = _with_zeros(block.indptr, block.genes, measured.astype(np.int32))
    counted = entries >= 0
    filled = []
    for column in columns:
        full = np.zeros(len(genes), dtype=column.dtype)
        full[counted] = column[entries[counted]]
        filled.append(full)
    return indptr, genes, filled


@numba.njit(cache=True, nogil=True)
def _with_zeros(indptr, genes, measured):
    n_cells, size = len(indptr) - 1, len(measured)
    out_genes = np.empty(n_cells * size, dtype=np.int32)
    entries = np.empty(n_cells * size, dtype=np.int64)
    for cell in range(n_cells):
        entry = indptr[cell]
        for i in range(size):
            out = cell * size + i
            out_genes[out] = measured[i]
            if entry < indptr[cell + 1] and genes[entry] == measured[i]:
                entries[out] = entry
                entry += 1
            else:
                entries[out] = -1
    return np.arange(n_cells + 1) * size, out_genes, entries
