from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.model_selection import StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.eval import CellTypeAnnotation, Geometry, LabelPrediction, get_benchmark, is_collapsed
from scforge.eval.label_prediction import check_embedding


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
    knn, logreg = labels.copy(), labels.copy()
    for train, test in StratifiedKFold(4, shuffle=True, random_state=7).split(embedding, labels):
        knn[test] = KNeighborsClassifier(5).fit(embedding[train], labels[train]).predict(embedding[test])
        scaler = StandardScaler().fit(embedding[train])
        model = LogisticRegression(max_iter=2_000).fit(scaler.transform(embedding[train]), labels[train])
        logreg[test] = model.predict(scaler.transform(embedding[test]))
    options = {"labels_key": "label", "n_folds": 4, "n_neighbors": 5, "seed": 7}
    scores, annotated = (
        LabelPrediction(**options).run(embedding, obs),
        CellTypeAnnotation(**options).run(embedding, obs),
    )
    assert set(scores) == set(LabelPrediction.metrics)
    assert scores["knn_macro_f1"] == pytest.approx(f1_score(labels, knn, average="macro"))
    assert scores["logreg_macro_f1"] == pytest.approx(f1_score(labels, logreg, average="macro"))
    expected = {"macro_f1": f1_score(labels, knn, average="macro"), "accuracy": accuracy_score(labels, knn)}
    assert annotated == pytest.approx(expected)
    assert annotated["macro_f1"] < annotated["accuracy"] < 1
    noise = np.random.default_rng(1).normal(size=(120, 8))
    assert all(0.3 < value < 0.7 for value in LabelPrediction("label").run(noise, obs).values()), "chance"


def test_cells_without_a_label_take_no_part(cells) -> None:
    embedding, obs = cells
    obs.loc[[0, 100], "label"] = None
    rest = obs["label"].notna().to_numpy()
    benchmark = LabelPrediction("label")
    assert benchmark.run(embedding, obs) == benchmark.run(embedding[rest], obs[rest])
    assert benchmark.describe(obs) == {"cells scored": "118 of 120", "drawn again": "cells"}


def test_rare_labels_are_left_out_of_annotation_and_named_once(cells) -> None:
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
    left_out = "'rare' (2), 'rarer' (1)"
    assert facts == {"cells scored": "116 of 120", "labels left out": left_out, "drawn again": "cells"}


def test_mistakes(cells) -> None:
    embedding, obs = cells
    mixed = obs.assign(label=np.array([1, "1", 2], dtype=object)[np.arange(120) % 3])
    labels, annotation = LabelPrediction("label"), CellTypeAnnotation("label")
    with pytest.raises(OptionError, match="n_folds=1 is too few"):
        LabelPrediction("label", n_folds=1)
    with pytest.raises(DataError, match="labels_key='labels' is not a column of obs; did you mean 'label'"):
        LabelPrediction("labels").run(embedding, obs)
    for some, message in [
        (obs[:90], "labels_key='label' has one value only .'a'.; choose"),
        (obs.assign(label=None), "labels_key='label' has no value in any cell; choose a column with two"),
        (obs[:93], "labels_key='label': label 'b' has 3 cells, fewer than n_folds=5; leave"),
        (mixed, "labels_key='label' holds '1' as int and as str, which are one text"),
    ]:
        with pytest.raises(DataError, match=message):
            labels.run(embedding[: len(some)], some)
    with pytest.raises(DataError, match=r"fewer than 2 labels .* have the 40 cells .* \(too few: 'b' \(30\)\)"):
        CellTypeAnnotation("label", n_folds=40).check(obs)
    CellTypeAnnotation("label", n_neighbors=96).run(embedding, obs)
    with pytest.raises(DataError, match="n_neighbors=97 is more than the 96 labelled cells that n_folds=5 leaves"):
        CellTypeAnnotation("label", n_neighbors=97).check(obs)
    for benchmark in (labels, annotation):
        with pytest.raises(DataError, match="values that are not numbers"):
            benchmark.run(embedding * np.nan, obs)
    with pytest.raises(OptionError, match="benchmark='label_predicton' is not known; did you mean 'label_prediction'"):
        get_benchmark("label_predicton")
    with pytest.raises(OptionError, match="benchmark option 'folds' is unknown to 'label_prediction'; did you mean"):
        get_benchmark("label_prediction", labels_key="label", folds=3)
    table = pd.DataFrame(embedding)
    for wrong, message in [
        (table.assign(name="x"), r"columns that are not numbers \('name'\)"),
        (embedding.astype(object), "holds object in place of numbers"),
        (table.convert_dtypes().mask(table > 2), "values that are not numbers"),
    ]:
        with pytest.raises(DataError, match=message):
            check_embedding(wrong, 120)


