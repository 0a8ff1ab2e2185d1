import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch

from scforge.data import open_cells
from scforge.estimators import Encoder
from scforge.training import CellDataModule
from scforge.training.loading import BatchLoader

pytestmark = pytest.mark.slow

# Without dropout, whose draws are others in each process.
MODEL = {
    "architecture": "transformer_encoder",
    "tokenizer": "rank_value",
    "objective": {"name": "masked_gene_prediction"},
    "hidden_dim": 8,
    "num_layers": 2,
    "num_heads": 2,
    "ffn_dim": 16,
    "dropout": 0.0,
    "n_top_genes": 40,
}
TRAINING = {"max_epochs": 3, "lr": 1e-2, "early_stopping": False, "progress_bar": False, "accelerator": "cpu"}
BATCH, EPOCHS = 16, 3

SCRIPT = """
import json, os, sys
from pathlib import Path
import anndata, torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from lightning.pytorch.callbacks import Callback
from scforge.estimators import Encoder
from scforge.training.monitoring import make_loggers

torch.set_num_threads(1)
model_options, training = json.loads(sys.argv[2]), json.loads(sys.argv[3])
adata = anndata.read_h5ad(sys.argv[1])
rank = os.environ["RANK"]
# Each process has a folder of its own, so that it can be seen who writes.
folder = Path(f"rank{rank}")
folder.mkdir()
os.chdir(folder)
told = {}


class Parts(Callback):
    def on_train_start(self, trainer, pl_module):
        module = pl_module.module
        told["sharded"] = sorted({type(part).__name__ for part in module.modules() if isinstance(part, FSDPModule)})
        told["in_parts"] = all(isinstance(value, DTensor) for value in module.parameters())
        own = sum(value.to_local().numel() for value in module.parameters())
        told["share"] = own / sum(value.numel() for value in module.parameters())


def train(name, **options):
    Encoder.setup_anndata(adata)
    model = Encoder(adata, **model_options)
    model.train(devices=2, batch_size=16, **training, **options)
    told[name] = {key: frame[key].tolist() for key, frame in model.history_.items()}
    torch.save({key: value.clone() for key, value in model.module.state_dict().items()}, f"../{name}{rank}.pt")
    return model


train("ddp", strategy="ddp", checkpoint_dir="run", logger=make_loggers(["csv"], "logs"))
told["files"] = sorted(str(path) for path in Path().rglob("*"))
model = train("fsdp", strategy="fsdp", callbacks=[Parts()])
if rank == "0":
    model.save("../fsdp_model")
Path(f"../told{rank}.json").write_text(json.dumps(told))
"""


