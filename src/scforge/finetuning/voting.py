"""One label for all cells of a cluster, as CellTypist votes.

Shapes: N cells, D dimensions.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from scforge._checks import check_share
from scforge.errors import DataError

__all__ = ["HETEROGENEOUS", "majority_vote", "over_cluster", "resolution_for"]

HETEROGENEOUS = "Heterogeneous"
"""What cells of a cluster are called of which no label has the share that was asked for."""

_RESOLUTIONS = ((5_000, 5.0), (20_000, 10.0), (40_000, 15.0), (100_000, 20.0), (200_000, 25.0))
_N_NEIGHBORS = 15


def resolution_for(n_cells: int) -> float:
    """Return the resolution that CellTypist (1.7) clusters so many cells with.

    Examples
    --------
    >>> [resolution_for(n) for n in (4_999, 5_000, 1_000_000)]
    [5.0, 10.0, 30.0]
    """
    return next((resolution for limit, resolution in _RESOLUTIONS if n_cells < limit), 30.0)


def over_cluster(embedding: np.ndarray, *, resolution: float | None = None, seed: int = 0) -> np.ndarray:
    """Return many small Leiden clusters of cells, as text, shape (N,).

    Parameters
    ----------
    embedding
        Shape (N, D).
    resolution
        Of Leiden; None takes that of :func:`resolution_for`.
    seed
        Seed of the neighbours and of Leiden.
    """
    import anndata
    import scanpy as sc

    n_cells = len(embedding)
    if n_cells < 3:  # no graph
        return np.array([str(i) for i in range(n_cells)])
    cells = anndata.AnnData(obs=pd.DataFrame(index=[str(i) for i in range(n_cells)]), obsm={"X": embedding})
    sc.pp.neighbors(cells, n_neighbors=min(_N_NEIGHBORS, n_cells - 1), use_rep="X", random_state=seed)
    sc.tl.leiden(
        cells,
        resolution=resolution_for(n_cells) if resolution is None else resolution,
        flavor="igraph",
        n_iterations=2,
        directed=False,
        random_state=seed,
    )
    return np.asarray(cells.obs["leiden"], dtype=object).astype(str)


def majority_vote(labels: np.ndarray, clusters: pd.Series | np.ndarray, *, min_share: float = 0.0) -> np.ndarray:
    """Return for each cell the label that most cells of its cluster have, as text, shape (N,).

    The rule of CellTypist's ``majority_vote``: of equally frequent labels the first by name, and "Heterogeneous" where
    the most frequent label has less than `min_share` of the cluster.

    Parameters
    ----------
    labels
        Label of each cell, shape (N,).
    clusters
        Cluster of each cell, shape (N,).
    min_share
        In [0, 1]; 0 gives every cluster a label.

    Raises
    ------
    DataError
        If a cell has no cluster.

    Examples
    --------
    >>> majority_vote(np.array(["B", "B", "T", "T"]), np.array([0, 0, 0, 1])).tolist()
    ['B', 'B', 'B', 'T']
    """
    check_share("min_share", min_share)
    codes, names = pd.factorize(clusters)
    if (codes < 0).any():
        raise DataError(
            f"majority_voting: {int((codes < 0).sum())} of {len(codes)} cells have no cluster; give them one."
        )
    label_codes, label_names = pd.factorize(np.asarray(labels, dtype=object), sort=True)
    votes = np.zeros((len(names), len(label_names)), dtype=np.int64)
    np.add.at(votes, (codes, label_codes), 1)
    winners = np.asarray(label_names, dtype=object)[votes.argmax(axis=1)]
    shares = votes.max(axis=1) / votes.sum(axis=1)
    winners[shares < min_share] = HETEROGENEOUS
    return winners[codes].astype(str)
