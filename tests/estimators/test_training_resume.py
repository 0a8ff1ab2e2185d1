import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from scforge._io import sha256_of_json
from scforge.config import load_config, recipe_path
from scforge.errors import MissingFileError, OptionError, ScforgeWarning, TrainingError
from scforge.estimators import Encoder
from scforge.testing import raises
from scforge.training.monitoring import make_loggers
from scforge.workflows.places import check_run

LIGHT = {"hidden_dim": 8, "ffn_dim": 8, "latent_dim": 4, "dropout": 0.1}
TRANSFORMER = {"architecture": "transformer_encoder", "hidden_dim": 8, "num_layers": 1, "num_heads": 2}
PLAIN = {"batch_size": 20, "progress_bar": False, "accelerator": "cpu"}
EARLY = {"max_epochs": 30, "lr": 1.0, "schedule": "constant", "early_stopping_patience": 1}


class Crash(Exception):
    pass


class CrashAfter(Callback):
    def __init__(self, step: int | None = None, epoch: int | None = None) -> None:
        self.step, self.epoch = step, epoch

    def on_train_batch_start(self, trainer, *args) -> None:
        if trainer.global_step == self.step:
            raise Crash

    def on_train_epoch_end(self, trainer, *args) -> None:
        if trainer.current_epoch == self.epoch:
            raise Crash


@pytest.fixture(scope="module")
def cells(many_adata: ad.AnnData) -> ad.AnnData:
    return many_adata[:60].copy()


@pytest.fixture(scope="module")
def whole(cells, tmp_path_factory) -> Encoder:
    model = make(cells)
    train(model, tmp_path_factory.mktemp("whole"))
    return model


@pytest.fixture
def broken(cells, tmp_path) -> Path:
    with pytest.raises(Crash):
        train(make(cells), tmp_path / "run", crash=5)
    return tmp_path / "run"


def make(adata: ad.AnnData, **options) -> Encoder:
    adata = adata.copy()
    Encoder.setup_anndata(adata, labels_key="group")
    return Encoder(adata, **(options or LIGHT))


def train(model: Encoder, folder: Path, *, crash: int | None = None, **options) -> None:
    given = {**PLAIN, "max_epochs": 3, "checkpoint_dir": folder, "checkpoint_every_n_steps": 1, "keep_last": 2}
    given |= {"logger": make_loggers(["csv"], folder / "logs"), "log_every_n_steps": 1, "early_stopping_patience": 2}
    model.train(**(given | options), callbacks=[] if crash is None else [CrashAfter(crash)])


def same_weights(one: Encoder, two: Encoder) -> bool:
    weights = one.module.state_dict(), two.module.state_dict()
    return all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "logs" / "metrics.csv").open(newline="") as handle:
        return list(csv.DictReader(handle))


