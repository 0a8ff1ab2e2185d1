from __future__ import annotations

import json
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, OptionError
from scforge.eval import Benchmark, LabelPrediction, Report, evaluate
from scforge.eval.report import Row


@pytest.fixture
def embedded(tiny_adata: ad.AnnData) -> ad.AnnData:
    """The tiny data with an embedding that tells the groups apart, and one that does not."""
    noise = np.random.default_rng(0).normal(size=(60, 4))
    tiny_adata.obsm["X_good"] = noise + 10.0 * (tiny_adata.obs["group"] == "a").to_numpy()[:, None]
    tiny_adata.obsm["X_noise"] = noise
    return tiny_adata


def test_models_stand_beside_baselines(embedded: ad.AnnData, tmp_path: Path) -> None:
    kinds = {"X_good": "model", "X_noise": "untrained"}
    report = evaluate(embedded, LabelPrediction("group"), kinds, baselines=(3, 5), seconds={"X_good": 12.4})
    assert [(row.name, row.kind, row.n_dims) for row in report.rows] == [
        ("X_good", "model", 4),
        ("X_noise", "untrained", 4),
        ("PCA, 3 components", "baseline", 3),
        ("PCA of scaled genes, 3 components", "baseline", 3),
        ("PCA, 5 components", "baseline", 5),
        ("PCA of scaled genes, 5 components", "baseline", 5),
    ]
    assert report.rows[0].scores["knn_macro_f1"] == 1.0
    assert report.rows[1].scores["knn_macro_f1"] < 0.8
    metrics = embedded.uns["scforge"]["metrics"]
    assert set(metrics) == {row.name for row in report.rows}
    assert metrics["X_noise"] == report.rows[1].scores
    embedded.write_h5ad(tmp_path / "cells.h5ad")
    again = ad.read_h5ad(tmp_path / "cells.h5ad").uns["scforge"]["metrics"]
    assert float(again["X_good"]["knn_macro_f1"]) == 1.0


def test_what_stands_in_uns_is_kept(embedded: ad.AnnData) -> None:
    embedded.uns["scforge"] = {"mine": 1}
    evaluate(embedded, LabelPrediction("group"), ["X_good"], baselines=(3,), key_added="scores")
    assert set(embedded.uns["scforge"]) == {"mine", "scores"}
    evaluate(embedded, LabelPrediction("group"), ["X_good"], baselines=(3,), key_added=None)
    assert set(embedded.uns["scforge"]) == {"mine", "scores"}


def test_the_benchmark_sees_embedding_and_obs_alone(embedded: ad.AnnData) -> None:
    seen = []

    class Spy(Benchmark):
        metrics = ("size",)

        def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
            seen.append((embedding.shape, list(obs.index) == list(embedded.obs_names)))
            return {"size": float(embedding.size)}

    report = evaluate(embedded, Spy(), ["X_noise"], baselines=(2,))
    assert seen == [((60, 4), True), ((60, 2), True), ((60, 2), True)]
    assert [row.scores for row in report.rows] == [{"size": 240.0}, {"size": 120.0}, {"size": 120.0}]


def test_mistakes(embedded: ad.AnnData) -> None:
    with pytest.raises(DataError, match=r"obsm_keys names 'X_goood', .* did you mean 'X_good'\? \(adata.obsm has: "):
        evaluate(embedded, LabelPrediction("group"), ["X_goood"])
    with pytest.raises(DataError, match=r"layer='count' is not in adata\.layers"):
        evaluate(embedded, LabelPrediction("group"), ["X_good"], layer="count")
    embedded.X = embedded.X * 0.5
    with pytest.raises(DataError, match=r"adata\.X holds values that are not whole numbers"):
        evaluate(embedded, LabelPrediction("group"), ["X_good"])
    with pytest.raises(OptionError, match="nothing to compare with"):
        evaluate(embedded, LabelPrediction("group"), ["X_good"], baselines=())


def test_one_key_as_text(embedded: ad.AnnData) -> None:
    report = evaluate(embedded, LabelPrediction("group"), "X_good", baselines=(2,))
    assert report.rows[0].name == "X_good"


def report() -> Report:
    rows = [
        Row("X_scforge", "model", {"f1": 0.9, "accuracy": 0.5}, 32, 41.6),
        Row("PCA", "baseline", {"f1": 0.8, "accuracy": 0.75}, 50),
    ]
    return Report("Title", facts={"data": "60 cells"}, notes=["A note."], rows=rows)


def test_markdown() -> None:
    assert report().to_markdown() == (
        "# Title\n\n- data: 60 cells\n\n"
        "| embedding | kind | dimensions | f1 | accuracy | seconds |\n"
        "|---|---|---|---|---|---|\n"
        "| X_scforge | model | 32 | **0.900** | 0.500 | 42 |\n"
        "| PCA | baseline | 50 | 0.800 | **0.750** |  |\n\n"
        "A note.\n"
    )


def test_a_model_without_a_baseline_is_not_shown(tmp_path: Path) -> None:
    alone = Report("Title", rows=report().rows[:1])
    for show in (alone.to_markdown, alone.to_dict, lambda: alone.write(tmp_path)):
        with pytest.raises(OptionError, match="has a model but no baseline"):
            show()
    assert not list(tmp_path.iterdir())
    assert "| PCA |" in Report("Title", rows=report().rows[1:]).to_markdown()


def test_written(tmp_path: Path) -> None:
    report().write(tmp_path)
    assert (tmp_path / "report.md").read_text() == report().to_markdown()
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["rows"][0] == {
        "name": "X_scforge",
        "kind": "model",
        "scores": {"f1": 0.9, "accuracy": 0.5},
        "n_dims": 32,
        "seconds": 41.6,
    }
    assert content == report().to_dict()
