import json
import subprocess
import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
from scipy import sparse

from scforge.data import convert, open_cells
from scforge.data.conversion import _working_folder
from scforge.errors import DataError, OptionError

KILLS = """
import json, os, random, signal, sys, time
from pathlib import Path
import annbatch  # what takes long to import, once
from scforge.data import conversion, convert
from scforge.data.matrix import Matrix
from scforge.data.store import StoreInfo

folder, n_kills = Path(sys.argv[1]), int(sys.argv[2])
conversion.dataset_size = lambda *_: 512
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
    assert len(found["left"]) <= 2  # the last may have been killed when all was done
    assert all(name.startswith(".s.zarr.") and ".saving" in name for name in found["left"])


def test_a_killed_conversion_starts_again(sources, tmp_path):
    target = tmp_path / "s.zarr"
    expected = convert(sources, tmp_path / "t.zarr").content_hash
    work = tmp_path / ".s.zarr.0123abcd.saving"
    (work / "store" / "dataset_0").mkdir(parents=True)
    for name in ("genes_0", "store/zarr.json", "store/dataset_7"):
        (work / name).write_text("half")
    with pytest.raises(DataError, match=r"s\.zarr' is incomplete; run the same scforge convert command again"):
        open_cells(target)
    assert convert(sources, target).content_hash == expected
    assert not list(tmp_path.glob(".*"))


def test_a_second_conversion_to_the_same_place_is_refused(sources, tmp_path):
    with (
        _working_folder(tmp_path / "s.zarr"),
        pytest.raises(OptionError, match=r"another conversion is writing to '.*s\.zarr'"),
    ):
        convert(sources, tmp_path / "s.zarr")
    assert convert(sources, tmp_path / "s.zarr").n_cells == 1500


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
