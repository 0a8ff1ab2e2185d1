"""The masked autoencoder through the front class and through YAML."""

from __future__ import annotations

from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from scforge.config import load_config, recipe_path
from scforge.errors import OptionError
from scforge.estimators import Encoder, train_from_config

SMALL = {"encoder_dim": 8, "encoder_layers": 1, "encoder_heads": 2, "decoder_layers": 1}
COUNTS = {"name": "continuous_projection", "transform": "counts"}
PARTS = {
    "values": {},
    "zeros": {"objective": {"name": "masked_value_prediction", "zero_targets": 1.0}},
    "counts": {"tokenizer": COUNTS, "value_loss": "zero_truncated_negative_binomial"},
    "counts and zeros": {
        "tokenizer": COUNTS,
        "objective": {"name": "masked_value_prediction", "zero_targets": 0.5},
        "value_loss": "negative_binomial",
    },
    "views": {"objective": "joint_embedding"},
}


def make(adata: ad.AnnData, **options) -> Encoder:
    Encoder.setup_anndata(adata)
    return Encoder(adata, "masked_autoencoder", **{**SMALL, **options})


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS.values(), ids=list(PARTS))
def test_trained_saved_and_loaded(parts: dict, tiny_adata: ad.AnnData, quick: dict, tmp_path: Path) -> None:
    model = make(tiny_adata, **parts)
    model.train(**quick)
    embedding = model.get_latent_representation()
    assert embedding.shape == (60, 8)
    assert embedding.std(axis=0).min() > 0
    assert np.isfinite(model.history["validation_loss"]).all(axis=None)
    model.save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model", tiny_adata)
    np.testing.assert_array_equal(again.get_latent_representation(), embedding)
    again.train(**quick)


def test_what_it_takes_where_nothing_is_said(tiny_adata: ad.AnnData) -> None:
    Encoder.setup_anndata(tiny_adata)
    model = Encoder(tiny_adata, "masked_autoencoder")
    spec = model._spec.to_json()
    assert (spec["tokenizer"]["name"], spec["tokenizer"]["append_cls"]) == ("continuous_projection", False)
    assert spec["objective"] == {"name": "masked_value_prediction", "mask_ratio": 0.75, "zero_targets": 0.0}
    assert (model.module.encoder_dim, model.module.decoder_dim, model.module.pooling) == (128, 64, "mean")
    assert [len(stack.layers) for stack in (model.module.encoder, model.module.decoder)] == [4, 2]


@pytest.mark.slow
def test_it_learns(tiny_adata: ad.AnnData, quick: dict) -> None:
    model = make(tiny_adata, encoder_dim=16)
    model.train(**(quick | {"max_epochs": 30, "validation_size": 0.0}))
    loss = model.history["train_loss"]["train_loss"]
    assert loss.iloc[-1] < 0.8 * loss.iloc[0]


