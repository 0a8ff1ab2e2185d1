import pytest
import torch
from torch import nn

from scforge.config.schema import ModelConfig
from scforge.errors import OptionError
from scforge.models import get_model, init_weights
from scforge.models.components import GeneExpressionEmbedding, MaskedGenePredictionHead, cls_pool, mean_pool
from scforge.models.components.pooling import last_pool


def test_embedding_sums_gene_position_and_value():
    embedding = GeneExpressionEmbedding(20, 8, 10, layer_norm_eps=1e-5).eval()
    ids, values = torch.randint(4, 20, (2, 5)), torch.rand(2, 5)
    projection = embedding.expression_projection
    value = values[..., None] * projection.weight[:, 0] + projection.bias
    total = embedding.gene_embedding.weight[ids] + embedding.position_embedding.weight[:5]
    total = total + embedding.expression_scale * value
    torch.testing.assert_close(embedding(ids, values), nn.functional.layer_norm(total, (8,), eps=1e-5))
    torch.testing.assert_close(embedding(ids), embedding(ids, torch.zeros(2, 5)))
    assert embedding(ids, values.double()).dtype == torch.float32
    without = GeneExpressionEmbedding(20, 8, 10, use_expression_values=False).eval()
    assert torch.equal(without(ids, values), without(ids))
    with pytest.raises(OptionError, match="5 tokens, but max_seq_len=4"):
        GeneExpressionEmbedding(20, 8, max_seq_len=4)(ids)


def test_head_starts_at_the_token_frequencies():
    head = MaskedGenePredictionHead(8, 6)
    nn.init.zeros_(head.decoder.weight)
    head.init_bias(torch.tensor([0, 0, 0, 0, 30, 64]))
    expected = torch.tensor([1.0, 1, 1, 1, 31, 65]) / 100
    torch.testing.assert_close(head(torch.randn(3, 8)).softmax(dim=-1), expected.expand(3, -1))


def test_init_weights():
    model = nn.ModuleList([nn.Embedding(5000, 512, padding_idx=0), nn.Linear(512, 512), nn.LayerNorm(512)])
    embedding, linear, norm = model
    nn.init.constant_(norm.weight, 3.0)
    model.apply(init_weights).requires_grad_(False)
    assert abs(float(embedding.weight.mean())) < 1e-3
    assert float(embedding.weight.std()) == pytest.approx(0.02, rel=0.02)
    assert not embedding.weight[0].any()
    assert linear.bias.abs().max() == 0.0
    bound = (6 / 1024) ** 0.5
    assert 0.95 * bound < float(linear.weight.abs().max()) <= bound
    assert (norm.weight == 1).all()
    assert not norm.bias.any()


@pytest.mark.parametrize("pool", [cls_pool, last_pool, mean_pool])
def test_pools_follow_the_mask(pool):
    hidden = torch.randn(4, 6, 8)
    mask = torch.arange(6) < torch.tensor([6, 3, 1, 0])[:, None]
    kept = {cls_pool: lambda x: x[0], last_pool: lambda x: x[-1], mean_pool: lambda x: x.mean(dim=0)}[pool]
    rows = [kept(hidden[cell, :n]) for cell, n in enumerate((6, 3, 1))]
    for given in (mask, mask.float()):
        torch.testing.assert_close(pool(hidden, given), torch.stack([*rows, torch.zeros(8)]))
    torch.testing.assert_close(pool(hidden), torch.stack([kept(cell) for cell in hidden]))


def test_gene_pooling_takes_the_default_pooling_of_a_configuration_as_the_mean():
    config = ModelConfig(architecture="gene_pooling", vocab_size=20, hidden_dim=8, num_layers=1, pooling="cls")
    torch.manual_seed(0)
    model = get_model("gene_pooling", config).eval()
    assert model.pooling == "mean"
    ids, mask = torch.randint(4, 20, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
    assert torch.isfinite(model.encode(ids, mask)).all()
