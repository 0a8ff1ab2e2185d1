from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, OptionError
from scforge.eval import evaluate_perturbations
from scforge.eval.log_scale import log_normalised
from scforge.eval.perturbation_baselines import KnownEffects, WantedEffects, baseline_effects
from scforge.eval.perturbation_cells import EffectKeys, PerturbedCells
from scforge.eval.perturbation_report import perturbation_baselines

KEYS = {"perturbation_key": "target", "control": "control"}
HELD_OUT = ("g0+g1", "g2+g3", "g1+g2")


@pytest.fixture(scope="module")
def train(perturbed):
    return perturbed(("g0", "g1", "g2", "g3", "g4+g5"), prefix="train")


@pytest.fixture(scope="module")
def real(perturbed):
    return perturbed(HELD_OUT, seed=1, prefix="test")


@pytest.fixture(scope="module")
def made(perturbed):
    """Cells of another experiment with the same effects: a good prediction."""
    cells = perturbed(HELD_OUT, seed=2, n_cells=20)
    return cells[cells.obs["target"] != "control"].copy()


def test_all_baselines_and_the_ceiling_stand_beside_a_prediction(real, train, made) -> None:
    report = evaluate_perturbations(real, {"good": made}, train=train, **KEYS)
    kinds = {row.name: row.kind for row in report.rows}
    assert kinds == {
        "good": "model",
        "no_change": "baseline",
        "train_mean": "baseline",
        "control_mean": "baseline",
        "additive": "baseline",
        "linear_pca": "baseline",
        "nearest": "baseline",
        "technical_duplicate": "ceiling",
    }
    table = report.to_table()
    assert table.loc["no_change", ["pearson_delta", "direction_accuracy"]].tolist() == [0.0, 0.0]
    # What is planted is nearly additive.
    assert table["pearson_delta"].drop(["good", "technical_duplicate"]).idxmax() == "additive"
    assert table.loc["good", "pearson_delta"] > table.loc["train_mean", "pearson_delta"]
    assert table.loc["train_mean", "calibrated_wmse"] == pytest.approx(0.0)
    assert table.loc["technical_duplicate", "calibrated_wmse"] == pytest.approx(1.0)
    assert report.facts["effects scored"] == 3
    assert report.facts["effects in the training"] == 5
    assert report.facts["held-out controls"] == 60
    frame = report.to_frame()
    assert frame.query("method == 'good' and metric == 'mse'")[["low", "high", "p_value"]].notna().all(axis=None)
    assert report.verdicts()


def test_baselines_are_computed_from_the_training_cells_alone(real, train, made, perturbed) -> None:
    keys = EffectKeys("target", "control")
    trained = PerturbedCells.read(train, keys, argument="train")
    effects = PerturbedCells.read(real, keys, argument="real").effects
    found = perturbation_baselines(trained, effects, keys, {})
    groups = trained.moments()
    deltas = groups.mean[:5] - groups.mean[5]
    np.testing.assert_allclose(found["train_mean"], np.tile(deltas.mean(axis=0), (3, 1)))
    np.testing.assert_allclose(found["additive"].loc["g0+g1"], deltas[0] + deltas[1])
    # Other test cells change the scores, and not the baselines: no change stays no change, and so on.
    other = perturbed(HELD_OUT, seed=11, prefix="other")
    tables = [
        evaluate_perturbations(some, made, train=train, intervals=False, **KEYS).to_table() for some in (real, other)
    ]
    assert not np.allclose(tables[0].loc["additive", "mse"], tables[1].loc["additive", "mse"])


def test_predicted_effects_and_features_of_genes(real, train) -> None:
    rng = np.random.default_rng(0)
    genes = [f"g{i}" for i in range(6)]
    features = pd.DataFrame(rng.normal(size=(6, 12)), index=genes)
    effects = pd.DataFrame(rng.normal(0, 0.1, (3, 60)), index=["g1+g0", "g3+g2", "g2+g1"], columns=real.var_names)
    report = evaluate_perturbations(
        real,
        {"a": effects, "b": effects * 2},
        train=train,
        gene_features={"scgpt": features},
        kinds={"b": "untrained"},
        intervals=False,
        **KEYS,
    )
    table = report.to_table()
    assert "linear_scgpt" in table.index
    assert table.loc["linear_scgpt", "mse"] != table.loc["train_mean", "mse"]
    assert {row.name: row.kind for row in report.rows}["b"] == "untrained"
    assert not any("more than was measured" in note for note in report.notes)
    more = pd.concat([effects, effects.iloc[:1].set_axis(["g9"])])
    notes = evaluate_perturbations(real, more, train=train, intervals=False, **KEYS).notes
    assert "prediction predicts more than was measured (effects: 1), which is not scored: 'g9'." in notes
    assert table.loc["a", "pearson_delta"] == pytest.approx(table.loc["b", "pearson_delta"])


