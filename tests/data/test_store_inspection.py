"""A look at a store, and the check that nothing in it is damaged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from scforge.cli import main
from scforge.data import GeneVocab, StoreInfo, convert, inspect_store
from scforge.data.store_hash import dataset_hash
from scforge.errors import DataError


@pytest.fixture
def folder(tiny_adata: ad.AnnData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files and their store, of 1,200 cells in one dataset."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        adata = ad.concat([tiny_adata] * 10, index_unique="-", keys=[f"{name}{i}" for i in range(10)])
        adata.write_h5ad(f"{name}.h5ad")
    convert(["a.h5ad", "b.h5ad"], "s.zarr", obs=["group"])
    return tmp_path


def flip(path: Path, share: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 4
    path.write_bytes(content)


def test_what_it_shows(folder):
    found = inspect_store("s.zarr")
    assert found.info == StoreInfo.read("s.zarr")
    assert found.columns == {"group": "2 categories"}
    assert found.n_bytes == sum(path.stat().st_size for path in (folder / "s.zarr").rglob("*") if path.is_file())
    assert found.sources == {"a.h5ad": "unchanged", "b.h5ad": "unchanged"}
    for text in ("1,200 x 80", "shuffled, seed 0", "counts as uint16", "80 genes", "--verify checks it"):
        assert text in str(found)


def test_what_became_of_the_sources(folder, tiny_adata):
    os.utime("a.h5ad", ns=(0, 10**9))
    Path("b.h5ad").unlink()
    assert inspect_store("s.zarr").sources == {"a.h5ad": "changed since", "b.h5ad": "not there any more"}
    convert(tiny_adata, "t.zarr")
    assert inspect_store("t.zarr", verify=True).sources == {"adata": "not checked"}


def test_a_sound_store_is_verified(folder):
    assert inspect_store("s.zarr", verify=True).verified
    shutil.move("s.zarr", "elsewhere.zarr")
    assert inspect_store(f"file://{folder}/elsewhere.zarr", verify=True).verified


@pytest.mark.parametrize("part", ["data", "indices"])
def test_cells_of_a_damaged_piece_are_named(folder, part):
    flip(folder / f"s.zarr/dataset_0/X/{part}/c/0", 0.5)
    inspect_store("s.zarr")
    with pytest.raises(DataError, match=r"'s\.zarr' is damaged: cells (\d+) to (\d+) of dataset_0; copy") as told:
        inspect_store("s.zarr", verify=True)
    first, last = map(int, str(told.value).split("cells ")[1].split(" of ")[0].split(" to "))
    assert 0 <= first < 600 < last + 256
    assert last - first <= 2 * 256


def damage_obs(folder: Path) -> None:
    shutil.rmtree(folder / "s.zarr/dataset_0/obs/group/codes/c")


def damage_boundaries(folder: Path) -> None:
    (folder / "s.zarr/dataset_0/X/indptr/c/0").unlink()


def damage_counts(folder: Path) -> None:
    (folder / "s.zarr/dataset_0/X/data/c/0").unlink()


def damage_vocab(folder: Path) -> None:
    (folder / "s.zarr/scforge/vocab/c/0").unlink()


def remove_dataset(folder: Path) -> None:
    shutil.rmtree(folder / "s.zarr/dataset_0")


def change_hash(folder: Path) -> None:
    path = folder / "s.zarr/zarr.json"
    path.write_text(path.read_text().replace(StoreInfo.read("s.zarr").content_hash, "0" * 64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (damage_obs, "dataset_0 has other content than was written"),
        (damage_boundaries, "the row boundaries of dataset_0 are not those that were written"),
        (damage_counts, r"cells 0 to \d+ of dataset_0"),
        (damage_vocab, "its vocabulary cannot be read"),
        (remove_dataset, "the row boundaries of dataset_0 are not those that were written"),
        (change_hash, "its description does not fit its content hash"),
    ],
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], None], match: str) -> None:
    damage(folder)
    with pytest.raises(DataError, match=match):
        inspect_store("s.zarr", verify=True)


def test_commands(folder, capsys):
    GeneVocab.from_genes([f"gene{i}" for i in range(30, 80)]).save("v.json")
    options = ["--vocab", "v.json", "--obs", "group,batch", "--no-shuffle", "--memory", "2GB", "--quiet"]
    assert main(["convert", "a.h5ad", "b.h5ad", "-o", "t.zarr", *options]) == 0
    info = StoreInfo.read("t.zarr")
    assert (info.n_genes, info.shuffled, info.obs_columns) == (50, False, ["group", "batch"])
    assert info.options["memory"] == 2 * 10**9
    assert main(["convert", "a.h5ad", "-o", "t.zarr", "--seed", "3", "--overwrite", "--layer", "none"]) == 2
    assert main(["convert", "a.h5ad", "-o", "t.zarr", "--seed", "3", "--overwrite", "--gene-key", "none"]) == 2
    assert main(["convert", "a.h5ad", "-o", "t.zarr", "--seed", "3"]) == 2
    assert StoreInfo.read("t.zarr").n_cells == 1200
    capsys.readouterr()
    assert main(["convert", "a.h5ad", "-o", "t.zarr", "--seed", "3", "--overwrite", "--obs", ""]) == 0
    assert (StoreInfo.read("t.zarr").seed, StoreInfo.read("t.zarr").obs_columns) == (3, [])
    shown = capsys.readouterr()
    assert "600 x 80 (shuffled, seed 3)" in shown.out
    assert shown.err == ""
    assert main(["inspect", "t.zarr", "--verify"]) == 0
    assert "(verified)" in capsys.readouterr().out
    for arguments, told in {
        ("inspect", "."): "is a folder without a store",
        ("inspect", "a.h5ad", "--verify"): "--verify checks a store",
        ("inspect", "no.zarr"): "no.zarr' does not exist",
    }.items():
        assert main(list(arguments)) == 2
        error = capsys.readouterr().err
        assert told in error
        assert error.count("\n") == 1


def test_hashes_do_not_depend_on_how_it_is_packed(folder):
    dataset = ad.read_zarr("s.zarr/dataset_0")
    dataset.X.indices = dataset.X.indices.astype(np.int64)
    found = dataset_hash(dataset.X.indptr, dataset.X.indices, dataset.X.data, dataset.obs)
    assert found == StoreInfo.read("s.zarr").datasets[0]["hash"]
    changed = dataset.obs.assign(group=dataset.obs["group"].to_numpy()[::-1])
    assert found != dataset_hash(dataset.X.indptr, dataset.X.indices, dataset.X.data, changed)