def test_the_transformer_predicts_values_and_bins_too(build, quick: dict) -> None:
    for options in (
        {"expression_head": "value", "objective": {"name": "masked_value_prediction", "zero_targets": 2.0}},
        {"expression_head": "bin", "n_bins": 51, "tokenizer": "binned_expression"},
        {"expression_head": "bin", "tokenizer": {"name": "binned_expression", "n_bins": 7}},
    ):
        model = build("transformer_encoder", **{"objective": "masked_value_prediction", **options})
        model.train(**quick)
        assert np.isfinite(model.history["validation_loss"]).all(axis=None)
    assert model.module.expression_head.decoder.out_features == 7


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        (
            "masked_autoencoder",
            {"objective": "masked_gene_prediction"},
            "'masked_gene_prediction' does not go with MaskedAutoencoder, which .* choose objective='masked_value",
        ),
        (
            "transformer_encoder",
            {},
            "architecture='transformer_encoder' without an expression_head .*'masked_value_prediction' is about; pass "
            r"expression_head='value'\.",
        ),
        (
            "transformer_encoder",
            {"tokenizer": "binned_expression"},
            r"pass expression_head='value' or expression_head='bin'\.",
        ),
        (
            "transformer_encoder",
            {"expression_head": "bin"},
            "expression_head='bin' predicts bins, which the tokenizer '.*' does not make; choose tokenizer='binned_",
        ),
        ("autoregressive_transformer", {}, "not go with AutoregressiveTransformer, which predicts the next token"),
        ("gene_pooling", {"pooling": "mean"}, "not go with GenePoolingModel, which predicts no values of tokens"),
        ("gene_pooling", {}, "not go with GenePoolingModel, which predicts no values of tokens"),
    ],
)
def test_architectures_that_learn_something_else(build, architecture: str, options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build(architecture, **{"objective": "masked_value_prediction", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"value_loss": "poisson"},
            "value_loss='poisson' is for counts, which the tokenizer 'continuous_projection' with these options does "
            "not give; pass tokenizer=.*'transform': 'counts'.*, or value_loss='mse'",
        ),
        (
            {"value_loss": "negative_binomial", "tokenizer": {**COUNTS, "clip": 2.5}},
            "value_loss='negative_binomial' is for counts",
        ),
        (
            {
                "value_loss": "zero_truncated_poisson",
                "tokenizer": COUNTS,
                "objective": {"name": "masked_value_prediction", "zero_targets": 0.5},
            },
            "'zero_truncated_poisson' is for counts of at least 1, but zero_targets=0.5 .* value_loss='poisson'",
        ),
        (
            {"value_loss": "zero_truncated_poisson", "tokenizer": {**COUNTS, "include_zero_genes": True}},
            "at least 1, but include_zero_genes=True makes targets of 0",
        ),
        (
            {"max_seq_len": 60, "objective": {"name": "masked_value_prediction", "zero_targets": 1.0}},
            "max_seq_len=60 is smaller than the 80 tokens that the tokenizer 'continuous_projection' and the objective",
        ),
        ({"hidden_dim": 8}, "hidden_dim=8 and encoder_dim=8 are the same option of 'masked_autoencoder'; keep one"),
        ({"hiden_dim": 8}, "'hiden_dim' is unknown to 'masked_autoencoder'"),
    ],
)
def test_parts_that_do_not_fit(options: dict, message: str, tiny_adata: ad.AnnData) -> None:
    with pytest.raises(OptionError, match=message):
        make(tiny_adata, **options)


@pytest.fixture
def folder(tiny_adata: ad.AnnData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the cells that the recipes name."""
    monkeypatch.chdir(tmp_path)
    tiny_adata.write_h5ad("data.h5ad")
    return tmp_path


TINY = ["model.hidden_dim=8", "model.num_layers=1", "model.num_heads=2", "training.max_epochs=1"]


def test_the_recipe(folder: Path, tiny_adata: ad.AnnData) -> None:
    config = load_config(recipe_path("masked_autoencoder"), [*TINY, "training.accelerator=cpu"])
    model = train_from_config(config, progress_bar=False)
    assert type(model.module).__name__ == "MaskedAutoencoder"
    assert (model.module.encoder_dim, len(model.module.encoder.layers), len(model.module.decoder.layers)) == (8, 1, 2)
    again = Encoder.load("checkpoints/masked_autoencoder/final", tiny_adata)
    assert again.get_latent_representation().shape == (60, 8)


def test_counts_and_masking_by_yaml(folder: Path) -> None:
    Path("config.yaml").write_text(
        """
data: {paths: [data.h5ad]}
tokenizer: {strategy: continuous_projection, transform: counts, masking: {mask_ratio: 0.5}}
model:
  architecture: masked_autoencoder
  hidden_dim: 8
  num_layers: 1
  num_heads: 2
  decoder_layers: 1
  value_loss: zero_truncated_negative_binomial
training: {max_epochs: 1, batch_size: 16, accelerator: cpu}
"""
    )
    model = train_from_config(load_config("config.yaml"), progress_bar=False)
    # Masking without a named objective is meant for that of the architecture.
    assert model._spec.objective == "masked_value_prediction"
    assert model._spec.objective_options["mask_ratio"] == 0.5
    assert model.module.value_loss == "zero_truncated_negative_binomial"
    assert model.module.log_dispersion is not None
