"""Views of cells: binomial thinning of counts and dropout of genes.

Thinning each count with one rate is what a shallower sequencing of the same cell would have given. Every random
number depends on the seed, the epoch, the cell and the view alone, not on batches, threads or workers.
"""

from __future__ import annotations

from dataclasses import replace

import numba
import numpy as np

from scforge.data.cells import CellBlock
from scforge.data.random import cell_keys, uniform, word

__all__ = ["thin"]

_SINGLY = 8.0
"""Counts up to which each trial has a random number of its own; of more, 64 share some."""
_NORMAL_ABOVE = 1000.0
"""Counts above which the binomial is drawn from its normal approximation (relative error of its spread < 0.1 %)."""


@numba.njit(cache=True)
def _binomial(n, p, key, position):
    """Draw from Binomial(n, p); return the draw and the next position of the random sequence."""
    if n > _NORMAL_ABOVE:
        radius = np.sqrt(-2.0 * np.log(1.0 - uniform(key, position)))
        angle = 2.0 * np.pi * uniform(key, position + np.uint64(1))
        draw = np.rint(n * p + np.sqrt(n * p * (1.0 - p)) * radius * np.cos(angle))
        return min(max(draw, 0.0), n), position + np.uint64(2)
    if n > _SINGLY:
        return _trials(np.int64(n), p, key, position)
    draw = 0.0
    for _ in range(int(n)):
        draw += 1.0 if uniform(key, position) < p else 0.0
        position += np.uint64(1)
    return draw, position


@numba.njit(cache=True)
def _trials(n, p, key, position):
    """Draw from Binomial(n, p), 64 trials at a time.

    Bit k of each word belongs to trial k. A trial compares its random number with `p` bit by bit, the highest first,
    and is decided at the first that differs, so that half of the trials are decided with each word.
    """
    if p >= 1.0:
        return np.float64(n), position
    threshold = np.uint64(p * 9007199254740992.0)  # 53 bits
    kept = np.uint64(0)
    for start in range(0, n, 64):
        size = min(n - start, 64)
        open_ = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - size)
        digit = np.uint64(53)
        while open_ != 0 and digit > 0:
            digit -= np.uint64(1)
            bits = word(key, position)
            position += np.uint64(1)
            if (threshold >> digit) & np.uint64(1):
                kept += _ones(open_ & ~bits)
                open_ &= bits
            else:
                open_ &= ~bits
    return np.float64(kept), position


@numba.njit(cache=True)
def _ones(bits):
    """Count the ones among 64 bits, by sums of neighbouring fields (Warren 2012, Hacker's Delight, 5-1)."""
    bits -= (bits >> np.uint64(1)) & np.uint64(0x5555555555555555)
    bits = (bits & np.uint64(0x3333333333333333)) + ((bits >> np.uint64(2)) & np.uint64(0x3333333333333333))
    bits = (bits + (bits >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (bits * np.uint64(0x0101010101010101)) >> np.uint64(56)


@numba.njit(cache=True)
def _thin(indptr, genes, counts, totals, keys, keep_low, keep_high, drop_low, drop_high, log_uniform):
    n_cells = len(indptr) - 1
    out_indptr = np.zeros(n_cells + 1, dtype=np.int64)
    out_genes = np.empty(len(genes), dtype=np.int32)
    out_counts = np.empty(len(counts), dtype=np.float32)
    out_totals = np.empty(n_cells, dtype=np.float64)
    size = 0
    for cell in range(n_cells):
        key = keys[cell]
        draw = uniform(key, np.uint64(0))
        keep = keep_low * (keep_high / keep_low) ** draw if log_uniform else keep_low + (keep_high - keep_low) * draw
        drop = drop_low + (drop_high - drop_low) * uniform(key, np.uint64(1))
        position = np.uint64(2)
        before, after = 0.0, 0.0
        for entry in range(indptr[cell], indptr[cell + 1]):
            count = np.float64(counts[entry])
            draw, position = _binomial(count, keep, key, position)
            before += count
            after += draw
            hidden = uniform(key, position) < drop
            position += np.uint64(1)
            if draw > 0 and not hidden:
                out_genes[size] = genes[entry]
                out_counts[size] = draw
                size += 1
        # The genes outside the vocabulary are thinned as one, which has the same distribution.
        rest, position = _binomial(max(totals[cell] - before, 0.0), keep, key, position)
        out_totals[cell] = max(after + rest, 1.0)
        out_indptr[cell + 1] = size
    return out_indptr, out_genes[:size].copy(), out_counts[:size].copy(), out_totals


def thin(
    block: CellBlock,
    *,
    keep: tuple[float, float],
    gene_dropout: tuple[float, float],
    seed: int,
    epoch: int,
    view: int,
    log_uniform: bool = False,
) -> CellBlock:
    """Return one random view of each cell.

    Parameters
    ----------
    block
        Cells with whole-numbered counts.
    keep
        Range from which the share of counts to keep is drawn, one for each cell; above zero if `log_uniform`.
    gene_dropout
        Range from which the rate of hidden genes is drawn, one for each cell. A hidden gene is not in the view, but
        its counts stay in the library size.
    seed, epoch, view
        What the random numbers depend on, besides the cell.
    log_uniform
        Draw the logarithm of the share evenly, rather than the share: as many cells are seen at a tenth to a third of
        their depth as at a third to all of it.

    Returns
    -------
    Block of the same cells, with fewer counts and genes.
    """
    keys = cell_keys(block.rows, seed=seed, epoch=epoch, stream=view + 1)
    indptr, genes, counts, totals = _thin(
        block.indptr, block.genes, block.counts, block.totals, keys, float(keep[0]), float(keep[1]),
        float(gene_dropout[0]), float(gene_dropout[1]), log_uniform,
    )  # fmt: skip
    # Each view is a draw of its own for a tokenizer that samples.
    return replace(block, indptr=indptr, genes=genes, counts=counts, totals=totals, draw=(block.draw << 16) + view)