def test_labels_that_may_be_none_are_told(cells) -> None:
    odd = cells[1].assign(label=np.array(["nan", "a", "unknown"])[np.arange(120) % 3])
    with pytest.warns(ScforgeWarning, match="has the label 'nan', 'unknown', which is taken for a class"):
        LabelPrediction("label").check(odd)


@pytest.mark.parametrize("kind", [sparse.csr_matrix, pd.DataFrame, lambda x: pd.DataFrame(x).convert_dtypes()])
def test_embeddings_of_other_kinds(cells, kind) -> None:
    np.testing.assert_array_equal(check_embedding(kind(cells[0]), 120), cells[0])


CELLS = np.random.default_rng(1).normal(size=(200, 8))


def geometry(embedding: np.ndarray) -> dict[str, float]:
    return Geometry().run(embedding, pd.DataFrame(index=range(len(embedding))))


@pytest.mark.parametrize("shape", [(80, 12), (12, 80)])
def test_geometry_is_what_its_definitions_say(shape) -> None:
    embedding = np.random.default_rng(0).gamma(1.0, size=shape).astype(np.float32)
    embedding[:, 3] = 2.0
    exact = embedding.astype(np.float64)
    shares = np.linalg.svd(exact, compute_uv=False)
    shares /= shares.sum()
    expected = {
        "effective_rank": np.exp(-np.sum(shares * np.log(shares))),
        "mean_cosine": cosine_similarity(exact)[~np.eye(len(exact), dtype=bool)].mean(),
        "top_component_share": PCA().fit(exact).explained_variance_ratio_[0],
        "constant_dims": 1 / shape[1],
    }
    assert geometry(embedding) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("embedding", "collapsed", "expected"),
    [
        (CELLS, False, {"effective_rank": 8, "mean_cosine": 0, "constant_dims": 0}),
        (CELLS[:, :1] * np.arange(1, 9), True, {"effective_rank": 1, "top_component_share": 1}),
        (CELLS * 0.01 + 5, True, {"mean_cosine": 1, "constant_dims": 0}),
        (CELLS * 1e-9 + 5, True, {"mean_cosine": 1, "constant_dims": 1, "top_component_share": 1}),
        (np.full((200, 8), np.float32(0.1)), True, {"effective_rank": 1, "constant_dims": 1, "top_component_share": 1}),
        (np.zeros((200, 8)), True, {"effective_rank": 0, "mean_cosine": np.nan, "constant_dims": 1}),
    ],
    ids=["noise", "a line", "an offset", "almost a point", "a point", "nothing"],
)
def test_a_collapse_shows(embedding, collapsed, expected) -> None:
    scores = geometry(embedding)
    assert is_collapsed(scores) == collapsed
    assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=0.2, nan_ok=True)
    assert Geometry().resampled(embedding, pd.DataFrame(index=range(200)), n=5, seed=0) is None


def test_cells_without_a_geometry() -> None:
    with pytest.raises(DataError, match="at least 2 cells, but there are 1"):
        geometry(CELLS[:1])
    with pytest.raises(DataError, match=r"has the shape \(200,\)"):
        geometry(CELLS[:, 0])
