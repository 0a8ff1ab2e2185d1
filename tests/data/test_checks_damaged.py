import h5py
import numpy as np
import pytest
from scipy import sparse

from scforge.cli import main
from scforge.data import CellBlock, open_cells
from scforge.data.checks import compressed_problem, counts_of, sound_csr
from scforge.data.genes import GeneMap, sum_columns
from scforge.data.readers import Location
from scforge.data.sources import inspect_h5ad, read_h5ad
from scforge.data.statistics import measure_medians
from scforge.errors import DataError
from scforge.testing import raises


def put(part: str, values: object):
    """Return a function that puts something else in the place of a part of a matrix, or removes it."""

    def change(group) -> None:
        content = group.attrs if part == "shape" else group
        made = values(group[part][:]) if callable(values) else values
        del content[part]
        if made is not None:
            content[part] = made

    return change


def at(place: int, value: int):
    return lambda values: np.where(np.arange(len(values)) == place % len(values), value, values)


DAMAGE = {
    "a boundary too large": (put("indptr", at(5, 10**7)), "is not in ascending order"),
    "first boundary": (put("indptr", at(0, 1)), "runs from 1 to"),
    "last boundary": (put("indptr", at(-1, 10**7)), "to 10000000, but there are"),
    "an index too large": (put("indices", at(0, 10**6)), "the index 1000000, which is not in the range 0 to"),
    "a negative index": (put("indices", at(0, -5)), "the index -5, which is not in the range 0 to"),
    "short data": (put("data", lambda values: values[:100]), ", expected 100"),
    "short boundaries": (put("indptr", lambda values: values[:7]), "indptr has 7 values, expected"),
    "text for values": (put("data", np.array([b"a"])), "data is not a one-dimensional array of numbers"),
    "no indices": (put("indices", None), "a CSR, CSC or dense matrix is needed"),
    "no shape": (put("shape", None), "cannot be read"),
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
    with Location(str(written)).open() as opened, pytest.raises(DataError, match=message):
        list(opened.matrix().row_chunks(50))
    assert main(["inspect", str(written)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(DataError, match=r"a\.h5ad'"):
        read_h5ad(written)


@pytest.mark.parametrize("damage", ["var/_index", "column-order", "encoding-type", "length"])
def test_tables_of_genes(tiny_adata, tmp_path, damage, capsys):
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        if damage == "column-order":
            file["var"].attrs[damage] = ["length", "nothing"]
        elif damage == "length":
            file["var/length"].attrs["encoding-type"] = "odd"
        else:
            content = file["var"].attrs if damage == "encoding-type" else file
            del content[damage]
    with pytest.raises(DataError, match=r"var\b.*a\.h5ad'.*; write the file again"):
        inspect_h5ad(tmp_path / "a.h5ad")
    assert main(["inspect", str(tmp_path / "a.h5ad")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("part", "place", "value"),
    [("indptr", 5, 0), ("indptr", -1, 10**7), ("indices", 0, 10**6), ("indices", 0, -1)],
)
@pytest.mark.parametrize("kind", [sparse.csr_matrix, sparse.csc_matrix, sparse.csr_array])
def test_matrices_in_memory(tiny_adata, tiny_vocab, part, place, value, kind):
    matrix = kind(tiny_adata.X).copy()
    getattr(matrix, part)[place] = value
    tiny_adata.layers["counts"] = matrix
    with pytest.raises(DataError, match=r"adata\.layers\['counts'\] is corrupted: .*; write the file again"):
        open_cells(tiny_adata, tiny_vocab, layer="counts")
    for use in (
        lambda: CellBlock.from_csr(matrix),
        lambda: sum_columns(matrix, np.arange(80), 80),
        lambda: GeneMap(np.arange(80), 80).apply(matrix),
    ):
        with pytest.raises(DataError, match="matrix is corrupted: "):
            use()
    # Where the counts are is looked for in sound matrices only.
    tiny_adata.X = tiny_adata.X * 0.5
    with pytest.raises(DataError, match=r"adata\.X contains values that are not whole numbers.*pass the layer that"):
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
    with raises(DataError, "matrix"):
        sum_columns(sparse.csr_matrix(dense), np.arange(2), 3)
