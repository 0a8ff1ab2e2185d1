import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError, ScforgeWarning, TrainingError
from scforge.estimators import Encoder
from scforge.estimators.training import calibrate, training_data
from scforge.models._utils import count_parameters
from scforge.testing import raises
from scforge.training import CellDataModule, TrainOptions

QUICK = {"max_epochs": 1, "batch_size": 32, "progress_bar": False, "accelerator": "cpu", "num_threads": 0}
SMALL = {"hidden_dim": 16, "num_layers": 3, "num_heads": 2, "ffn_dim": 16, "n_top_genes": 60, "dropout": 0.0}


def split_of(model: Encoder) -> Any:
    return model.fitted.split_of(model.open_cells())


@pytest.fixture(scope="module")
def cells(many_adata: ad.AnnData) -> ad.AnnData:
    return many_adata[:200].copy()


@pytest.fixture(scope="module")
def base(cells: ad.AnnData) -> Encoder:
    Encoder.setup_anndata(cells)
    model = Encoder(cells, "transformer_encoder", **SMALL)
    model.train(**QUICK)
    return model


@pytest.fixture
def tune(base: Encoder, cells: ad.AnnData) -> Callable[..., Encoder]:
    def tune(task="annotation", adata=None, **options) -> Encoder:
        options = {"labels_key": "group", **QUICK, **options}
        return base.finetune(task, cells if adata is None else adata, **options)

    return tune


@pytest.fixture(scope="module")
def annotator(base: Encoder, cells: ad.AnnData) -> Encoder:
    return base.finetune("annotation", cells, labels_key="group", **(QUICK | {"max_epochs": 3}))