def without_speed(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    speed = ("seconds", "cells_per_second", "tokens_per_second", "waiting", "utilization", "seconds_left")
    return [{name: value for name, value in row.items() if name not in speed} for row in rows]


KINDS = {
    "light": (LIGHT, {}),
    "one_cycle": (LIGHT, {"schedule": "one_cycle", "ema_decay": 0.9}),
    "transformer": (TRANSFORMER, {"accumulate_grad_batches": 2, "batch_size": 10}),
    "muon": (TRANSFORMER, {"optimizer": "muon", "max_tokens_per_batch": 900, "batch_size": None}),
    "early": (LIGHT, EARLY),
    "steps": (LIGHT, {"max_epochs": None, "max_steps": 8}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_outcome_is_that_of_a_training_that_was_never_interrupted(cells, tmp_path, kind):
    made_with, options = KINDS[kind]
    whole = make(cells, **made_with)
    train(whole, tmp_path / "whole", **options)
    n_steps = max(int(row["step"]) for row in rows(tmp_path / "whole"))
    # In the middle of an epoch, at its end, and again while it goes on.
    for crash in ([1, 3, 5], [n_steps - 1]):
        folder = tmp_path / f"broken{crash[0]}"
        for step in crash:
            with pytest.raises(Crash):
                train(make(cells, **made_with), folder, crash=step, resume="auto", **options)
        broken = make(cells, **made_with)
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


def test_a_finished_training_is_not_trained_again(cells, tmp_path, caplog):
    caplog.set_level("INFO", logger="scforge")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    whole, again = make(cells), make(cells)
    train(whole, tmp_path, resume="auto")  # where there is nothing yet
    before = rows(tmp_path)
    train(again, tmp_path, resume="auto", crash=0)
    assert re.search(r"The training in \S+ is complete: 3 epochs, 9 steps\.", caplog.text)
    assert "Resuming" not in caplog.text
    assert same_weights(whole, again)
    assert again.n_epochs_ == whole.n_epochs_ == 3
    assert rows(tmp_path) == before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize(
    ("made_with", "options", "named"),
    [
        ({}, {"lr": 0.5}, "lr=0.002 in the checkpoint, but 0.5 now"),
        ({}, {"max_epochs": 9, "optimizer": "muon"}, "optimizer='adamw' in the checkpoint, but 'muon' now"),
        ({}, {"validation_size": 0.2}, "n_cells=54 in the checkpoint, but 48 now"),
        ({"hidden_dim": 16}, {}, "architecture.hidden_dim=8 in the checkpoint, but 16 now"),
        ({"seed": 1}, {}, "seed=0 in the checkpoint, but 1 now"),
    ],
)
def test_another_training_is_refused(cells, broken, made_with, options, named):
    with pytest.raises(OptionError, match="the settings differ from") as error:
        train(make(cells, **LIGHT | made_with), broken, resume="auto", **options)
    assert named in str(error.value)


def change_counts(adata: ad.AnnData) -> None:
    adata.X.data[adata.X.indptr[7]] += 1


def change_genes(adata: ad.AnnData) -> None:
    adata.X.data[adata.X.indptr[7]] = 0
    adata.X.eliminate_zeros()


def change_batches(adata: ad.AnnData) -> None:
    adata.obs["donor"] = adata.obs["donor"].to_numpy()[::-1]


def change_names(adata: ad.AnnData) -> None:
    adata.var_names = [*adata.var_names[1:], "other"]


def change_nothing(adata: ad.AnnData) -> None:
    """Other types, the order of categories, and a column that is not used."""
    adata.X = adata.X.astype(np.int64)
    adata.obs["donor"] = adata.obs["donor"].cat.reorder_categories(adata.obs["donor"].cat.categories[::-1])
    adata.obs["other"] = np.arange(len(adata.obs))


@pytest.fixture
def run_of_batches(cells, tmp_path) -> Path:
    with pytest.raises(Crash):
        train(with_batches(cells), tmp_path / "run", crash=5)
    return tmp_path / "run"


def with_batches(adata: ad.AnnData) -> Encoder:
    adata = adata.copy()
    Encoder.setup_anndata(adata, batch_key="donor", labels_key="group")
    return Encoder(adata, **LIGHT)


@pytest.mark.filterwarnings("ignore:.* of the cells have no mutual neighbor in another batch")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_counts, r"\(counts\)"),
        (change_genes, r"\(genes of each cell, counts\)"),
        (change_batches, r"\(obs\['donor'\]\)"),
        (change_names, r"\(genes\)"),
        (change_nothing, None),
    ],
)
def test_other_data_are_refused(cells, run_of_batches, change, named):
    adata = cells.copy()
    change(adata)
    if named is None:
        train(with_batches(adata), run_of_batches, resume="auto")
        return
    with pytest.raises(OptionError, match="resume: the data differ from the data of the training run in") as error:
        train(with_batches(adata), run_of_batches, resume="auto")
    assert re.search(named, str(error.value))
    assert "; use the same data to resume, or start a new run in another folder" in str(error.value)


