"""Matrices of h5ad files, piece by piece, in every way that they are stored."""

from __future__ import annotations

import anndata as ad
import h5py
import numpy as np
import pytest
from scipy import sparse

from scforge.data.h5ad import Matrix, open_h5ad
from scforge.errors import DataError, MissingFileError

STORED = {"csr": sparse.csr_matrix, "csc": sparse.csc_matrix, "dense": lambda x: x.toarray()}


@pytest.fixture(params=STORED)
def stored(request, tmp_path):
    """A file with a matrix of 101 cells, some of them empty, and that matrix."""
    counts = sparse.random(101, 37, density=0.3, format="csr", random_state=0, dtype=np.float32)
    counts.data = np.ceil(counts.data * 20)
    keep = np.ones(101)
    keep[[0, 1, 50, 100]] = 0
    counts = sparse.csr_matrix(sparse.diags(keep) @ counts).astype(np.float32)
    counts.eliminate_zeros()
    adata = ad.AnnData(STORED[request.param](counts), layers={"other": STORED[request.param](counts * 2)})
    adata.write_h5ad(tmp_path / "cells.h5ad", compression="gzip")
    return tmp_path / "cells.h5ad", counts, request.param


@pytest.mark.parametrize("size", [30, 47, 200, 10**6])
def test_row_chunks_are_the_matrix(stored, size):
    path, counts, kind = stored
    with open_h5ad(path) as opened:
        matrix = opened.matrix()
        assert (matrix.kind, matrix.shape) == (kind, (101, 37))
        starts, chunks = zip(*matrix.row_chunks(size), strict=True)
        assert [chunk.shape[0] for chunk in chunks] == np.diff([*starts, 101]).tolist()
        np.testing.assert_array_equal(sparse.vstack(chunks).toarray(), counts.toarray())
        if kind != "dense":
            assert all(chunk.nnz <= max(size, 37) for chunk in chunks)
        else:
            assert all(chunk.shape[0] * 37 <= max(size, 37) for chunk in chunks)
        if size == 10**6:
            assert len(chunks) == 1


@pytest.mark.parametrize("size", [3, 47, 200, 10**6])
def test_entries_are_the_matrix(stored, size):
    path, counts, kind = stored
    with open_h5ad(path) as opened:
        parts = list(opened.matrix("other").entries(size))
    assert all(len(values) <= (max(size, 37) if kind == "dense" else size) for _, _, values in parts)
    rows, columns, values = (np.concatenate(part) for part in zip(*parts, strict=True))
    np.testing.assert_array_equal(
        sparse.csr_matrix((values, (rows, columns)), shape=counts.shape).toarray(), 2 * counts.toarray()
    )


@pytest.mark.parametrize("kind", ["csr", "csc"])
def test_a_matrix_without_entries(tmp_path, kind):
    ad.AnnData(STORED[kind](sparse.csr_matrix((3, 4), dtype=np.float32))).write_h5ad(tmp_path / "a.h5ad")
    with open_h5ad(tmp_path / "a.h5ad") as opened:
        assert list(opened.matrix().entries()) == []
        assert sum(chunk.shape[0] for _, chunk in opened.matrix().row_chunks()) == 3


def test_more_rows_than_boundaries_are_read_at_a_time(tmp_path):
    counts = sparse.identity(70_000, dtype=np.float32, format="csr")[:, :5]
    ad.AnnData(sparse.csr_matrix(counts)).write_h5ad(tmp_path / "a.h5ad")
    with open_h5ad(tmp_path / "a.h5ad") as opened:
        sizes = [chunk.shape[0] for _, chunk in opened.matrix().row_chunks()]
    assert sizes == [65_536, 4_464]


def test_genes_and_layers(stored):
    path, *_ = stored
    with open_h5ad(path) as opened:
        assert opened.var.shape == (37, 0)
        assert opened.layers == ["other"]
        with pytest.raises(DataError, match="layer='others' is not in the layers of .*; did you mean 'other'"):
            opened.matrix("others")


def test_no_x(tiny_adata, tmp_path):
    bare = ad.AnnData(obs=tiny_adata.obs, var=tiny_adata.var, layers={"counts": tiny_adata.X})
    bare.write_h5ad(tmp_path / "a.h5ad")
    with open_h5ad(tmp_path / "a.h5ad") as opened, pytest.raises(DataError, match="has no X; name a layer.*'counts'"):
        opened.matrix()


def test_no_x_but_raw(tiny_adata, tmp_path):
    tiny_adata.raw = tiny_adata.copy()
    tiny_adata.X = None
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    with open_h5ad(tmp_path / "a.h5ad") as opened, pytest.raises(DataError, match=r"has no X; .* or use raw, which"):
        opened.matrix()


def test_files_that_are_no_h5ad(tmp_path, tiny_adata):
    def fails(path, message, error=DataError):
        with pytest.raises(error, match=message), open_h5ad(path):
            pass

    fails(tmp_path / "none.h5ad", r"none\.h5ad' does not exist", MissingFileError)
    fails(tmp_path, "is not a file; name an h5ad file")
    (tmp_path / "text.h5ad").write_text("cells")
    fails(tmp_path / "text.h5ad", r"text\.h5ad' cannot be read as an h5ad file")
    with h5py.File(tmp_path / "other.h5ad", "w") as file:
        file["table"] = [1, 2]
    fails(tmp_path / "other.h5ad", "it has no tables obs and var")
    tiny_adata.write_h5ad(tmp_path / "half.h5ad")
    (tmp_path / "half.h5ad").write_bytes((tmp_path / "half.h5ad").read_bytes()[:5000])
    fails(tmp_path / "half.h5ad", "cannot be read as an h5ad file")


def test_matrices_that_are_none(tmp_path, tiny_adata):
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        file["layers/text"] = np.array([[b"a"]])
        file.create_group("layers/group")
        file["layers/small"] = np.ones((60, 3))
    with open_h5ad(tmp_path / "a.h5ad") as opened:
        for layer, message in [
            ("text", "is no matrix of numbers"),
            ("group", "a CSR, CSC or dense matrix is needed"),
            ("small", "has 60 cells x 3 genes, and the table of genes 80 rows"),
        ]:
            with pytest.raises(DataError, match=message):
                opened.matrix(layer)


def test_a_damaged_block(tmp_path, tiny_adata):
    tiny_adata.write_h5ad(tmp_path / "a.h5ad", compression="gzip")
    with h5py.File(tmp_path / "a.h5ad") as file:
        block = file["X/data"].id.get_chunk_info(0)
    content = bytearray((tmp_path / "a.h5ad").read_bytes())
    content[block.byte_offset : block.byte_offset + block.size] = bytes(block.size)
    (tmp_path / "a.h5ad").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"), open_h5ad(tmp_path / "a.h5ad") as opened:
        list(opened.matrix().row_chunks())


def test_an_old_way_of_storing_is_read(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("X")
        group.attrs["h5sparse_format"], group.attrs["h5sparse_shape"] = "csr", (2, 3)
        group["data"], group["indices"], group["indptr"] = [1.0, 2.0], [2, 0], [0, 1, 2]
        ((_, chunk),) = Matrix.of(group).row_chunks()
    assert chunk.toarray().tolist() == [[0, 0, 1], [2, 0, 0]]
