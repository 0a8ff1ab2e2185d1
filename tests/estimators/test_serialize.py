import copy
import os
import pickle
from functools import partial
from pathlib import Path
from unittest import mock

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

from scforge.errors import (
    GeneMismatchError,
    MissingFileError,
    ModelFileError,
    OptionError,
    ScforgeWarning,
    TrainingError,
)
from scforge.estimators import Encoder
from scforge.testing import raises

FILES = ["README.md", "config.json", "model.safetensors", "reference.safetensors", "vocab.json"]


@pytest.fixture
def folder(model: Encoder, tmp_path: Path) -> Path:
    model.save(tmp_path / "model")
    return tmp_path / "model"


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("architecture", [None, "transformer_encoder"])
def test_equal_embeddings_whatever_the_order(architecture, trained, tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    model = trained(architecture)
    before = model.get_latent_representation()
    model.save(tmp_path / "model")
    generator = np.random.default_rng(1)
    for genes, cells in [(np.arange(80), np.arange(60)), (generator.permutation(80), generator.permutation(60))]:
        other = tiny_adata[cells][:, genes].copy()
        after = Encoder.load(tmp_path / "model", other).get_latent_representation()
        np.testing.assert_allclose(after, before[cells], atol=1e-6)
        np.testing.assert_array_equal(other.obsm["X_scforge"], after)
        without = Encoder.load(tmp_path / "model").get_latent_representation(other, key_added=None)
        np.testing.assert_array_equal(without, after)


def test_everything_comes_back(model: Encoder, folder: Path, quick) -> None:
    assert sorted(path.name for path in folder.iterdir()) == FILES
    (folder / "README.md").unlink()
    again = Encoder.load(folder, model.adata.copy())
    assert repr(again) == repr(model)
    assert (again.is_trained_, again.n_epochs_, again.seed) == (True, 2, 0)
    assert again.vocab == model.vocab
    assert again.registry_["setup_args"] == model.registry_["setup_args"]
    assert set(again.history) == set(model.history)
    for name, frame in model.history.items():
        pd.testing.assert_frame_equal(again.history[name], frame)
    assert not again.module.training
    again.train(**quick)
    assert again.n_epochs_ == len(again.history["train_loss"]) == 4
    model.train(**quick)
    np.testing.assert_array_equal(again.get_latent_representation(), model.get_latent_representation())


def test_without_adata(folder: Path, quick) -> None:
    model = Encoder.load(folder)
    assert "without adata" in repr(model)
    for call in (model.get_latent_representation, lambda: model.train(**quick)):
        with pytest.raises(OptionError, match="loaded without adata"):
            call()
    with raises(OptionError, "save_anndata"):
        model.save(folder.parent / "other", save_anndata=True)


def test_save_anndata(model: Encoder, tmp_path: Path, quick) -> None:
    folder = tmp_path / "model"
    model.save(folder, save_anndata=True)
    again = Encoder.load(folder)
    np.testing.assert_allclose(again.get_latent_representation(), model.get_latent_representation(), atol=1e-6)
    assert again.adata.obs["group"].equals(model.adata.obs["group"])
    again.train(**quick)
    assert Encoder.load(folder, adata=False).adata is None
    other = model.adata[:20].copy()
    assert Encoder.load(folder, other).adata is other
    (folder / "adata.h5ad").write_bytes((folder / "adata.h5ad").read_bytes()[:-100])
    with pytest.raises(ModelFileError):
        Encoder.load(folder)
    (folder / "adata.h5ad").unlink()
    with pytest.warns(ScforgeWarning, match=r"adata\.h5ad' does not exist \(push and pull do not copy cells\)"):
        assert Encoder.load(folder).adata is None
    Encoder.load(folder, adata=False)
    model.save(folder, overwrite=True, save_anndata=True)
    model.save(folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == FILES, "its own cells are no longer part of the model"


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_files_have_the_permissions_of_any_new_file(model: Encoder, tmp_path: Path, quick) -> None:
    before = os.umask(0o027)
    try:
        model.save(tmp_path / "model", save_anndata=True)
        model.train(**quick, checkpoint_dir=tmp_path / "ckpt", checkpoint_every_n_steps=2)
        tuned = model.finetune("annotation", lora={"r": 2}, **quick, checkpoint_dir=tmp_path / "tuned")
        tuned.save(tmp_path / "adapter", adapter_only=True)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert len(files) > 20
    assert {f"{path.stat().st_mode & 0o777:o}" for path in files} == {"640"}
    assert {f"{path.stat().st_mode & 0o777:o}" for path in tmp_path.rglob("*") if path.is_dir()} == {"750"}


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_a_full_disk(model: Encoder, tmp_path: Path, quick) -> None:
    import resource

    tuned = model.finetune("annotation", lora={"r": 2}, **quick)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    told = r"File too large.*'.*/model'|'.*/model' cannot be written: .*too large"
    for save in (model.save, tuned.save, partial(tuned.save, adapter_only=True)):
        save(tmp_path / "model", overwrite=True)
        before = bytes_of(tmp_path / "model")
        for most in (0, 300):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            try:
                with pytest.raises(OSError, match=told):
                    save(tmp_path / "model", overwrite=True)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert bytes_of(tmp_path / "model") == before


def test_columns_that_new_data_lack_are_left_out(trained, tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    model = trained(setup={"labels_key": "group", "batch_key": "batch"})
    model.save(tmp_path / "model")
    new = tiny_adata.copy()
    del new.obs
    new.obs_names = [f"new{i}" for i in range(60)]
    again = Encoder.load(tmp_path / "model", new)
    np.testing.assert_allclose(again.get_latent_representation(), model.get_latent_representation(), atol=1e-6)


def test_an_existing_folder(model: Encoder, folder: Path) -> None:
    before = bytes_of(folder)
    with pytest.raises(OptionError, match=r"dir_path='.*model' exists and is not empty; pass overwrite=True"):
        model.save(folder)
    assert bytes_of(folder) == before
    for name in ("thesis.txt", "adata.h5ad", "sub/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    model.save(folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "adata.h5ad", "sub", "thesis.txt"])
    assert {path.read_text() for path in folder.rglob("*") if path.is_file() and path.name not in before} == {"mine"}
    assert Encoder.load(folder).adata is None


def test_an_existing_folder_without_a_model(model: Encoder, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine")
    model.save(".", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*FILES, "notes.txt"])
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "README.md").write_text("mine")
    for path, message in {
        "project": "dir_path='project' contains 'README.md', which is not part of an scforge model; ch",
        "notes.txt": "dir_path='.*notes.txt' is a file; choose another path",
        "notes.txt/below": "dir_path='.*' is a file; choose another path",
    }.items():
        with pytest.raises(OptionError, match=message):
            model.save(path, overwrite=True)
    assert {path.read_text() for path in (Path("project/README.md"), Path("notes.txt"))} == {"mine"}
    assert len(list(Path("project").iterdir())) == 1


def test_a_save_that_fails_leaves_the_old_model(model: Encoder, folder: Path, monkeypatch) -> None:
    before = bytes_of(folder)
    monkeypatch.setattr("scforge.estimators.fitted.save_file", mock.Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        model.save(folder, overwrite=True)
    assert bytes_of(folder) == before
    assert list(folder.parent.iterdir()) == [folder]


def test_a_format_from_the_future(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"format": 2', '"format": 9'))
    with pytest.raises(ModelFileError):
        Encoder.load(folder)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("nothing", {}, MissingFileError, r"^dir_path='.*' does not exist; pass a folder, a hub repository \(hf://"),
        ("model", {"device": "cuda:99"}, OptionError, "^device='cuda:99' cannot be used: "),
        ("model", {"accelerator": "tpu"}, OptionError, r"accelerator='tpu' is not known.* \(known: 'cpu'"),
        ("model", {"adata": "cells.h5ad"}, OptionError, "adata is of type 'str'; read it with anndata.read_h5ad first"),
    ],
)
def test_what_cannot_be_loaded(folder: Path, name: str, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Encoder.load(folder.parent / name, **options)


def test_other_genes(folder: Path, tiny_adata: ad.AnnData) -> None:
    half = tiny_adata[:, tiny_adata.X.toarray().sum(axis=0) > 0].copy()
    half = half[:, ::3].copy()
    with pytest.warns(UserWarning, match=r"adata.var_names has \d+ of the 40 genes of the vocabulary"):
        Encoder.load(folder, half)
    foreign = tiny_adata.copy()
    foreign.var_names = [f"other{i}" for i in range(80)]
    model = Encoder.load(folder)
    for call in (lambda: Encoder.load(folder, foreign), lambda: model.get_latent_representation(foreign)):
        with pytest.raises(GeneMismatchError):
            call()


def test_words_of_scvi_tools_for_a_folder(model: Encoder, folder: Path) -> None:
    assert Encoder.load(folder, accelerator="cpu").device.type == "cpu"
    registry = Encoder.load_registry(folder)
    assert (registry["model_name"], registry["setup_args"]["labels_key"]) == ("Encoder", "group")


def test_a_model_is_not_pickled_but_copied(model):
    with pytest.raises(OptionError, match=r"a model cannot be pickled; call model\.save\(folder\), and Encoder\.load"):
        pickle.dumps(model)
    shallow, deep = copy.copy(model), copy.deepcopy(model)
    assert shallow.module is model.module
    assert deep.module is not model.module
    expected = model.get_latent_representation(key_added=None)
    np.testing.assert_array_equal(deep.get_latent_representation(key_added=None), expected)
    n_epochs, n_scores = model.n_epochs_, len(model.history["train_loss"])
    shallow.train(1, progress_bar=False, accelerator="cpu")
    assert (model.n_epochs_, len(model.history["train_loss"])) == (n_epochs, n_scores)
    assert len(shallow.history["train_loss"]) == n_scores + 1


def test_a_model_with_nan_weights_replaces_nothing(model: Encoder, folder: Path) -> None:
    before = bytes_of(folder)
    broken = copy.deepcopy(model)
    with torch.no_grad():
        next(broken.module.parameters()).view(-1)[-1] = float("nan")
    with pytest.raises(TrainingError, match="NaN or infinite weights in .* and is not saved"):
        broken.save(folder, overwrite=True)
    assert bytes_of(folder) == before
