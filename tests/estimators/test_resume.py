"""A training that ended in the middle goes on as if it never had."""

from __future__ import annotations

import csv
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from scforge.errors import ModelFileError, OptionError, ScforgeWarning, TrainingError
from scforge.estimators import Encoder
from scforge.training import make_loggers

LIGHT = {"hidden_dim": 8, "ffn_dim": 8, "latent_dim": 4, "dropout": 0.1}
TRANSFORMER = {"architecture": "transformer_encoder", "hidden_dim": 8, "num_layers": 1, "num_heads": 2}


class Crash(Exception):
    pass


class CrashAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, *args) -> None:
        if trainer.global_step == self.step:
            raise Crash


def make(adata: ad.AnnData, **options) -> Encoder:
    adata = adata.copy()
    Encoder.setup_anndata(adata, labels_key="group")
    return Encoder(adata, **(options or LIGHT))


def train(model: Encoder, folder: Path, *, crash: int | None = None, **options) -> None:
    given = {"max_epochs": 3, "batch_size": 20, "progress_bar": False, "accelerator": "cpu", "keep_last": 2}
    given |= {"checkpoint_every_n_steps": 1, "checkpoint_dir": folder, "early_stopping_patience": 2}
    given |= {"logger": make_loggers(["csv"], folder / "logs"), "log_every_n_steps": 1}
    callbacks = [] if crash is None else [CrashAfter(crash)]
    model.train(**(given | options), callbacks=callbacks)


def same_weights(one: Encoder, two: Encoder) -> bool:
    weights = one.module.state_dict(), two.module.state_dict()
    return all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "logs" / "metrics.csv").open(newline="") as handle:
        return list(csv.DictReader(handle))


def without_speed(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    speed = ("seconds", "cells_per_second", "tokens_per_second", "waiting", "utilisation", "seconds_left")
    return [{name: value for name, value in row.items() if name not in speed} for row in rows]


KINDS = {
    "light": (LIGHT, {}),
    "one_cycle": (LIGHT, {"schedule": "one_cycle", "ema_decay": 0.9}),
    "transformer": (TRANSFORMER, {"accumulate_grad_batches": 2, "batch_size": 10}),
    "muon": (TRANSFORMER, {"optimizer": "muon", "max_tokens_per_batch": 900, "batch_size": None}),
    "early": (LIGHT, {"max_epochs": 30, "lr": 1.0, "schedule": "constant", "early_stopping_patience": 1}),
    "steps": (LIGHT, {"max_epochs": None, "max_steps": 8}),
    "bf16": (TRANSFORMER, {"precision": "bf16-mixed"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_outcome_is_that_of_a_training_that_was_never_interrupted(tiny_adata, tmp_path, kind):
    made_with, options = KINDS[kind]
    whole = make(tiny_adata, **made_with)
    train(whole, tmp_path / "whole", **options)
    n_steps = max(int(row["step"]) for row in rows(tmp_path / "whole"))
    # In the middle of an epoch, at its end, and again while it goes on.
    for crash in ([1, 3, 5], [n_steps - 1]):
        folder = tmp_path / f"broken{crash[0]}"
        for step in crash:
            with pytest.raises(Crash):
                train(make(tiny_adata, **made_with), folder, crash=step, resume="auto", **options)
        broken = make(tiny_adata, **made_with)
        train(broken, folder, resume="auto", **options)
        assert same_weights(broken, whole)
        assert broken.n_epochs_ == whole.n_epochs_
        for name, frame in whole.history_.items():
            if name != "seconds":
                np.testing.assert_array_equal(broken.history_[name], frame)
        assert without_speed(rows(folder)) == without_speed(rows(tmp_path / "whole"))
        assert sorted(path.name for path in folder.glob("*=*")) == sorted(
            path.name for path in (tmp_path / "whole").glob("*=*")
        )
