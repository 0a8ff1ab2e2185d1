"""Components, utilities and registry, by the examples of their reference documentation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from scforge.config.schema import ModelConfig
from scforge.errors import OptionError
from scforge.models import (
    ModelOutput,
    TransformerEncoder,
    count_parameters,
    get_model,
    init_weights,
    list_models,
    register_model,
)
from scforge.models.components import (
    GeneExpressionEmbedding,
    MaskedGenePredictionHead,
    SelfAttention,
    TransformerBlock,
    cls_pool,
    generate_causal_mask,
    last_pool,
    mean_pool,
)
from scforge.models.registry import MODELS


@pytest.fixture
def registry(monkeypatch):
    """The registry of architectures, put back after the test."""
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))


def test_model_output():
    output = ModelOutput()
    assert (output.loss, output.logits, output.embeddings, output.hidden_states) == (None,) * 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.loss = torch.tensor(0.0)


def test_gene_expression_embedding():
    embedding = GeneExpressionEmbedding(vocab_size=5000, hidden_dim=512, max_seq_len=2048, use_expression_values=True)
    input_ids = torch.randint(0, 5000, (8, 256))
    values = torch.randn(8, 256)
    assert embedding(input_ids, values=values).shape == (8, 256, 512)
    assert embedding(input_ids).shape == (8, 256, 512)


def test_embedding_sums_gene_position_and_value():
    embedding = GeneExpressionEmbedding(20, 8, 10, layer_norm_eps=1e-5).eval()
    ids, values = torch.randint(4, 20, (2, 5)), torch.rand(2, 5)
    total = (
        embedding.gene_embedding.weight[ids]
        + embedding.position_embedding.weight[:5]
        + embedding.expression_scale
        * (values[..., None] * embedding.expression_projection.weight[:, 0] + embedding.expression_projection.bias)
    )
    torch.testing.assert_close(embedding(ids, values), nn.functional.layer_norm(total, (8,), eps=1e-5))
    torch.testing.assert_close(embedding(ids), embedding(ids, torch.zeros(2, 5)))
    assert embedding(ids, values.double()).dtype == torch.float32


def test_embedding_without_values_ignores_them():
    embedding = GeneExpressionEmbedding(20, 8, 10, use_expression_values=False).eval()
    ids = torch.randint(4, 20, (2, 5))
    assert torch.equal(embedding(ids, torch.rand(2, 5)), embedding(ids))


def test_too_many_tokens():
    embedding = GeneExpressionEmbedding(20, 8, max_seq_len=4)
    with pytest.raises(OptionError, match="5 tokens but max_seq_len=4"):
        embedding(torch.zeros(1, 5, dtype=torch.long))


def test_masked_gene_prediction_head():
    head = MaskedGenePredictionHead(hidden_dim=512, vocab_size=5000)
    logits = head(torch.randn(4, 128, 512))
    assert logits.shape == (4, 128, 5000)
    labels = torch.randint(0, 5000, (4, 128))
    labels[labels < 2500] = -100
    loss = nn.CrossEntropyLoss(ignore_index=-100)(logits.view(-1, 5000), labels.view(-1))
    assert loss.isfinite()


def test_head_starts_at_the_token_frequencies():
    head = MaskedGenePredictionHead(8, 6)
    nn.init.zeros_(head.decoder.weight)
    head.init_bias(torch.tensor([0, 0, 0, 0, 30, 64]))
    expected = torch.tensor([1.0, 1, 1, 1, 31, 65]) / 100
    torch.testing.assert_close(head(torch.randn(3, 8)).softmax(dim=-1), expected.expand(3, -1))


def test_cls_pool():
    hidden_states = torch.randn(8, 256, 512)
    assert cls_pool(hidden_states).shape == (8, 512)
    assert torch.equal(cls_pool(hidden_states, torch.ones(8, 256)), hidden_states[:, 0])


def test_mean_pool():
    hidden_states = torch.randn(8, 256, 512)
    attention_mask = torch.ones(8, 256)
    attention_mask[:, 200:] = 0
    pooled = mean_pool(hidden_states, attention_mask)
    torch.testing.assert_close(pooled, hidden_states[:, :200].mean(dim=1))
    torch.testing.assert_close(mean_pool(hidden_states), hidden_states.mean(dim=1))
    torch.testing.assert_close(mean_pool(hidden_states, attention_mask.bool()), pooled)
    assert not mean_pool(hidden_states, torch.zeros(8, 256)).any()


def test_generate_causal_mask():
    inf = float("inf")
    expected = [
        [0.0, -inf, -inf, -inf, -inf],
        [0.0, 0.0, -inf, -inf, -inf],
        [0.0, 0.0, 0.0, -inf, -inf],
        [0.0, 0.0, 0.0, 0.0, -inf],
        [0.0, 0.0, 0.0, 0.0, 0.0],
    ]
    assert generate_causal_mask(5).tolist() == expected
    input_ids = torch.randint(0, 5000, (8, 200))
    assert generate_causal_mask(200, device=input_ids.device).shape == (200, 200)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1)
    assert encoder(torch.randn(2, 5, 8), mask=generate_causal_mask(5)).isfinite().all()


def test_attention_equals_torch():
    ours, torchs = SelfAttention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    with torch.no_grad():
        torchs.in_proj_weight.copy_(ours.qkv.weight)
        torchs.in_proj_bias.copy_(ours.qkv.bias)
        torchs.out_proj.weight.copy_(ours.out.weight)
        torchs.out_proj.bias.copy_(ours.out.bias)
    x = torch.randn(3, 7, 16)
    padding = torch.arange(7) >= torch.tensor([7, 4, 2])[:, None]
    expected, _ = torchs(x, x, x, key_padding_mask=padding, need_weights=False)
    torch.testing.assert_close(ours(x, ~padding[:, None, None, :]), expected, atol=1e-5, rtol=1e-4)


def test_causal_attention_does_not_see_the_future():
    block, x = TransformerBlock(16, 4).eval(), torch.randn(1, 6, 16)
    changed = x.clone()
    changed[:, 4:] += 1
    mask = generate_causal_mask(6)
    torch.testing.assert_close(block(changed, mask)[:, :4], block(x, mask)[:, :4])


def test_heads_must_divide_the_width():
    with pytest.raises(OptionError, match="hidden_dim=30 is not divisible by num_heads=4"):
        SelfAttention(30, 4)
    with pytest.raises(ValueError, match="activation='tanh'"):
        TransformerBlock(8, 2, activation="tanh")


def test_init_weights():
    class MyModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5000, 512, padding_idx=0)
            self.linear = nn.Linear(512, 512)
            self.layer_norm = nn.LayerNorm(512)

    model = MyModel()
    nn.init.constant_(model.layer_norm.weight, 3.0)
    model.apply(init_weights).requires_grad_(False)
    assert abs(float(model.embedding.weight.mean())) < 1e-3
    assert float(model.embedding.weight.std()) == pytest.approx(0.02, rel=0.02)
    assert not model.embedding.weight[0].any()
    assert model.linear.bias.abs().max() == 0.0
    bound = (6 / 1024) ** 0.5
    assert 0.95 * bound < float(model.linear.weight.abs().max()) <= bound
    assert (model.layer_norm.weight == 1).all()
    assert not model.layer_norm.bias.any()


def test_count_parameters():
    model = TransformerEncoder(vocab_size=500, hidden_dim=32, num_layers=2, num_heads=8)
    total = count_parameters(model, trainable_only=False)
    assert total == count_parameters(model, trainable_only=True) == sum(p.numel() for p in model.parameters())
    for param in model.embedding.parameters():
        param.requires_grad = False
    frozen = sum(p.numel() for p in model.embedding.parameters())
    assert count_parameters(model, trainable_only=True) == total - frozen
    assert count_parameters(model, trainable_only=False) == total
    assert model.num_parameters() == total - frozen
    assert model.num_parameters(trainable_only=False) == total


def test_register_model(registry):
    @register_model("my_custom_model")
    class MyCustomModel(nn.Module):
        def __init__(self, vocab_size, hidden_dim):
            super().__init__()
            self.embedding = nn.Embedding(vocab_size, hidden_dim)

        @classmethod
        def from_config(cls, config):
            return cls(vocab_size=config.vocab_size, hidden_dim=config.hidden_dim)

    assert list_models() == sorted(list_models())
    assert {"my_custom_model", "transformer_encoder", "gene_pooling"} <= set(list_models())
    model = get_model("my_custom_model", ModelConfig(vocab_size=10, hidden_dim=4))
    assert isinstance(model, MyCustomModel)
    with pytest.raises(ValueError, match="'my_custom_model' is already registered"):
        register_model("my_custom_model")(nn.Linear)
    with pytest.raises(ValueError, match="'transformer_encoder' is already registered"):
        register_model("transformer_encoder")(MyCustomModel)


def test_get_model():
    config = ModelConfig(architecture="transformer_encoder", vocab_size=5000, hidden_dim=64, num_layers=2, num_heads=8)
    model = get_model(config.architecture, config)
    assert type(model).__name__ == "TransformerEncoder"
    assert len(model.encoder.layers) == 2
    with pytest.raises(ValueError, match="did you mean 'transformer_encoder'"):
        get_model("transformer_encode", config)


@pytest.mark.parametrize("pool", [cls_pool, last_pool, mean_pool])
def test_pools_follow_the_mask(pool):
    hidden = torch.randn(4, 6, 8)
    right = torch.arange(6) < torch.tensor([6, 3, 1, 0])[:, None]
    expected = {
        cls_pool: [hidden[0, 0], hidden[1, 0], hidden[2, 0], torch.zeros(8)],
        last_pool: [hidden[0, 5], hidden[1, 2], hidden[2, 0], torch.zeros(8)],
        mean_pool: [hidden[0].mean(0), hidden[1, :3].mean(0), hidden[2, 0], torch.zeros(8)],
    }[pool]
    torch.testing.assert_close(pool(hidden, right), torch.stack(expected))
    torch.testing.assert_close(pool(hidden.flip(1), right.flip(1)), pool(hidden, right)) if pool is mean_pool else None
    assert torch.equal(pool(hidden, torch.ones(4, 6)), pool(hidden)) or pool is mean_pool
