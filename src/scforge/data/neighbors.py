"""Find mutual nearest neighbors of cells, within and across batches.

Shapes: N cells, D dimensions, P pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from scforge.data.checks import log1p_cp10k_rows
from scforge.errors import DataError

if TYPE_CHECKING:
    from scforge.data.cells import CellSource


_MAX_BATCHES = 10
"""Maximum number of other batches to which a batch is compared; the number of all pairs grows quadratically."""
_SHARE = 0.1
"""Maximum fraction of a batch that may be neighbors of one cell."""
_CELLS_OF_CLUSTER, _MIN_CLUSTERS, _MAX_CLUSTERS = 30, 2, 100
"""Cells per cluster, and minimum and maximum number of clusters, as in Harmony, which requires at least 15 cells."""
_MIN_CELLS = 10
"""Minimum number of cells for a correction."""
_SIGMA, _THETA, _ALPHA, _MIN_SHARE = 0.1, 2.0, 0.2, 1e-5
"""Harmony's sigma, theta, ridge relative to the expected number of cells, and minimum batch fraction to correct."""
_MAX_ROUNDS, _CLUSTER_STEPS, _KMEANS_STEPS, _BLOCKS, _TOLERANCE = 10, 4, 25, 20, 0.01
"""Number of corrections, clustering steps per correction, k-means steps, and blocks of cells; tolerance."""
_TINY = 1e-12
_QUERY_CLUSTERS, _QUERY_ROUNDS, _QUERY_RIDGE, _CELLS_OF_QUERY_CLUSTER = 30, 3, 10.0, 10
"""Query clusters, rounds of neighbor search, ridge (in cells) toward the mean shift, and minimum cells per cluster."""
SHARPNESS = 2 / _SIGMA
"""Cells belong to clusters with probabilities proportional to exp(SHARPNESS * cosine), as in Harmony."""
_PAIRS_AT_ONCE = 100_000
"""Number of pairs whose cosines are computed at once, to limit memory."""


def principal_components(cells: CellSource, n_comps: int = 50) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return principal components of the log1p CP10K values of cells, and the projection for other cells.

    See :func:`components_of`.
    """
    return components_of(
        log1p_cp10k_rows(sparse.csr_matrix(cells.counts), np.maximum(cells.totals, 1.0)), n_comps=n_comps
    )


def components_of(values: sparse.csr_matrix, n_comps: int = 50) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return principal components of the values of cells, and the projection for other cells.

    The number of components is `n_comps`, or one less than the number of cells or genes if that is smaller.

    Returns
    -------
    The components (shape (N, D)), the loadings (shape (G, D)) and an offset (shape (D,)), all float32. The components
    of other cells are their values times the loadings, minus the offset.
    """
    from sklearn.decomposition import PCA

    dims = min(n_comps, min(values.shape) - 1)
    if dims < 1:
        raise DataError(
            f"{values.shape[0]} cells and {values.shape[1]} genes are too few to find neighbors; use more cells "
            "or genes."
        )
    if (np.asarray(values.max(axis=0).todense()) == np.asarray(values.min(axis=0).todense())).all():
        sizes = [(values.shape[0], dims), (values.shape[1], dims), (dims,)]
        return tuple(np.zeros(size, dtype=np.float32) for size in sizes)  # type: ignore[return-value]  # all alike
    pca = PCA(dims, svd_solver="arpack", random_state=0)
    return (
        pca.fit_transform(values).astype(np.float32),
        pca.components_.T.astype(np.float32),
        (pca.components_ @ pca.mean_).astype(np.float32),
    )


