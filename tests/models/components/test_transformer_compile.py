"""A transformer layer, a stack and a model are one graph for torch.compile, and compute the same in it."""

import pytest
import torch

from scforge.config.schema import ModelConfig
from scforge.models import get_model
from scforge.models.components import TransformerBlock, TransformerConfig

B, S, H = 3, 7, 8
MASK = (torch.arange(S) < torch.tensor([[S], [4], [1]]))[:, None, None, :]


@pytest.fixture(autouse=True)
def fresh():
    """No test runs what another one compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("causal", "norm_first"), [(True, True), (False, False)])
def test_a_causal_or_post_norm_layer_is_one_graph(causal, norm_first):
    layer = TransformerBlock(TransformerConfig(H, 1, 2, norm_first=norm_first, dropout=0.5)).eval()
    states = torch.randn(B, S, H)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(states, causal=causal), layer(states, causal=causal))
    layer.train()
    assert not torch.equal(compiled(states, MASK), compiled(states, MASK)), "it drops out within the graph"


@pytest.mark.slow
@pytest.mark.parametrize("position_embedding", ["learned", "rotary", "none"])
def test_a_model_is_one_graph(position_embedding):
    config = ModelConfig(vocab_size=30, hidden_dim=H, num_layers=2, num_heads=2, position_embedding=position_embedding)
    model = get_model("transformer_encoder", config).eval()
    ids, mask = torch.randint(4, 30, (B, S)), MASK[:, 0, 0]
    compiled = torch.compile(model.encode, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids, mask), model.encode(ids, mask))
