from __future__ import annotations

import numpy as np
import pytest

from scforge.errors import DataError, OptionError
from scforge.eval.pertpy_distances import distances, energy_distance, mean_distance


def test_energy_distance_is_its_formula_and_that_of_pertpy() -> None:
    from pertpy.tools import Distance

    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(30, 6)), rng.normal(1.0, 2.0, size=(41, 6))

    def mean(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.linalg.norm(a[:, None] - b[None], axis=2).mean())

    found = energy_distance(one, other)
    assert found == pytest.approx(2 * mean(one, other) - mean(one, one) - mean(other, other))
    assert found == pytest.approx(float(Distance("edistance", obsm_key="x")(one, other)), abs=1e-6)
    assert found == pytest.approx(energy_distance(one, other, within=(mean_distance(one, one), None)))
    unbiased = 2 * mean(one, other) - mean(one, one) * 30 / 29 - mean(other, other) * 41 / 40
    assert energy_distance(one, other, unbiased=True) == pytest.approx(unbiased)
    assert np.isnan(energy_distance(one[:1], other, unbiased=True))
    assert energy_distance(one, one[::-1]) == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(DataError, match="same coordinates"):
        energy_distance(one, other[:, :2])
    with pytest.raises(DataError, match="same coordinates"):
        energy_distance(one, other[:0])


@pytest.mark.parametrize("metric", ["edistance", "euclidean", "pearson_distance", "mmd"])
def test_the_right_cells_are_nearer_than_controls(perturbed, metric: str) -> None:
    real = perturbed(("g0", "g1"))
    made = perturbed(("g0", "g1"), seed=1)
    table = distances(real, {"same": made}, perturbation_key="target", control="control", metric=metric)
    assert table[["method", "perturbation"]].to_numpy().tolist() == [
        ["control", "g0"],
        ["same", "g0"],
        ["control", "g1"],
        ["same", "g1"],
    ]
    away = table.set_index(["method", "perturbation"])["distance"]
    assert (away["same"] < away["control"]).all()


def test_distances_in_an_embedding(perturbed) -> None:
    adatas = [perturbed(("g0",)), perturbed(("g0",), seed=1)]
    rng = np.random.default_rng(0)
    for adata in adatas:
        adata.obsm["X_model"] = rng.normal(size=(adata.n_obs, 3)) + (adata.obs["target"] == "g0").to_numpy()[:, None]
    found = distances(*adatas, perturbation_key="target", control="control", obsm_key="X_model")
    own = [adata.obsm["X_model"][adata.obs["target"] == "g0"] for adata in adatas]
    assert found["method"].tolist() == ["control", "prediction"]
    assert found["distance"][1] == pytest.approx(energy_distance(*own), abs=1e-6)


def test_mistakes_are_told(perturbed) -> None:
    real, made = perturbed(("g0", "g1")), perturbed(("g0",))
    keys = {"perturbation_key": "target", "control": "control"}
    with pytest.raises(OptionError, match="metric='edist' is no distance of pertpy"):
        distances(real, made, metric="edist", **keys)
    with pytest.raises(DataError, match="prediction lacks 'g1'"):
        distances(real, made, **keys)
    with pytest.raises(DataError, match="obsm_key='X_x' is not in real.obsm"):
        distances(real, made, obsm_key="X_x", **keys)
