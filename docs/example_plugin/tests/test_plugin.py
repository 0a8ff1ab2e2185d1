"""The installed package does what it says: scforge finds the five names, and works with them."""

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from scipy import sparse

from scforge.config import load_config
from scforge.eval import get_benchmark, list_benchmarks
from scforge.finetuning import list_tasks
from scforge.models import Encoder, list_models
from scforge.testing import check_model, check_objective, check_tokenizer
from scforge.tokenizers import list_tokenizers
from scforge.training import list_objectives
from scforge.workflows import train_from_config

PARTS = {
    "tokenizer": {"name": "example_tokenizer", "power": 0.4},
    "objective": {"name": "example_objective", "weight": 0.2},
}
CONFIG = """
data: {paths: [cells.h5ad], labels_key: group}
tokenizer: {strategy: example_tokenizer, power: 0.4}
model: {architecture: example_model, hidden_dim: 8}
objective: {name: example_objective, weight: 0.2}
training: {max_epochs: 1, batch_size: 16, accelerator: cpu}
output: {checkpoint_dir: models}
"""


@pytest.fixture
def adata() -> AnnData:
    generator = np.random.default_rng(0)
    group = np.arange(60) % 2
    mean = np.where((group[:, None] == 0) == (np.arange(80) < 40), 3.0, 0.3)
    counts = sparse.csr_matrix(generator.poisson(mean).astype(np.float32))
    obs = pd.DataFrame({"group": group.astype(str)}, index=[f"cell{i}" for i in range(60)])
    return AnnData(counts, obs=obs, var=pd.DataFrame(index=[f"gene{i}" for i in range(80)]))


def test_scforge_finds_it() -> None:
    assert "example_model" in list_models()
    assert "example_tokenizer" in list_tokenizers()
    assert "example_objective" in list_objectives()
    assert "example_benchmark" in list_benchmarks()
    assert "example_task" in list_tasks()


def test_it_keeps_the_rules() -> None:
    check_model("example_model", hidden_dim=16, num_layers=2)
    check_tokenizer("example_tokenizer")
    check_tokenizer("example_tokenizer", power=1.0, append_cls=False)
    check_objective("example_objective", architecture="transformer_encoder", tokenizer="rank_value", weight=0.2)


def test_it_trains_and_comes_back(adata: AnnData, tmp_path) -> None:
    Encoder.setup_anndata(adata, labels_key="group")
    model = Encoder(adata, "example_model", **PARTS, hidden_dim=8)
    model.train(max_epochs=1, batch_size=16, progress_bar=False, accelerator="cpu")
    embedding = model.get_latent_representation()
    assert embedding.shape == (60, 8)
    assert "train_correlation" in model.history_
    model.save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model", adata)
    assert again.spec.to_json()["tokenizer"]["power"] == 0.4
    np.testing.assert_array_equal(again.get_latent_representation(), embedding)


def test_the_benchmark_scores(adata: AnnData) -> None:
    benchmark = get_benchmark("example_benchmark", labels_key="group", n_neighbors=5)
    assert benchmark.run(np.asarray(adata.X.todense()), adata.obs)["neighbor_purity"] == 1.0
    noise = np.random.default_rng(0).normal(size=(60, 3))
    assert 0.3 < benchmark.run(noise, adata.obs)["neighbor_purity"] < 0.7


def test_the_task_learns_and_comes_back(adata: AnnData, tmp_path) -> None:
    Encoder.setup_anndata(adata)
    quick = {"max_epochs": 2, "batch_size": 16, "progress_bar": False, "accelerator": "cpu"}
    model = Encoder(adata, n_top_genes=0, hidden_dim=16, ffn_dim=16, latent_dim=8)
    model.train(**quick)
    task = {"name": "example_task", "genes": [f"gene{i}" for i in range(40)]}
    scorer = model.finetune(task, lr=0.05, test_size=0.2, **(quick | {"max_epochs": 20}))
    assert "validation_mae" in scorer.history_
    figures = scorer.evaluate()["mae"]
    assert figures["scforge"] < figures["train_mean"]
    scorer.predict()
    high = adata.obs.groupby("group", observed=True)["scforge_score"].mean()
    assert high["0"] > high["1"]
    scorer.save(tmp_path / "scorer")
    again = Encoder.load(tmp_path / "scorer")
    np.testing.assert_array_equal(again.predict(adata)["score"], scorer.predict(adata)["score"])


def test_yaml(adata: AnnData, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    adata.write_h5ad("cells.h5ad")
    (tmp_path / "config.yaml").write_text(CONFIG)
    model = train_from_config(load_config("config.yaml"), progress_bar=False)
    assert (model.spec.architecture, model.spec.objective) == ("example_model", "example_objective")
    Encoder.load("models/final", adata)
