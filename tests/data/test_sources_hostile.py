"""Files of cells from people with bad intentions: nothing of them runs, nothing outside of them is read."""

import contextlib
import gc
import json
import os
import pickle
import re
import shutil
import threading
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import h5py
import pytest
import zarr
from anndata.io import write_elem

from scforge.cli import main
from scforge.config import Config, load_config
from scforge.config.load import dump_config
from scforge.data import convert, open_cells, read_h5ad
from scforge.data.remote import CHECKSUM, metadata_checksum
from scforge.errors import ConfigError, DataError, MissingFileError, OptionError, redacted
from scforge.testing import raises

PICKLE = {"id": "pickle", "protocol": 5}


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def _drop_consolidated(root: Path) -> None:
    (root / ".zmetadata").unlink(missing_ok=True)
    for file in root.rglob("zarr.json"):
        content = json.loads(file.read_text())
        content.pop("consolidated_metadata", None)
        file.write_text(json.dumps(content))


def _array(folder: Path, version: int, n: int, codecs: dict, chunk: bytes) -> None:
    """Write an array of text with any codecs, as no library would."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "c").mkdir(parents=True)
    attributes = {"encoding-type": "string-array", "encoding-version": "0.2.0"}
    if version == 2:
        array = {"zarr_format": 2, "shape": [n], "chunks": [n], "dtype": "|O", "order": "C", "fill_value": ""}
        (folder / ".zarray").write_text(json.dumps({**array, "filters": None, "compressor": None, **codecs}))
        (folder / ".zattrs").write_text(json.dumps(attributes))
        (folder / "0").write_bytes(chunk)
        return
    array = {"zarr_format": 3, "node_type": "array", "shape": [n], "data_type": "string", "fill_value": ""}
    grid = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [n]}}}
    keys = {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}}}
    (folder / "zarr.json").write_text(json.dumps({**array, **grid, **keys, **codecs, "attributes": attributes}))
    (folder / "c" / "0").write_bytes(chunk)


@pytest.fixture
def canary(tmp_path):
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "code of the file has run"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["obs/batch", "obs/_index", "var/_index", "X/data"])
@pytest.mark.parametrize(
    ("version", "codecs", "named"),
    [
        (2, {"filters": [{"id": "vlen-utf8"}, PICKLE]}, "pickle"),
        (2, {"filters": [{"id": "vlen-utf8"}], "compressor": PICKLE}, "pickle"),
        (2, {"filters": [{"id": "vlen-utf8", "name": "zstd"}, {"id": "json2"}]}, "json2"),
        (3, {"codecs": [{"name": "numcodecs.pickle", "configuration": {}}]}, r"numcodecs\.pickle"),
        (3, {"codecs": [{"name": "sharding_indexed", "configuration": {"codecs": [{"name": "other"}]}}]}, "other"),
    ],
)
def test_codecs_that_may_run_code(version, codecs, named, where, tiny_adata, tmp_path, canary):
    root = tmp_path / "a.zarr"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_elem(zarr.open_group(root, mode="w", zarr_format=version), "/", tiny_adata)
    _drop_consolidated(root)
    _array(root / where, version, tiny_adata.n_obs, codecs, pickle.dumps(Touch(canary)))
    for call in (open_cells, lambda place: convert(place, tmp_path / "s.zarr", progress=False)):
        with pytest.raises(DataError, match=rf"'{where}/.*a\.zarr' uses the codec '{named}'"):
            call(root)
    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/hostile.zarr", recursive=True)
    with pytest.raises(DataError, match=named):
        open_cells("memory://hostile.zarr")
    memory.rm("/hostile.zarr", recursive=True)


def test_codecs_in_a_store(tiny_adata, tmp_path, canary, capsys):
    root = tmp_path / "s.zarr"
    convert(tiny_adata, root, progress=False)
    place = root / "dataset_0" / "obs" / "_index" / "values"
    place = place if place.exists() else place.parent
    codecs = {"codecs": [{"name": "numcodecs.pickle"}]}
    _array(place, 3, tiny_adata.n_obs, codecs, pickle.dumps(Touch(canary)))
    content = json.loads((root / "zarr.json").read_text())
    key = str(place.relative_to(root))
    content["consolidated_metadata"]["metadata"][key] = json.loads((place / "zarr.json").read_text())
    content["attributes"][CHECKSUM] = metadata_checksum(content)  # a stranger can compute it
    (root / "zarr.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"uses the codec 'numcodecs\.pickle'"):
        open_cells(root).names()
    (root / "dataset_0" / "zarr.json").write_text("[1]")
    assert main(["inspect", str(root), "--verify"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_links_within_an_h5ad_are_followed(tiny_adata, tmp_path):
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        file["layers/counts"] = h5py.SoftLink("/X")
        file["obs/kind"] = file["obs/batch"]
    assert len(open_cells(tmp_path / "a.h5ad", layer="counts")) == 60
    assert read_h5ad(tmp_path / "a.h5ad").layers["counts"].sum() == tiny_adata.X.sum()


@pytest.fixture
def web(tmp_path):
    """URL of a web server over a folder, with a password and a signature, and a function that says what it answers."""
    folder, answer = tmp_path / "web", {}
    folder.mkdir()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self, *, body=True):
            file = folder / self.path.partition("?")[0].lstrip("/")
            status = answer.get("status", 200 if file.is_file() else 404)
            content = file.read_bytes() if file.is_file() else b""
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            extra = {"Location": self.path} if status == 302 else {"Accept-Ranges": "bytes"}
            if asked:
                # A thread that frees an object of h5py waits for the lock that h5py holds until the server answers.
                answer.setdefault("collects", []).append(gc.isenabled())
            if asked and status == 200:
                first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
                extra["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                content, status = content[first : last + 1 - answer.get("short", 0)], 206
            self.send_response(status)
            for name, value in {**extra, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):  # who asked has gone
                if body:
                    self.wfile.write(content)

        def do_HEAD(self):
            self.do_GET(body=False)

        def log_message(self, *told):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://user:hunter2@127.0.0.1:{server.server_port}/a.h5ad?signature=abc123", answer
    server.shutdown()
    server.server_close()


def test_credentials_are_not_written(web, tiny_adata, tmp_path, capsys):
    folder, url, said = web
    tiny_adata.write_h5ad(folder / "a.h5ad")
    assert main(["convert", url, "-o", str(tmp_path / "s.zarr")]) == 0
    assert main(["inspect", str(tmp_path / "s.zarr")]) == 0
    assert main(["convert", url, "-o", str(tmp_path / "s.zarr")]) == 2
    assert main(["convert", url.replace("a.h5ad", "b.h5ad"), "-o", str(tmp_path / "t.zarr")]) == 2
    told = "".join(capsys.readouterr())
    assert re.search(r"http://\*\*\*@127\.0\.0\.1:\d+/a\.h5ad\?\*\*\*", told)
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("s.zarr/**/*") if file.is_file())
    for secret in ("hunter2", "abc123"):
        assert secret not in told
        assert secret.encode() not in written
    with pytest.raises(OptionError, match="requires a credential, which scforge does not save to files"):
        open_cells(redacted(url))
    assert main(["config", "check", url]) == 2
    assert "hunter2" not in capsys.readouterr().err
    assert redacted("C:/me@work/a.h5ad") == "C:/me@work/a.h5ad"
    assert any(said["collects"]) is False is not gc.isenabled()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"status": 401}, r"returned status 401 \(Unauthorized\); check the credentials"),
        ({"status": 429}, r"returned status 429 \(Too Many Requests\); try again later"),
        ({"status": 302}, r"redirects in a loop"),
        ({"short": 7}, r"bytes were requested, but only .* were received"),
    ],
)
@pytest.mark.parametrize("name", ["a.h5ad", "a.zarr"])
def test_what_a_web_server_answers(name, answer, message, web, tiny_adata, monkeypatch):
    monkeypatch.setattr("scforge.data.remote.FIRST_WAIT_S", 0.01)
    folder, url, said = web
    tiny_adata.write_h5ad(folder / "a.h5ad")
    said.update(answer)
    if name == "a.zarr":
        url = url.partition("?")[0].replace("a.h5ad", name)
        message = "does not exist|not there" if "short" in answer else message
    with pytest.raises(Exception, match=message) as told:
        open_cells(url)
    assert isinstance(told.value, DataError | MissingFileError)
    assert "\n" not in str(told.value)
    shown = "".join(traceback.format_exception(told.value))
    assert "hunter2" not in shown
    assert "abc123" not in shown


@pytest.mark.parametrize("url", ["zip://a.h5ad::{file}", "filecache::zip://a.h5ad::{file}", "filecache::no://a.h5ad"])
def test_urls_in_urls(url, tmp_path, capsys):
    (tmp_path / "file").write_bytes(b"x" * 1000)
    url = url.format(file=tmp_path / "file")
    with pytest.raises(OptionError, match="chains URLs with '::', which scforge does not open"):
        open_cells(url)
    assert main(["inspect", url]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_configuration_is_written_without_credentials(tmp_path):
    options = {"key": "AKIA", "secret": "hunter2", "anon": False, "endpoint_url": "http://me:hunter2@host"}
    config = Config(data={"paths": ["https://me:hunter2@host/a.h5ad"], "storage_options": options})
    text = dump_config(config)
    assert "hunter2" not in text
    assert "AKIA" not in text
    assert config.data.storage_options == options
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"data\.paths=.* requires a credential, which scforge does not save"):
        load_config(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"data\.storage_options=") as told:
        load_config(tmp_path / "a.yaml", ["data.paths=cells.h5ad", "data.storage_options=[hunter3]"])
    assert "hunter3" not in str(told.value)


@pytest.mark.slow
def test_descriptions_of_stores(tiny_adata, tmp_path):
    convert(tiny_adata, tmp_path / "s.zarr", progress=False)
    file = tmp_path / "s.zarr" / "zarr.json"
    text = file.read_text()
    for key in ("datasets", "sources", "counts_kept", "obs_columns", "chunk_size"):
        for value in (None, -1, "x", {}, True, 10**30):
            content = json.loads(text)
            content["attributes"]["scforge"][key] = value
            file.write_text(json.dumps(content))
            with pytest.raises(DataError, match=r"^[^\n]*$"):
                open_cells(tmp_path / "s.zarr")


def test_attributes_that_no_library_wrote(tiny_adata, tmp_path):
    path = tmp_path / "a.h5ad"
    tiny_adata.write_h5ad(path)
    with h5py.File(path, "r+") as file:
        file["obs"].attrs["column-order"] = ["batch", "batch"]
    for call in (open_cells, lambda place: convert(place, tmp_path / "s.zarr", progress=False)):
        with raises(DataError, "obs"):
            call(path)
    with h5py.File(path, "r+") as file:
        file["obs"].attrs["encoding-type"] = "a" * 10_000
    with pytest.raises(DataError) as told:
        open_cells(path)
    assert len(str(told.value)) < 1000


def test_processes_that_share_a_cache_wait(tiny_adata, tmp_path, monkeypatch):
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    places = [(tmp_path / "a.h5ad", tmp_path / "s.zarr")] * 3
    with ThreadPoolExecutor(3) as workers:
        found = workers.map(lambda place: len(open_cells(place[0], cache=place[1])), places)
        assert list(found) == [60, 60, 60]
    # Nothing is written where a folder may not be written to.
    (tmp_path / ".s.zarr.lock").unlink(missing_ok=True)
    monkeypatch.setattr("scforge.data.sources.os.access", lambda path, mode: False)
    assert len(open_cells(tmp_path / "a.h5ad", cache=tmp_path / "s.zarr")) == 60
    assert not (tmp_path / ".s.zarr.lock").exists()
