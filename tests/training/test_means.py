"""Means over the cells of an epoch."""

from __future__ import annotations

import json

import pytest
import torch

from scforge.training.means import EpochMeans


def filled() -> EpochMeans:
    means = EpochMeans()
    means.add({"loss": torch.tensor(1.0), "spread": torch.tensor(0.1)}, 30)
    means.add({"loss": torch.tensor(4.0), "spread": torch.tensor(0.4)}, 10)
    return means


def test_cells_weigh_the_same():
    means = filled()
    found = means.take()
    assert found == pytest.approx({"loss": 1.75, "spread": 0.175}, rel=1e-7)
    assert means.take() == {}


def test_the_state_goes_on_to_the_bit():
    one, other = filled(), EpochMeans()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for means in (one, other):
        means.add({"loss": torch.tensor(1 / 3), "spread": torch.tensor(2 / 3)}, 7)
    assert one.take() == other.take()


def test_cells_of_all_processes_count():
    assert filled().take(lambda sums: sums + torch.tensor([60.0, 0.0, 20.0], dtype=torch.float64))["loss"] == 130 / 60
