from __future__ import annotations

import sys

import numpy as np
import pytest
from scipy import stats

from scforge.errors import DataError, MissingFileError, OptionError
from scforge.eval.cell_eval import cell_eval_scores
from scforge.eval.log_scale import log_normalised
from scforge.eval.pertpy_distances import energy_distance
from scforge.eval.perturbation_prediction import PerturbationPrediction

KEYS = {"perturbation_key": "target", "control": "control"}


def logs(adata):
    adata.X = adata.X.astype(np.float64)
    adata.X = log_normalised(adata)
    return adata


@pytest.fixture(scope="module")
def cells(perturbed):
    """Measured cells, and predicted ones in which two perturbations have changed places."""
    labels = ["g0", "g1", "g2", "g3", "g4", "g5", "g6"]
    real, made = perturbed(labels), perturbed(labels, seed=1)
    made.obs["target"] = made.obs["target"].replace({"g2": "g3", "g3": "g2"})
    return logs(made), logs(real)


def test_ours_are_the_figures_of_cell_eval(cells) -> None:
    table, summary = cell_eval_scores(*cells, **KEYS, profile="anndata", skip_metrics=["clustering_agreement"])
    ours = PerturbationPrediction("target", "control").table(*cells)
    assert table["perturbation"].tolist() == ours["perturbation"].tolist()
    for name, theirs in {
        "pearson_delta": "pearson_delta",
        "mse": "mse_delta",
        "mae": "mae_delta",
        "discrimination_l1": "discrimination_score_l1",
        "discrimination_l2": "discrimination_score_l2",
        "discrimination_cosine": "discrimination_score_cosine",
    }.items():
        np.testing.assert_allclose(ours[name], table[theirs].to_numpy(dtype=float), atol=1e-6, rtol=0, err_msg=name)
        # They differ between perturbations, or nothing was compared.
        assert ours[name].nunique() > 1, name
    means = summary.set_index("statistic").loc["mean"]
    assert float(means["pearson_delta"]) == pytest.approx(ours["pearson_delta"].mean(), abs=1e-6)
    away = [
        [
            energy_distance(*(adata[adata.obs["target"] == label].X.toarray() for label in (name, "control")))
            for name in ours["perturbation"]
        ]
        for adata in cells
    ]
    assert table["pearson_edistance"].to_numpy(dtype=float) == pytest.approx(stats.pearsonr(*away).statistic, abs=1e-6)


def test_errors_of_absolute_means_are_those_of_cell_eval(cells) -> None:
    from scforge.eval.pseudobulk import moments_of

    table, _ = cell_eval_scores(*cells, **KEYS, profile="minimal")
    means = []
    for adata in cells:
        codes = adata.obs["target"].map({name: i for i, name in enumerate(table["perturbation"])}).fillna(-1)
        means.append(moments_of(adata.X, codes.to_numpy(dtype=np.int64), len(table)).mean)
    error = means[0] - means[1]
    np.testing.assert_allclose(table["mse"].to_numpy(dtype=float), np.square(error).mean(axis=1), atol=1e-6)
    np.testing.assert_allclose(table["mae"].to_numpy(dtype=float), np.abs(error).mean(axis=1), atol=1e-6)
    assert {"overlap_at_N", "precision_at_N"} <= {*table}


def test_contexts_are_scored_one_by_one_and_controls_are_lent(perturbed) -> None:
    real, made = (perturbed(("g0", "g1"), contexts=("x", "y"), seed=seed) for seed in (0, 1))
    options = {**KEYS, "profile": "pds"}
    both, summary = cell_eval_scores(made, real, context_key="type", **options)
    assert both["context"].tolist() == ["x", "x", "y", "y"]
    assert set(summary["context"]) == {"x", "y"}
    alone, _ = cell_eval_scores(made[made.obs["type"] == "y"].copy(), real[real.obs["type"] == "y"].copy(), **options)
    assert alone["discrimination_score_l1"].tolist() == both["discrimination_score_l1"][2:].tolist()
    without = made[made.obs["target"] != "control"].copy()
    assert len(cell_eval_scores(without, real, context_key="type", **options)[0]) == 4


def test_mistakes_are_told(perturbed, monkeypatch) -> None:
    real, made = perturbed(("g0", "g1")), perturbed(("g0",))
    with pytest.raises(OptionError, match="profile='all' is none of 'full'"):
        cell_eval_scores(made, real, **KEYS, profile="all")
    with pytest.raises(DataError, match="predicted has no cells of 'g1'"):
        cell_eval_scores(made, real, **KEYS, profile="pds")
    monkeypatch.setitem(sys.modules, "cell_eval", None)
    with pytest.raises(MissingFileError, match=r"pip install 'scforge\[eval\]'"):
        cell_eval_scores(made, real, **KEYS)
