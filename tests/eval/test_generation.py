from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
from scipy import sparse
from scipy.spatial.distance import cdist

import scforge
from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.eval import Generation, evaluate_generation, generation_baselines
from scforge.eval.generation import _areas, mmd_squared

LABEL = "cell_type"


@pytest.fixture(scope="module")
def cells() -> ad.AnnData:
    """PBMC 3k, 300 cells of two types over 300 genes."""
    adata = scforge.datasets.pbmc3k()
    adata = adata[adata.obs[LABEL].isin(adata.obs[LABEL].value_counts().index[:2])][:300]
    order = np.argsort(-np.asarray(adata.X.sum(axis=0)).ravel(), kind="stable")
    adata = adata[:, order[:300]].copy()
    adata.obs[LABEL] = adata.obs[LABEL].astype(str)
    return adata


def logs_of(adata: ad.AnnData) -> ad.AnnData:
    logs = adata.copy()
    sc.pp.normalize_total(logs, target_sum=1e4)
    sc.pp.log1p(logs)
    return logs


def test_gene_figures_are_pearson_correlations_on_the_log_scale(cells: ad.AnnData) -> None:
    made, real = cells[:120], cells[120:]
    scores = Generation().run(made, real)
    one, other = (logs_of(some).to_df() for some in (made, real))
    seen = (other > 0).any().to_numpy()
    expected = {
        "gene_mean_r": (one.mean(), other.mean()),
        "gene_variance_r": (one.var(ddof=0), other.var(ddof=0)),
        "gene_dropout_r": ((one == 0).mean(), (other == 0).mean()),
    }
    for name, (left, right) in expected.items():
        assert scores[name] == pytest.approx(np.corrcoef(left[seen], right[seen])[0, 1], abs=1e-6), name


def test_mmd_is_the_unbiased_estimator() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(7, 3)), rng.normal(0.5, size=(9, 3))
    kernels = [np.exp(-cdist(*pair, "sqeuclidean")) for pair in ((one, one), (other, other), (one, other))]
    chosen = np.array([1, 0, 1, 1, 1, 0, 1]), np.array([1, 1, 1, 0, 1, 0, 1, 1, 0])
    figures = []
    for left, right in ((one, other), (one[chosen[0] > 0], other[chosen[1] > 0])):
        total = 0.0
        for some, sign in ((left, 1), (right, 1)):
            pairs = [np.exp(-((a - b) ** 2).sum()) for i, a in enumerate(some) for j, b in enumerate(some) if i != j]
            total += sign * np.mean(pairs)
        figures.append(total - 2 * np.mean([np.exp(-((a - b) ** 2).sum()) for a in left for b in right]))
    weights = (np.stack([np.ones(len(some)), some]) for some in chosen)
    assert mmd_squared(kernels, *weights) == pytest.approx(figures)


def test_kernel_is_as_wide_as_the_median_distance(cells: ad.AnnData) -> None:
    """With all components nothing is lost, so distances are those of the expression itself."""
    made, real = cells[:50], cells[50:100]
    full = Generation(n_comps=1_000).run(made, real)["mmd"]
    one, other = logs_of(made).X.toarray(), logs_of(real).X.toarray()
    basis = np.linalg.svd(other - other.mean(axis=0), full_matrices=False)[2][:49]
    one, other = one @ basis.T, other @ basis.T
    width = np.median(cdist(other, other, "sqeuclidean")[np.triu_indices(50, 1)])
    kernels = [np.exp(-cdist(*p, "sqeuclidean") / (2 * width)) for p in ((one, one), (other, other), (one, other))]
    assert full == pytest.approx(mmd_squared(kernels, np.ones((1, 50)), np.ones((1, 50)))[0], abs=1e-4)


def test_areas_are_those_of_sklearn() -> None:
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    scores, weights, truth = rng.integers(0, 9, 40) / 9, rng.integers(0, 2, (5, 40)), np.repeat([0, 1], 20)
    expected = [0.5 + abs(roc_auc_score(truth, scores, sample_weight=one) - 0.5) for one in weights]
    assert _areas(scores, weights) == pytest.approx(expected)


def test_worse_cells_get_worse_figures(cells: ad.AnnData) -> None:
    made = generation_baselines(cells[:150], 150)
    real = cells[150:]
    scores = pd.DataFrame({name: Generation().run(some, real) for name, some in made.items()}).T
    assert (scores["gene_mean_r"] > 0.97).all(), "all of them know the means"
    assert scores.loc["training cells", "mmd"] < 0.02 < scores.loc["mean and Poisson", "mmd"]
    assert scores.loc["training cells", "c2st"] < 0.75
    assert scores.loc["independent genes", "c2st"] > 0.8, "a linear classifier could not tell these"
    assert scores.loc["mean and Poisson", "gene_variance_r"] < scores.loc["training cells", "gene_variance_r"]


