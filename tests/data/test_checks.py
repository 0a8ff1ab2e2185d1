"""Every bad input is one sentence with the argument and the fix; every honest input is accepted."""

from __future__ import annotations

import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import GeneVocab, open_cells
from scforge.data.checks import (
    check_adata,
    check_obs_column,
    counts_of,
    inherited_batch_key,
    warn_if_transformed,
    warn_if_transposed,
)
from scforge.errors import DataError, OptionError, ScforgeError, ScforgeWarning


def with_first(adata: ad.AnnData, value: float) -> ad.AnnData:
    counts = adata.X.copy()
    counts.data[0] = value
    adata.X = counts
    return adata


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1.0, r"adata\.X holds negative values .smallest: -1."),
        (np.nan, r"adata\.X holds 1 missing or infinite values"),
        (np.inf, r"adata\.X holds 1 missing or infinite values"),
        (0.5, r"adata\.X holds values that are not whole numbers .first: 0\.5."),
    ],
)
def test_values_that_are_no_counts(tiny_adata, tiny_vocab, value, message):
    with pytest.raises(DataError, match=message):
        open_cells(with_first(tiny_adata, value), tiny_vocab)


def test_normalised_data_name_the_layer_with_counts(tiny_adata):
    tiny_adata.layers["scaled"] = tiny_adata.X * 0.5
    tiny_adata.layers["raw_counts"] = tiny_adata.X.copy()
    tiny_adata.X = tiny_adata.X.log1p()
    with pytest.raises(DataError, match="layer='raw_counts' holds counts"):
        counts_of(tiny_adata)
    assert counts_of(tiny_adata, "raw_counts").sum() > 0


def test_bad_layer_names_x_where_that_holds_counts(tiny_adata):
    tiny_adata.layers["scaled"] = tiny_adata.X * 0.5
    with pytest.raises(DataError, match=r"adata\.layers\['scaled'\].*layer=None holds counts"):
        counts_of(tiny_adata, "scaled")


def test_normalised_data_name_raw(tiny_adata):
    tiny_adata.raw = tiny_adata.copy()
    tiny_adata.X = tiny_adata.X.log1p()
    with pytest.raises(DataError, match="adata.raw holds counts"):
        counts_of(tiny_adata)


def test_normalised_data_without_counts_anywhere(tiny_adata):
    tiny_adata.X = tiny_adata.X.log1p()
    with pytest.raises(DataError, match="undo the normalisation"):
        counts_of(tiny_adata)


def test_missing_values_of_an_outer_join_are_no_normalisation(tiny_adata):
    tiny_adata.X = tiny_adata.X.toarray()
    joined = ad.concat([tiny_adata[:, :50], tiny_adata[:, 30:]], join="outer", fill_value=np.nan, index_unique="-")
    with pytest.raises(DataError, match=r"missing or infinite values, .*anndata\.concat\(\.\.\., join='inner'\)"):
        counts_of(joined)
    joined.layers["counts"] = np.ones(joined.shape)
    with pytest.raises(DataError, match="layer='counts' holds counts"):
        counts_of(joined)


def test_missing_layer_suggests(tiny_adata):
    tiny_adata.layers["counts"] = tiny_adata.X.copy()
    with pytest.raises(DataError, match="layer='count' is not in adata.layers; did you mean 'counts'"):
        counts_of(tiny_adata, "count")


def test_no_x(tiny_adata):
    bare = ad.AnnData(obs=tiny_adata.obs, var=tiny_adata.var)
    bare.layers["counts"] = tiny_adata.X
    with pytest.raises(DataError, match="adata.X is None; layer='counts' holds counts"):
        counts_of(bare)


def test_cell_without_counts(tiny_adata):
    counts = tiny_adata.X.toarray()
    counts[[3, 5]] = 0
    tiny_adata.X = sparse.csr_matrix(counts)
    with pytest.raises(DataError, match=r"2 cells without any count .first: 'cell3', 'cell5'.*filter_cells"):
        counts_of(tiny_adata)


def test_cell_without_counts_in_the_vocabulary_warns(tiny_adata):
    counts = tiny_adata.X.toarray()
    counts[4, :3] = 0
    counts[:4, :3] = counts[5:, :3] = 1
    tiny_adata.X = counts
    with pytest.warns(ScforgeWarning, match="1 of 60 cells express no gene of the vocabulary"):
        cells = open_cells(tiny_adata, GeneVocab.from_genes(["gene0", "gene1", "gene2"]))
    assert cells.n_expressed[4] == 0
    assert cells.totals[4] > 0


