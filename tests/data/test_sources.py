"""Files into one AnnData."""

from __future__ import annotations

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import read_h5ad
from scforge.data.duplicates import join_columns
from scforge.errors import DataError, GeneMismatchError, MissingFileError, OptionError, ScforgeWarning


def test_one_file(tiny_adata, tmp_path):
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    for paths in (tmp_path / "a.h5ad", str(tmp_path / "a.h5ad"), [tmp_path / "a.h5ad"]):
        again = read_h5ad(paths)
        assert again.obs_names.equals(tiny_adata.obs_names)
        assert (again.X != tiny_adata.X).nnz == 0


def test_several_files_are_joined_over_the_union_of_genes(tiny_adata, tmp_path):
    first, second = tiny_adata[:20, :50].copy(), tiny_adata[20:, 30:].copy()
    second.obs_names = [f"cell{i}" for i in range(40)]  # names that the first file has too
    del second.obs["batch"]
    first.write_h5ad(tmp_path / "a.h5ad")
    second.write_h5ad(tmp_path / "b.h5ad")
    joined = read_h5ad([tmp_path / "a.h5ad", tmp_path / "b.h5ad"])
    assert joined.shape == (60, 80)
    assert joined.obs_names.is_unique
    assert joined.obs["source_file"].tolist() == [str(tmp_path / "a.h5ad")] * 20 + [str(tmp_path / "b.h5ad")] * 40
    expected = tiny_adata.to_df()
    expected.iloc[:20, 50:] = 0.0
    expected.iloc[20:, :30] = 0.0
    np.testing.assert_array_equal(joined.to_df()[expected.columns].to_numpy(), expected.to_numpy())
    assert joined.var.loc["gene60", "ensembl"] == tiny_adata.var.loc["gene60", "ensembl"]
    assert joined.obs["batch"].isna().sum() == 40


def test_a_column_that_says_where_cells_come_from_is_kept(tiny_adata, tmp_path):
    first, second = tiny_adata[:20].copy(), tiny_adata[20:].copy()
    second.obs["source_file"] = "lab 2"
    first.write_h5ad(tmp_path / "a.h5ad")
    second.write_h5ad(tmp_path / "b.h5ad")
    joined = read_h5ad([tmp_path / "a.h5ad", tmp_path / "b.h5ad"])
    assert joined.obs["source_file"].isna().tolist() == [True] * 20 + [False] * 40
    assert joined.obs["scforge_source"].tolist() == [str(tmp_path / "a.h5ad")] * 20 + [str(tmp_path / "b.h5ad")] * 40


def test_missing_file(tmp_path):
    with pytest.raises(MissingFileError, match=r"no\.h5ad' does not exist"):
        read_h5ad(tmp_path / "no.h5ad")


def test_folder(tmp_path):
    with pytest.raises(DataError, match="is not a file"):
        read_h5ad(tmp_path)


@pytest.mark.parametrize("content", [b"", b"gene,count\nA,1\n"])
def test_not_an_h5ad(tmp_path, content):
    (tmp_path / "a.h5ad").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.h5ad' cannot be read as an h5ad file"):
        read_h5ad(tmp_path / "a.h5ad")


@pytest.mark.filterwarnings("ignore::Warning")
def test_another_hdf5_file(tmp_path):
    with h5py.File(tmp_path / "a.h5ad", "w") as file:
        file["something"] = [1, 2, 3]
    with pytest.raises(DataError, match=r"a\.h5ad'"):
        read_h5ad(tmp_path / "a.h5ad")


def test_truncated_file(tiny_adata, tmp_path):
    path = tmp_path / "a.h5ad"
    tiny_adata.write_h5ad(path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match="cannot be read"):
        read_h5ad(path)


def test_file_without_cells(tiny_adata, tmp_path):
    tiny_adata[:0].copy().write_h5ad(tmp_path / "a.h5ad")
    with pytest.raises(DataError, match=r"a\.h5ad' is empty"):
        read_h5ad(tmp_path / "a.h5ad")


def test_no_and_repeated_paths(tiny_adata, tmp_path):
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    with pytest.raises(OptionError, match="names no file"):
        read_h5ad([])
    with pytest.raises(OptionError, match="same file twice"):
        read_h5ad([tmp_path / "a.h5ad", str(tmp_path / "a.h5ad")])


def repeated(adata: ad.AnnData) -> ad.AnnData:
    """Three columns of two names, with counts in X, a layer and raw."""
    counts = np.array([[1, 2, 4], [0, 3, 5]], dtype=np.float32)
    obs = pd.DataFrame({"kind": ["p", "q"]}, index=["r0", "r1"])
    made = ad.AnnData(counts, obs=obs, layers={"more": sparse.csr_matrix(counts * 2)})
    made.var["length"] = [10, 20, 30]
    made.obsm["X_pca"] = np.ones((2, 2))
    made.raw = made.copy()
    made.var_names = ["gene0", "gene1", "gene0"]
    return made


@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_repeated_genes_are_summed_before_files_are_joined(tiny_adata, tmp_path):
    tiny_adata.raw = tiny_adata.copy()
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    repeated(tiny_adata).write_h5ad(tmp_path / "b.h5ad")
    with pytest.warns(ScforgeWarning, match=r"var_names of '.*b\.h5ad' names .* counts of 1 columns .first: 'gene0'"):
        joined = read_h5ad([tmp_path / "a.h5ad", tmp_path / "b.h5ad"])
    assert joined.shape == (62, 80)
    assert joined.to_df().iloc[60:, :2].to_numpy().tolist() == [[5, 2], [5, 3]]
    assert joined.X.sum() == tiny_adata.X.sum() + 15
    assert joined.obs["kind"].tolist()[60:] == ["p", "q"]


def test_summing_columns_keeps_the_rest(tiny_adata):
    given = repeated(tiny_adata)
    with pytest.warns(ScforgeWarning, match="the names names"):
        made = join_columns(given, "the names")
    assert made.X.toarray().tolist() == [[5, 2], [5, 3]]
    assert made.layers["more"].toarray().tolist() == [[10, 4], [10, 6]]
    assert made.var["length"].tolist() == [10, 20]
    assert made.raw.shape == (2, 3)
    assert made.obsm["X_pca"].shape == (2, 2)
    given.X = None
    with pytest.warns(ScforgeWarning):
        assert join_columns(given, "the names").X is None


def test_one_file_with_repeated_genes_is_read_as_it_is(tiny_adata, tmp_path):
    tiny_adata.var_names = ["gene0", *tiny_adata.var_names[:-1]]
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    with pytest.warns(UserWarning, match="not unique"):
        ad.read_h5ad(tmp_path / "a.h5ad")
    assert not read_h5ad(tmp_path / "a.h5ad").var_names.is_unique


def test_files_of_two_kinds_of_names(tiny_adata, tmp_path):
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    tiny_adata.var_names = tiny_adata.var["ensembl"]
    tiny_adata.write_h5ad(tmp_path / "b.h5ad")
    with pytest.raises(GeneMismatchError, match=r"shares 0 var_names .* human Ensembl ids such as .*; name the genes"):
        read_h5ad([tmp_path / "a.h5ad", tmp_path / "b.h5ad"])
