"""Mutual nearest neighbors of training cells, from which a neighbor of each cell is sampled in each epoch.

Shapes: N cells of a source, B cells of a batch, D components, P pairs of neighbors.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse

from scforge._checks import check_positive
from scforge.data.cells import CellBlock, Cells, choose_chunks
from scforge.data.checks import log1p_cp10k_rows
from scforge.data.neighbors import (
    directions_of,
    harmony_correct,
    mutual_neighbors,
    neighbor_weights,
    neighbors_by_label,
    principal_components,
)
from scforge.data.sampling import cell_keys

_STREAM = 0x6E656172  # "near": neighbors and views use separate random numbers
_NONE, _UNKNOWN = -1, -2
_TIE = 1e-5
"""Cosines that differ by less are computed again, because rounding depends on the other cells in a block."""


def check_temperature(temperature: float | None) -> float | None:
    """Return the `temperature` of neighbors. Raises :class:`~scforge.errors.OptionError` unless it is positive."""
    if temperature is None:
        return None
    return check_positive("temperature", temperature, hint="None samples all neighbors uniformly")


class NeighborPool:
    """A sample of training cells in memory, with their mutual nearest neighbors.

    Parameters
    ----------
    cells
        All cells.
    train_rows
        Rows of the training cells, ascending.
    batches
        Batch of every cell. If None, all cells form a single batch.
    labels
        Label of every cell, negative if unknown. If None, no label is known.
    across, within, space, temperature, max_cells
        See :class:`~scforge.training.NeighborDenoising`.
    """

    def __init__(
        self,
        cells: Cells,
        train_rows: np.ndarray,
        batches: np.ndarray | None,
        labels: np.ndarray | None = None,
        *,
        across: int,
        within: int,
        temperature: float | None,
        max_cells: int,
        space: str = "harmony",
    ) -> None:
        groups = None if batches is None else batches[train_rows]
        rows = choose_chunks(len(cells), max_cells, cells.chunk_size, rows=train_rows, groups=groups)
        self.rows = rows
        self.cells = cells.sample(len(rows), rows=rows)
        self.batches, self.labels = batches, labels
        of_pool = np.zeros(len(rows), dtype=np.int64) if batches is None else batches[rows]
        components, self.loadings, self.offset = principal_components(self.cells)
        self.members = {batch: np.flatnonzero(of_pool == batch) for batch in np.unique(of_pool)}
        self.directions = directions_of(components)
        self.places = np.full(len(cells), _NONE, dtype=np.int32)
        """Position in the pool of every cell, or of the cell that represents it; computed on demand."""
        self.places[train_rows] = _UNKNOWN
        self.places[rows] = np.arange(len(rows))
        if space == "harmony":
            components = harmony_correct(components, of_pool)
        self.pairs: sparse.csr_matrix = mutual_neighbors(components, of_pool, across=across, within=within)
        if labels is not None:
            self.pairs = neighbors_by_label(self.pairs, components, of_pool, labels[rows], across=across)
        rows_of = np.repeat(of_pool, np.diff(self.pairs.indptr))
        far = sparse.csr_matrix(
            (rows_of != of_pool[self.pairs.indices], self.pairs.indices, self.pairs.indptr), shape=self.pairs.shape
        )
        self.has_across = np.asarray(far.sum(axis=1)).ravel() > 0
        """Whether each cell has a neighbor in another batch, bool, shape (number of cells in the pool,)."""
        weights = neighbor_weights(components, self.pairs, temperature=temperature)
        self.cumulative = np.concatenate([[0.0], np.cumsum(weights)])
        """Cumulative weights of the pairs, from 0 on, float64, shape (P + 1,)."""

    def neighbors(self, block: CellBlock, *, epoch: int, seed: int) -> tuple[CellBlock, np.ndarray]:
        """Return a neighbor of each cell (or an arbitrary cell), and whether it is a true neighbor, float32 (B,)."""
        places = self._pool_positions(block)
        starts, stops = self.pairs.indptr[places], self.pairs.indptr[places + 1]
        has = (places >= 0) & (stops > starts)
        # 64 bits are rounded to 53, so the largest would become 1.
        share = np.minimum(cell_keys(block.rows, seed=seed, epoch=epoch, stream=_STREAM) / 2.0**64, 1 - 1e-9)
        chosen = np.zeros(len(block), dtype=np.int64)
        below, above = self.cumulative[starts], self.cumulative[stops]
        drawn = np.searchsorted(self.cumulative, below + share * (above - below), side="right") - 1
        chosen[has] = self.pairs.indices[np.clip(drawn, starts, stops - 1)[has]]
        if self.labels is not None:
            # A cell outside the pool may have another label than the cell that represents it.
            own, of_neighbor = self.labels[block.rows], self.labels[self.rows[chosen]]
            has &= (own < 0) | (of_neighbor < 0) | (own == of_neighbor)
        return self.cells.block(chosen, draw=block.draw), has.astype(np.float32)

    def _pool_positions(self, block: CellBlock) -> np.ndarray:
        """Return the pool position of each cell or of the nearest cell in its batch, int32 (B,); -1 without one."""
        outside = np.flatnonzero(self.places[block.rows] == _UNKNOWN)
        if len(outside):
            shape = (len(block), len(self.loadings))
            counts = sparse.csr_matrix((block.counts, block.genes, block.indptr), shape=shape)[outside]
            values = log1p_cp10k_rows(counts, np.maximum(block.totals[outside], 1.0))
            here = directions_of(values @ self.loadings - self.offset)
            rows = block.rows[outside]
            of_rows = np.zeros(len(rows), dtype=np.int64) if self.batches is None else self.batches[rows]
            nearest = np.full(len(rows), _NONE, dtype=np.int32)
            for batch in np.unique(of_rows):
                if (members := self.members.get(batch)) is not None:
                    own = of_rows == batch
                    nearest[own] = members[_nearest(here[own], self.directions[members])]
            self.places[rows] = nearest
        return self.places[block.rows]


def _nearest(directions: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the index of the first nearest row in `others`, shape (M, D), for each row in `directions` (N, D)."""
    cosines = directions @ others.T
    nearest = cosines.argmax(axis=1)
    is_close = cosines >= cosines.max(axis=1, keepdims=True) - _TIE
    for row in np.flatnonzero(is_close.sum(axis=1) > 1):
        candidates = np.flatnonzero(is_close[row])
        exact = (directions[row].astype(np.float64) * others[candidates]).sum(axis=1)
        nearest[row] = candidates[exact.argmax()]
    return nearest
