"""Two processes, each with cells of its own, compute the SIGReg of all cells: over gloo, with DDP."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from scforge.models.components import SIGReg

pytestmark = pytest.mark.slow
SCRIPT = """
import json, sys, datetime
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from scforge.models.components import SIGReg

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
)
given = torch.load(sys.argv[3], weights_only=True)
model = nn.Linear(6, 4)
model.load_state_dict(given["weights"])
ddp, sigreg = DistributedDataParallel(model), SIGReg(32)
cells = given[f"cells{rank}"]
torch.manual_seed(7 + rank)  # directions of another seed, were they not those of the first process
loss = sigreg(ddp(cells))
loss.backward()
told = {"loss": loss.item(), "grad": model.weight.grad.tolist(), "bias": model.bias.grad.tolist()}
with torch.no_grad():
    told["alone"] = sigreg.compute(model(cells), given["noise"]).item()
    if rank == 0:  # without a gradient no process waits for another
        told["validation"] = sigreg(model(cells)).item()
told["not synced"] = SIGReg(32, sync=False)(model(cells)).item()
json.dump(told, open(sys.argv[4], "w"))
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def given() -> dict:
    torch.manual_seed(0)
    cells = {"cells0": torch.randn(2, 30, 6) + 1, "cells1": 2 * torch.randn(2, 14, 6)}
    return cells | {"noise": torch.randn(4, 32), "weights": nn.Linear(6, 4).state_dict()}


@pytest.fixture(scope="module")
def told(given, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("processes")
    torch.save(given, folder / "given.pt")
    (folder / "script.py").write_text(SCRIPT)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, "script.py", str(rank), str(folder / "store"), "given.pt", f"told{rank}.json"],
            cwd=folder,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    return [json.loads((folder / f"told{rank}.json").read_text()) for rank in range(2)]


def model_of(given) -> nn.Linear:
    model = nn.Linear(6, 4)
    model.load_state_dict(given["weights"])
    return model


def test_loss_and_gradients_are_those_of_all_cells(given, told):
    model, sigreg = model_of(given), SIGReg(32)
    torch.manual_seed(7)
    loss = sigreg(model(torch.cat([given["cells0"], given["cells1"]], dim=1)))
    loss.backward()
    for process in told:
        assert process["loss"] == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(torch.tensor(process["grad"]), model.weight.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.tensor(process["bias"]), model.bias.grad, rtol=1e-4, atol=1e-5)


def test_without_a_gradient_or_sync_processes_are_alone(given, told):
    model, sigreg = model_of(given), SIGReg(32)
    for rank, process in enumerate(told):
        expected = sigreg.compute(model(given[f"cells{rank}"]), given["noise"]).item()
        assert process["alone"] == pytest.approx(expected, rel=1e-5)
    assert told[0]["not synced"] != pytest.approx(told[1]["not synced"], rel=1e-2)
    assert told[0]["validation"] > 0
