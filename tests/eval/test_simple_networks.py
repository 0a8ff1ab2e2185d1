from __future__ import annotations

from dataclasses import replace

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from scforge.errors import DataError, OptionError
from scforge.eval import GeneNetwork, network_baselines
from scforge.eval.simple_networks import coexpression_edges, degree_edges, mean_expression_edges

TFS = ["gene0", "gene5", "gene75"]
TARGETS = ["gene0", "gene1", "gene40", "gene79"]


def wide(edges: pd.DataFrame) -> pd.DataFrame:
    return edges.astype({"source": str, "target": str}).pivot(index="source", columns="target", values="weight")


def log_expression(adata: ad.AnnData) -> pd.DataFrame:
    counts = adata.X.toarray().astype(np.float64)
    return pd.DataFrame(np.log1p(counts / counts.sum(axis=1, keepdims=True) * 1e4), columns=adata.var_names)


@pytest.fixture
def truth() -> pd.DataFrame:
    pairs = [("gene0", "gene1"), ("gene0", "gene2"), ("gene5", "gene1"), ("gene75", "gene79"), ("unheard", "gene1")]
    return pd.DataFrame(pairs, columns=["source", "target"])


@pytest.mark.parametrize(("method", "reference"), [("pearson", stats.pearsonr), ("spearman", stats.spearmanr)])
def test_correlations_are_those_of_scipy(tiny_adata: ad.AnnData, method: str, reference) -> None:
    expression = log_expression(tiny_adata)
    signed = wide(coexpression_edges(tiny_adata, TFS, [*TARGETS, "unheard"], method=method, absolute=False))
    assert signed.shape == (3, 4)
    for source in TFS:
        for target in TARGETS:
            if source != target:
                expected = reference(expression[source], expression[target]).statistic
                assert signed.loc[source, target] == pytest.approx(expected, abs=1e-6)
    assert np.isnan(signed.loc["gene0", "gene0"])
    assert (signed.stack() < 0).any()
    size = wide(coexpression_edges(tiny_adata, TFS, TARGETS, method=method))
    pd.testing.assert_frame_equal(size, signed.abs())


def test_a_constant_gene_correlates_with_none(tiny_adata: ad.AnnData) -> None:
    counts = tiny_adata.X.toarray()
    counts[:, 1] = 0
    tiny_adata.X = counts
    found = wide(coexpression_edges(tiny_adata, TFS, TARGETS))
    assert (found["gene1"] == 0).all()
    assert (found["gene79"] > 0).all()


def test_genes_of_one_name_are_added_up_and_counts_read_from_a_layer(tiny_adata: ad.AnnData) -> None:
    expected = wide(coexpression_edges(tiny_adata, TFS, ["gene40"]))
    tiny_adata.var["symbol"] = ["gene40" if name == "gene41" else name for name in tiny_adata.var_names]
    summed = wide(coexpression_edges(tiny_adata, TFS, ["gene40"], gene_key="symbol"))
    expression = log_expression(tiny_adata)
    both = np.log1p(np.expm1(expression["gene40"]) + np.expm1(expression["gene41"]))
    assert summed.loc["gene5", "gene40"] == pytest.approx(
        abs(stats.pearsonr(expression["gene5"], both).statistic), abs=1e-6
    )
    tiny_adata.layers["counts"] = tiny_adata.X.copy()
    tiny_adata.X = tiny_adata.X * 0.5
    pd.testing.assert_frame_equal(wide(coexpression_edges(tiny_adata, TFS, ["gene40"], layer="counts")), expected)
    with pytest.raises(DataError, match="not whole numbers"):
        coexpression_edges(tiny_adata, TFS, ["gene40"])


def test_mean_expression_is_that_of_both(tiny_adata: ad.AnnData) -> None:
    mean = log_expression(tiny_adata).mean()
    found = wide(mean_expression_edges(tiny_adata, TFS, TARGETS))
    assert found.loc["gene75", "gene40"] == pytest.approx(mean["gene75"] * mean["gene40"], rel=1e-5)


def test_cells_are_drawn_by_a_seed(tiny_adata: ad.AnnData) -> None:
    few = [coexpression_edges(tiny_adata, TFS, TARGETS, max_cells=20, seed=seed) for seed in (0, 0, 1)]
    pd.testing.assert_frame_equal(few[0], few[1])
    assert (few[0]["weight"] != few[2]["weight"]).any()


def network(matrix: np.ndarray) -> pd.DataFrame:
    rows, columns = np.nonzero(matrix)
    return pd.DataFrame({"source": [f"T{i}" for i in rows], "target": [f"g{i}" for i in columns]})


def test_degrees_find_hubs() -> None:
    rng = np.random.default_rng(0)
    propensity = np.outer(rng.uniform(0.1, 1, 40), rng.uniform(0, 1, 60) ** 3)
    truth = network(rng.random((40, 60)) < propensity)
    universe = GeneNetwork().universe(truth)
    figures = GeneNetwork().run(degree_edges(universe), truth)
    assert figures["auroc"] > 0.75
    assert figures["auprc_ratio"] > 2
    assert GeneNetwork().run(degree_edges(universe, out=False), truth)["auroc_within_tf"] > 0.7


def test_random_edges_are_not_found_by_degrees() -> None:
    figures = []
    for seed in range(12):
        truth = network(np.random.default_rng(seed).random((30, 80)) < 0.2)
        figures.append(GeneNetwork().run(degree_edges(GeneNetwork().universe(truth), seed=seed), truth)["auroc"])
    assert np.mean(figures) == pytest.approx(0.5, abs=0.015)


def test_the_weight_of_an_edge_does_not_depend_on_whether_it_is_true() -> None:
    universe = GeneNetwork().universe(network(np.random.default_rng(0).random((30, 80)) < 0.2))
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


def test_all_of_them(tiny_adata: ad.AnnData, truth: pd.DataFrame) -> None:
    found = network_baselines(tiny_adata, truth, n_random=2, seed=4)
    assert list(found) == [
        "co-expression (pearson)",
        "co-expression (spearman)",
        "mean expression",
        "degree",
        "in-degree",
        "random 1",
        "random 2",
    ]
    universe = GeneNetwork(genes=list(tiny_adata.var_names)).universe(truth)
    for name, edges in found.items():
        assert np.isfinite(universe.matrix(edges)[universe.pairs]).all(), name
    again = network_baselines(tiny_adata, truth, ["random"], n_random=1, seed=5)
    np.testing.assert_array_equal(again["random"]["weight"], found["random 2"]["weight"])
    with pytest.raises(OptionError, match=r"names has 'pearsons', .*did you mean 'pearson'\?"):
        network_baselines(tiny_adata, truth, ["pearsons"])
    with pytest.raises(DataError, match="none of the 5 true edges is left: 0 of the 80 genes"):
        network_baselines(tiny_adata, truth, gene_key="ensembl")
