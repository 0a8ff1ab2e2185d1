from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from scforge.errors import DataError, OptionError
from scforge.eval import GeneNetwork, get_benchmark

TFS = [f"T{i}" for i in range(8)]
GENES = [*TFS[:2], *(f"g{i}" for i in range(28))]


def edges(matrix: np.ndarray, kept: np.ndarray) -> pd.DataFrame:
    rows, columns = np.nonzero(kept)
    weights = matrix[rows, columns]
    return pd.DataFrame({"source": np.take(TFS, rows), "target": np.take(GENES, columns), "weight": weights})


@pytest.fixture
def network() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
    early = true[scores >= last].mean()
    auprc = average_precision_score(true, scores)
    return {
        "auprc": auprc,
        "auprc_ratio": auprc / true.mean(),
        "auroc": roc_auc_score(true, scores),
        "early_precision": early,
        "early_precision_ratio": early / true.mean(),
    }


def test_figures_are_those_of_scikit_learn(network) -> None:
    true, pairs, scores = network
    figures = GeneNetwork(genes=[*TFS, *GENES], targets="measured").run(edges(scores, pairs), edges(scores, true))
    # Six transcription factors are no targets of anything scored: pairs with them have no score.
    wide = np.full((8, 36), -10.0)
    wide[:, :30] = scores
    some = np.ones((8, 36), dtype=bool)
    some[:, :30] = pairs
    some[np.arange(2, 8), np.arange(30, 36)] = False
    truth = np.zeros((8, 36), dtype=bool)
    truth[:, :30] = true
    assert set(figures) == set(GeneNetwork.metrics)
    for name, value in expected(truth[some], wide[some]).items():
        assert figures[name] == pytest.approx(value, abs=1e-12), name
    own = [roc_auc_score(truth[i, some[i]], wide[i, some[i]]) for i in range(8)]
    assert figures["auroc_within_tf"] == pytest.approx(np.mean(own), abs=1e-12)


def test_pairs_without_a_score_tie_behind_all_others(network) -> None:
    true, pairs, scores = network
    found = pairs & (scores > 0.5)
    figures = GeneNetwork().run(edges(scores, found), edges(scores, true))
    regulated = true.any(axis=0)
    lowest = np.where(found, scores, -99.0)[:, regulated][pairs[:, regulated]]
    for name, value in expected(true[:, regulated][pairs[:, regulated]], lowest).items():
        assert figures[name] == pytest.approx(value, abs=1e-12), name


def test_early_precision_counts_missing_places_as_random_picks() -> None:
    truth = pd.DataFrame({"source": ["A"] * 4, "target": list("wxyz")})
    more = pd.DataFrame({"source": ["B"] * 2, "target": ["w", "v"]})
    one = pd.DataFrame({"source": ["A"], "target": ["w"], "weight": [1.0]})
    # 10 pairs, of which 6 are true and one is scored: 5 more of the other 9, of which 5 are true.
    figures = GeneNetwork().run(one, pd.concat([truth, more]))
    assert figures["early_precision"] == pytest.approx((1 + 5 * 5 / 9) / 6)
    assert figures["early_precision_ratio"] == pytest.approx((1 + 5 * 5 / 9) / 6 / 0.6)


def test_right_scores_are_perfect_wrong_ones_the_worst_and_random_ones_at_chance(network) -> None:
    true, pairs, _ = network
    truth = edges(true, true)
    best = GeneNetwork().run(edges(true.astype(float), pairs), truth)
    assert best["auroc"] == best["auprc"] == best["early_precision"] == best["auroc_within_tf"] == 1.0
    worst = GeneNetwork().run(edges(-true.astype(float), pairs), truth)
    assert worst["auroc"] == worst["early_precision"] == worst["auroc_within_tf"] == 0.0
    rng = np.random.default_rng(1)
    chance = pd.DataFrame([GeneNetwork().run(edges(rng.random(true.shape), pairs), truth) for _ in range(50)]).mean()
    assert chance[["auprc_ratio", "early_precision_ratio"]].to_numpy() == pytest.approx(1.0, abs=0.08)
    assert chance[["auroc", "auroc_within_tf"]].to_numpy() == pytest.approx(0.5, abs=0.03)


