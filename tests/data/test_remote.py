"""Stores and files on an S3 server, here on this machine, with connections that break."""

import socket
import sys
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import CellOrder, convert, open_cells, remote
from scforge.data.readers import open_streams
from scforge.data.remote import open_group
from scforge.data.store import StoreCells
from scforge.errors import DataError, MissingFileError, OptionError

s3fs = pytest.importorskip("s3fs", reason="the client of S3 comes with the extra cloud")
server = pytest.importorskip("moto.server", reason="the S3 server comes with the group test")

KEYS = {"key": "testing", "secret": "testing"}
N_CELLS = 3000


@pytest.fixture(scope="module")
def s3():
    """Port of an S3 server with an empty bucket."""
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    port = running.get_host_and_port()[1]
    files(port).call_s3("create_bucket", Bucket="bucket")
    yield port
    running.stop()


def options(port):
    return {**KEYS, "endpoint_url": f"http://127.0.0.1:{port}"}


def files(port):
    return remote.remote_file_system("s3://bucket", options(port))[0]


@pytest.fixture
def put(s3):
    """Return a function that puts a file or folder into the bucket."""

    def put(path) -> str:
        files(s3).put(str(path), f"bucket/{path.name}", recursive=path.is_dir())
        return f"s3://bucket/{path.name}"

    return put


@pytest.fixture(scope="module")
def adata():
    rng = np.random.default_rng(0)
    counts = sparse.random(N_CELLS, 400, density=0.3, format="csr", random_state=rng, dtype=np.float32)
    counts.data = rng.integers(1, 300, counts.nnz).astype(np.float32)
    kind = pd.Categorical(rng.choice(["a", "b"], N_CELLS))
    obs = pd.DataFrame({"kind": kind}, index=[f"c{i}" for i in range(N_CELLS)])
    return anndata.AnnData(counts, obs=obs, var=pd.DataFrame(index=[f"G{i}" for i in range(400)]))


@pytest.fixture(scope="module")
def store(adata, s3, tmp_path_factory):
    """A store on this machine, a copy of which is in the bucket."""
    path = tmp_path_factory.mktemp("cloud") / "store.zarr"
    convert(adata, path, seed=3, progress=False)
    files(s3).put(str(path), "bucket/store.zarr", recursive=True)
    return path


@pytest.fixture
def answers(monkeypatch):
    """The sizes of what the server answers; the requests for pieces fail first as often as there are errors."""
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
    real, answers = s3fs.S3FileSystem._cat_file, SimpleNamespace(sizes=[], errors=[])

    async def cat(system, *arguments, **options):
        if answers.errors:
            raise answers.errors.pop()
        content = await real(system, *arguments, **options)
        answers.sizes.append(len(content))
        return content

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", cat)
    return answers


def same(block, expected):
    for part in ("indptr", "genes", "counts", "totals", "rows"):
        np.testing.assert_array_equal(getattr(block, part), getattr(expected, part))


@pytest.mark.slow
def test_a_store_behind_a_url_has_the_same_cells(store, s3, answers):
    here, there = StoreCells.open(store), StoreCells.open("s3://bucket/store.zarr", storage_options=options(s3))
    assert len(there) == N_CELLS
    assert there.column("kind").tolist() == here.column("kind").tolist()
    np.testing.assert_array_equal(there.n_expressed, here.n_expressed)
    answers.sizes.clear()
    same(there.block(np.arange(700, 710)), here.block(np.arange(700, 710)))
    shards = [path.stat().st_size for path in store.rglob("X/*/c/*") if path.is_file()]
    assert 0 < sum(answers.sizes) < sum(shards) / 4  # few cells cost few bytes
    order = CellOrder(np.arange(N_CELLS), batch_size=100, chunk_size=here.chunk_size, seed=1)
    for block, expected in zip(there.stream(order.windows()), here.stream(order.windows()), strict=True):
        same(block, expected)
    # A connection that breaks is made again; a server that stays away is told after a while.
    answers.errors = [ConnectionResetError("Connection reset by peer") for _ in range(4)]
    same(there.block(np.arange(10)), here.block(np.arange(10)))
    assert not answers.errors
    answers.errors = [ConnectionResetError("Connection reset by peer") for _ in range(100)]
    with pytest.raises(DataError, match=r"'s3://bucket/store\.zarr.*in 5 attempts") as caught:
        there.block(np.arange(10))
    assert "\n" not in str(caught.value)
    answers.errors.clear()
    same(there.block(np.arange(10)), here.block(np.arange(10)))


