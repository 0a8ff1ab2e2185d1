"""Stores and files on an S3 server, here on this machine, with connections that break."""

import contextlib
import socket
import sys
import threading
import warnings

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import CellOrder, StoreCells, convert, open_cells, open_streams
from scforge.data import readers as remote
from scforge.data.readers import open_group
from scforge.errors import DataError, MissingFileError, OptionError

pytest.importorskip("s3fs", reason="the client of S3 comes with the extra cloud")
server = pytest.importorskip("moto.server", reason="the S3 server comes with the group test")

KEYS = {"key": "testing", "secret": "testing"}
N_CELLS = 3000


class Proxy:
    """Passes TCP connections on to a server on this machine, counts what comes back, and breaks them on demand.

    `cuts` holds, for each connection to come that is to break, after how many bytes; `down` breaks all at once, and
    `silent` lets all wait for ever.
    """

    def __init__(self, port):
        self.target = ("127.0.0.1", port)
        self.received, self.connections = 0, 0
        self.cuts, self.down, self.silent = [], False, False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.open = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def options(self):
        return options(self.port)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                self.connections += 1
                self.open.append(client)
                if self.down:
                    client.close()
                elif not self.silent:
                    threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        left = self.cuts.pop(0) if self.cuts else None
        with client, socket.create_connection(self.target) as upstream:
            threading.Thread(target=self._pass, args=(client, upstream), daemon=True).start()
            with contextlib.suppress(OSError):
                while data := upstream.recv(16384):
                    self.received += len(data)
                    if self.down or (left is not None and len(data) > left):
                        client.sendall(data[: left or 0])
                        break
                    client.sendall(data)
                    left = None if left is None else left - len(data)
            # What was not sent yet must not keep the connection open.
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _pass(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def break_all(self):
        """Break what is open, so that the next request needs a new connection."""
        for client in self.open:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.break_all()
        self.listener.close()


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
def proxy(s3, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
    proxy = Proxy(s3)
    yield proxy
    proxy.close()


def same(block, expected):
    for part in ("indptr", "genes", "counts", "totals", "rows"):
        np.testing.assert_array_equal(getattr(block, part), getattr(expected, part))


@pytest.mark.slow
def test_a_store_behind_a_url_has_the_same_cells(store, proxy):
    here, there = StoreCells.open(store), StoreCells.open("s3://bucket/store.zarr", storage_options=proxy.options)
    assert len(there) == N_CELLS
    assert there.column("kind").tolist() == here.column("kind").tolist()
    np.testing.assert_array_equal(there.n_expressed, here.n_expressed)
    before = proxy.received
    same(there.block(np.arange(700, 710)), here.block(np.arange(700, 710)))
    shards = [path.stat().st_size for path in store.rglob("X/*/c/*") if path.is_file()]
    assert 0 < proxy.received - before < sum(shards) / 4  # few cells cost few bytes
    order = CellOrder(np.arange(N_CELLS), batch_size=100, chunk_size=here.chunk_size, seed=1)
    for block, expected in zip(there.stream(order.windows()), here.stream(order.windows()), strict=True):
        same(block, expected)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 200, 3000])
def test_a_connection_that_breaks_is_made_again(store, adata, proxy, put, tmp_path, after):
    cells = StoreCells.open("s3://bucket/store.zarr", storage_options=proxy.options)
    proxy.cuts = [after] * 3
    proxy.break_all()
    rows = np.arange(0, N_CELLS, 3)
    before = proxy.connections
    same(cells.block(rows), StoreCells.open(store).block(rows))
    assert proxy.connections > before + 1
    assert not proxy.cuts
    # The client itself asks a second time, once; so many breaks need our own tries.
    proxy.cuts = [100] * 10
    assert "scforge" in open_group("s3://bucket/store.zarr", proxy.options).attrs
    assert not proxy.cuts
    adata.write_h5ad(tmp_path / "cells.h5ad")
    url = put(tmp_path / "cells.h5ad")
    proxy.cuts = [0, 300, 5000]
    same(open_cells(url, storage_options=proxy.options).block(rows), open_cells(adata).block(rows))
    assert not proxy.cuts


@pytest.mark.slow
@pytest.mark.parametrize("how", ["down", "silent"])
def test_a_server_that_stays_away_is_told_after_a_while(store, proxy, monkeypatch, how):
    monkeypatch.setattr(remote, "TRY_S", 0.2)
    cells = StoreCells.open("s3://bucket/store.zarr", storage_options=proxy.options)
    setattr(proxy, how, True)
    proxy.break_all()
    before = proxy.connections
    with pytest.raises(DataError, match=r"'s3://bucket/store\.zarr.*tried 5 times") as caught:
        cells.block(np.arange(10))
    assert "\n" not in str(caught.value)
    assert 5 <= proxy.connections - before <= 40
    setattr(proxy, how, False)
    same(cells.block(np.arange(10)), StoreCells.open(store).block(np.arange(10)))


@pytest.mark.parametrize("name", ["cells.h5ad", "cells.zarr"])
def test_a_server_that_is_not_there(name, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(DataError, match=rf"s3://bucket/{name}.*tried 5 times.*check the connection") as told:
        open_cells(f"s3://bucket/{name}", storage_options=options(port))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["no.h5ad", "no.zarr", "no", "no*.h5ad"])
@pytest.mark.parametrize("bucket", ["bucket", "no-bucket"])
def test_what_is_not_there(name, bucket, s3):
    with pytest.raises(MissingFileError, match=rf"s3://{bucket}/no") as told:
        open_cells(f"s3://{bucket}/{name}", storage_options=options(s3))
    assert "\n" not in str(told.value)


@pytest.mark.slow
def test_h5ad_and_zarr(tiny_adata, tmp_path, s3, put):
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


@pytest.mark.slow
@pytest.mark.parametrize("fails", [ConnectionResetError("Connection reset by peer"), PermissionError("Forbidden")])
def test_a_connection_that_breaks_in_between(fails, tiny_adata, tmp_path, s3, put, monkeypatch):
    import s3fs

    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
    real, broken = s3fs.core.S3File._fetch_range, []

    def fetch(file, start, end):
        if broken:
            raise fails
        return real(file, start, end)

    monkeypatch.setattr(s3fs.core.S3File, "_fetch_range", fetch)
    big = anndata.AnnData(np.tile(tiny_adata.X.toarray(), (140, 10)) + 1)  # two pieces
    big.write_h5ad(tmp_path / "big.h5ad")
    (stream,) = open_streams(put(tmp_path / "big.h5ad"), storage_options=options(s3))
    chunks = stream.chunks()
    next(chunks)
    broken.append(True)
    with pytest.raises(
        DataError, match=r"'s3://bucket/big\.h5ad' (cannot be reached, tried 5|may not be read)"
    ) as told:
        list(chunks)
    assert "\n" not in str(told.value)


def test_groups_elsewhere(monkeypatch):
    group = open_group("memory://scforge/group.zarr", mode="w")
    group.create_array("x", data=np.arange(5))
    assert open_group("memory://scforge/group.zarr")["x"][:].tolist() == [0, 1, 2, 3, 4]
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for url, message in [
        ("s4://bucket/x", "'s4://bucket/x' starts with the unknown scheme 's4'"),
        ("s33://bucket/x", "did you mean 's3'"),
        ("gs://bucket/x", r"needs a package .*gcsfs.*pip install \"scforge\[cloud\]\""),
    ]:
        with pytest.raises(OptionError, match=message):
            open_group(url)
    assert not any(map(remote.is_url, ["cells.h5ad", r"C:\cells.h5ad", "data/*.h5ad", "s3:/bucket", 3]))
