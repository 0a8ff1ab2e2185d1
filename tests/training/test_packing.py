"""States as JSON and tensors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from scforge.errors import TrainingError
from scforge.training.packing import pack, unpack


def test_what_goes_in_comes_out():
    state = {
        "step": 3,
        "lr": 0.1 + 0.2,
        "best": float("inf"),
        "none": None,
        "nested": {0: {"exp_avg": torch.randn(3, 2)}, "text": ["a", (1, (2.5,))]},
        "numpy": (np.arange(4, dtype=np.uint32), np.float64(1 / 3), np.int64(7)),
        "scalar": torch.tensor(5, dtype=torch.int64),
    }
    plain, tensors = pack(state, where="state")
    found = unpack(json.loads(json.dumps(plain)), tensors)
    assert list(found) == list(state)
    assert (found["step"], found["lr"], found["best"], found["none"]) == (3, 0.1 + 0.2, float("inf"), None)
    assert torch.equal(found["nested"][0]["exp_avg"], state["nested"][0]["exp_avg"])
    assert found["nested"]["text"] == ["a", (1, (2.5,))]
    assert found["numpy"][0].tolist() == [0, 1, 2, 3]
    assert found["numpy"][1:] == (1 / 3, 7)
    assert found["scalar"].dtype == torch.int64


def test_tensors_that_share_memory_are_kept_apart():
    whole = torch.arange(6.0)
    _, tensors = pack([whole, whole[2:]], where="s")
    assert len({value.data_ptr() for value in tensors.values()}) == 2


@pytest.mark.parametrize("odd", [object(), {1.5: 2}, {"a": {1, 2}}, lambda: None])
def test_nothing_else_is_kept(odd):
    with pytest.raises(TrainingError, match=r"^state"):
        pack({"odd": odd} if not isinstance(odd, dict) else odd, where="state")


def test_names_that_look_alike_are_kept_apart():
    state = {"a.b": torch.tensor(1.0), "a": {"b": torch.tensor(2.0)}}
    found = unpack(*pack(state, where="s"))
    assert (found["a.b"], found["a"]["b"]) == (1.0, 2.0)