def test_other_labels_are_refused(cells, tmp_path):
    def annotator(adata: ad.AnnData, **options) -> None:
        model = Encoder.load(tmp_path / "base", adata=adata.copy())
        how = {**PLAIN, "max_epochs": 3, "checkpoint_dir": tmp_path / "tuned", "checkpoint_every_n_steps": 1}
        model.finetune(task="annotation", labels_key="group", lora=True, **(how | options))

    base = make(cells)
    train(base, tmp_path / "run")
    base.save(tmp_path / "base")
    with pytest.raises(Crash):
        annotator(cells, callbacks=[CrashAfter(3)])
    other = cells.copy()
    swapped = {"a": "b", "b": "a"}
    other.obs["group"] = [swapped.get(label, label) if i < 9 else label for i, label in enumerate(other.obs["group"])]
    with raises(OptionError, "resume"):
        annotator(other, resume="auto")
    annotator(cells, resume="auto")


def test_a_state_of_an_earlier_version(cells, broken, whole):
    for file in broken.glob("step=*/training/state.json"):
        content = json.loads(file.read_text())
        settings = content["state"]["settings"]
        for name in [name for name in settings if name.startswith("data: ")]:
            del settings[name]
        content["sha256"]["state"] = sha256_of_json(content["state"])
        file.write_text(json.dumps(content))
    other = make(cells)
    with pytest.warns(ScforgeWarning, match="earlier version of scforge, so it is not known whether the data are the"):
        train(other, broken, resume="auto")
    assert same_weights(whole, other)


def test_what_does_not_matter_may_change(cells, broken, whole):
    other = make(cells)
    harmless = {"num_threads": 0, "keep_last": 5, "save_top_k": 2, "early_stopping_patience": 9, "log_every_n_steps": 2}
    train(other, broken, resume="auto", **harmless)
    assert same_weights(whole, other)


@pytest.mark.parametrize("file", ["training/state.safetensors", "model.safetensors"])
def test_a_damaged_state_is_told_and_the_one_before_it_taken(cells, broken, whole, file):
    path = sorted(broken.glob("step=*"))[-1] / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    other = make(cells)
    with pytest.warns(ScforgeWarning, match=rf"{path.name}' is corrupted"):
        train(other, broken, resume="auto")
    assert same_weights(whole, other)


def test_a_state_by_name(cells, broken, whole, tmp_path):
    first, last = sorted(broken.glob("step=*"))  # keep_last
    assert np.isfinite(Encoder.load(last).get_latent_representation(cells, key_added=None)).all()
    other = make(cells)
    train(other, tmp_path / "other", resume=first)
    assert same_weights(whole, other)
    other.save(tmp_path / "model")
    for name, message in {"run/step=99999999": "does not exist", "model": "contains no training checkpoint"}.items():
        with pytest.raises(MissingFileError, match=message):
            train(make(cells), tmp_path / "new", resume=tmp_path / name)


