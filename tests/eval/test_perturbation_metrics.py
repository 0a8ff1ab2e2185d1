from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import sparse, stats

from scforge.errors import DataError
from scforge.eval.perturbation_metrics import (
    calibrated,
    de_genes,
    de_weights,
    score_deltas,
    technical_duplicate,
    top_genes,
)
from scforge.eval.pseudobulk import effects_of, moments_of


def effects(n_perturbations: int = 6, n_genes: int = 50, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Measured effects, and a prediction of them with noise."""
    rng = np.random.default_rng(seed)
    measured = rng.normal(size=(n_perturbations, n_genes))
    return measured, measured + rng.normal(size=measured.shape)


def test_figures_are_those_of_scipy_and_of_the_formulas() -> None:
    measured, predicted = effects()
    scores = measured * 3
    table = score_deltas(predicted, measured, scores)
    for row in range(len(measured)):
        top = np.argsort(-np.abs(scores[row]))[:20]
        size = np.abs(scores[row])
        weights = ((size - size.min()) / (size.max() - size.min())) ** 2
        expected = {
            "pearson_delta": stats.pearsonr(predicted[row], measured[row]).statistic,
            "pearson_delta_top20": stats.pearsonr(predicted[row, top], measured[row, top]).statistic,
            "cosine": predicted[row]
            @ measured[row]
            / np.sqrt((predicted[row] ** 2).sum() * (measured[row] ** 2).sum()),
            "mse": np.mean((predicted[row] - measured[row]) ** 2),
            "mae": np.mean(np.abs(predicted[row] - measured[row])),
            "wmse": np.average((predicted[row] - measured[row]) ** 2, weights=weights),
        }
        for name, value in expected.items():
            assert table.loc[row, name] == pytest.approx(value), name


@pytest.mark.parametrize(
    ("metric", "column"), [("pearson_distance", "pearson_delta"), ("cosine_distance", "cosine"), ("mse", "mse")]
)
def test_figures_are_those_of_pertpy(metric: str, column: str) -> None:
    import pertpy

    measured, predicted = effects()
    table = score_deltas(predicted, measured, measured)
    distance = pertpy.tl.Distance(metric=metric, obsm_key="X_pca")
    for row in range(len(measured)):
        # It compares the means of two groups of cells.
        found = float(distance(np.tile(predicted[row], (2, 1)), np.tile(measured[row], (2, 1))))
        assert table.loc[row, column] == pytest.approx(found if column == "mse" else 1 - found, abs=1e-6)


def test_rank_is_0_for_the_right_effect_1_for_the_last_and_a_half_for_one_that_is_the_same_for_all() -> None:
    measured, _ = effects(5)
    assert score_deltas(measured * 0.1, measured, measured)["rank"].tolist() == [0.0] * 5
    assert score_deltas(np.zeros_like(measured), measured, measured)["rank"].tolist() == [0.5] * 5
    two = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert score_deltas(two[::-1], two, two)["rank"].tolist() == [1.0, 1.0]


def test_one_prediction_for_all_has_a_mean_rank_of_a_half() -> None:
    measured, _ = effects(40)
    mean = np.tile(measured.mean(axis=0), (40, 1))
    assert score_deltas(mean, measured, measured)["rank"].mean() == pytest.approx(0.5)


def test_no_change_knows_nothing_and_a_single_effect_has_no_rank() -> None:
    measured, _ = effects(1)
    table = score_deltas(np.zeros_like(measured), measured, measured)
    assert table[["pearson_delta", "pearson_delta_top20", "cosine"]].to_numpy().tolist() == [[0.0, 0.0, 0.0]]
    assert np.isnan(table.loc[0, "rank"])
    # A constant has no direction either, whatever rounding leaves of it.
    assert score_deltas(np.full_like(measured, 0.1), measured, measured).loc[0, "pearson_delta"] == 0.0


def test_weights_have_mean_1_and_are_flat_where_scores_are() -> None:
    weights = de_weights(np.array([[0.0, -1.0, 2.0], [3.0, 3.0, -3.0]]))
    np.testing.assert_allclose(weights, [[0.0, 0.6, 2.4], [1.0, 1.0, 1.0]])
    assert top_genes(np.array([[1.0, -3.0, 2.0]]), 2).tolist() == [[1, 2]]


def test_what_cannot_be_scored_is_refused() -> None:
    measured, predicted = effects()
    with pytest.raises(DataError, match=r"the shapes \(6, 49\), \(6, 50\)"):
        score_deltas(predicted[:, 1:], measured, measured)
    predicted[0, 0] = np.nan
    with pytest.raises(DataError, match="not numbers"):
        score_deltas(predicted, measured, measured)


def test_effects_and_scores_are_those_of_scipy() -> None:
    rng = np.random.default_rng(0)
    cells = rng.poisson(1.0, size=(30, 8)).astype(np.float32)
    codes = np.array([0] * 10 + [1] * 15 + [-1] * 5)
    found = effects_of(moments_of(sparse.csr_matrix(cells), codes, 2), np.array([0]), np.array([1]))
    one, other = cells[:10].astype(np.float64), cells[10:25].astype(np.float64)
    np.testing.assert_allclose(found.deltas[0], one.mean(axis=0) - other.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(found.scores[0], stats.ttest_ind(one, other, equal_var=False).statistic, rtol=1e-5)
    assert (found.n_cells.tolist(), found.n_controls.tolist()) == ([10], [15])


def cells_of(n: int, spread: float) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Two perturbations of `n` cells and as many controls, over 200 genes."""
    rng = np.random.default_rng(1)
    effects = np.concatenate([rng.normal(size=(2, 200)), np.zeros((1, 200))])
    groups = np.repeat([0, 1, 2], n)
    cells = effects[groups] + spread * rng.normal(size=(3 * n, 200))
    return sparse.csr_matrix(cells), groups


def test_a_duplicate_is_as_good_as_a_second_experiment() -> None:
    expression, groups = cells_of(200, 6.0)
    controls = np.array([2, 2])
    table = technical_duplicate(expression, groups, controls, n_splits=20)
    # The means of 200 cells and of 200 controls have a variance of 6^2 / 200 each; effects have 1.
    noise = 2 * 36 / 200
    assert table["mse"].mean() == pytest.approx(2 * noise, rel=0.1)
    assert table["pearson_delta"].mean() == pytest.approx(1 / (1 + noise), abs=0.06)
    assert table["rank"].tolist() == [0.0, 0.0]


def test_a_duplicate_needs_two_cells() -> None:
    expression, groups = cells_of(4, 1.0)
    kept = np.array([0, *range(4, 12)])
    table = technical_duplicate(expression[kept], groups[kept], np.array([2, 2]))
    assert table["mse"].isna().tolist() == [True, False]


def test_a_calibrated_score_is_0_at_the_base_and_1_at_the_ceiling() -> None:
    table = pd.DataFrame({"cosine": [0.2, 0.5, 0.8], "rank": [0.5, 0.3, 0.1], "mse": [1.0, 0.5, 2.0]}, list("bmc"))
    found = calibrated(table, "b", "c")
    assert found.loc["b", ["cosine", "rank"]].tolist() == [0.0, 0.0]
    assert found.loc["c", ["cosine", "rank"]].tolist() == [1.0, 1.0]
    np.testing.assert_allclose(found.loc["m", ["cosine", "rank"]].to_numpy(dtype=float), [0.5, 0.5])
    # The ceiling is worse than the base: nothing can be shown there.
    assert found["mse"].isna().all()


def test_weighted_r2_is_its_formula_and_what_all_have_in_common_earns_nothing() -> None:
    measured, predicted = effects()
    measured += 5.0
    center = measured.mean(axis=0)
    table = score_deltas(predicted, measured, measured)
    for row in range(len(measured)):
        weights = de_weights(measured)[row]
        rest, error = measured[row] - center, measured[row] - predicted[row]
        spread = np.average((rest - np.average(rest, weights=weights)) ** 2, weights=weights)
        expected = 1 - np.average(error**2, weights=weights) / spread
        assert table.loc[row, "weighted_r2_delta"] == pytest.approx(expected)
    of_mean = score_deltas(np.tile(center, (len(measured), 1)), measured, measured)["weighted_r2_delta"]
    assert (of_mean <= 1e-12).all()
    assert (score_deltas(measured, measured, measured)["weighted_r2_delta"] == 1).all()
    one = score_deltas(predicted[:1], measured[:1], measured[:1])["weighted_r2_delta"]
    assert np.isnan(one).all()
    assert score_deltas(predicted[:1], measured[:1], measured[:1], None, center)["weighted_r2_delta"].notna().all()


def test_directions_are_counted_over_the_genes_that_change() -> None:
    measured = np.array([[1.0, -1.0, 2.0, 0.5], [1.0, 1.0, 1.0, 1.0]])
    predicted = np.array([[0.1, 1.0, 0.0, -1.0], [1.0, 1.0, 1.0, 1.0]])
    changed = np.array([[True, True, True, False], [False, False, False, False]])
    found = score_deltas(predicted, measured, measured, changed)["direction_accuracy"]
    assert found[0] == pytest.approx(1 / 3)
    assert np.isnan(found[1])
    assert score_deltas(predicted, measured, measured)["direction_accuracy"].isna().all()
    with pytest.raises(DataError, match=r"changed has the shape \(2, 3\)"):
        score_deltas(predicted, measured, measured, changed[:, :3])


def test_p_values_are_those_of_scipy() -> None:
    rng = np.random.default_rng(0)
    expression = rng.poisson(1.0, (50, 30)).astype(np.float64)
    expression[:, 0] = 0.0
    groups = np.repeat([0, 1, 2], [14, 1, 35])
    found = effects_of(
        moments_of(sparse.csr_matrix(expression), groups, 3), np.array([0, 1]), np.array([2, 2])
    ).p_values
    expected = stats.ttest_ind(expression[:14, 1:], expression[15:, 1:], equal_var=False).pvalue
    np.testing.assert_allclose(found[0, 1:], expected, rtol=1e-9)
    assert found[0, 0] == 1.0
    assert (found[1] == 1.0).all()  # one cell has no spread
    np.testing.assert_array_equal(de_genes(found)[0], stats.false_discovery_control(found[0]) <= 0.05)


def experiments(size: float, n: int = 6) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Mean figures of duplicates, and of second experiments, on effects of a size; the noise of a cell is 1."""
    rng = np.random.default_rng(3)
    groups, controls, center = np.repeat(np.arange(9), 60), np.full(8, 8), np.zeros(200)
    halves, wholes = [], []
    for _ in range(n):
        truth = np.concatenate([rng.normal(0, size, (8, 200)), np.zeros((1, 200))])
        cells = [sparse.csr_matrix(truth[groups] + rng.normal(size=(540, 200))) for _ in range(2)]
        halves.append(technical_duplicate(cells[0], groups, controls, center))
        one, other = (effects_of(moments_of(some, groups, 9), np.arange(8), controls) for some in cells)
        wholes.append(score_deltas(other.deltas, one.deltas, one.scores, de_genes(one.p_values), center))
    return pd.concat(halves).mean(), pd.concat(wholes).mean()


@pytest.mark.parametrize("size", [0.0, 0.1, 0.2, 0.5])
def test_a_duplicate_explains_what_a_second_experiment_would(size: float) -> None:
    of_halves, of_wholes = experiments(size)
    assert of_halves["weighted_r2_delta"] == pytest.approx(of_wholes["weighted_r2_delta"], abs=0.1)
    assert of_halves["pearson_delta"] == pytest.approx(of_wholes["pearson_delta"], abs=0.05)


def test_a_duplicate_knows_nothing_of_effects_that_are_none() -> None:
    found, _ = experiments(0.0)
    # Were the genes chosen by all cells, both halves would agree on those.
    assert found["pearson_delta_top20"] == pytest.approx(0.0, abs=0.08)
    assert found["weighted_r2_delta"] < 0


def test_ranks_are_within_contexts() -> None:
    rng = np.random.default_rng(0)
    contexts = ["x"] * 5 + ["y"] * 7 + ["z"]
    shared = {name: rng.normal(size=50) for name in "xyz"}
    own = np.array([shared[name] for name in contexts])
    measured = 3 * own + rng.normal(size=(13, 50))
    rank = score_deltas(own, measured, measured, None, None, contexts)["rank"]
    assert rank[:5].mean() == pytest.approx(0.5)
    assert rank[5:12].mean() == pytest.approx(0.5)
    assert np.isnan(rank[12])
    assert score_deltas(own, measured, measured)["rank"].mean() < 0.3
    with pytest.raises(DataError, match="contexts has 1 entries for 13 effects"):
        score_deltas(own, measured, measured, None, None, ["x"])
