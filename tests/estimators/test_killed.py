"""A training that is killed leaves whole checkpoints, whenever that happens."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from scforge.estimators import Encoder

SCRIPT = """
import anndata, torch
from scforge.estimators import Encoder
torch.set_num_threads(1)
adata = anndata.read_h5ad("cells.h5ad")
Encoder.setup_anndata(adata)
model = Encoder(adata, hidden_dim=16, ffn_dim=16, latent_dim=4)
model.train(100_000, early_stopping=False, lr=1e-4, progress_bar=False, checkpoint_dir="checkpoints", save_top_k=3)
"""


@pytest.mark.slow
def test_every_checkpoint_of_a_killed_training_is_whole(tiny_adata, tmp_path):
    tiny_adata.write_h5ad(tmp_path / "cells.h5ad")
    folder = tmp_path / "checkpoints"
    generator = np.random.default_rng(time.time_ns())
    for _ in range(2):
        running = subprocess.Popen([sys.executable, "-W", "ignore", "-c", SCRIPT], cwd=tmp_path)
        before = {path.name for path in folder.glob("epoch=*")}
        while running.poll() is None and {path.name for path in folder.glob("epoch=*")} <= before:
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.5))
        assert running.poll() is None, "the training ended by itself"
        running.kill()
        running.wait()
        saved = sorted(folder.glob("epoch=*"))
        assert saved
        for path in saved:
            model = Encoder.load(path)
            assert np.isfinite(model.get_latent_representation(tiny_adata.copy())).all()
