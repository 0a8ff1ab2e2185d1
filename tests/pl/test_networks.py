from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.metrics import average_precision_score, precision_recall_curve

from scforge.errors import DataError
from scforge.pl import attention_heatmap, precision_recall


@pytest.fixture(autouse=True)
def _close() -> None:
    yield
    plt.close("all")


@pytest.fixture
def scored() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    truth = generator.random(400) < 0.1
    return truth, {"weak": truth * 0.5 + generator.normal(size=400), "strong": truth * 3 + generator.normal(size=400)}


@pytest.fixture
def curves(scored) -> pd.DataFrame:
    truth, scores = scored
    parts = []
    for name, score in scores.items():
        precision, recall, _ = precision_recall_curve(truth, score)
        parts.append(pd.DataFrame({"method": name, "recall": recall[:-1], "precision": precision[:-1]}))
    return pd.concat(parts, ignore_index=True)


def test_a_line_for_each_network_with_its_area(curves: pd.DataFrame, scored) -> None:
    truth, scores = scored
    ax = precision_recall(curves, kinds={"weak": "baseline"}, title="TRRUST")
    areas = {name: average_precision_score(truth, score) for name, score in scores.items()}
    chance = truth.mean()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        f"strong ({areas['strong']:.3f})",
        f"weak ({areas['weak']:.3f})",
        f"chance ({chance:.3f})",
    ]
    strong, weak, level = ax.lines
    assert level.get_ydata()[0] == pytest.approx(chance)
    assert (np.diff(strong.get_xdata()) >= 0).all()
    assert len(strong.get_xdata()) == (curves["method"] == "strong").sum()
    assert weak.get_color() == "0.25"
    assert strong.get_color() == "#0072B2"
    assert ax.get_title() == "TRRUST"


def test_the_area_is_that_of_all_points_where_it_is_known(curves: pd.DataFrame, scored) -> None:
    truth, scores = scored
    exact = {name: average_precision_score(truth, score) for name, score in scores.items()}
    thinned = curves.iloc[::40].assign(auprc=lambda some: some["method"].map(exact))
    shown = [text.get_text() for text in precision_recall(thinned, chance=0.1).get_legend().get_texts()]
    assert shown[:2] == [f"{name} ({exact[name]:.3f})" for name in ("strong", "weak")]


def test_curves_that_end_early_need_to_be_told_chance(curves: pd.DataFrame) -> None:
    short = curves[curves["recall"] < 0.5]
    assert len(precision_recall(short).lines) == 2
    assert precision_recall(short, chance=0.1).lines[-1].get_ydata()[0] == 0.1


def test_what_curves_need(curves: pd.DataFrame) -> None:
    with pytest.raises(DataError, match="curves has no column 'recall'; did you mean 'recal'"):
        precision_recall(curves.rename(columns={"recall": "recal"}))
    with pytest.raises(DataError, match="not between 0 and 1"):
        precision_recall(curves.assign(precision=curves["precision"] * 100))


@pytest.fixture
def attending(tiny_adata: ad.AnnData) -> ad.AnnData:
    graph = np.zeros((80, 80), dtype=np.float32)
    graph[0, 1], graph[1, 0], graph[5, 6], graph[70, 0] = 0.5, 0.25, 0.125, 0.1
    tiny_adata.varp["scforge_attention"] = sparse.csr_matrix(graph)
    return tiny_adata


def drawn(ax) -> dict[tuple[str, str], float]:
    names = [text.get_text() for text in ax.get_xticklabels()]
    assert names == [text.get_text() for text in ax.get_yticklabels()]
    values = ax.images[0].get_array()
    return {
        (names[i], names[j]): round(float(values[i, j]), 6)
        for i, j in np.ndindex(values.shape)
        if not np.ma.getmaskarray(values)[i, j]
    }


def test_attention_of_the_genes_that_have_it(attending: ad.AnnData) -> None:
    ax = attention_heatmap(attending)
    assert drawn(ax) == {
        ("gene0", "gene1"): 0.5,
        ("gene1", "gene0"): 0.25,
        ("gene5", "gene6"): 0.125,
        ("gene70", "gene0"): 0.1,
    }
    assert len(ax.get_xticklabels()) == 5
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("from gene", "to gene")


def test_given_genes_and_axes(attending: ad.AnnData) -> None:
    _, own = plt.subplots()
    ax = attention_heatmap(attending, ["gene70", "gene0"], ax=own)
    assert ax is own
    assert drawn(ax) == {("gene70", "gene0"): 0.1}
    assert len(drawn(attention_heatmap(attending, n_genes=2))) == 2


def test_what_attention_needs(attending: ad.AnnData) -> None:
    with pytest.raises(DataError, match=r"no 'attention'; did you mean .* call model.get_attention\(adata\) first"):
        attention_heatmap(attending, key="attention")
    with pytest.raises(DataError, match=r"genes: 'gene80' not in adata.var_names; did you mean"):
        attention_heatmap(attending, ["gene80"])
    with pytest.raises(DataError, match="no attention between these genes"):
        attention_heatmap(attending, ["gene2", "gene3"])
