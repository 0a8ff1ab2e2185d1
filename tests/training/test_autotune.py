import contextlib

import pytest
import torch

from scforge.errors import OptionError, TrainingError
from scforge.testing import raises
from scforge.training.autotune import _by_trying, _kept_bytes, choose_precision, find_batch_size
from scforge.training.devices import compiled, gradient_checkpointing, root_device
from scforge.training.monitoring import flops_per_token, peak_flops

CPU = torch.device("cpu")


def test_more_memory_means_more_cells(masked_setup, monkeypatch):
    module, data = masked_setup.module, masked_setup.data(batch_size=None)
    one, four = (_kept_bytes(module, data, size) for size in (1, 4))
    assert 0 < one < four
    sizes = []
    for there in (one // 2, 4 * one, 2**40):
        monkeypatch.setattr("scforge.training.autotune.available_memory", lambda there=there: 3 * there)
        sizes.append(find_batch_size(module, data, CPU))
    assert sizes[0] <= sizes[1] <= sizes[2] == 4  # 50 cells in at least 8 steps
    assert sizes[0] < sizes[2]
    monkeypatch.setattr("scforge.training.autotune.available_memory", lambda: 10)
    with pytest.raises(TrainingError, match=r"memory ran out with a batch of one cell; lower .*max_len"):
        find_batch_size(module, data, CPU)
    for faster, precision in ((0.0, "bf16-mixed"), (1e9, "32-true")):
        monkeypatch.setattr("scforge.training.autotune._FASTER", faster)
        assert choose_precision(module, data, CPU) == precision


def count(module, data, device):
    # The weights are multiplied with at least each token's vector once, forwards, and twice backwards.
    assert flops_per_token(module, data.objective, next(iter(data.val_dataloader()))) > 6 * 16
    assert peak_flops(device, "32-true") > 1e8


def test_the_speed_of_a_cpu_is_that_of_all_its_threads(monkeypatch):
    threads, mm = set(), torch.mm
    monkeypatch.setattr(torch, "mm", lambda *given, **kept: (threads.add(torch.get_num_threads()), mm(*given, **kept)))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        peak_flops(CPU, "32-true")
    finally:
        torch.set_num_threads(before)
    assert threads == {2}


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


def test_layers_are_compiled_for_a_while(setup):
    for wanted in (True, False):
        with compiled(setup.module, wanted):
            assert (setup.module._compiled_call_impl is not None) == wanted
        assert setup.module._compiled_call_impl is None
    with (
        raises(OptionError, "gradient_checkpointing"),
        gradient_checkpointing(setup.module, True),
    ):
        pass
    with gradient_checkpointing(setup.module, None):
        pass


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_a_gpu_that_emulates_bfloat16_computes_in_float32(masked_setup, monkeypatch, native, precision):
    def is_bf16_supported(including_emulation=True):
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    assert choose_precision(masked_setup.module, masked_setup.data(), torch.device("cuda")) == precision


@pytest.mark.parametrize(
    ("devices", "number"), [("1,", 1), ("2,3", 2), ([3], 3), (2, 0), ("auto", 0), ("x,", 0)], ids=str
)
def test_the_device_that_is_tried_is_the_first_one_named(monkeypatch, devices, number):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert root_device("gpu", devices) == torch.device("cuda", number)


def test_sizes_are_tried_in_the_precision_of_the_training(masked_setup, monkeypatch):
    module, data = masked_setup.module, masked_setup.data(batch_size=None)
    seen, most = [], 2

    def step(module, data, batch):
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        if len(batch["input_ids"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("scforge.training.autotune._step", step)
    assert _by_trying(module, data, CPU, [1, 2, 4, 8], "bf16-mixed") == most
    assert _by_trying(module, data, CPU, [4], None) is None
    assert seen == [torch.bfloat16] * 3 + [None]
