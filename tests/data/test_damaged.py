"""Damaged matrices: one sentence that names what is damaged, and no crash of the process."""

from __future__ import annotations

import anndata as ad
import h5py
import numpy as np
import pytest
from scipy import sparse

from scforge.cli import main
from scforge.data import CellBlock, GeneMap, inspect_h5ad, measure_medians, open_cells
from scforge.data.checks import counts_of
from scforge.data.compressed import compressed_problem, sound_csr
from scforge.data.duplicates import sum_columns
from scforge.data.h5ad import open_h5ad
from scforge.data.sources import read_h5ad
from scforge.errors import DataError


def _set(part: str, place: int, value: int):
    def change(group) -> None:
        group[part][place] = value

    return change


def _cut(part: str, n: int):
    def change(group) -> None:
        kept = group[part][:n]
        del group[part]
        group[part] = kept

    return change


def _replace(part: str, values: object):
    def change(group) -> None:
        del group[part]
        if values is not None:
            group[part] = values

    return change


def _shape(value: object):
    def change(group) -> None:
        del group.attrs["shape"]
        if value is not None:
            group.attrs["shape"] = value

    return change


DAMAGE = {
    "a boundary too large": (_set("indptr", 5, 10**7), "do not ascend"),
    "a boundary too small": (_set("indptr", 5, 0), "do not ascend"),
    "a negative boundary": (_set("indptr", 5, -3), "do not ascend"),
    "first boundary": (_set("indptr", 0, 1), "run from 1 to"),
    "last boundary": (_set("indptr", -1, 10**7), "to 10000000, but there are"),
    "an index too large": (_set("indices", 0, 10**6), "the index 1000000, which is not from 0 to"),
    "a negative index": (_set("indices", 0, -5), "the index -5, which is not from 0 to"),
    "short data": (_cut("data", 100), "it has 100 values and"),
    "short boundaries": (_cut("indptr", 7), "it has 7 boundaries .indptr. and needs"),
    "boundaries of two dimensions": (_replace("indptr", np.zeros((61, 1), int)), "indptr is no list of numbers"),
    "values without any": (_replace("data", h5py.Empty("f4")), "data is no list of numbers"),
    "indices that are no integers": (_replace("indices", np.ones(3)), "indices is no list of numbers"),
    "text for values": (_replace("data", np.array([b"a"])), "data is no list of numbers"),
    "no indices": (_replace("indices", None), "a CSR, CSC or dense matrix is needed"),
    "no shape": (_shape(None), "it has no shape of two numbers"),
    "one number for a shape": (_shape(60), "it has no shape of two numbers"),
    "negative shape": (_shape((-1, 80)), "its shape is"),
}


@pytest.fixture(params=["csr", "csc"])
def written(request, tiny_adata, tmp_path):
    """A file with a matrix that is not damaged yet."""
    tiny_adata.X = {"csr": sparse.csr_matrix, "csc": sparse.csc_matrix}[request.param](tiny_adata.X)
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    return tmp_path / "a.h5ad"


