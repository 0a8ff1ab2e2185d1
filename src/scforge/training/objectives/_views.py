"""Views of a cell with subsampled counts, and detection of collapsed embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numba
import numpy as np
import torch

from scforge._checks import check_share
from scforge.data.cells import CellBlock
from scforge.data.sampling import cell_keys, uniform, word
from scforge.errors import OptionError, warn
from scforge.tokenizers.base import TokenBatch, Tokenizer, concatenate, pad
from scforge.training.objectives.base import Objective

_SINGLY = 8.0
"""Maximum count for which each trial uses a separate random number; above, groups of 64 trials share numbers."""
_NORMAL_ABOVE = 1000.0
"""Count above which the binomial is sampled from its normal approximation (relative error of the spread < 0.1%)."""

_COVARIANCE, _DIRECTION, _CELLS = "geometry_covariance", "geometry_direction", "geometry_cells"

_MIN_CELLS = 8
"""Mean number of cells per step below which the covariance is not estimated."""

_MIN_DIMS = 3
"""Number of dimensions below which the effective rank is not informative: one of two dimensions may suffice."""

_LINE = 1.01
"""Effective rank below which cells lie on a line: other directions explain less than a thousandth of the variance."""

_NARROW, _THIN = 0.99, 1.5
"""Mean cosine above which, and effective rank below which, cells lie on a line far from the origin."""

_POINT = 0.9999
"""Mean cosine above which all cells lie at one point: they differ by less than 1% of their length."""


@numba.njit(cache=True, nogil=True)
def _binomial(n, p, key, position):
    """Sample from Binomial(n, p); return the sample and the next position of the random sequence."""
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


@numba.njit(cache=True, nogil=True)
def _trials(n, p, key, position):
    """Sample from Binomial(n, p), 64 trials at a time.

    Bit k of each word belongs to trial k. A trial compares its random number with `p` bit by bit, starting with the
    highest bit, and is decided at the first bit that differs. Half of the trials are therefore decided with each word.
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