def test_empty(tiny_adata, tiny_vocab):
    with pytest.raises(DataError, match="is empty .0 cells x 80 genes."):
        open_cells(tiny_adata[:0].copy(), tiny_vocab)
    with pytest.raises(DataError, match="is empty .60 cells x 0 genes."):
        open_cells(tiny_adata[:, :0].copy(), tiny_vocab)


def test_backed(tiny_adata, tiny_vocab, tmp_path):
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    backed = ad.read_h5ad(tmp_path / "a.h5ad", backed="r")
    check_adata(backed)
    assert (counts_of(backed) != counts_of(tiny_adata)).nnz == 0
    with pytest.raises(DataError, match=r"a part of an AnnData backed by .*a\.h5ad.*to_memory"):
        open_cells(backed[:10], tiny_vocab)
    backed.file.close()


@pytest.mark.parametrize("thing", [None, 3, np.ones((2, 2))])
def test_not_an_anndata(thing, tiny_vocab):
    with pytest.raises(OptionError, match=f"source is of type '{type(thing).__name__}'"):
        open_cells(thing, tiny_vocab)
    with pytest.raises(OptionError, match="query is of type"):
        check_adata(thing, argument="query")


def unsorted(matrix: sparse.csr_matrix) -> sparse.csr_matrix:
    """The same counts with the entries of each row in descending order."""
    order = np.concatenate([np.arange(a, b)[::-1] for a, b in zip(matrix.indptr, matrix.indptr[1:], strict=False)])
    return sparse.csr_matrix((matrix.data[order], matrix.indices[order], matrix.indptr), shape=matrix.shape)


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.toarray(),
        sparse.csc_matrix,
        sparse.csr_array,
        unsorted,
        lambda x: x.astype(np.uint8),
        lambda x: x.astype(np.uint16),
        lambda x: x.astype(np.int32),
        lambda x: x.astype(np.int64),
        lambda x: x.astype(np.float64),
        lambda x: x.toarray().astype(np.uint16),
    ],
    ids=["dense", "csc", "csr_array", "unsorted", "u1", "u2", "i4", "i8", "f8", "dense u2"],
)
def test_formats_and_dtypes_mean_the_same(tiny_adata, tiny_vocab, convert):
    expected = open_cells(tiny_adata, tiny_vocab)
    tiny_adata.layers["other"] = convert(tiny_adata.X)
    cells = open_cells(tiny_adata, tiny_vocab, layer="other")
    np.testing.assert_array_equal(cells.counts.toarray(), expected.counts.toarray())
    np.testing.assert_array_equal(cells.totals, expected.totals)
    block, reference = cells.block(np.arange(60)), expected.block(np.arange(60))
    np.testing.assert_array_equal(block.genes, reference.genes)
    np.testing.assert_array_equal(block.counts, reference.counts)


@pytest.mark.parametrize("block", [np.asarray, sparse.csr_matrix, sparse.csr_array], ids=["dense", "matrix", "array"])
def test_dask_arrays_of_any_blocks_are_computed(tiny_adata, tiny_vocab, block):
    dask = pytest.importorskip("dask.array")
    expected = open_cells(tiny_adata, tiny_vocab)
    tiny_adata.X = dask.from_array(tiny_adata.X.toarray(), chunks=(25, -1)).map_blocks(block)
    found = open_cells(tiny_adata, tiny_vocab)
    assert (found.counts != expected.counts).nnz == 0
    np.testing.assert_array_equal(found.totals, expected.totals)


def test_read_lazily(tiny_adata, tmp_path):
    pytest.importorskip("xarray")
    tiny_adata.write_zarr(tmp_path / "a.zarr")
    lazy = ad.experimental.read_lazy(tmp_path / "a.zarr")
    with pytest.raises(DataError, match=r"adata was read lazily .*to_memory"):
        check_adata(lazy)
    check_adata(lazy.to_memory())


def test_a_view_is_accepted_and_nothing_is_changed(tiny_adata, tiny_vocab):
    before = tiny_adata.X.copy()
    view = tiny_adata[5:25]
    assert len(open_cells(view, tiny_vocab)) == 20
    assert view.is_view
    assert (before != tiny_adata.X).nnz == 0


def test_dtypes_that_are_and_are_not_counts(tiny_adata):
    tiny_adata.layers["flag"] = tiny_adata.X.astype(bool)
    assert counts_of(tiny_adata, "flag").sum() == tiny_adata.X.nnz
    tiny_adata.layers["complex"] = tiny_adata.X.astype(complex)
    with pytest.raises(DataError, match="dtype complex"):
        counts_of(tiny_adata, "complex")


