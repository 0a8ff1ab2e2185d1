from functools import partial
from importlib.util import find_spec
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc

import scforge
from scforge.cli import main
from scforge.errors import DataError, OptionError
from scforge.eval import evaluate, evaluate_cz, list_benchmarks
from scforge.eval.cz_benchmarks import KEYS, run_cz_task

needs_cz = pytest.mark.skipif(
    find_spec("czbenchmarks") is None, reason="cz-benchmarks needs an environment of its own: make test-cz"
)
LABELS = {"labels_key": "cell_type"}
ORGANISMS = {**LABELS, "organism_key": "organism"}
PERTURBED = {"perturbation_key": "cell_type", "control": "Naive CD4 T"}


@pytest.fixture(scope="module")
def cells() -> ad.AnnData:
    """PBMC 3k, 400 cells of its larger types, with an embedding of ours and made-up batches, organisms and times."""
    adata = scforge.datasets.pbmc3k()
    larger = adata.obs["cell_type"].value_counts().index[:4]
    adata = adata[adata.obs["cell_type"].isin(larger)][:400].copy()
    adata.obs["cell_type"] = adata.obs["cell_type"].astype(str)
    sc.pp.filter_genes(adata, min_cells=20)
    scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
    model = scforge.models.Encoder(adata)
    model.train(max_epochs=2)
    model.get_latent_representation()
    second = np.arange(adata.n_obs) % 2 == 1
    adata.obs["batch"] = np.where(second, "x", "y")
    adata.obs["organism"] = np.where(second, "mus_musculus", "homo_sapiens")
    adata.obs["sample"] = [f"{label} {i % 20}" for i, label in enumerate(adata.obs["cell_type"])]
    adata.obs["time"] = pd.factorize(adata.obs["cell_type"])[0]
    return adata


def direct(name: str, cells: ad.AnnData) -> list[tuple]:
    """Call the package by hand."""
    from czbenchmarks import tasks
    from czbenchmarks.datasets.types import Organism

    made, obs = cells.obsm["X_scforge"], cells.obs
    labels = pd.Series(list(obs["cell_type"]))
    halves = [obs["organism"].to_numpy() == name for name in ("homo_sapiens", "mus_musculus")]
    organisms = [Organism.HUMAN, Organism.MOUSE]
    parts, halved = [made[half] for half in halves], [labels[half].reset_index(drop=True) for half in halves]
    with_obs, batches, times = {"obs": obs.copy()}, pd.Series(list(obs["batch"])), obs["time"].to_numpy()
    task, given, options = {
        "clustering": ("ClusteringTask", made, {**with_obs, "input_labels": labels}),
        "embedding": ("EmbeddingTask", made, {"input_labels": labels}),
        "label_prediction": ("MetadataLabelPredictionTask", made, {"labels": labels, "n_folds": 2}),
        "batch_integration": ("BatchIntegrationTask", made, {"labels": labels, "batch_labels": batches}),
        "sequential_organization": ("SequentialOrganizationTask", made, {**with_obs, "input_labels": times, "k": 9}),
        "cross-species_integration": (
            "CrossSpeciesIntegrationTask",
            parts,
            {"labels": halved, "organism_list": organisms},
        ),
        "cross-species_label_prediction": (
            "CrossSpeciesLabelPredictionTask",
            parts,
            {"labels": halved, "organisms": organisms, "aggregation_method": "none", "n_folds": 2},
        ),
    }[name]
    np.random.seed(42)  # one figure is scaled by one of random neighbors, drawn from the global generator
    results = getattr(tasks, task)().run(given, getattr(tasks, f"{task}Input")(**options))
    return [(one.metric_type.value, float(one.value), one.params or {}) for one in results]


OPTIONS = {
    "clustering": LABELS,
    "embedding": LABELS,
    "label_prediction": {**LABELS, "n_folds": 2},
    "batch_integration": {**LABELS, "batch_key": "batch"},
    "sequential_organization": {"labels_key": "time", "k": 9},
    "cross-species_integration": ORGANISMS,
    "cross-species_label_prediction": {**ORGANISMS, "n_folds": 2},
}


