import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.data.expression import log_normalized
from scforge.errors import DataError, OptionError
from scforge.eval import evaluate_perturbations
from scforge.perturbation.baselines import baseline_effects, perturbation_baselines
from scforge.perturbation.effects import KnownEffects, PerturbedCells, WantedEffects
from scforge.perturbation.keys import Effect, PerturbationKeys
from scforge.testing import raises

KEYS = {"perturbation_key": "target", "control": "control"}
HELD_OUT = ("g0+g1", "g2+g3", "g1+g2")


@pytest.fixture(scope="module")
def train(perturbed) -> ad.AnnData:
    return perturbed(("g0", "g1", "g2", "g3", "g4+g5"), prefix="train")


@pytest.fixture(scope="module")
def real(perturbed) -> ad.AnnData:
    return perturbed(HELD_OUT, seed=1, prefix="test")


@pytest.fixture(scope="module")
def made(perturbed) -> ad.AnnData:
    """Cells of another experiment with the same effects: a good prediction."""
    cells = perturbed(HELD_OUT, seed=2, n_cells=20)
    return cells[cells.obs["target"] != "control"].copy()


def logs(adata: ad.AnnData) -> ad.AnnData:
    adata = adata.copy()
    adata.X = log_normalized(adata)
    return adata


def quick(real: ad.AnnData, predictions: object, **options: object):
    return evaluate_perturbations(real, predictions, intervals=False, **KEYS, **options)


def test_all_baselines_and_the_ceiling_stand_beside_a_prediction(real, train, made) -> None:
    report = evaluate_perturbations(real, {"good": made}, train=train, **KEYS)
    baselines = ["no_change", "train_mean", "control_mean", "additive", "linear_pca", "kernels", "nearest"]
    expected = {"good": "model", **dict.fromkeys(baselines, "baseline"), "technical_duplicate": "ceiling"}
    assert {row.name: row.kind for row in report.rows} == expected
    table = report.to_table()
    assert table.loc["no_change", ["pearson_delta", "direction_accuracy"]].tolist() == [0.0, 0.0]
    # What is planted is nearly additive.
    assert table["pearson_delta"].drop(["good", "technical_duplicate"]).idxmax() == "additive"
    assert table.loc["good", "pearson_delta"] > table.loc["train_mean", "pearson_delta"]
    assert table.loc["train_mean", "calibrated_wmse"] == pytest.approx(0.0)
    assert table.loc["technical_duplicate", "calibrated_wmse"] == pytest.approx(1.0)
    facts = {"effects scored": 3, "effects in the training": 5, "held-out controls": 60}
    assert report.facts.items() >= facts.items()
    frame = report.to_frame()
    assert frame.query("method == 'good' and metric == 'mse'")[["low", "high", "p_value"]].notna().all(axis=None)
    assert report.verdicts()


def test_baselines_are_computed_from_the_training_cells_alone(real, train) -> None:
    keys = PerturbationKeys("target", "control")
    trained = PerturbedCells.read(train, keys, argument="train")
    effects = PerturbedCells.read(real, keys, argument="real").effects
    found = perturbation_baselines(trained, effects, keys, {})
    groups = trained.moments()
    deltas = groups.mean[:5] - groups.mean[5]
    np.testing.assert_allclose(found["train_mean"], np.tile(deltas.mean(axis=0), (3, 1)))
    np.testing.assert_allclose(found["additive"].loc["g0+g1"], deltas[0] + deltas[1])


def test_predicted_effects_and_features_of_genes(real, train) -> None:
    rng = np.random.default_rng(0)
    features = pd.DataFrame(rng.normal(size=(6, 12)), index=[f"g{i}" for i in range(6)])
    effects = pd.DataFrame(rng.normal(0, 0.1, (3, 60)), index=["g1+g0", "g3+g2", "g2+g1"], columns=real.var_names)
    predictions, kinds = {"a": effects, "b": effects * 2}, {"b": "untrained"}
    report = quick(real, predictions, train=train, gene_features={"scgpt": features}, kinds=kinds)
    table = report.to_table()
    assert table.loc["linear_scgpt", "mse"] != table.loc["train_mean", "mse"]
    assert table.loc["a", "pearson_delta"] == pytest.approx(table.loc["b", "pearson_delta"])
    assert {row.name: row.kind for row in report.rows}["b"] == "untrained"
    assert not any("effects that were not measured" in note for note in report.notes)
    more = pd.concat([effects, effects.iloc[:1].set_axis(["g9"])])
    notes = quick(real, more, train=train).notes
    assert "prediction predicts 1 effects that were not measured and are not scored: 'g9'." in notes