@pytest.mark.parametrize("damage", DAMAGE)
def test_files(written, damage, tiny_vocab, capsys):
    change, message = DAMAGE[damage]
    with h5py.File(written, "r+") as file:
        change(file["X"])
    with pytest.raises(DataError, match=f"'X' of .*a\\.h5ad'.*{message}"):
        inspect_h5ad(written, tiny_vocab)
    with pytest.raises(DataError, match=message):
        measure_medians(written, tiny_vocab)
    with open_h5ad(written) as opened, pytest.raises(DataError, match=message):
        list(opened.matrix().row_chunks(50))
    assert main(["inspect", str(written)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(DataError, match=r"a\.h5ad'"):
        read_h5ad(written)


def test_boundaries_between_two_pieces(tmp_path):
    counts = sparse.identity(70_000, dtype=np.float32, format="csr")[:, :5]
    ad.AnnData(sparse.csr_matrix(counts)).write_h5ad(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        file["X/indptr"][65_536 + 7] = 2
    with open_h5ad(tmp_path / "a.h5ad") as opened, pytest.raises(DataError, match="do not ascend"):
        list(opened.matrix().row_chunks())


def _remove(name: str):
    def change(file) -> None:
        del file[name]

    return change


def _column_order(file) -> None:
    file["var"].attrs["column-order"] = ["length", "nothing"]


def _unknown_way(file) -> None:
    file["var/length"].attrs["encoding-type"] = "odd"


def _no_table(file) -> None:
    del file["var"].attrs["encoding-type"]


@pytest.mark.parametrize(
    "change", [_remove("var/_index"), _remove("var/length"), _column_order, _unknown_way, _no_table]
)
def test_tables_of_genes(tiny_adata, tmp_path, change, capsys):
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        change(file)
    with pytest.raises(DataError, match=r"var\b.*a\.h5ad'.*; write the file again"):
        inspect_h5ad(tmp_path / "a.h5ad")
    assert main(["inspect", str(tmp_path / "a.h5ad")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def _broken(matrix: sparse.csr_matrix, part: str, place: int, value: int) -> sparse.csr_matrix:
    matrix = matrix.copy()
    getattr(matrix, part)[place] = value
    return matrix


MEMORY = [("indptr", 5, 10**7), ("indptr", 5, 0), ("indptr", -1, 10**7), ("indices", 0, 10**6), ("indices", 0, -1)]


@pytest.mark.parametrize(("part", "place", "value"), MEMORY)
@pytest.mark.parametrize("kind", [sparse.csr_matrix, sparse.csc_matrix, sparse.csr_array])
def test_matrices_in_memory(tiny_adata, tiny_vocab, part, place, value, kind):
    matrix = _broken(kind(tiny_adata.X), part, place, value)
    tiny_adata.layers["counts"] = matrix
    for use in (
        lambda: counts_of(tiny_adata, "counts"),
        lambda: open_cells(tiny_adata, tiny_vocab, layer="counts"),
    ):
        with pytest.raises(DataError, match=r"adata\.layers\['counts'\] is damaged: .*; write the file again"):
            use()
    for use in (
        lambda: CellBlock.from_csr(matrix),
        lambda: sum_columns(matrix, np.arange(80), 80),
        lambda: GeneMap(np.arange(80), 80).apply(matrix),
    ):
        with pytest.raises(DataError, match="matrix is damaged: "):
            use()
    # Where the counts are is looked for in sound matrices only.
    tiny_adata.X = tiny_adata.X * 0.5
    with pytest.raises(DataError, match=r"adata\.X holds values that are not whole numbers.*pass the layer that"):
        counts_of(tiny_adata)


def test_spare_entries_are_left_out():
    # SciPy allows entries behind the last boundary.
    matrix = sparse.csr_matrix(np.array([[1.0, 2.0], [0.0, 3.0]]))
    matrix.data, matrix.indices = np.append(matrix.data, 0.5), np.append(matrix.indices, 9)
    assert compressed_problem(matrix) is None
    assert sound_csr(matrix, "matrix").data.tolist() == [1, 2, 3]
    assert CellBlock.from_csr(matrix).counts.tolist() == [1, 2, 3]


def test_a_square_matrix_by_column_is_not_taken_for_one_by_row():
    dense = np.array([[1, 2, 0], [0, 3, 4], [5, 0, 0]])
    for kind in (sparse.csr_matrix, sparse.csc_matrix, sparse.csr_array, sparse.coo_matrix):
        assert sum_columns(kind(dense), np.array([1, 0, 1]), 2).toarray().tolist() == [[2, 1], [3, 4], [0, 5]]
        assert GeneMap(np.array([1, 0, 1]), 2).apply(kind(dense)).toarray().tolist() == [[2, 1], [3, 4], [0, 5]]


def test_columns_of_another_matrix():
    with pytest.raises(DataError, match="matrix has 2 columns but columns names 3; give one for each"):
        sum_columns(sparse.csr_matrix(np.eye(2)), np.arange(3), 3)
