import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.finetuning import get_task
from scforge.models import Encoder
from scforge.testing import raises

TRAIN, HELD_OUT = np.arange(0, 150), np.arange(150, 200)


def labeled(adata, key="group"):
    return np.asarray(adata.obs[key], dtype=object).astype(str)


def test_planted_classes_are_found_and_shuffled_ones_are_not(cells200, tuned):
    cells200.obs["shuffled"] = np.random.default_rng(1).permutation(labeled(cells200))
    accuracy = {}
    for key in ("group", "shuffled"):
        predictor = tuned("annotation", cells200, labels_key=key)
        table = predictor.task.predict(predictor, cells200)
        accuracy[key] = (labeled(cells200, key) == np.asarray(table["label"]))[HELD_OUT].mean()
    assert accuracy["group"] == 1.0
    assert 0.2 < accuracy["shuffled"] < 0.8


def test_what_is_written(cells200, tuned, tmp_path):
    cells200.obs["type"] = np.where(cells200.obs["group"] == "a", "NK/T", "B")
    predictor = tuned("annotation", cells200, labels_key="type")
    table = predictor.task.predict(predictor, cells200)
    assert list(table) == ["label", "confidence", "entropy"]
    assert table.index.equals(cells200.obs_names)
    obs = cells200.obs
    assert list(obs["scforge_type"].cat.categories) == ["B", "NK/T"]
    assert obs["scforge_confidence"].dtype == obs["scforge_entropy"].dtype == np.float32
    assert obs["scforge_confidence"].between(0.5, 1).all()
    assert obs["scforge_entropy"].between(0, 1).all()
    soft = predictor.task.predict(predictor, cells200, soft=True, key_added="mine")
    np.testing.assert_allclose(soft.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(soft.max(axis=1), obs["scforge_confidence"])
    assert {"mine", "mine_confidence", "mine_entropy"} <= {*obs}
    # A name with a slash would be refused as a column of a table.
    cells200.write_h5ad(tmp_path / "cells.h5ad")
    written = ad.read_h5ad(tmp_path / "cells.h5ad")
    np.testing.assert_allclose(written.obsm["mine_probabilities"], soft)
    assert written.uns["scforge"]["mine_classes"].tolist() == ["B", "NK/T"]
    assert written.obs["scforge_type"].tolist() == obs["scforge_type"].tolist()
    # Cells keep their order, though those of like length share a batch.
    assert len(np.unique(predictor.cells.n_expressed)) > 5
    whole = predictor.task.predict(predictor, None, soft=True)
    assert whole.index.equals(cells200.obs_names)
    for row in (0, 77, 199):
        alone = torch.from_numpy(predictor.outputs(np.array([row])))
        np.testing.assert_allclose(alone.softmax(dim=1)[0], whole.iloc[row], atol=1e-5)


def test_threshold(cells200, tuned):
    predictor = tuned("annotation", cells200, labels_key="kind")
    predictor.module.head.temperature.fill_(5.0)
    table = predictor.task.predict(predictor, cells200, threshold=0.7)
    unsure = table["confidence"] < 0.7
    assert 0 < unsure.sum() < 200
    assert (table["label"][unsure] == "unassigned").all()
    assert (table["label"][~unsure] != "unassigned").all()
    assert list(table["label"].cat.categories) == ["common", "rare", "unassigned"]
    with raises(OptionError, "threshold"):
        predictor.task.predict(predictor, cells200, threshold=1.5)


def test_majority_voting(cells200, tuned):
    predictor = tuned("annotation", cells200, labels_key="group")
    cells200.obs["cluster"] = np.where(np.arange(200) < 5, "x", cells200.obs["group"])
    table = predictor.task.predict(predictor, cells200, majority_voting="cluster")
    x = cells200.obs["cluster"] == "x"
    assert (cells200.obs["scforge_group_voted"][x] == "a").all(), "three of the five are a"
    assert (np.asarray(table["voted"])[~x] == labeled(cells200)[~x]).all()
    table = predictor.task.predict(predictor, cells200, majority_voting="cluster", min_share=0.7)
    assert (table["voted"][x] == "Heterogeneous").all()
    table = predictor.task.predict(predictor, None, majority_voting=True)  # in clusters by Leiden
    assert (np.asarray(table["voted"]) == labeled(cells200)).mean() > 0.95
    with pytest.raises(DataError, match="did you mean 'cluster'"):
        predictor.task.predict(predictor, cells200, majority_voting="clusters")


def test_loss_is_the_weighted_cross_entropy(cells200, tuned, step):
    rows = np.arange(30)
    losses = {}
    for weights in (None, "balanced", {"rare": 3.0}):
        predictor = tuned("annotation", cells200, labels_key="kind", class_weights=weights, label_smoothing=0.1)
        logits = torch.from_numpy(predictor.outputs(rows))
        target = torch.from_numpy((labeled(cells200, "kind") == "rare")[rows].astype(np.int64))
        n_rare = (labeled(cells200, "kind")[TRAIN] == "rare").sum()
        balanced = [150 / 2 / (150 - n_rare), 150 / 2 / n_rare]
        by_hand = [1.0, 1.0] if weights is None else balanced if weights == "balanced" else [1.0, 3.0]
        criterion = torch.nn.CrossEntropyLoss(weight=torch.tensor(by_hand, dtype=torch.float32), label_smoothing=0.1)
        loss, _ = step(predictor, rows)
        assert loss.item() == pytest.approx(criterion(logits, target).item(), rel=1e-4)
        losses[str(weights)] = loss.item()
    assert len({round(loss, 3) for loss in losses.values()}) == 3


def test_head_starts_at_the_logistic_regression(cells200, tuned):
    predictor = tuned("annotation", cells200, labels_key="group", head={"hidden_dim": 64})
    embeddings = torch.from_numpy(predictor.embedding(TRAIN))
    seen = predictor.module.head.standardize(embeddings)
    np.testing.assert_allclose(seen.mean(dim=0), 0, atol=1e-4)
    np.testing.assert_allclose(seen.std(dim=0, correction=0), 1, atol=1e-4)
    probed = predictor.outputs(TRAIN).argmax(axis=1)
    assert (np.array(["a", "b"])[probed] == labeled(cells200)[TRAIN]).mean() > 0.95
    plain = tuned("annotation", cells200, labels_key="group", head={"hidden_dim": 64}, probe_first=False)
    np.testing.assert_allclose(plain.module.head.standardize.mean, predictor.module.head.standardize.mean)
    assert (np.array(["a", "b"])[plain.outputs(TRAIN).argmax(axis=1)] == labeled(cells200)[TRAIN]).mean() < 0.9


def test_calibration_lowers_the_loss_of_other_cells(cells200, tuned):
    cells200.obs["noisy"] = np.where(np.random.default_rng(0).random(200) < 0.3, "b", labeled(cells200))
    predictor = tuned("annotation", cells200, labels_key="noisy")
    with torch.no_grad():
        predictor.module.head.out.weight *= 10
    codes = predictor.task.read(lambda key: cells200.obs[key])
    predictor.task.calibrate(predictor, np.arange(100, 150))
    temperature = predictor.module.head.temperature
    assert temperature > 1.5
    assert "temperature" in predictor.module.head.state_dict()
    logits, target = torch.from_numpy(predictor.outputs(HELD_OUT)), torch.from_numpy(codes[HELD_OUT])
    cross_entropy = torch.nn.functional.cross_entropy
    assert cross_entropy(logits / temperature, target) < cross_entropy(logits, target)
    before = predictor.outputs(HELD_OUT).argmax(axis=1)
    table = predictor.task.predict(predictor, None)
    assert (np.array(["a", "b"])[before] == np.asarray(table["label"])[HELD_OUT]).all()


@pytest.mark.filterwarnings("ignore:labels_key=.* cells are scored")
def test_evaluation(cells200, tuned, context):
    cells200.obs["type"] = pd.Series(labeled(cells200), index=cells200.obs_names)
    cells200.obs.iloc[190:195, cells200.obs.columns.get_loc("type")] = np.nan
    cells200.obs.iloc[195:, cells200.obs.columns.get_loc("type")] = "new"
    predictor = tuned("annotation", cells200, labels_key="type")
    said = r"5 cells have labels .* not know \('new'\) and 5 cells have no label; 40 of 50 cells"
    with pytest.warns(ScforgeWarning, match=said):
        evaluated = predictor.task.evaluate(context(predictor))
    metrics = evaluated.metrics
    learned = ["logistic_regression_pca", "knn_pca", "logistic_regression_genes"]
    assert list(metrics.index) == ["scforge", *learned, "frozen_embedding", "majority_class"]
    assert (metrics["n_scored"] == 40).all()
    assert (metrics["n_unknown_label"] == 5).all()
    assert (metrics["n_unlabeled"] == 5).all()
    assert metrics.loc["scforge", "accuracy"] == 1.0
    assert metrics.loc["majority_class", "macro_f1"] == pytest.approx(1 / 3)
    assert metrics.loc["scforge", "calibration_error"] < 0.2
    # The head stands where the logistic regression on the frozen embedding does, as it was not trained further.
    assert metrics.loc["frozen_embedding", "macro_f1"] == metrics.loc["scforge", "macro_f1"]
    assert evaluated.tables["per_class"]["support"].tolist() == [20, 20]
    confusion = evaluated.tables["confusion"].pivot(index="label", columns="predicted", values="n_cells")
    assert confusion.to_numpy().tolist() == [[20, 0], [0, 20]]
    alone = predictor.task.evaluate(context(predictor, baselines=False))
    assert list(alone.metrics.index) == ["scforge"]


def test_evaluation_without_what_baselines_learn_from(cells200, tuned, context):
    predictor = tuned("annotation", cells200, labels_key="group")
    evaluated = predictor.task.evaluate(context(predictor, train_cells=None, train_rows=None))
    assert list(evaluated.metrics.index) == ["scforge"]
    with pytest.warns(ScforgeWarning, match="frozen embedding are missing"):
        evaluated = predictor.task.evaluate(context(predictor, base=None))
    assert "frozen_embedding" not in evaluated.metrics.index
    cells200.obs["group"] = "z"
    predictor.cells.obs["group"] = "z"
    with pytest.raises(DataError, match="no value that the model predicts in any of the 50 scored cells"):
        predictor.task.evaluate(context(predictor))


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        (np.where(np.arange(200) % 3, np.arange(200) % 3, np.nan), ["1", "2"]),
        (np.arange(200) % 2 == 0, ["False", "True"]),
        (pd.Categorical(np.arange(200) % 2, categories=[0, 1, 7]), ["0", "1"]),
        (np.array([None, "x", "y", "x"] * 50, dtype=object), ["x", "y"]),
    ],
    ids=["with NaN", "bool", "categories of integers", "None"],
)
def test_labels_of_all_kinds(cells200, tuned, step, values, classes):
    cells200.obs["label"] = values
    task = get_task("annotation", labels_key="label")
    usable = task.usable(lambda key: cells200.obs[key])
    missing = pd.isna(cells200.obs["label"]).to_numpy()
    np.testing.assert_array_equal(usable, ~missing)
    train = np.flatnonzero(usable)
    predictor = tuned("annotation", cells200, train, labels_key="label")
    assert predictor.task.classes == classes
    assert task.strata(lambda key: cells200.obs[key]).notna().tolist() == usable.tolist()
    loss, _ = step(predictor, np.arange(200))
    assert torch.isfinite(loss)
    predictor.task.predict(predictor, cells200)
    assert list(cells200.obs["scforge_label"].cat.categories) == classes


