import json
import os
import shutil
from pathlib import Path

import anndata as ad
import fsspec
import numpy as np
import pytest
import zarr

from scforge.cli import main
from scforge.data import GeneVocab, convert, open_cells
from scforge.data.remote import open_group
from scforge.data.store import (
    StoreCells,
    StoreInfo,
    dataset_hash,
    inspect_store,
    is_store,
    read_measured,
    read_vocab,
)
from scforge.errors import DataError, MissingFileError


@pytest.fixture
def folder(tiny_adata: ad.AnnData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files and their store, of 1,200 cells in one dataset."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        adata = ad.concat([tiny_adata] * 10, index_unique="-", keys=[f"{name}{i}" for i in range(10)])
        adata.write_h5ad(f"{name}.h5ad")
    convert(["a.h5ad", "b.h5ad"], "s.zarr", obs=["group"])
    return tmp_path


def test_what_it_shows(folder, tiny_adata):
    found = inspect_store("s.zarr")
    assert found.info == StoreInfo.read("s.zarr")
    assert found.columns == {"group": "2 categories"}
    assert found.n_bytes == sum(path.stat().st_size for path in (folder / "s.zarr").rglob("*") if path.is_file())
    assert found.sources == {"a.h5ad": "unchanged", "b.h5ad": "unchanged"}
    assert "1,200 x 80" in str(found)
    os.utime("a.h5ad", ns=(0, 10**9))
    Path("b.h5ad").unlink()
    assert inspect_store("s.zarr").sources == {"a.h5ad": "changed since", "b.h5ad": "missing"}
    convert(tiny_adata, "t.zarr")
    assert inspect_store("t.zarr", verify=True).sources == {"adata": "not checked"}
    shutil.move("s.zarr", "elsewhere.zarr")
    assert inspect_store(f"file://{folder}/elsewhere.zarr", verify=True).verified


@pytest.mark.parametrize("part", ["data", "indices"])
def test_a_damaged_piece_is_told(folder, part):
    path = folder / f"s.zarr/dataset_0/X/{part}/c/0"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    inspect_store("s.zarr")
    with pytest.raises(DataError, match=r"dataset_0 of the store 's\.zarr' cannot be read: .*checksum.*; copy"):
        inspect_store("s.zarr", verify=True)
    group = zarr.open_group("s.zarr", mode="a")
    content = bytes(group["scforge/vocab"][...]).replace(b"gene11", b"gene1x")
    group["scforge/vocab"][...] = np.frombuffer(content, dtype=np.uint8)
    with pytest.raises(DataError, match="the vocabulary of the store .* is corrupted"):
        read_vocab(group)
    del group["scforge/measured"]
    with pytest.raises(DataError, match="'scforge/measured' of the store .* cannot be read: .*; copy the store again"):
        read_measured(zarr.open_group("s.zarr", mode="r", use_consolidated=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "match"),
    [
        ("dataset_0/obs/group/codes/c", "dataset_0 has changed since it was written"),
        ("dataset_0/X/indptr/c/0", "dataset_0 has changed since it was written"),
        ("scforge/vocab/c/0", "the vocabulary of the store .* is corrupted"),
        ("hash", "its metadata does not match its content hash"),
    ],
)
def test_damage_is_named(folder, part, match):
    place, description = folder / "s.zarr" / part, folder / "s.zarr/zarr.json"
    if place.is_dir():
        shutil.rmtree(place)
    elif place.is_file():
        place.unlink()
    else:
        changed = description.read_text().replace(StoreInfo.read("s.zarr").content_hash, "0" * 64)
        description.write_text(changed)
        with pytest.raises(DataError, match=r"s\.zarr' is corrupted: its zarr\.json does not match its checksum"):
            inspect_store("s.zarr")
        description.write_text(changed.replace("scforge_sha256", "of_no_meaning"))
    with pytest.raises(DataError, match=match):
        inspect_store("s.zarr", verify=True)


def test_hashes_do_not_depend_on_how_it_is_packed(folder):
    dataset = ad.read_zarr("s.zarr/dataset_0")
    dataset.X.indices = dataset.X.indices.astype(np.int64)
    found = dataset_hash(dataset.X.indptr, dataset.X.indices, dataset.X.data, dataset.obs)
    assert found == StoreInfo.read("s.zarr").datasets[0]["hash"]
    changed = dataset.obs.assign(group=dataset.obs["group"].to_numpy()[::-1])
    assert found != dataset_hash(dataset.X.indptr, dataset.X.indices, dataset.X.data, changed)


def test_commands(folder, capsys):
    GeneVocab.from_genes([f"gene{i}" for i in range(30, 80)]).save("v.json")
    options = ["--vocab", "v.json", "--obs", "group,batch", "--no-shuffle", "--memory", "2GB", "--quiet"]
    assert main(["convert", "a.h5ad", "b.h5ad", "-o", "t.zarr", *options]) == 0
    info = StoreInfo.read("t.zarr")
    assert (info.n_genes, info.shuffled, info.obs_columns) == (50, False, ["group", "batch"])
    assert info.options["memory"] == 2 * 10**9
    assert main(["convert", "a.h5ad", "-o", "t.zarr", "--seed", "3", "--overwrite", "--layer", "none"]) == 2
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
    assert main(["inspect", "a.h5ad", "--verify"]) == 2
    assert "--verify works only for stores" in capsys.readouterr().err


@pytest.fixture
def store(tiny_adata: ad.AnnData, tmp_path: Path) -> Path:
    convert(tiny_adata, tmp_path / "s.zarr")
    return tmp_path / "s.zarr"


def test_the_description_comes_back_from_path_and_url(store):
    info, group = StoreInfo.read(store), open_group(store)
    assert info == StoreInfo.read(f"file://{store}")
    assert group.attrs["scforge"]["format"] == 1
    assert (info.n_genes, info.chunk_size) == (80, 256)
    assert info.n_cells == info.sources[0]["n_cells"] == info.datasets[0]["n_cells"] == 60
    assert "60 x 80" in str(info)
    assert read_vocab(group).hash == info.vocab_hash
    assert read_measured(group).tolist() == [[True] * 80]
    listed = json.loads((store / "zarr.json").read_text())["consolidated_metadata"]["metadata"]
    assert {"dataset_0/X/indptr", "dataset_0/obs/scforge_total", "scforge/vocab"} <= set(listed)
    system = fsspec.filesystem("memory")
    system.put(str(store), "/stores/s.zarr", recursive=True)
    assert StoreInfo.read("memory://stores/s.zarr") == info
    with pytest.raises(MissingFileError):
        StoreInfo.read("memory://stores/no.zarr")


def test_what_is_no_store(tiny_adata, tmp_path):
    for name in ("folder", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "broken" / "zarr.json").write_text("{")
    tiny_adata.write_zarr(tmp_path / "a.zarr")
    zarr.create_group(tmp_path / "c.zarr", attributes={"encoding-type": "annbatch-preshuffled"})
    (tmp_path / ".half.zarr.0123abcd.saving").mkdir()
    for name, match in {
        "folder": "'.*folder' is a folder but not a store",
        "file": "'.*file' is a file, but a store is a folder; create one with scforge convert",
        "broken": "'.*broken' cannot be read as a zarr folder",
        "a.zarr": r"'.*a\.zarr' is an AnnData, not a store; create a store with scforge convert SOURCE -o STORE",
        "c.zarr": "is an annbatch collection from another program",
        "half.zarr": r"'.*half\.zarr' is incomplete; run the same scforge convert command again\.",
    }.items():
        with pytest.raises(DataError, match=match):
            StoreInfo.read(tmp_path / name)
        assert not is_store(tmp_path / name)
    for opener in (StoreInfo.read, StoreCells.open, open_cells):
        with pytest.raises(MissingFileError):
            opener(tmp_path / "nothing.zarr")
        with pytest.raises(DataError, match=r"half\.zarr' is incomplete; run the same scforge convert command again"):
            opener(tmp_path / "half.zarr")
    assert not is_store(tmp_path / "nothing")