def harmony_correct(coordinates: np.ndarray, batches: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Return the coordinates of cells after correction with Harmony [1]_ and its defaults, float32, shape (N, D).

    The diversity penalty and the ridge follow Harmony 2, as in harmonypy 2 and scanpy 1.13.

    Parameters
    ----------
    coordinates
        Principal components of cells, shape (N, D).
    batches
        Batch of each cell, shape (N,). With one batch, or fewer than ten cells, the coordinates are returned unchanged.
    seed
        Random seed for the initial clusters and the order in which cells are assigned.

    References
    ----------
    .. [1] Korsunsky et al. (2019), Nature Methods 16, 1289-1296.

    Examples
    --------
    >>> batches = np.repeat([0, 1], 60)
    >>> coordinates = np.random.default_rng(0).normal(size=(120, 5)) + batches[:, None]
    >>> corrected = harmony_correct(coordinates, batches)
    >>> bool(abs(corrected[:60].mean() - corrected[60:].mean()) < 0.8)
    True
    """
    _, codes = np.unique(batches, return_inverse=True)
    fitted = fit_harmony(coordinates, codes, seed=seed)
    return np.asarray(coordinates if fitted is None else fitted.corrected, dtype=np.float32)


@dataclass(frozen=True)
class HarmonyFit:
    """What Harmony found: K clusters of cells, and how it moves the cells of each of B batches in them.

    Attributes
    ----------
    corrected
        Coordinates of the cells after correction, float64, shape (N, D).
    centroids
        Direction of each cluster among corrected cells, float64, shape (K, D).
    shifts
        How far the cells of a batch lie from the cells of all batches in a cluster, float64, shape (B, K, D).
    log_penalties
        Logarithm of the factor by which cells of a batch are assigned to a cluster less often, because the cluster has
        more of its cells than expected, float64, shape (B, K).
    """

    corrected: np.ndarray
    centroids: np.ndarray
    shifts: np.ndarray
    log_penalties: np.ndarray


def fit_harmony(coordinates: np.ndarray, codes: np.ndarray, *, seed: int = 0) -> HarmonyFit | None:
    """Fit Harmony, see :func:`harmony_correct`; `codes` are batches from 0 on.

    Returns None for one batch, or for fewer than ten cells.
    """
    n_cells, n_batches = len(coordinates), int(codes.max(initial=0)) + 1
    if n_batches < 2 or n_cells < _MIN_CELLS:
        return None
    original = np.asarray(coordinates, dtype=np.float64)
    n_clusters = max(_MIN_CLUSTERS, min(round(n_cells / _CELLS_OF_CLUSTER), _MAX_CLUSTERS))
    members = _one_hot(codes, n_batches)
    rows = [np.flatnonzero(codes == batch) for batch in range(n_batches)]
    batch_share = np.bincount(codes) / n_cells
    generator = np.random.default_rng(seed)
    directions = _unit(original)
    # Soft assignments of cells to clusters, shape (N, clusters), first by the distance to the centroids alone.
    assigned = np.exp(2 / _SIGMA * (directions @ _first_centroids(directions, n_clusters, seed).T - 1))
    assigned /= assigned.sum(axis=1, keepdims=True)
    before = np.inf
    for _ in range(_MAX_ROUNDS):
        # Observed and expected numbers of cells per batch and cluster, shape (batches, clusters).
        observed, expected = members.T @ assigned, np.outer(batch_share, assigned.sum(axis=0))
        for _ in range(_CLUSTER_STEPS):
            cosines = directions @ _unit(assigned.T @ directions).T
            close = np.exp(2 / _SIGMA * (cosines - 1))
            for block in np.array_split(generator.permutation(n_cells), min(_BLOCKS, n_cells)):
                observed -= members[block].T @ assigned[block]
                expected -= np.outer(batch_share, assigned[block].sum(axis=0))
                assigned[block] = close[block] * (((expected + 1) / (observed + expected + 1)) ** _THETA)[codes[block]]
                assigned[block] /= assigned[block].sum(axis=1, keepdims=True)
                observed += members[block].T @ assigned[block]
                expected += np.outer(batch_share, assigned[block].sum(axis=0))
        shifts = _batch_shifts(original, rows, assigned)
        corrected = original.copy()
        for of_batch, shift in zip(rows, shifts, strict=True):
            corrected[of_batch] -= assigned[of_batch] @ shift
        directions = _unit(corrected)
        entropy = (assigned * np.log(np.maximum(assigned, _TINY))).sum()
        mixing = (observed * np.log((observed + expected + 1) / (expected + 1))).sum()
        loss = 2 * (assigned * (1 - cosines)).sum() + _SIGMA * (entropy + _THETA * mixing)
        if before - loss < _TOLERANCE * abs(loss):
            break
        before = loss
    penalties = _THETA * np.log((expected + 1) / (observed + expected + 1))
    return HarmonyFit(corrected, _unit(assigned.T @ directions), shifts, penalties)


def _batch_shifts(original: np.ndarray, rows: list[np.ndarray], assigned: np.ndarray) -> np.ndarray:
    """Return the effect of each batch (at `rows`) by ridge regression in each cluster, around the cluster's mean."""
    observed = np.stack([assigned[of_batch].sum(axis=0) for of_batch in rows])
    sums = np.stack([assigned[of_batch].T @ original[of_batch] for of_batch in rows])
    n_cells = np.array([len(of_batch) for of_batch in rows])[:, None]
    ridge = _ALPHA * n_cells / len(original) * observed.sum(axis=0)
    ridge[observed < _MIN_SHARE * n_cells] = np.inf  # a batch without cells in the cluster is not corrected
    # The normal equations have one column per batch; the equations of the batches are solved first.
    held = 1 - observed / (observed + ridge)
    mean = (held[:, :, None] * sums).sum(axis=0) / np.maximum((held * observed).sum(axis=0), _TINY)[:, None]
    return (sums - observed[:, :, None] * mean) / (observed + ridge)[:, :, None]


def _first_centroids(directions: np.ndarray, n_clusters: int, seed: int) -> np.ndarray:
    """Return the centroids of spherical k-means, shape (clusters, D)."""
    from sklearn.cluster import kmeans_plusplus

    # scikit-learn's own k-means depends on the number of threads.
    centroids = _unit(kmeans_plusplus(directions, n_clusters, random_state=seed)[0])
    for _ in range(_KMEANS_STEPS):
        nearest = _one_hot((directions @ centroids.T).argmax(axis=1), n_clusters)
        centroids = _unit(nearest.T @ directions + _TINY * centroids)  # which keeps those without cells
    return centroids


def _one_hot(codes: np.ndarray, n_codes: int) -> sparse.csr_matrix:
    return sparse.csr_matrix((np.ones(len(codes)), codes, np.arange(len(codes) + 1)), shape=(len(codes), n_codes))


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _TINY)