def test_cells_without_label_do_not_count(cells200, tuned, step):
    cells200.obs["label"] = pd.Series(labeled(cells200), index=cells200.obs_names)
    cells200.obs.iloc[150:170, cells200.obs.columns.get_loc("label")] = np.nan
    predictor = tuned("annotation", cells200, labels_key="label")
    loss, figures = step(predictor, np.arange(140, 170))
    alone, figures_alone = step(predictor, np.arange(140, 150))
    torch.testing.assert_close(loss, alone)
    torch.testing.assert_close(figures["confusion"] * 30, figures_alone["confusion"] * 10)
    nothing, _ = step(predictor, np.arange(150, 170))
    assert nothing.item() == 0
    with pytest.raises(DataError, match="labels_key='label' is missing or unknown for 1 of 2 training cells"):
        predictor.task.bind(predictor.cells, np.array([149, 150]))


def test_labels_of_one_cell_are_told_and_kept(cells200):
    cells200.obs["label"] = np.array(["rare", *["a", "b"] * 100], dtype=object)[:200]
    with pytest.warns(ScforgeWarning, match="the labels 'rare' have only one cell each"):
        found = get_task("annotation", labels_key="label").options_from(lambda key: cells200.obs[key])
    assert found == {"classes": ["a", "b", "rare"]}