def test_only_measured_genes_take_part_and_none_with_itself() -> None:
    truth = pd.DataFrame(
        {"source": ["A", "A", "A", "B", "B", "C"], "target": ["A", "x", "x", "y", "B", "x"], "sign": 1.0}
    )
    universe = GeneNetwork().universe(truth)
    assert (list(universe.tfs), list(universe.genes)) == (["A", "B", "C"], ["x", "y"])
    assert universe.describe()["true edges left out"] == 2
    assert universe.describe()["share of true edges"] == 0.5
    measured = GeneNetwork(genes=["A", "B", "x", "y", "z"], targets="measured").universe(truth)
    assert (list(measured.tfs), list(measured.genes)) == (["A", "B"], ["A", "B", "x", "y", "z"])
    assert (measured.pairs.sum(), measured.edges.sum()) == (8, 2)
    assert list(GeneNetwork(tfs=["B", "C", "Q"]).universe(truth).tfs) == ["B", "C"]


def test_order_and_dtype_of_edges_do_not_matter(network) -> None:
    true, pairs, scores = network
    truth, made = edges(scores, true), edges(scores, pairs)
    figures = GeneNetwork().run(made, truth)
    mixed = made.sample(frac=1, random_state=0).astype({"source": "category", "target": "category"})
    outside = pd.DataFrame({"source": ["T0", "Q"], "target": ["unheard", "g0"], "weight": [9.0, np.nan]})
    assert GeneNetwork().run(mixed, truth.sample(frac=1, random_state=1)) == figures
    assert GeneNetwork().run(pd.concat([made, outside]), truth) == figures


def test_transcription_factors_are_drawn_and_the_same_for_all_scores(network) -> None:
    true, pairs, scores = network
    truth, made = edges(scores, true), edges(scores, pairs)
    draws = GeneNetwork().resampled(made, truth, n=20, seed=3)
    assert draws.shape == (20, len(GeneNetwork.metrics))
    pd.testing.assert_frame_equal(
        draws, GeneNetwork().resampled(made.assign(weight=made["weight"] * 2), truth, n=20, seed=3)
    )
    # A draw is the network in which each factor stands as often as it was drawn.
    times = np.random.default_rng(3).multinomial(8, np.full(8, 1 / 8), size=20)[0]
    drawn = np.repeat(np.arange(8), times)
    regulated = true.any(axis=0)
    kept = pairs[drawn][:, regulated]
    for name, value in expected(true[drawn][:, regulated][kept], scores[drawn][:, regulated][kept]).items():
        assert draws[name].iloc[0] == pytest.approx(value, abs=1e-12), name
    assert draws["auroc"].mean() == pytest.approx(GeneNetwork().run(made, truth)["auroc"], abs=0.05)


def test_by_name() -> None:
    assert get_benchmark("gene_network", targets="truth").subject == "network"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "all"}, "targets='all' is none of 'truth', 'measured'"),
        ({"targets": "measured"}, "needs to know what was measured; give genes"),
        ({"genes": []}, r"genes=\[\] is not a list of gene names"),
        ({"tfs": "GATA1"}, "tfs='GATA1' is not a list of gene names"),
    ],
)
def test_options_that_cannot_be_used(options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        GeneNetwork(**options)


def test_truth_and_scores_that_cannot_be_used(network) -> None:
    true, pairs, scores = network
    truth, made = edges(scores, true), edges(scores, pairs)
    with pytest.raises(DataError, match=r"the truth have no column 'source' \(there is: 'tf'"):
        GeneNetwork().check(truth.rename(columns={"source": "tf"}))
    with pytest.raises(DataError, match="0 of the 2 genes .* are in the truth; name genes as the truth does"):
        GeneNetwork(genes=["ENSG1", "ENSG2"]).check(truth)
    with pytest.raises(DataError, match="nothing to tell them from"):
        GeneNetwork().check(truth[:1])
    with pytest.raises(DataError, match="1 edges of the truth have no target"):
        GeneNetwork().check(truth.assign(target=[None, *truth["target"][1:]]))
    with pytest.raises(DataError, match="the scores have no column 'weight'"):
        GeneNetwork().run(made.drop(columns="weight"), truth)
    with pytest.raises(DataError, match="2 edges of the scores stand there twice"):
        GeneNetwork().run(pd.concat([made, made[:2]]), truth)
    with pytest.raises(DataError, match="1 weights of the scores are not numbers"):
        GeneNetwork().run(made.assign(weight=[np.nan, *made["weight"][1:]]), truth)
    with pytest.raises(DataError, match="have the dtype (str|object); give numbers"):
        GeneNetwork().run(made.assign(weight="high"), truth)
    with pytest.raises(OptionError, match="the scores are of type 'dict'"):
        GeneNetwork().run({}, truth)