def test_copies_are_not_the_best_cells(cells: ad.AnnData) -> None:
    assert Generation().run(cells, cells)["c2st"] > 0.9
    other = cells.copy()
    other.obs_names = [f"copy{name}" for name in other.obs_names]
    with pytest.raises(DataError, match=r"generated cells of generated\['mine'\] are copies of held-out cells"):
        evaluate_generation({"mine": other[150:]}, cells[150:], cells[:150])


def test_cells_that_do_not_vary_have_no_correlation_of_variances(cells: ad.AnnData) -> None:
    real = logs_of(cells)
    mean = np.tile(real.X.mean(axis=0), (50, 1)).astype(np.float32)
    made = ad.AnnData(np.asarray(mean), var=real.var[[]])  # its total is below 10,000, but one cell has one total
    with np.errstate(all="raise"):
        scores = Generation().run(made, cells)
    assert np.isnan(scores["gene_variance_r"])
    assert np.isnan(scores["gene_dropout_r"])
    assert scores["gene_mean_r"] == pytest.approx(1)
    assert scores["c2st"] > 0.99


def test_counts_and_logs_and_orders_of_genes_are_the_same(cells: ad.AnnData) -> None:
    made, real = cells[:100], cells[100:]
    expected = Generation().run(made, real)
    dense = real.copy()
    dense.X = dense.X.toarray()
    found = Generation().run(logs_of(made)[:, ::-1], dense)
    # Trees split between values that differ in their last digit.
    assert found.pop("c2st") == pytest.approx(expected.pop("c2st"), abs=0.02)
    assert found == pytest.approx(expected, abs=1e-5)


def test_resampled_figures_lie_around_the_figure(cells: ad.AnnData) -> None:
    benchmark, made, real = Generation(LABEL), cells[:150], cells[150:]
    scores = benchmark.run(made, real)
    draws = benchmark.resampled(made, real, n=30, seed=1)
    assert list(draws) == list(benchmark.metrics) == list(scores)
    assert draws.equals(benchmark.resampled(made, real, n=30, seed=1))
    for name, value in scores.items():
        spread = draws[name].std()
        assert 0 < spread < 0.1, name
        assert draws[name].mean() == pytest.approx(value, abs=0.05), "halves are noisier"


def test_figures_of_labels(cells: ad.AnnData) -> None:
    """Cells of the wrong type are found by label, and nowhere else."""
    made, real = cells[:150].copy(), cells[150:]
    swapped = made.copy()
    names = sorted(set(made.obs[LABEL]))
    swapped.obs[LABEL] = made.obs[LABEL].map(dict(zip(names, names[::-1], strict=True)))
    right, wrong = (Generation(LABEL).run(some, real) for some in (made, swapped))
    assert right["mmd"] == wrong["mmd"]
    assert right["label_mmd"] < 0.02 < 0.05 < wrong["label_mmd"]
    assert right["label_gene_mean_r"] > wrong["label_gene_mean_r"]
    made.obs[LABEL] = np.where(np.arange(150) < 5, names[0], names[1])
    with pytest.warns(ScforgeWarning, match="are NaN: fewer than 20 generated cells are '"):
        scores = Generation(LABEL).run(made, real)
    assert np.isnan([scores["label_mmd"], scores["label_gene_mean_r"]]).all()
    rare = real.copy()
    rare.obs[LABEL] = [*["rare"] * 5, *real.obs[LABEL][5:]]
    with pytest.warns(ScforgeWarning, match="leave out 'rare'"):
        assert Generation(LABEL).run(cells[:150], rare)["label_mmd"] < 0.05


def test_baselines_keep_what_they_say(cells: ad.AnnData) -> None:
    train = cells[:200]
    made = generation_baselines(train, labels=cells.obs[LABEL][200:], labels_key=LABEL, seed=3)
    real = logs_of(train)
    for name, some in made.items():
        assert list(some.obs[LABEL]) == list(cells.obs[LABEL][200:]), name
        assert some.shape == (100, 300)
    known = {tuple(row) for row in real.X.toarray().round(3)}
    assert all(tuple(row) in known for row in made["training cells"].X.toarray().round(3))
    one = generation_baselines(train, 4_000)["independent genes"].X.toarray()
    assert np.abs(one.mean(axis=0) - real.X.toarray().mean(axis=0)).max() < 0.15
    off = np.corrcoef(one[:, :20].T)[~np.eye(20, dtype=bool)]
    assert np.abs(off).max() < 0.1 < np.abs(np.corrcoef(real.X.toarray()[:, :20].T)[~np.eye(20, dtype=bool)]).max()
    again = generation_baselines(train, labels=cells.obs[LABEL][200:], labels_key=LABEL, seed=3)
    assert all((again[name].X != some.X).nnz == 0 for name, some in made.items())