@pytest.mark.parametrize("word", ["Unknown", "NA", "n/a", " null ", "Unassigned", "unassigned", "Heterogeneous", "nan"])
def test_words_for_no_label_are_no_classes(cells200, word):
    cells200.obs["label"] = np.array([word] * 4 + ["a", "b"] * 98, dtype=object)
    task = get_task("annotation", labels_key="label")
    with pytest.warns(ScforgeWarning, match=f"4 of 200 cells have the label '{word}', which is treated as missing"):
        usable = task.usable(lambda key: cells200.obs[key])
    np.testing.assert_array_equal(usable, np.arange(200) >= 4)
    assert task.options_from(lambda key: cells200.obs[key]) == {"classes": ["a", "b"]}
    # Whoever lists the word among the classes means it.
    task = get_task("annotation", labels_key="label", classes=["a", "b", word])
    assert task.usable(lambda key: cells200.obs[key]).all()
    assert task.read(lambda key: cells200.obs[key])[0] == 2


def test_given_classes_keep_their_order(cells200, tuned):
    predictor = tuned("annotation", cells200, labels_key="group", classes=["b", "a"])
    assert predictor.task.classes == ["b", "a"]
    table = predictor.task.predict(predictor, None)
    assert (np.asarray(table["label"]) == labeled(cells200)).mean() > 0.97
    with raises(DataError, "classes"):
        get_task("annotation", labels_key="group", classes=["a", "b", "c"]).options_from(lambda key: cells200.obs[key])


