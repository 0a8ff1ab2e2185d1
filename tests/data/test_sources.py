import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import read_h5ad
from scforge.data.genes import join_columns
from scforge.errors import DataError, GeneMismatchError, MissingFileError, OptionError, ScforgeWarning
from scforge.testing import raises


@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_one_file(tiny_adata, tmp_path):
    tiny_adata.var_names = ["gene0", *tiny_adata.var_names[:-1]]  # a repeated name is kept
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    for paths in (tmp_path / "a.h5ad", str(tmp_path / "a.h5ad"), [tmp_path / "a.h5ad"]):
        again = read_h5ad(paths)
        assert again.obs_names.equals(tiny_adata.obs_names)
        assert again.var_names.equals(tiny_adata.var_names)
        assert (again.X != tiny_adata.X).nnz == 0


pytestmark = pytest.mark.filterwarnings("ignore:.* genes that are not measured in all sources")


@pytest.mark.parametrize("told", [False, True])
def test_several_files_are_joined_over_the_union_of_genes(tiny_adata, tmp_path, told):
    first, second = tiny_adata[:20, :50].copy(), tiny_adata[20:, 30:].copy()
    second.obs_names = [f"cell{i}" for i in range(40)]  # names that the first file has too
    del second.obs["batch"]
    if told:
        second.obs["source_file"] = "lab 2"
    paths = [tmp_path / "a.h5ad", tmp_path / "b.h5ad"]
    first.write_h5ad(paths[0])
    second.write_h5ad(paths[1])
    joined = read_h5ad(paths)
    assert joined.shape == (60, 80)
    assert joined.obs_names.is_unique
    # A column that says where cells come from is kept.
    expected = [str(paths[0])] * 20 + [str(paths[1])] * 40
    assert joined.obs["scforge_source" if told else "source_file"].tolist() == expected
    assert joined.obs["source_file"].isna().tolist() == [told] * 20 + [False] * 40
    expected = tiny_adata.to_df()
    expected.iloc[:20, 50:] = 0.0
    expected.iloc[20:, :30] = 0.0
    np.testing.assert_array_equal(joined.to_df()[expected.columns].to_numpy(), expected.to_numpy())
    assert joined.var.loc["gene60", "ensembl"] == tiny_adata.var.loc["gene60", "ensembl"]
    assert joined.obs["batch"].isna().sum() == 40


@pytest.mark.filterwarnings("ignore::Warning")
def test_what_cannot_be_read(tiny_adata, tmp_path):
    path = tmp_path / "a.h5ad"
    tiny_adata.write_h5ad(path)
    whole = path.read_bytes()
    with raises(OptionError, "paths"):
        read_h5ad([path, str(path)])
    for source, error, message in [
        (tmp_path / "no.h5ad", MissingFileError, r"no\.h5ad' does not exist"),
        (tmp_path, DataError, "is a folder; pass the path of an h5ad file"),
        ([], OptionError, "is empty; pass at least one"),
    ]:
        with pytest.raises(error, match=message):
            read_h5ad(source)
    for content in (b"", b"gene,count\nA,1\n", whole[:5000]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.h5ad' cannot be read as an h5ad file"):
            read_h5ad(path)
    with h5py.File(path, "w") as file:
        file["something"] = [1, 2, 3]
    with pytest.raises(DataError, match=r"a\.h5ad'"):
        read_h5ad(path)
    tiny_adata[:0].copy().write_h5ad(path)
    with pytest.raises(DataError, match=r"a\.h5ad' is empty"):
        read_h5ad(path)
    tiny_adata.write_h5ad(path)
    tiny_adata.var_names = tiny_adata.var["ensembl"]
    tiny_adata.write_h5ad(tmp_path / "b.h5ad")
    with pytest.raises(GeneMismatchError):
        read_h5ad([path, tmp_path / "b.h5ad"])


@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_repeated_genes_are_summed_before_files_are_joined(tiny_adata, tmp_path):
    counts = np.array([[1, 2, 4], [0, 3, 5]], dtype=np.float32)
    obs = pd.DataFrame({"kind": ["p", "q"]}, index=["r0", "r1"])
    repeated = ad.AnnData(counts, obs=obs, layers={"more": sparse.csr_matrix(counts * 2)})
    repeated.var["length"] = [10, 20, 30]
    repeated.obsm["X_pca"] = np.ones((2, 2))
    repeated.raw = repeated.copy()
    repeated.var_names = ["gene0", "gene1", "gene0"]
    tiny_adata.raw = tiny_adata.copy()
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    repeated.write_h5ad(tmp_path / "b.h5ad")
    with pytest.warns(
        ScforgeWarning,
        match=r"var_names of '.*b\.h5ad': several columns refer to the same gene; "
        r"the counts of 1 columns .first: 'gene0'",
    ):
        joined = read_h5ad([tmp_path / "a.h5ad", tmp_path / "b.h5ad"])
    assert joined.shape == (62, 80)
    assert joined.to_df().iloc[60:, :2].to_numpy().tolist() == [[5, 2], [5, 3]]
    assert joined.X.sum() == tiny_adata.X.sum() + 15
    assert joined.obs["kind"].tolist()[60:] == ["p", "q"]
    with pytest.warns(ScforgeWarning, match="the names: several columns refer to the same gene"):
        made = join_columns(repeated, "the names")
    assert made.layers["more"].toarray().tolist() == [[10, 4], [10, 6]]
    assert made.var["length"].tolist() == [10, 20]
    assert made.raw.shape == (2, 3)
    assert made.obsm["X_pca"].shape == (2, 2)
