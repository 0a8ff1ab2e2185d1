"""What is found by trying."""

from __future__ import annotations

import pytest
import torch

from scforge.errors import OptionError, TrainingError
from scforge.training import find_batch_size
from scforge.training.modes import checkpointed, compiled
from scforge.training.tuning import _kept_bytes, choose_precision
from scforge.training.utilisation import flops_per_token, peak_flops

CPU = torch.device("cpu")


@pytest.fixture
def bound(masked_setup):
    return masked_setup.module, masked_setup.data(batch_size=None)


def test_more_memory_means_more_cells(bound, monkeypatch):
    module, data = bound
    sizes = []
    one, four = (_kept_bytes(module, data, size) for size in (1, 4))
    assert 0 < one < four
    for there in (one, 4 * one, 2**40):
        monkeypatch.setattr("scforge.training.tuning.available_memory", lambda there=there: 3 * there)
        sizes.append(find_batch_size(module, data, CPU))
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert sizes[-1] == 4  # 50 cells in at least 8 steps
    monkeypatch.setattr("scforge.training.tuning.available_memory", lambda: 10)
    with pytest.raises(TrainingError, match=r"memory ran out with a batch of one cell; lower .*max_len"):
        find_batch_size(module, data, CPU)


def count(module, data, device):
    # The weights are multiplied with at least each token's vector once, forwards, and twice backwards.
    assert flops_per_token(module, data.objective, next(iter(data.val_dataloader()))) > 6 * 16
    assert peak_flops(device, "32-true") > 1e8


@pytest.mark.parametrize("find", [find_batch_size, choose_precision, count])
def test_trying_leaves_nothing_behind(masked_setup, find):
    module, data = masked_setup.module, masked_setup.data(batch_size=None if find is not count else 10)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    random, training = torch.get_rng_state(), module.training
    find(module, data, CPU)
    assert torch.equal(torch.get_rng_state(), random)
    assert module.training == training
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_the_precision_is_one_that_is_faster(bound, monkeypatch):
    assert choose_precision(*bound, CPU) in ("32-true", "bf16-mixed")
    monkeypatch.setattr("scforge.training.tuning._FASTER", 0.0)
    assert choose_precision(*bound, CPU) == "bf16-mixed"
    monkeypatch.setattr("scforge.training.tuning._FASTER", 1e9)
    assert choose_precision(*bound, CPU) == "32-true"


def test_layers_are_compiled_for_a_while(setup):
    for wanted in (True, False):
        with compiled(setup.module, wanted):
            assert (setup.module._compiled_call_impl is not None) == wanted
        assert setup.module._compiled_call_impl is None
    with pytest.raises(OptionError, match="GenePoolingModel cannot"), checkpointed(setup.module, True):
        pass
    with checkpointed(setup.module, None):
        pass