@pytest.mark.parametrize("context_key", [None, "type"])
def test_what_the_task_predicts_is_read(real, train, context_key) -> None:
    rng = np.random.default_rng(0)
    obs = pd.DataFrame({"perturbation": pd.Categorical(HELD_OUT), "context": pd.Categorical(["all"] * 3)})
    deltas = rng.normal(0, 0.1, (3, 60)).astype(np.float32)
    predicted = ad.AnnData(np.full((3, 60), np.nan, dtype=np.float32), obs=obs.set_index(np.array(list("abc"))))
    predicted.var_names = real.var_names
    predicted.layers["delta"] = deltas
    predicted.uns["scforge"] = {"predicted": {"perturbation_key": "target"}}
    index = HELD_OUT if context_key is None else pd.MultiIndex.from_product([HELD_OUT, ["all"]])
    effects = pd.DataFrame(deltas, index=index, columns=real.var_names)
    one, other = (
        evaluate_perturbations(real, some, train=train, context_key=context_key, intervals=False, **KEYS).to_table()
        for some in (predicted, effects)
    )
    pd.testing.assert_frame_equal(one, other)


def test_contexts_have_their_own_mean_and_the_mean_of_all(perturbed) -> None:
    contexts = ("x", "y")
    train = perturbed(("g0", "g1"), contexts=contexts, prefix="train")
    real = perturbed(("g2",), contexts=contexts, prefix="test", seed=1)
    made = perturbed(("g2",), contexts=contexts, prefix="made", seed=2)
    table = evaluate_perturbations(real, made, train=train, context_key="type", intervals=False, **KEYS).to_table()
    assert {"prediction", "train_mean", "overall_mean"} <= {*table.index}
    alone = train[train.obs["type"] == "x"].copy()
    with pytest.raises(DataError, match="train has no control cell in the contexts 'y'"):
        evaluate_perturbations(real, made, train=alone, context_key="type", **KEYS)


def test_the_overall_mean_is_over_all_contexts() -> None:
    deltas = np.arange(8.0).reshape(4, 2)
    known = KnownEffects((("A",), ("B",)) * 2, ("x", "x", "y", "y"), deltas, {"x": np.zeros(2), "y": np.ones(2)})
    found = baseline_effects(known, WantedEffects((("C",),), ("y",)))
    assert found["overall_mean"].tolist() == [[3.0, 4.0]]
    assert found["train_mean"].tolist() == [[5.0, 6.0]]
    # In a context without effects the mean is that of all, which need not be said twice.
    known.controls["z"] = np.ones(2)
    assert "overall_mean" not in baseline_effects(known, WantedEffects((("C",),), ("z",)))


def test_genes_are_aligned_by_name_and_missing_ones_said(real, train, made) -> None:
    logs = _logs(made)[:, ::-1].copy()
    whole = evaluate_perturbations(real, _logs(made), train=train, intervals=False, **KEYS)
    turned = evaluate_perturbations(real, logs, train=train, intervals=False, **KEYS)
    pd.testing.assert_frame_equal(whole.to_table(), turned.to_table(), atol=1e-6)
    part = evaluate_perturbations(real, logs[:, :50].copy(), train=train, intervals=False, **KEYS)
    assert part.facts["genes"] == 50
    assert any("prediction lacks 10 of the 60 measured genes (first: 'g0')" in note for note in part.notes)
    with pytest.raises(DataError, match="only 20 of 60 measured genes"):
        evaluate_perturbations(real, logs[:, :20].copy(), train=train, **KEYS)
    with pytest.raises(DataError, match="holds counts of 50 genes, fewer than were measured"):
        evaluate_perturbations(real, made[:, :50].copy(), train=train, **KEYS)


def _logs(adata: ad.AnnData) -> ad.AnnData:
    adata = adata.copy()
    adata.X = log_normalised(adata)
    return adata


def test_held_out_cells_in_the_training_are_an_error(real, train, made) -> None:
    both = ad.concat([train, real[:30]])
    with pytest.raises(DataError, match="30 of 180 test cells are training cells, too"):
        evaluate_perturbations(real, made, train=both, **KEYS)
    renamed = ad.concat([train, real[:30]])
    renamed.obs_names = [f"new{i}" for i in range(renamed.n_obs)]
    with pytest.raises(DataError, match="30 of 180 test cells have the same expression .* copies under another name"):
        evaluate_perturbations(real, made, train=renamed, **KEYS)


def test_a_held_out_perturbation_in_the_training_is_an_error(real, train, made, perturbed) -> None:
    # The parts of a combination may come in any order.
    seen = ad.concat([train, perturbed(("g1+g0",), prefix="seen", seed=8, n_controls=0)])
    with pytest.raises(DataError, match=r"1 of 3 test effects are training effects, too \(first: 'g0\+g1'\)"):
        evaluate_perturbations(real, made, train=seen, **KEYS)


