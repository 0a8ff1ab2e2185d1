import logging
from unittest.mock import Mock

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import convert
from scforge.data.readers import AdataStream
from scforge.errors import DataError, ScforgeWarning


@pytest.fixture
def files(tmp_path):
    """Return a function that writes a file for each table of cells."""

    def files(*tables, names=None) -> list:
        paths = []
        for i, table in enumerate(tables):
            n_cells = len(next(iter(table.values())))
            index = [f"s{i}c{j}" for j in range(n_cells)] if names is None else names[i]
            counts = sparse.csr_matrix(np.ones((n_cells, 3), dtype=np.int32))
            adata = ad.AnnData(counts, obs=pd.DataFrame(table, index=index), var=pd.DataFrame(index=["a", "b", "c"]))
            paths.append(tmp_path / f"{i}.h5ad")
            adata.write_h5ad(paths[-1])
        return paths

    return files


def stored(paths, **options) -> pd.DataFrame:
    convert(paths, paths[0].parent / "s.zarr", shuffle=False, **options)
    return ad.read_zarr(paths[0].parent / "s.zarr" / "dataset_0").obs


def test_categories_of_all_sources(files):
    paths = files(
        {"type": pd.Categorical(["T", None], categories=["T", "unused"]), "n": [1, 2]},
        {"type": ["B", "T"], "n": [0.5, np.nan]},
    )
    obs = stored(paths)
    assert obs["type"].cat.categories.tolist() == ["T", "unused", "B"]
    assert obs["type"].astype(object).where(obs["type"].notna(), None).tolist() == ["T", None, "B", "T"]
    np.testing.assert_array_equal(obs["n"], [1, 2, 0.5, np.nan])
    assert obs["scforge_source"].tolist() == [str(paths[0])] * 2 + [str(paths[1])] * 2
    assert obs["scforge_total"].tolist() == [3.0] * 4


def test_every_kind_of_column(files):
    (path,) = files(
        {
            "truth": [True, False, True],
            "int8": np.array([1, 2, 3], dtype=np.int8),
            "float32": np.array([1.5, np.nan, 2], dtype=np.float32),
            "nullable": pd.array([1, None, 3], dtype="Int64"),
            "maybe": pd.array([True, None, False], dtype="boolean"),
            "text": ["x", None, "y"],
            "numbers": pd.Categorical([10, 2, 10]),
            "ordered": pd.Categorical(["low", "high", "low"], categories=["low", "high"], ordered=True),
            "_scvi_batch": [0, 0, 0],
            "scforge_total": [1.0, 2.0, 3.0],
        }
    )
    obs = stored([path])
    assert obs["truth"].tolist() == [True, False, True]
    assert (obs["int8"].dtype, obs["float32"].dtype) == (np.int8, np.float32)
    np.testing.assert_array_equal(obs["float32"], np.array([1.5, np.nan, 2]))
    np.testing.assert_array_equal(obs["nullable"], [1, np.nan, 3])
    assert obs["maybe"].cat.codes.tolist() == [1, -1, 0]
    assert obs["text"].cat.codes.tolist() == [0, -1, 1]
    assert obs["numbers"].tolist() == [10, 2, 10]
    assert obs["ordered"].cat.ordered
    assert obs["ordered"].cat.categories.tolist() == ["low", "high"]
    assert "_scvi_batch" not in obs
    assert obs["scforge_total"].tolist() == [3.0] * 3


def test_columns_that_not_all_have_are_left_out_and_told(files, caplog):
    caplog.set_level(logging.INFO, "scforge")
    paths = files({"type": ["T"], "age": [3], "mixed": [1]}, {"type": ["B"], "dose": [1.0], "mixed": ["one"]})
    kept = {None: ["type"], ("type",): ["type"], (): []}
    for wanted, columns in kept.items():
        obs = stored(paths, obs=None if wanted is None else list(wanted), overwrite=True)
        assert [column for column in obs if not column.startswith("scforge_")] == columns
    assert "Columns of obs left out: age (not in all sources); dose (not in all sources); mixed (" in caplog.text
    for wanted, message in [
        ("typo", r"0\.h5ad' has no column 'typo'; did you mean 'type'\?"),
        ("dose", r"0\.h5ad' has no column 'dose'"),
        ("mixed", r"'mixed' contains text in '.*1\.h5ad' and numbers in '.*0\.h5ad'"),
    ]:
        with pytest.raises(DataError, match=message):
            stored(paths, obs=[wanted], overwrite=True)


def test_a_column_that_cannot_be_stored(tiny_adata, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "scforge")
    tiny_adata.obs["when"] = pd.to_datetime("2020-01-01")
    with pytest.raises(DataError, match="'when' of 'adata' contains neither text nor numbers"):
        convert(tiny_adata, tmp_path / "s.zarr", obs=["when"])
    assert convert(tiny_adata, tmp_path / "s.zarr").obs_columns == ["group", "batch"]
    assert "left out: when" in caplog.text
    tiny_adata.obs["a/b"] = 1
    with monkeypatch.context() as patch:
        patch.setattr(AdataStream, "chunks", Mock(side_effect=AssertionError("no cell is read")))
        with pytest.raises(DataError, match="'a/b' contains a slash, which is not allowed in column names of a store"):
            convert(tiny_adata, tmp_path / "t.zarr", obs=["a/b"])
    with pytest.warns(ScforgeWarning, match="a column of obs cannot be stored and is skipped: 'a/b' contains a slash"):
        assert convert(tiny_adata, tmp_path / "t.zarr").obs_columns == ["group", "batch"]


@pytest.mark.filterwarnings("ignore:Observation names are not unique")
def test_names_that_clash_get_the_number_of_their_source(files, tiny_adata, caplog):
    caplog.set_level(logging.INFO, "scforge")
    paths = files({"n": [1, 2, 3]}, {"n": [4, 5, 6]}, names=[["a", "b", "b-1"], ["b", "c", "d"]])
    obs = stored(paths)
    assert obs["n"].tolist() == [1, 2, 3, 4, 5, 6]
    # "b-1" is the name of another cell, and of "b" of source 1: the rows of both are added.
    assert obs.index.tolist() == ["a", "b-0", "b-1-2", "b-1-0", "c", "d"]
    assert "2 cells have a duplicate name" in caplog.text
    convert([tiny_adata, tiny_adata[:10].copy()], paths[0].parent / "memory.zarr", shuffle=False)
    obs = ad.read_zarr(paths[0].parent / "memory.zarr" / "dataset_0").obs
    assert obs["scforge_source"].tolist() == ["adata"] * 60 + ["adata-1"] * 10
    assert (obs.index[3], obs.index[40], obs.index[63]) == ("cell3-0", "cell40", "cell3-1")
    paths = files({"n": [1, 2, 3]}, names=[["a", "a", "b"]])
    assert stored(paths, overwrite=True).index.tolist() == ["a-0-0", "a-0-1", "b"]
