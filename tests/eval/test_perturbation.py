import copy

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from scforge.data.expression import log_normalized
from scforge.errors import DataError, OptionError
from scforge.eval import PerturbationPrediction
from scforge.eval.report import interval
from scforge.perturbation.metrics import TECHNICAL_DUPLICATE, energy_distance, score_deltas, technical_duplicate
from scforge.testing import raises

LABELS = ("g0", "g1", "g2", "g3")


def prediction(*args, **options) -> PerturbationPrediction:
    return PerturbationPrediction("target", "control", *args, **options)


@pytest.fixture(scope="module")
def real(perturbed) -> ad.AnnData:
    return perturbed(LABELS)


@pytest.fixture(scope="module")
def again(perturbed) -> ad.AnnData:
    """Cells of another experiment, as predicted ones."""
    return perturbed(LABELS, seed=1)


@pytest.fixture(scope="module")
def train(perturbed) -> ad.AnnData:
    return perturbed(("g4", "g5", "g6"), seed=5, prefix="train")


def made_of(benchmark: PerturbationPrediction, real, factor: float = 1.0, noise: float = 0.0) -> pd.DataFrame:
    """Predict the measured effects, or parts of them."""
    measured = benchmark.deltas(real, real)[1].droplevel("context")
    return factor * measured + np.random.default_rng(0).normal(0, noise, measured.shape)


def test_figures_are_means_over_effects(real) -> None:
    benchmark = prediction()
    made = made_of(benchmark, real, 0.5, 0.1)
    table, figures = benchmark.table(made, real), benchmark.run(made, real)
    assert tuple(figures) == benchmark.metrics
    assert table["perturbation"].tolist() == [*LABELS]
    assert (table[["n_cells", "n_controls"]] == [40, 60]).all(axis=None)
    predicted, measured = (frame.to_numpy() for frame in benchmark.deltas(made, real))
    np.testing.assert_array_equal(predicted, made.to_numpy())
    expected = score_deltas(predicted, measured, measured)
    for name in ("pearson_delta", "mse", "rank"):
        np.testing.assert_allclose(table[name], expected[name])
        assert figures[name] == pytest.approx(expected[name].mean())
    assert np.isnan(figures["calibrated_wmse"])
    assert 0 < figures["direction_accuracy"] <= 1


def test_figures_follow_predictions_that_change_in_place(real) -> None:
    benchmark = prediction()
    made = made_of(benchmark, real, 0.5, 0.1)
    before = benchmark.run(made, real)
    made[:] = made_of(benchmark, real).to_numpy()
    after = benchmark.run(made, real)
    assert after["pearson_delta"] == pytest.approx(1.0) != before["pearson_delta"]
    changed = real.copy()
    benchmark.run(made, changed)
    changed.X = changed.X[::-1].copy()
    expected = prediction().run(made, changed)["pearson_delta"]
    assert benchmark.run(made, changed)["pearson_delta"] == pytest.approx(expected)


def test_cells_and_their_mean_effects_score_the_same_except_for_the_distance(real, again, perturbed) -> None:
    benchmark = prediction()
    deltas = benchmark.deltas(again, real)[0].droplevel("context")
    # The order does not matter.
    one, other = benchmark.run(again[::-1].copy(), real), benchmark.run(deltas.iloc[::-1, ::-1], real)
    for name in set(benchmark.metrics) - {"energy_distance"}:
        assert one[name] == pytest.approx(other[name], abs=1e-6, nan_ok=True), name
    assert one["energy_distance"] < other["energy_distance"]
    # A single predicted cell is an effect without a distance.
    table = benchmark.table(perturbed(LABELS, seed=1, n_cells=1, n_controls=5), real)
    assert table["energy_distance"].isna().all()
    assert table["mse"].notna().all()


def test_controls_of_the_prediction_come_first_then_those_of_the_training(real, train, again, perturbed) -> None:
    alone = again[again.obs["target"] != "control"].copy()
    of_measured, of_others = (prediction().deltas(alone, some)[0] for some in (real, perturbed(LABELS, seed=9)))
    trained = prediction().trained_on(train)
    assert not np.allclose(of_measured, of_others)  # the measured ones, without a training
    assert not np.allclose(trained.deltas(alone, real)[0], of_measured)
    np.testing.assert_allclose(prediction().deltas(again, real)[0], trained.deltas(again, real)[0])
    # Controls of the training as a prediction: nothing happens.
    still = train[train.obs["target"] == "control"].copy()
    still.obs["target"] = "g0"
    part = real[real.obs["target"].isin(["g0", "control"])].copy()
    np.testing.assert_allclose(prediction().trained_on(train).deltas(still, part)[0], 0.0, atol=1e-12)


def test_energy_distance_is_in_components_of_the_training(real, train) -> None:
    benchmark = prediction(n_comps=5).trained_on(train)
    made = made_of(benchmark, real, 0.5)
    reference = benchmark._reference(real)
    space, cells = reference.space, reference.cells
    of_train = space.cells(log_normalized(train[train.obs["target"] == "control"]))
    target = space.cells(cells.expression[cells.groups == 2])
    shift = space.shift(made.loc[["g2"]].to_numpy())
    assert shift.shape == (1, 5)
    table = benchmark.table(made, real)
    assert table["energy_distance"][2] == pytest.approx(energy_distance(of_train + shift, target))
    right, nothing = (benchmark.run(made_of(benchmark, real, factor), real) for factor in (1.0, 0.0))
    assert right["energy_distance"] < table["energy_distance"].mean() < nothing["energy_distance"]


