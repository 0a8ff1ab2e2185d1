"""A training that ended in the middle goes on as if it never had."""

from __future__ import annotations

import csv
import os
import re
import signal
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from scforge.config import load_config, recipe_path
from scforge.errors import MissingFileError, OptionError, ScforgeWarning, TrainingError
from scforge.estimators import Encoder
from scforge.estimators.config_start import check_run
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
    "sgd": (LIGHT, {"optimizer": "sgd", "schedule": "linear"}),
    "early": (LIGHT, {"max_epochs": 30, "lr": 1.0, "schedule": "constant", "early_stopping_patience": 1}),
    "steps": (LIGHT, {"max_epochs": None, "max_steps": 8}),
    "bf16": (TRANSFORMER, {"precision": "bf16-mixed"}),
}


@pytest.mark.slow
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


@pytest.fixture
def broken(tiny_adata, tmp_path) -> Path:
    """The folder of a training that broke off after five of nine steps."""
    with pytest.raises(Crash):
        train(make(tiny_adata), tmp_path / "run", crash=5)
    return tmp_path / "run"


def test_a_finished_training_is_not_trained_again(tiny_adata, tmp_path, caplog):
    caplog.set_level("INFO", logger="scforge")
    whole, again = make(tiny_adata), make(tiny_adata)
    train(whole, tmp_path)
    before = rows(tmp_path)
    train(again, tmp_path, resume="auto", crash=0)
    assert re.search(r"The training in \S+ is already complete: 3 epochs, 9 steps\.", caplog.text)
    assert "Resuming" not in caplog.text
    assert same_weights(whole, again)
    assert again.n_epochs_ == whole.n_epochs_
    assert rows(tmp_path) == before


def test_auto_starts_where_there_is_nothing(tiny_adata, tmp_path):
    model = make(tiny_adata)
    train(model, tmp_path / "new", resume="auto")
    assert model.n_epochs_ == 3


@pytest.mark.slow
def test_a_training_of_constant_learning_rate_may_become_longer(tiny_adata, tmp_path):
    options = {"schedule": "constant", "early_stopping": False}
    short, long, whole = (make(tiny_adata) for _ in range(3))
    train(short, tmp_path / "run", max_epochs=2, **options)
    train(long, tmp_path / "run", max_epochs=4, resume="auto", **options)
    train(whole, tmp_path / "whole", max_epochs=4, **options)
    assert same_weights(long, whole)
    assert (short.n_epochs_, long.n_epochs_) == (2, 4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr": 0.5}, "lr=0.002 there, 0.5 here"),
        ({"batch_size": 10}, "batch_size=20 there, 10 here"),
        ({"max_epochs": 9, "optimizer": "muon"}, "optimizer='adamw' there, 'muon' here"),
        ({"validation_size": 0.2}, "n_cells=54 there, 48 here"),
    ],
)
def test_another_training_is_refused(tiny_adata, broken, options, named):
    with pytest.raises(OptionError, match="had other settings") as error:
        train(make(tiny_adata), broken, resume="auto", **options)
    assert named in str(error.value)


def test_another_model_or_other_data_are_refused(tiny_adata, broken):
    with pytest.raises(OptionError, match=r"architecture\.hidden_dim=8 there, 16 here"):
        train(make(tiny_adata, **(LIGHT | {"hidden_dim": 16})), broken, resume="auto")
    with pytest.raises(OptionError, match="seed=0 there, 1 here"):
        train(make(tiny_adata, **LIGHT, seed=1), broken, resume="auto")
    with pytest.raises(OptionError, match="other settings"):
        train(make(tiny_adata[:50].copy()), broken, resume="auto")


def test_what_does_not_matter_may_change(tiny_adata, broken, tmp_path):
    whole, other = make(tiny_adata), make(tiny_adata)
    train(whole, tmp_path / "whole")
    harmless = {"num_threads": 0, "keep_last": 5, "save_top_k": 2, "early_stopping_patience": 9, "log_every_n_steps": 2}
    train(other, broken, resume="auto", **harmless)
    assert same_weights(whole, other)


def test_a_damaged_state_is_told_and_the_one_before_it_taken(tiny_adata, broken, tmp_path):
    last = sorted(broken.glob("step=*"))[-1]
    tensors = last / "training" / "state.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    whole, other = make(tiny_adata), make(tiny_adata)
    train(whole, tmp_path / "whole")
    with pytest.warns(ScforgeWarning, match=r"state\.safetensors' is corrupted"):
        train(other, broken, resume="auto")
    assert same_weights(whole, other)


def test_a_state_by_name(tiny_adata, broken, tmp_path):
    first = sorted(broken.glob("step=*"))[0]
    whole, other = make(tiny_adata), make(tiny_adata)
    train(whole, tmp_path / "whole")
    train(other, tmp_path / "other", resume=first)
    assert same_weights(whole, other)
    with pytest.raises(MissingFileError, match="does not exist"):
        train(make(tiny_adata), tmp_path / "new", resume=broken / "step=99999999")
    other.save(tmp_path / "model")
    with pytest.raises(MissingFileError, match="holds no state of a training"):
        train(make(tiny_adata), tmp_path / "new", resume=tmp_path / "model")


