"""A training that is killed, whenever that happens, goes on to the very weights of one that was not."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from scforge.estimators import Encoder

SCRIPT = """
import sys
import anndata, torch
from scforge.estimators import Encoder
from scforge.training import make_loggers
torch.set_num_threads(1)
folder = sys.argv[1]
adata = anndata.read_h5ad("cells.h5ad")
Encoder.setup_anndata(adata)
model = Encoder(adata, "transformer_encoder", hidden_dim=16, num_layers=2, num_heads=2, max_seq_len=64)
model.train(
    int(sys.argv[2]), batch_size=8, early_stopping=False, lr=1e-3, progress_bar=False, accelerator="cpu",
    log_every_n_steps=1, checkpoint_dir=folder, checkpoint_every_n_steps=5, keep_last=2, save_top_k=2, resume="auto",
    logger=make_loggers(["csv"], folder + "/logs"),
)
model.save(folder + "/final", overwrite=True)
"""


def start(folder: Path, epochs: int) -> subprocess.Popen:
    # Lightning's note on its own packages comes from importing it.
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", SCRIPT, folder.name, str(epochs)], cwd=folder.parent)


def run_here(folder: Path, epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the training to its end in this process, which spares it the start of another."""
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(sys, "argv", ["", folder.name, str(epochs)])
    n_threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(SCRIPT, {})
    finally:
        torch.set_num_threads(n_threads)


def n_lines(folder: Path) -> int:
    path = folder / "logs" / "metrics.csv"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def end_at_random(folder: Path, epochs: int, how: int, generator: np.random.Generator) -> bool:
    """Start the training, end it some time after its first step, and return whether it had come to its own end."""
    running, before = start(folder, epochs), n_lines(folder)
    while running.poll() is None and n_lines(folder) in (before, 0):
        time.sleep(0.01)
    time.sleep(generator.uniform(0, 0.3))
    if running.poll() is not None:
        assert running.returncode == 0
        return True
    running.send_signal(how)
    running.wait()
    assert running.returncode == -how
    return False


def check_log(folder: Path, whole: Path) -> None:
    """Each step stands there once, and each epoch, with the losses of a training that was not interrupted."""
    logs = []
    for place in (folder, whole):
        with (place / "logs" / "metrics.csv").open(newline="") as handle:
            rows = list(csv.DictReader(handle))
        logs.append([(row["step"], row["step_loss"], row["train_loss"], row["validation_loss"]) for row in rows])
    steps = [int(step) for step, loss, *_ in logs[0] if loss]
    assert steps == list(range(1, steps[-1] + 1))
    assert logs[0] == logs[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epochs", "ends"),
    [
        (15, [signal.SIGKILL, signal.SIGTERM]),
        pytest.param(200, [signal.SIGKILL] * 20, marks=pytest.mark.exhaustive),
    ],
)
def test_the_weights_are_those_of_a_training_that_was_not_killed(many_adata, tmp_path, monkeypatch, epochs, ends):
    generator = np.random.default_rng(time.time_ns())
    folder, whole = tmp_path / "broken", tmp_path / "whole"
    many_adata[:120].copy().write_h5ad(tmp_path / "cells.h5ad")
    run_here(whole, epochs, monkeypatch)
    ended = 0
    for how in ends:
        if end_at_random(folder, epochs, how, generator):
            break
        ended += 1
        for path in folder.glob("[!.]*=*"):  # pathlib's star takes hidden folders too, and those are being written
            Encoder.load(path)  # whatever has its name is whole
    run_here(folder, epochs, monkeypatch)
    one, other = (load_file(place / "final" / "model.safetensors") for place in (folder, whole))
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
    check_log(folder, whole)
    assert not [path.name for path in folder.glob(".*") if path.name != ".lock"]
    assert ended > len(ends) // 2
