"""States as JSON and tensors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from scforge.errors import TrainingError
from scforge.training.packing import pack, unpack


def test_what_goes_in_comes_out():
    whole = torch.arange(6.0)
    state = {
        "plain": [3, 0.1 + 0.2, float("inf"), None, "text", (1, (2.5,))],
        "nested": {0: {"exp_avg": whole}, "shared": whole[2:]},
        "numpy": (np.arange(4, dtype=np.uint32), np.float64(1 / 3), np.int64(7)),
        "scalar": torch.tensor(5, dtype=torch.int64),
        "a.b": torch.tensor(1.0),
        "a": {"b": torch.tensor(2.0)},
    }
    plain, tensors = pack(state, where="state")
    assert len({value.data_ptr() for value in tensors.values()}) == len(tensors), "no two share memory"
    found = unpack(json.loads(json.dumps(plain)), tensors)
    assert list(found) == list(state)
    assert found["plain"] == state["plain"]
    assert torch.equal(found["nested"][0]["exp_avg"], whole)
    assert torch.equal(found["nested"]["shared"], whole[2:])
    assert found["numpy"][0].tolist() == [0, 1, 2, 3]
    assert found["numpy"][1:] == (1 / 3, 7)
    assert found["scalar"].dtype == torch.int64
    assert (found["a.b"], found["a"]["b"]) == (1.0, 2.0)


@pytest.mark.parametrize("odd", [object(), {1.5: 2}, {"a": {1, 2}}, lambda: None])
def test_nothing_else_is_kept(odd):
    with pytest.raises(TrainingError, match=r"^state"):
        pack({"odd": odd} if not isinstance(odd, dict) else odd, where="state")