@pytest.fixture(scope="module")
def trained(many_adata: ad.AnnData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training by two processes, started by torchrun."""
    folder = tmp_path_factory.mktemp("distributed")
    many_adata.write_h5ad(folder / "cells.h5ad")
    (folder / "train.py").write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--log-dir=log", "--redirects=3"]
    given = ["train.py", str(folder / "cells.h5ad"), json.dumps(MODEL), json.dumps(TRAINING)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *launch, *given], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    logs = "".join(path.read_text()[-3000:] for path in folder.glob("log/**/stderr.log"))
    assert done.returncode == 0, done.stderr[-2000:] + logs
    return folder


def told(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"told{rank}.json").read_text())


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"{name}.pt", weights_only=True)


def determined(name: str, value: torch.Tensor) -> torch.Tensor:
    """Leave out the bias of keys: its gradient is rounding alone, of which Adam makes whole steps."""
    return value.unflatten(0, (3, -1))[[0, 2]] if name.endswith("qkv.bias") else value


class Both:
    """The batches of two processes in turn; Lightning tells `sampler` the epoch."""

    def __init__(self, loaders: list[BatchLoader]) -> None:
        self.loaders, self.sampler, self.batch_sampler = loaders, self, None

    def __len__(self) -> int:
        return sum(map(len, self.loaders))

    def __iter__(self):
        for pair in zip(*self.loaders, strict=True):
            yield from pair

    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders:
            loader.sampler.set_epoch(epoch)


class BothRanks(CellDataModule):
    """A data module of one process that has the training batches of two."""

    def train_dataloader(self) -> Both:
        trainer, loaders = self.trainer, []
        for rank in (0, 1):
            self.trainer = SimpleNamespace(global_rank=rank, world_size=2, current_epoch=trainer.current_epoch)
            loaders.append(super().train_dataloader())
        self.trainer = trainer
        return Both(loaders)


def test_ddp_computes_what_gradient_accumulation_does(trained, many_adata):
    adata = many_adata.copy()
    Encoder.setup_anndata(adata)
    model = Encoder(adata, **MODEL)
    data = BothRanks(open_cells(adata, model.vocab), batch_size=BATCH, seed=0)
    model.train(datamodule=data, accumulate_grad_batches=2, **TRAINING)
    first, second = weights(trained, "ddp0"), weights(trained, "ddp1")
    for name, value in model.module.state_dict().items():
        assert torch.equal(first[name], second[name]), "the processes have the same weights, to the bit"
        torch.testing.assert_close(determined(name, first[name]), determined(name, value), rtol=1e-5, atol=1e-5)
    losses = told(trained, 0)["ddp"]["train_loss"]
    np.testing.assert_allclose(losses, model.history_["train_loss"]["train_loss"], rtol=1e-5)
    assert losses[-1] < losses[0] - 0.05


def test_only_the_first_process_writes(trained):
    assert told(trained, 1)["files"] == []
    files = told(trained, 0)["files"]
    assert "logs/metrics.csv" in files
    assert any(name.startswith("run/epoch=") for name in files)
    rows = (trained / "rank0" / "logs" / "metrics.csv").read_text().splitlines()
    assert len(rows) > EPOCHS
    (said,) = [path.read_text() for path in trained.glob("log/*/attempt_0/1/stdout.log")]
    assert said == ""


def test_fsdp_shards_the_layers_and_computes_what_ddp_does(trained, many_adata):
    ddp, fsdp = weights(trained, "ddp0"), weights(trained, "fsdp0")
    for name, value in ddp.items():
        torch.testing.assert_close(determined(name, fsdp[name]), determined(name, value), rtol=1e-4, atol=1e-4)
    first, second = told(trained, 0), told(trained, 1)
    for found in (first, second):
        assert {"FSDPTransformerBlock", "FSDPTransformerEncoder"} <= {*found["sharded"]}
        assert found["in_parts"]
        assert abs(found["share"] - 0.5) < 0.05
    np.testing.assert_allclose(first["ddp"]["train_loss"], first["fsdp"]["train_loss"], rtol=1e-5)
    for name in ("ddp", "fsdp"):
        for loss in ("train_loss", "validation_loss"):
            assert first[name][loss] == second[name][loss], "processes have the same history"
    # A model trained in parts is whole.
    model = Encoder.load(trained / "fsdp_model")
    for name, value in fsdp.items():
        assert torch.equal(model.module.state_dict()[name], value)
    assert model.get_latent_representation(many_adata.copy()).shape == (700, 8)


RESUMED = """
import json, os, sys
from pathlib import Path
import anndata, torch
from scforge.estimators import Encoder

torch.set_num_threads(1)
folder, rank = Path(sys.argv[4]), os.environ["RANK"]
folder.with_name(f"{folder.name}{rank}.pid").write_text(str(os.getpid()))
adata = anndata.read_h5ad(sys.argv[1])
Encoder.setup_anndata(adata)
model = Encoder(adata, **json.loads(sys.argv[2]))
model.train(
    devices=2, strategy="ddp", batch_size=16, checkpoint_dir=folder, checkpoint_every_n_steps=5, resume="auto",
    **json.loads(sys.argv[3]),
)
torch.save(model.module.state_dict(), f"{folder}{rank}.pt")
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_ddp_resumes_after_a_process_was_killed(trained, tmp_path, rank):
    (tmp_path / "resumed.py").write_text(RESUMED)
    launch = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "resumed.py"]
    command = [sys.executable, *launch, str(trained / "cells.h5ad"), json.dumps(MODEL), json.dumps(TRAINING), "run"]
    quiet = {"cwd": tmp_path, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(command, env=environment, **quiet) as first:
        while first.poll() is None and not list(tmp_path.glob("run/step=*")):
            time.sleep(0.01)
        os.kill(int((tmp_path / f"run{rank}.pid").read_text()), signal.SIGKILL)
        assert first.wait(timeout=120) != 0
    assert not list(tmp_path.glob("run?.pt"))
    subprocess.run(command, env=environment, check=True, timeout=300, **quiet)
    for process in (0, 1):
        resumed = weights(tmp_path, f"run{process}")
        for name, value in weights(trained, "ddp0").items():
            assert torch.equal(resumed[name], value), "the weights of a training that was not interrupted"
