from pathlib import Path
from unittest import mock

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.cli import main
from scforge.config import load_config
from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.estimators import Encoder
from scforge.estimators import evaluate as evaluating
from scforge.eval import Benchmark, register_benchmark
from scforge.eval.base import BENCHMARKS
from scforge.testing import raises
from scforge.workflows import evaluate_models, evaluate_to, train_from_config

QUICK = {"baselines": ["pca"], "intervals": False, "seeds": (0,)}
TRAINING = {"max_epochs": 1, "batch_size": 32, "progress_bar": False, "accelerator": "cpu"}


@pytest.fixture(scope="module")
def trained(many_adata: ad.AnnData) -> Encoder:
    adata = many_adata[:160].copy()
    Encoder.setup_anndata(adata, labels_key="group")
    model = Encoder(adata, n_top_genes=60, hidden_dim=16, ffn_dim=16, latent_dim=8)
    model.train(**TRAINING)
    return model


def edges(n_genes: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    pairs = {(f"gene{i}", f"gene{j}") for i in range(6) for j in rng.choice(n_genes, 8) if i != j}
    return pd.DataFrame(sorted(pairs), columns=["source", "target"])


def test_an_embedding_beside_baselines_and_random_weights(trained: Encoder, tmp_path: Path) -> None:
    cells = trained.adata.copy()
    before = set(cells.obsm), set(cells.uns)
    evaluate_models(trained, cells, benchmarks="geometry", key_added=None, **QUICK)
    assert (set(cells.obsm), set(cells.uns)) == before
    report = evaluate_models(trained, cells, benchmarks=["label_prediction", "geometry"], **QUICK)
    rows = [(row.name, row.kind) for row in report.of("label_prediction")]
    assert rows == [("X_scforge", "model"), ("X_untrained", "untrained"), ("PCA", "baseline")]
    np.testing.assert_allclose(cells.obsm["X_scforge"], trained.get_latent_representation(cells, key_added=None))
    assert "X_untrained" not in cells.obsm
    cells.write_h5ad(tmp_path / "cells.h5ad")
    figures = ad.read_h5ad(tmp_path / "cells.h5ad").uns["scforge"]["report"]
    assert set(figures["benchmark"]) == {"label_prediction", "geometry"}
    assert len(report.verdicts()) == 1
    assert report.facts["labels_key"] == "group (2)"
    assert not any("'scforge' has seen the expression of these cells" in note for note in report.notes)
    seen = evaluate_models(trained, trained.adata, benchmarks="label_prediction", key_added=None, **QUICK)
    assert "'scforge' has seen the expression of these cells" in seen.notes[-2]


def test_several_trainings_are_one_row_and_other_embeddings_too(trained: Encoder) -> None:
    cells = trained.adata.copy()
    cells.obsm["X_point"] = np.ones((160, 4)) + np.random.default_rng(0).normal(0, 1e-3, (160, 4))
    options = QUICK | {"benchmarks": "geometry", "obsm_keys": ["X_point"], "untrained": False}
    report = evaluate_models({"mine": [trained, trained]}, cells, **options)
    assert [row.name for row in report.rows] == ["X_point", "X_mine", "PCA"]
    assert report.rows[1].spreads["effective_rank"] == 0.0
    assert {"X_mine_0", "X_mine_1"} <= set(cells.obsm)
    assert "2 training runs" in report.facts["model mine"]
    assert any(note.startswith("'X_point' has collapsed") for note in report.notes)
    assert not report.verdicts(), "geometry is not a contest"


@pytest.mark.filterwarnings("ignore:.*have only one cell each")
def test_cells_whose_labels_a_model_learned_are_not_scored(trained: Encoder) -> None:
    tuned = trained.finetune("annotation", trained.adata, labels_key="group", test_size=0.4, freeze=True, **TRAINING)
    with pytest.warns(ScforgeWarning, match="fine-tuned on 96 of the 160 cells; these cells are not scored"):
        report = evaluate_models(tuned, trained.adata.copy(), benchmarks="label_prediction", **QUICK)
    assert report.facts["cells"].startswith("64 of 160")
    assert report.rows[0].kind == "supervised"
    assert "'scforge' learned from labels of other cells" in report.notes[-2]
    assert not report.verdicts()
    learned = trained.adata[np.sort(tuned.fitted.seen.rows.train)].copy()
    with pytest.raises(DataError, match="the model 'scforge' was fine-tuned on all of these .* contains their labels"):
        evaluate_models(tuned, learned, benchmarks="label_prediction", **QUICK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baselines": False}, "baselines=False leaves no baseline for the embeddings"),
        ({"baselines": ["pcaa"]}, "did you mean 'pca'"),
        ({"labels_key": None, "benchmarks": None}, "labels_key=None, but cell types are required"),
        ({"obsm_keys": ["X_scforge"]}, "two rows of the report have the name 'X_scforge'; rename the model"),
        ({"benchmarks": {"label_prediction": {"max_cells": 50}}}, "max_cells of .* have no effect here"),
        ({"seeds": ()}, r"seeds=\(\) is not a list of seeds"),
        ({"benchmarks": "gene_network"}, "requires known edges; pass a file of edges"),
        ({"benchmarks": "geometry", "network": "edges.csv"}, "no effect without the benchmark 'gene_network'"),
        (
            {"benchmarks": {"perturbation_prediction": {"perturbation_key": "group", "control": "a"}}},
            "scores results that models do not compute themselves; pass the results to scforge.eval.compare",
        ),
        ({"benchmarks": "generation"}, "requires held-out cells and the training cells of the model 'scforge'"),
        (
            {"benchmarks": "gene_network", "network": edges(), "baselines": False},
            "^baselines has no effect, because no",
        ),
        (
            {"benchmarks": "gene_network", "network": edges(), "gene_key": "symbl", "baselines": True},
            "gene_key='symbl' is not in adata.var",
        ),
        (
            {"benchmarks": "my_network", "network": edges()},
            "'my_network' scores results that models do not compute themselves",
        ),
    ],
)
def test_mistakes(trained: Encoder, options: dict, message: str, request: pytest.FixtureRequest) -> None:
    @register_benchmark("my_network")
    class Mine(Benchmark):
        subject = "network"
        metrics = ("mine",)

        def run(self, made: pd.DataFrame, reference: pd.DataFrame) -> dict[str, float]:
            return {"mine": 1.0}

    request.addfinalizer(lambda: BENCHMARKS._entries.pop("my_network"))
    cells = trained.adata if options.get("benchmarks") == "generation" else trained.adata.copy()
    if options.get("labels_key", "group") is None:
        del cells.obs["group"]
    with pytest.raises((OptionError, DataError), match=message):
        evaluate_models(trained, cells, **{"benchmarks": "label_prediction", **QUICK, **options})


