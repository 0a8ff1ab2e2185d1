import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import GeneVocab, convert
from scforge.data.conversion import dataset_size
from scforge.data.memory import parse_bytes
from scforge.data.store import StoreInfo
from scforge.errors import DataError, OptionError

CONVERT = """
import re, sys
from pathlib import Path
from scforge.data import convert
convert(sys.argv[1], sys.argv[2], memory=sys.argv[3])
status = dict(re.findall(r"(\\w+):\\s*(\\d+) kB", Path("/proc/self/status").read_text()))
# Not ru_maxrss, which a process has from the one that started it.
print(1024 * (int(status["VmHWM"]) - int(status["RssFile"])))
"""
LIBRARY_FILES = 400_000_000
"""Of what is planned for libraries, the pages of their files: the kernel chooses how many stay, and takes them back."""


def write_random(path: Path, n_cells: int, n_genes: int, n_expressed: int) -> None:
    """Write cells that cannot be packed well; `n_expressed` genes of each."""
    generator = np.random.default_rng(0)
    step = n_genes // n_expressed
    indices = generator.integers(step, size=(n_cells, n_expressed)) + step * np.arange(n_expressed)
    data = generator.integers(1, 60_000, indices.shape).astype(np.float32)
    indptr = np.arange(n_cells + 1) * n_expressed
    counts = sparse.csr_matrix((data.ravel(), indices.ravel().astype(np.int32), indptr), shape=(n_cells, n_genes))
    obs = pd.DataFrame({"n": np.arange(n_cells)}, index=[f"c{i}" for i in range(n_cells)])
    ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=[f"g{i}" for i in range(n_genes)])).write_h5ad(path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the largest size of a process is read from /proc")
@pytest.mark.parametrize(
    ("memory", "n_cells"),
    [("1.8GB", 50_000), pytest.param("2.5GB", 100_000, marks=pytest.mark.exhaustive)],
)
def test_memory_stays_below_what_is_given(tmp_path, memory, n_cells):
    # 0.4 or 0.8 GB of counts as they are read, two or four times what is left of the memory.
    write_random(tmp_path / "a.h5ad", n_cells, 20_000, 1000)
    command = [sys.executable, "-c", CONVERT, *(str(tmp_path / name) for name in ("a.h5ad", "s.zarr")), memory]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) < parse_bytes("memory", memory) - LIBRARY_FILES
    assert len(StoreInfo.read(tmp_path / "s.zarr").datasets) > 1


def test_the_least_memory_is_told_and_enough():
    streams = [SimpleNamespace(n_entries=10**9)]
    table = pd.DataFrame({"n": np.zeros(10**6)})
    vocab = GeneVocab.from_genes([f"g{i}" for i in range(20_000)])
    with pytest.raises(OptionError, match=r"memory of 1.00GB is not enough; pass at least (\d\.\d)GB") as told:
        dataset_size(10**9, streams, vocab, table)
    least = float(str(told.value).split("at least ")[1].removesuffix("GB."))
    small, large = (dataset_size(int(memory * 1e9), streams, vocab, table) for memory in (least, 4))
    assert small % 256 == large % 256 == 0
    assert 256 < small < 50_000 < large < 500_000


def test_too_little_space_is_seen_before(tiny_adata, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DataError, match=r"has 0\.00 GB free, but up to .*; free some space"):
        convert(tiny_adata, tmp_path / "s.zarr")
    monkeypatch.undo()
    assert convert(tiny_adata, tmp_path / "s.zarr").n_cells == 60


def test_a_file_that_may_not_grow(tmp_path):
    write_random(tmp_path / "a.h5ad", 3000, 2000, 200)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(DataError, match=r"no space left on the disk of '.*s\.zarr' \(.*\); free some space"):
            convert(tmp_path / "a.h5ad", tmp_path / "s.zarr")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5ad"]
