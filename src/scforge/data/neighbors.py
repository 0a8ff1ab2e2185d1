"""Mutual nearest neighbours of cells, within batches and across them.

Shapes: N cells, D dimensions, P pairs.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from scforge.data.compressed import log1p_cp10k_rows
from scforge.errors import DataError

if TYPE_CHECKING:
    from scforge.data.cells import CellSource

__all__ = ["harmonised", "mutual_neighbors", "neighbor_weights", "principal_components"]

_MOST_BATCHES = 10
"""Batches up to which all pairs of them are compared; their number grows with the square."""
_SHARE = 0.1
"""Largest share of a batch that may be neighbours of a cell."""
_CELLS_OF_CLUSTER, _FEWEST_CLUSTERS, _MOST_CLUSTERS = 30, 2, 100
"""Harmony's own choice of the number of its clusters, save that it has none for fewer than 15 cells."""
_FEWEST_CELLS = 10
"""Cells from which on they are corrected; harmonypy 2.1 may never return from two of them."""
_PAIRS_AT_ONCE = 100_000
"""Pairs of which cosines are computed at once, to bound the memory."""


def principal_components(cells: CellSource, n_comps: int = 50) -> np.ndarray:
    """Return principal components of the log1p CP10K values of cells in memory, float32, shape (N, D).

    There are one fewer than cells or genes where these are fewer than `n_comps`.
    """
    from sklearn.decomposition import PCA

    values = log1p_cp10k_rows(sparse.csr_matrix(cells.counts), np.maximum(cells.totals, 1.0))
    dims = min(n_comps, min(values.shape) - 1)
    if dims < 1:
        raise DataError(f"{values.shape[0]} cells of {values.shape[1]} genes have no neighbours; take more of them.")
    if (np.asarray(values.max(axis=0).todense()) == np.asarray(values.min(axis=0).todense())).all():
        return np.zeros((values.shape[0], dims), dtype=np.float32)  # of cells that are all alike
    found = PCA(dims, svd_solver="arpack", random_state=0).fit_transform(values)
    return np.asarray(found, dtype=np.float32)