def test_the_cost_of_scib_is_announced(trained: Encoder, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(evaluating, "_MANY", 159)
    monkeypatch.setattr(evaluating, "evaluate", mock.Mock(side_effect=InterruptedError))
    cells = trained.adata.copy()
    for benchmarks, n_lines in ((None, 1), (["cell_type_probe", "geometry"], 0)):
        caplog.clear()
        with caplog.at_level("INFO", "scforge"), pytest.raises(InterruptedError):
            evaluate_models(trained, cells, benchmarks=benchmarks, **QUICK)
        lines = [line for line in caplog.messages if line.startswith("benchmark 'scib' on 160 cells takes longer than")]
        assert len(lines) == n_lines
        assert all("use benchmarks=['cell_type_probe', 'geometry'] to skip it" in line for line in lines)


def test_what_nobody_asked_for_is_left_out_where_cells_do_not_allow_it(many_adata: ad.AnnData) -> None:
    few = many_adata[:80].copy()
    few.obs["batch"] = "one"
    Encoder.setup_anndata(few, labels_key="group", batch_key="batch")
    model = Encoder(few, n_top_genes=60, hidden_dim=16, ffn_dim=16, latent_dim=8)
    model.train(**TRAINING)
    report = evaluate_models(model, few, **QUICK)
    assert report.benchmarks == ["cell_type_probe", "geometry"]
    assert any(note.startswith("scib needs 91 cells with a label, but there are 80") for note in report.notes)
    assert any("so batches are ignored" in note for note in report.notes)


def test_files(trained: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained.adata.write_h5ad("cells.h5ad")
    for name in ("a/final", "b/final"):
        trained.save(name)
    options = {"benchmarks": ["label_prediction"], "baselines": ["pca"], "intervals": False, "seeds": 1}
    report = evaluate_to(["a/final", "b/final"], "cells.h5ad", "out", **options)
    assert [row.name for row in report.rows] == ["X_a_final", "X_b_final", "X_untrained", "PCA"]
    assert report.rows[0].scores == report.rows[1].scores
    assert {path.name for path in Path("out").iterdir()} == {"report.md", "report.html", "report.json", "report.csv"}
    evaluate_to("a/final", "cells.h5ad", "figures.csv", **options)
    assert set(pd.read_csv("figures.csv")["method"]) == {"X_scforge", "X_untrained", "PCA"}
    for cells, wrong, message in (
        (
            "cells.h5ad",
            {"output": "out"},
            r"output='out' already contains 'report.json', .*; choose another folder, or pass",
        ),
        ("cells.h5ad", {"base_model": "b/final"}, "base_model='b/final' has no effect if embeddings are scored"),
        ("cells.h5ad", {"frob": 1}, "frob=1 has no effect if embeddings are scored"),
        ("cells", {}, "must be an h5ad file or the name of a data set in scforge.datasets"),
    ):
        with pytest.raises(OptionError, match=message):
            evaluate_to("a/final", cells, **options, **wrong)


def test_one_file_of_a_benchmark_appears_everywhere(trained: Encoder, tmp_path: Path, monkeypatch, request) -> None:
    monkeypatch.chdir(tmp_path)
    request.addfinalizer(lambda: BENCHMARKS._entries.pop("spread"))

    @register_benchmark("spread")
    class Spread(Benchmark):
        metrics = ("spread",)

        def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
            return {"spread": float(embedding.std())}

    trained.adata.write_h5ad("cells.h5ad")
    trained.save("model")
    text = "data: {paths: [cells.h5ad]}\ntraining: {max_epochs: 1, accelerator: cpu}\neval: {benchmarks: [spread]}\n"
    Path("recipe.yaml").write_text(text)
    assert "spread_spread" in train_from_config(load_config("recipe.yaml"), progress_bar=False).history
    line = "evaluate cells.h5ad -m model --benchmarks spread --against pca -o report"
    assert main(line.split()) == 0
    assert (pd.read_csv("report/report.csv")["metric"] == "spread").all()


def test_gene_embeddings_against_a_network(trained: Encoder, tmp_path: Path) -> None:
    cells = trained.adata.copy()
    edges().to_csv(tmp_path / "edges.csv", index=False)
    options = {"benchmarks": ["geometry", "gene_network"], "network": tmp_path / "edges.csv", **QUICK}
    report = evaluate_models(trained, cells, **options)
    kinds = {row.name: row.kind for row in report.of("gene_network")}
    assert (kinds["scforge"], kinds["untrained"]) == ("model", "untrained")
    assert "baseline" in kinds.values()
    table = report.to_table("gene_network")
    assert "auprc_ratio" in table
    assert set(cells.uns["scforge"]["report"]["benchmark"]) == {"geometry", "gene_network"}
    cells.var["symbol"] = [f"S{name}" for name in cells.var_names]
    options = {"benchmarks": "gene_network", "network": "S" + edges(), "gene_key": "symbol"}
    again = evaluate_models(trained, cells, **options, intervals=False, seeds=(0,)).to_table("gene_network")
    assert again.loc["scforge", "auroc"] == pytest.approx(table.loc["scforge", "auroc"])


def test_generated_cells(many_adata: ad.AnnData) -> None:
    adata = many_adata[:160].copy()
    Encoder.setup_anndata(adata)
    tokenizer = {"name": "binned_expression", "max_len": 24, "n_bins": 5}
    model = Encoder(adata, "autoregressive_transformer", tokenizer, hidden_dim=16, num_layers=1, num_heads=2)
    model.train(**TRAINING)
    report = evaluate_models(model, many_adata[200:300].copy(), benchmarks="generation", intervals=False, seeds=(0,))
    kinds = {row.name: row.kind for row in report.rows}
    assert kinds["scforge"] == "model"
    assert "baseline" in kinds.values()


def test_models_that_are_none(trained: Encoder) -> None:
    for models in ({}, "folder", {"x": "folder"}, {"x": []}):
        with raises(OptionError, "models"):
            evaluate_models(models, trained.adata, benchmarks="geometry", **QUICK)
    with raises(OptionError, "seeds"):
        evaluate_models(trained, trained.adata, benchmarks="gene_network", network=edges(), seeds=())
    with pytest.raises(DataError, match="the true edges lack the column 'source'"):
        evaluate_models(
            trained,
            trained.adata,
            benchmarks="gene_network",
            network=edges().rename(columns={"source": "tf"}),
            seeds=(0,),
        )
    with raises(OptionError, "reference_model"):
        Encoder.load_query_data(trained.adata, trained.adata)
    with raises(OptionError, "plan_kwargs"):
        trained.train(1, plan_kwargs=[1])
    with raises(OptionError, "max_len"):
        trained.export("there", "transformers", max_len=5)


def test_a_key_that_names_nothing(trained: Encoder, tmp_path: Path) -> None:
    annotator = trained.finetune("annotation", labels_key="group", lora=False)
    annotator.train(**TRAINING)
    annotator.evaluate(key_added=None, baselines=False)
    assert "scforge" not in annotator.adata.uns or None not in annotator.adata.uns["scforge"]


def test_harmony_on_one_batch_says_what_is_missing(trained: Encoder) -> None:
    cells = trained.adata.copy()
    cells.obs["site"] = "one"
    Encoder.setup_anndata(cells, labels_key="group", batch_key="site")
    with raises(DataError, "batch_key"):
        evaluate_models(trained, cells, baselines=["harmony"])
