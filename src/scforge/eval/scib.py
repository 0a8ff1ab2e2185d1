"""Benchmarks of batch correction with scIB metrics."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scforge._checks import check_bool, check_choice, check_count
from scforge.errors import DataError, OptionError, listing
from scforge.eval.base import Benchmark, register_benchmark
from scforge.eval.label_prediction import check_embedding, check_names, texts_in

if TYPE_CHECKING:
    from scib_metrics.benchmark import Benchmarker
    from scib_metrics.nearest_neighbors import NeighborsResults


_NARROW = 15
"""Number of neighbors in the graph for graph connectivity, as in the scib-metrics benchmark."""

_MIN_CELLS = 16

_BIO = {
    "isolated_labels": "isolated_labels",
    "leiden_nmi": "nmi_ari_cluster_labels_leiden_nmi",
    "leiden_ari": "nmi_ari_cluster_labels_leiden_ari",
    "kmeans_nmi": "nmi_ari_cluster_labels_kmeans_nmi",
    "kmeans_ari": "nmi_ari_cluster_labels_kmeans_ari",
    "silhouette_label": "silhouette_label",
    "clisi": "clisi_knn",
}
_BATCH = {
    "bras": "bras",
    "ilisi": "ilisi_knn",
    "kbet": "kbet_per_label",
    "graph_connectivity": "graph_connectivity",
    "pcr_comparison": "pcr_comparison",
}
_MEANS = {"total": "Total", "bio": "Bio conservation", "batch": "Batch correction"}
_NAMES = {**_MEANS, **_BIO, **_BATCH}
"""Mapping from names in scforge to names in scib-metrics."""

BIO = tuple(name for name in _BIO.values() if "leiden" not in name)
BATCH = ("bras", "ilisi_knn", "graph_connectivity")
_BIO_WEIGHT = 0.6

_WIDEST = 90
"""Number of neighbors of a cell, including the cell itself, in the scib-metrics benchmark."""

_DRAWN = 1_000
"""Maximum number of cells for a resampled score, whose cost grows quadratically."""

NEIGHBORS = ("exact", "pynndescent")


@register_benchmark("batch_integration")
class BatchIntegration(Benchmark):
    """scIB scores of biological conservation and batch correction, as computed by scib-metrics.

    These are the scores of [1]_, named as in scib-metrics. All scores lie approximately in [0, 1], and higher is
    better. Nearest neighbors are computed exactly. Cells without a label or batch are left out.

    Parameters
    ----------
    labels_key
        Column of ``obs`` with the cell types.
    batch_key
        Column of ``obs`` with the batches.
    n_neighbors
        Number of neighbors for the LISI scores, including the cell itself; fewer if there are fewer cells.

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

    metrics = (*BIO, "silhouette_batch", *BATCH)

    def __init__(self, labels_key: str, batch_key: str, n_neighbors: int = 90) -> None:
        check_count("n_neighbors", n_neighbors, "cells", least=_NARROW)
        self.labels_key = labels_key
        self.batch_key = batch_key
        self.n_neighbors = n_neighbors

    def check(self, obs: pd.DataFrame) -> None:
        """Raise :class:`~scforge.errors.DataError` in the cases in which :meth:`run` would."""
        self._columns(obs)

    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        """Return one score for each of :attr:`metrics`.

        Raises
        ------
        DataError
            If a column is missing, there are fewer than two labels or batches, or no label has cells of two batches.
        """
        scib = _scib_metrics()
        rows, labels, batches = self._columns(obs)
        cells = check_embedding(embedding, len(obs))[rows].astype(np.float32)
        wide = nearest_neighbors(cells, min(self.n_neighbors, len(cells) - 1))
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
        """Return the rows of the scored cells, and their labels and batches."""
        columns = texts_in(obs, self.labels_key), texts_in(obs, self.batch_key, argument="batch_key")
        rows = np.flatnonzero(columns[0].notna() & columns[1].notna())
        labels, batches = (np.asarray(texts, dtype=object)[rows].astype(str) for texts in columns)
        n_labels, n_batches = len(np.unique(labels)), len(np.unique(batches))
        if len(rows) < _MIN_CELLS or min(n_labels, n_batches) < 2:
            size = f"{len(rows)} cells with {n_labels} labels and {n_batches} batches"
            raise DataError(
                f"batch_integration needs {_MIN_CELLS} cells with at least 2 labels and 2 batches, but there are "
                f"{size}."
            )
        pairs = pd.DataFrame({"label": labels, "batch": batches})
        n_cells, n_pairs = pairs.groupby("label").size(), pairs.drop_duplicates().groupby("label").size()
        if not ((n_pairs > 1) & (n_pairs < n_cells)).any():
            named = f"label of obs[{self.labels_key!r}] has cells of several batches of obs[{self.batch_key!r}]"
            raise DataError(f"no {named}, so batch mixing cannot be distinguished from biology; use other columns.")
        return rows, labels, batches


