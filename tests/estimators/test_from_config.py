"""Training from a configuration: every key changes what is built, every recipe trains, every checkpoint loads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

from scforge.config import list_recipes, load_config, recipe_path
from scforge.errors import ConfigError, OptionError
from scforge.estimators import Encoder, train_from_config

SMALL = """
data:
  paths: [cells.h5ad]
model:
  hidden_dim: 8
  ffn_dim: 8
training:
  max_epochs: 1
  batch_size: 16
  accelerator: cpu
"""
TRANSFORMER = """
data:
  paths: [cells.h5ad]
model:
  architecture: transformer_encoder
  hidden_dim: 8
  num_layers: 1
  num_heads: 2
training:
  max_epochs: 1
  batch_size: 16
  accelerator: cpu
"""

CUSTOM_MODEL = Path(__file__).parents[1] / "config" / "custom_model.yaml"


@pytest.fixture
def run(tiny_adata: ad.AnnData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Encoder]:
    """Return a function that trains from the text of a configuration, in a folder with cells.h5ad."""
    monkeypatch.chdir(tmp_path)
    tiny_adata.layers["counts"] = tiny_adata.X.copy()
    tiny_adata.write_h5ad("cells.h5ad")

    def run(text: str, *overrides: str) -> Encoder:
        Path("config.yaml").write_text(text)
        return train_from_config(load_config("config.yaml", overrides), progress_bar=False)

    return run


@pytest.fixture
def given(run: Callable[..., Encoder], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Encoder, dict]]:
    """Return a function that trains from a configuration and returns the model and the arguments of `train`."""
    train = Encoder.train
    seen: dict = {}

    def spy(self: Encoder, *args, **kwargs) -> None:
        seen.update(inspect.signature(train).bind(self, *args, **kwargs).arguments)
        train(self, *args, **kwargs)

    def given(text: str, *overrides: str) -> tuple[Encoder, dict]:
        seen.clear()
        model = run(text, *overrides)
        return model, dict(seen)

    monkeypatch.setattr(Encoder, "train", spy)
    return given


TRAIN_KEYS = [
    ("training.max_epochs=2", "max_epochs", 2),
    ("training.max_steps=3", "max_steps", 3),
    ("training.early_stopping=false", "early_stopping", False),
    ("training.early_stopping_patience=3", "early_stopping_patience", 3),
    ("training.precision=bf16-mixed", "precision", "bf16-mixed"),
    ("training.devices=1", "devices", 1),
    ("training.gradient_clip_val=0.1", "gradient_clip_val", 0.1),
    ("training.lr=0.01", "lr", 0.01),
    ("training.optimizer.lr=1e-2", "lr", 0.01),
    ("training.optimizer.weight_decay=0.5", "weight_decay", 0.5),
    ("training.scheduler.name=constant", "schedule", "constant"),
    ("training.scheduler.warmup_steps=2", "warmup_steps", 2),
    ("output.checkpoint_dir=ck", "checkpoint_dir", "ck"),
    ("output.save_top_k=-1", "save_top_k", -1),
]


@pytest.mark.parametrize(("override", "argument", "value"), TRAIN_KEYS, ids=[key for key, *_ in TRAIN_KEYS])
def test_keys_of_training_arrive(given, override: str, argument: str, value) -> None:
    _, arguments = given(SMALL, override)
    assert arguments[argument] == value


# Each of these changes the weights that come out, so it is read to the very end.
WEIGHTS = [
    "training.batch_size=30",
    "training.max_epochs=2",
    "training.max_steps=1",
    "training.validation_size=0.5",
    "training.lr=0.01",
    "training.gradient_clip_val=0.001",
    "training.precision=bf16-mixed",
    "training.precision=bf16-true",
    "training.scheduler.name=constant",
    "training.scheduler.warmup_steps=1",
    "training.optimizer.weight_decay=0.9",
    "seed=1",
    "data.max_genes=10",
    "tokenizer.masking.mask_ratio=0.5",
    "tokenizer.masking.mask_token_prob=0.1",
    "tokenizer.masking.random_token_prob=0.2",
    "tokenizer.use_medians=false",
    "objective.token_prior=false",
    "model.dropout=0.5",
    "model.use_expression_values=false",
    "model.layer_norm_eps=0.1",
]


@pytest.mark.parametrize("override", WEIGHTS)
def test_keys_change_the_weights(run, override: str) -> None:
    before, after = run(TRANSFORMER).module.state_dict(), run(TRANSFORMER, override).module.state_dict()
    assert all(value.dtype == torch.float32 for value in after.values() if value.is_floating_point())
    assert set(before) != set(after) or any(
        before[name].shape != after[name].shape or not before[name].equal(after[name]) for name in before
    )


def test_the_same_file_gives_the_same_weights(run) -> None:
    before, after = run(TRANSFORMER).module.state_dict(), run(TRANSFORMER).module.state_dict()
    assert all(before[name].equal(after[name]) for name in before)


def test_keys_of_data(run, tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    assert run(SMALL).vocab.n_genes == 80
    assert run(SMALL, "data.preprocessing.hvg_selection=30").vocab.n_genes == 30
    assert run(SMALL, "data.gene_key=ensembl").vocab.kind == "Ensembl ids"
    model = run(SMALL, "data.max_genes=12", "data.labels_key=group", "data.batch_key=batch", "data.layer=counts")
    assert model.tokenizer.max_len == 12
    assert run(SMALL, "tokenizer.max_genes=13").tokenizer.max_len == 13
    setup = model.registry_["setup_args"]
    assert setup == {"layer": "counts", "gene_key": None, "labels_key": "group", "batch_key": "batch"}
    vocab = run(SMALL, "data.preprocessing.hvg_selection=20").vocab
    vocab.save(tmp_path / "genes.json")
    assert run(SMALL, "data.gene_vocab=genes.json").vocab == vocab
    tiny_adata[:20].copy().write_h5ad("more.h5ad")
    assert run(SMALL, "data.paths=[cells.h5ad, more.h5ad]").adata.n_obs == 80


def test_keys_of_the_parts(run) -> None:
    model = run(SMALL, "tokenizer.append_cls=true", "objective.views=2", "objective.weight=0.1", "model.latent_dim=6")
    assert model.tokenizer.append_cls is True
    assert (model._spec.objective_options["views"], model._spec.objective_options["weight"]) == (2, 0.1)
    assert model.get_latent_representation(key_added=None).shape == (60, 6)
    assert run(SMALL, "model.pooling=mean").objective == "masked_gene_prediction"
    assert run(SMALL, "tokenizer.masking.mask_ratio=0.3").objective == "masked_gene_prediction"
    assert run(SMALL, "tokenizer.masking.mask_ratio=0.3")._spec.objective_options["mask_ratio"] == 0.3
    assert run(SMALL, "model.mask_ratio=0.4")._spec.objective_options["mask_ratio"] == 0.4


def test_max_steps_that_cut_an_epoch_short(run) -> None:
    """Training on 54 cells takes 4 steps an epoch; what the last steps learned counts too."""
    keep = ["output.checkpoint_dir=ck", "output.save_top_k=-1"]
    model = run(SMALL, "training.max_steps=6", "training.max_epochs=9", *keep)
    assert len(model.history["validation_loss"]) == 2
    assert model.n_epochs_ == 2
    assert sorted(path.name for path in Path("ck").iterdir()) == ["epoch=00", "epoch=01", "final"]


@pytest.mark.parametrize("save_top_k", [1, 2, -1, 0])
def test_checkpoints(run, save_top_k: int) -> None:
    model = run(SMALL, "training.max_epochs=4", "output.checkpoint_dir=ck", f"output.save_top_k={save_top_k}")
    names = sorted(path.name for path in Path("ck").iterdir())
    kept = 4 if save_top_k < 0 else save_top_k
    assert len(names) == kept + 1
    assert "final" in names
    embedding = model.get_latent_representation()
    np.testing.assert_allclose(Encoder.load("ck/final", model.adata).get_latent_representation(), embedding, atol=1e-6)
    losses = model.history["validation_loss"]["validation_loss"]
    best = sorted(f"epoch={epoch:02d}" for epoch in losses.sort_values().index[:kept])
    assert names[:-1] == best
    for name in names[:-1]:
        saved = Encoder.load(Path("ck") / name)
        assert saved.is_trained_
        assert saved.n_epochs_ == int(name[-2:]) + 1
        assert np.isfinite(saved.get_latent_representation(model.adata, key_added=None)).all()
    if kept:
        saved = Encoder.load(f"ck/epoch={losses.argmin():02d}", model.adata)
        np.testing.assert_allclose(saved.get_latent_representation(), embedding, atol=1e-6)


def test_log_and_embedding(run) -> None:
    model = run(SMALL, "training.max_epochs=3", "output.log_dir=logs", "output.embedding=out/cells.h5ad")
    (log,) = Path("logs").rglob("metrics.csv")
    table = pd.read_csv(log)
    assert table["validation_loss"].notna().sum() == 3
    np.testing.assert_allclose(table["validation_loss"].dropna(), model.history["validation_loss"]["validation_loss"])
    written = ad.read_h5ad("out/cells.h5ad")
    np.testing.assert_array_equal(written.obsm["X_scforge"], model.get_latent_representation(key_added=None))
    assert written.uns["scforge"]["X_scforge"]["vocab_hash"] == model.vocab.hash


def test_nothing_is_written_unasked(run) -> None:
    run(SMALL)
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["cells.h5ad", "config.yaml"]


@pytest.mark.filterwarnings("ignore:.*of the 20120 genes of the vocabulary")
def test_the_tutorial_on_custom_models(run, pbmc: ad.AnnData) -> None:
    pbmc[:60].copy().write_h5ad("pbmc.h5ad")
    few = ["training.max_epochs=2", "training.accelerator=cpu", "model.hidden_dim=8", "model.num_layers=1"]
    model = run(
        CUSTOM_MODEL.read_text(encoding="utf-8").replace("/path/to/dataset.h5ad", "pbmc.h5ad"),
        *few,
        "data.max_genes=64",
        "model.max_seq_len=64",
    )
    assert (model._spec.architecture, model._spec.tokenizer, model.objective) == (
        "gene_pooling",
        "rank_value",
        "masked_gene_prediction",
    )
    assert model.vocab.n_genes == 20_120
    assert model.module.pooling == "mean"
    names = sorted(path.name for path in Path("checkpoints/gene_pooling").iterdir())
    assert names == ["epoch=00", "epoch=01", "final"]
    assert list(Path("logs/gene_pooling").rglob("metrics.csv"))
    again = Encoder.load("checkpoints/gene_pooling/final", model.adata)
    np.testing.assert_allclose(again.get_latent_representation(), model.get_latent_representation(), atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*of the 20120 genes of the vocabulary")
@pytest.mark.parametrize("name", list_recipes())
def test_each_recipe_trains_a_step(run, pbmc: ad.AnnData, name: str) -> None:
    pbmc[:60].copy().write_h5ad("data.h5ad")
    overrides = ["training.max_steps=1", "training.batch_size=8", "training.accelerator=cpu", "data.max_genes=64"]
    config = load_config(recipe_path(name), overrides)
    model = train_from_config(config, progress_bar=False)
    assert model.is_trained_
    assert model._spec.architecture == config.model.architecture
    assert Encoder.load(Path(config.output.checkpoint_dir) / "final").is_trained_


def test_a_custom_architecture_by_its_name(run, custom_architecture: str) -> None:
    text = SMALL.replace("  ffn_dim: 8\n", "  architecture: my_pooling\n  num_layers: 3\n")
    model = run(text)
    assert len(model.module.layers) == 3
    with pytest.raises(OptionError, match=r"option 'n_heads' is not one of 'my_pooling'"):
        run(text, "model.n_heads=3")


def test_masking_for_an_objective_that_masks_nothing(run) -> None:
    with pytest.raises(ConfigError, match="masking is set but the objective 'joint_embedding' masks nothing"):
        run(SMALL, "tokenizer.masking.mask_ratio=0.2", "objective.name=joint_embedding")


def test_more_tokens_than_positions(run) -> None:
    with pytest.raises(OptionError, match=r"max_seq_len=20 is smaller than the 50 tokens .*data\.max_genes"):
        run(TRANSFORMER, "data.max_genes=50", "model.max_seq_len=20")


@pytest.mark.parametrize("key", ["checkpoint_dir", "log_dir", "embedding"])
def test_an_output_below_a_file_is_refused_before_training(run, key: str, monkeypatch) -> None:
    monkeypatch.setattr(Encoder, "train", lambda *args, **kwargs: pytest.fail("training began"))
    with pytest.raises(OptionError, match=rf"output\.{key}='cells.h5ad.*is a file; give the name of a folder"):
        run(SMALL, f"output.{key}=cells.h5ad{'/out.h5ad' if key == 'embedding' else ''}")
