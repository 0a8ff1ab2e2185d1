"""Find genes that only some files or batches measure; their missing counts are read as 0 and look like a batch effect.

Shapes: N cells, S files or batches, G genes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import sparse

from scforge.errors import warn

_MAX_PARTIAL = 0.02
"""Maximum fraction of counts in genes that some source does not measure; above it, a warning is issued. Sources from
which rarely detected genes were removed stay below it."""

_BROAD, _CERTAIN = 0.25, 20.0
"""A gene that is detected in at least this fraction of the cells elsewhere, and for which at least this number of
counts and of cells with counts are expected in a batch, is detected there if it is measured: by chance, none is found
with a probability of exp(-20). A gene of few cells may be missing with their type."""

_FEWEST, _SHARE = 5, 0.05
"""Number, and fraction, of such genes without counts from which a batch lacks genes. Fewer can be genes of the Y
chromosome, or of a cell type that the batch does not contain."""

_MIN_SHARED = 0.25
"""Minimum fraction of the detected genes that all batches must measure to leave the other genes out."""

_MOST = 3
"""Number of batches to name in a message."""


def warn_of_partial(share: float, measured: np.ndarray) -> None:
    """Warn if the sources measure different genes.

    Parameters
    ----------
    share
        Fraction of all counts in genes that some source does not measure.
    measured
        Genes of each source, bool, shape (S, G).
    """
    n_any, n_all = int(measured.any(axis=0).sum()), int(measured.all(axis=0).sum())
    if share > _MAX_PARTIAL:
        warn(
            f"{share:.0%} of the counts are in genes that are not measured in all sources ({n_any - n_all:,} of "
            f"{n_any:,} genes), and the zeros in their place look like a batch effect; to integrate the sources, pass "
            "a vocab of shared genes (GeneVocab.intersection), or create Encoder with its default vocab, which leaves "
            "these genes out."
        )


def share_of_partial(sums: np.ndarray, measured: np.ndarray) -> float:
    """Return the fraction of counts in genes that some source does not measure, given the sum of each gene, (G,)."""
    return float(sums[~measured.all(axis=0)].sum() / max(sums.sum(), 1.0))


def lacking_genes(counts: sparse.csr_matrix, groups: np.ndarray) -> np.ndarray:
    """Return the genes that each batch does not seem to measure, bool, shape (S, G).

    A gene without any count in a batch is not measured if its detection in other batches makes this impossible by
    chance, see above. If a batch lacks such genes, rarer genes without counts are taken as not measured as well, if at
    least one count is expected, or more if it lacks few. Batches with fewer than about 20 cells are never reported.

    Parameters
    ----------
    counts
        Counts of cells, shape (N, G).
    groups
        Batch of each cell, from 0 on, integers, shape (N,); -1 for cells without a batch, which are ignored.
    """
    rows = np.flatnonzero(groups >= 0)
    n_groups = int(groups.max(initial=-1)) + 1
    of_group = sparse.csr_matrix((np.ones(len(rows)), (groups[rows], rows)), shape=(n_groups, len(groups)))
    n_cells = np.bincount(groups[rows], minlength=n_groups)
    detected = counts.astype(bool).astype(np.float64)
    sums_sg, cells_sg = (np.asarray((of_group @ matrix).todense()) for matrix in (counts, detected))
    present = sums_sg > 0
    in_all = present.all(axis=0)
    # Batches are as deep as the genes that all of them measure; without any, all cells count the same.
    depths = sums_sg[:, in_all].sum(axis=1) if in_all.any() else n_cells.astype(np.float64)
    elsewhere = np.maximum(np.stack([n_cells @ present, depths @ present]), 1e-12)
    rates, means = cells_sg.sum(axis=0) / elsewhere[0], sums_sg.sum(axis=0) / elsewhere[1]
    expected_sg = depths[:, None] * means
    certain = (rates >= _BROAD) & (expected_sg >= _CERTAIN) & (n_cells[:, None] * rates >= _CERTAIN)
    n_missing, n_certain = (certain & ~present).sum(axis=1), certain.sum(axis=1)
    lacks = n_missing >= np.maximum(_FEWEST, _SHARE * n_certain)
    # A rarer gene without counts is more likely not measured than not detected (Bayes, with the share of the certain).
    share = np.clip(n_missing / np.maximum(n_certain, 1), 1e-3, 1 - 1e-3)
    least = np.maximum(np.log((1 - share) / share), 1.0)
    return lacks[:, None] & ~present & (expected_sg >= least[:, None])


def enough_shared(counts: sparse.csr_matrix, lacking: np.ndarray) -> bool:
    """Return whether the genes that all batches measure suffice, given the genes that some batch lacks, shape (G,)."""
    detected = np.bincount(counts.indices[counts.data > 0], minlength=counts.shape[1]) > 0
    return bool((detected & ~lacking).sum() >= _MIN_SHARED * detected.sum())


def warn_of_lacking(lacking: np.ndarray, names: Sequence[str], column: str, what_now: str) -> None:
    """Warn about batches that lack genes.

    Parameters
    ----------
    lacking
        Genes that each batch lacks, bool, shape (S, G).
    names
        Names of the batches.
    column
        Name of the column of the batches.
    what_now
        End of the sentence: what is done about it, or what to do.
    """
    numbers = lacking.sum(axis=1)
    few = [f"{str(name)!r} lacks {number:,}" for name, number in zip(names, numbers, strict=True) if number]
    more = f" and {len(few) - _MOST} more" if len(few) > _MOST else ""
    warn(
        f"some batches of obs[{column!r}] do not measure genes that others measure ({', '.join(few[:_MOST])}{more} "
        f"of {lacking.shape[1]:,} genes), and the zeros in their place look like a batch effect; {what_now}."
    )
