from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, OptionError
from scforge.eval import BatchIntegration

LABELS, BATCHES = np.repeat(["a", "b"], 50), np.tile(["x", "y"], 50)


def obs_of(labels: np.ndarray = LABELS, batches: np.ndarray = BATCHES) -> pd.DataFrame:
    return pd.DataFrame({"label": labels, "batch": batches}, index=[str(i) for i in range(len(labels))])


def embedding_of(*, labels_apart: float, batches_apart: float) -> np.ndarray:
    cells = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    cells[:, 0] += labels_apart * (LABELS == "a")
    cells[:, 1] += batches_apart * (BATCHES == "x")
    return cells


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Tensorflow not installed:ImportWarning")
def test_the_figures_are_those_of_scib_metrics() -> None:
    """Its own benchmark over the same embedding gives the same figures, where it takes the same neighbours."""
    from scib_metrics.benchmark import BatchCorrection, Benchmarker, BioConservation
    from scib_metrics.nearest_neighbors import NeighborsResults
    from sklearn.neighbors import NearestNeighbors

    def exact(cells: np.ndarray, k: int) -> NeighborsResults:
        distances, indices = NearestNeighbors(n_neighbors=k).fit(cells).kneighbors(cells)
        return NeighborsResults(indices=indices, distances=distances)

    embedding = embedding_of(labels_apart=2.0, batches_apart=1.0)
    adata = ad.AnnData(np.ones((100, 3), dtype=np.float32), obs=obs_of(), obsm={"X": embedding, "X_pca": embedding})
    reference = Benchmarker(
        adata,
        "batch",
        "label",
        ["X"],
        bio_conservation_metrics=BioConservation(),
        batch_correction_metrics=BatchCorrection(kbet_per_label=False, pcr_comparison=False),
        pre_integrated_embedding_obsm_key="X_pca",
        progress_bar=False,
    )
    reference.prepare(neighbor_computer=exact)
    reference.benchmark()
    expected = reference._results["X"].to_dict()
    scores = BatchIntegration("label", "batch").run(embedding, obs_of())
    assert set(scores) == set(BatchIntegration.metrics)
    assert {name: scores[name] for name in expected if name in scores} == pytest.approx(
        {name: value for name, value in expected.items() if name in scores}, abs=1e-5
    )
    assert len(set(expected) & set(scores)) == 8


def test_they_tell_good_from_bad() -> None:
    benchmark = BatchIntegration("label", "batch")
    good = benchmark.run(embedding_of(labels_apart=8.0, batches_apart=0.0), obs_of())
    bad = benchmark.run(embedding_of(labels_apart=0.0, batches_apart=8.0), obs_of())
    for metric in BatchIntegration.metrics:
        assert good[metric] >= bad[metric], metric
    assert good["ilisi_knn"] > 0.8 > 0.3 > bad["ilisi_knn"]
    assert good["silhouette_label"] > bad["silhouette_label"] + 0.2


@pytest.mark.slow
def test_cells_without_label_or_batch_take_no_part() -> None:
    embedding, obs = embedding_of(labels_apart=2.0, batches_apart=1.0), obs_of()
    obs["label"], obs["batch"] = obs["label"].astype("category"), obs["batch"].astype("category")
    obs.iloc[3, 0] = obs.iloc[50, 1] = None
    rest = obs.notna().all(axis=1).to_numpy()
    benchmark = BatchIntegration("label", "batch")
    assert benchmark.run(embedding, obs) == benchmark.run(embedding[rest], obs[rest])


def test_bad_input() -> None:
    with pytest.raises(OptionError, match="n_neighbors=3 is not at least 15"):
        BatchIntegration("label", "batch", n_neighbors=3)
    with pytest.raises(DataError, match="batch_key='bach' is not a column of obs; did you mean 'batch'"):
        BatchIntegration("label", "bach").check(obs_of())
    benchmark = BatchIntegration("label", "batch")
    with pytest.raises(DataError, match=r"batch_key='batch' has one value only \('x'\)"):
        benchmark.check(obs_of(batches=np.full(100, "x")))
    with pytest.raises(DataError, match="needs at least 16 cells .* but there are 8 of 2 and 2"):
        benchmark.check(obs_of().iloc[46:54])
    with pytest.raises(DataError, match=r"no label of obs\['label'\] has cells of several batches"):
        benchmark.check(obs_of(batches=LABELS))
