import json
import os
import subprocess
import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
from scipy import sparse

from scforge.data import StoreInfo, convert
from scforge.data.journal import Journal, Staging, locked
from scforge.data.store_files import partial_path
from scforge.errors import DataError, OptionError

KILLS = """
import dataclasses, json, os, random, signal, sys, time
from pathlib import Path
import annbatch  # what takes long to import, once
from scforge.data import StoreInfo, convert
from scforge.data.convert_plan import Layout
from scforge.data.stream_matrix import Matrix

folder, n_kills = Path(sys.argv[1]), int(sys.argv[2])
whole = Layout.of.__func__
def small(cls, *args, **kwargs):
    layout = whole(cls, *args, **kwargs)
    return dataclasses.replace(layout, bucket_size=512, n_buckets=-(-layout.n_cells // 512), buffer_entries=3000)
Layout.of = classmethod(small)
Matrix.row_chunks.__defaults__ = (1000,)
sources, target = [folder / "a.h5ad", folder / "b.h5ad"], folder / "s.zarr"

def run(seconds=None):
    # A process of its own, killed after some seconds; it shares what is imported.
    child = os.fork()
    if child == 0:
        try:
            convert(sources, target, progress=False)
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return "killed" if os.WIFSIGNALED(status) else "done" if os.WEXITSTATUS(status) == 0 else "failed"

begin = time.monotonic()
assert run() == "done"
whole_run = time.monotonic() - begin
expected = StoreInfo.read(target).content_hash
os.rename(target, folder / "expected.zarr")
random.seed(int(sys.argv[3]))
killed, completed = 0, []
while killed < n_kills:
    if target.exists():  # done in spite of the kills
        completed.append(StoreInfo.read(target).content_hash)
        os.rename(target, folder / f"done{len(completed)}.zarr")
    outcome = run(random.uniform(0, whole_run))
    assert outcome != "failed"
    killed += outcome == "killed"
if not target.exists():
    assert run() == "done"
completed.append(StoreInfo.read(target).content_hash)
left = sorted(path.name for path in folder.glob(".*"))
print(json.dumps({"expected": expected, "completed": completed, "killed": killed, "left": left}))
"""


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    generator = np.random.default_rng(0)
    paths = []
    for name, n_cells in {"a": 900, "b": 600}.items():
        adata = ad.AnnData(sparse.csr_matrix(generator.poisson(0.5, (n_cells, 60)) + (np.arange(60) == 0)))
        adata.obs["group"] = generator.choice(["x", "y", name], n_cells)
        paths.append(tmp_path / f"{name}.h5ad")
        adata.write_h5ad(paths[-1])
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("n_kills", [3, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_kills_at_any_moment_change_nothing(sources, tmp_path, n_kills):
    command = [sys.executable, "-c", KILLS, str(tmp_path), str(n_kills), "7"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["killed"] == n_kills
    assert set(found["completed"]) == {found["expected"]}
    assert found["left"] in ([], [".s.zarr.partial"])  # the last may have been killed when all was done


class Stop(Exception):
    pass


@pytest.fixture
def begun(sources, tmp_path, monkeypatch) -> Path:
    """A conversion that was stopped when all cells were in temporary files."""

    def stop(*_: object, **__: object) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr("scforge.data.convert_steps.load_cells", stop)
        with pytest.raises(Stop):
            convert(sources, tmp_path / "s.zarr")
    return tmp_path / "s.zarr"


def test_it_goes_on_where_it_was(sources, begun, tmp_path, monkeypatch):
    def unread(*_: object) -> None:
        raise AssertionError("a source was read again")

    with pytest.raises(DataError, match=r"s\.zarr' is incomplete: run the same scforge convert again"):
        StoreInfo.read(begun)
    # What is behind the journal is cut off.
    staging = Staging(partial_path(begun))
    with staging.bucket(0).open("ab") as file:
        file.write(b"half a segment")
    (staging.folder / ".journal.abc.json").write_text("{")
    with monkeypatch.context() as patch:
        patch.setattr("scforge.data.stream_files.FileStream.chunks", unread)
        info = convert(sources, begun)
    assert info.content_hash == convert(sources, tmp_path / "t.zarr").content_hash
    assert not list(begun.parent.glob(".*"))


def test_damaged_temporary_files_are_told(sources, begun):
    file = Staging(partial_path(begun)).bucket(0)
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    with pytest.raises(DataError, match=r"cells_0' has lost 10 bytes; pass overwrite=True"):
        convert(sources, begun)
    file.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    with pytest.raises(DataError, match=r"cells_0' is damaged, so the conversion cannot go on"):
        convert(sources, begun)
    journal = partial_path(begun) / "journal.json"
    journal.write_text(journal.read_text()[:-5])
    with pytest.raises(DataError, match="the journal .* cannot be read"):
        convert(sources, begun)
    journal.write_text("{}")
    with pytest.raises(DataError, match="the journal .* is of another scforge"):
        convert(sources, begun)
    assert convert(sources, begun, overwrite=True).n_cells == 1500


def test_a_second_conversion_to_the_same_place_is_refused(sources, tmp_path):
    with (
        locked(partial_path(tmp_path / "s.zarr")),
        pytest.raises(OptionError, match=r"another conversion is writing to '.*\.s\.zarr\.partial'"),
    ):
        convert(sources, tmp_path / "s.zarr")
    assert convert(sources, tmp_path / "s.zarr").n_cells == 1500


@pytest.mark.slow
def test_a_kill_between_the_store_and_its_journal(sources, tmp_path, monkeypatch):
    save = Staging.save

    def stop(staging: Staging, journal: Journal) -> None:
        if journal.finished:
            raise Stop
        save(staging, journal)

    target = tmp_path / "s.zarr"
    staging = Staging(partial_path(target))

    def kill() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Staging, "save", stop)
            with pytest.raises(Stop):
                convert(sources, target, overwrite=True)
        assert staging.folder.exists()

    kill()
    first = StoreInfo.read(target).content_hash
    assert convert(sources, target, overwrite=True).content_hash == first
    assert (target / "dataset_0").exists()
    kill()
    with pytest.raises(OptionError, match="exists; pass overwrite=True"):
        convert(sources, target)
    assert not staging.folder.exists()


@pytest.mark.parametrize("kind", ["obs", "logs", "empty"])
def test_a_rejected_conversion_leaves_nothing(sources, tmp_path, kind):
    adata = ad.read_h5ad(sources[0])
    if kind == "logs":
        adata.X = np.log1p(adata.X)
    if kind == "empty":
        adata.X = sparse.csr_matrix(adata.X.toarray() * (np.arange(900) != 3)[:, None])
    adata.write_h5ad(sources[0])
    with pytest.raises(DataError):
        convert(sources, tmp_path / "s.zarr", obs=["other"] if kind == "obs" else None)
    assert sorted(tmp_path.iterdir()) == sources


def test_what_does_not_fit_the_unfinished_conversion_is_told(sources, begun):
    before = sorted(partial_path(begun).iterdir())
    with pytest.raises(OptionError, match=r"was begun with seed=0, not 1; .* overwrite=True \(--overwrite\)"):
        convert(sources, begun, seed=1)
    with pytest.raises(OptionError, match=r"unfinished conversion of other sources .*'.*a\.h5ad', '.*b\.h5ad'"):
        convert(sources[:1], begun)
    with pytest.raises((DataError, OptionError), match="other"):
        convert(sources, begun, obs=["other"])
    found = sources[1].stat()
    os.utime(sources[1], ns=(found.st_atime_ns, found.st_mtime_ns + 10**9))
    with pytest.raises(DataError, match=r"b\.h5ad' has changed since the unfinished .* start again, or remove"):
        convert(sources, begun)
    assert sorted(partial_path(begun).iterdir()) == before
    assert convert(sources, begun, seed=1, overwrite=True).seed == 1
