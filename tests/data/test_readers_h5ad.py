import anndata as ad
import h5py
import numpy as np
import pytest
from scipy import sparse

from scforge.data.readers import Location
from scforge.errors import DataError, MissingFileError

STORED = {"csr": sparse.csr_matrix, "csc": sparse.csc_matrix, "dense": lambda x: x.toarray()}


@pytest.fixture(params=STORED)
def stored(request, tmp_path):
    """A file with a matrix of 101 cells, some of them empty, and that matrix."""
    dense = np.random.default_rng(0).poisson(0.4, (101, 37)).astype(np.float32)
    dense[[0, 1, 50, 100]] = 0
    counts = sparse.csr_matrix(dense)
    adata = ad.AnnData(STORED[request.param](counts), layers={"other": STORED[request.param](counts * 2)})
    adata.write_h5ad(tmp_path / "cells.h5ad", compression="gzip")
    return tmp_path / "cells.h5ad", counts, request.param


@pytest.mark.parametrize("size", [3, 47, 10**6])
def test_pieces_are_the_matrix(stored, size):
    path, counts, kind = stored
    with Location(str(path)).open() as opened:
        matrix = opened.matrix()
        assert (matrix.kind, matrix.shape) == (kind, (101, 37))
        starts, chunks = zip(*matrix.row_chunks(size), strict=True)
        others = [chunk for _, chunk in opened.matrix("other").row_chunks(size)]
        assert opened.var.shape == (37, 0)
        assert opened.layers == ["other"]
    assert [chunk.shape[0] for chunk in chunks] == np.diff([*starts, 101]).tolist()
    np.testing.assert_array_equal(sparse.vstack(chunks).toarray(), counts.toarray())
    assert all((chunk.shape[0] * 37 if kind == "dense" else chunk.nnz) <= max(size, 37) for chunk in chunks)
    assert size < 10**6 or len(chunks) == 1
    np.testing.assert_array_equal(sparse.vstack(others).toarray(), 2 * counts.toarray())


def test_matrices_of_few_entries(tmp_path):
    counts = sparse.identity(70_000, dtype=np.float32, format="csr")[:, :5]  # more rows than are read at a time
    for convert in (sparse.csr_matrix, sparse.csc_matrix):
        ad.AnnData(convert((3, 4), dtype=np.float32), layers={}).write_h5ad(tmp_path / "empty.h5ad")
        with Location(f"{tmp_path}/empty.h5ad").open() as opened:
            assert sum(chunk.shape[0] for _, chunk in opened.matrix().row_chunks()) == 3
    ad.AnnData(sparse.csr_matrix(counts)).write_h5ad(tmp_path / "a.h5ad")
    with Location(f"{tmp_path}/a.h5ad").open() as opened:
        assert [chunk.shape[0] for _, chunk in opened.matrix().row_chunks()] == [65_536, 4_464]
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        file["X/indptr"][65_536 + 7] = 2
    with Location(f"{tmp_path}/a.h5ad").open() as opened, pytest.raises(DataError, match="is not in ascending order"):
        list(opened.matrix().row_chunks())


def test_files_and_matrices_that_are_none(tmp_path, tiny_adata):
    path = tmp_path / "a.h5ad"

    def fails(message, layer=None, name=path, error=DataError):
        with pytest.raises(error, match=message), Location(str(name)).open() as opened:
            opened.matrix(layer)

    fails(r"a\.h5ad' does not exist", error=MissingFileError)
    path.write_text("cells")
    fails(r"a\.h5ad' cannot be read as an h5ad file")
    with h5py.File(path, "w") as file:
        file["table"] = [1, 2]
    fails("has no obs and var tables")
    tiny_adata.write_h5ad(path)
    path.write_bytes(path.read_bytes()[:5000])
    fails("cannot be read as an h5ad file")
    tiny_adata.raw = tiny_adata.copy()
    tiny_adata.layers["counts"] = tiny_adata.X
    tiny_adata.X = None
    tiny_adata.write_h5ad(path)
    fails("has no X; pass a layer .available: 'counts'.*or the result of adata.raw")
    fails("layer='count' is not in the layers of .*; did you mean 'counts'", "count")
    with h5py.File(path, "r+") as file:
        file["layers/text"], file["layers/small"] = np.array([[b"a"]]), np.ones((60, 3))
        file.create_group("layers/group")
    fails("is not a 2D matrix of numbers", "text")
    fails("a CSR, CSC or dense matrix is needed", "group")
    fails("has 60 cells x 3 genes, but var has 80 rows; it needs cells", "small")
