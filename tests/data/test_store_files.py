"""What stands in a store beside the cells."""

from __future__ import annotations

import json
from pathlib import Path

import anndata as ad
import fsspec
import numpy as np
import pytest
import zarr

from scforge.data import StoreInfo, convert
from scforge.data.store_files import is_store, open_store_group, partial_path, read_measured, read_vocab
from scforge.errors import DataError, MissingFileError


@pytest.fixture
def store(tiny_adata: ad.AnnData, tmp_path: Path) -> Path:
    convert(tiny_adata, tmp_path / "s.zarr")
    return tmp_path / "s.zarr"


def change_root(store: Path, **attributes: object) -> None:
    root = json.loads((store / "zarr.json").read_text())
    root["attributes"]["scforge"].update(attributes)
    (store / "zarr.json").write_text(json.dumps(root))


def test_the_description_comes_back_from_path_url_and_group(store):
    info = StoreInfo.read(store)
    group, same = open_store_group(str(store))
    assert info == same == StoreInfo.read(group) == StoreInfo.read(f"file://{store}")
    assert {"format": 1, "n_cells": 60, "n_genes": 80, "chunk_size": 256}.items() <= info.to_json().items()
    assert len(info) == info.sources[0]["n_cells"] == info.datasets[0]["n_cells"] == 60
    assert "60 x 80" in str(info)
    assert read_vocab(group).hash == info.vocab_hash
    assert read_measured(group).tolist() == [[True] * 80]


def test_one_list_of_all_that_is_in_it(store):
    listed = json.loads((store / "zarr.json").read_text())["consolidated_metadata"]["metadata"]
    assert {"dataset_0/X/indptr", "dataset_0/obs/scforge_total", "scforge/vocab"} <= set(listed)


def test_remote(store):
    system = fsspec.filesystem("memory")
    system.put(str(store), "/stores/s.zarr", recursive=True)
    group, info = open_store_group("memory://stores/s.zarr")
    assert info == StoreInfo.read(store)
    assert read_vocab(group).hash == info.vocab_hash
    with pytest.raises(MissingFileError, match="'memory://stores/no.zarr' does not exist"):
        StoreInfo.read("memory://stores/no.zarr")
    system.mkdirs("/stores/.half.zarr.partial")
    system.touch("/stores/.half.zarr.partial/lock")
    with pytest.raises(DataError, match="'memory://stores/half.zarr' is incomplete"):
        StoreInfo.read("memory://stores/half.zarr")


def test_what_is_no_store(tiny_adata, store, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "zarr.json").write_text("{")
    tiny_adata.write_zarr(tmp_path / "a.zarr")
    zarr.create_group(tmp_path / "c.zarr", attributes={"encoding-type": "annbatch-preshuffled"})
    partial_path(tmp_path / "half.zarr").mkdir()
    for name, match in {
        "folder": "'.*folder' is a folder without a store",
        "file": "'.*file' is a file, but a store is a folder; scforge convert",
        "broken": "'.*broken' is no zarr folder",
        "a.zarr": r"'.*a\.zarr' is an AnnData, not a store; scforge convert SOURCE -o STORE",
        "s.zarr/dataset_0": "is an AnnData, not a store",
        "c.zarr": "is a collection of annbatch that scforge has not written",
        "half.zarr": r"'.*half\.zarr' is incomplete: run the same scforge convert again to continue\.",
    }.items():
        with pytest.raises(DataError, match=match):
            StoreInfo.read(tmp_path / name)
        assert not is_store(tmp_path / name)
    assert not is_store(tmp_path / "nothing")
    assert is_store(store)


@pytest.mark.parametrize("version", [2, None, "1"])
def test_formats_to_come(store, version):
    change_root(store, format=version)
    with pytest.raises(DataError, match="of a later scforge; update scforge"):
        StoreInfo.read(store)


def test_descriptions_with_more_are_read_and_with_less_are_damaged(store):
    change_root(store, something_new=1)
    assert StoreInfo.read(store).n_cells == 60
    root = json.loads((store / "zarr.json").read_text())
    del root["attributes"]["scforge"]["datasets"]
    (store / "zarr.json").write_text(json.dumps(root))
    with pytest.raises(DataError, match="is a damaged store: its description lacks 'datasets'"):
        StoreInfo.read(store)


def test_a_damaged_vocabulary(store):
    group = zarr.open_group(store, mode="a")
    content = bytes(group["scforge/vocab"][...]).replace(b"gene11", b"gene1x")
    group["scforge/vocab"][...] = np.frombuffer(content, dtype=np.uint8)
    with pytest.raises(DataError, match="damaged: its vocabulary is not what was written"):
        read_vocab(group)
    del group["scforge/measured"]
    with pytest.raises(DataError, match="damaged: it has no 'scforge/measured'"):
        read_measured(zarr.open_group(store, mode="r", use_consolidated=False))