def mutual_neighbors(
    coordinates: np.ndarray, batches: np.ndarray, *, across: int = 30, within: int = 5, seed: int = 0
) -> sparse.csr_matrix:
    """Find pairs of mutual nearest neighbors.

    Two cells of different batches are mutual neighbors if each is among the `across` nearest neighbors of the other
    within its own batch [1]_. If a cell type is missing in another batch, its cells therefore have few or no neighbors
    in that batch. The distance is the cosine distance, which depends less on sequencing depth than the Euclidean
    distance. With more than ten batches, each batch is compared with ten others, sampled at random, because the number
    of pairs grows quadratically with the number of batches.

    Parameters
    ----------
    coordinates
        Coordinates of cells, e.g. principal components, shape (N, D).
    batches
        Integer batch code of each cell, shape (N,).
    across, within
        Number of neighbors of a cell in each other batch, and in its own batch; 0 to disable. At most a tenth of the
        cells of a batch are neighbors of a cell, so cells have no neighbors in batches of fewer than ten cells.
    seed
        Random seed for the choice of batches.

    Returns
    -------
    Symmetric boolean matrix with an empty diagonal, shape (N, N).

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
    directions = directions_of(coordinates)
    names = np.unique(batches)
    members = {name: np.flatnonzero(batches == name) for name in names}
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    if within:
        pairs += [_mutual(directions, rows, rows, within) for rows in members.values()]
    if across:
        compared: Iterable[tuple[int, int]] = itertools.combinations(names, 2)
        if len(names) > _MAX_BATCHES + 1:
            circle = np.random.default_rng(seed).permutation(names)
            steps = range(1, _MAX_BATCHES // 2 + 1)
            compared = [pair for step in steps for pair in zip(circle, np.roll(circle, -step), strict=True)]
        pairs += [_mutual(directions, members[a], members[b], across) for a, b in compared]
    rows, columns = np.concatenate(pairs).T
    n_cells = len(coordinates)
    matrix = sparse.csr_matrix((np.ones(len(rows), dtype=bool), (rows, columns)), shape=(n_cells, n_cells))
    matrix = (matrix + matrix.T).astype(bool).tocsr()
    matrix.sort_indices()
    return matrix


def neighbors_by_label(
    pairs: sparse.csr_matrix, coordinates: np.ndarray, batches: np.ndarray, labels: np.ndarray, *, across: int = 30
) -> sparse.csr_matrix:
    """Drop pairs of cells with different labels, and add mutual neighbors in other batches among cells of one label.

    Parameters
    ----------
    pairs
        Neighbors from :func:`mutual_neighbors`, shape (N, N).
    coordinates, batches, across
        See :func:`mutual_neighbors`.
    labels
        Integer label code of each cell, shape (N,); negative if the label is unknown. Pairs with a cell of unknown
        label are kept.

    Returns
    -------
    Symmetric boolean matrix with an empty diagonal, shape (N, N).

    Examples
    --------
    >>> pairs = sparse.csr_matrix(np.ones((3, 3), dtype=bool) & ~np.eye(3, dtype=bool))
    >>> neighbors_by_label(pairs, np.eye(3), np.array([0, 1, 1]), np.array([0, 1, -1])).toarray().astype(int)
    array([[0, 0, 1],
           [0, 0, 1],
           [1, 1, 0]])
    """
    rows, columns = pairs.nonzero()
    differ = (labels[rows] >= 0) & (labels[columns] >= 0) & (labels[rows] != labels[columns])
    kept = [np.stack([rows, columns])[:, ~differ]]
    for label in np.unique(labels[labels >= 0]):
        members = np.flatnonzero(labels == label)
        matches = mutual_neighbors(coordinates[members], batches[members], across=across, within=0)
        kept.append(members[np.stack(matches.nonzero())])
    rows, columns = np.concatenate(kept, axis=1)
    matrix = sparse.csr_matrix((np.ones(len(rows), dtype=bool), (rows, columns)), shape=pairs.shape)
    matrix.sort_indices()
    return matrix


def neighbor_weights(coordinates: np.ndarray, pairs: sparse.csr_matrix, *, temperature: float | None) -> np.ndarray:
    """Return the weight exp(cosine / temperature) of each neighbor of a cell, relative to the nearest neighbor.

    In small batches with many types, mutual neighbors are often of another type and farther away than neighbors of the
    same type. The neighbors in all batches are weighted together, so neighbors in a more distant batch receive less
    weight.

    Parameters
    ----------
    coordinates
        Coordinates of cells, shape (N, D). The cosine is computed between their directions.
    pairs
        Neighbors of each cell, shape (N, N), e.g. from :func:`mutual_neighbors`.
    temperature
        Smaller values favor the nearest neighbors. If None, all neighbors have the same weight.

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
    directions = directions_of(coordinates)
    rows, columns = np.repeat(np.arange(len(coordinates)), np.diff(pairs.indptr)), pairs.indices
    cosines = np.empty(pairs.nnz)
    for start in range(0, pairs.nnz, _PAIRS_AT_ONCE):
        part = slice(start, start + _PAIRS_AT_ONCE)
        cosines[part] = (directions[rows[part]] * directions[columns[part]]).sum(axis=1)
    nearest = np.full(len(coordinates), -np.inf)
    np.maximum.at(nearest, rows, cosines)
    return np.exp((cosines - nearest[rows]) / temperature)