@pytest.mark.parametrize("context_key", [None, "type"])
def test_what_the_task_predicts_is_read(real, train, context_key) -> None:
    obs = pd.DataFrame({"perturbation": pd.Categorical(HELD_OUT), "context": pd.Categorical(["all"] * 3)})
    deltas = np.random.default_rng(0).normal(0, 0.1, (3, 60)).astype(np.float32)
    predicted = ad.AnnData(np.full((3, 60), np.nan, dtype=np.float32), obs=obs.set_index(np.array(list("abc"))))
    predicted.var_names = real.var_names
    predicted.layers["delta"] = deltas
    predicted.uns["scforge"] = {"predicted": {"perturbation_key": "target"}}
    index = HELD_OUT if context_key is None else pd.MultiIndex.from_product([HELD_OUT, ["all"]])
    effects = pd.DataFrame(deltas, index=index, columns=real.var_names)
    tables = [quick(real, some, train=train, context_key=context_key).to_table() for some in (predicted, effects)]
    pd.testing.assert_frame_equal(*tables)


def test_contexts_have_their_own_mean_and_the_mean_of_all(perturbed) -> None:
    contexts = ("x", "y")
    train = perturbed(("g0", "g1"), contexts=contexts, prefix="train")
    real, made = (perturbed(("g2",), contexts=contexts, prefix=f"new{seed}", seed=seed) for seed in (1, 2))
    table = quick(real, made, train=train, context_key="type").to_table()
    assert {"prediction", "train_mean", "overall_mean"} <= {*table.index}
    with raises(DataError, "train"):
        quick(real, made, train=train[train.obs["type"] == "x"].copy(), context_key="type")
    deltas = np.arange(8.0).reshape(4, 2)
    known = KnownEffects(
        [Effect((name,), context) for context in contexts for name in "AB"], deltas, {"x": np.zeros(2), "y": np.ones(2)}
    )
    found = baseline_effects(known, WantedEffects([Effect(("C",), "y")]))
    assert (found["overall_mean"].tolist(), found["train_mean"].tolist()) == ([[3.0, 4.0]], [[5.0, 6.0]])
    # In a context without effects the mean is that of all, which need not be said twice.
    known.controls["z"] = np.ones(2)
    assert "overall_mean" not in baseline_effects(known, WantedEffects([Effect(("C",), "z")]))


def test_genes_are_aligned_by_name_and_missing_ones_said(real, train, made) -> None:
    turned = logs(made)[:, ::-1].copy()
    whole = quick(real, logs(made), train=train).to_table()
    pd.testing.assert_frame_equal(whole, quick(real, turned, train=train).to_table(), atol=1e-6)
    # g0 to g3 are what is perturbed; the baselines, which know all genes of the training, still know them.
    part = quick(real, turned[:, :50].copy(), train=train)
    assert part.facts["genes"] == 50
    assert any("prediction lacks 10 of the 60 measured genes (first: 'g0')" in note for note in part.notes)
    assert not any("targets are genes of the data" in note for note in part.notes)
    table = part.to_table()
    assert [*table.index] == [*whole.index]
    assert table.loc["linear_pca", "mse"] != pytest.approx(table.loc["train_mean", "mse"], rel=1e-6)
    fewer = quick(logs(real)[:, 1:].copy(), logs(made), train=logs(train)[:, 1:].copy())
    assert any(note.startswith("3 of 4 targets are genes of the data") for note in fewer.notes)