def test_copies_of_the_answer_are_errors(real, train, made) -> None:
    peeking = real[real.obs["target"] != "control"].copy()
    peeking.obs_names = [f"made{i}" for i in range(peeking.n_obs)]
    with pytest.raises(
        DataError, match=r"120 of 120 predicted cells of predictions\['x'\] are copies of held-out cells"
    ):
        evaluate_perturbations(real, {"x": peeking}, train=train, **KEYS)
    cells = PerturbedCells.read(real, EffectKeys("target", "control"), argument="real")
    deltas = cells.measured(cells.moments(), argument="real").deltas
    answer = pd.DataFrame(deltas, index=["g0+g1", "g1+g2", "g2+g3"], columns=real.var_names)
    with pytest.raises(DataError, match=r"predictions\['x'\] has for 3 of 3 effects what was measured"):
        evaluate_perturbations(real, {"x": answer}, train=train, **KEYS)


def test_the_mean_embedding_of_held_out_cells_as_features_is_an_error(real, train, made) -> None:
    real = real.copy()
    real.obsm["X_scforge"] = np.random.default_rng(0).normal(size=(real.n_obs, 8)).astype(np.float32)
    leak = pd.DataFrame(real.obsm["X_scforge"]).groupby(real.obs["target"].to_numpy()).mean().drop(index="control")
    with pytest.raises(
        DataError, match=r"gene_features\['embedding'\] has for 'g0\+g1' the mean of obsm\['X_scforge'\]"
    ):
        evaluate_perturbations(real, made, train=train, gene_features=leak, **KEYS)


def test_names_of_baselines_are_taken(real, train, made) -> None:
    with pytest.raises(OptionError, match="predictions names 'additive'"):
        evaluate_perturbations(real, {"additive": made}, train=train, **KEYS)
    with pytest.raises(OptionError, match="names no method"):
        evaluate_perturbations(real, {}, train=train, **KEYS)


def test_counts_of_fewer_genes_and_other_scales_are_refused(real, train, made) -> None:
    with pytest.raises(DataError, match="train holds counts of 50 genes and real has 60"):
        evaluate_perturbations(real, made, train=train[:, :50].copy(), **KEYS)
    other = _logs(train)
    other.X = other.X.expm1().multiply(np.random.default_rng(0).uniform(0.2, 0.4, (train.n_obs, 1))).log1p().tocsr()
    with pytest.raises(DataError, match="controls of train have a median total of .* and those of real of 10,000"):
        evaluate_perturbations(real, made, train=other, **KEYS)
    scaled = _logs(made)
    scaled.X = (scaled.X.expm1() * 0.1).log1p()
    with pytest.raises(DataError, match="have a median total of 1,000 and those of real of 10,000"):
        evaluate_perturbations(real, scaled, train=train, **KEYS)


def test_baselines_know_all_genes_of_the_training(real, train, made) -> None:
    whole = evaluate_perturbations(real, _logs(made), train=train, intervals=False, **KEYS)
    part = evaluate_perturbations(real, _logs(made)[:, 4:].copy(), train=train, intervals=False, **KEYS)
    known = [*whole.to_table().index]
    assert known == [*part.to_table().index]
    # g0 to g3 are what is perturbed; the linear model still knows them.
    table = part.to_table()
    assert table.loc["linear_pca", "mse"] != pytest.approx(table.loc["train_mean", "mse"], rel=1e-6)
    assert not any("targets are genes of the data" in note for note in part.notes)
    fewer = evaluate_perturbations(
        _logs(real)[:, 1:].copy(), _logs(made), train=_logs(train)[:, 1:].copy(), intervals=False, **KEYS
    )
    assert any(note.startswith("3 of 4 targets are genes of the data") for note in fewer.notes)


def test_a_layer_is_read_where_there_is_one(real, train, made) -> None:
    plain = evaluate_perturbations(real, made, train=train, intervals=False, **KEYS)
    layered = [some.copy() for some in (real, train)]
    for adata in layered:
        adata.layers["counts"] = adata.X.copy()
        adata.X = adata.X * 0.0
    found = evaluate_perturbations(layered[0], made, train=layered[1], layer="counts", intervals=False, **KEYS)
    pd.testing.assert_frame_equal(found.to_table(), plain.to_table())
    assert "Effects of prediction are seen from the training controls." in plain.notes


def test_mistakes_in_names_are_told(real, train, made) -> None:
    with pytest.raises(OptionError, match="kinds names 'god', which predictions does not have; did you mean 'good'"):
        evaluate_perturbations(real, {"good": made}, train=train, kinds={"god": "untrained"}, **KEYS)
    twice = pd.DataFrame(0.1, index=[*HELD_OUT, "g1+g0"], columns=real.var_names)
    with pytest.raises(DataError, match=r"1 rows that mean the same effect as another \(first: 'g0\+g1'\)"):
        evaluate_perturbations(real, twice, train=train, **KEYS)
