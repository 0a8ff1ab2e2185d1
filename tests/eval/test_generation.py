import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
from scipy import sparse
from scipy.spatial.distance import cdist

from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.eval import Generation
from scforge.eval.generation import evaluate_generation, generation_baselines
from scforge.testing import raises

LABEL = "cell_type"


@pytest.fixture(scope="module")
def cells(pbmc: ad.AnnData) -> ad.AnnData:
    """PBMC 3k, 300 cells of two types over 300 genes."""
    adata = pbmc[pbmc.obs[LABEL].isin(pbmc.obs[LABEL].value_counts().index[:2])][:300]
    order = np.argsort(-np.asarray(adata.X.sum(axis=0)).ravel(), kind="stable")
    adata = adata[:, order[:300]].copy()
    adata.obs[LABEL] = adata.obs[LABEL].astype(str)
    return adata


def logs_of(adata: ad.AnnData, total: float | None = 1e4) -> ad.AnnData:
    logs = adata.copy()
    if total is not None:
        sc.pp.normalize_total(logs, target_sum=total)
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
    # Counts and logs, dense and sparse, and other orders of genes are the same.
    dense = real.copy()
    dense.X = dense.X.toarray()
    found = Generation().run(logs_of(made)[:, ::-1], dense)
    # Trees split between values that differ in their last digit.
    assert found.pop("c2st") == pytest.approx(scores.pop("c2st"), abs=0.02)
    assert found == pytest.approx(scores, abs=1e-5)


def test_figures_follow_cells_and_options_that_change(cells: ad.AnnData) -> None:
    made, real, benchmark = cells[:120].copy(), cells[120:], Generation(n_comps=5)
    before = benchmark.run(made, real)
    made.X.data[:] = made.X.data[::-1].copy()
    after = benchmark.run(made, real)
    assert after != before
    assert after == Generation(n_comps=5).run(made, real)
    benchmark.max_cells = 40
    assert benchmark.run(made, real) == Generation(n_comps=5, max_cells=40).run(made, real)


def test_kernel_is_as_wide_as_the_median_distance(cells: ad.AnnData) -> None:
    """With all components nothing is lost, so distances are those of the expression itself."""
    made, real = cells[:50], cells[50:100]
    full = Generation(n_comps=1_000).run(made, real)["mmd"]
    one, other = logs_of(made).X.toarray(), logs_of(real).X.toarray()
    basis = np.linalg.svd(other - other.mean(axis=0), full_matrices=False)[2][:49]
    one, other = one @ basis.T, other @ basis.T
    width = np.median(cdist(other, other, "sqeuclidean")[np.triu_indices(50, 1)])
    one_kernel, other_kernel, between = (
        np.exp(-cdist(*pair, "sqeuclidean") / (2 * width)) for pair in ((one, one), (other, other), (one, other))
    )
    apart = ~np.eye(50, dtype=bool)  # the unbiased estimator leaves out pairs of a cell with itself
    assert full == pytest.approx(one_kernel[apart].mean() + other_kernel[apart].mean() - 2 * between.mean(), abs=1e-4)


def test_worse_cells_get_worse_figures_and_copies_are_not_the_best(cells: ad.AnnData) -> None:
    made, real = generation_baselines(cells[:150], 150), cells[150:]
    scores = pd.DataFrame({name: Generation().run(some, real) for name, some in made.items()}).T
    assert (scores["gene_mean_r"] > 0.97).all(), "all of them know the means"
    assert scores.loc["training cells", "mmd"] < 0.02 < scores.loc["mean and Poisson", "mmd"]
    assert scores.loc["training cells", "c2st"] < 0.75
    assert scores.loc["independent genes", "c2st"] > 0.8, "a linear classifier could not tell these"
    assert scores.loc["mean and Poisson", "gene_variance_r"] < scores.loc["training cells", "gene_variance_r"]
    assert Generation().run(cells, cells)["c2st"] > 0.9