@pytest.fixture(scope="module")
def saved(annotator: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model"
    annotator.save(path)
    return path


@pytest.fixture(scope="module")
def adapted(base: Encoder, cells: ad.AnnData) -> Encoder:
    options = QUICK | {"max_epochs": 3, "lr": 1e-2}
    return base.finetune("annotation", cells, labels_key="group", lora={"r": 2}, **options)


def changed(base: Encoder, tuned: Encoder) -> set[str]:
    after = tuned.fitted.backbone.state_dict()
    return {name for name, value in base.module.state_dict().items() if not value.equal(after[name])}


def test_the_base_model_stays_as_it_is(base: Encoder, tune: Callable[..., Encoder], tmp_path: Path) -> None:
    before, wanted = copy.deepcopy(base.module.state_dict()), [p.requires_grad for p in base.module.parameters()]
    for options in ({}, {"freeze": True}, {"freeze": 1}, {"lora": True}):
        tuned = tune(**options)
    tuned.save(tmp_path / "adapter", adapter_only=True)
    adapted = Encoder.load(tmp_path / "adapter", base=base)
    adapted.merge_adapter()
    assert all(parameter.requires_grad for parameter in adapted.fitted.backbone.parameters())
    assert base.spec.tuning is None
    assert all(value.equal(before[name]) for name, value in base.module.state_dict().items())
    assert [parameter.requires_grad for parameter in base.module.parameters()] == wanted


def test_a_folder_brings_it_back(annotator: Encoder, base: Encoder, cells: ad.AnnData, saved: Path) -> None:
    again, found = Encoder.load(saved, cells), annotator.predict(cells)
    assert (cells.obs["scforge_group"] == cells.obs["group"].astype(str)).mean() > 0.8
    pd.testing.assert_frame_equal(again.predict(cells.copy()), found)
    metrics = annotator.evaluate()
    assert "frozen_embedding" in metrics.index
    assert cells.uns["scforge"]["metrics"].equals(metrics)
    for other in (annotator.evaluate(), again.evaluate(base=base)):
        pd.testing.assert_frame_equal(other, metrics)
    bare = Encoder.load(saved)
    with raises(OptionError, "adata"):
        bare.predict()
    assert bare.history_["validation_macro_f1"].equals(annotator.history_["validation_macro_f1"])


def test_differences_from_baselines_have_intervals(annotator: Encoder, cells: ad.AnnData) -> None:
    """The interval of a difference in accuracy is that of a paired t-test over cells."""
    metrics = annotator.evaluate()
    table = cells.uns["scforge"]["metrics_differences"].set_index(["method", "score"])
    assert set(table.index.get_level_values("method")) == set(metrics.index) - {"scforge"}
    for (method, score), row in table.iterrows():
        assert row["difference"] == pytest.approx(metrics.loc["scforge", score] - metrics.loc[method, score])
        is_tie = row["low"] <= 0 <= row["high"]
        assert (row["verdict"] == "tie") == is_tie or row["verdict"] == ""
    row = table.loc[("majority_class", "accuracy")]
    test = split_of(annotator).test
    truth, found = cells.obs["group"].astype(str).iloc[test], annotator.predict(cells)["label"].astype(str).iloc[test]
    most = cells.obs["group"].astype(str).iloc[split_of(annotator).train].mode()[0]
    gain = (found == truth).astype(float) - (truth == most)
    assert row["high"] - row["difference"] == pytest.approx(1.96 * gain.std() / np.sqrt(len(gain)), rel=0.35)
    assert row["verdict"] == "better"
    copied = cells.copy()
    copied.obs["donor"] = np.resize(["a", "b", "c", "d", "e"], copied.n_obs)
    copied.obs["few"] = np.resize(["a", "b"], copied.n_obs)
    annotator.evaluate(copied, groups_key="donor")
    by_donor = copied.uns["scforge"].pop("metrics_differences")
    assert (by_donor["difference"].to_numpy() == table["difference"].to_numpy()).all()
    assert not by_donor["low"].equals(table["low"].reset_index(drop=True))
    with pytest.warns(ScforgeWarning, match="groups_key='few' has only 2 scored groups; .* tests need at least 4"):
        annotator.evaluate(copied, groups_key="few")
    with raises(DataError, "groups_key"):
        annotator.evaluate(copied, groups_key="nope")
    copied.obs["gaps"] = copied.obs["donor"].where(copied.obs["donor"] != "a")
    with raises(DataError, "groups_key"):
        annotator.evaluate(copied, groups_key="gaps")
    for off in ("intervals", "baselines"):
        with raises(OptionError, "groups_key"):
            annotator.evaluate(copied, groups_key="donor", **{off: False})
    assert "metrics_differences" not in copied.uns["scforge"]


@pytest.mark.filterwarnings("ignore:the model before fine-tuning is not available")
@pytest.mark.filterwarnings("ignore:The cells used for fine-tuning are not available")
def test_cells_are_known_by_their_counts(annotator: Encoder, cells, many_adata: ad.AnnData, saved: Path) -> None:
    """Neither names, nor the order, nor columns, nor the kind of file make cells new that a model learned from."""
    split, loaded = split_of(annotator), Encoder.load(saved)
    renamed = cells[::-1].copy()
    renamed.obs_names = [f"other{i}" for i in range(renamed.n_obs)]
    cells.write_h5ad(saved.parent / "cells.h5ad")
    for model, data in ((annotator, renamed), (annotator, saved.parent / "cells.h5ad"), (loaded, cells.copy())):
        assert model.evaluate(data, baselines=False).loc["scforge", "n_scored"] == len(split.test)
    with pytest.raises(OptionError, match="learned from 20 of these 20 cells; pass other cells"):
        annotator.evaluate(cells[split.train[:20]].copy())
    some = np.concatenate([split.train[:20], split.validation[:3], split.test])
    with pytest.warns(ScforgeWarning, match="learned from 23 of the"):
        assert annotator.evaluate(cells[some].copy()).loc["scforge", "n_scored"] == len(split.test)
    metrics = loaded.evaluate(many_adata[300:340].copy())
    assert (metrics.loc["scforge", "n_scored"], list(metrics.index)) == (40, ["scforge"])
    with raises(OptionError, "datamodule"):
        annotator.train(1, datamodule=CellDataModule(annotator.open_cells()), progress_bar=False)
    fewer = cells[np.sort(np.concatenate([split.train[5:], split.test[:4]]))].copy()
    model = Encoder.load(saved, fewer)
    with pytest.warns(ScforgeWarning, match="these cells are not scored"):
        assert model.evaluate(baselines=False).loc["scforge", "n_scored"] == 4
    with pytest.raises(DataError, match="not exactly the cells used"):
        model.train(**QUICK)


@pytest.mark.slow
def test_going_on_ends_where_a_whole_fine_tuning_does(tune: Callable[..., Encoder], tmp_path: Path) -> None:
    options = {"max_epochs": 3, "early_stopping": False, "lora": True, "checkpoint_every_n_steps": 2}
    whole = tune(checkpoint_dir=tmp_path / "whole", **options)

    class Stop(Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            if trainer.global_step == 7:
                raise RuntimeError("killed")

    options["checkpoint_dir"] = tmp_path / "broken"
    with pytest.raises(RuntimeError, match="killed"):
        tune(callbacks=[Stop()], **options)
    again = tune(resume="auto", **options)
    found = again.module.state_dict()
    assert all(value.equal(found[name]) for name, value in whole.module.state_dict().items())
    assert again.history_["validation_loss"].equals(whole.history_["validation_loss"])
    with pytest.raises(OptionError, match="lora"):
        tune(resume="auto", **(options | {"lora": {"r": 3}}))


@pytest.mark.slow
def test_freezing(base: Encoder, tune: Callable[..., Encoder]) -> None:
    assert changed(base, tune(freeze=True)) == set()
    all_ = changed(base, tune())
    part = changed(base, tune(freeze=2))
    assert part
    assert part < all_
    assert not any(name.startswith(("layers.layers.0.", "layers.layers.1.")) or "embedding" in name for name in part)
    thawed = {"gradual_unfreezing": 1, "save_top_k": 0, "early_stopping": False, "lr": 5e-3}
    first, later = (changed(base, tune(max_epochs=n, **thawed)) for n in (1, 4))
    assert len(first) < len(later)
    assert not any("embedding" in name for name in first)
    options = {"schedule": "constant", "warmup_steps": 0, "probe_first": False, "weight_decay": 0.0}
    name = next(name for name, p in base.module.named_parameters() if p.ndim > 1)
    plain, decayed = (tune(layer_lr_decay=decay, **options).fitted.backbone.state_dict()[name] for decay in (None, 0.1))
    before = base.module.state_dict()[name]
    assert (decayed - before).abs().mean() < 0.1 * (plain - before).abs().mean(), "layers below learn slower"


def test_fine_tuning_leaves_the_setup_of_the_cells_as_it_is(cells: ad.AnnData) -> None:
    adata = cells[:120].copy()
    adata.obs["set"] = np.repeat(["train", "validation", "test"], [60, 30, 30])
    Encoder.setup_anndata(adata, labels_key="kind", batch_key="donor")
    model = Encoder(adata, "transformer_encoder", **SMALL)
    model.train(**QUICK)
    first = model.finetune("annotation", labels_key="group", split_key="set", **QUICK)
    for part, rows in (("train", 60), ("validation", 30), ("test", 30)):
        np.testing.assert_array_equal(getattr(first, f"{part}_indices"), np.flatnonzero(adata.obs["set"] == part))
        assert len(getattr(first, f"{part}_indices")) == rows
    second = model.finetune("annotation", **QUICK)
    assert [tuned.spec.tuning.task_options["labels_key"] for tuned in (first, second)] == ["group", "kind"]
    assert first.fitted.setup["labels_key"] == "group"


def test_a_split_without_cells_to_select_the_best_epoch_by(cells: ad.AnnData) -> None:
    adata = cells[:120].copy()
    adata.obs["type"] = np.resize(["T", "B", "NK"], 120)
    Encoder.setup_anndata(adata, labels_key="type")
    model = Encoder(adata, "transformer_encoder", **SMALL)
    model.train(**QUICK)
    adata.obs["set"] = np.where(adata.obs["type"] == "NK", "validation", "train")
    with pytest.raises(DataError, match=r"labels_key='type': no validation cell has a label of the training cells"):
        model.finetune("annotation", split_key="set", **QUICK)
    adata.obs["donor"] = np.resize(["a", "b"], 120)
    with raises(DataError, "split_by"):
        model.finetune("annotation", split_by="donor", **QUICK)
    with raises(DataError, "split_by"):
        model.finetune("annotation", split_by="donor", **QUICK)
    split = split_of(model.finetune("annotation", split_by="donor", validation_size=0, **QUICK))
    assert [adata.obs["donor"].iloc[rows].nunique() for rows in (split.train, split.test)] == [1, 1]
    adata.obs["donor"] = "a"
    with raises(DataError, "split_by"):
        model.finetune("annotation", split_by="donor", **QUICK)


def test_adapters(base: Encoder, annotator: Encoder, adapted: Encoder, cells: ad.AnnData) -> None:
    def embedding(model: Encoder) -> np.ndarray:
        return model.get_latent_representation(cells, key_added=None)

    assert count_parameters(adapted.module) < 0.5 * count_parameters(annotator.module)
    before, with_adapters = copy.deepcopy(adapted.module.state_dict()), embedding(adapted)
    with adapted.adapter_disabled():
        without = embedding(adapted)
    np.testing.assert_array_equal(without, embedding(base))
    assert np.abs(with_adapters - without).max() > 1e-3
    np.testing.assert_array_equal(embedding(adapted), with_adapters)
    again = adapted.finetune("annotation", cells, labels_key="kind", freeze=True, **QUICK)
    assert again.spec.tuning.task_options["classes"] == ["common", "rare"]
    assert all(value.equal(before[name]) for name, value in adapted.module.state_dict().items())
    np.testing.assert_allclose(embedding(again), with_adapters, atol=1e-5)


def test_adapters_in_a_folder(base: Encoder, adapted: Encoder, cells: ad.AnnData, tmp_path: Path) -> None:
    adapted.save(tmp_path / "adapter", adapter_only=True)
    (tmp_path / "adapter" / "notes.txt").write_text("mine")
    adapted.save(tmp_path / "adapter", overwrite=True, adapter_only=True)
    assert (tmp_path / "adapter" / "notes.txt").read_text() == "mine"
    adapted.save(tmp_path / "whole")
    sizes = [sum(p.stat().st_size for p in (tmp_path / name).glob("*.safetensors")) for name in ("adapter", "whole")]
    assert sizes[0] < 0.5 * sizes[1]
    expected = adapted.predict(cells.copy())
    again, loaded = Encoder.load(tmp_path / "adapter", base=base), Encoder.load(tmp_path / "whole", cells)
    for model in (again, loaded):
        pd.testing.assert_frame_equal(model.predict(cells.copy()), expected)
    assert again.fitted.backbone.state_dict().keys() == adapted.fitted.backbone.state_dict().keys()
    loaded.merge_adapter()
    merged = loaded.predict(cells.copy())["confidence"]
    np.testing.assert_allclose(merged, expected["confidence"], atol=1e-5)
    loaded.save(tmp_path / "merged")
    found = Encoder.load(tmp_path / "merged", cells).predict(cells.copy())["confidence"]
    np.testing.assert_array_equal(found, merged)
    other = Encoder(cells, "transformer_encoder", seed=1, **SMALL)
    for error, said, call in (
        (OptionError, "no adapters", loaded.merge_adapter),
        (OptionError, "no adapters", partial(loaded.save, tmp_path / "none", adapter_only=True)),
        (OptionError, "no adapters", partial(base.save, tmp_path / "none", adapter_only=True)),
        (OptionError, "the model has no task to evaluate; .*evaluate_models", base.evaluate),
        (OptionError, "the model has no task, so it cannot .*finetune", base.predict),
        (ModelFileError, "a base model with other weights", partial(Encoder.load, tmp_path / "adapter", base=other)),
        (
            MissingFileError,
            "none' does not exist; pass a folder",
            partial(Encoder.load, tmp_path / "none", base=base),
        ),
    ):
        with pytest.raises(error, match=said):
            call()


def test_parts_of_the_split(annotator: Encoder, tune: Callable[..., Encoder], cells: ad.AnnData) -> None:
    split = split_of(annotator)
    parts = [split.train, split.validation, split.test]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(200))
    assert [len(part) for part in parts] == [160, 20, 20]
    for part in parts:
        assert (cells.obs["group"].iloc[part] == "a").mean() == 0.5
    np.testing.assert_array_equal(annotator.train_indices_, split.train)
    by_donor = split_of(tune(split_by="donor", validation_size=0.2, test_size=0.2))
    donors = [set(cells.obs["donor"].iloc[part]) for part in (by_donor.train, by_donor.validation, by_donor.test)]
    assert all(donors)
    assert not donors[0] & donors[1] | donors[0] & donors[2] | donors[1] & donors[2]
    adata = cells.copy()
    adata.obs["part"] = np.array(["train", "validation", "test", None], dtype=object)[np.arange(200) // 50]
    split = split_of(tune(adata=adata, split_key="part"))
    np.testing.assert_array_equal(split.test, np.arange(100, 150))


def test_cells_without_label_take_no_part(tune: Callable[..., Encoder], cells: ad.AnnData) -> None:
    adata = cells.copy()
    adata.obs["group"] = adata.obs["group"].where(np.arange(200) >= 60)
    model = tune(adata=adata)
    split = split_of(model)
    assert min(map(np.min, (split.train, split.validation, split.test))) >= 60
    assert len(model.predict(adata)) == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "anotation"}, "task='anotation' is not known; did you mean 'annotation'"),
        ({"task": 3}, "task=3 must be a name, or a dict"),
        ({"learning_rate": 0.1}, "option of finetune 'learning_rate' is unknown to 'annotation'"),
        ({"batch_key": "donor"}, "batch_key='donor' has no effect for task 'annotation'"),
        ({"task": {"name": "annotation", "labels_key": "kind"}}, "labels_key is set both in task and as an argument"),
        ({"test_size": 0.5, "validation_size": 0.5}, "leave no training cells"),
        ({"split_by": "donor", "split_key": "kind"}, "split_by='donor' has no effect with split_key"),
        ({"split_key": "kind"}, "split_key='kind' contains 'common', 'rare'; use only"),
        ({"labels_key": "grop"}, "labels_key='grop' is not a column .*did you mean 'group'"),
        ({"labels_key": "none"}, "labels_key='none' leaves no training cells; choose another"),
        ({"lora": {"targets": ["qkv_prj"]}}, "'qkv_prj', which is not a linear layer of TransformerEncoder"),
        ({"lora": True, "freeze": 1}, "freeze=1 has no effect with lora=True, which freezes the encoder"),
        ({"lora": True, "gradual_unfreezing": 1}, "unfreezes layers that lora=True keeps frozen"),
        ({"freeze": 9}, "freeze=9, but there are only 3 layers"),
        ({"datamodule": 3}, "datamodule has no effect in finetune"),
        (
            {"freeze": True, "optimizer": "muon"},
            "optimizer='muon' trains the weight matrices of hidden layers, but all of them are frozen",
        ),
    ],
)
def test_mistakes(tune: Callable[..., Encoder], cells: ad.AnnData, options: dict, message: str) -> None:
    adata = cells.copy()
    adata.obs["none"] = np.nan
    with pytest.raises((OptionError, DataError), match=message):
        tune(adata=adata, **options)


