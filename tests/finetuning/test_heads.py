import numpy as np
import pytest
import torch

from scforge.finetuning import PredictionHead
from scforge.finetuning.heads import (
    CalibratedHead,
    FineTunedModule,
    QueryMapping,
    Standardize,
    fit_temperature,
    normalized_entropy,
    probabilities_of,
)
from scforge.models import GenePoolingModel


def test_standardize() -> None:
    values = np.random.default_rng(0).normal(5.0, 3.0, size=(500, 4)).astype(np.float32)
    values[:, 3] = 7.0
    part = Standardize(4)
    torch.testing.assert_close(part(torch.from_numpy(values)), torch.from_numpy(values))
    part.set_from(values)
    out = part(torch.from_numpy(values))
    torch.testing.assert_close(out.mean(dim=0), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(out.std(dim=0, correction=0), torch.tensor([1.0, 1.0, 1.0, 0.0]), atol=1e-4, rtol=0)
    assert set(part.state_dict()) == {"mean", "scale"}
    assert not list(part.parameters())
    for options, n_layers in (({}, 1), ({"hidden_dim": 5}, 2)):
        head = PredictionHead(8, 3, **options)
        assert head(torch.randn(4, 8), {"input_ids": None}).shape == (4, 3)
        assert sum(isinstance(layer, torch.nn.Linear) for layer in head.modules()) == n_layers


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


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_the_temperature_is_found_and_makes_other_cells_likelier(scale) -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(5_000, 4)) * 2
    classes = np.array([generator.choice(4, p=p) for p in probabilities_of(logits)])
    logits *= scale
    temperature = fit_temperature(logits[:4_000], classes[:4_000])
    assert temperature == pytest.approx(scale, rel=0.1)

    def loss(temperature):
        return -np.log(probabilities_of(logits[4_000:], temperature)[np.arange(1_000), classes[4_000:]]).mean()

    assert loss(temperature) < (0.5 if scale == 5.0 else 1.001) * loss(1.0)


def test_few_cells_that_are_all_right_are_no_certainty() -> None:
    logits, classes = np.array([[3.0, 0.0], [0.0, 3.0], [3.0, 0.0]]), np.array([0, 1, 0])
    confidence = probabilities_of(logits, fit_temperature(logits, classes)).max(axis=1)
    # Platt's targets: (3 + 1) / (3 + 2).
    np.testing.assert_allclose(confidence, 0.8, atol=1e-3)
    assert fit_temperature(np.zeros((0, 2)), np.zeros(0, dtype=np.int64)) == 1.0
    probabilities = np.array([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]])
    np.testing.assert_allclose(normalized_entropy(probabilities), [0.0, 1.0, np.log(2) / np.log(3)], atol=1e-12)
    # The temperature is saved, and does not change outputs.
    head, other, values = CalibratedHead(3, 2).eval(), CalibratedHead(3, 2).eval(), torch.randn(5, 3)
    plain = head(values)
    head.temperature.fill_(4.0)
    torch.testing.assert_close(head(values), plain)
    other.load_state_dict(head.state_dict())
    assert other.temperature == 4.0
