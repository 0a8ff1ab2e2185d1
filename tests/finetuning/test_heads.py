import numpy as np
import pytest
import torch

from scforge.finetuning import PredictionHead
from scforge.finetuning.heads import (
    CalibratedHead,
    Standardize,
    fit_temperature,
    normalized_entropy,
    probabilities_of,
)


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