def test_a_layer_is_read_where_there_is_one(real, train, made) -> None:
    plain = quick(real, made, train=train)
    layered = [some.copy() for some in (real, train)]
    for adata in layered:
        adata.layers["counts"] = adata.X.copy()
        adata.X = adata.X * 0.0
    found = quick(layered[0], made, train=layered[1], layer="counts")
    pd.testing.assert_frame_equal(found.to_table(), plain.to_table())
    assert "Effects of prediction are relative to the training controls." in plain.notes


def renamed(adata: ad.AnnData) -> ad.AnnData:
    adata = adata.copy()
    adata.obs_names = [f"new{i}" for i in range(adata.n_obs)]
    return adata


def test_leaks_are_errors(real, train, made, perturbed) -> None:
    both = ad.concat([train, real[:30]])
    # The parts of a combination may come in any order.
    seen = ad.concat([train, perturbed(("g1+g0",), prefix="seen", seed=8, n_controls=0)])
    embedded = real.copy()
    embedded.obsm["X_scforge"] = np.random.default_rng(0).normal(size=(real.n_obs, 8)).astype(np.float32)
    means = pd.DataFrame(embedded.obsm["X_scforge"]).groupby(real.obs["target"].to_numpy()).mean().drop("control")
    cells = PerturbedCells.read(real, PerturbationKeys("target", "control"), argument="real")
    deltas = cells.measured(cells.moments(), argument="real").deltas
    answer = pd.DataFrame(deltas, index=["g0+g1", "g1+g2", "g2+g3"], columns=real.var_names)
    peeking = renamed(real[real.obs["target"] != "control"])
    for measured, prediction, options, message in [
        (real, made, {"train": both}, "30 of 180 test cells are also training cells"),
        (
            real,
            made,
            {"train": renamed(both)},
            "30 of 180 test cells have exactly the same expression .* remove these copies",
        ),
        (real, made, {"train": seen}, r"1 of 3 test effects are also training effects \(first: 'g0\+g1'\)"),
        (real, peeking, {}, r"120 of 120 cells of predictions\['x'\] are identical to held-out cells"),
        (real, answer, {}, r"predictions\['x'\] equals the measurement in the held-out cells for 3 of 3 effects"),
        (
            embedded,
            made,
            {"gene_features": means},
            r"gene_features\['embedding'\] contains the mean of obsm.* held-out cells of 'g0\+g1'",
        ),
    ]:
        with pytest.raises(DataError, match=message):
            evaluate_perturbations(measured, {"x": prediction}, **{"train": train, **options}, **KEYS)


def test_mistakes_are_told(real, train, made) -> None:
    other, scaled = logs(train), logs(made)
    other.X = other.X.expm1().multiply(np.random.default_rng(0).uniform(0.2, 0.4, (train.n_obs, 1))).log1p().tocsr()
    scaled.X = (scaled.X.expm1() * 0.1).log1p()
    twice = pd.DataFrame(0.1, index=[*HELD_OUT, "g1+g0"], columns=real.var_names)
    for prediction, options, error, message in [
        ({"additive": made}, {}, OptionError, "predictions contains 'additive'"),
        ({}, {}, OptionError, "predictions contains nothing; pass at least one method"),
        (
            {"good": made},
            {"kinds": {"god": "untrained"}},
            OptionError,
            "kinds='god' is not in predictions; did you mean 'good'",
        ),
        (twice, {}, DataError, r"predictions contains 'g0\+g1' more than once"),
        (logs(made)[:, :20].copy(), {}, DataError, "only 20 of 60 measured genes are in all of"),
        (made[:, :50].copy(), {}, DataError, "the counts of .* lack 10 genes with"),
        (made, {"train": train[:, :50].copy()}, DataError, "the counts of train lack 10 genes"),
        (made, {"train": other}, DataError, "the training controls have a median total of .* other cells have 10,000"),
        (scaled, {}, DataError, "have a median total of 1,000 .* but the other cells have 10,000"),
    ]:
        with pytest.raises(error, match=message):
            evaluate_perturbations(real, prediction, **{"train": train, **options}, **KEYS)
