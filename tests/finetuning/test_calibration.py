from __future__ import annotations

import numpy as np
import pytest
import torch

from scforge.finetuning.calibration import CalibratedHead, fit_temperature, normalised_entropy, probabilities_of


def sample(scale, n_cells, seed):
    """Return logits that are `scale` times too large, and classes drawn by the true ones."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(n_cells, 4)) * 2
    classes = [generator.choice(4, p=p) for p in probabilities_of(logits)]
    return logits * scale, np.array(classes)


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_temperature_is_found(scale):
    logits, classes = sample(scale, 4_000, seed=0)
    assert fit_temperature(logits, classes) == pytest.approx(scale, rel=0.1)


def test_other_cells_are_likelier_with_it():
    logits, classes = sample(5.0, 500, seed=0)
    others, other_classes = sample(5.0, 500, seed=1)

    def loss(temperature):
        return -np.log(probabilities_of(others, temperature)[np.arange(500), other_classes]).mean()

    assert loss(fit_temperature(logits, classes)) < 0.5 * loss(1.0)


def test_few_cells_that_are_all_right_are_no_certainty():
    logits, classes = np.array([[3.0, 0.0], [0.0, 3.0], [3.0, 0.0]]), np.array([0, 1, 0])
    confidence = probabilities_of(logits, fit_temperature(logits, classes)).max(axis=1)
    # Platt's targets: (3 + 1) / (3 + 2).
    np.testing.assert_allclose(confidence, 0.8, atol=1e-3)
    assert fit_temperature(np.zeros((0, 2)), np.zeros(0, dtype=np.int64)) == 1.0


def test_entropy():
    probabilities = np.array([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]])
    np.testing.assert_allclose(normalised_entropy(probabilities), [0.0, 1.0, np.log(2) / np.log(3)], atol=1e-12)


def test_temperature_is_saved_and_does_not_change_outputs():
    head = CalibratedHead(3, 2).eval()
    head.temperature.fill_(4.0)
    other = CalibratedHead(3, 2).eval()
    other.load_state_dict(head.state_dict())
    assert other.temperature == 4.0
    head.temperature.fill_(1.0)
    values = torch.randn(5, 3)
    torch.testing.assert_close(head(values), other(values))
