import importlib.util
import warnings

import anndata as ad
import numpy as np
import pytest
from scipy import sparse

from scforge import datasets
from scforge.data import CellBlock, open_cells
from scforge.data.cells import CellSource, choose_chunks
from scforge.data.checks import (
    check_adata,
    check_obs_column,
    counts_of,
    inherited_batch_key,
    warn_if_transformed,
    warn_if_transposed,
)
from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.testing import raises


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1.0, r"adata\.X contains negative values .smallest: -1."),
        (np.nan, r"adata\.X contains 1 missing or infinite values"),
        (np.inf, r"adata\.X contains 1 missing or infinite values"),
        (1e300, r"adata\.X contains values above the largest float32, 3\.4e\+38 .largest: 1e\+300."),
        (0.5, r"adata\.X contains values that are not whole numbers .first: 0\.5."),
    ],
)
def test_values_that_are_no_counts(tiny_adata, tiny_vocab, value, message):
    tiny_adata.X = tiny_adata.X.astype(np.float64)
    tiny_adata.X.data[0] = value
    with pytest.raises(DataError, match=message):
        open_cells(tiny_adata, tiny_vocab)


def test_where_the_counts_are_is_told(tiny_adata):
    counts = tiny_adata.X.copy()

    def told(message: str, layer: str | None = None) -> None:
        with pytest.raises(DataError, match=message):
            counts_of(tiny_adata, layer)

    tiny_adata.layers["scaled"] = counts * 0.5
    told(r"adata\.layers\['scaled'\].*pass layer=None, because adata.X contains raw counts", "scaled")
    tiny_adata.layers["complex"] = counts.astype(complex)
    told("dtype complex", "complex")
    tiny_adata.layers["flag"] = counts.astype(bool)
    assert counts_of(tiny_adata, "flag").sum() == counts.nnz
    del tiny_adata.layers["flag"]
    plain = tiny_adata.copy()
    tiny_adata.X = counts.log1p()
    told("undo the normalization")
    tiny_adata.raw = plain
    told("because adata.raw contains raw counts")
    tiny_adata.layers["raw_counts"] = counts
    told("pass layer='raw_counts', because adata.layers")
    told("layer='raw_count' is not in adata.layers; did you mean 'raw_counts'", "raw_count")
    assert (counts_of(tiny_adata, "raw_counts") != counts).nnz == 0
    tiny_adata.X = None
    told("adata.X is None; pass layer='raw_counts', because adata.layers")


def test_missing_values_of_an_outer_join_are_no_normalization(tiny_adata):
    tiny_adata.X = tiny_adata.X.toarray()
    joined = ad.concat([tiny_adata[:, :50], tiny_adata[:, 30:]], join="outer", fill_value=np.nan, index_unique="-")
    with pytest.raises(DataError, match=r"missing or infinite values, .*anndata\.concat\(\.\.\., join='inner'\)"):
        counts_of(joined)
    joined.layers["counts"] = np.ones(joined.shape)
    with pytest.raises(DataError, match="pass layer='counts', because adata.layers"):
        counts_of(joined)


def test_what_cannot_be_opened(tiny_adata, tiny_vocab, tmp_path):
    counts = tiny_adata.X.toarray()
    counts[[3, 5]] = 0
    for source, message in [
        (
            ad.AnnData(counts, tiny_adata.obs, tiny_adata.var),
            r"2 cells without counts .first: 'cell3', 'cell5'.*filter_cells",
        ),
        (tiny_adata[:0].copy(), "is empty .0 cells x 80 genes."),
        (tiny_adata[:, :0].copy(), "is empty .60 cells x 0 genes."),
    ]:
        with pytest.raises(DataError, match=message):
            open_cells(source, tiny_vocab)
    for thing in (None, 3, np.ones((2, 2))):
        with raises(OptionError, "source"):
            open_cells(thing, tiny_vocab)
        with raises(OptionError, "query"):
            check_adata(thing, argument="query")
    if importlib.util.find_spec("xarray"):
        tiny_adata.write_zarr(tmp_path / "a.zarr")
        lazy = ad.experimental.read_lazy(tmp_path / "a.zarr")
        with raises(DataError, "adata"):
            check_adata(lazy)
        check_adata(lazy.to_memory())


def test_backed(tiny_adata, tiny_vocab, tmp_path):
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    backed = ad.read_h5ad(tmp_path / "a.h5ad", backed="r")
    check_adata(backed)
    assert (counts_of(backed) != counts_of(tiny_adata)).nnz == 0
    with raises(DataError, "adata"):
        open_cells(backed[:10], tiny_vocab)
    backed.file.close()


def unsorted(matrix: sparse.csr_matrix) -> sparse.csr_matrix:
    """The same counts with the entries of each row in descending order."""
    order = np.concatenate([np.arange(a, b)[::-1] for a, b in zip(matrix.indptr, matrix.indptr[1:], strict=False)])
    return sparse.csr_matrix((matrix.data[order], matrix.indices[order], matrix.indptr), shape=matrix.shape)


