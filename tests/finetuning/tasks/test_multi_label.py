import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import f1_score

from scforge.errors import DataError, ScforgeWarning
from scforge.finetuning import get_task
from scforge.finetuning.splits import Split, split_for

TRAIN, HELD_OUT = np.arange(0, 150), np.arange(150, 200)


@pytest.fixture
def sets(cells200):
    """Label p is that of group a, q that of group b, and every fifth cell has r, too."""
    cells200.obs["p"] = cells200.obs["group"] == "a"
    cells200.obs["q"] = (cells200.obs["group"] == "b").astype(int)
    cells200.obs["r"] = np.arange(200) % 5 == 0
    has = cells200.obs[["p", "q", "r"]].astype(bool)
    cells200.obs["sets"] = [";".join(has.columns[row]) for row in has.to_numpy()]
    return cells200


OPTIONS = [{"labels_keys": ["p", "q", "r"]}, {"labels_key": "sets"}]


@pytest.mark.parametrize("options", OPTIONS, ids=["columns", "text"])
def test_planted_labels_are_found(sets, tuned, options):
    predictor = tuned("multi_label", sets, **options)
    assert predictor.task.classes == ["p", "q", "r"]
    table = predictor.task.predict(predictor, sets)
    assert (table["p"] == sets.obs["p"]).iloc[HELD_OUT].mean() > 0.9
    assert (table["q"] == (sets.obs["q"] == 1)).iloc[HELD_OUT].mean() > 0.9
    if "labels_key" in options:
        assert sets.obs["scforge_sets"].iloc[0] == ";".join(table.columns[table.iloc[0]])
        name = "scforge_sets"
    else:
        np.testing.assert_array_equal(sets.obs["scforge_p"], table["p"])
        assert sets.obs["scforge_p"].dtype == bool
        name = "scforge_labels"
    probabilities = sets.obsm[f"{name}_probabilities"]
    np.testing.assert_array_equal(probabilities >= 0.5, table)
    assert sets.uns["scforge"][f"{name}_classes"].tolist() == ["p", "q", "r"]
    soft = predictor.task.predict(predictor, None, soft=True)
    np.testing.assert_allclose(soft, probabilities)
    assert predictor.task.predict(predictor, None, threshold=0.0).all(axis=None)


def test_loss_and_figures_by_hand(sets, tuned, step):
    rows = np.arange(40)
    truth = sets.obs[["p", "q", "r"]].to_numpy(dtype=np.float32)
    positive = truth[TRAIN].sum(axis=0)
    for weight, by_hand in ((None, [1, 1, 1]), ("balanced", (150 - positive) / positive), ({"r": 4.0}, [1, 1, 4])):
        predictor = tuned("multi_label", sets, labels_keys=["p", "q", "r"], pos_weight=weight)
        criterion = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(np.array(by_hand, dtype=np.float32)))
        logits = predictor.outputs(rows)
        loss, figures = step(predictor, rows)
        assert loss.item() == pytest.approx(criterion(torch.from_numpy(logits), torch.from_numpy(truth[rows])).item())
    found = predictor.task.summarize({"loss": np.array(1.0), "counts": figures["counts"].numpy()})
    expected = f1_score(truth[rows], logits > 0, average="macro", zero_division=0)
    assert found == {"loss": 1.0, "macro_f1": pytest.approx(expected)}


def test_cells_without_values(sets, tuned, step):
    sets.obs["sets"] = sets.obs["sets"].astype(object)
    sets.obs.iloc[150:, sets.obs.columns.get_loc("sets")] = np.nan
    sets.obs.iloc[0, sets.obs.columns.get_loc("sets")] = ""
    predictor = tuned("multi_label", sets, labels_key="sets")
    usable = predictor.task.usable(lambda key: sets.obs[key])
    np.testing.assert_array_equal(usable, np.arange(200) < 150)
    assert predictor.task.targets(np.array([0, 1]))["target"].tolist() == [[0, 0, 0], [0, 1, 0]]
    torch.testing.assert_close(step(predictor, np.arange(140, 170))[0], step(predictor, np.arange(140, 150))[0])
    assert step(predictor, np.arange(150, 160))[0].item() == 0
    with pytest.raises(DataError, match="is missing or unknown for 1 of 2 training cells"):
        predictor.task.bind(predictor.cells, np.array([149, 150]))
    sets.obs["p"] = pd.array([True, False, None, True] * 50, dtype="boolean")
    usable = get_task("multi_label", labels_keys=["p", "q"]).usable(lambda key: sets.obs[key])
    np.testing.assert_array_equal(usable, np.arange(200) % 4 != 2)


