from dataclasses import replace

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score

from scforge.errors import DataError, OptionError
from scforge.eval import GeneNetwork, evaluate_network, get_benchmark
from scforge.eval.networks import Universe, degree_weights, edges_of, network_baselines, network_curves

SOURCES = [f"gene{i}" for i in range(0, 12)]
TFS = ["gene0", "gene5", "gene75"]
TARGETS = ["gene0", "gene1", "gene40", "gene79"]
RANDOM = ["random 1", "random 2", "random 3"]
BASELINES = ["co-expression (pearson)", "co-expression (spearman)", "mean expression", "degree", "in-degree"]


@pytest.fixture
def truth() -> pd.DataFrame:
    """Twelve sources, each of which regulates some genes, and one that was not measured."""
    rng = np.random.default_rng(0)
    pairs = [(tf, f"gene{i}") for tf in SOURCES for i in rng.choice(np.arange(20, 80), 8, replace=False)]
    return pd.DataFrame([*pairs, ("unheard", "gene20")], columns=["source", "target"])


@pytest.fixture
def scores(truth: pd.DataFrame) -> pd.DataFrame:
    """Half of the true edges and as many wrong ones, nearly in the right order."""
    rng = np.random.default_rng(1)
    right = truth[::2].assign(weight=rng.normal(1.0, 0.5, len(truth[::2])))
    wrong = pd.DataFrame({"source": np.tile(SOURCES, 8), "target": [f"gene{i}" for i in rng.integers(20, 80, 96)]})
    both = pd.concat([right, wrong.assign(weight=rng.normal(0.0, 0.5, 96))])
    return both.drop_duplicates(["source", "target"])


def test_models_stand_beside_baselines_on_the_same_pairs(tiny_adata: ad.AnnData, truth, scores) -> None:
    noise = scores.assign(weight=np.random.default_rng(2).random(len(scores)))
    kinds = {"noise": "untrained"}
    report = evaluate_network({"mine": scores, "noise": noise}, truth, tiny_adata, kinds=kinds)
    expected = {"mine": "model", "noise": "untrained", **dict.fromkeys([*BASELINES, *RANDOM], "baseline")}
    assert {row.name: row.kind for row in report.rows} == expected
    benchmark = GeneNetwork(genes=list(tiny_adata.var_names))
    row = report.rows[0]
    assert row.scores == benchmark.run(scores, truth)
    low, high = row.intervals["auprc_ratio"]
    assert low < row.scores["auprc_ratio"] < high
    assert row.comparisons["auprc_ratio"].p_value < 0.01
    assert report.facts.items() >= {"transcription factors": 12, "true edges left out": 1}.items()
    n_scored = int(np.isfinite(benchmark.universe(truth).matrix(scores)).sum())
    note = f"mine has a score for {n_scored} of {report.facts['pairs']:,} pairs; the other pairs are ranked last"
    assert any(one.startswith(note) for one in report.notes)
    assert not any("co-expression (pearson) has" in one for one in report.notes)
    text = report.to_markdown()
    assert "auprc_ratio" in text
    assert "count as wrong, although they may only be unknown" in text


def test_pairs_are_restricted(tiny_adata: ad.AnnData, truth: pd.DataFrame, scores: pd.DataFrame) -> None:
    options = {"tfs": SOURCES[:4], "targets": "measured", "baselines": ["random"], "intervals": False}
    report = evaluate_network({"mine": scores}, truth, tiny_adata, **options)
    assert report.facts["pairs"] == 4 * 79
    assert not report.rows[0].intervals
    some = [*SOURCES[:4], *(f"gene{i}" for i in range(20, 60)), "unknown"]
    assert evaluate_network({"mine": scores}, truth, tiny_adata, genes=some, **options).facts["pairs"] == 4 * 43
    tiny_adata.var["symbol"] = tiny_adata.var_names
    tiny_adata.var_names = tiny_adata.var["ensembl"]
    by_symbol = evaluate_network({"mine": scores}, truth, tiny_adata, gene_key="symbol", **options)
    assert by_symbol.rows[0].scores == report.rows[0].scores