def test_a_folder_with_another_training_is_not_touched(cells, broken):
    before = sorted(broken.rglob("*"))
    with raises(OptionError, "checkpoint_dir"):
        train(make(cells), broken)
    with pytest.raises(OptionError, match="bf17"):
        train(make(cells), broken, overwrite=True, precision="bf17")
    assert sorted(broken.rglob("*")) == before
    model = make(cells)
    train(model, broken, overwrite=True)
    assert model.n_epochs_ == 3
    assert len(list(broken.glob("epoch=*"))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overwrite": True, "checkpoint_dir": None}, "overwrite=True requires checkpoint_dir"),
        ({"resume": "auto", "overwrite": True}, "contradict each other"),
        ({"resume": True}, "resume=True must be 'auto'"),
        ({"checkpoint_every_n_steps": 0}, "checkpoint_every_n_steps=0"),
        ({"checkpoint_every_n_steps": 5, "checkpoint_dir": None}, "has no effect without checkpoint_dir"),
        ({"strategy": "dpp"}, "strategy='dpp' is not known; did you mean 'ddp'"),
        ({"ema_decay": 1}, "ema_decay=1 must be below 1"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing=True is not supported by GenePoolingModel"),
        ({"val_check_interval": 2}, "val_check_interval=2 does not work with checkpoint_dir"),
        (
            {"accelerator": "gpu", "devices": 4},
            "devices=4 with accelerator='gpu' requires more GPUs than this machine has",
        ),
    ],
)
def test_bad_options(cells, tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        train(make(cells), tmp_path, **options)


def test_the_state_of_a_callback_is_kept(cells, tmp_path):
    class Counts(Callback):
        def __init__(self) -> None:
            self.seen = torch.zeros(2, dtype=torch.int64)

        def on_train_batch_end(self, *args) -> None:
            self.seen += 1

        def state_dict(self) -> dict:
            return {"seen": self.seen, "nested": {"more": [1, (2.5, None)]}}

        def load_state_dict(self, state: dict) -> None:
            self.seen, self.nested = state["seen"], state["nested"]

    given = {**PLAIN, "max_epochs": 2, "checkpoint_dir": tmp_path, "checkpoint_every_n_steps": 1}
    with pytest.raises(Crash):
        make(cells).train(**given, callbacks=[Counts(), CrashAfter(2)])
    counts = Counts()
    make(cells).train(**given, callbacks=[counts], resume="auto")
    assert (counts.seen.tolist(), counts.nested) == ([6, 6], {"more": [1, (2.5, None)]})
    counts.state_dict = lambda: {"handle": object()}
    with pytest.raises(TrainingError, match="'object', which cannot be saved"):
        make(cells).train(**given, callbacks=[counts], overwrite=True)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit for files")
def test_a_full_disk_leaves_the_last_state_whole(cells, whole, tmp_path):
    import resource

    class FillsUp(Callback):
        """Allows no files of more than some kilobytes, as soon as a state is saved."""

        def on_train_batch_start(self, trainer, *args) -> None:
            if trainer.global_step == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, before[1]))

    model, again = make(cells), make(cells)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    given = {**PLAIN, "max_epochs": 3, "early_stopping": False, "checkpoint_dir": tmp_path / "run", "save_top_k": 1}
    given |= {"checkpoint_every_n_steps": 1, "keep_last": 2}
    try:
        with pytest.raises(
            TrainingError, match=r"step=00000002 cannot be written .*, but step=00000001 is complete; free disk"
        ):
            model.train(**given, callbacks=[FillsUp()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "run").glob(".step*"))
    again.train(**given, resume="auto")
    assert same_weights(again, whole)


def test_two_trainings_in_one_folder(cells, tmp_path):
    class Starts(Callback):
        def on_train_start(self, *args) -> None:
            train(make(cells), tmp_path)

    with raises(OptionError, "checkpoint_dir"):
        make(cells).train(1, **PLAIN, checkpoint_dir=tmp_path, callbacks=[Starts()])


def test_a_loss_that_is_no_number_leaves_the_best_epoch(cells, tmp_path):
    class Spoils(Callback):
        def on_train_batch_start(self, trainer, plan, batch, batch_idx) -> None:
            if trainer.global_step == 4:
                batch["values"].fill_(float("nan"))

    model = make(cells)
    with pytest.raises(TrainingError, match=r"loss is nan in batch 1 of epoch 1 \(step 4\)") as error:
        model.train(9, **PLAIN, checkpoint_dir=tmp_path, callbacks=[Spoils()])
    assert error.value.result.n_epochs == model.n_epochs_ == 1
    assert same_weights(model, Encoder.load(tmp_path / "epoch=00"))