def test_cells_that_do_not_vary_have_no_correlation_of_variances(cells: ad.AnnData) -> None:
    real = logs_of(cells)
    mean = np.tile(real.X.mean(axis=0), (50, 1)).astype(np.float32)
    made = ad.AnnData(np.asarray(mean), var=real.var[[]])  # its total is below 10,000, but one cell has one total
    with np.errstate(all="raise"):
        scores = Generation().run(made, cells)
    assert np.isnan([scores["gene_variance_r"], scores["gene_dropout_r"]]).all()
    assert scores["gene_mean_r"] == pytest.approx(1)
    assert scores["c2st"] > 0.99


def test_resampled_figures_lie_around_the_figure(cells: ad.AnnData) -> None:
    benchmark, made, real = Generation(LABEL), cells[:150], cells[150:]
    scores = benchmark.run(made, real)
    draws = benchmark.resampled(made, real, n=30, seed=1)
    assert list(draws) == list(benchmark.metrics) == list(scores)
    other = cells[140:]
    assert benchmark.run(made, other) == Generation(LABEL).run(made, other), "nothing is kept of other real cells"
    assert draws.equals(benchmark.resampled(made, real, n=30, seed=1))
    for name, value in scores.items():
        assert 0 < draws[name].std() < 0.1, name
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
    with pytest.warns(ScforgeWarning, match="are NaN because of labels with fewer than 20 generated cells: '"):
        scores = Generation(LABEL).run(made, real)
    assert np.isnan([scores["label_mmd"], scores["label_gene_mean_r"]]).all()
    rare = real.copy()
    rare.obs[LABEL] = [*["rare"] * 5, *real.obs[LABEL][5:]]
    with pytest.warns(ScforgeWarning, match="leave out labels with fewer than 20 real cells: 'rare'"):
        assert Generation(LABEL).run(cells[:150], rare)["label_mmd"] < 0.05


def test_real_cells_without_a_label_are_left_out_and_said(cells: ad.AnnData) -> None:
    real = cells[150:].copy()
    real.obs.loc[real.obs_names[:7], LABEL] = None
    made = generation_baselines(cells[:150], labels=cells.obs[LABEL][:75], labels_key=LABEL, seed=7)[
        "independent genes"
    ]
    report = evaluate_generation(made, real, cells[:150], labels_key=LABEL, intervals=False)
    assert report.facts["real cells"] == 143
    assert "7 real cells without obs['cell_type'] are left out." in report.notes


def test_baselines_keep_what_they_say(cells: ad.AnnData) -> None:
    train, labels = cells[:200], cells.obs[LABEL][200:]
    made, again = (generation_baselines(train, labels=labels, labels_key=LABEL, seed=3) for _ in range(2))
    real = logs_of(train).X.toarray()
    for name, some in made.items():
        assert list(some.obs[LABEL]) == list(labels), name
        assert some.shape == (100, 300)
        assert (again[name].X != some.X).nnz == 0
    known = {tuple(row) for row in real.round(3)}
    assert all(tuple(row) in known for row in made["training cells"].X.toarray().round(3))
    one = generation_baselines(train, 4_000)["independent genes"].X.toarray()
    assert np.abs(one.mean(axis=0) - real.mean(axis=0)).max() < 0.15
    off = [np.abs(np.corrcoef(some[:, :20].T)[~np.eye(20, dtype=bool)]).max() for some in (one, real)]
    assert off[0] < 0.1 < off[1]