def test_adapters_need_no_second_base(base: Encoder, adapted: Encoder, tmp_path: Path) -> None:
    adapted.save(tmp_path / "adapter", adapter_only=True)
    again = Encoder.load(tmp_path / "adapter", base=base)
    memory = {parameter.data_ptr() for parameter in base.module.parameters()}
    assert {parameter.data_ptr() for parameter in again.fitted.backbone.parameters()} >= memory
    assert again.spec == adapted.spec


class SpoilWeights(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 5:
            with torch.no_grad():
                next(pl_module.module.head.parameters()).fill_(torch.nan)


@pytest.mark.slow
def test_a_training_that_fails_leaves_calibrated_confidence(annotator: Encoder, saved: Path, monkeypatch) -> None:
    longer = QUICK | {"max_epochs": 9, "lr": 1e-2}
    model = Encoder.load(saved, annotator.adata)
    with pytest.raises(TrainingError, match="lower the learning rate"):
        model.train(**longer, callbacks=[SpoilWeights()])
    assert model.n_epochs_ > 3
    found = model.module.head.temperature.clone()
    calibrate(model.fitted, training_data(model, model.spec.build_objective(), TrainOptions()))
    assert found.item() == model.module.head.temperature.item() != 1.0
    model = Encoder.load(saved, annotator.adata)
    method = "scforge.finetuning.tasks.annotation.Annotation.calibrate"
    monkeypatch.setattr(method, Mock(side_effect=RuntimeError("no memory")))
    with (
        pytest.warns(ScforgeWarning, match="could not be calibrated: no memory"),
        pytest.raises(TrainingError, match="lower the learning rate"),
    ):
        model.train(**longer, callbacks=[SpoilWeights()])
    with pytest.raises(RuntimeError, match="no memory"):
        model.train(**QUICK)


SCRIPT = """
import json, os, sys
import anndata, torch
from scforge.estimators import Encoder
torch.set_num_threads(1)
adata = anndata.read_h5ad("cells.h5ad")
base = Encoder.load("base", adata)
options = json.loads(sys.argv[1])
model = base.finetune("annotation", labels_key="group", devices=2, strategy="ddp", **options)
torch.save(model.module.state_dict(), f"rank{os.environ['RANK']}.pt")
"""


@pytest.mark.exhaustive
def test_two_processes_end_with_the_same_weights(base: Encoder, cells: ad.AnnData, tmp_path: Path) -> None:
    cells.copy().write_h5ad(tmp_path / "cells.h5ad")
    base.save(tmp_path / "base")
    (tmp_path / "tune.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "tune.py"]
    launch.append(json.dumps(QUICK | {"lora": True, "lr": 1e-2}))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(launch, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    one, other = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(value.equal(other[name]) for name, value in one.items())
    assert any("lora_B" in name and value.any() for name, value in one.items())


@pytest.mark.filterwarnings("ignore::scforge.errors.ScforgeWarning")
def test_an_evaluation_of_a_file_has_the_baselines_of_an_adata(annotator, many_adata: ad.AnnData, tmp_path) -> None:
    query = many_adata[200:, ::2].copy()
    query.write_h5ad(tmp_path / "query.h5ad")
    of_adata = annotator.evaluate(query)
    assert len(of_adata) > 3
    pd.testing.assert_frame_equal(annotator.evaluate(str(tmp_path / "query.h5ad")), of_adata)
    # Cells that were opened over some genes: the baselines learn from the same ones.
    assert list(annotator.evaluate(annotator.open_cells(query)).index) == list(of_adata.index)
