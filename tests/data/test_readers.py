from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import memory
from scforge.data.memory import available_memory
from scforge.data.readers import open_streams
from scforge.errors import DataError, MissingFileError, OptionError
from scforge.testing import raises

FORMS = {"csr": sparse.csr_matrix, "csc": sparse.csc_matrix, "dense": lambda x: x.toarray()}


def read(stream) -> np.ndarray:
    """All rows, dense, after a check that the pieces follow each other."""
    rows, parts = 0, []
    for first, chunk in stream.chunks():
        assert first == rows
        assert isinstance(chunk, sparse.csr_matrix)
        rows += chunk.shape[0]
        parts.append(chunk.toarray())
    return np.concatenate(parts)


@pytest.mark.parametrize("form", FORMS)
def test_an_anndata_and_its_file(tiny_adata, tmp_path, form):
    counts, tiny_adata.X = tiny_adata.X.toarray(), FORMS[form](tiny_adata.X)
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    backed = ad.read_h5ad(tmp_path / "a.h5ad", backed="r")
    for source in (tiny_adata, tmp_path / "a.h5ad", str(tmp_path / "a.h5ad"), backed):
        (stream,) = open_streams(source)
        np.testing.assert_array_equal(read(stream), counts)
        assert stream.n_cells == len(counts)
        assert stream.n_entries == np.count_nonzero(counts)
        pd.testing.assert_frame_equal(stream.var, tiny_adata.var)
        pd.testing.assert_frame_equal(stream.obs(), tiny_adata.obs)
        pd.testing.assert_frame_equal(stream.obs(["batch"]), tiny_adata.obs[["batch"]])
        with raises(DataError, "obs"):
            stream.obs(["bach"])
    backed.file.close()


def test_lists_and_patterns(tiny_adata, tmp_path, monkeypatch):
    for name in "ba":
        tiny_adata.write_h5ad(tmp_path / f"{name}.h5ad")
    found = [stream.name for stream in open_streams(str(tmp_path / "*.h5ad"))]
    assert found == [str(tmp_path / "a.h5ad"), str(tmp_path / "b.h5ad")]
    monkeypatch.chdir(tmp_path)
    assert [stream.name for stream in open_streams("*.h5ad")] == ["a.h5ad", "b.h5ad"]
    assert [stream.name for stream in open_streams(["b.h5ad", tiny_adata])] == ["b.h5ad", "adata"]
    with raises(OptionError, "source"):
        open_streams(["a.h5ad", "*.h5ad"])
    with pytest.raises(MissingFileError):
        open_streams("b*.h5")
    with pytest.raises(MissingFileError):
        open_streams("aa.h5ad")


OUTER, INNER = "/sys/fs/cgroup", "/sys/fs/cgroup/user/job"
LIMITED = {f"{INNER}/memory.max": "5000000", f"{INNER}/memory.current": "3000000"}
OLD = f"{OUTER}/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 9_216_000),
        # A job's own limit; what the page cache holds is given back.
        (LIMITED | {f"{INNER}/memory.stat": "anon 5\ninactive_file 1000000\nactive_file 500000"}, 3_500_000),
        # The limit of a group above it, and none of its own; inside a container the root has the limit.
        ({f"{INNER}/memory.max": "max\n", "/sys/fs/cgroup/user/memory.max": "100"}, 9_216_000),
        ({f"{OUTER}/memory.max": "4000000", f"{OUTER}/memory.current": "1"}, 3_999_999),
        ({f"{OUTER}/memory.max": "4000000", f"{OUTER}/memory.current": "5000000"}, 0),
        # Groups of the first version, one without a limit.
        (
            {"/proc/self/cgroup": "4:memory:/job\n5:cpu:/other\n"}
            | {f"{OLD}/job/memory.limit_in_bytes": "7000000", f"{OLD}/job/memory.usage_in_bytes": "1000000"}
            | {f"{OLD}/memory.limit_in_bytes": "9223372036854771712", f"{OLD}/memory.usage_in_bytes": "1000000"},
            6_000_000,
        ),
    ],
)
def test_the_tightest_limit_of_memory_counts(files, expected, monkeypatch):
    meminfo = "MemTotal: 16000 kB\nMemAvailable: 9000 kB\nHugePages_Total: 0\n"
    system = {"/proc/meminfo": meminfo, "/proc/self/cgroup": "0::/user/job\n", **files}
    monkeypatch.setattr(memory, "_text", lambda path: system.get(Path(path).as_posix(), ""))
    assert available_memory() == expected


def test_memory_of_a_system_without_these_files(monkeypatch):
    assert 10**7 < available_memory() < 10**14
    monkeypatch.setattr(memory, "_text", lambda path: "")
    assert available_memory() > 10**8
    monkeypatch.delattr("os.sysconf")
    assert available_memory() is None
