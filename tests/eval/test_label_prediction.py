from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.eval import Benchmark, LabelPrediction, get_benchmark, list_benchmarks, register_benchmark
from scforge.eval.base import BENCHMARKS
from scforge.eval.label_prediction import check_embedding


@pytest.fixture
def cells() -> tuple[np.ndarray, pd.DataFrame]:
    """Two overlapping groups of 60 cells in three dimensions, of which the first tells them apart."""
    labels = np.repeat(["a", "b"], 60)
    noise = np.random.default_rng(0).normal(size=(120, 3))
    noise[:, 0] += 3.0 * (labels == "a")
    return noise, pd.DataFrame({"label": labels})


def test_the_figures_are_those_of_scikit_learn(cells) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score
    from sklearn.model_selection import StratifiedKFold
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.preprocessing import StandardScaler

    embedding, obs = cells
    labels = obs["label"].to_numpy()
    predicted = {"knn": labels.copy(), "logreg": labels.copy()}
    for train, test in StratifiedKFold(4, shuffle=True, random_state=7).split(embedding, labels):
        knn = KNeighborsClassifier(5).fit(embedding[train], labels[train])
        predicted["knn"][test] = knn.predict(embedding[test])
        scaler = StandardScaler().fit(embedding[train])
        logreg = LogisticRegression(max_iter=2_000).fit(scaler.transform(embedding[train]), labels[train])
        predicted["logreg"][test] = logreg.predict(scaler.transform(embedding[test]))
    scores = LabelPrediction("label", n_folds=4, n_neighbors=5, seed=7).run(embedding, obs)
    assert set(scores) == set(LabelPrediction.metrics)
    for name in ("knn", "logreg"):
        assert scores[f"{name}_macro_f1"] == pytest.approx(f1_score(labels, predicted[name], average="macro"))


def test_noise_scores_at_chance(cells) -> None:
    _, obs = cells
    scores = LabelPrediction("label").run(np.random.default_rng(1).normal(size=(120, 8)), obs)
    assert all(0.3 < value < 0.7 for value in scores.values())


def test_cells_without_a_label_take_no_part(cells) -> None:
    embedding, obs = cells
    obs.loc[[0, 60], "label"] = None
    rest = obs["label"].notna().to_numpy()
    scores = LabelPrediction("label").run(embedding, obs)
    assert scores == LabelPrediction("label").run(embedding[rest], obs[rest])


def test_the_same_folds_each_time(cells) -> None:
    embedding, obs = cells
    benchmark = LabelPrediction("label")
    assert benchmark.run(embedding, obs) == benchmark.run(embedding, obs)


def test_mistakes(cells) -> None:
    embedding, obs = cells
    with pytest.raises(OptionError, match="n_folds=1 is too few"):
        LabelPrediction("label", n_folds=1)
    with pytest.raises(DataError, match=r"labels_key='labels' is not a column of obs; did you mean 'label'\?"):
        LabelPrediction("labels").run(embedding, obs)
    with pytest.raises(DataError, match="labels_key='label' has one value only .'a'.; choose"):
        LabelPrediction("label").run(embedding, obs.assign(label="a"))
    with pytest.raises(DataError, match="labels_key='label' has no value in any cell; choose a column with two"):
        LabelPrediction("label").run(embedding, obs.assign(label=None))
    few = obs.assign(label=["rare"] * 3 + ["a"] * 117)
    with pytest.raises(DataError, match="labels_key='label': label 'rare' has 3 cells, fewer than n_folds=5; leave"):
        LabelPrediction("label").run(embedding, few)
    embedding[5, 0] = np.nan
    with pytest.raises(DataError, match="values that are not numbers"):
        LabelPrediction("label").run(embedding, obs)


def test_labels_that_are_one_text_and_that_may_be_none(cells) -> None:
    embedding, obs = cells
    mixed = obs.assign(label=np.array([1, "1", 2], dtype=object)[np.arange(120) % 3])
    with pytest.raises(DataError, match="labels_key='label' holds '1' as int and as str, which are one text"):
        LabelPrediction("label").check(mixed)
    odd = obs.assign(label=np.array(["nan", "a", "unknown"])[np.arange(120) % 3])
    with pytest.warns(ScforgeWarning, match="has the label 'nan', 'unknown', which is taken for a class"):
        LabelPrediction("label").check(odd)


def test_what_a_report_says_of_it(cells) -> None:
    _, obs = cells
    obs.loc[0, "label"] = None
    assert LabelPrediction("label").describe(obs) == {"cells scored": "119 of 120", "drawn again": "cells"}


@pytest.mark.parametrize("kind", ["csr", "table", "nullable"])
def test_embeddings_of_other_kinds(cells, kind) -> None:
    from scipy import sparse

    embedding, obs = cells
    made = sparse.csr_matrix(embedding) if kind == "csr" else pd.DataFrame(embedding)
    made = made.convert_dtypes() if kind == "nullable" else made
    np.testing.assert_array_equal(check_embedding(made, 120), embedding)


def test_embeddings_that_are_no_numbers(cells) -> None:
    embedding, _ = cells
    with pytest.raises(DataError, match=r"columns that are not numbers \('name'\)"):
        check_embedding(pd.DataFrame(embedding).assign(name="x"), 120)
    with pytest.raises(DataError, match="holds object in place of numbers"):
        check_embedding(embedding.astype(object), 120)
    missing = pd.DataFrame(embedding).convert_dtypes()
    missing.iloc[0, 0] = pd.NA
    with pytest.raises(DataError, match="values that are not numbers"):
        check_embedding(missing, 120)


def test_by_name(cells) -> None:
    benchmark = get_benchmark("label_prediction", labels_key="label", n_folds=3)
    assert isinstance(benchmark, LabelPrediction)
    assert benchmark.n_folds == 3
    with pytest.raises(OptionError, match="benchmark='label_predicton' is not known; did you mean 'label_prediction'"):
        get_benchmark("label_predicton")
    with pytest.raises(OptionError, match="benchmark option 'folds' is unknown to 'label_prediction'; did you mean"):
        get_benchmark("label_prediction", labels_key="label", folds=3)


def test_a_benchmark_of_ones_own(cells) -> None:
    @register_benchmark("spread")
    class Spread(Benchmark):
        metrics = ("spread",)

        def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
            return {"spread": float(embedding.std())}

    try:
        assert "spread" in list_benchmarks()
        assert get_benchmark("spread").run(*cells)["spread"] > 0
    finally:
        BENCHMARKS._entries.pop("spread")
