import json

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from scforge.errors import DataError, ScforgeWarning
from scforge.finetuning import get_task

TRAIN, HELD_OUT = np.arange(0, 150), np.arange(150, 200)


@pytest.fixture
def aged(cells200):
    """Cells of group a are about 20 years old, those of b about 60."""
    noise = np.random.default_rng(0).normal(size=200)
    cells200.obs["age"] = np.where(cells200.obs["group"] == "a", 20.0, 60.0) + noise
    return cells200


def test_planted_numbers_are_found_and_shuffled_ones_are_not(aged, tuned):
    aged.obs["shuffled"] = np.random.default_rng(1).permutation(aged.obs["age"])
    correlation = {}
    for key in ("age", "shuffled"):
        predictor = tuned("regression", aged, labels_key=key)
        table = predictor.task.predict(predictor, aged)
        correlation[key] = np.corrcoef(table["prediction"].iloc[HELD_OUT], aged.obs[key].iloc[HELD_OUT])[0, 1]
    assert correlation["age"] > 0.9
    assert abs(correlation["shuffled"]) < 0.4
    assert aged.obs["scforge_age"].dtype == np.float32
    by_group = aged.obs["scforge_age"].groupby(aged.obs["group"], observed=True).mean()
    assert by_group.to_dict() == pytest.approx({"a": 20, "b": 60}, abs=3)
    table = predictor.task.predict(predictor, aged, key_added="mine")
    np.testing.assert_array_equal(aged.obs["mine"], table["prediction"])


@pytest.mark.parametrize("loss_function", ["huber", "mse"])
def test_loss_and_figures_by_hand(aged, tuned, step, loss_function):
    predictor = tuned("regression", aged, labels_key="age", loss_function=loss_function)
    with torch.no_grad():
        predictor.module.head.out.weight *= 3  # some errors above one standard deviation
    sums, total, losses = 0, 0, []
    for rows in (np.arange(0, 60), np.arange(60, 90)):
        loss, figures = step(predictor, rows)
        sums, total = sums + figures["moments"].numpy() * len(rows), total + len(rows)
        losses.append(loss.item())
    age = aged.obs["age"].to_numpy()
    center, scale = age[TRAIN].mean(), age[TRAIN].std()
    assert (predictor.task.center, predictor.task.scale) == pytest.approx((center, scale))
    outputs = predictor.outputs(np.arange(90))[:, 0]
    error = np.abs(outputs - (age[:90] - center) / scale)
    by_hand = np.where(error < 1, error**2 / 2, error - 0.5) if loss_function == "huber" else error**2
    assert (error > 1).any()
    assert losses == pytest.approx([by_hand[:60].mean(), by_hand[60:].mean()], rel=1e-4)
    predicted = outputs * scale + center
    scores = {"mae": mean_absolute_error, "rmse": root_mean_squared_error, "r2": r2_score}
    expected = {"loss": 1.0, **{name: score(age[:90], predicted) for name, score in scores.items()}}
    found = predictor.task.summarize({"loss": np.array(1.0), "moments": sums / total})
    assert found == pytest.approx(expected, rel=1e-4)


def test_cells_without_number_do_not_count(aged, tuned, step):
    aged.obs.loc[aged.obs_names[150:], "age"] = np.nan
    predictor = tuned("regression", aged, labels_key="age")
    usable = predictor.task.usable(lambda key: aged.obs[key])
    np.testing.assert_array_equal(usable, np.arange(200) < 150)
    with_missing, _ = step(predictor, np.arange(140, 170))
    alone, _ = step(predictor, np.arange(140, 150))
    torch.testing.assert_close(with_missing, alone)
    assert step(predictor, np.arange(150, 170))[0].item() == 0
    with pytest.raises(DataError, match="is missing or unknown for 20 of 30 training cells"):
        predictor.task.bind(predictor.cells, np.arange(140, 170))


@pytest.mark.filterwarnings("ignore:labels_key=.* cells are scored")
def test_evaluation(aged, tuned, context):
    aged.obs.loc[aged.obs_names[190:], "age"] = np.nan
    predictor = tuned("regression", aged, labels_key="age")
    with pytest.warns(ScforgeWarning, match="10 cells have no label; 40 of 50 cells are scored"):
        metrics = predictor.task.evaluate(context(predictor)).metrics
    assert list(metrics.index) == ["scforge", "ridge_pca", "knn_pca", "frozen_embedding", "mean"]
    assert (metrics["n_scored"] == 40).all()
    assert (metrics["n_unlabeled"] == 10).all()
    assert metrics.loc["scforge", "r2"] > 0.8
    assert metrics.loc["mean", "mae"] == pytest.approx(20, abs=1)
    assert np.isnan(metrics.loc["mean", "pearson"])
    # The head stands where the ridge regression on the frozen embedding does, as it was not trained further.
    frozen, own = metrics.loc[["frozen_embedding", "scforge"], "mae":"r2"].to_numpy(dtype=float)
    np.testing.assert_allclose(frozen, own, rtol=1e-3)
    differences = predictor.task.evaluate(context(predictor, intervals=True)).tables["differences"]
    from_mean = differences[differences["method"] == "mean"].set_index("score")
    assert from_mean["difference"]["mae"] < 0 < from_mean["difference"]["r2"]
    assert from_mean["verdict"].to_dict() == dict.fromkeys(("mae", "rmse", "r2"), "better") | {
        "pearson": "",
        "spearman": "",
    }
    alone = predictor.task.evaluate(context(predictor, train_cells=None))
    assert list(alone.metrics.index) == ["scforge"]
    with pytest.raises(DataError, match="no value that the model predicts in any of the 10 scored cells"):
        predictor.task.evaluate(context(predictor, rows=np.arange(190, 200)))


@pytest.mark.parametrize(
    "values", [pd.array([1, 2, None, 4] * 50, dtype="Int64"), pd.Categorical(np.arange(200) % 5)], ids=str
)
def test_numbers_of_all_kinds(cells200, values):
    cells200.obs["dose"] = values
    task = get_task("regression", labels_key="dose")
    found = task.options_from(lambda key: cells200.obs[key])
    numbers = np.array([np.nan if pd.isna(value) else float(value) for value in values])
    assert found == pytest.approx({"center": np.nanmean(numbers), "scale": np.nanstd(numbers)})
    again = get_task("regression", **json.loads(json.dumps({**task.config(), **found})))
    assert again.config() == {**task.config(), **found}
    assert again.options_from(lambda key: cells200.obs[key]) == {}


def test_numbers_in_a_column_of_objects_are_numbers(aged):
    values = [None if row == 3 else int(age) if row % 2 else age for row, age in enumerate(aged.obs["age"])]
    aged.obs["mixed"] = pd.Series(values, index=aged.obs_names, dtype=object)
    task = get_task("regression", labels_key="mixed")
    targets = task.read(aged.obs.__getitem__)
    assert np.isnan(targets[3])
    assert targets[[4, 5]].tolist() == [aged.obs["age"].iloc[4], int(aged.obs["age"].iloc[5])]
    aged.obs["mixed"] = [*values[:-1], "old"]
    with pytest.raises(DataError, match="does not contain numbers"):
        task.read(aged.obs.__getitem__)