@numba.njit(cache=True, nogil=True)
def _ones(bits):
    """Count the set bits of a 64-bit integer by sums of neighboring fields (Warren 2012, Hacker's Delight, 5-1)."""
    bits -= (bits >> np.uint64(1)) & np.uint64(0x5555555555555555)
    bits = (bits & np.uint64(0x3333333333333333)) + ((bits >> np.uint64(2)) & np.uint64(0x3333333333333333))
    bits = (bits + (bits >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (bits * np.uint64(0x0101010101010101)) >> np.uint64(56)


@numba.njit(cache=True, nogil=True)
def _downsample(indptr, genes, counts, totals, keys, keep_low, keep_high, drop_low, drop_high, log_uniform):
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
            if draw > 0 and uniform(key, position) >= drop:
                out_genes[size] = genes[entry]
                out_counts[size] = draw
                size += 1
            position += np.uint64(1)
        # The genes outside the vocabulary are thinned as one, which has the same distribution.
        rest, position = _binomial(max(totals[cell] - before, 0.0), keep, key, position)
        out_totals[cell] = max(after + rest, 1.0)
        out_indptr[cell + 1] = size
    return out_indptr, out_genes[:size].copy(), out_counts[:size].copy(), out_totals


def downsample_counts(
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
        Cells with integer counts.
    keep
        Range from which the fraction of counts to keep is sampled for each cell; must be above zero if `log_uniform`.
    gene_dropout
        Range from which the rate of masked genes is sampled for each cell. A masked gene is not part of the view, but
        its counts remain in the library size.
    seed, epoch, view
        Values that determine the random numbers, together with the cell.
    log_uniform
        Whether to sample the logarithm of the fraction uniformly instead of the fraction itself. Fractions between a
        tenth and a third are then as frequent as fractions between a third and 1.

    Returns
    -------
    A block with the same cells, but fewer counts and genes.
    """
    keys = cell_keys(block.rows, seed=seed, epoch=epoch, stream=view + 1)
    indptr, genes, counts, totals = _downsample(
        block.indptr, block.genes, block.counts, block.totals, keys, float(keep[0]), float(keep[1]),
        float(gene_dropout[0]), float(gene_dropout[1]), log_uniform,
    )  # fmt: skip
    # Each view is a separate sample for a tokenizer that samples.
    return replace(block, indptr=indptr, genes=genes, counts=counts, totals=totals, draw=(block.draw << 16) + view)


def tokenized_views(
    blocks: Sequence[CellBlock],
    tokenizer: Tokenizer,
    *,
    keep: tuple[float, float],
    gene_dropout: tuple[float, float],
    epoch: int,
    seed: int,
) -> TokenBatch:
    """Tokenize one view of each block, block after block; each position uses separate random numbers."""
    parts = [
        tokenizer.ragged(
            downsample_counts(block, keep=keep, gene_dropout=gene_dropout, seed=seed, epoch=epoch, view=view)
        )
        for view, block in enumerate(blocks)
    ]
    return pad(concatenate(parts))


def downsampled(block: CellBlock, share: Sequence[float] | None, *, epoch: int, seed: int) -> CellBlock:
    """Return cells with a fraction of their counts, sampled log-uniformly in a range. If None, keeps all counts."""
    if share is None:
        return block
    keep = (share[0], share[1])
    return downsample_counts(
        block, keep=keep, gene_dropout=(0.0, 0.0), seed=seed, epoch=epoch, view=0, log_uniform=True
    )


class SeesViews(Objective):
    """An objective that presents cells as views, with the options `keep_min`, `keep_max` and `gene_dropout`."""

    keep_min: float
    keep_max: float
    gene_dropout: float

    def _set_views(self, keep_min: float, keep_max: float, gene_dropout: float) -> None:
        """Check and store the view options.

        Raises
        ------
        OptionError
            If an option cannot be used.
        """
        self.keep_min, self.keep_max = check_share("keep_min", keep_min), check_share("keep_max", keep_max)
        self.gene_dropout = check_share("gene_dropout", gene_dropout)
        if not 0 < self.keep_min <= self.keep_max or self.gene_dropout == 1:
            raise OptionError(
                f"and keep_max={keep_max} must satisfy 0 < keep_min <= keep_max <= 1, and "
                f"gene_dropout={gene_dropout} must satisfy 0 <= gene_dropout < 1.",
                keep_min=keep_min,
            )

    def _views(self, blocks: Sequence[CellBlock], tokenizer: Tokenizer, *, epoch: int, seed: int) -> TokenBatch:
        """Tokenize one view of each block."""
        keep, dropout = (self.keep_min, self.keep_max), (0.0, self.gene_dropout)
        return tokenized_views(blocks, tokenizer, keep=keep, gene_dropout=dropout, epoch=epoch, seed=seed)


def geometry_moments(z_bd: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return moments of embeddings; :func:`geometry` uses their means over the cells of an epoch.

    The covariance is computed within each step, because the embedding drifts over an epoch, and the drift would appear
    as variation between cells.

    Parameters
    ----------
    z_bd
        Embeddings, shape (B, D).

    Returns
    -------
    The covariance of the cells (shape (D, D)), their mean direction (shape (D,)), and the number of cells in the step
    (a scalar), all float32 and detached.
    """
    with torch.autocast(z_bd.device.type, enabled=False):
        z_bd = z_bd.detach().float()
        centered_bd = z_bd - z_bd.mean(dim=0)
        covariance = centered_bd.T @ centered_bd / len(z_bd)
        direction = torch.nn.functional.normalize(z_bd, dim=1).mean(dim=0)
        return {_COVARIANCE: covariance, _DIRECTION: direction, _CELLS: z_bd.new_full((), len(z_bd))}


def geometry(means: dict[str, np.ndarray]) -> dict[str, float]:
    """Replace the moments from :func:`geometry_moments` in the means of an epoch with metrics of the geometry.

    Returns
    -------
    ``effective_rank``
        Exponential of the entropy of the covariance eigenvalues, divided by their sum (Roy and Vetterli 2007): 1 if
        cells lie on a line, D if they vary equally in all directions, 0 if they are identical.
    ``mean_cosine``
        Mean cosine similarity of two random cells, i.e. the squared length of the mean direction: 1 if all vectors have
        the same direction.

    The mapping is empty if steps contain fewer than 8 cells on average, e.g. in a small validation set, because such
    embeddings always appear collapsed. It is also empty if a value is not finite.
    """
    covariance, direction, cells = (means.pop(name) for name in (_COVARIANCE, _DIRECTION, _CELLS))
    if cells < _MIN_CELLS or not (np.isfinite(covariance).all() and np.isfinite(direction).all()):
        return {}
    eigenvalues = np.linalg.eigvalsh(covariance.astype(np.float64))
    positive = eigenvalues[eigenvalues > 0]
    shares = positive / positive.sum()
    rank = float(np.exp(-np.sum(shares * np.log(shares)))) if len(positive) else 0.0
    return {"effective_rank": rank, "mean_cosine": float(np.sum(direction**2))}


def has_collapsed(figures: Mapping[str, float], n_dims: int) -> bool:
    """Return whether the metrics of :func:`geometry` show that an embedding with `n_dims` dimensions has collapsed.

    The embedding has collapsed if one of these conditions holds:

    - Cells lie on a line: the effective rank is below 1.01, out of at least 3 dimensions. A slightly higher rank is not
      necessarily a collapse: two distant groups of cells reach 1.05.
    - Cells lie on a line far from the origin: the mean cosine is above 0.99 and the effective rank is below 1.5, out of
      at least 3 dimensions. A mean cosine above 0.99 alone is not a collapse: an embedding that is not centered can be
      far from the origin and still separate cells in many dimensions.
    - All cells lie at one point: the mean cosine is above 0.9999 in at least 2 dimensions, so cells differ by less than
      1% of their length.
    """
    if not figures:
        return False
    rank, cosine = figures["effective_rank"], figures["mean_cosine"]
    on_a_line = n_dims >= _MIN_DIMS and (rank < _LINE or (rank < _THIN and cosine > _NARROW))
    return on_a_line or (n_dims > 1 and cosine > _POINT)


class CollapseWatch:
    """Track the geometry of an embedding per epoch; the first process warns once if it collapses."""

    def __init__(self) -> None:
        self._collapsed = False

    def figures(self, means: dict[str, np.ndarray]) -> dict[str, float]:
        """Remove the moments from the means of an epoch; return the metrics of :func:`geometry`."""
        from lightning.fabric.utilities.rank_zero import rank_zero_only

        n_dims = len(means[_DIRECTION])
        figures = geometry(means)
        if not self._collapsed and has_collapsed(figures, n_dims):
            self._collapsed = True
            if not rank_zero_only.rank:
                warn(
                    f"the embedding has collapsed: its effective rank is {figures['effective_rank']:.2f} of {n_dims} "
                    f"dimensions and the mean cosine of two cells is {figures['mean_cosine']:.4f}; train with a larger "
                    "weight of 'joint_embedding', a smaller agreement of 'neighbor_denoising', or a smaller lr."
                )
        return figures