def _scib_metrics() -> ModuleType:
    # JAX would take three quarters of a GPU that a model is being trained on.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=ImportWarning, message="Tensorflow not installed")  # umap's
        import scib_metrics
    return scib_metrics


def nearest_neighbors(cells: np.ndarray, n_neighbors: int) -> NeighborsResults:
    """Find the nearest neighbors of each cell, including the cell itself."""
    from scib_metrics.nearest_neighbors import NeighborsResults
    from sklearn.neighbors import NearestNeighbors

    distances, indices = NearestNeighbors(n_neighbors=n_neighbors).fit(cells).kneighbors(cells)
    return NeighborsResults(indices=indices, distances=distances)


def integration_scores(
    embedding: np.ndarray, obs: pd.DataFrame, *, labels_key: str, batch_key: str
) -> dict[str, float]:
    """Return ``bio``, ``batch`` and ``total``, and the metrics that they average.

    ``bio`` is the mean of the scIB scores of biological conservation, ``batch`` the mean of the scores of batch
    correction (BRAS, iLISI, graph connectivity), and ``total`` is 0.6 bio + 0.4 batch [1]_. Scores are not scaled to
    the range of the compared methods, so they do not depend on the other methods.

    References
    ----------
    .. [1] Luecken et al. (2022), Nature Methods 19, 41-50.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> obs = pd.DataFrame({"label": np.repeat(["a", "b"], 50), "batch": np.tile(["x", "y"], 50)})
    >>> embedding = np.random.default_rng(0).normal(size=(100, 2)) + (obs["label"] == "a").to_numpy()[:, None] * 10
    >>> scores = integration_scores(embedding, obs, labels_key="label", batch_key="batch")
    >>> list(scores)[:3], scores["total"] > 0.7
    (['bio', 'batch', 'total'], True)
    """
    figures = BatchIntegration(labels_key, batch_key).run(embedding, obs)
    bio = float(np.mean([figures[name] for name in BIO]))
    batch = float(np.mean([figures[name] for name in BATCH]))
    total = _BIO_WEIGHT * bio + (1 - _BIO_WEIGHT) * batch
    return {"bio": bio, "batch": batch, "total": total, **{name: figures[name] for name in (*BIO, *BATCH)}}


