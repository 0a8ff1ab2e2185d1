import numpy as np
import pertpy
import pytest
from cell_eval import MetricsEvaluator

from scforge.eval import PerturbationPrediction
from scforge.eval.expression import log_normalized
from scforge.eval.perturbation_metrics import energy_distance


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


@pytest.mark.filterwarnings("ignore")
def test_ours_are_the_figures_of_cell_eval(cells, tmp_path) -> None:
    evaluator = MetricsEvaluator(*cells, control_pert="control", pert_col="target", outdir=str(tmp_path), skip_de=True)
    table, _ = evaluator.compute(profile="anndata", skip_metrics=["clustering_agreement"], write_csv=False)
    table = table.to_pandas().sort_values("perturbation", ignore_index=True)
    ours = PerturbationPrediction("target", "control").table(*cells)
    assert table["perturbation"].tolist() == ours["perturbation"].tolist()
    theirs = {"pearson_delta": "pearson_delta", "mse": "mse_delta", "mae": "mae_delta"}
    theirs |= {f"discrimination_{name}": f"discrimination_score_{name}" for name in ("l1", "l2", "cosine")}
    for name, their in theirs.items():
        np.testing.assert_allclose(ours[name], table[their].to_numpy(dtype=float), atol=1e-6, rtol=0, err_msg=name)
        # They differ between perturbations, or nothing was compared.
        assert ours[name].nunique() > 1, name


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