def test_early_stopping_goes_on_where_it_was(cells, tmp_path):
    options = {**EARLY, "checkpoint_every_n_steps": None}
    whole, again, broken = (make(cells) for _ in range(3))
    train(whole, tmp_path / "whole", **options)
    assert whole.n_epochs_ < 30
    train(again, tmp_path / "whole", resume="auto", **options)  # it is over
    given = {**EARLY, **PLAIN, "checkpoint_dir": tmp_path / "run"}
    with pytest.raises(Crash):
        make(cells).train(**given, callbacks=[CrashAfter(epoch=whole.n_epochs_ - 1)])
    broken.train(**given, resume="auto")
    for model in (again, broken):
        assert same_weights(model, whole)
        assert model.n_epochs_ == whole.n_epochs_
    longer = make(cells)
    train(longer, tmp_path / "whole", resume="auto", **{**options, "early_stopping_patience": 3})
    assert longer.n_epochs_ > whole.n_epochs_


def test_the_warm_up_does_not_count_for_early_stopping(cells):
    model = make(cells)
    model.train(**EARLY | PLAIN | {"schedule": "cosine_warmup", "warmup_steps": 15})
    assert model.n_epochs_ > 5


def test_killed_before_the_first_state(cells, tmp_path):
    with pytest.raises(Crash):
        make(cells).train(2, **PLAIN, checkpoint_dir=tmp_path, callbacks=[CrashAfter(epoch=0)])
    assert [path.name for path in tmp_path.glob("*=*")] == ["epoch=00"]
    config = load_config(recipe_path("light"), [f"output.checkpoint_dir={tmp_path}"])
    check_run(config, resume="auto", overwrite=False)
    with raises(OptionError, "checkpoint_dir"):
        check_run(config, resume=None, overwrite=False)
    model = make(cells)
    model.train(2, **PLAIN, checkpoint_dir=tmp_path, resume="auto")
    assert model.n_epochs_ == 2


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epochs", "ends"),
    [(15, [signal.SIGKILL, signal.SIGTERM]), pytest.param(200, [signal.SIGKILL] * 20, marks=pytest.mark.exhaustive)],
)
def test_a_training_that_is_killed_has_the_weights_of_one_that_was_not(many_adata, tmp_path, monkeypatch, epochs, ends):
    generator = np.random.default_rng(time.time_ns())
    monkeypatch.chdir(tmp_path)
    many_adata[:120].copy().write_h5ad("cells.h5ad")

    def run_here(name: str) -> None:
        """Run the training to its end in this process, which spares it the start of another."""
        monkeypatch.setattr(sys, "argv", ["", name, str(epochs)])
        with warnings.catch_warnings(action="ignore"):
            exec(SCRIPT, {})

    def log() -> bytes:
        path = Path("broken/logs/metrics.csv")
        return path.read_bytes() if path.exists() else b""

    run_here("whole")
    ended = 0
    for how in ends:
        before = log()
        # Lightning's note on its own packages comes from importing it.
        running = subprocess.Popen([sys.executable, "-W", "ignore", "-c", SCRIPT, "broken", str(epochs)])
        while running.poll() is None and log().count(b"\n") in (before.count(b"\n"), 0):
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.3))
        if running.poll() is not None:
            assert running.returncode == 0
            break
        running.send_signal(how)
        assert running.wait() == -how
        ended += 1
        for path in Path("broken").glob("[!.]*=*"):  # pathlib's star takes hidden folders too, which are being written
            Encoder.load(path)  # whatever has its name is whole
    run_here("broken")
    assert same_weights(*(Encoder.load(f"{name}/final") for name in ("broken", "whole")))
    logged = without_speed(rows(tmp_path / "broken"))
    assert logged == without_speed(rows(tmp_path / "whole"))
    steps = [int(row["step"]) for row in logged if row["step_loss"]]
    assert steps == list(range(1, steps[-1] + 1))
    assert not [path.name for path in Path("broken").glob(".*") if path.name != ".lock"]
    assert ended > len(ends) // 2