@register_benchmark("scib")
class Scib(Benchmark):
    """All scores of :class:`scib_metrics.benchmark.Benchmarker` for an embedding, and their means.

    ``bio`` is the mean of the scores of biological conservation, ``batch`` the mean of the scores of batch correction,
    and ``total`` is 0.6 bio + 0.4 batch, as in [1]_. All scores lie in [0, 1], and higher is better. The values are
    computed by scib-metrics and are not scaled to the range of the compared methods, so they do not depend on the other
    methods.

    Without ``batch_key`` there are only the scores of biological conservation, without ``isolated_labels``, which needs
    batches. ``pcr_comparison`` needs ``pre_integrated``. Means are over the available scores. Cells without a label or
    batch are left out.

    Parameters
    ----------
    labels_key
        Column of ``obs`` with the cell types.
    batch_key
        Column of ``obs`` with the batches. If None, leaves out scores that need batches.
    leiden
        Whether to compute NMI and ARI of Leiden clusters, at the best of ten resolutions.
    kbet
        Whether to compute kBET, which takes as long as all other scores together. The scib-metrics benchmark computes
        it by default and includes it in its means.
    neighbors
        ``"exact"``, or ``"pynndescent"``, the approximation that scib-metrics uses by default. With the approximation,
        scores are exactly equal to those of a ``Benchmarker`` with its defaults. With exact neighbors, they equal those
        of a ``Benchmarker`` prepared with exact neighbors.
    max_cells
        Maximum number of cells to score, sampled in proportion to the labels; the sample is the same for all
        embeddings. If None, scores all cells. Time and memory grow quadratically with their number.
    pre_integrated
        Coordinates of the cells before integration, e.g. principal components, with cell names as index, shape (at
        least N, any D). They are used for ``pcr_comparison``, the fraction of their batch variance that an embedding
        has removed, or 0 if batch variance increased.

    References
    ----------
    .. [1] Luecken et al. (2022), Nature Methods 19, 41-50.
    .. [2] Shao and Wu (1989), Annals of Statistics 17, 1176-1197, the delete-d jackknife.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> obs = pd.DataFrame({"label": np.repeat(["a", "b"], 60)})
    >>> embedding = np.random.default_rng(0).normal(size=(120, 2)) + (obs["label"] == "a").to_numpy()[:, None] * 10
    >>> scores = Scib("label", leiden=False).run(embedding, obs)
    >>> list(scores), scores["kmeans_ari"]
    (['bio', 'kmeans_nmi', 'kmeans_ari', 'silhouette_label', 'clisi'], 1.0)
    """

    metrics = tuple(_NAMES)
    n_draws = 5

    def __init__(
        self,
        labels_key: str,
        batch_key: str | None = None,
        leiden: bool = True,
        kbet: bool = False,
        neighbors: str = "exact",
        max_cells: int | None = 5_000,
        pre_integrated: pd.DataFrame | None = None,
    ) -> None:
        self.labels_key = labels_key
        self.batch_key = batch_key
        self.leiden = check_bool("leiden", leiden)
        self.kbet = check_bool("kbet", kbet)
        if max_cells is not None:
            check_count("max_cells", max_cells, "cells", least=_WIDEST + 1)
        self.neighbors = check_choice("neighbors", neighbors, NEIGHBORS)
        self.max_cells = max_cells
        if pre_integrated is not None and (batch_key is None or not isinstance(pre_integrated, pd.DataFrame)):
            raise OptionError(
                "must be a DataFrame with one row per cell, and requires batch_key.", argument="pre_integrated"
            )
        self.pre_integrated = pre_integrated
        self.metrics = self._computed()
        self.main = self.metrics[0]

    def _computed(self) -> tuple[str, ...]:
        """Return the names of the computed metrics."""
        wanted = self._wanted()
        means = list(_MEANS) if self.batch_key is not None else ["bio"]
        # Two functions of scib-metrics compute both NMI and ARI.
        functions = {name: theirs.removesuffix("_nmi").removesuffix("_ari") for name, theirs in (_BIO | _BATCH).items()}
        return (*means, *(name for name, function in functions.items() if wanted[function]))

    def before_integration(self, components: pd.DataFrame) -> Scib:
        """Return a copy with coordinates before integration, or the benchmark itself if these are set or not used."""
        if self.batch_key is None or self.pre_integrated is not None:
            return self
        other = copy.copy(self)
        other.pre_integrated = components
        other.metrics = other._computed()
        return other

    def check(self, obs: pd.DataFrame) -> None:
        """Raise :class:`~scforge.errors.DataError` in the cases in which :meth:`run` would.

        The checks also cover :meth:`run` after :meth:`before_integration`.
        """
        self._rows(obs)
        if self.batch_key is not None:
            check_names(obs)
        texts_in(obs, self.labels_key, warns=True)

    def describe(self, obs: pd.DataFrame) -> dict[str, str]:
        """Return the number of scored cells, and the units that are resampled for the intervals, if any."""
        n_cells = len(self._rows(obs))
        facts = {"cells scored": f"{n_cells:,} of {len(obs):,}"}
        return facts if min(n_cells // 2, _DRAWN) <= _WIDEST else facts | {"resampled": "cells"}

    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        """Return one score for each of :attr:`metrics`.

        ``kbet`` is NaN if no label has ten cells of several batches; it is then left out of the means.

        Raises
        ------
        DataError
            If a column is missing, there are fewer than 91 cells or two labels or batches, no label has cells of two
            batches, or `pre_integrated` lacks cells.
        """
        (_, figures), *_ = self.table({"embedding": embedding}, obs).iterrows()
        return {name: float(figures[name]) for name in self.metrics}

    def resampled(self, embedding: np.ndarray, obs: pd.DataFrame, *, n: int, seed: int) -> pd.DataFrame | None:
        """Return the scores on random subsets of the cells, rescaled to the spread expected for all cells.

        Each subset contains half of the cells, but at most 1,000, and preserves the proportion of each label. The
        scores of subsets of b of N cells vary around the score of all cells. Their spread is sqrt((N - b) / b) times
        the spread of the score of all cells around the true value [2]_. Deviations from the mean of the draws are
        therefore divided by this factor.

        Parameters
        ----------
        embedding, obs
            As in :meth:`run`.
        n
            Number of draws.
        seed
            Seed for the draws.

        Returns
        -------
        `n` rows, one column per metric, NaN if a subset cannot be scored; None if half of the cells are too few to be
        scored.
        """
        rows = self._rows(obs)
        size = min(len(rows) // 2, _DRAWN)
        if size <= _WIDEST:
            return None
        labels, rng = texts_in(obs, self.labels_key)[rows], np.random.default_rng(seed)
        parts = [rows[_drawn(labels, size, rng)] for _ in range(n)]
        table = self._on_parts(check_embedding(embedding, len(obs)), obs, parts)
        n_drawn = len(parts[0])
        return table.mean() + (table - table.mean()) * np.sqrt(n_drawn / (len(rows) - n_drawn))

    def table(self, embeddings: Mapping[str, np.ndarray], obs: pd.DataFrame) -> pd.DataFrame:
        """Return the scores of several embeddings of the same cells, one row per embedding.

        Parameters
        ----------
        embeddings
            A mapping from name to embedding, shape (N, D).
        obs
            Annotation of the cells, N rows.

        Raises
        ------
        DataError
            As in :meth:`run`.
        """
        rows = self._rows(obs)
        # Copies, because the k-means of scib-metrics shifts what it is given, there and back.
        cells = {
            name: check_embedding(embedding, len(obs))[rows].astype(np.float32)
            for name, embedding in embeddings.items()
        }
        _scib_metrics()
        with warnings.catch_warnings():
            # The docstrings document both: a metric that is 0, and one that is NaN.
            warnings.filterwarnings("ignore", "PCR comparison score is negative", UserWarning)
            warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
            benchmarker = self._benchmarker(cells, obs.iloc[rows])
            # scib-metrics collects garbage after each score, which looks at every object of a session: a third of a
            # second each time. Frozen, those that are there already are passed over.
            gc.freeze()
            try:
                benchmarker.benchmark()
            finally:
                gc.unfreeze()
            results = benchmarker.get_results(clean_names=False)
        results = results.rename(columns={theirs: ours for ours, theirs in _NAMES.items()})
        return results.loc[list(embeddings), list(self.metrics)].astype(np.float64)

    def _benchmarker(self, cells: dict[str, np.ndarray], obs: pd.DataFrame) -> Benchmarker:
        import anndata
        from scib_metrics.benchmark import BatchCorrection, Benchmarker, BioConservation

        labels = np.asarray(texts_in(obs, self.labels_key), dtype=object)
        columns = pd.DataFrame({"label": labels, "batch": "all"}, index=np.arange(len(obs)).astype(str))
        if self.batch_key is not None:
            columns["batch"] = np.asarray(texts_in(obs, self.batch_key, argument="batch_key"), dtype=object)
        before = next(iter(cells))  # not looked at where there is no pcr_comparison
        adata = anndata.AnnData(obs=columns, obsm=dict(cells))  # which it would add to
        if self.pre_integrated is not None:
            before = "before integration"
            adata.obsm[before] = self.pre_integrated.loc[obs.index].to_numpy(dtype=np.float32)
        wanted = self._wanted()
        bio = BioConservation(**{name: wanted[name] for name in BioConservation.__dataclass_fields__})
        batch = BatchCorrection(**{name: wanted[name] for name in BatchCorrection.__dataclass_fields__})
        benchmarker = Benchmarker(
            adata,
            "batch",
            "label",
            list(cells),
            bio_conservation_metrics=bio,
            batch_correction_metrics=None if self.batch_key is None else batch,
            pre_integrated_embedding_obsm_key=before,
            progress_bar=False,
        )
        benchmarker.prepare(neighbor_computer=nearest_neighbors if self.neighbors == "exact" else None)
        return benchmarker

    def _wanted(self) -> dict[str, bool]:
        """Return a mapping from scib-metrics score names to whether the score is computed."""
        batches = self.batch_key is not None
        return {
            "isolated_labels": batches,
            "nmi_ari_cluster_labels_leiden": self.leiden,
            "nmi_ari_cluster_labels_kmeans": True,
            "silhouette_label": True,
            "clisi_knn": True,
            "bras": batches,
            "ilisi_knn": batches,
            "kbet_per_label": batches and self.kbet,
            "graph_connectivity": batches,
            "pcr_comparison": batches and self.pre_integrated is not None,
            "sbee": False,
        }

    def _rows(self, obs: pd.DataFrame) -> np.ndarray:
        """Return the rows of the scored cells."""
        if self.batch_key is None:
            rows = np.flatnonzero(texts_in(obs, self.labels_key).notna())
        else:
            rows, _, _ = BatchIntegration(self.labels_key, self.batch_key)._columns(obs)
        if len(rows) <= _WIDEST:
            raise DataError(f"scib needs {_WIDEST} neighbors per cell, but there are {len(rows)} cells; score more.")
        if self.max_cells is not None and len(rows) > self.max_cells:
            rows = rows[_drawn(texts_in(obs, self.labels_key)[rows], self.max_cells, np.random.default_rng(0))]
        if self.pre_integrated is not None:
            check_names(obs)
            names = obs.index[rows]
            lacking = names[~names.isin(self.pre_integrated.index)]
            if len(lacking) or not self.pre_integrated.index.is_unique:
                missing = f"{len(lacking)} of {len(rows)} cells (first: {listing(lacking[:3])})"
                raise DataError(
                    f"lacks {missing} or has duplicates; its index must contain each cell once.",
                    argument="pre_integrated",
                )
        return rows


def _drawn(labels: pd.Categorical, size: int, rng: np.random.Generator) -> np.ndarray:
    """Sample about `size` cells in proportion to the labels, rounded up, and return their positions in ascending order.

    The number of cells per label is fixed, because JAX recompiles for each size.
    """
    codes = pd.factorize(labels)[0]
    wanted = np.ceil(np.bincount(codes) * size / len(codes)).astype(np.int64)
    order = np.lexsort([rng.random(len(codes)), codes])
    rank = np.arange(len(codes)) - np.searchsorted(codes[order], codes[order])
    return np.sort(order[rank < wanted[codes[order]]])