def test_evaluation(sets, tuned, context):
    sets.obs["sets"] = sets.obs["sets"].astype(object)
    place = sets.obs.columns.get_loc("sets")
    sets.obs.iloc[195:, place] = np.nan
    sets.obs.iloc[190:195, place] = [f"{value};new" for value in sets.obs["sets"].iloc[190:195]]
    predictor = tuned("multi_label", sets, labels_key="sets")
    with pytest.warns(
        ScforgeWarning, match="5 cells have labels that the model does not know .'new'. and 5 cells have no"
    ):
        evaluated = predictor.task.evaluate(context(predictor, intervals=True))
    metrics = evaluated.metrics
    assert list(metrics.index) == ["scforge", "logistic_regression_pca", "frozen_embedding", "label_frequency"]
    assert (metrics["n_scored"] == 45).all()
    assert (metrics["n_unknown_label"] == 5).all()
    assert (metrics["n_unlabeled"] == 5).all()
    assert metrics.loc["label_frequency", "auroc"] == pytest.approx(0.5)
    assert metrics.loc["scforge", "auroc"] > 0.75
    differences = evaluated.tables["differences"].set_index(["method", "score"])
    assert differences.loc[("label_frequency", "auroc"), "verdict"] == "better"
    assert differences.loc[("frozen_embedding", "auroc"), "verdict"] == "tie"
    per_label = evaluated.tables["per_label"]
    assert (per_label.loc[["p", "q"], "auroc"] > 0.95).all()
    assert per_label["auroc"].mean() == pytest.approx(metrics.loc["scforge", "auroc"])
    # The head stands where logistic regressions on the frozen embedding do, as it was not trained further.
    assert metrics.loc["frozen_embedding", "auroc"] == pytest.approx(metrics.loc["scforge", "auroc"], abs=0.01)
    with pytest.warns(ScforgeWarning, match="frozen embedding are missing"):
        predictor.task.evaluate(context(predictor, base_train=None))


def test_a_rare_label_is_in_training(sets):
    """Only where training would have no cell of it, the split is another one."""
    how, lost, task = {"validation_size": 0.3, "test_size": 0.3}, 0, get_task("multi_label", labels_key="sets")
    for seed in range(20):
        has = np.isin(np.arange(200), np.random.default_rng(seed).choice(200, 2, replace=False))
        sets.obs["sets"] = np.where(has, "p;r", np.where(np.arange(200) % 3, "p", "q"))
        split = task.split(lambda key: sets.obs[key], seed=seed, split_by=None, **how)
        plain = split_for(200, seed=seed, **how)
        np.testing.assert_array_equal(np.sort(np.concatenate([split.train, split.validation, split.test])), range(200))
        assert has[split.train].any()
        lost += not has[plain.train].any()
        assert np.array_equal(split.train, plain.train) == has[plain.train].any()
    assert lost
    assert task.split(lambda key: sets.obs[key], seed=0, split_by="donor", **how) is None


def test_labels_that_are_not_learned_are_told(sets):
    sets.obs["sets"] = [f"{text};new" if i >= 190 else text for i, text in enumerate(sets.obs["sets"])]
    task = get_task("multi_label", labels_key="sets")
    split = Split(train=np.arange(150), validation=np.arange(150, 170), test=np.arange(170, 200))
    message = "labels_key='sets': 10 held-out cells have values that no training cell has .'new'."
    with pytest.warns(ScforgeWarning, match=message):
        task.check_split(lambda key: sets.obs[key], split)
    task.check_split(lambda key: sets.obs[key], Split(np.arange(195), np.arange(195, 200), np.arange(0)))
    # What classes leaves out is told when it is left out.
    task = get_task("multi_label", labels_key="sets", classes=["q", "p"])
    task.check_split(lambda key: sets.obs[key], split)
    message = "classes lacks labels of labels_key='sets' .'new', 'r'. that 48 of the 200 tr"
    with pytest.warns(ScforgeWarning, match=message):
        assert task.options_from(lambda key: sets.obs[key]) == {}
