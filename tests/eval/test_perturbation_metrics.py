import sys

import numpy as np
import pertpy
import pytest

from scforge.data.expression import log_normalized
from scforge.errors import DataError, MissingFileError, OptionError
from scforge.eval import PerturbationPrediction
from scforge.eval.perturbation_metrics import cell_eval_scores, distances
from scforge.perturbation.metrics import energy_distance
from scforge.testing import raises

KEYS = {"perturbation_key": "target", "control": "control"}


@pytest.fixture(scope="module")
def cells(perturbed):
    """Predicted cells in which two perturbations have changed places, and measured ones."""
    labels = ["g0", "g1", "g2", "g3", "g4", "g5", "g6"]
    real, made = perturbed(labels), perturbed(labels, seed=1)
    made.obs["target"] = made.obs["target"].replace({"g2": "g3", "g3": "g2"})
    for adata in (made, real):
        adata.X = adata.X.astype(np.float64)
        adata.X = log_normalized(adata)
    return made, real


def test_ours_are_the_figures_of_cell_eval(cells) -> None:
    table, summary = cell_eval_scores(*cells, **KEYS, profile="anndata", skip_metrics=["clustering_agreement"])
    ours = PerturbationPrediction("target", "control").table(*cells)
    assert table["perturbation"].tolist() == ours["perturbation"].tolist()
    theirs = {"pearson_delta": "pearson_delta", "mse": "mse_delta", "mae": "mae_delta"}
    theirs |= {f"discrimination_{name}": f"discrimination_score_{name}" for name in ("l1", "l2", "cosine")}
    for name, their in theirs.items():
        np.testing.assert_allclose(ours[name], table[their].to_numpy(dtype=float), atol=1e-6, rtol=0, err_msg=name)
        # They differ between perturbations, or nothing was compared.
        assert ours[name].nunique() > 1, name
    means = summary.set_index("statistic").loc["mean"]
    assert float(means["pearson_delta"]) == pytest.approx(ours["pearson_delta"].mean(), abs=1e-6)


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


def test_energy_distance_is_its_formula_and_that_of_pertpy() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(30, 6)), rng.normal(1.0, 2.0, size=(41, 6))

    def mean(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.linalg.norm(a[:, None] - b[None], axis=2).mean())

    found = energy_distance(one, other)
    assert found == pytest.approx(2 * mean(one, other) - mean(one, one) * 30 / 29 - mean(other, other) * 41 / 40)
    # pertpy counts the distances of cells to themselves.
    own = mean(one, one) / 29 + mean(other, other) / 40
    assert found + own == pytest.approx(float(pertpy.tl.Distance("edistance", obsm_key="x")(one, other)), abs=1e-6)
    assert np.isnan(energy_distance(one[:1], other))


@pytest.mark.parametrize("metric", ["edistance", "euclidean", "pearson_distance", "mmd"])
def test_the_right_cells_are_nearer_than_controls(perturbed, metric: str) -> None:
    real, made = (perturbed(("g0", "g1"), seed=seed) for seed in (0, 1))
    table = distances(real, {"same": made}, metric=metric, **KEYS)
    assert table["method"].tolist() == ["control", "same"] * 2
    assert table["perturbation"].tolist() == ["g0", "g0", "g1", "g1"]
    away = table.set_index(["method", "perturbation"])["distance"]
    assert (away["same"] < away["control"]).all()


def test_distances_in_an_embedding(perturbed) -> None:
    adatas, own = [perturbed(("g0",), seed=seed) for seed in (0, 1)], []
    rng = np.random.default_rng(0)
    for adata in adatas:
        chosen = (adata.obs["target"] == "g0").to_numpy()
        adata.obsm["X_model"] = rng.normal(size=(adata.n_obs, 3)) + chosen[:, None]
        own.append(adata.obsm["X_model"][chosen])
    found = distances(*adatas, obsm_key="X_model", **KEYS)
    assert found["method"].tolist() == ["control", "prediction"]
    theirs = pertpy.tl.Distance("edistance", obsm_key="x")(*own)
    assert found["distance"][1] == pytest.approx(float(theirs), abs=1e-6)


def test_mistakes_are_told(perturbed, monkeypatch) -> None:
    real, made = perturbed(("g0", "g1")), perturbed(("g0",))
    with raises(DataError, "predicted"):
        cell_eval_scores(made, real, **KEYS, profile="pds")
    monkeypatch.setitem(sys.modules, "cell_eval", None)
    with pytest.raises(MissingFileError):
        cell_eval_scores(made, real, **KEYS)
    with raises(OptionError, "metric"):
        distances(real, made, metric="edist", **KEYS)
    with pytest.raises(DataError, match="prediction has no cells of 'g1'"):
        distances(real, made, **KEYS)
    with raises(DataError, "obsm_key"):
        distances(real, made, obsm_key="X_x", **KEYS)
