import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, OptionError
from scforge.eval import BatchIntegration, Scib
from scforge.testing import raises

pytestmark = pytest.mark.filterwarnings("ignore:Tensorflow not installed:ImportWarning")

N = 240


@pytest.fixture(scope="module")
def obs() -> pd.DataFrame:
    """Cells of three labels and two batches; the third label is missing in the second batch."""
    obs = pd.DataFrame({"label": np.tile(["a", "b", "b", "c"], N // 4), "batch": np.repeat(["x", "y"], N // 2)})
    obs.loc[(obs["label"] == "c") & (obs["batch"] == "y"), "label"] = "a"
    return obs.set_index("cell" + obs.index.astype(str))


def embedding_of(obs: pd.DataFrame, *, labels: float, batches: float, seed: int = 0) -> np.ndarray:
    """Coordinates in which labels and batches lie so far apart."""
    cells = np.random.default_rng(seed).normal(size=(N, 4)).astype(np.float32)
    cells[:, 0] += labels * pd.factorize(obs["label"])[0]
    cells[:, 1] += batches * (obs["batch"] == "x").to_numpy()
    return cells


def their_benchmark(embeddings, obs, *, neighbors=None, batch=True, all_figures=True):
    """Scib-metrics' own benchmark, and its results under our names; its k-means shifts what it is given."""
    from scib_metrics.benchmark import BatchCorrection, Benchmarker, BioConservation

    obsm = {name: one.copy() for name, one in embeddings.items()}
    adata = ad.AnnData(np.ones((N, 3), dtype=np.float32), obs=obs.copy(), obsm=obsm)
    adata.obsm["X_pre"] = embedding_of(obs, labels=1.0, batches=3.0, seed=9)
    benchmarker = Benchmarker(
        adata,
        "batch",
        "label",
        list(embeddings),
        bio_conservation_metrics=BioConservation(nmi_ari_cluster_labels_leiden=all_figures, isolated_labels=batch),
        batch_correction_metrics=BatchCorrection(kbet_per_label=all_figures) if batch else None,
        pre_integrated_embedding_obsm_key="X_pre",
        progress_bar=False,
    )
    benchmarker.prepare(neighbors)
    benchmarker.benchmark()
    results = benchmarker.get_results().rename(columns=lambda name: name.lower().replace(" ", "_"))
    return benchmarker, results.rename(columns={"bio_conservation": "bio", "batch_correction": "batch"})


def exact(cells: np.ndarray, k: int):
    from scib_metrics.nearest_neighbors import NeighborsResults
    from sklearn.neighbors import NearestNeighbors

    distances, indices = NearestNeighbors(n_neighbors=k).fit(cells).kneighbors(cells)
    return NeighborsResults(indices=indices, distances=distances)


# What the slow ones add is compiled for half a minute.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("neighbors", "all_figures"),
    [
        ("exact", False),
        pytest.param("exact", True, marks=pytest.mark.exhaustive),
        pytest.param("pynndescent", True, marks=pytest.mark.exhaustive),
    ],
)
def test_the_figures_are_those_of_its_own_benchmark(obs, neighbors, all_figures) -> None:
    """To the last digit, with exact neighbors and with its default ones; so are the means."""
    embeddings = {"good": embedding_of(obs, labels=2.0, batches=0.5), "bad": embedding_of(obs, labels=0.5, batches=2.0)}
    before = pd.DataFrame(embedding_of(obs, labels=1.0, batches=3.0, seed=9), index=obs.index)
    options = {"leiden": all_figures, "kbet": all_figures, "neighbors": neighbors}
    scib = Scib("label", "batch", pre_integrated=before.iloc[::-1], **options)
    computer = exact if neighbors == "exact" else None
    benchmarker, expected = their_benchmark(embeddings, obs, neighbors=computer, all_figures=all_figures)
    assert set(scib.metrics) == set(expected)
    assert ({"leiden_nmi", "leiden_ari", "kbet"} <= set(scib.metrics)) == all_figures
    assert scib.main == "total"
    scores = scib.run(embeddings["good"], obs)
    assert scores == expected.loc["good"].to_dict()
    assert scores["total"] == pytest.approx(0.6 * scores["bio"] + 0.4 * scores["batch"])
    assert scib.table(embeddings, obs).loc["bad"].to_dict() == expected.loc["bad"].to_dict()
    # BatchIntegration calls the figures as the functions of scib-metrics are called.
    theirs = benchmarker._results["good"].to_dict()
    plain = BatchIntegration("label", "batch").run(embeddings["good"], obs)
    assert set(plain) == set(BatchIntegration.metrics)
    if neighbors == "exact":
        common = set(theirs) & set(plain)
        assert len(common) == 8
        assert {name: plain[name] for name in common} == pytest.approx(
            {name: theirs[name] for name in common}, abs=1e-5
        )


@pytest.mark.slow
def test_without_batches_biology_alone(obs) -> None:
    embedding = embedding_of(obs, labels=2.0, batches=0.0)
    scib = Scib("label", leiden=False)
    scores = scib.run(embedding, obs[["label"]])
    assert list(scores) == ["bio", "kmeans_nmi", "kmeans_ari", "silhouette_label", "clisi"]
    assert scib.main == "bio"
    _, expected = their_benchmark({"X": embedding}, obs, neighbors=exact, batch=False, all_figures=False)
    assert scores == {metric: expected.loc["X", metric] for metric in scores}


@pytest.mark.slow
def test_cells_without_label_or_batch_and_further_cells_take_no_part(obs) -> None:
    embedding, some = embedding_of(obs, labels=2.0, batches=1.0), obs.astype("category")
    some.iloc[3, 0] = some.iloc[50, 1] = None
    rest = some.notna().all(axis=1).to_numpy()
    plain = BatchIntegration("label", "batch")
    assert plain.run(embedding, some) == plain.run(embedding[rest], some[rest])
    limited = Scib("label", "batch", leiden=False, max_cells=100)
    rows = limited._rows(some)
    assert rest[rows].all()
    assert 100 <= len(rows) <= 100 + obs["label"].nunique()
    shares = [frame["label"].value_counts(normalize=True) for frame in (obs, obs.iloc[rows])]
    pd.testing.assert_series_equal(*shares, atol=0.02)
    of_part = Scib("label", "batch", leiden=False, max_cells=None).run(embedding[rows], some.iloc[rows])
    assert limited.run(embedding, some) == of_part
    assert limited.describe(some) == {"cells scored": f"{len(rows)} of {N}"}


def test_draws_spread_as_the_figures_of_all_cells_do(obs, monkeypatch) -> None:
    """Told by a figure whose spread is known: the mean of normal numbers."""
    monkeypatch.setattr("scforge.eval.scib._DRAWN", 95)
    drawn = []

    def mean_of(self, embedding, obs):
        drawn.append(obs)
        return dict.fromkeys(self.metrics, float(embedding.mean()))

    monkeypatch.setattr(Scib, "run", mean_of)
    scib, numbers = Scib("label"), np.random.default_rng(0).normal(size=(N, 1))
    draws = scib.resampled(numbers, obs, n=400, seed=1)
    assert draws["bio"].std() == pytest.approx(numbers.std() / np.sqrt(N), rel=0.15)
    assert {tuple(part["label"].value_counts()[["a", "b", "c"]]) for part in drawn} == {(36, 48, 12)}
    assert all(part.index.is_unique for part in drawn)
    pd.testing.assert_frame_equal(draws, scib.resampled(numbers, obs, n=400, seed=1))
    assert scib.resampled(numbers[:180], obs[:180], n=5, seed=1) is None


def test_bad_input(obs) -> None:
    before = pd.DataFrame({"PC1": 0.0}, index=obs.index[:100])
    for options, message in [
        ({"neighbors": "approximate"}, "neighbors='approximate' is not known .known: 'exact', 'pynndescent'"),
        ({"max_cells": 90}, "max_cells=90 is too small; pass at least 91"),
    ]:
        with pytest.raises(OptionError, match=message):
            Scib("label", "batch", **options)
    with pytest.raises(DataError, match="needs 90 neighbors per cell, but there are 90 cells; score more"):
        Scib("label").check(obs[:90])
    with raises(DataError, "pre_integrated"):
        Scib("label", "batch", pre_integrated=before).check(obs)
    for benchmark in (Scib, BatchIntegration):
        with raises(DataError, "batch_key"):
            benchmark("label", "bach").check(obs)
    with raises(OptionError, "n_neighbors"):
        BatchIntegration("label", "batch", n_neighbors=3)
    for some, message in [
        (obs.assign(batch="x"), r"batch_key='batch' has only one value \('x'\)"),
        (obs[116:124], "needs 16 cells with at least 2 labels .* there are 8 cells with 3 labels and 2"),
        (obs.assign(batch=obs["label"]), r"no label of obs\['label'\] has cells of several batches"),
    ]:
        with pytest.raises(DataError, match=message):
            BatchIntegration("label", "batch").check(some)


class _Mine(Scib):
    """A benchmark of somebody's own."""


def test_coordinates_before_integration_come_later(obs) -> None:
    mine, components = _Mine("label", "batch", leiden=False), pd.DataFrame({"PC1": 0.0}, index=obs.index)
    assert not {"leiden_nmi", "leiden_ari", "kbet", "pcr_comparison"} & set(mine.metrics)
    given = mine.before_integration(components)
    assert isinstance(given, _Mine)
    assert set(given.metrics) - set(mine.metrics) == {"pcr_comparison"}
    assert mine.pre_integrated is None
    assert given.before_integration(components) is given
    without = Scib("label")
    assert without.before_integration(components) is without
    twice = obs.set_axis(["cell1", *obs.index[:-1]])
    message = r"^1 cell names are duplicated \('cell1'\); make cell names unique"
    with pytest.raises(DataError, match=message):
        mine.check(twice)
    without.check(twice)
    some = obs.assign(label=[None, *obs["label"][1:]])
    assert Scib("label", "batch").describe(some) == {"cells scored": "239 of 240", "resampled": "cells"}
    assert without.describe(some[:150]) == {"cells scored": "149 of 150"}