@pytest.mark.parametrize(
    ("named", "options", "message"),
    [
        (lambda scores: {}, {}, "scores contains nothing; pass at least one method"),
        (
            lambda scores: {"mine": scores},
            {"kinds": {"other": "model"}},
            "kinds='other' is not in scores",
        ),
        (
            lambda scores: {"degree": scores},
            {},
            "scores contains 'degree'; pass at least one method, and do not use the names of baselines",
        ),
        (
            lambda scores: {"mine": scores},
            {"baselines": ["pearsons"]},
            "baselines='pearsons' is not in .*did you mean 'pearson'",
        ),
        (lambda scores: {"mine": scores}, {"baselines": [], "intervals": False}, "baseline"),
    ],
)
def test_arguments_that_cannot_be_used(tiny_adata, truth, scores, named, options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        evaluate_network(named(scores), truth, tiny_adata, **{"baselines": ["degree"], **options})


def test_the_area_below_a_curve_is_the_average_precision(truth: pd.DataFrame, scores: pd.DataFrame) -> None:
    random = scores.assign(weight=np.random.default_rng(3).integers(0, 5, len(scores)))
    curves = network_curves({"mine": scores, "random": random}, truth)
    assert list(curves) == ["method", "recall", "precision", "auprc"]
    universe = GeneNetwork().universe(truth)
    for method, made in {"mine": scores, "random": random}.items():
        curve = curves[curves["method"] == method]
        area = (np.diff(curve["recall"], prepend=0.0) * curve["precision"]).sum()
        ranked = np.nan_to_num(universe.matrix(made), neginf=-9.0)[universe.pairs]
        assert area == pytest.approx(average_precision_score(universe.edges[universe.pairs], ranked))
        assert area == pytest.approx(GeneNetwork().run(made, truth)["auprc"])
        assert curve["auprc"].to_numpy() == pytest.approx(GeneNetwork().run(made, truth)["auprc"])
        assert curve["recall"].is_monotonic_increasing
        last = curve.iloc[-1][["recall", "precision"]].tolist()
        assert last == pytest.approx([1.0, universe.edges.sum() / universe.pairs.sum()])
    whole, few = (network_curves({"mine": scores}, truth, **some) for some in ({}, {"n_points": 10}))
    assert len(few) == 10 < len(whole)
    assert set(map(tuple, few.to_numpy())) <= set(map(tuple, whole.to_numpy()))
    np.testing.assert_array_equal(few.iloc[[0, -1]], whole.iloc[[0, -1]])


def wide(edges: pd.DataFrame) -> pd.DataFrame:
    return edges.astype({"source": str, "target": str}).pivot(index="source", columns="target", values="weight")


def log_expression(adata: ad.AnnData) -> pd.DataFrame:
    counts = adata.X.toarray().astype(np.float64)
    return pd.DataFrame(np.log1p(counts / counts.sum(axis=1, keepdims=True) * 1e4), columns=adata.var_names)


@pytest.mark.parametrize(("method", "reference"), [("pearson", stats.pearsonr), ("spearman", stats.spearmanr)])
def test_correlations_are_those_of_scipy(tiny_adata: ad.AnnData, method: str, reference) -> None:
    known = pd.DataFrame({"source": np.repeat(TFS, 4), "target": TARGETS * 3})[:-1]
    universe = GeneNetwork(genes=list(tiny_adata.var_names)).universe(known)
    names = [method, "mean_expression"]

    def correlations(adata: ad.AnnData, **options) -> pd.DataFrame:
        return wide(network_baselines(adata, universe, names, **options)[f"co-expression ({method})"])

    expression, found = log_expression(tiny_adata), correlations(tiny_adata)
    expected = [
        [np.nan if tf == target else abs(reference(expression[tf], expression[target]).statistic) for target in TARGETS]
        for tf in TFS
    ]
    assert (list(found.index), list(found)) == (TFS, TARGETS)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    mean = expression.mean()
    means = wide(network_baselines(tiny_adata, universe, names)["mean expression"])
    assert means.loc["gene75", "gene40"] == pytest.approx(mean["gene75"] * mean["gene40"], rel=1e-5)
    few = [correlations(tiny_adata, max_cells=20, seed=seed) for seed in (0, 0, 1)]
    pd.testing.assert_frame_equal(few[0], few[1])
    assert not few[0].equals(few[2])
    counts = tiny_adata.X.toarray()
    counts[:, 1] = 0  # a constant gene correlates with none
    tiny_adata.X = counts
    found = correlations(tiny_adata)
    assert (found["gene1"] == 0).all()
    assert (found["gene79"] > 0).all()


def test_genes_of_one_name_are_added_up_and_counts_read_from_a_layer(tiny_adata: ad.AnnData) -> None:
    universe = GeneNetwork().universe(pd.DataFrame({"source": ["gene5"], "target": ["gene40"]}))

    def correlation(**options) -> float:
        return float(
            network_baselines(tiny_adata, universe, ["pearson"], **options)["co-expression (pearson)"]["weight"][0]
        )

    expected, expression = correlation(), log_expression(tiny_adata)
    tiny_adata.var["symbol"] = ["gene40" if name == "gene41" else name for name in tiny_adata.var_names]
    both = np.log1p(np.expm1(expression["gene40"]) + np.expm1(expression["gene41"]))
    by_hand = abs(stats.pearsonr(expression["gene5"], both).statistic)
    assert correlation(gene_key="symbol") == pytest.approx(by_hand, abs=1e-6)
    tiny_adata.layers["counts"] = tiny_adata.X.copy()
    tiny_adata.X = tiny_adata.X * 0.5
    assert correlation(layer="counts") == expected
    with pytest.raises(DataError, match="not whole numbers"):
        correlation()


def named(matrix: np.ndarray) -> pd.DataFrame:
    rows, columns = np.nonzero(matrix)
    return pd.DataFrame({"source": [f"T{i}" for i in rows], "target": [f"g{i}" for i in columns]})


def degree_edges(universe: Universe, **options) -> pd.DataFrame:
    return edges_of(degree_weights(universe, **options), universe.tfs, universe.genes)


def test_degrees_find_hubs_and_not_random_edges() -> None:
    rng = np.random.default_rng(0)
    truth = named(rng.random((40, 60)) < np.outer(rng.uniform(0.1, 1, 40), rng.uniform(0, 1, 60) ** 3))
    universe = GeneNetwork().universe(truth)
    figures = GeneNetwork().run(degree_edges(universe), truth)
    assert figures["auroc"] > 0.75
    assert figures["auprc_ratio"] > 2
    assert GeneNetwork().run(degree_edges(universe, out=False), truth)["auroc_within_tf"] > 0.7
    areas = []
    for seed in range(12):
        truth = named(np.random.default_rng(seed).random((30, 80)) < 0.2)
        areas.append(GeneNetwork().run(degree_edges(GeneNetwork().universe(truth), seed=seed), truth)["auroc"])
    assert np.mean(areas) == pytest.approx(0.5, abs=0.015)


def test_the_weight_of_an_edge_does_not_depend_on_whether_it_is_true() -> None:
    universe = GeneNetwork().universe(named(np.random.default_rng(0).random((30, 80)) < 0.2))
    edges = universe.edges.copy()
    # One edge comes and another goes, so that there are as many.
    came, went = np.argwhere(~edges)[100], np.argwhere(edges)[-20]
    assert (came != went).all()
    edges[tuple(came)], edges[tuple(went)] = True, False
    before = universe.matrix(degree_edges(universe))
    after = universe.matrix(degree_edges(replace(universe, edges=edges)))
    for row, column in (came, went):
        assert after[row, column] == before[row, column]
        assert (after[:, column] != before[:, column]).sum() >= 20
        assert (after[row] != before[row]).sum() >= 50


def test_all_baselines(tiny_adata: ad.AnnData, truth: pd.DataFrame) -> None:
    universe = GeneNetwork(genes=list(tiny_adata.var_names)).universe(truth)
    found = network_baselines(tiny_adata, universe, seed=4)
    assert list(found) == [*BASELINES, *RANDOM]
    for name, edges in found.items():
        assert np.isfinite(universe.matrix(edges)[universe.pairs]).all(), name
    again = network_baselines(tiny_adata, universe, ["random"], seed=5)
    np.testing.assert_array_equal(again["random 1"]["weight"], found["random 2"]["weight"])
    with pytest.raises(DataError, match="none of the 97 true edges .* is between the scored genes"):
        evaluate_network({"mine": truth.assign(weight=1.0)}, truth, tiny_adata, gene_key="ensembl")


FACTORS = [f"T{i}" for i in range(8)]
GENES = [*FACTORS[:2], *(f"g{i}" for i in range(28))]


def edges(matrix: np.ndarray, kept: np.ndarray) -> pd.DataFrame:
    rows, columns = np.nonzero(kept)
    weights = matrix[rows, columns]
    return pd.DataFrame({"source": np.take(FACTORS, rows), "target": np.take(GENES, columns), "weight": weights})


@pytest.fixture
def planted() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True edges, scores with ties and without the pairs of a gene with itself, shape (8, 30) each."""
    rng = np.random.default_rng(0)
    pairs = ~np.eye(8, 30, dtype=bool)
    pairs[2:] = True
    true = (rng.random((8, 30)) < 0.25) & pairs
    true[np.arange(8), np.arange(8) + 2] = True
    true[:, 10:] |= np.eye(8, 20, dtype=bool)
    return true, pairs, (true + rng.normal(size=true.shape)).round(1)


def expected(true: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """The figures of pairs that all have a score, of scikit-learn and of BEELINE's definition."""
    last = np.sort(scores)[::-1][true.sum() - 1]
    early, auprc, share = true[scores >= last].mean(), average_precision_score(true, scores), true.mean()
    figures = {"auprc": auprc, "auroc": roc_auc_score(true, scores), "early_precision": early}
    return {**figures, "auprc_ratio": auprc / share, "early_precision_ratio": early / share}


def test_figures_are_those_of_scikit_learn(planted) -> None:
    true, pairs, scores = planted
    figures = GeneNetwork(genes=[*FACTORS, *GENES], targets="measured").run(edges(scores, pairs), edges(scores, true))
    # Six transcription factors are no targets of anything scored: pairs with them have no score.
    wide = np.pad(scores, ((0, 0), (0, 6)), constant_values=-10.0)
    some = np.pad(pairs, ((0, 0), (0, 6)), constant_values=True)
    some[np.arange(2, 8), np.arange(30, 36)] = False
    truth = np.pad(true, ((0, 0), (0, 6)))
    own = [roc_auc_score(truth[i, some[i]], wide[i, some[i]]) for i in range(8)]
    assert figures == pytest.approx({**expected(truth[some], wide[some]), "auroc_within_tf": np.mean(own)}, abs=1e-12)
    assert set(figures) == set(get_benchmark("gene_network", targets="truth").metrics)


def test_pairs_without_a_score_tie_behind_all_others(planted) -> None:
    true, pairs, scores = planted
    found = pairs & (scores > 0.5)
    figures = GeneNetwork().run(edges(scores, found), edges(scores, true))
    regulated = true.any(axis=0)
    lowest = np.where(found, scores, -99.0)[:, regulated][pairs[:, regulated]]
    by_hand = expected(true[:, regulated][pairs[:, regulated]], lowest)
    assert {name: figures[name] for name in by_hand} == pytest.approx(by_hand, abs=1e-12)


def test_early_precision_counts_missing_places_as_random_picks() -> None:
    truth = pd.DataFrame({"source": list("AAAABB"), "target": list("wxyzwv")})
    one = pd.DataFrame({"source": ["A"], "target": ["w"], "weight": [1.0]})
    # 10 pairs, of which 6 are true and one is scored: 5 more of the other 9, of which 5 are true.
    figures = GeneNetwork().run(one, truth)
    assert figures["early_precision"] == pytest.approx((1 + 5 * 5 / 9) / 6)
    assert figures["early_precision_ratio"] == pytest.approx((1 + 5 * 5 / 9) / 6 / 0.6)


def test_only_measured_genes_take_part_and_none_with_itself() -> None:
    truth = pd.DataFrame({"source": list("AAABBC"), "target": list("AxxyBx"), "sign": 1.0})
    universe = GeneNetwork().universe(truth)
    assert (list(universe.tfs), list(universe.genes)) == (["A", "B", "C"], ["x", "y"])
    assert (universe.n_left_out, universe.edges.sum() / universe.pairs.sum()) == (2, 0.5)
    measured = GeneNetwork(genes=list("ABxyz"), targets="measured").universe(truth)
    assert (list(measured.tfs), list(measured.genes)) == (["A", "B"], list("ABxyz"))
    assert (measured.pairs.sum(), measured.edges.sum()) == (8, 2)
    assert list(GeneNetwork(tfs=["B", "C", "Q"]).universe(truth).tfs) == ["B", "C"]


def test_order_and_dtype_of_edges_do_not_matter(planted) -> None:
    true, pairs, scores = planted
    truth, made = edges(scores, true), edges(scores, pairs)
    figures = GeneNetwork().run(made, truth)
    mixed = made.sample(frac=1, random_state=0).astype({"source": "category", "target": "category"})
    outside = pd.DataFrame({"source": ["T0", "Q"], "target": ["unheard", "g0"], "weight": [9.0, np.nan]})
    assert GeneNetwork().run(mixed, truth.sample(frac=1, random_state=1)) == figures
    assert GeneNetwork().run(pd.concat([made, outside]), truth) == figures


def test_transcription_factors_are_drawn_and_the_same_for_all_scores(planted) -> None:
    true, pairs, scores = planted
    truth, made = edges(scores, true), edges(scores, pairs)
    draws = GeneNetwork().resampled(made, truth, n=20, seed=3)
    assert draws.shape == (20, len(GeneNetwork.metrics))
    twice = made.assign(weight=made["weight"] * 2)
    pd.testing.assert_frame_equal(draws, GeneNetwork().resampled(twice, truth, n=20, seed=3))
    # A draw is the network in which each factor stands as often as it was drawn.
    times = np.random.default_rng(3).multinomial(8, np.full(8, 1 / 8), size=20)[0]
    drawn, regulated = np.repeat(np.arange(8), times), true.any(axis=0)
    kept = pairs[drawn][:, regulated]
    by_hand = expected(true[drawn][:, regulated][kept], scores[drawn][:, regulated][kept])
    assert draws.iloc[0][list(by_hand)].to_dict() == pytest.approx(by_hand, abs=1e-12)
    assert draws["auroc"].mean() == pytest.approx(GeneNetwork().run(made, truth)["auroc"], abs=0.05)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"targets": "all"}, OptionError, "targets='all' must be 'truth', or 'measured' together with genes"),
        ({"targets": "measured"}, OptionError, "must be 'truth', or 'measured' together with genes"),
        (
            {"genes": ["ENSG1"]},
            DataError,
            r"of the .* true edges \(sources: .*\) is between the scored genes; use the same gene identifiers",
        ),
        (
            {"truth": lambda t: t.rename(columns={"source": "tf"})},
            DataError,
            r"lack the column 'source', .* \(columns: 'tf'",
        ),
        (
            {"truth": lambda t: t.assign(target=[None, *t["target"][1:]])},
            DataError,
            "'target', or names are missing in it",
        ),
        ({"made": lambda m: pd.concat([m, m[:2]])}, DataError, "2 duplicate edges"),
        ({"made": lambda m: m.assign(weight=[np.nan, *m["weight"][1:]])}, DataError, "1 non-finite weights"),
    ],
)
def test_what_cannot_be_used(planted, options: dict, error: type[Exception], message: str) -> None:
    true, pairs, scores = planted
    change = {"truth": pd.DataFrame.copy, "made": pd.DataFrame.copy} | options
    truth, made = change.pop("truth")(edges(scores, true)), change.pop("made")(edges(scores, pairs))
    with pytest.raises(error, match=message):
        GeneNetwork(**change).run(made, truth)