def test_the_report_has_a_ceiling_and_baselines(cells: ad.AnnData) -> None:
    made = generation_baselines(cells[:150], 100, seed=7)["independent genes"]
    more = sparse.hstack([made.X, sparse.csr_matrix(np.ones((100, 1)))], format="csr")
    made = ad.AnnData(more, var=pd.DataFrame(index=[*made.var_names, "unknown"]))
    report = evaluate_generation(made, cells[150:], cells[:150], title="Cells")
    assert {row.name: row.kind for row in report.rows} == {
        "generated": "model",
        "training cells": "ceiling",
        "independent genes": "baseline",
        "mean and Poisson": "baseline",
    }
    assert (report.facts["genes"], report.facts["cells of each in mmd and c2st"]) == (300, 100)
    (verdict,) = report.verdicts()
    assert verdict.startswith("generated is tied with independent genes in mmd")


def renamed(adata: ad.AnnData) -> ad.AnnData:
    adata = adata.copy()
    adata.obs_names = [f"copy{name}" for name in adata.obs_names]
    return adata


@pytest.mark.parametrize(
    ("made", "real", "train", "message"),
    [
        (lambda c: c[:75], lambda c: c[100:], lambda c: c[:200], "100 of 200 test cells are also training cells"),
        (
            lambda c: c[:75],
            lambda c: c[150:],
            lambda c: renamed(c[150:]),
            "150 of 150 test cells have exactly the same expr",
        ),
        (lambda c: renamed(c[150:]), None, None, "cells of generated.* are identical to held-out cells"),
        (lambda c: logs_of(c[:75], None), None, None, "'generated' contains log1p of counts that were not normalized"),
        (lambda c: logs_of(c[:75], 1e3), None, None, "'generated' have a median total of 1,000 .* pass counts"),
        (lambda c: c[:75, :200], None, None, "the counts of the cells of 'generated' lack 100 genes"),
        (lambda c: c[:75], None, lambda c: c[75:150, :200], "the counts of train lack 100 genes"),
        (lambda c: c[:75], lambda c: c[150:, :200], None, "the counts of the real cells lack 100 genes"),
    ],
)
def test_leaks_and_other_scales_are_refused(made, real, train, message: str, cells: ad.AnnData) -> None:
    held_out = cells[150:] if real is None else real(cells)
    known = cells[75:150] if train is None else train(cells)
    with pytest.raises(DataError, match=message):
        evaluate_generation(made(cells).copy(), held_out, known)


def test_scforge_cells_may_lack_genes(cells: ad.AnnData) -> None:
    made = logs_of(cells[:75])
    made.X = sparse.csr_matrix(made.X.toarray() * (np.arange(300) >= 60))
    with pytest.raises(DataError, match="have a median total of"):
        evaluate_generation(made, cells[150:], cells[75:150], intervals=False)
    made.uns["scforge"] = {"generated": {}}
    report = evaluate_generation(made, cells[150:], cells[75:150], intervals=False)
    assert any("total expression is too high or too low" in note for note in report.notes)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda c: c[:5], "there are only 5 generated cells; pass at least 20 generated cells"),
        (lambda c: c[:, :200], "100 genes are only in the generated or only in the real cells"),
        (lambda c: ad.AnnData(c.X * 100.5, var=c.var), "neither counts nor log1p of counts per 10,000"),
        (lambda c: ad.AnnData(-c.X, var=c.var), "negative values"),
    ],
)
def test_bad_cells(made, message: str, cells: ad.AnnData) -> None:
    with pytest.raises(DataError, match=message):
        Generation().run(made(cells[:100]), cells[100:])


def test_bad_options(cells: ad.AnnData) -> None:
    with raises(OptionError, "max_cells"):
        Generation(max_cells=3)
    with raises(DataError, "labels_key"):
        Generation("typ").check(cells)
    with pytest.raises(DataError, match="no training cell has the label 'x'"):
        generation_baselines(cells, labels=["x"], labels_key=LABEL)
    with raises(OptionError, "generated"):
        evaluate_generation({"independent genes": cells[:75]}, cells[150:], cells[75:150])
    with raises(OptionError, "kinds"):
        evaluate_generation(cells[:75], cells[150:], cells[75:150], kinds={"generate": "model"})
