"""How well an embedding mixes batches and keeps cell types apart, by the figures of scib-metrics.

Shapes: N cells, D dimensions, K neighbours.
"""

from __future__ import annotations

import os
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scforge._checks import check_count
from scforge.errors import DataError
from scforge.eval.base import Benchmark, register_benchmark
from scforge.eval.label_prediction import check_finite, labels_of

if TYPE_CHECKING:
    from scib_metrics.nearest_neighbors import NeighborsResults

__all__ = ["BatchIntegration"]

_NARROW = 15
"""Neighbours of the graph whose connectivity is looked at, as scib-metrics' own benchmark has it."""

_FEWEST_CELLS = 16


@register_benchmark("batch_integration")
class BatchIntegration(Benchmark):
    """scIB's figures of biology that was kept and of batches that were mixed, as scib-metrics computes them.

    They are those of [1]_, under the names that scib-metrics gives them: all lie about in [0, 1], and higher is better.
    The neighbours are exact. Cells without a label or batch take no part.

    Parameters
    ----------
    labels_key
        Column of obs with the cell types.
    batch_key
        Column of obs with the batches.
    n_neighbors
        Neighbours, each cell itself among them, for the LISI figures; fewer where there are fewer cells.

    References
    ----------
    .. [1] Luecken et al. (2022), Nature Methods 19, 41-50.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> obs = pd.DataFrame({"label": np.repeat(["a", "b"], 50), "batch": np.tile(["x", "y"], 50)})
    >>> embedding = np.random.default_rng(0).normal(size=(100, 2)) + (obs["label"] == "a").to_numpy()[:, None] * 10
    >>> scores = BatchIntegration("label", "batch").run(embedding, obs)
    >>> round(scores["silhouette_label"], 1), scores["nmi_ari_cluster_labels_kmeans_ari"]
    (0.9, 1.0)
    """

    metrics = (
        "isolated_labels",
        "nmi_ari_cluster_labels_kmeans_nmi",
        "nmi_ari_cluster_labels_kmeans_ari",
        "silhouette_label",
        "clisi_knn",
        "silhouette_batch",
        "bras",
        "ilisi_knn",
        "graph_connectivity",
    )

    def __init__(self, labels_key: str, batch_key: str, n_neighbors: int = 90) -> None:
        check_count("n_neighbors", n_neighbors, "cells", least=_NARROW)
        self.labels_key = labels_key
        self.batch_key = batch_key
        self.n_neighbors = n_neighbors

    def check(self, obs: pd.DataFrame) -> None:
        """Raise :class:`~scforge.errors.DataError` where :meth:`run` would."""
        self._columns(obs)

    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        """Return one figure for each of :attr:`metrics`.

        Raises
        ------
        DataError
            If a column is missing, there are fewer than two labels or batches, or no label has cells of two batches.
        """
        scib = _scib_metrics()
        rows, labels, batches = self._columns(obs)
        cells = check_finite(embedding)[rows].astype(np.float32)
        wide = _neighbors(cells, min(self.n_neighbors, len(cells) - 1))
        kmeans = scib.nmi_ari_cluster_labels_kmeans(cells, labels)
        scores = {
            "isolated_labels": scib.isolated_labels(cells, labels, batches),
            "nmi_ari_cluster_labels_kmeans_nmi": kmeans["nmi"],
            "nmi_ari_cluster_labels_kmeans_ari": kmeans["ari"],
            "silhouette_label": scib.silhouette_label(cells, labels),
            "clisi_knn": scib.clisi_knn(wide, labels),
            "silhouette_batch": scib.silhouette_batch(cells, labels, batches),
            "bras": scib.bras(cells, labels, batches),
            "ilisi_knn": scib.ilisi_knn(wide, batches),
            "graph_connectivity": scib.graph_connectivity(wide.subset_neighbors(_NARROW), labels),
        }
        return {name: float(score) for name, score in scores.items()}

    def _columns(self, obs: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows of the cells that take part, and their labels and batches."""
        with_label, _ = labels_of(obs, self.labels_key)
        with_batch, _ = labels_of(obs, self.batch_key, argument="batch_key")
        rows = np.flatnonzero(with_label & with_batch)
        labels, batches = (np.asarray(obs[key].iloc[rows].astype(str)) for key in (self.labels_key, self.batch_key))
        n_labels, n_batches = len(np.unique(labels)), len(np.unique(batches))
        if len(rows) < _FEWEST_CELLS or min(n_labels, n_batches) < 2:
            raise DataError(
                f"batch_integration needs at least {_FEWEST_CELLS} cells with a label and a batch, of 2 labels and 2 "
                f"batches, but there are {len(rows)} of {n_labels} and {n_batches}; score more cells."
            )
        pairs = pd.DataFrame({"label": labels, "batch": batches})
        n_cells, n_pairs = pairs.groupby("label").size(), pairs.drop_duplicates().groupby("label").size()
        if not ((n_pairs > 1) & (n_pairs < n_cells)).any():
            raise DataError(
                f"no label of obs[{self.labels_key!r}] has cells of several batches of obs[{self.batch_key!r}], so "
                "mixing cannot be told from biology; choose other columns or score more cells."
            )
        return rows, labels, batches


def _scib_metrics() -> ModuleType:
    # JAX would take three quarters of a GPU that a model is being trained on.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=ImportWarning, message="Tensorflow not installed")  # umap's
        import scib_metrics
    return scib_metrics


def _neighbors(cells: np.ndarray, n_neighbors: int) -> NeighborsResults:
    """Find the nearest cells of each, itself among them."""
    from scib_metrics.nearest_neighbors import NeighborsResults
    from sklearn.neighbors import NearestNeighbors

    distances, indices = NearestNeighbors(n_neighbors=n_neighbors).fit(cells).kneighbors(cells)
    return NeighborsResults(indices=indices, distances=distances)
