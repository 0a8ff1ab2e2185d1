"""An architecture with a head: names of weights, gradients, and an encoder that is frozen."""

from __future__ import annotations

import pytest
import torch

from scforge.finetuning import FineTunedModule, PredictionHead
from scforge.models import GenePoolingModel


@pytest.fixture
def module() -> FineTunedModule:
    torch.manual_seed(0)
    encoder = GenePoolingModel(100, 16, 1, dropout=0.5, pooling="weighted_sum", latent_dim=8)
    return FineTunedModule(encoder, PredictionHead(8, 3, dropout=0.0))


@pytest.fixture
def batch(dummy_batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: dummy_batch[name] for name in ("input_ids", "attention_mask", "values")}


def test_outputs_and_names(module: FineTunedModule, batch: dict[str, torch.Tensor]) -> None:
    module.eval()
    output = module(**batch)
    torch.testing.assert_close(output.embeddings, module.encoder.encode(**batch))
    torch.testing.assert_close(output.logits, module.head(output.embeddings))
    assert {name.split(".")[0] for name in module.state_dict()} == {"encoder", "head"}


def test_gradients_reach_the_encoder_unless_it_is_frozen(module: FineTunedModule, batch) -> None:
    module.train()
    module(**batch).logits.sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in module.encoder.parameters())
    module.zero_grad()
    module.frozen = True
    module.train()
    assert module.head.training
    assert not module.encoder.training
    module(**batch).logits.sum().backward()
    assert all(p.grad is None for p in module.encoder.parameters())
    assert module.head.out.weight.grad.any()


def test_a_frozen_encoder_drops_nothing_out(module: FineTunedModule, batch) -> None:
    module.train()
    assert not torch.equal(module(**batch).logits, module(**batch).logits)
    module.frozen = True
    module.train()
    torch.testing.assert_close(module(**batch).logits, module(**batch).logits)