@pytest.mark.parametrize("part", ["X/data", "X/indices", "X/indptr", "obs/scforge_total"])
def test_a_chunk_that_is_removed_from_the_server(store, s3, part):
    name = f"broken_{part.rpartition('/')[2]}.zarr"
    files(s3).put(str(store), f"bucket/{name}", recursive=True)
    url = f"s3://bucket/{name}"
    there = StoreCells.open(url, storage_options=options(s3))
    files(s3).rm(f"bucket/{name}/dataset_0/{part}/c", recursive=True)
    with pytest.raises(DataError, match=rf"{url}/dataset_0/{part}/c/\d+' is missing; copy the data"):
        (StoreCells.open(url, storage_options=options(s3)) if "obs" in part else there).block(np.arange(N_CELLS))


def test_a_server_that_is_not_there(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in ("cells.h5ad", "cells.zarr"):
        with pytest.raises(DataError, match=rf"^'s3://bucket/{name}' cannot be read.* Could not connect[^\n]*$"):
            open_cells(f"s3://bucket/{name}", storage_options=options(port))
    with pytest.raises(DataError, match=r"'s3://bucket/store\.zarr.*in 5 attempts.*check the connection"):
        StoreCells.open("s3://bucket/store.zarr", storage_options=options(port))


@pytest.mark.parametrize("name", ["bucket/no.h5ad", "bucket/no.zarr", "no-bucket/no", "bucket/no*.h5ad"])
def test_what_is_not_there(name, s3):
    with pytest.raises(MissingFileError):
        open_cells(f"s3://{name}", storage_options=options(s3))


@pytest.mark.slow
def test_h5ad_and_zarr(tiny_adata, tmp_path, s3, put, monkeypatch):
    storage = {"storage_options": options(s3)}
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiny_adata.write_zarr(tmp_path / "a.zarr")
    marks = []
    for name in ("a.h5ad", "a.zarr"):
        url = put(tmp_path / name)
        cells = open_cells(url, **storage)
        np.testing.assert_array_equal(cells.counts.toarray(), open_cells(tiny_adata).counts.toarray())
        assert cells.column("batch").tolist() == tiny_adata.obs["batch"].tolist()
        (stream,) = open_streams(url, **storage)
        assert stream.name == url
        marks.append(stream.fingerprint())
        assert marks[-1] == open_streams(url, **storage)[0].fingerprint()
    assert [stream.name for stream in open_streams("s3://bucket/a*.h5ad", **storage)] == ["s3://bucket/a.h5ad"]
    tiny_adata.obs["batch"] = "z"
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    assert open_streams(put(tmp_path / "a.h5ad"), **storage)[0].fingerprint() != marks[0]
    big = anndata.AnnData(np.tile(tiny_adata.X.toarray(), (140, 10)) + 1)  # two pieces
    big.write_h5ad(tmp_path / "big.h5ad")
    url = put(tmp_path / "big.h5ad")
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
    for fails, message in [
        (ConnectionResetError("Connection reset by peer"), "could not be reached in 5 attempts"),
        (PermissionError("Forbidden"), "is not readable"),
    ]:
        with monkeypatch.context() as patch:
            fetch = Mock(side_effect=s3fs.core.S3File._fetch_range)
            patch.setattr(s3fs.core.S3File, "_fetch_range", lambda *arguments, fetch=fetch: fetch(*arguments))
            chunks = open_streams(url, **storage)[0].chunks()
            next(chunks)
            fetch.side_effect = fails
            with pytest.raises(DataError, match=rf"'s3://bucket/big\.h5ad' {message}"):
                list(chunks)


def test_groups_elsewhere(monkeypatch):
    group = open_group("memory://scforge/group.zarr", mode="w")
    group.create_array("x", data=np.arange(5))
    assert open_group("memory://scforge/group.zarr")["x"][:].tolist() == [0, 1, 2, 3, 4]
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for url, message in [
        ("s4://bucket/x", "'s4://bucket/x' has the protocol 's4'; use one of 'file', 'memory', "),
        ("gs://bucket/x", r"needs a package .*gcsfs.*pip install \"scforge\[cloud\]\""),
    ]:
        with pytest.raises(OptionError, match=message):
            open_group(url)
    assert not any(map(remote.is_url, ["cells.h5ad", r"C:\cells.h5ad", "data/*.h5ad", "s3:/bucket", 3]))
