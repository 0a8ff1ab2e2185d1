from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, recall_score
from sklearn.model_selection import StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.eval import CellTypeProbe
from scforge.eval.cell_type_probe import _Plan


@pytest.fixture
def cells() -> tuple[np.ndarray, pd.DataFrame]:
    """Cells of three overlapping labels, one of them rare, of four donors in turn, in three dimensions."""
    labels = np.repeat(["a", "b", "c"], [120, 60, 12])
    embedding = np.random.default_rng(0).normal(size=(192, 3))
    embedding[:, 0] += 2.0 * (labels == "a")
    embedding[:, 1] += 2.0 * (labels == "c")
    obs = pd.DataFrame({"label": labels, "donor": [f"donor{i % 4}" for i in range(192)]})
    return embedding, obs.set_index(obs.index.astype(str))


@pytest.mark.parametrize("groups_key", [None, "donor"])
def test_the_figures_are_those_of_scikit_learn(cells, groups_key) -> None:
    embedding, obs = cells
    labels = obs["label"].to_numpy(dtype=object)
    if groups_key is None:
        folds = list(StratifiedKFold(5, shuffle=True, random_state=3).split(embedding, labels))
    else:  # four donors: each is held out once
        folds = [(np.flatnonzero(obs["donor"] != d), np.flatnonzero(obs["donor"] == d)) for d in obs["donor"].unique()]
    probe = CellTypeProbe("label", groups_key, n_neighbors=5, rare_share=0.1, seed=3)
    models = {
        "linear": make_pipeline(StandardScaler(), LogisticRegression(max_iter=2_000)),
        "knn": KNeighborsClassifier(5),
    }
    figures = {}
    for name, model in models.items():
        predicted = labels.copy()
        for train, test in folds:
            predicted[test] = model.fit(embedding[train], labels[train]).predict(embedding[test])
        figures[f"{name}_macro_f1"] = f1_score(labels, predicted, average="macro")
        figures[f"{name}_accuracy"] = accuracy_score(labels, predicted)
        figures[f"{name}_rare_recall"] = recall_score(labels, predicted, labels=["c"], average="macro")
    scores = probe.run(embedding, obs)
    assert tuple(scores) == probe.metrics
    assert scores == pytest.approx(figures, abs=1e-12)
    assert all(0 < score < 1 for score in scores.values())


def test_what_a_donor_alone_knows_does_not_help(cells) -> None:
    """The cells of a label lie together within a donor only: that tells cells which are held out, but not donors."""
    _, obs = cells
    rng = np.random.default_rng(1)
    places = rng.normal(size=(12, 3)) * 10
    embedding = places[obs.groupby(["label", "donor"]).ngroup()] + rng.normal(size=(192, 3)) * 0.01
    leaky = CellTypeProbe("label", n_neighbors=1).run(embedding, obs)
    honest = CellTypeProbe("label", "donor", n_neighbors=1).run(embedding, obs)
    assert leaky["knn_macro_f1"] > 0.95
    assert honest["knn_macro_f1"] < 0.7


def test_the_same_cells_in_two_folds(cells) -> None:
    embedding, obs = cells
    probe = CellTypeProbe("label", rare_share=0.1)
    copies = obs.iloc[:20]
    doubled = np.concatenate([embedding, embedding[:20]])
    with pytest.raises(DataError, match=r"20 names of obs stand on several cells \(first: '0', '1', '2'\)"):
        probe.run(doubled, pd.concat([obs, copies]))
    renamed = pd.concat([obs, copies.set_index("copy" + copies.index)])
    with pytest.warns(ScforgeWarning, match=r"\d+\.\d% of the cells have exactly the coordinates of a cell in another"):
        probe.run(doubled, renamed)
    with warnings.catch_warnings():  # copies within a donor stay within a fold
        warnings.simplefilter("error")
        CellTypeProbe("label", "donor").run(doubled, renamed)
        probe.run(np.concatenate([embedding, embedding[:1]]), renamed.iloc[:193])  # one pair: 1 % is not reached


@pytest.mark.parametrize(
    ("parts", "n_neighbors", "message"),
    [
        ({"rows": np.array([0, 1, 1, 2])}, 2, "do not test each cell once"),
        ({"folds": np.array([0, 1, -1, 1])}, 2, "do not test each cell once"),
        ({"groups": np.array([0, 1, 1, 1])}, 2, "1 groups lie in several folds"),
        ({}, 3, "n_neighbors=3 is more than the 2 labelled cells"),
    ],
)
def test_folds_that_leak_are_refused(parts: dict, n_neighbors: int, message: str) -> None:
    known = {"rows": np.arange(4), "labels": np.array([0, 0, 1, 1]), "n_labels": 2, "folds": np.array([0, 1, 0, 1])}
    _Plan(**known, groups=np.array([0, 1, 0, 1])).check(2)
    with pytest.raises(DataError, match=message):
        _Plan(**{**known, "groups": None, **parts}).check(n_neighbors)