def harmonised(coordinates: np.ndarray, batches: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Return coordinates of cells, shape (N, D), after Harmony [1]_ with its defaults, float32.

    Parameters
    ----------
    coordinates
        Principal components of cells, shape (N, D).
    batches
        Batch of each cell, shape (N,). With one batch there is nothing to correct, and the coordinates come back; so
        do those of fewer than ten cells.
    seed
        Seed of the first clusters.

    References
    ----------
    .. [1] Korsunsky et al. (2019), Nature Methods 16, 1289-1296.

    Examples
    --------
    >>> batches = np.repeat([0, 1], 60)
    >>> coordinates = np.random.default_rng(0).normal(size=(120, 5)) + batches[:, None]
    >>> corrected = harmonised(coordinates, batches)
    >>> bool(abs(corrected[:60].mean() - corrected[60:].mean()) < 0.8)
    True
    """
    import harmonypy
    import pandas as pd
    import torch

    if len(np.unique(batches)) < 2 or len(coordinates) < _FEWEST_CELLS:
        return np.asarray(coordinates, dtype=np.float32)
    n_clusters = max(_FEWEST_CLUSTERS, min(round(len(coordinates) / _CELLS_OF_CLUSTER), _MOST_CLUSTERS))
    # Its threads are as many as those of everything else; releases before 2 have one.
    options = {}
    if "ncores" in inspect.signature(harmonypy.run_harmony).parameters:
        options["ncores"] = torch.get_num_threads()
    # Its logger tells of each iteration.
    log = logging.getLogger("harmonypy")
    level, state = log.level, np.random.get_state()
    log.setLevel(logging.ERROR)
    try:
        found = harmonypy.run_harmony(
            np.asarray(coordinates, dtype=np.float64),
            pd.DataFrame({"batch": np.asarray(batches).astype(str)}),
            ["batch"],
            nclust=n_clusters,
            random_state=seed,
            verbose=False,
            **options,
        )
    finally:
        log.setLevel(level)
        np.random.set_state(state)  # which old releases seed
    corrected = np.asarray(found.Z_corr)
    # The orientation has changed between releases of harmonypy.
    return np.asarray(corrected if corrected.shape == coordinates.shape else corrected.T, dtype=np.float32)


def mutual_neighbors(
    coordinates: np.ndarray, batches: np.ndarray, *, across: int = 30, within: int = 5, seed: int = 0
) -> sparse.csr_matrix:
    """Return which cells are each other's near neighbours.

    Two cells of different batches are mutual neighbours if each is among the `across` cells of its batch that are
    nearest to the other [1]_; so cells of a type that another batch lacks have few or none there. Distances are taken
    of directions, which the depth of a batch changes less. With more than ten batches each is compared with ten others,
    drawn at random, as the number of pairs grows with the square.

    Parameters
    ----------
    coordinates
        Coordinates of cells, e.g. principal components, shape (N, D).
    batches
        Number of the batch of each cell, integer, shape (N,).
    across, within
        Neighbours of a cell in another batch, and in its own; a tenth of the cells of that batch at most, so
        none in batches of fewer than ten; 0 for none.
    seed
        Seed of the choice of batches.

    Returns
    -------
    Symmetric matrix of booleans, shape (N, N), without a diagonal.

    References
    ----------
    .. [1] Haghverdi et al. (2018), Nature Biotechnology 36, 421-427.

    Examples
    --------
    >>> types, batches = np.array([0, 1] * 20), np.repeat([0, 1], 20)
    >>> coordinates = np.random.default_rng(0).normal(0, 0.1, (40, 2)) + np.where(types[:, None], [5, 0], [0, 5])
    >>> rows, columns = mutual_neighbors(coordinates, batches).nonzero()
    >>> bool((types[rows] == types[columns]).all())
    True
    """
    directions = _directions(coordinates)
    names = np.unique(batches)
    members = {name: np.flatnonzero(batches == name) for name in names}
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    if within:
        pairs += [_mutual(directions, rows, rows, within) for rows in members.values()]
    if across:
        pairs += [_mutual(directions, members[a], members[b], across) for a, b in _compared(names, seed)]
    rows, columns = np.concatenate(pairs).T
    n_cells = len(coordinates)
    found = sparse.csr_matrix((np.ones(len(rows), dtype=bool), (rows, columns)), shape=(n_cells, n_cells))
    found = (found + found.T).astype(bool).tocsr()
    found.sort_indices()
    return found


def neighbor_weights(coordinates: np.ndarray, pairs: sparse.csr_matrix, *, temperature: float | None) -> np.ndarray:
    """Return how much each neighbour of a cell weighs: exp(cosine / temperature), and 1 for the nearest.

    Mutual neighbours in small batches of many types are often of another type, and lie farther off than those of the
    same. Neighbours of all batches are weighed together: those in a batch that lies farther off weigh less.

    Parameters
    ----------
    coordinates
        Coordinates of cells, shape (N, D); the cosine is that of their directions.
    pairs
        Neighbours of each cell, shape (N, N), as of :func:`mutual_neighbors`.
    temperature
        Smaller values favour the nearest neighbours; None gives all the same weight.

    Returns
    -------
    A weight in [0, 1] for each stored entry of `pairs`, in its order, float64, shape (P,).

    Examples
    --------
    >>> coordinates = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> pairs = sparse.csr_matrix(np.array([[0, 1, 1], [1, 0, 0], [1, 0, 0]], dtype=bool))
    >>> neighbor_weights(coordinates, pairs, temperature=0.5).round(3)
    array([1.   , 0.135, 1.   , 1.   ])
    """
    if temperature is None or not pairs.nnz:
        return np.ones(pairs.nnz)
    directions = _directions(coordinates)
    rows, columns = np.repeat(np.arange(len(coordinates)), np.diff(pairs.indptr)), pairs.indices
    cosines = np.empty(pairs.nnz)
    for start in range(0, pairs.nnz, _PAIRS_AT_ONCE):
        part = slice(start, start + _PAIRS_AT_ONCE)
        cosines[part] = (directions[rows[part]] * directions[columns[part]]).sum(axis=1)
    nearest = np.full(len(coordinates), -np.inf)
    np.maximum.at(nearest, rows, cosines)
    return np.exp((cosines - nearest[rows]) / temperature)


def _directions(coordinates: np.ndarray) -> np.ndarray:
    """Return coordinates of length 1, float32; a zero vector stays zero."""
    lengths = np.linalg.norm(coordinates, axis=1, keepdims=True)
    return np.asarray(coordinates / np.maximum(lengths, 1e-12), dtype=np.float32)


def _compared(names: np.ndarray, seed: int) -> list[tuple[int, int]]:
    """Return the pairs of batches that are compared."""
    if len(names) <= _MOST_BATCHES + 1:
        return [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    circle = np.random.default_rng(seed).permutation(names)
    steps = range(1, _MOST_BATCHES // 2 + 1)
    return [pair for step in steps for pair in zip(circle, np.roll(circle, -step), strict=True)]


def _mutual(directions: np.ndarray, rows: np.ndarray, others: np.ndarray, k: int) -> np.ndarray:
    """Return the mutual neighbours of cells at `rows` and at `others`, which may be the same, shape (P, 2)."""
    same = rows is others
    there = _nearest(directions, rows, others, k, same)
    back = there if same else _nearest(directions, others, rows, k, same)
    mutual = there.multiply(back.T).tocoo()
    return np.stack([rows[mutual.row], others[mutual.col]], axis=1)


def _nearest(directions: np.ndarray, rows: np.ndarray, others: np.ndarray, k: int, same: bool) -> sparse.csr_matrix:
    """Return which of `others` are nearest to each of `rows`, not counting itself."""
    from sklearn.neighbors import NearestNeighbors

    k = min(k, int(_SHARE * len(others)))
    if k < 1:
        return sparse.csr_matrix((len(rows), len(others)), dtype=bool)
    index = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(directions[others])
    # Without cells to ask about, each cell of the index is asked about, and is no neighbour of its own.
    found = index.kneighbors(None if same else directions[rows], return_distance=False)
    indptr = np.arange(0, found.size + 1, k)
    return sparse.csr_matrix((np.ones(found.size, dtype=bool), found.ravel(), indptr), shape=(len(rows), len(others)))
