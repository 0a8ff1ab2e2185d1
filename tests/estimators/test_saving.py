"""Model folders: what is loaded is what was saved, or one sentence says what is wrong with the folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.errors import (
    GeneMismatchError,
    MissingFileError,
    ModelFileError,
    OptionError,
    ScforgeError,
    ScforgeWarning,
)
from scforge.estimators import Encoder
from scforge.estimators.folder_formats import MODEL, sealed

FILES = ["README.md", "config.json", "model.safetensors", "vocab.json"]


@pytest.fixture
def folder(model: Encoder, tmp_path: Path) -> Path:
    """A saved model."""
    model.save(tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, **changes: object) -> None:
    """Change entries of the description, and its checksum with them; None removes one."""
    content = json.loads((folder / "config.json").read_text()) | changes
    del content["checksum"]
    content = {key: value for key, value in content.items() if value is not None}
    format = content.pop("format")
    (folder / "config.json").write_text(sealed(replace(MODEL, format=format), content))


def test_a_folder_of_four_plain_files(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert not [path for path in folder.parent.iterdir() if path != folder], "no temporary folder is left"
    card = (folder / "README.md").read_text()
    assert "gene_pooling" in card
    assert "neighbor_denoising" in card
    assert len(json.loads((folder / "vocab.json").read_text())["genes"]) == 40


@pytest.mark.parametrize("architecture", [None, "transformer_encoder"])
@pytest.mark.parametrize("change", ["nothing", "genes", "cells", "both"])
def test_equal_embeddings(architecture, change: str, trained, tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    model = trained(architecture)
    before = model.get_latent_representation()
    model.save(tmp_path / "model")
    generator = np.random.default_rng(1)
    genes = generator.permutation(80) if change in ("genes", "both") else np.arange(80)
    cells = generator.permutation(60) if change in ("cells", "both") else np.arange(60)
    other = tiny_adata[cells][:, genes].copy()
    after = Encoder.load(tmp_path / "model", other).get_latent_representation()
    np.testing.assert_allclose(after, before[cells], atol=1e-6)
    np.testing.assert_array_equal(other.obsm["X_scforge"], after)
    without = Encoder.load(tmp_path / "model").get_latent_representation(other, key_added=None)
    np.testing.assert_array_equal(without, after)


@pytest.mark.slow
def test_equal_embeddings_in_another_process(model: Encoder, folder: Path, tmp_path: Path) -> None:
    embedding = model.get_latent_representation()
    shuffled = model.adata[::-1, ::-1].copy()
    shuffled.write_h5ad(tmp_path / "cells.h5ad")
    script = (
        "import anndata, numpy, scforge\n"
        "adata = anndata.read_h5ad('cells.h5ad')\n"
        "numpy.save('embedding.npy', scforge.models.Encoder.load('model', adata).get_latent_representation())\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    np.testing.assert_allclose(np.load(tmp_path / "embedding.npy")[::-1], embedding, atol=1e-6)


def test_everything_comes_back(model: Encoder, folder: Path, quick) -> None:
    again = Encoder.load(folder, model.adata)
    assert repr(again) == repr(model)
    assert (again.is_trained_, again.n_epochs_, again.seed) == (True, 2, 0)
    assert again.vocab == model.vocab
    assert again.registry_["setup_args"] == model.registry_["setup_args"]
    assert set(again.history) == set(model.history)
    for name, frame in model.history.items():
        pd.testing.assert_frame_equal(again.history[name], frame)
    assert not again.module.training
    again.train(**quick)
    assert again.n_epochs_ == 4
    assert len(again.history["train_loss"]) == 4


def test_a_loaded_model_trains_on_like_the_saved_one(model: Encoder, folder: Path, quick) -> None:
    again = Encoder.load(folder, model.adata.copy())
    again.train(**quick)
    model.train(**quick)
    np.testing.assert_array_equal(again.get_latent_representation(), model.get_latent_representation())


def test_without_adata(folder: Path, quick) -> None:
    model = Encoder.load(folder)
    assert "without adata" in repr(model)
    for call in (model.get_latent_representation, lambda: model.train(**quick)):
        with pytest.raises(OptionError, match="loaded without adata"):
            call()
    with pytest.raises(OptionError, match="save_anndata=True but the model was loaded without adata"):
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
    data = bytearray((folder / "adata.h5ad").read_bytes())
    data[-100] ^= 1
    (folder / "adata.h5ad").write_bytes(data)
    with pytest.raises(ModelFileError, match=r"adata\.h5ad' is corrupted: its checksum"):
        Encoder.load(folder)
    (folder / "adata.h5ad").unlink()
    with pytest.warns(ScforgeWarning, match=r"adata\.h5ad', are not there \(push and pull leave them out\)"):
        assert Encoder.load(folder).adata is None
    Encoder.load(folder, adata=False)
    model.save(folder, overwrite=True, save_anndata=True)
    model.save(folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == FILES, "its own cells are no longer part of the model"


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_files_have_the_permissions_of_any_new_file(model: Encoder, tmp_path: Path, quick) -> None:
    before = os.umask(0o027)
    try:
        model.save(tmp_path / "model", save_anndata=True, scvi_format=True)
        model.train(**quick, checkpoint_dir=tmp_path / "ckpt", checkpoint_every_n_steps=2)
        tuned = model.finetune("annotation", lora={"r": 2}, **quick, checkpoint_dir=tmp_path / "tuned")
        tuned.save_adapter(tmp_path / "adapter")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert len(files) > 20
    assert {f"{path.stat().st_mode & 0o777:o}" for path in files} == {"640"}
    assert {f"{path.stat().st_mode & 0o777:o}" for path in tmp_path.rglob("*") if path.is_dir()} == {"750"}


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
@pytest.mark.parametrize("name", ["config.json", "vocab.json", "model.safetensors", "split.safetensors", "adata.h5ad"])
def test_pipes_are_not_waited_for(model: Encoder, tmp_path: Path, quick, name: str) -> None:
    model.finetune("annotation", **quick).save(tmp_path / "model", save_anndata=True)
    (tmp_path / "model" / name).unlink()
    os.mkfifo(tmp_path / "model" / name)
    with pytest.raises(ModelFileError, match=rf"{name}' is not a regular file|lacks '{name}'"):
        Encoder.load(tmp_path / "model")


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_a_full_disk(model: Encoder, tmp_path: Path, quick) -> None:
    import resource

    tuned = model.finetune("annotation", lora={"r": 2}, **quick)
    for save in (model.save, tuned.save, tuned.save_adapter):
        save(tmp_path / "model", overwrite=True)
        before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for most in (0, 300):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            try:
                with pytest.raises(
                    OSError, match=r"File too large.*'.*/model'|'.*/model' cannot be written: .*too large"
                ):
                    save(tmp_path / "model", overwrite=True)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_columns_that_new_data_lack_are_left_out(trained, tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    model = trained(setup={"labels_key": "group", "batch_key": "batch"})
    model.save(tmp_path / "model")
    new = tiny_adata.copy()
    del new.obs
    new.obs_names = [f"new{i}" for i in range(60)]
    again = Encoder.load(tmp_path / "model", new)
    np.testing.assert_allclose(again.get_latent_representation(), model.get_latent_representation(), atol=1e-6)


def test_an_existing_folder(model: Encoder, folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(OptionError, match=r"dir_path='.*model' exists and is not empty; pass overwrite=True or choose"):
        model.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "thesis.txt").write_text("mine")
    (folder / "adata.h5ad").write_text("mine")
    (folder / "sub").mkdir()
    (folder / "sub" / "config.json").write_text("mine")
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
    with pytest.raises(
        OptionError, match=r"dir_path='project' holds 'README.md', not of a model that scforge wrote; ch"
    ):
        model.save("project", overwrite=True)
    assert [path.read_text() for path in Path("project").iterdir()] == ["mine"]
    Path("link").symlink_to("new")
    Path("new").mkdir()
    model.save("link")
    assert Path("link").is_symlink()
    assert sorted(path.name for path in Path("new").iterdir()) == FILES


def test_a_file_is_in_the_way(model: Encoder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OptionError, match=r"dir_path='.*' is a file; give the name of a folder"):
            model.save(path, overwrite=True)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_one_may_not_write_to(model: Encoder, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(OSError, match="Permission denied"):
            model.save(tmp_path / "model")
    finally:
        tmp_path.chmod(0o700)
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_leaves_the_old_model(model: Encoder, folder: Path, monkeypatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fails(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("scforge.estimators.saving.save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        model.save(folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.json"])
def test_a_file_is_missing(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelFileError, match=rf"lacks '{name}'; save or copy the model again\.$"):
        Encoder.load(folder)


def test_the_card_may_be_missing(folder: Path) -> None:
    (folder / "README.md").unlink()
    Encoder.load(folder)


def _flip(data: bytes) -> bytes:
    middle = len(data) - 10
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.json"])
@pytest.mark.parametrize(
    "spoil",
    [lambda data: data[:-30], lambda data: b"", _flip, lambda data: b"\xff\xfe" + data],
    ids=["truncated", "empty", "flipped", "binary"],
)
def test_a_file_is_spoiled(folder: Path, name: str, spoil: Callable[[bytes], bytes]) -> None:
    path = folder / name
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ModelFileError, match=r"^'.*' is (corrupted|not the description)") as caught:
        Encoder.load(folder)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_edited_vocabulary(folder: Path) -> None:
    content = json.loads((folder / "vocab.json").read_text())
    content["genes"][0], content["genes"][1] = content["genes"][1], content["genes"][0]
    (folder / "vocab.json").write_text(json.dumps(content))
    with pytest.raises(ModelFileError, match=r"vocab\.json' is corrupted: its checksum"):
        Encoder.load(folder)


def test_a_swapped_vocabulary_with_its_checksum(folder: Path, trained, tiny_adata: ad.AnnData) -> None:
    other = trained(adata=tiny_adata.copy(), n_top_genes=30)
    other.save(folder.parent / "other")
    shutil.copy(folder.parent / "other" / "vocab.json", folder / "vocab.json")
    sums = json.loads((folder / "config.json").read_text())["sha256"]
    theirs = json.loads((folder.parent / "other" / "config.json").read_text())["sha256"]
    edit(folder, sha256=sums | {"vocab.json": theirs["vocab.json"]})
    with pytest.raises(ModelFileError, match="do not fit the architecture in its config: .* instead of"):
        Encoder.load(folder)


def test_a_format_from_the_future(folder: Path) -> None:
    edit(folder, format=3, scforge_version="9.0")
    with pytest.raises(ModelFileError, match=r"has format 3 \(scforge 9\.0\), .*; update scforge\.$"):
        Encoder.load(folder)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"model_type": "bert"}', '{"format": "x"}', '{"format": 1}', "null", '{"format": null}']
)
def test_the_folder_of_another_program(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"config\.json' (is not the description of an scforge model|lacks)"):
        Encoder.load(folder)


NEEDED = ["architecture", "tokenizer", "objective", "setup", "seed", "is_trained", "n_epochs", "history", "sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("key", NEEDED)
def test_the_description_lacks_an_entry(folder: Path, key: str) -> None:
    edit(folder, **{key: None})
    with pytest.raises(ModelFileError, match=rf"config\.json' lacks '{key}'"):
        Encoder.load(folder)


def test_an_architecture_that_is_not_registered(folder: Path) -> None:
    edit(folder, architecture={"name": "somebodys_model"})
    with pytest.raises(OptionError, match=r"architecture='somebodys_model' is not known"):
        Encoder.load(folder)


def test_weights_of_another_architecture(folder: Path) -> None:
    architecture = json.loads((folder / "config.json").read_text())["architecture"]
    edit(folder, architecture=architecture | {"num_layers": 2})
    with pytest.raises(ModelFileError, match=r"do not fit the architecture in its config: missing '"):
        Encoder.load(folder)


@pytest.mark.parametrize("path", ["nothing", "file"])
def test_no_folder(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingFileError, match=r"^dir_path='.*; give the folder that model\.save\(\) wrote\.$"):
        Encoder.load(tmp_path / path)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there(folder: Path, device: str) -> None:
    with pytest.raises(OptionError, match=rf"^device='{device}' cannot be used: "):
        Encoder.load(folder, device=device)


def test_other_genes(folder: Path, tiny_adata: ad.AnnData) -> None:
    half = tiny_adata[:, tiny_adata.X.toarray().sum(axis=0) > 0].copy()
    half = half[:, ::3].copy()
    with pytest.warns(UserWarning, match=r"adata.var_names has \d+ of the 40 genes of the vocabulary"):
        Encoder.load(folder, half)
    foreign = tiny_adata.copy()
    foreign.var_names = [f"other{i}" for i in range(80)]
    model = Encoder.load(folder)
    for call in (lambda: Encoder.load(folder, foreign), lambda: model.get_latent_representation(foreign)):
        with pytest.raises(GeneMismatchError, match=r"only 0 of the 40 genes .* map the gene ids of the data"):
            call()


def test_another_kind_of_ids_names_the_column_that_fits(folder: Path, tiny_adata: ad.AnnData) -> None:
    by_id = tiny_adata.copy()
    by_id.var["symbol"] = np.asarray(by_id.var_names)
    by_id.var_names = by_id.var["ensembl"].to_list()
    with pytest.raises(ScforgeError) as caught:
        Encoder.load(folder, by_id)
    message = str(caught.value)
    assert "it holds human Ensembl ids such as 'ENSG00000000000'" in message
    assert "adata.var['symbol'] has 40 of them: pass gene_key='symbol'" in message
    assert "set adata.var_names = adata.var['symbol']" in message
    by_id.var_names = by_id.var["symbol"].to_list()
    Encoder.load(folder, by_id)


def test_an_adata_that_is_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="adata is of type 'str'; read it with anndata.read_h5ad first"):
        Encoder.load(folder, "cells.h5ad")


def test_words_of_scvi_tools_for_a_folder(model: Encoder, folder: Path) -> None:
    with pytest.raises(OptionError, match=r"prefix='run1_', but a folder holds one model; pass dir_path='\S+/run1'"):
        model.save(folder.parent, prefix="run1_")
    with pytest.raises(OptionError, match=r"prefix='run1_'"):
        Encoder.load(folder, prefix="run1_")
    assert Encoder.load(folder, accelerator="cpu").device.type == "cpu"
    with pytest.raises(OptionError, match=r"accelerator='tpu' is not known \(known: 'auto', 'cpu'"):
        Encoder.load(folder, accelerator="tpu")
    registry = Encoder.load_registry(folder)
    assert (registry["model_name"], registry["setup_args"]["labels_key"]) == ("Encoder", "group")
