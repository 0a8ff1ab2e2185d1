import warnings

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from scipy import sparse
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, recall_score
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.model_selection import StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.eval import CellTypeProbe, Geometry, LabelPrediction, evaluate, get_benchmark
from scforge.eval.label_prediction import CellTypeAnnotation, check_embedding, is_collapsed
from scforge.testing import raises


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
    scores, annotated = (of(**options).run(embedding, obs) for of in (LabelPrediction, CellTypeAnnotation))
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
    assert benchmark.describe(obs) == {"cells scored": "118 of 120", "resampled": "cells"}


def test_rare_labels_are_left_out_of_annotation_and_named_once(cells) -> None:
    embedding, obs = cells
    obs.loc[[0, 1, 2, 3], "label"] = ["rare", "rarer", "rare", None]
    benchmark = CellTypeAnnotation("label")
    with pytest.warns(
        ScforgeWarning, match=r"cannot be tested with n_folds=5 are left out: 'rare' \(2 cells\), 'rarer' \(1 cells\)\."
    ):
        benchmark.check(obs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = benchmark.run(embedding, obs)
        facts = benchmark.describe(obs)
    assert scores == CellTypeAnnotation("label").run(embedding[4:], obs[4:])
    left_out = "'rare' (2 cells), 'rarer' (1 cells)"
    assert facts == {"cells scored": "116 of 120", "labels left out": left_out, "resampled": "cells"}


def test_mistakes(cells) -> None:
    embedding, obs = cells
    labels, annotation = LabelPrediction("label"), CellTypeAnnotation("label")
    with raises(OptionError, "n_folds"):
        LabelPrediction("label", n_folds=1)
    with raises(DataError, "labels_key"):
        LabelPrediction("labels").run(embedding, obs)
    for some, message in [
        (obs[:90], "labels_key='label' has only one value .'a'.; choose"),
        (obs.assign(label=None), "labels_key='label' has no values; choose a column with at least two"),
        (obs[:93], r"fewer than 2 labels .* n_folds=5 \(left out: 'b' \(3 cells\)\); lower n_folds"),
    ]:
        with pytest.raises(DataError, match=message):
            labels.run(embedding[: len(some)], some)
    CellTypeAnnotation("label", n_neighbors=96).run(embedding, obs)
    with raises(DataError, "n_neighbors"):
        CellTypeAnnotation("label", n_neighbors=97).check(obs)
    for benchmark in (labels, annotation):
        with pytest.raises(DataError, match="contains NaN or infinite values"):
            benchmark.run(embedding * np.nan, obs)
    with raises(OptionError, "benchmark"):
        get_benchmark("label_predicton")
    with raises(OptionError, "folds"):
        get_benchmark("label_prediction", labels_key="label", folds=3)
    table = pd.DataFrame(embedding)
    for wrong, message in [
        (table.assign(name="x"), r"non-numeric columns \('name'\)"),
        (embedding.astype(object), "has dtype object, which is not numeric"),
        (embedding[:100], r"has shape \(100, 3\), but there are 120 cells"),
        (table.convert_dtypes().mask(table > 2), "contains NaN or infinite values"),
    ]:
        with pytest.raises(DataError, match=message):
            check_embedding(wrong, 120)


def test_labels_that_may_be_none_are_told(cells) -> None:
    odd = cells[1].assign(label=np.array(["N/A", "a", "Unassigned", "b"])[np.arange(120) % 4])
    with pytest.warns(ScforgeWarning, match="60 of 120 cells have the label 'N/A', 'Unassigned', which is treated as"):
        LabelPrediction("label").check(odd)
    known = odd["label"].isin(["a", "b"])
    alone = LabelPrediction("label").run(cells[0][known], odd[known])
    assert LabelPrediction("label").run(cells[0], odd) == alone


def test_equal_values_of_different_types_are_one_label(cells) -> None:
    embedding, obs = cells
    mixed = obs.assign(label=np.array([1, "1", 2.0], dtype=object)[np.arange(120) % 3])
    text = obs.assign(label=np.array(["1", "1", "2"])[np.arange(120) % 3])
    assert LabelPrediction("label").run(embedding, mixed) == LabelPrediction("label").run(embedding, text)


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
    with pytest.raises(DataError, match=r"has shape \(200,\)"):
        geometry(CELLS[:, 0])


@pytest.fixture
def donors() -> tuple[np.ndarray, pd.DataFrame]:
    """Cells of three overlapping labels, one of them rare, of four donors in turn, in three dimensions."""
    labels = np.repeat(["a", "b", "c"], [120, 60, 12])
    embedding = np.random.default_rng(0).normal(size=(192, 3))
    embedding[:, 0] += 2.0 * (labels == "a")
    embedding[:, 1] += 2.0 * (labels == "c")
    obs = pd.DataFrame({"label": labels, "donor": [f"donor{i % 4}" for i in range(192)]})
    return embedding, obs.set_index(obs.index.astype(str))


@pytest.mark.parametrize("groups_key", [None, "donor"])
def test_the_probe_is_that_of_scikit_learn(donors, groups_key) -> None:
    embedding, obs = donors
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


def test_what_a_donor_alone_knows_does_not_help(donors) -> None:
    """The cells of a label lie together within a donor only: that tells cells which are held out, but not donors."""
    _, obs = donors
    rng = np.random.default_rng(1)
    places = rng.normal(size=(12, 3)) * 10
    embedding = places[obs.groupby(["label", "donor"]).ngroup()] + rng.normal(size=(192, 3)) * 0.01
    leaky = CellTypeProbe("label", n_neighbors=1).run(embedding, obs)
    honest = CellTypeProbe("label", "donor", n_neighbors=1).run(embedding, obs)
    assert leaky["knn_macro_f1"] > 0.95
    assert honest["knn_macro_f1"] < 0.7


def test_the_same_cells_in_two_folds(donors) -> None:
    embedding, obs = donors
    probe = CellTypeProbe("label", rare_share=0.1)
    copies = obs.iloc[:20]
    doubled = np.concatenate([embedding, embedding[:20]])
    with pytest.raises(DataError, match=r"20 cell names are duplicated \('0', '1', '2'\)"):
        CellTypeProbe("label", "donor").run(doubled, pd.concat([obs, copies]))
    renamed = pd.concat([obs, copies.set_index("copy" + copies.index)])
    with pytest.warns(
        ScforgeWarning, match=r"\d+\.\d% of the cells have exactly the same coordinates as a cell in another"
    ):
        probe.run(doubled, renamed)
    with warnings.catch_warnings():  # copies within a donor stay within a fold
        warnings.simplefilter("error")
        CellTypeProbe("label", "donor").run(doubled, renamed)
        probe.run(np.concatenate([embedding, embedding[:1]]), renamed.iloc[:193])  # one pair: 1 % is not reached


def test_labels_that_cannot_be_tested(donors, monkeypatch) -> None:
    embedding, obs = donors
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


def test_draws_are_of_cells_or_donors_and_predictions_are_made_once(donors, monkeypatch) -> None:
    embedding, obs = donors
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


def test_groups_that_take_no_part_are_no_units(donors) -> None:
    obs = donors[1].assign(label=donors[1]["label"].where(donors[1]["donor"] != "donor3"))
    probe = CellTypeProbe("label", "donor")
    assert probe.n_units(obs) == 3
    assert CellTypeProbe("label").n_units(obs) is None
    assert CellTypeProbe("label", "donor").describe(donors[1])["resampled"] == "groups of donor (4)"
    few = "nothing, so there are no intervals and tests: {} groups of donor, but at least 4 are needed"
    assert probe.describe(obs) == {"cells scored": "144 of 192", "resampled": few.format(3)}
    counts = np.random.default_rng(0).poisson(2.0, (len(obs), 20)).astype(np.float32)
    adata = AnnData(counts, obs, obsm={"X_own": donors[0]})
    with pytest.warns(ScforgeWarning, match="'donor' has only 3 scored groups; .* tests need at least 4"):
        report = evaluate(adata, probe, "X_own", baselines=[2])
    assert not any(row.intervals for row in report.rows)
    assert probe.resampled(donors[0], obs, n=10, seed=0) is None
    obs.loc[obs["donor"] == "donor0", "label"] = "alone"
    with pytest.warns(ScforgeWarning, match="'alone' .in one group."):
        assert probe.describe(obs)["resampled"] == few.format(2)


def test_bad_input_of_the_probe(donors) -> None:
    _, obs = donors
    with raises(OptionError, "rare_share"):
        CellTypeProbe("label", rare_share=2)
    with raises(DataError, "groups_key"):
        CellTypeProbe("label", "doner").check(obs)
    with raises(DataError, "groups_key"):
        CellTypeProbe("label", "donor").check(obs.assign(donor="x"))
    with pytest.raises(DataError, match=r"fewer than 2 labels .* can be tested with .* \(left out: 'b'"):
        CellTypeProbe("label", n_folds=100).check(obs)
