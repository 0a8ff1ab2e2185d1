import numpy as np
import pytest
import torch

from scforge.finetuning import PredictionHead
from scforge.finetuning.mapping import FineTunedModule, QueryMapping
from scforge.models import GenePoolingModel


def test_factors_of_genes_are_learned_from_most_clusters() -> None:
    generator = np.random.default_rng(0)
    expected = generator.uniform(100, 200, (8, 5))
    observed = expected / np.array([2.0, 0.25, 1.0, 1.0, 20.0])
    observed[7, 2] *= 50  # cells of a type that the reference lacks express the third gene
    observed[:, 3] = 0  # not measured in the query
    mapping = QueryMapping(3, 8, 7)
    batch = {"input_ids": torch.tensor([[2, 3, 4, 5, 6, 0]]), "values": torch.ones(1, 6)}
    assert mapping.scaled(batch)["values"].tolist() == [[1.0] * 6]
    mapping.set_factors(expected, observed)
    found = mapping.scaled(batch)["values"][0]
    assert found[[2, 3, 5]].tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert found[0] == pytest.approx(2.0, rel=0.15)
    assert found[1] == pytest.approx(0.25, rel=0.35)
    assert found[4] == pytest.approx(5.0)
    few = QueryMapping(3, 8, 7)
    few.set_factors(expected / 1_000, observed / 1_000)
    assert (few.factors - 1).abs().max() < 0.1


def test_gradients_and_dropout_reach_the_encoder_unless_it_is_frozen(dummy_batch) -> None:
    torch.manual_seed(0)
    encoder = GenePoolingModel(100, 16, 1, dropout=0.5, pooling="weighted_sum", latent_dim=8)
    module = FineTunedModule(encoder, PredictionHead(8, 3, dropout=0.0))
    batch = {name: dummy_batch[name] for name in ("input_ids", "attention_mask", "values")}
    module.train()
    module(**batch).logits.sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in module.encoder.parameters())
    assert not torch.equal(module(**batch).logits, module(**batch).logits)
    module.zero_grad()
    module.frozen = True
    module.train()
    assert module.head.training
    assert not module.encoder.training
    output = module(**batch)
    output.logits.sum().backward()
    assert all(p.grad is None for p in module.encoder.parameters())
    assert module.head.out.weight.grad.any()
    torch.testing.assert_close(output.logits, module(**batch).logits)
    torch.testing.assert_close(output.embeddings, module.encoder.encode(**batch))
    torch.testing.assert_close(output.logits, module.head(output.embeddings))
    assert {name.split(".")[0] for name in module.state_dict()} == {"encoder", "head"}
