"""What every registered objective promises. A new one needs a line in OPTIONS: what it works with."""

import pytest

from scforge.testing import check_objective
from scforge.training import list_objectives

RANKS = {"architecture": "transformer_encoder", "tokenizer": "rank_value"}
BINS = {"architecture": "autoregressive_transformer", "tokenizer": "binned_expression"}
SCDIVA = {"architecture": "scdiva", "tokenizer": "entropy_ranked"}
OPTIONS: dict[str, list[dict]] = {
    "joint_embedding": [{}, {"architecture": "mlp"}, {**RANKS, "model_options": {"pooling": "mean"}}],
    "masked_diffusion": [SCDIVA],
    "masked_gene_prediction": [RANKS, {**RANKS, "mask_ratio": 0.5}],
    "masked_value_prediction": [{"architecture": "masked_autoencoder"}],
    "neighbor_denoising": [
        {},
        {"batch_key": "batch"},
        {"batch_key": "batch", "alignment": 0.01, "temperature": None},
        {"batch_key": "batch", "labels_key": "group"},
        {"architecture": "mlp"},
    ],
    "next_gene_prediction": [{**BINS, "tokenizer_options": {"side": "one", "append_eos": True}}],
    "variational": [SCDIVA, {**SCDIVA, "labels_key": "group"}],
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, id=f"{name}-{i}")
        for name in list_objectives()
        for i, options in enumerate(OPTIONS.get(name, [{}]))
    ],
)
def test_contract(name, options):
    assert sorted(OPTIONS) == list_objectives()
    check_objective(name, **options)