def test_a_folder_with_another_training_is_not_touched(tiny_adata, broken):
    before = sorted(broken.rglob("*"))
    with pytest.raises(OptionError, match=r"holds a training already .* resume='auto' .* overwrite=True"):
        train(make(tiny_adata), broken)
    assert sorted(broken.rglob("*")) == before
    model = make(tiny_adata)
    train(model, broken, overwrite=True)
    assert model.n_epochs_ == 3
    assert len(list(broken.glob("epoch=*"))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": "auto", "checkpoint_dir": None}, "resume='auto' needs checkpoint_dir"),
        ({"overwrite": True, "checkpoint_dir": None}, "overwrite=True needs checkpoint_dir"),
        ({"resume": "auto", "overwrite": True}, "contradict each other"),
        ({"resume": True}, "resume=True is neither"),
        ({"keep_last": 0}, "keep_last=0"),
        ({"checkpoint_every_n_steps": 0}, "checkpoint_every_n_steps=0"),
        ({"strategy": "dpp"}, "strategy='dpp' is not known; did you mean 'ddp'"),
        ({"ema_decay": 1}, "ema_decay=1 averages nothing"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing=True, but GenePoolingModel cannot"),
        ({"limit_train_batches": 2}, "limit_train_batches=2 does not go with checkpoint_dir"),
        ({"val_check_interval": 2}, "val_check_interval=2 does not go with checkpoint_dir"),
        ({"accelerator": "gpu", "devices": 4}, "devices=4 with accelerator='gpu', but this machine has"),
    ],
)
def test_bad_options(tiny_adata, tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        train(make(tiny_adata), tmp_path, **options)


def test_states_are_models(tiny_adata, broken):
    last = sorted(broken.glob("step=*"))[-1]
    embedding = Encoder.load(last).get_latent_representation(tiny_adata.copy())
    assert np.isfinite(embedding).all()
    assert len(list(broken.glob("step=*"))) == 2  # keep_last


def test_the_state_of_a_callback_is_kept(tiny_adata, tmp_path):
    class Counts(Callback):
        def __init__(self) -> None:
            self.seen = torch.zeros(2, dtype=torch.int64)

        def on_train_batch_end(self, *args) -> None:
            self.seen += 1

        def state_dict(self) -> dict:
            return {"seen": self.seen, "nested": {"more": [1, (2.5, None)]}}

        def load_state_dict(self, state: dict) -> None:
            assert state["nested"] == {"more": [1, (2.5, None)]}
            self.seen = state["seen"]

    given = {"max_epochs": 2, "batch_size": 20, "progress_bar": False, "accelerator": "cpu"}
    given |= {"checkpoint_dir": tmp_path, "checkpoint_every_n_steps": 1}
    with pytest.raises(Crash):
        make(tiny_adata).train(**given, callbacks=[Counts(), CrashAfter(2)])
    counts = Counts()
    make(tiny_adata).train(**given, callbacks=[counts], resume="auto")
    assert counts.seen.tolist() == [6, 6]

    class Odd(Counts):
        def state_dict(self) -> dict:
            return {"handle": object()}

    with pytest.raises(TrainingError, match="'object', which cannot be saved"):
        make(tiny_adata).train(**(given | {"checkpoint_dir": tmp_path / "odd"}), callbacks=[Odd()])


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit for files")
def test_a_full_disk_leaves_the_last_state_whole(tiny_adata, tmp_path):
    import resource

    class FillsUp(Callback):
        """Allows no files of more than some kilobytes, as soon as a state is saved."""

        def on_train_batch_start(self, trainer, *args) -> None:
            if trainer.global_step == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, before[1]))

    whole, model, again = (make(tiny_adata) for _ in range(3))
    train(whole, tmp_path / "whole", early_stopping=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    given = {"max_epochs": 3, "batch_size": 20, "progress_bar": False, "accelerator": "cpu", "early_stopping": False}
    given |= {"checkpoint_dir": tmp_path / "run", "checkpoint_every_n_steps": 1, "keep_last": 2, "save_top_k": 1}
    try:
        with pytest.raises(
            TrainingError, match=r"step=00000002 cannot be written .*; step=00000001 is whole; make room"
        ):
            model.train(**given, callbacks=[FillsUp()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "run").glob(".step*"))
    again.train(**given, resume="auto")
    assert same_weights(again, whole)


def test_two_trainings_in_one_folder(tiny_adata, tmp_path):
    class Starts(Callback):
        def on_train_start(self, *args) -> None:
            train(make(tiny_adata), tmp_path)

    with pytest.raises(OptionError, match="is in use by another training"):
        make(tiny_adata).train(1, progress_bar=False, accelerator="cpu", checkpoint_dir=tmp_path, callbacks=[Starts()])


def test_a_loss_that_is_no_number_leaves_the_best_epoch(tiny_adata, tmp_path):
    class Spoils(Callback):
        def on_train_batch_start(self, trainer, plan, batch, batch_idx) -> None:
            if trainer.global_step == 4:
                batch["values"].fill_(float("nan"))

    model = make(tiny_adata)
    given = {"max_epochs": 9, "batch_size": 20, "progress_bar": False, "accelerator": "cpu"}
    with pytest.raises(TrainingError, match=r"loss is nan in batch 1 of epoch 1 \(step 4\)") as error:
        model.train(**given, checkpoint_dir=tmp_path, callbacks=[Spoils()])
    assert error.value.result.n_epochs == model.n_epochs_ == 1
    assert same_weights(model, Encoder.load(tmp_path / "epoch=00"))


class CrashAtEnd(Callback):
    """Breaks off after the validation of an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_end(self, trainer, *args) -> None:
        if trainer.current_epoch == self.epoch:
            raise Crash


EARLY = {"max_epochs": 30, "lr": 1.0, "schedule": "constant", "early_stopping_patience": 1}


def test_early_stopping_goes_on_where_it_was(tiny_adata, tmp_path):
    options = {**EARLY, "checkpoint_every_n_steps": None}
    whole, again, broken = (make(tiny_adata) for _ in range(3))
    train(whole, tmp_path / "whole", **options)
    assert whole.n_epochs_ < 30
    train(again, tmp_path / "whole", resume="auto", **options)  # it is over
    folder = {"checkpoint_dir": tmp_path / "run", "batch_size": 20, "progress_bar": False, "accelerator": "cpu"}
    with pytest.raises(Crash):
        make(tiny_adata).train(**EARLY, **folder, callbacks=[CrashAtEnd(whole.n_epochs_ - 1)])
    broken.train(**EARLY, **folder, resume="auto")
    for model in (again, broken):
        assert same_weights(model, whole)
        assert model.n_epochs_ == whole.n_epochs_
    longer = make(tiny_adata)
    train(longer, tmp_path / "whole", resume="auto", **{**options, "early_stopping_patience": 3})
    assert longer.n_epochs_ > whole.n_epochs_


def test_the_warm_up_does_not_count_for_early_stopping(tiny_adata):
    model = make(tiny_adata)
    options = {**EARLY, "schedule": "cosine_warmup", "warmup_steps": 15}
    model.train(**options, batch_size=20, progress_bar=False, accelerator="cpu")
    assert model.n_epochs_ > 5


def test_killed_before_the_first_state(tiny_adata, tmp_path):
    given = {"max_epochs": 2, "batch_size": 20, "progress_bar": False, "accelerator": "cpu"}
    with pytest.raises(Crash):
        make(tiny_adata).train(**given, checkpoint_dir=tmp_path, callbacks=[CrashAtEnd(0)])
    assert [path.name for path in tmp_path.glob("*=*")] == ["epoch=00"]
    model = make(tiny_adata)
    model.train(**given, checkpoint_dir=tmp_path, resume="auto")
    assert model.n_epochs_ == 2


def test_an_epoch_that_a_callback_cut_short_goes_on(tiny_adata, tmp_path):
    class Stops(Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            trainer.should_stop = trainer.global_step == 4

    whole, other = make(tiny_adata), make(tiny_adata)
    given = {"max_epochs": 3, "batch_size": 20, "progress_bar": False, "accelerator": "cpu", "early_stopping": False}
    whole.train(**given)
    make(tiny_adata).train(**given, checkpoint_dir=tmp_path, callbacks=[Stops()])
    other.train(**given, checkpoint_dir=tmp_path, resume="auto")
    assert same_weights(whole, other)


def test_damaged_weights_of_a_state(tiny_adata, broken, tmp_path):
    weights = sorted(broken.glob("step=*"))[-1] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    whole, other = make(tiny_adata), make(tiny_adata)
    train(whole, tmp_path / "whole")
    with pytest.warns(ScforgeWarning, match=r"model\.safetensors' is corrupted"):
        train(other, broken, resume="auto")
    assert same_weights(whole, other)


def test_nothing_is_removed_before_the_options_are_checked(tiny_adata, broken):
    before = sorted(broken.rglob("*"))
    with pytest.raises(OptionError, match="bf17"):
        train(make(tiny_adata), broken, overwrite=True, precision="bf17")
    assert sorted(broken.rglob("*")) == before


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_signals_are_handed_back(tiny_adata, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train(make(tiny_adata), tmp_path)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_benchmarks_score_the_average(tiny_adata):
    class Looks(Callback):
        def on_validation_end(self, trainer, plan) -> None:
            self.seen = {name: value.clone() for name, value in plan.module.state_dict().items()}

    model, looks = make(tiny_adata), Looks()
    model.train(1, batch_size=20, progress_bar=False, accelerator="cpu", ema_decay=0.9, callbacks=[looks])
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, looks.seen[name])


def test_a_file_goes_on_where_only_an_epoch_was_kept(tiny_adata, tmp_path):
    config = load_config(recipe_path("light"), [f"output.checkpoint_dir={tmp_path}"])
    (tmp_path / "epoch=00").mkdir()
    check_run(config, resume="auto", overwrite=False)
    with pytest.raises(OptionError, match="holds a training already"):
        check_run(config, resume=None, overwrite=False)