@pytest.mark.parametrize("n_folds", [2, 3, 5])
def test_donors_are_held_out_whole_and_folds_are_of_one_size(cells, n_folds) -> None:
    plan = CellTypeProbe("label", "donor", n_folds=n_folds)._plan(cells[1])
    sizes = np.bincount(plan.folds)
    assert len(sizes) == min(n_folds, 4)
    assert sizes.max() <= 2 * sizes.min()
    assert len(set(zip(plan.groups, plan.folds, strict=True))) == 4


def test_labels_that_cannot_be_tested(cells, monkeypatch) -> None:
    embedding, obs = cells
    obs.loc[["0", "1", "2", "3"], "label"] = ["few", "few", "few", None]
    obs.loc[obs.index[4:12], ["label", "donor"]] = ["own", "donor0"]
    probe = CellTypeProbe("label", "donor")
    with pytest.warns(ScforgeWarning, match=r"'few' \(3 cells\), 'own' \(in one group\)\."):
        probe.check(obs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = probe.run(embedding, obs)  # said once
        facts = probe.describe(obs)
    assert facts["labels left out"] == "'few' (3 cells), 'own' (in one group)"
    rest = CellTypeProbe("label", "donor").run(embedding[12:], obs[12:])
    assert scores == pytest.approx(rest, nan_ok=True)
    # The donors of "own" are held out together.
    obs.loc[obs.index[4:8], "donor"] = "donor2"
    monkeypatch.setattr(CellTypeProbe, "_folds", lambda self, labels, groups: 1 * np.isin(groups, ["donor0", "donor2"]))
    with pytest.warns(ScforgeWarning, match=r"'own' \(in one fold\)"):
        CellTypeProbe("label", "donor").check(obs)


def test_draws_are_of_cells_or_donors_and_predictions_are_made_once(cells, monkeypatch) -> None:
    embedding, obs = cells
    fits, fit = [], KNeighborsClassifier.fit
    monkeypatch.setattr(KNeighborsClassifier, "fit", lambda self, *args: fits.append(1) or fit(self, *args))
    probe = CellTypeProbe("label", rare_share=0.1)
    accuracy = probe.run(embedding, obs)["knn_accuracy"]
    draws = probe.resampled(embedding, obs, n=300, seed=5)
    assert len(fits) == 5
    assert list(draws) == list(probe.metrics)
    assert len(draws) == 300
    assert draws["knn_accuracy"].mean() == pytest.approx(accuracy, abs=0.01)
    assert draws["knn_accuracy"].std() == pytest.approx(np.sqrt(accuracy * (1 - accuracy) / 192), rel=0.15)
    again = CellTypeProbe("label", rare_share=0.1).resampled(embedding, obs, n=300, seed=5)
    pd.testing.assert_frame_equal(draws, again)
    # The same cells are drawn whatever the embedding is, which is predicted anew.
    noisier = embedding + np.random.default_rng(4).normal(size=embedding.shape) * 0.5
    paired = probe.resampled(noisier, obs, n=300, seed=5)
    assert len(fits) == 15
    assert np.corrcoef(draws["linear_accuracy"], paired["linear_accuracy"])[0, 1] > 0.4
    # Donors vary more than the cells within them do, where one of them is told worse than the others.
    worse = embedding + 3.0 * np.eye(3)[pd.factorize(obs["label"])[0]]
    bad = (obs["donor"] == "donor1").to_numpy()
    worse[bad] = np.random.default_rng(2).normal(size=(192, 3))[bad]
    of_donors, of_cells = (
        CellTypeProbe("label", key, rare_share=0.1).resampled(worse, obs, n=300, seed=5)["knn_accuracy"].std()
        for key in ("donor", None)
    )
    assert of_donors > 2 * of_cells


def test_groups_that_take_no_part_are_no_units(cells) -> None:
    obs = cells[1].assign(label=cells[1]["label"].where(cells[1]["donor"] != "donor3"))
    probe = CellTypeProbe("label", "donor")
    assert probe.n_units(obs) == 3
    assert CellTypeProbe("label").n_units(obs) is None
    assert probe.describe(obs) == {"cells scored": "144 of 192", "drawn again": "groups of donor (3)"}
    obs.loc[obs["donor"] == "donor0", "label"] = "alone"
    with pytest.warns(ScforgeWarning, match="'alone' .in one group."):
        assert probe.describe(obs)["drawn again"] == "groups of donor (2)"


def test_bad_input(cells) -> None:
    embedding, obs = cells
    with pytest.raises(OptionError, match=r"rare_share=2 is not a number from 0 to 1"):
        CellTypeProbe("label", rare_share=2)
    with pytest.raises(DataError, match="groups_key='doner' is not a column of obs; did you mean 'donor'"):
        CellTypeProbe("label", "doner").check(obs)
    with pytest.raises(DataError, match=r"groups_key='donor' has one value only \('x'\)"):
        CellTypeProbe("label", "donor").check(obs.assign(donor="x"))
    with pytest.raises(DataError, match=r"fewer than 2 labels .* can be tested in n_folds=100 folds \(left out: 'b'"):
        CellTypeProbe("label", n_folds=100).check(obs)
    with pytest.raises(DataError, match=r"has the shape \(100, 3\), but there are 192 cells"):
        CellTypeProbe("label").run(embedding[:100], obs)
