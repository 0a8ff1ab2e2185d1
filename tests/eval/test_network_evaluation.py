from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score

from scforge.errors import OptionError
from scforge.eval import GeneNetwork, evaluate_network, network_curves

SOURCES = [f"gene{i}" for i in range(0, 12)]


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


def test_models_stand_beside_baselines_on_the_same_pairs(
    tiny_adata: ad.AnnData, truth: pd.DataFrame, scores: pd.DataFrame
) -> None:
    noise = scores.assign(weight=np.random.default_rng(2).random(len(scores)))
    kinds = {"noise": "untrained"}
    report = evaluate_network({"mine": scores, "noise": noise}, truth, tiny_adata, kinds=kinds, n_random=1)
    assert {row.name: row.kind for row in report.rows} == {
        "mine": "model",
        "noise": "untrained",
        **dict.fromkeys(
            ["co-expression (pearson)", "co-expression (spearman)", "mean expression", "degree", "in-degree", "random"],
            "baseline",
        ),
    }
    benchmark = GeneNetwork(genes=list(tiny_adata.var_names))
    row = report.rows[0]
    assert row.scores == benchmark.run(scores, truth)
    low, high = row.intervals["auprc_ratio"]
    assert low < row.scores["auprc_ratio"] < high
    assert row.comparisons["auprc_ratio"].p_value < 0.01
    assert report.facts["transcription factors"] == 12
    assert report.facts["true edges left out"] == 1
    n_pairs = report.facts["pairs"]
    universe = benchmark.universe(truth)
    n_scored = int(np.isfinite(universe.matrix(scores)).sum())
    assert (
        f"mine has a score for {n_scored} of {n_pairs:,} pairs; the others tie behind all that have one."
        in report.notes
    )
    assert not any("co-expression (pearson) has" in note for note in report.notes)
    text = report.to_markdown()
    assert "auprc_ratio" in text
    assert "counts as wrong, although it may only be unknown" in text


def test_pairs_are_restricted(tiny_adata: ad.AnnData, truth: pd.DataFrame, scores: pd.DataFrame) -> None:
    options = {"tfs": SOURCES[:4], "targets": "measured", "baselines": ["random"], "intervals": False}
    report = evaluate_network({"mine": scores}, truth, tiny_adata, **options)
    assert report.facts["pairs"] == 4 * 79
    some = [*SOURCES[:4], *(f"gene{i}" for i in range(20, 60)), "unknown"]
    fewer = evaluate_network({"mine": scores}, truth, tiny_adata, genes=some, **options)
    assert fewer.facts["pairs"] == 4 * 43
    assert not report.rows[0].intervals
    tiny_adata.var["symbol"] = tiny_adata.var_names
    tiny_adata.var_names = tiny_adata.var["ensembl"]
    by_symbol = evaluate_network({"mine": scores}, truth, tiny_adata, gene_key="symbol", **options)
    assert by_symbol.rows[0].scores == report.rows[0].scores


def test_arguments_that_cannot_be_used(tiny_adata: ad.AnnData, truth: pd.DataFrame, scores: pd.DataFrame) -> None:
    with pytest.raises(OptionError, match="scores names no method"):
        evaluate_network({}, truth, tiny_adata)
    with pytest.raises(OptionError, match="scores names no method"):
        evaluate_network(scores, truth, tiny_adata)
    with pytest.raises(OptionError, match="kinds names 'other', not among the scores"):
        evaluate_network({"mine": scores}, truth, tiny_adata, kinds={"other": "model"})
    with pytest.raises(OptionError, match="scores calls a method 'degree', which is the name of a baseline"):
        evaluate_network({"degree": scores}, truth, tiny_adata, baselines=["degree"])
    with pytest.raises(OptionError, match="genes='ENSG1' names none of the measured genes .'gene0'"):
        evaluate_network({"mine": scores}, truth, tiny_adata, genes=["ENSG1"])
    with pytest.raises(OptionError, match="baseline"):
        evaluate_network({"mine": scores}, truth, tiny_adata, baselines=[], intervals=False)


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
        assert set(curve["auprc"]) == {GeneNetwork().run(made, truth)["auprc"]}
        assert curve["recall"].is_monotonic_increasing
        assert curve["recall"].iloc[-1] == 1.0
        assert curve["precision"].iloc[-1] == pytest.approx(universe.edges.sum() / universe.pairs.sum())


def test_curves_have_few_points(truth: pd.DataFrame, scores: pd.DataFrame) -> None:
    whole = network_curves({"mine": scores}, truth)
    few = network_curves({"mine": scores}, truth, n_points=10)
    assert len(few) == 10 < len(whole)
    assert set(map(tuple, few.to_numpy())) <= set(map(tuple, whole.to_numpy()))
    np.testing.assert_array_equal(few.iloc[[0, -1]], whole.iloc[[0, -1]])
