"""Cells behind a URL of S3, and what can go wrong there; on a server of this machine."""

from __future__ import annotations

import warnings

import anndata as ad
import numpy as np
import pytest

from scforge.data import StoreCells, convert, open_cells, open_streams
from scforge.errors import DataError, MissingFileError

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def server():
    """Options of a bucket that is named "cells"."""
    import s3fs
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(port=0)
    running.start()
    host, port = running.get_host_and_port()
    options = {"key": "a", "secret": "b", "endpoint_url": f"http://{host}:{port}"}
    s3fs.S3FileSystem(**options).mkdir("cells")
    yield options
    running.stop()


@pytest.fixture
def put(server, tmp_path):
    """Return a function that puts a file or folder into the bucket."""
    import s3fs

    def put(path) -> str:
        system = s3fs.S3FileSystem(**server)
        system.put(str(path), f"cells/{path.name}", recursive=path.is_dir())
        return f"s3://cells/{path.name}"

    return put


@pytest.mark.slow
def test_h5ad_and_zarr(tiny_adata, tmp_path, server, put):
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiny_adata.write_zarr(tmp_path / "a.zarr")
    expected = open_cells(tiny_adata)
    marks = []
    for name in ("a.h5ad", "a.zarr"):
        url = put(tmp_path / name)
        cells = open_cells(url, storage_options=server)
        np.testing.assert_array_equal(cells.counts.toarray(), expected.counts.toarray())
        assert cells.column("batch").tolist() == tiny_adata.obs["batch"].tolist()
        (stream,) = open_streams(url, storage_options=server)
        assert stream.name == url
        marks.append(stream.fingerprint())
        assert marks[-1] == open_streams(url, storage_options=server)[0].fingerprint()
    found = open_streams("s3://cells/*.h5ad", storage_options=server)
    assert [stream.name for stream in found] == ["s3://cells/a.h5ad"]
    tiny_adata.obs["batch"] = "z"
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    url = put(tmp_path / "a.h5ad")
    assert open_streams(url, storage_options=server)[0].fingerprint() != marks[0]


def test_a_store(tiny_adata, tmp_path, server, put):
    convert(tiny_adata, tmp_path / "store.zarr", shuffle=False, progress=False)
    cells = open_cells(put(tmp_path / "store.zarr"), obs=["batch"], storage_options=server)
    assert isinstance(cells, StoreCells)
    expected, block = open_cells(tiny_adata).block(np.arange(60)), cells.block(np.arange(60))
    np.testing.assert_array_equal(block.counts, expected.counts)
    assert cells.column("batch").tolist() == tiny_adata.obs["batch"].tolist()


@pytest.mark.parametrize("name", ["no.h5ad", "no.zarr", "no", "no*.h5ad"])
@pytest.mark.parametrize("bucket", ["cells", "no-bucket"])
def test_what_is_not_there(name, bucket, server):
    with pytest.raises(MissingFileError, match=rf"s3://{bucket}/no") as told:
        open_cells(f"s3://{bucket}/{name}", storage_options=server)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["a.h5ad", "a.zarr"])
def test_a_server_that_is_down(name, monkeypatch):
    monkeypatch.setattr("scforge.data.remote.FIRST_WAIT_S", 0.01)
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    options = {"key": "a", "secret": "b", "endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises(DataError, match=rf"s3://cells/{name}.*127\.0\.0\.1:9") as told:
        open_cells(f"s3://cells/{name}", storage_options=options)
    assert "\n" not in str(told.value)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [ConnectionResetError("Connection reset by peer"), PermissionError("Forbidden")])
def test_a_connection_that_breaks_in_between(fails, tiny_adata, tmp_path, server, put, monkeypatch):
    import s3fs

    monkeypatch.setattr("scforge.data.remote.FIRST_WAIT_S", 0.01)
    real, broken = s3fs.core.S3File._fetch_range, []

    def fetch(file, start, end):
        if broken:
            raise fails
        return real(file, start, end)

    monkeypatch.setattr(s3fs.core.S3File, "_fetch_range", fetch)
    big = ad.AnnData(np.tile(tiny_adata.X.toarray(), (140, 10)) + 1)  # two pieces
    big.write_h5ad(tmp_path / "big.h5ad")
    (stream,) = open_streams(put(tmp_path / "big.h5ad"), storage_options=server)
    chunks = stream.chunks()
    next(chunks)
    broken.append(True)
    with pytest.raises(DataError, match=r"'s3://cells/big\.h5ad' (cannot be reached, tried 5|may not be read)") as told:
        list(chunks)
    assert "\n" not in str(told.value)