def test_check_obs_column(tiny_adata):
    check_obs_column(tiny_adata, None, argument="labels_key")
    check_obs_column(tiny_adata, "group", argument="labels_key")
    with pytest.raises(DataError, match="labels_key='groop' is not a column of adata.obs; did you mean 'group'"):
        check_obs_column(tiny_adata, "groop", argument="labels_key")
    with pytest.raises(OptionError, match="labels_key=.'group'. is of type 'list'; give the name of one column"):
        check_obs_column(tiny_adata, ["group"], argument="labels_key")
    tiny_adata.obs["depth"], tiny_adata.obs["lane"] = 0.5, [1.0, np.nan] * (tiny_adata.n_obs // 2)
    for argument, key in (("labels_key", "depth"), ("batch_key", "lane"), ("batch_key", "batch")):
        check_obs_column(tiny_adata, key, argument=argument)
    tiny_adata.obs["day"] = np.arange(tiny_adata.n_obs) % 3 + 0.5
    check_obs_column(tiny_adata, "day", argument="batch_key")  # time points may well be batches
    many = ad.AnnData(np.ones((120, 2)))
    many.obs["depth"] = np.linspace(0.25, 1, 120)
    with pytest.raises(DataError, match="batch_key='depth' holds 120 different numbers .first: 0.25., which are no"):
        check_obs_column(many, "depth", argument="batch_key")
    twice = tiny_adata.copy()
    twice.obs = twice.obs[["group", "batch", "batch"]]
    with pytest.raises(DataError, match="batch_key='batch' names several columns of adata.obs; rename all of them but"):
        check_obs_column(twice, "batch", argument="batch_key")
    assert issubclass(DataError, ScforgeError)


def test_barcodes_are_no_batches(tiny_adata):
    tiny_adata.obs["barcode"] = list(tiny_adata.obs_names)
    with pytest.raises(DataError, match="batch_key='barcode' has another value for each of the 60 cells"):
        check_obs_column(tiny_adata, "barcode", argument="batch_key")
    check_obs_column(tiny_adata, "barcode", argument="labels_key")
    check_obs_column(tiny_adata[:50], "barcode", argument="batch_key")


@pytest.mark.parametrize(
    "barcode", ["AAACCTGAGCTTATCG-1", "donor1_AAACCTGAGCTTATCG", "AAACCTGAGCTT.1", "run:ACGTACGTACGT"]
)
def test_cells_in_the_place_of_genes_are_told(barcode):
    adata = ad.AnnData(np.ones((3, 4), dtype=np.float32))
    adata.obs_names = ["CD3E", "GNLY", "ENSG00000105374"]
    adata.var_names = [f"{'ACGT'[i]}{barcode}" if barcode[0] in "ACGT" else f"{i}{barcode}" for i in range(4)]
    with pytest.warns(ScforgeWarning, match=r"genes that are named as cells .*; .* pass adata\.T"):
        warn_if_transposed(adata)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_transposed(adata.T)
        warn_if_transposed(adata[:, :0])


def test_barcodes_that_are_measured_are_no_mistake():
    adata = ad.AnnData(np.ones((2, 2), dtype=np.float32))
    adata.obs_names, adata.var_names = ["ACGTACGTACGT-1", "TTGTACGTACGT-1"], ["GGGTACGTACGT", "CCGTACGTACGT"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_transposed(adata)


def test_the_batch_column_of_other_data():
    obs = pd.DataFrame({"donor": ["a", "b"] * 30, "barcode": [f"cell {i}" for i in range(60)]})
    assert inherited_batch_key(obs, "donor") == "donor"
    for lacking in (None, "batch", "barcode"):
        assert inherited_batch_key(obs, lacking) is None


def test_whole_numbers_that_are_hardly_counts(tiny_adata):
    generator = np.random.default_rng(0)
    depth = generator.lognormal(6, 0.5, size=(60, 1))
    raw = generator.poisson(depth * generator.dirichlet(np.full(500, 0.1)))
    rounded = np.round(1e4 * raw / raw.sum(axis=1, keepdims=True))
    with pytest.warns(ScforgeWarning, match=r"^adata\.X has nearly the same total in all cells .median (9,|10,)"):
        warn_if_transformed(sparse.csr_matrix(rounded), None)
    with pytest.warns(ScforgeWarning, match=r"^adata\.layers\['b'\] holds only 0 and 1, as after binarizing; pass"):
        warn_if_transformed(sparse.csr_matrix((raw > 0).astype(np.uint8)), "b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for counts in (raw, tiny_adata.X, generator.poisson(9, size=(60, 500)), np.eye(60), np.ones((50, 40))):
            warn_if_transformed(sparse.csr_matrix(counts), None)
        warn_if_transformed(sparse.csr_matrix(np.array([generator.permutation(raw[0]) for _ in range(60)])), None)