def test_calibrated_figures_are_0_for_the_training_mean_and_1_for_a_duplicate(real, train) -> None:
    benchmark = prediction().trained_on(train)
    base, made = benchmark._reference(real).base, made_of(benchmark, real, 0.7)
    of_base, of_ceiling, figures = (benchmark.run(one, real) for one in (base, TECHNICAL_DUPLICATE, made))
    for name in ("pearson_delta", "wmse"):
        assert of_base[f"calibrated_{name}"] == pytest.approx(0.0)
        assert of_ceiling[f"calibrated_{name}"] == pytest.approx(1.0)
        expected = (figures[name] - of_base[name]) / (of_ceiling[name] - of_base[name])
        assert figures[f"calibrated_{name}"] == pytest.approx(expected)
    assert of_base["weighted_r2_delta"] <= 0


def test_the_ceiling_is_the_technical_duplicate(real) -> None:
    benchmark = prediction(seed=3)
    table, cells = benchmark.table(TECHNICAL_DUPLICATE, real), benchmark._reference(real).cells
    expected = technical_duplicate(cells.expression, cells.groups, cells.controls, seed=3)
    assert table["pearson_delta"].mean() == pytest.approx(expected["pearson_delta"].mean(), rel=0.1)
    lonely = prediction().table(TECHNICAL_DUPLICATE, real[np.r_[:61, 100 : real.n_obs]].copy())
    assert lonely["n_cells"][0] == 1
    assert lonely["pearson_delta"].isna().tolist() == [True, False, False, False]


def test_draws_are_the_same_for_all_methods_and_are_of_perturbations(real, train) -> None:
    benchmark = prediction().trained_on(train)
    good, bad = made_of(benchmark, real, 0.9), made_of(benchmark, real, 0.2, 0.2)
    one, other, again = (benchmark.resampled(made, real, n=300, seed=1) for made in (good, bad, good))
    assert tuple(one) == benchmark.metrics
    pd.testing.assert_frame_equal(one, again)
    assert (one["pearson_delta"] > other["pearson_delta"]).all()
    # About as wide as Student's t has it, however few perturbations there are.
    figures = benchmark.table(bad, real)["pearson_delta"]
    half = stats.t.ppf(0.975, 3) * figures.std(ddof=1) / np.sqrt(len(LABELS))
    low, high = interval(0.0, other["pearson_delta"].to_numpy(), n_units=benchmark.n_units(real))
    assert (high - low) / 2 == pytest.approx(half, rel=0.2)
    single = real[real.obs["target"].isin(["g0", "control"])].copy()
    assert benchmark.resampled(good, single, n=3, seed=1) is None
    assert np.isnan(benchmark.run(good, single)["rank"])


def test_contexts(perturbed) -> None:
    real, cells = (perturbed(("g0",), contexts=("x", "y", "z"), seed=seed) for seed in (0, 1))
    benchmark = prediction("type")
    table = benchmark.table(cells, real)
    assert table[["perturbation", "context"]].to_numpy().tolist() == [["g0", "x"], ["g0", "y"], ["g0", "z"]]
    draws = benchmark.resampled(cells, real, n=50, seed=0)
    assert draws["mse"].nunique() > 1  # of contexts, since there is one perturbation only
    deltas, _ = benchmark.deltas(cells, real)
    np.testing.assert_allclose(benchmark.table(deltas, real)["mse"], table["mse"])
    with pytest.raises(DataError, match="predictions has 1 levels; pass an index of perturbation and context"):
        benchmark.table(deltas.droplevel("context"), real)
    with raises(DataError, "predictions"):
        benchmark.table(deltas.drop(("g0", "y")), real)


def test_a_copy_with_another_seed_keeps_nothing_of_the_first(real) -> None:
    benchmark = prediction(max_cells=10)
    made = made_of(benchmark, real, 0.5)
    first = benchmark.run(made, real)["energy_distance"]
    other = copy.copy(benchmark)
    other.seed = 1
    assert other.run(made, real)["energy_distance"] != first
    assert benchmark.run(made, real)["energy_distance"] == first


def test_the_highest_genes_alone(real) -> None:
    genes = prediction(n_top_genes=10).deltas(made_of(prediction(), real), real)[0].columns
    means = pd.Series(np.asarray(real[real.obs["target"] == "control"].X.mean(axis=0)).ravel(), real.var_names)
    assert set(genes) == set(means.nlargest(10).index)
    with raises(OptionError, "n_top_genes"):
        prediction(n_top_genes=1)


def test_mistakes_are_told(real, train) -> None:
    made = made_of(prediction(), real)
    for wrong, message in [
        (made.loc[["g0", "g2"]], r"predictions is missing 2 of 4 measured effects \('g1', 'g3'\)"),
        (made.iloc[:, 10:], "predictions lacks 10 of 60 genes"),
        (pd.concat([made, made]), "predictions contains 'g0', .* more than once"),
        (made * np.nan, "NaN or infinite values"),
    ]:
        with pytest.raises(DataError, match=message):
            prediction().run(wrong, real)
    with raises(DataError, "perturbation_key"):
        PerturbationPrediction("targets", "control").check(real)
    with raises(DataError, "real"):
        prediction().check(real[real.obs["target"] == "control"].copy())
    with raises(DataError, "train"):
        prediction().trained_on(train[:, 5:].copy()).check(real)