dask = pytest.importorskip("dask.array") if importlib.util.find_spec("dask") else None


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.toarray(),
        sparse.csc_matrix,
        sparse.csr_array,
        unsorted,
        lambda x: x.astype(np.uint8),
        lambda x: x.toarray().astype(np.uint16),
        lambda x: dask.from_array(x.toarray(), chunks=(25, -1)),
        lambda x: dask.from_array(x.toarray(), chunks=(25, -1)).map_blocks(sparse.csr_array),
    ],
)
def test_formats_and_dtypes_mean_the_same(tiny_adata, tiny_vocab, convert):
    expected = open_cells(tiny_adata, tiny_vocab)
    view = tiny_adata[5:25]
    assert len(open_cells(view, tiny_vocab)) == 20
    assert view.is_view
    tiny_adata.X = convert(tiny_adata.X)
    cells = open_cells(tiny_adata, tiny_vocab)
    np.testing.assert_array_equal(cells.counts.toarray(), expected.counts.toarray())
    np.testing.assert_array_equal(cells.totals, expected.totals)
    block, reference = cells.block(np.arange(60)), expected.block(np.arange(60))
    np.testing.assert_array_equal(block.genes, reference.genes)
    np.testing.assert_array_equal(block.counts, reference.counts)


def test_check_obs_column(tiny_adata):
    tiny_adata.obs["_scvi_batch"] = 0
    for key in (None, "_scvi_batch"):
        check_obs_column(tiny_adata, key, argument="labels_key")
    with raises(DataError, "labels_key"):
        check_obs_column(tiny_adata, "groop", argument="labels_key")
    with raises(OptionError, "labels_key"):
        check_obs_column(tiny_adata, ["group"], argument="labels_key")
    tiny_adata.obs["depth"], tiny_adata.obs["lane"] = 0.5, [1.0, np.nan] * (tiny_adata.n_obs // 2)
    tiny_adata.obs["day"] = np.arange(tiny_adata.n_obs) % 3 + 0.5  # time points may well be batches
    for argument, key in (("labels_key", "depth"), ("batch_key", "lane"), ("batch_key", "day")):
        check_obs_column(tiny_adata, key, argument=argument)
    many = ad.AnnData(np.ones((120, 2)))
    many.obs["depth"] = np.linspace(0.25, 1, 120)
    with raises(DataError, "batch_key"):
        check_obs_column(many, "depth", argument="batch_key")
    twice = tiny_adata.copy()
    twice.obs = twice.obs[["group", "batch", "batch"]]
    with raises(DataError, "batch_key"):
        check_obs_column(twice, "batch", argument="batch_key")
    tiny_adata.obs["barcode"] = list(tiny_adata.obs_names)
    with raises(DataError, "batch_key"):
        check_obs_column(tiny_adata, "barcode", argument="batch_key")
    check_obs_column(tiny_adata, "barcode", argument="labels_key")
    check_obs_column(tiny_adata[:50], "barcode", argument="batch_key")
    # The batch column of a model in other data, which may lack it.
    assert inherited_batch_key(tiny_adata.obs, "group") == "group"
    for lacking in (None, "donor", "barcode"):
        assert inherited_batch_key(tiny_adata.obs, lacking) is None


def test_cells_in_the_place_of_genes_are_told():
    adata = ad.AnnData(np.ones((3, 4), dtype=np.float32))
    adata.obs_names = ["CD3E", "GNLY", "ENSG00000105374"]
    for barcode in ("{}AAACCTGAGCTTATCG-1", "donor1_{}AAACCTGAGCTTATCG", "{}AAACCTGAGCTT.1", "run:{}ACGTACGTACGT"):
        adata.var_names = [barcode.format(base) for base in "ACGT"]
        with pytest.warns(ScforgeWarning, match=r"look like cell names .*; .* pass adata\.T"):
            warn_if_transposed(adata)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_transposed(adata.T)
        warn_if_transposed(adata[:, :0])
        adata.obs_names = [f"ACGT{i}CGTACGTACGT-1" for i in "ACG"]
        warn_if_transposed(adata)  # barcodes that are measured are no mistake


def test_whole_numbers_that_are_hardly_counts(tiny_adata):
    generator = np.random.default_rng(0)
    depth = generator.lognormal(6, 0.5, size=(60, 1))
    raw = generator.poisson(depth * generator.dirichlet(np.full(500, 0.1)))
    rounded = np.round(1e4 * raw / raw.sum(axis=1, keepdims=True))
    with pytest.warns(ScforgeWarning, match=r"^adata\.X has nearly the same total in all cells .median (9,|10,)"):
        warn_if_transformed(sparse.csr_matrix(rounded), None)
    with pytest.warns(
        ScforgeWarning, match=r"^adata\.layers\['b'\] contains only 0 and 1, as if it had been binarized; pass"
    ):
        warn_if_transformed(sparse.csr_matrix((raw > 0).astype(np.uint8)), "b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for counts in (raw, tiny_adata.X, generator.poisson(9, size=(60, 500)), np.eye(60), np.ones((50, 40))):
            warn_if_transformed(sparse.csr_matrix(counts), None)
        warn_if_transformed(sparse.csr_matrix(np.array([generator.permutation(raw[0]) for _ in range(60)])), None)


@pytest.mark.parametrize("rows", [[59, 0, 30], [5, 5, 5], [], list(range(59, -1, -1))])
def test_blocks_equal_rows_of_scipy(tiny_adata, tiny_vocab, rows):
    tiny_adata.X = tiny_adata.X.astype(np.uint16)
    rows = np.array(rows, dtype=int)
    matrix = sparse.random(60, 12, density=0.1, format="csr", random_state=0, dtype=np.float32)
    empty = CellSource(matrix, np.ones(60))
    assert (empty.n_expressed == 0).any()
    np.testing.assert_array_equal(empty.n_expressed, (matrix.toarray() > 0).sum(axis=1))
    for cells in (open_cells(tiny_adata, tiny_vocab), empty):
        block = cells.block(rows)
        shape = (len(rows), cells.counts.shape[1])
        dense = sparse.csr_matrix((block.counts, block.genes, block.indptr), shape=shape).toarray()
        np.testing.assert_array_equal(dense, cells.counts[rows].toarray())
        np.testing.assert_array_equal(block.totals, cells.totals[rows])
        np.testing.assert_array_equal(block.rows, rows)
        dtypes = [part.dtype for part in (block.indptr, block.genes, block.counts, block.totals, block.rows)]
        assert dtypes == ["int64", "int32", "float32", "float64", "int64"]


def test_from_csr_puts_a_matrix_in_order():
    # Two entries of one gene, an explicit zero, genes not ascending.
    matrix = sparse.csr_matrix((np.array([1.0, 0.0, 2.0, 4.0]), np.array([2, 1, 0, 2]), np.array([0, 4])), shape=(1, 3))
    block = CellBlock.from_csr(matrix)
    assert (block.genes.tolist(), block.counts.tolist(), block.totals.tolist()) == ([0, 2], [2.0, 5.0], [7.0])
    assert matrix.data.tolist() == [1.0, 0.0, 2.0, 4.0]
    with raises(DataError, "totals"):
        CellBlock.from_csr(sparse.csr_matrix(np.eye(2)), np.ones(3))


@pytest.mark.parametrize("dense", [False, True])
def test_counts_that_change_are_checked_again(dense):
    adata = datasets.pbmc3k()[:50, :200].copy()
    if dense:
        adata.X = adata.X.toarray()
    assert counts_of(adata).sum() == counts_of(adata).sum()
    values = adata.X if dense else adata.X.data
    first = np.flatnonzero(values.ravel())[:2]
    values.ravel()[first] += [0.5, -0.5]
    with pytest.raises(DataError, match="not whole numbers"):
        counts_of(adata)


def test_of_more_chunks_than_are_needed_random_rows_are_left_out():
    chosen = [choose_chunks(100, 15, 10, seed=seed) for seed in range(20)]
    assert all(len(set(rows // 10)) == 2 and len(set(rows)) == 15 and (np.diff(rows) > 0).all() for rows in chosen)
    assert len({rows[-1] % 10 for rows in chosen}) > 1


def test_chunks_are_taken_from_each_group_in_turn():
    groups = np.repeat(["a", "b", "c"], [80, 15, 5])
    rows = choose_chunks(100, 30, 1, groups=groups)
    assert np.unique(groups[rows], return_counts=True)[1].tolist() == [13, 12, 5]
    assert set(groups[choose_chunks(100, 30, 10, groups=groups)]) == {"a", "b", "c"}


def test_a_value_close_to_a_whole_number_is_shown_with_all_digits(tiny_adata):
    tiny_adata.X = tiny_adata.X.toarray().astype(np.float64)
    tiny_adata.X[0, 0] = 13.0000001
    with pytest.raises(DataError, match=r"not whole numbers \(first: 13\.0000001\)"):
        counts_of(tiny_adata)


def test_masked_counts_are_refused(tiny_adata):
    masked = np.ma.masked_array(tiny_adata.X.toarray(), mask=np.eye(60, 80, dtype=bool))
    tiny_adata.layers["masked"] = tiny_adata.X.toarray()
    tiny_adata.layers._data["masked"] = masked
    with pytest.raises(DataError, match=r"adata.layers\['masked'\] contains 60 masked values; replace them"):
        counts_of(tiny_adata, "masked")


def test_spaces_around_gene_names_are_left_out(tiny_adata, tiny_vocab):
    expected = open_cells(tiny_adata, tiny_vocab).counts
    names = [f"{name} " if place % 3 == 0 else name for place, name in enumerate(tiny_adata.var_names)]
    tiny_adata.var_names = names
    assert (open_cells(tiny_adata, tiny_vocab).counts != expected).nnz == 0
