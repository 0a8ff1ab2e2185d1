import numpy as np
import pandas as pd
import pertpy
import pytest
from scipy import sparse, stats

from scforge.errors import DataError, ScforgeWarning
from scforge.perturbation.effects import effects_of, moments_of
from scforge.perturbation.metrics import (
    de_genes,
    de_weights,
    discrimination_scores,
    own_genes,
    score_deltas,
    technical_duplicate,
    warn_of_few,
)
from scforge.testing import raises


def effects(n_perturbations: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Measured effects, and a prediction of them with noise."""
    rng = np.random.default_rng(0)
    measured = rng.normal(size=(n_perturbations, 50))
    return measured, measured + rng.normal(size=measured.shape)


def test_figures_are_those_of_scipy_of_the_formulas_and_of_pertpy() -> None:
    measured, predicted = effects()
    scores = measured * 3
    table = score_deltas(predicted, measured, scores)
    for row, (made, true) in enumerate(zip(predicted, measured, strict=True)):
        top = np.argsort(-np.abs(scores[row]))[:20]
        size = np.abs(scores[row])
        weights = ((size - size.min()) / (size.max() - size.min())) ** 2
        expected = {
            "pearson_delta": stats.pearsonr(made, true).statistic,
            "pearson_delta_top20": stats.pearsonr(made[top], true[top]).statistic,
            "cosine": made @ true / np.sqrt((made**2).sum() * (true**2).sum()),
            "wmse": np.average((made - true) ** 2, weights=weights),
        }
        assert table.loc[row, list(expected)].to_dict() == pytest.approx(expected)
        # pertpy compares the means of two groups of cells.
        distance = pertpy.tl.Distance(metric="cosine_distance", obsm_key="X_pca")
        found = float(distance(np.tile(made, (2, 1)), np.tile(true, (2, 1))))
        assert table.loc[row, "cosine"] == pytest.approx(1 - found, abs=1e-6)


def test_rank_is_0_for_the_right_effect_1_for_the_last_and_a_half_for_one_that_is_the_same_for_all() -> None:
    measured, _ = effects(40)
    assert (score_deltas(measured * 0.1, measured, measured)["rank"] == 0).all()
    assert (score_deltas(np.zeros_like(measured), measured, measured)["rank"] == 0.5).all()
    mean = np.tile(measured.mean(axis=0), (40, 1))
    assert score_deltas(mean, measured, measured)["rank"].mean() == pytest.approx(0.5)
    two = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert score_deltas(two[::-1], two, two)["rank"].tolist() == [1.0, 1.0]
    measured, _ = effects(1)
    table = score_deltas(np.zeros_like(measured), measured, measured)
    assert table[["pearson_delta", "pearson_delta_top20", "cosine"]].to_numpy().tolist() == [[0.0, 0.0, 0.0]]
    assert np.isnan(table.loc[0, "rank"])
    # A constant has no direction either, whatever rounding leaves of it.
    assert score_deltas(np.full_like(measured, 0.1), measured, measured).loc[0, "pearson_delta"] == 0.0


def test_weighted_r2_is_its_formula_and_what_all_have_in_common_earns_nothing() -> None:
    measured, predicted = effects()
    measured += 5.0
    center = measured.mean(axis=0)
    table = score_deltas(predicted, measured, measured)
    for row, weights in enumerate(de_weights(measured)):
        rest, error = measured[row] - center, measured[row] - predicted[row]
        spread = np.average((rest - np.average(rest, weights=weights)) ** 2, weights=weights)
        expected = 1 - np.average(error**2, weights=weights) / spread
        assert table.loc[row, "weighted_r2_delta"] == pytest.approx(expected)
    of_mean = score_deltas(np.tile(center, (len(measured), 1)), measured, measured)["weighted_r2_delta"]
    assert (of_mean <= 1e-12).all()
    assert (score_deltas(measured, measured, measured)["weighted_r2_delta"] == 1).all()
    assert score_deltas(predicted[:1], measured[:1], measured[:1])["weighted_r2_delta"].isna().all()
    assert score_deltas(predicted[:1], measured[:1], measured[:1], None, center)["weighted_r2_delta"].notna().all()


def test_directions_are_counted_over_the_genes_that_change() -> None:
    measured = np.array([[1.0, -1.0, 2.0, 0.5], [1.0, 1.0, 1.0, 1.0]])
    predicted = np.array([[0.1, 1.0, 0.0, -1.0], [1.0, 1.0, 1.0, 1.0]])
    changed = np.array([[True, True, True, False], [False, False, False, False]])
    found = score_deltas(predicted, measured, measured, changed)["direction_accuracy"]
    assert found.tolist() == pytest.approx([1 / 3, np.nan], nan_ok=True)
    assert score_deltas(predicted, measured, measured)["direction_accuracy"].isna().all()


@pytest.mark.parametrize("size", [0.0, 0.1, 0.5])
def test_a_duplicate_explains_what_a_second_experiment_would(size: float) -> None:
    """Effects of several sizes are told, and none knows anything; the noise of a cell is 1."""
    rng = np.random.default_rng(3)
    groups, controls, center = np.repeat(np.arange(9), 60), np.full(8, 8), np.zeros(200)
    halves, wholes = [], []
    for _ in range(6):
        truth = np.concatenate([rng.normal(0, size, (8, 200)), np.zeros((1, 200))])
        cells = [sparse.csr_matrix(truth[groups] + rng.normal(size=(540, 200))) for _ in range(2)]
        halves.append(technical_duplicate(cells[0], groups, controls, center))
        one, other = (effects_of(moments_of(some, groups, 9), np.arange(8), controls) for some in cells)
        wholes.append(score_deltas(other.deltas, one.deltas, one.scores, de_genes(one.p_values), center))
    of_halves, of_wholes = (pd.concat(tables).mean() for tables in (halves, wholes))
    assert of_halves["weighted_r2_delta"] == pytest.approx(of_wholes["weighted_r2_delta"], abs=0.1)
    assert of_halves["pearson_delta"] == pytest.approx(of_wholes["pearson_delta"], abs=0.05)
    if size == 0:
        # Were the genes chosen by all cells, both halves would agree on those.
        assert of_halves["pearson_delta_top20"] == pytest.approx(0.0, abs=0.08)
        assert of_halves["weighted_r2_delta"] < 0


def test_effects_of_other_contexts_are_no_candidates() -> None:
    rng = np.random.default_rng(0)
    contexts = ["x"] * 5 + ["y"] * 7 + ["z"]
    shared = {name: rng.normal(size=50) for name in "xyz"}
    own = np.array([shared[name] for name in contexts])
    measured = 3 * own + rng.normal(size=(13, 50))
    rank = score_deltas(own, measured, measured, None, None, contexts)["rank"].to_numpy()
    score = discrimination_scores(own, measured, "l1", None, contexts)
    for rows in (slice(5), slice(5, 12)):
        assert rank[rows].mean() == pytest.approx(0.5)
        # The chance of Q effects is (1 + 1 / Q) / 2.
        assert score[rows].mean() == pytest.approx((1 + 1 / len(score[rows])) / 2)
    assert np.isnan([rank[12], score[12]]).all()
    assert score_deltas(own, measured, measured)["rank"].mean() < 0.3


def test_the_perturbed_gene_does_not_count_in_discrimination() -> None:
    # All that tells the effects apart is what happens to the perturbed genes.
    measured = np.full((3, 5), 1.0)
    measured[np.arange(3), np.arange(3)] = -9.0
    left_out = own_genes([("a",), ("b",), ("c",)], np.array(list("abcde")))
    assert left_out.sum(axis=1).tolist() == [1, 1, 1]
    assert discrimination_scores(measured, measured).tolist() == [1.0] * 3
    scores = discrimination_scores(np.ones_like(measured), measured, "l1", left_out)
    assert scores.tolist() == [1.0] * 3  # its own gene left out, the own effect is the flat one
    np.testing.assert_array_equal(own_genes([("a", "d"), ("x",)], np.array(list("abcde"))).sum(axis=1), [2, 0])
    assert np.isnan(discrimination_scores(np.ones((1, 2)), np.ones((1, 2)))).all()


def test_what_is_no_number_is_refused() -> None:
    measured, predicted = effects()
    with raises(DataError, "predicted"):
        score_deltas(predicted * np.nan, measured, measured)


def test_effects_without_a_context() -> None:
    effects = np.eye(4)
    assert discrimination_scores(effects, effects, contexts=[None, None, "a", "a"]).tolist() == [1.0] * 4


def test_overlap_of_the_genes_that_change() -> None:
    changed = np.array([[True, True, False, False]] * 4 + [[False] * 4])
    predicted = np.array([[2.0, -3, 1, 0], [0, 3, 2, 1], [0, 0, 0, 0], [1, 1, 1, 0], [1, 2, 3, 4]])
    found = score_deltas(predicted, predicted, predicted, changed)["de_overlap"]
    np.testing.assert_allclose(found, [1.0, 0.5, 0.5, 2 / 3, np.nan])
    assert score_deltas(predicted, predicted, predicted)["de_overlap"].isna().all()


def test_rank_among_the_whole_screen() -> None:
    measured, trained = np.eye(6)[:2], np.eye(6)[2:]
    own = measured + np.array([[0, 0, 2.0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    contexts = ["a", "a"]
    found = score_deltas(own, measured, measured, None, None, contexts, (trained, ["a", "a", "a", "b"]))
    assert found["rank"].tolist() == [0.0, 0.0]
    assert found["rank_in_screen"].tolist() == [0.25, 0.0]  # one of two held-out and three trained ones is nearer
    assert score_deltas(own, measured, measured)["rank_in_screen"].isna().all()


def test_few_effects_are_no_comparison() -> None:
    with pytest.warns(ScforgeWarning, match="Only 9 held-out effects are scored, fewer than 10"):
        warn_of_few(9)
    warn_of_few(10)