@needs_cz
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_figures_are_those_of_the_package(name: str, cells: ad.AnnData) -> None:
    frame = run_cz_task(name, cells, "X_scforge", baseline=False, **OPTIONS[name])
    found = list(zip(frame["metric"], frame["value"], frame["params"], strict=True))
    assert found == direct(name, cells)
    assert np.isfinite(frame["value"]).all()
    assert set(KEYS) == {*OPTIONS, "perturbation_expression_prediction"}


@needs_cz
def test_perturbations(cells: ad.AnnData) -> None:
    """Means over some cells of a type order its genes like its real change does, the mean of other types does not."""
    from scipy.stats import spearmanr

    predicted, logs = cells.copy(), cells.copy()
    sc.pp.normalize_total(logs, target_sum=1e4)
    sc.pp.log1p(logs)
    layer = logs.X.toarray()
    for label in np.unique(predicted.obs["cell_type"]):
        rows = np.flatnonzero(predicted.obs["cell_type"] == label)
        layer[rows] = layer[rows[:20]].mean(axis=0)
    predicted.layers["predicted"] = layer
    name = "perturbation_expression_prediction"
    frame = run_cz_task(name, predicted, "predicted", **PERTURBED)
    conditions = [params["condition"] for params in frame["params"]]
    assert set(conditions) == set(predicted.obs["cell_type"]) - {"Naive CD4 T"}
    ours, others = (frame.loc[frame["kind"] == kind, "value"].to_numpy() for kind in ("model", "baseline"))
    assert (ours > 0.5).all()
    assert ours.mean() > others.mean() + 0.1
    sc.tl.rank_genes_groups(logs, "cell_type", reference="Naive CD4 T", method="wilcoxon")
    condition = conditions[0]
    tested = sc.get.rank_genes_groups_df(logs, condition).query("pvals_adj < 1e-4 and abs(logfoldchanges) >= 1")
    means = predicted.to_df("predicted").groupby(predicted.obs["cell_type"].to_numpy()).mean()
    change = (means.loc[condition] - means.loc["Naive CD4 T"])[tested["names"]]
    assert ours[0] == pytest.approx(spearmanr(tested["logfoldchanges"], change).statistic, abs=1e-3)


@needs_cz
def test_samples_are_averaged(cells: ad.AnnData) -> None:
    name, options = "cross-species_label_prediction", OPTIONS["cross-species_label_prediction"]
    alone = run_cz_task(name, cells, "X_scforge", baseline=False, **options)
    averaged = run_cz_task(name, cells, "X_scforge", baseline=False, groups_key="sample", **options)
    assert len(alone) == len(averaged)
    assert alone["value"].mean() < averaged["value"].mean()
    with pytest.raises(DataError, match="groups_key='batch' has groups with several labels"):
        run_cz_task(name, cells, "X_scforge", groups_key="batch", **options)


@needs_cz
def test_the_report_has_every_task(cells: ad.AnnData) -> None:
    tasks = {"clustering": {}, "label_prediction": {"n_folds": 2, "baseline": False}}
    keys = {"X_scforge": "model", "again": "baseline"}
    cells.obsm["again"] = cells.obsm["X_scforge"]
    report = evaluate_cz(cells, tasks, keys, **LABELS)
    frame = report.to_frame()
    assert set(frame["benchmark"]) == set(tasks)
    assert set(frame["method"]) == {"X_scforge", "again", "PCA (cz-benchmarks)"}
    values = frame.set_index(["benchmark", "method", "metric"])["value"]
    each = run_cz_task("label_prediction", cells, "X_scforge", baseline=False, n_folds=2, **LABELS)
    f1 = each[each["metric"] == "mean_fold_f1"]
    assert len(f1) == 4
    assert values["label_prediction", "X_scforge", "mean_fold_f1"] == pytest.approx(f1["value"].iloc[1:].mean())
    assert report.about("label_prediction").main == "mean_fold_f1"


REGISTERED = ["batch_integration", "clustering", "embedding", "label_prediction", "sequential_organization"]


