"""Do neighbors in the embedding share a label?"""

from __future__ import annotations

import numpy as np
import pandas as pd
from sklearn.neighbors import NearestNeighbors

from scforge.errors import DataError
from scforge.eval import Benchmark


class NeighbourPurity(Benchmark):
    """Mean share of the nearest neighbors of a cell that have its label; cells without a label take no part.

    Parameters
    ----------
    labels_key
        Column of obs with the labels.
    n_neighbors
        Number of neighbors.
    """

    metrics = ("neighbor_purity",)

    def __init__(self, labels_key: str, n_neighbors: int = 15) -> None:
        self.labels_key = labels_key
        self.n_neighbors = n_neighbors

    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        """Return the share, from 0 to 1."""
        if self.labels_key not in obs:
            raise DataError("is not a column of obs.", labels_key=self.labels_key)
        labels = obs[self.labels_key]
        labeled = np.asarray(labels.notna())
        found = NearestNeighbors(n_neighbors=self.n_neighbors).fit(embedding[labeled])
        codes = pd.factorize(labels[labeled])[0]
        neighbors = found.kneighbors(return_distance=False)  # without the cell itself
        return {"neighbor_purity": float((codes[neighbors] == codes[:, None]).mean())}