def n_query_clusters(n_cells: int) -> int:
    """Return the number of clusters that :func:`query_shifts` uses for `n_cells` cells."""
    return max(1, min(_QUERY_CLUSTERS, n_cells // _CELLS_OF_QUERY_CLUSTER))


def query_shifts(reference: np.ndarray, query: np.ndarray, *, across: int = 30) -> tuple[np.ndarray, ...]:
    """Compute shifts that move query embeddings onto a fixed reference.

    As in Symphony [1]_, each soft cluster of query cells has one shift, and a cell moves by the weighted mean shift of
    its clusters. The shift is the mean difference to mutual neighbors in the reference [2]_, shrunk toward the mean
    difference over all pairs. Cells of a type that is not in the reference have no mutual neighbors. They therefore
    move like the other cells, and not onto another type. Neighbors are searched again after the query has moved.

    Parameters
    ----------
    reference, query
        Embeddings, shapes (R, D) and (Q, D).
    across
        See :func:`mutual_neighbors`.

    Returns
    -------
    The reference mean (shape (D,)), the direction of each cluster from this mean (shape (K, D)), and the shift of each
    cluster (shape (K, D)), all float32. With weights a proportional to exp(SHARPNESS * cosine), the query z becomes z +
    a @ shifts.

    References
    ----------
    .. [1] Kang et al. (2021), Nature Communications 12, 5890.
    .. [2] Haghverdi et al. (2018), Nature Biotechnology 36, 421-427.

    Examples
    --------
    >>> reference = np.random.default_rng(0).normal(size=(200, 5))
    >>> center, clusters, shifts = query_shifts(reference, reference[:100] + 0.5)
    >>> bool(np.abs(shifts.mean(axis=0) + 0.5).max() < 0.3)
    True
    """
    center = reference.mean(axis=0, dtype=np.float64)
    fixed, start = reference - center, query - center
    n_reference, n_clusters = len(reference), n_query_clusters(len(query))
    clusters, shifts = np.zeros((n_clusters, len(center))), np.zeros((n_clusters, len(center)))
    sides = np.repeat([0, 1], [n_reference, len(query)])
    if len(query) >= _CELLS_OF_QUERY_CLUSTER:
        directions = _unit(start)
        clusters = _first_centroids(directions, n_clusters, 0)
        assigned = np.exp(SHARPNESS * (directions @ clusters.T - 1))
        assigned /= assigned.sum(axis=1, keepdims=True)
        moved = start
        for _ in range(_QUERY_ROUNDS):
            pairs = mutual_neighbors(np.concatenate([fixed, moved]), sides, across=across, within=0)
            pairs = pairs[n_reference:, :n_reference].astype(np.float64)
            counts = np.asarray(pairs.sum(axis=1)).ravel()
            if not counts.any():
                break
            matched = counts > 0
            differences = (pairs[matched] @ fixed) / counts[matched, None] - start[matched]
            weights = assigned[matched]
            shifts = weights.T @ differences + _QUERY_RIDGE * differences.mean(axis=0)
            shifts /= (weights.sum(axis=0) + _QUERY_RIDGE)[:, None]
            moved = start + assigned @ shifts
    return tuple(part.astype(np.float32) for part in (center, clusters, shifts))


def directions_of(coordinates: np.ndarray) -> np.ndarray:
    """Return coordinates scaled to unit length, float32; a zero vector remains zero."""
    lengths = np.linalg.norm(coordinates, axis=1, keepdims=True)
    return np.asarray(coordinates / np.maximum(lengths, _TINY), dtype=np.float32)


def _mutual(directions: np.ndarray, rows: np.ndarray, others: np.ndarray, k: int) -> np.ndarray:
    """Return pairs of mutual neighbors between `rows` and `others`, which may be the same array, shape (P, 2)."""
    from sklearn.neighbors import NearestNeighbors

    matrices = []
    for cells, among in [(rows, others)] if rows is others else [(rows, others), (others, rows)]:
        n_nearest = min(k, int(_SHARE * len(among)))
        if n_nearest < 1:
            return np.zeros((0, 2), dtype=np.int64)
        index = NearestNeighbors(n_neighbors=n_nearest, algorithm="brute").fit(directions[among])
        # Without query cells, each cell of the index is queried, and is not returned as its own neighbor.
        nearest = index.kneighbors(None if rows is others else directions[cells], return_distance=False).ravel()
        entries = (np.ones(nearest.size, dtype=bool), nearest, np.arange(0, nearest.size + 1, n_nearest))
        matrices.append(sparse.csr_matrix(entries, shape=(len(cells), len(among))))
    mutual = matrices[0].multiply(matrices[-1].T).tocoo()
    return np.stack([rows[mutual.row], others[mutual.col]], axis=1)
