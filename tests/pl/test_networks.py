import anndata as ad
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.metrics import average_precision_score, precision_recall_curve

from scforge.errors import DataError
from scforge.pl import attention_heatmap, precision_recall
from scforge.testing import raises


@pytest.fixture
def areas_and_curves() -> tuple[dict[str, float], pd.DataFrame]:
    generator = np.random.default_rng(0)
    truth = generator.random(400) < 0.1
    scores = {"weak": truth * 0.5 + generator.normal(size=400), "strong": truth * 3 + generator.normal(size=400)}
    parts = []
    for name, score in scores.items():
        precision, recall, _ = precision_recall_curve(truth, score)
        area = average_precision_score(truth, score)
        parts.append(pd.DataFrame({"method": name, "recall": recall[:-1], "precision": precision[:-1], "auprc": area}))
    areas = {name: average_precision_score(truth, score) for name, score in scores.items()}
    return {**areas, "chance": truth.mean()}, pd.concat(parts, ignore_index=True)


def test_a_line_for_each_network_with_its_area(areas_and_curves, texts) -> None:
    areas, curves = areas_and_curves
    ax = precision_recall(curves, kinds={"weak": "baseline"}, title="TRRUST")
    expected = [f"{name} ({areas[name]:.3f})" for name in ("strong", "weak", "chance")]
    assert texts(ax.get_legend().get_texts()) == expected
    strong, weak, level = ax.lines
    assert level.get_ydata()[0] == pytest.approx(areas["chance"])
    assert (np.diff(strong.get_xdata()) >= 0).all()
    assert len(strong.get_xdata()) == (curves["method"] == "strong").sum()
    assert (strong.get_color(), weak.get_color()) == ("#0072B2", "0.25")
    assert ax.get_title() == "TRRUST"


def test_curves_that_end_early_need_to_be_told_chance(areas_and_curves) -> None:
    _, curves = areas_and_curves
    short = curves[curves["recall"] < 0.5]
    assert len(precision_recall(short).lines) == 2
    assert precision_recall(short, chance=0.1).lines[-1].get_ydata()[0] == 0.1
    with raises(DataError, "column"):
        precision_recall(curves.rename(columns={"recall": "recal"}))


def test_attention_of_the_genes_that_have_it(tiny_adata: ad.AnnData, texts) -> None:
    graph = np.zeros((80, 80), dtype=np.float32)
    graph[0, 1], graph[1, 0], graph[5, 6], graph[70, 0] = 0.5, 0.25, 0.125, 0.1
    tiny_adata.varp["scforge_attention"] = sparse.csr_matrix(graph)

    def drawn(ax) -> dict[tuple[str, str], float]:
        names = texts(ax.get_xticklabels())
        assert names == texts(ax.get_yticklabels())
        values = np.ma.filled(ax.images[0].get_array(), np.nan)
        return {(names[i], names[j]): round(float(values[i, j]), 6) for i, j in np.argwhere(~np.isnan(values))}

    ax = attention_heatmap(tiny_adata)
    pairs = [("gene0", "gene1"), ("gene1", "gene0"), ("gene5", "gene6"), ("gene70", "gene0")]
    assert drawn(ax) == dict(zip(pairs, [0.5, 0.25, 0.125, 0.1], strict=True))
    assert len(ax.get_xticklabels()) == 5
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("from gene", "to gene")
    _, own = plt.subplots()
    assert attention_heatmap(tiny_adata, ["gene70", "gene0"], ax=own) is own
    assert drawn(own) == {("gene70", "gene0"): 0.1}
    assert len(drawn(attention_heatmap(tiny_adata, n_genes=2))) == 2
    for genes, key, message in [
        (
            None,
            "attention",
            r"key='attention' is not in adata.varp; did you mean .* call model.get_attention\(adata\) first",
        ),
        (["gene80"], "scforge_attention", r"genes='gene80' is not in adata.var_names; did you mean"),
        (["gene2", "gene3"], "scforge_attention", "no attention between these genes"),
    ]:
        with pytest.raises(DataError, match=message):
            attention_heatmap(tiny_adata, genes, key=key)
