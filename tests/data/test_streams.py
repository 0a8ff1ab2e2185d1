"""Sources of cells, read piece by piece."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data.streams import open_streams
from scforge.errors import DataError, MissingFileError, OptionError

FORMS = {"csr": sparse.csr_matrix, "csc": sparse.csc_matrix, "dense": lambda x: x.toarray()}


def read(stream, start: int = 0) -> np.ndarray:
    """All rows from `start` on, dense, after a check that the pieces follow each other."""
    rows, parts = start, []
    for first, chunk in stream.chunks(start):
        assert first == rows
        assert isinstance(chunk, sparse.csr_matrix)
        rows += chunk.shape[0]
        parts.append(chunk.toarray())
    return np.concatenate(parts)


@pytest.fixture(params=FORMS)
def formed(request, tiny_adata):
    """The cells with their counts in each form."""
    tiny_adata.X = FORMS[request.param](tiny_adata.X)
    return tiny_adata


@pytest.fixture
def counts(tiny_adata) -> np.ndarray:
    return tiny_adata.X.toarray()


def check(stream, counts, adata) -> None:
    for start in (0, 1, 59):
        np.testing.assert_array_equal(read(stream, start), counts[start:])
    assert stream.n_cells == len(counts)
    assert stream.n_entries == np.count_nonzero(counts)
    pd.testing.assert_frame_equal(stream.var, adata.var)
    pd.testing.assert_frame_equal(stream.obs(), adata.obs)
    pd.testing.assert_frame_equal(stream.obs(["batch"]), adata.obs[["batch"]])
    with pytest.raises(DataError, match="has no column 'bach'; did you mean 'batch'"):
        stream.obs(["bach"])


def test_an_anndata_and_its_file(counts, formed, tmp_path):
    formed.write_h5ad(tmp_path / "a.h5ad")
    backed = ad.read_h5ad(tmp_path / "a.h5ad", backed="r")
    for source in (formed, tmp_path / "a.h5ad", str(tmp_path / "a.h5ad"), backed):
        (stream,) = open_streams(source)
        check(stream, counts, formed)
    backed.file.close()


def test_lists_and_patterns(tiny_adata, tmp_path, monkeypatch):
    for name in "ba":
        tiny_adata.write_h5ad(tmp_path / f"{name}.h5ad")
    found = [stream.name for stream in open_streams(str(tmp_path / "*.h5ad"))]
    assert found == [str(tmp_path / "a.h5ad"), str(tmp_path / "b.h5ad")]
    monkeypatch.chdir(tmp_path)
    assert [stream.name for stream in open_streams("*.h5ad")] == ["a.h5ad", "b.h5ad"]
    assert [stream.name for stream in open_streams(["b.h5ad", tiny_adata])] == ["b.h5ad", "adata"]
    with pytest.raises(OptionError, match=r"names '.*a\.h5ad' twice"):
        open_streams(["a.h5ad", "*.h5ad"])
    with pytest.raises(MissingFileError, match=r"no file fits the pattern 'b\*\.h5'"):
        open_streams("b*.h5")
    with pytest.raises(MissingFileError, match=r"'aa\.h5ad' does not exist\.$"):
        open_streams("aa.h5ad")
