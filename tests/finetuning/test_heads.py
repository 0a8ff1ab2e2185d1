"""Heads standardise what they see, and refuse options that they do not have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scforge.errors import OptionError
from scforge.finetuning import PredictionHead
from scforge.finetuning.heads import Standardise, check_head


def test_standardise() -> None:
    values = np.random.default_rng(0).normal(5.0, 3.0, size=(500, 4)).astype(np.float32)
    values[:, 3] = 7.0
    part = Standardise(4)
    torch.testing.assert_close(part(torch.from_numpy(values)), torch.from_numpy(values))
    part.set_from(values)
    out = part(torch.from_numpy(values))
    torch.testing.assert_close(out.mean(dim=0), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(out.std(dim=0, correction=0), torch.tensor([1.0, 1.0, 1.0, 0.0]), atol=1e-4, rtol=0)
    assert set(part.state_dict()) == {"mean", "scale"}
    assert not list(part.parameters())


@pytest.mark.parametrize(("options", "n_layers"), [({}, 1), ({"hidden_dim": 5}, 2)])
def test_shapes(options: dict, n_layers: int) -> None:
    head = PredictionHead(8, 3, **options)
    assert head(torch.randn(4, 8), {"input_ids": None}).shape == (4, 3)
    assert sum(isinstance(part, torch.nn.Linear) for part in head.modules()) == n_layers


def test_options() -> None:
    assert check_head(None) == {}
    assert check_head({"hidden_dim": 0, "dropout": 0.5}) == {"hidden_dim": 0, "dropout": 0.5}
    for head, message in [
        (3, "head=3 is not a dict of options"),
        ({"width": 3}, "'width' is unknown to"),
        ({"hidden_dim": -1}, r"head\['hidden_dim'\]=-1"),
        ({"dropout": 2}, r"head\['dropout'\]=2"),
    ]:
        with pytest.raises(OptionError, match=message):
            check_head(head)
