from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, f1_score
from sklearn.model_selection import StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier

from scforge.errors import DataError, ScforgeWarning
from scforge.eval import CellTypeAnnotation


@pytest.fixture
def cells() -> tuple[np.ndarray, pd.DataFrame]:
    """90 cells of one label and 30 of another that overlap, in three dimensions."""
    labels = np.repeat(["a", "b"], [90, 30])
    noise = np.random.default_rng(0).normal(size=(120, 3))
    noise[:, 0] += 2.0 * (labels == "a")
    return noise, pd.DataFrame({"label": labels})


def test_the_figures_are_those_of_scikit_learn(cells) -> None:
    embedding, obs = cells
    labels = obs["label"].to_numpy()
    predicted = labels.copy()
    for train, test in StratifiedKFold(4, shuffle=True, random_state=7).split(embedding, labels):
        predicted[test] = KNeighborsClassifier(5).fit(embedding[train], labels[train]).predict(embedding[test])
    scores = CellTypeAnnotation("label", n_folds=4, n_neighbors=5, seed=7).run(embedding, obs)
    assert scores == {
        "macro_f1": pytest.approx(f1_score(labels, predicted, average="macro")),
        "accuracy": pytest.approx(accuracy_score(labels, predicted)),
    }
    assert scores["macro_f1"] < scores["accuracy"] < 1


def test_rare_labels_are_left_out_and_named_once(cells) -> None:
    embedding, obs = cells
    obs.loc[[0, 1, 2, 3], "label"] = ["rare", "rarer", "rare", None]
    benchmark = CellTypeAnnotation("label")
    with pytest.warns(ScforgeWarning, match=r"with fewer cells than n_folds=5: 'rare' \(2\), 'rarer' \(1\)\."):
        benchmark.check(obs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = benchmark.run(embedding, obs)
        facts = benchmark.describe(obs)
    assert scores == CellTypeAnnotation("label").run(embedding[4:], obs[4:])
    assert facts == {
        "cells scored": "116 of 120",
        "labels left out": "'rare' (2), 'rarer' (1)",
        "drawn again": "cells",
    }


def test_too_few_cells(cells) -> None:
    embedding, obs = cells
    with pytest.raises(DataError, match=r"fewer than 2 labels .* have the 40 cells .* \(too few: 'b' \(30\)\)"):
        CellTypeAnnotation("label", n_folds=40).check(obs)
    with pytest.raises(DataError, match="n_neighbors=97 is more than the 96 labelled cells that n_folds=5 leaves"):
        CellTypeAnnotation("label", n_neighbors=97).check(obs)
    CellTypeAnnotation("label", n_neighbors=96).run(embedding, obs)
    with pytest.raises(DataError, match="values that are not numbers"):
        CellTypeAnnotation("label").run(np.full_like(embedding, np.nan), obs)