def test_the_report_has_a_ceiling_and_baselines(cells: ad.AnnData) -> None:
    made = generation_baselines(cells[:150], 100, seed=7)["independent genes"]
    more = sparse.hstack([made.X, sparse.csr_matrix(np.ones((100, 1)))], format="csr")
    made = ad.AnnData(more, var=pd.DataFrame(index=[*made.var_names, "unknown"]))
    report = evaluate_generation(made, cells[150:], cells[:150], title="Cells")
    kinds = {row.name: row.kind for row in report.rows}
    assert kinds == {
        "generated": "model",
        "training cells": "ceiling",
        "independent genes": "baseline",
        "mean and Poisson": "baseline",
    }
    assert (report.facts["genes"], report.facts["cells of each in mmd and c2st"]) == (300, 100)
    (verdict,) = report.verdicts()
    assert verdict.startswith("generated is not better than independent genes in mmd")
    with pytest.raises(DataError, match="100 of 200 test cells are training cells, too"):
        evaluate_generation(made, cells[100:], cells[:200])
    with pytest.raises(OptionError, match="kinds names 'generate', not among the generated cells .'generated'"):
        evaluate_generation(made, cells[150:], cells[:150], kinds={"generate": "model"})


def test_training_cells_under_other_names(cells: ad.AnnData) -> None:
    real = cells[150:].copy()
    train = real.copy()
    train.obs_names = [f"copy{name}" for name in train.obs_names]
    with pytest.raises(DataError, match="150 of 150 test cells have the same expression"):
        evaluate_generation(generation_baselines(cells[:150], 50)["mean and Poisson"], real, train)


def scaled(total: float | None, cells: ad.AnnData) -> ad.AnnData:
    made = cells.copy()
    if total is not None:
        sc.pp.normalize_total(made, target_sum=total)
    sc.pp.log1p(made)
    return made


@pytest.mark.parametrize(
    ("total", "n_genes", "message"),
    [
        (None, 300, "'mine' holds log1p of counts that were not normalised"),
        (1e3, 300, "'mine' has a median total of 1,000, .* give raw counts"),
        (1e3, 200, "'mine' has a median total of"),
        (2e4, 300, "'mine' has a median total of 20,000"),
    ],
)
def test_logs_on_another_scale(total: float | None, n_genes: int, message: str, cells: ad.AnnData) -> None:
    made = scaled(total, cells[:75])[:, :n_genes].copy()
    with pytest.raises(DataError, match=message):
        evaluate_generation({"mine": made}, cells[150:], cells[75:150])


def test_scforge_cells_may_lack_genes(cells: ad.AnnData) -> None:
    made = scaled(1e4, cells[:75])
    made.X = sparse.csr_matrix(made.X.toarray() * (np.arange(300) >= 60))
    with pytest.raises(DataError, match="has a median total of"):
        evaluate_generation(made, cells[150:], cells[75:150], intervals=False)
    made.uns["scforge"] = {"generated": {}}
    report = evaluate_generation(made, cells[150:], cells[75:150], intervals=False)
    assert any("too much or too little of all genes" in note for note in report.notes)


def test_counts_over_part_of_the_genes(cells: ad.AnnData) -> None:
    made, real, train = cells[:75], cells[150:], cells[75:150]
    with pytest.raises(DataError, match="the cells of 'generated' are counts without 100 genes"):
        evaluate_generation(made[:, :200], real, train)
    with pytest.raises(DataError, match="train are counts without 100 genes"):
        evaluate_generation(made, real, train[:, :200])
    with pytest.raises(DataError, match="the real cells are counts without 100 genes"):
        evaluate_generation(made, real[:, :200], train)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda some: some[:5], "there are 5 generated cells; generation needs at least 20"),
        (lambda some: some[:, :200], "0 genes are in the generated cells only and 100 in the real ones only"),
        (lambda some: ad.AnnData(some.X * 100.5, var=some.var), "neither counts nor log1p of counts per 10,000"),
        (lambda some: ad.AnnData(-some.X, var=some.var), "neither counts nor log1p of counts per 10,000"),
    ],
)
def test_bad_cells(change: object, message: str, cells: ad.AnnData) -> None:
    with pytest.raises(DataError, match=message):
        Generation().run(change(cells[:100]), cells[100:])


def test_bad_options(cells: ad.AnnData) -> None:
    with pytest.raises(OptionError, match="max_cells=3 is not at least 20"):
        Generation(max_cells=3)
    with pytest.raises(DataError, match="labels_key='typ' is not a column of obs"):
        Generation("typ").check(cells)
    with pytest.raises(OptionError, match="n_cells=None and labels_key=None do not fit"):
        generation_baselines(cells)
    with pytest.raises(DataError, match="no training cell has the label 'x'"):
        generation_baselines(cells, labels=["x"], labels_key=LABEL)
    with pytest.raises(OptionError, match="'independent genes', which is a baseline"):
        evaluate_generation({"independent genes": cells[150:]}, cells[150:], cells[:150])
