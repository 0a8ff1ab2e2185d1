"""Means over the cells of an epoch."""

from __future__ import annotations

import json

import pytest
import torch

from scforge.training.means import EpochMeans


def test_cells_weigh_the_same_and_a_state_goes_on_to_the_bit():
    means, other = EpochMeans(), EpochMeans()
    means.add({"loss": torch.tensor(1.0), "spread": torch.tensor(0.1)}, 30)
    means.add({"loss": torch.tensor(4.0), "spread": torch.tensor(0.4)}, 10)
    state = json.loads(json.dumps(means.state_dict()))
    other.load_state_dict(state)
    for one in (means, other):
        one.add({"loss": torch.tensor(1 / 3), "spread": torch.tensor(2 / 3)}, 7)
    assert means.take() == other.take()
    assert means.take() == {}
    other.load_state_dict(state)
    assert other.take() == pytest.approx({"loss": 1.75, "spread": 0.175}, rel=1e-7)
    # Cells of all processes count.
    other.load_state_dict(state)
    sums = torch.tensor([60.0, 0.0, 20.0], dtype=torch.float64)
    assert other.take(lambda own: own + sums)["loss"] == 130 / 60
