from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from scforge.config import load_config
from scforge.errors import OptionError
from scforge.estimators import Encoder
from scforge.workflows import train_from_config

SMALL = {"encoder_dim": 8, "encoder_layers": 1, "encoder_heads": 2, "decoder_layers": 1}
COUNTS = {"name": "continuous_projection", "transform": "counts"}
VALUES, HALF, WHOLE = ({"name": "masked_value_prediction", "zero_targets": share} for share in (0.0, 0.5, 1.0))
PARTS = {
    "values": {},
    "zeros": {"objective": WHOLE},
    "counts": {"tokenizer": COUNTS, "value_loss": "zero_truncated_negative_binomial"},
    "counts and zeros": {"tokenizer": COUNTS, "objective": HALF, "value_loss": "negative_binomial"},
    "views": {"objective": "joint_embedding"},
}


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS.values(), ids=list(PARTS))
def test_trained_saved_and_loaded(parts: dict, trained, quick: dict, tmp_path: Path) -> None:
    model = trained("masked_autoencoder", **SMALL, **parts)
    embedding = model.get_latent_representation()
    assert embedding.shape == (60, 8)
    assert embedding.std(axis=0).min() > 0
    assert np.isfinite(model.history["validation_loss"]).all(axis=None)
    model.save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model", model.adata)
    np.testing.assert_array_equal(again.get_latent_representation(), embedding)
    again.train(**quick)


def test_what_it_takes_where_nothing_is_said(tiny_adata: ad.AnnData) -> None:
    Encoder.setup_anndata(tiny_adata)
    model = Encoder(tiny_adata, "masked_autoencoder")
    spec = model.spec.to_json()
    assert (spec["tokenizer"]["name"], spec["tokenizer"]["append_cls"]) == ("continuous_projection", False)
    assert spec["objective"] == {**VALUES, "mask_ratio": 0.75}
    assert (model.module.encoder_dim, model.module.decoder_dim, model.module.pooling) == (128, 64, "mean")
    assert [len(stack.layers) for stack in (model.module.encoder, model.module.decoder)] == [4, 2]


def test_the_transformer_predicts_values_and_bins_too(trained) -> None:
    for options in (
        {"expression_head": "value", "objective": {"name": "masked_value_prediction", "zero_targets": 2.0}},
        {"expression_head": "bin", "n_bins": 51, "tokenizer": "binned_expression"},
        {"expression_head": "bin", "tokenizer": {"name": "binned_expression", "n_bins": 7}},
    ):
        model = trained("transformer_encoder", **{"objective": VALUES, **options})
        assert np.isfinite(model.history["validation_loss"]).all(axis=None)
    assert model.module.expression_head.decoder.out_features == 7


MAE, ZEROS_TOO = "masked_autoencoder", {**COUNTS, "include_zero_genes": True}
MISFITS = [
    (MAE, {"objective": "masked_gene_prediction"}, "not work with MaskedAutoencoder, .* objective='masked_value"),
    ("transformer_encoder", {}, r"requires a head that predicts values; pass expression_head='value'\.$"),
    ("transformer_encoder", {"tokenizer": "binned_expression"}, r"='value' or expression_head='bin'\.$"),
    (
        "transformer_encoder",
        {"expression_head": "bin"},
        "the tokenizer .* does not provide; use expression_head='value'",
    ),
    ("autoregressive_transformer", {}, "not work with AutoregressiveTransformer, which predicts the next token"),
    ("gene_pooling", {"pooling": "mean"}, "not work with GenePoolingModel, which does not predict token values"),
    (MAE, {"value_loss": "poisson"}, "counts, which .* does not provide; pass tokenizer=.*, or value_loss='mse"),
    (MAE, {"value_loss": "zero_truncated_poisson", "tokenizer": COUNTS, "objective": HALF}, "0, but zero_targets="),
    (MAE, {"value_loss": "zero_truncated_poisson", "tokenizer": ZEROS_TOO}, "include_zero_genes=True produces zeros"),
    (MAE, SMALL | {"hidden_dim": 8}, "hidden_dim=8 and encoder_dim=8 set the same option of Mas"),
    (
        MAE,
        {"max_seq_len": 60, "objective": WHOLE},
        "max_seq_len=60 is smaller than the 80 tokens that 'continuous_projection'",
    ),
]


@pytest.mark.parametrize(("architecture", "options", "message"), MISFITS)
def test_parts_that_do_not_fit(build, architecture: str, options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build(architecture, **{"objective": "masked_value_prediction", **options})


def test_counts_and_masking_by_yaml(folder: Path) -> None:
    Path("config.yaml").write_text(
        """
data: {paths: [cells.h5ad]}
tokenizer: {strategy: continuous_projection, transform: counts, masking: {mask_ratio: 0.5}}
model: {architecture: masked_autoencoder, hidden_dim: 8, num_layers: 1, num_heads: 2, value_loss: negative_binomial}
training: {max_epochs: 1, batch_size: 16, accelerator: cpu}
"""
    )
    model = train_from_config(load_config("config.yaml"), progress_bar=False)
    # Masking without a named objective is meant for that of the architecture.
    assert model.spec.objective == "masked_value_prediction"
    assert model.spec.objective_options["mask_ratio"] == 0.5
    assert (model.module.encoder_dim, model.module.value_loss) == (8, "negative_binomial")