def test_a_class_of_held_out_donors_alone(cells200):
    quick = {"max_epochs": 2, "progress_bar": False, "accelerator": "cpu"}
    Encoder.setup_anndata(cells200)
    base = Encoder(cells200, objective={"name": "joint_embedding", "views": 2, "slices": 16}, latent_dim=8)
    base.train(**quick)
    cells200.obs["type"] = np.where(cells200.obs["donor"] == "d0", "new", np.asarray(cells200.obs["group"], dtype=str))
    part = cells200.obs["donor"].astype(str).map({"d0": "test", "d1": "test", "d2": "validation"}).fillna("train")
    cells200.obs["part"] = part
    with pytest.warns(
        ScforgeWarning, match="labels_key='type': 31 held-out cells have values that no training cell has .'new'."
    ):
        tuned = base.finetune("annotation", labels_key="type", split_key="part", **quick)
    with pytest.warns(ScforgeWarning, match="31 cells have labels .* not know .'new'.; 18 of 49 cells"):
        metrics = tuned.evaluate()
    n_new, n_test = (cells200.obs["type"] == "new").sum(), (part == "test").sum()
    assert (metrics["n_unknown_label"] == n_new).all()
    assert (metrics["n_scored"] == n_test - n_new).all()
    assert metrics.loc["scforge", "accuracy"] > 0.9
    # Each annotator has a confidence of its own.
    second = base.finetune("annotation", labels_key="kind", **quick)
    expected = {key: one.predict(cells200) for key, one in (("type", tuned), ("kind", second))}
    for key, table in expected.items():
        for name in ("confidence", "entropy"):
            assert (cells200.obs[f"scforge_{key}_{name}"] == table[name]).all()
    assert (cells200.obs["scforge_confidence"] == expected["kind"]["confidence"]).all()  # the latest