def test_tasks_of_an_embedding_are_registered() -> None:
    assert [name for name in list_benchmarks() if name.startswith("cz_")] == [f"cz_{name}" for name in REGISTERED]


@needs_cz
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", REGISTERED)
def test_a_registered_task_gives_the_scores_of_the_package(name: str, cells: ad.AnnData) -> None:
    keys = {key: value for key, value in OPTIONS[name].items() if key.endswith("_key")}
    own = {key: value for key, value in OPTIONS[name].items() if key not in keys}
    report = evaluate(cells, {f"cz_{name}": {"options": own}}, "X_scforge", **keys, baselines=[5], seeds=[42])
    direct = evaluate_cz(cells, {name: own}, "X_scforge", **keys, baseline=False)
    assert report.rows[0].scores == direct.rows[0].scores
    assert report.about(f"cz_{name}").metrics == direct.about(name).metrics
    assert report.about(f"cz_{name}").main == direct.about(name).main
    assert [row.kind for row in report.rows] == ["model", "baseline", "baseline"]
    for row in report.rows:
        assert np.isfinite([list(interval) for interval in row.intervals.values()]).all()
        assert set(row.intervals) == set(direct.about(name).metrics)
    assert report.facts[f"cz_{name}: version"].startswith("cz-benchmarks 0.")


@needs_cz
@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "clusterin",
            {},
            OptionError,
            "name='clusterin' is not in the tasks of cz-benchmarks; did you mean 'clustering'",
        ),
        ("clustering", {"labels_key": "cell_typ"}, DataError, "labels_key='cell_typ' is not a column of obs; did you"),
        (
            "clustering",
            {**LABELS, "flavr": "igraph"},
            OptionError,
            "option 'flavr' is unknown to 'clustering'; did you mean 'flavor'",
        ),
        ("clustering", {**LABELS, "n_iterations": -1}, OptionError, "clustering does not accept n_iterations=-1"),
        ("embedding", {"labels_key": "some"}, DataError, "labels_key='some' is missing for 3 cells"),
        ("embedding", {**LABELS, "keys": "X_scforg"}, DataError, "keys='X_scforg' is not in adata.obsm"),
        ("sequential_organization", LABELS, DataError, "cannot run .* Unable to parse string"),
        (
            "cross-species_integration",
            {**LABELS, "organism_key": "batch"},
            DataError,
            "is not in the organisms of cz-benchmarks",
        ),
        ("label_prediction", {**LABELS, "n_folds": 1}, DataError, "cz-benchmarks cannot run 'label_prediction'"),
        (
            "cz_label_prediction",
            {"options": {"n_fold": 2}},
            OptionError,
            "option 'n_fold' is unknown to 'label_prediction'; did you mean 'n_folds'",
        ),
        ("cz_label_prediction", {"labels_key": "cell_typ"}, DataError, "labels_key='cell_typ' is not a column of obs"),
    ],
)
def test_bad_input(name: str, options: dict, error: type[Exception], message: str, cells: ad.AnnData) -> None:
    some = cells.copy()
    some.obs["some"] = some.obs["cell_type"].where(np.arange(some.n_obs) > 2)
    options = dict(options)
    key = options.pop("keys", "X_scforge")
    call = partial(evaluate, some, {name: options}, key, **LABELS)
    if not name.startswith("cz_"):
        call = partial(run_cz_task, name, some, key, **options)
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(find_spec("czbenchmarks") is not None, reason="cz-benchmarks is installed")
def test_a_registered_task_tells_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OptionError, match=r"install 'scforge\[cz\]'"):
        evaluate_cz(scforge.datasets.pbmc3k()[:50], ["clustering"], "X", labels_key="cell_type")
    scforge.datasets.pbmc3k()[:50].copy().write_h5ad(tmp_path / "cells.h5ad")
    command = f"evaluate {tmp_path / 'cells.h5ad'} -m scforge://pbmc3k-light --benchmarks cz_clustering"
    assert main([*command.split(), "--labels-key", "cell_type"]) == 2
    assert "install 'scforge[cz]'" in capsys.readouterr().err
