import shutil
import warnings
from pathlib import Path

import annbatch
import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from scipy import sparse

from scforge.data import GeneVocab, open_cells
from scforge.errors import DataError, ScforgeWarning

ALL = [f"gene{i}" for i in range(80)]


def write_foreign(path: Path, adatas: list[ad.AnnData], *, collection: bool = True) -> None:
    group = zarr.open_group(path, mode="w", zarr_format=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Consolidated metadata")
        for number, adata in enumerate(adatas):
            annbatch.write_sharded(group, adata, n_obs_per_chunk=16, key=f"dataset_{number}")
        if collection:
            group.attrs.update({"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"})
            zarr.consolidate_metadata(group.store)


def test_a_collection_of_annbatch(many_adata, tmp_path, assert_same):
    parts = [many_adata[:300].copy(), many_adata[300:].copy()]
    parts[1].obs["donor"] = parts[1].obs["donor"].cat.rename_categories(lambda name: name.upper())
    for part in parts:
        part.X = part.X.astype(np.int32)
    write_foreign(tmp_path / "s.zarr", parts)
    cells = open_cells(tmp_path / "s.zarr")
    memory = open_cells(many_adata)
    rows = np.random.default_rng(0).integers(700, size=500)
    assert cells.vocab.genes == tuple(ALL)
    assert cells.names().tolist() == many_adata.obs_names.tolist()
    assert_same(cells.block(rows), memory.block(rows))
    assert cells.column("donor").tolist() == [*parts[0].obs["donor"], *parts[1].obs["donor"]]
    vocab = GeneVocab.from_genes(ALL[60:20:-1])
    cells, memory = open_cells(tmp_path / "s.zarr", vocab), open_cells(many_adata, vocab)
    assert_same(cells.block(rows), memory.block(rows))
    assert cells.counts_kept == pytest.approx(memory.counts_kept)


@pytest.mark.parametrize("part", ["data", "indices", "indptr"])
def test_a_collection_that_loses_a_chunk(many_adata, tmp_path, part):
    write_foreign(tmp_path / "s.zarr", [many_adata[:300].copy(), many_adata[300:].copy()])
    cells = open_cells(tmp_path / "s.zarr")
    (tmp_path / "s.zarr" / "dataset_1" / "X" / part / "c/0").unlink()
    with pytest.raises(DataError, match=rf"dataset_1/X/{part}/c/\d+' is missing; copy the data again"):
        cells.block(np.arange(700))


def test_stored_zeros_unsorted_rows_and_repeated_genes(tmp_path):
    counts = sparse.csr_matrix(
        (np.array([5, 0, 2, 200, 100, 1], dtype=np.uint8), np.array([3, 0, 1, 2, 2, 0]), [0, 3, 6]), shape=(2, 4)
    )
    adata = ad.AnnData(counts, obs=pd.DataFrame(index=["x", "y"]), var=pd.DataFrame(index=["a", "b", "c", "a2"]))
    write_foreign(tmp_path / "s.zarr", [adata])
    block = open_cells(tmp_path / "s.zarr").block(np.array([0, 1]))
    assert block.indptr.tolist() == [0, 2, 4]
    assert block.genes.tolist() == [1, 3, 0, 2]
    assert block.counts.tolist() == [2, 5, 1, 300]
    assert block.totals.tolist() == [7, 301]
    adata.var_names = ["a", "b", "c", "b"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Variable names are not unique")
        write_foreign(tmp_path / "s.zarr", [adata])
    with pytest.warns(ScforgeWarning, match="summed"):
        block = open_cells(tmp_path / "s.zarr").block(np.array([0, 1]))
    assert (block.genes.tolist(), block.counts.tolist()) == ([1, 0, 2], [7, 1, 300])


@pytest.mark.parametrize(("value", "match"), [(0.5, "not whole numbers"), (np.nan, "missing or inf")])
def test_a_collection_without_counts(many_adata, tmp_path, value, match):
    adata = many_adata[:40].copy()
    adata.X.data[123] = value
    write_foreign(tmp_path / "s.zarr", [many_adata[40:80].copy(), adata])
    cells = open_cells(tmp_path / "s.zarr")
    cells.block(np.arange(40))
    with pytest.raises(DataError, match=rf"s\.zarr' contains .*{match}.*raw counts are needed"):
        cells.block(np.arange(40, 80))


def test_collections_that_cannot_be_used(many_adata, tmp_path):
    small = many_adata[:40].copy()
    dense = small.copy()
    dense.X = dense.X.toarray()
    for parts, message in [
        ([small, small[:, ::-1].copy()], "dataset_1 of .* has different genes than the first dataset, or a"),
        ([dense], "X of dataset_0 of .* is array, not csr_matrix"),
        ([], "contains no dataset"),
    ]:
        write_foreign(tmp_path / f"{len(parts)}.zarr", parts)
        with pytest.raises(DataError, match=message):
            open_cells(tmp_path / f"{len(parts)}.zarr")
    write_foreign(tmp_path / "s.zarr", [small, many_adata[40:80].copy()])
    shutil.rmtree(tmp_path / "s.zarr" / "dataset_1" / "X" / "data" / "c")
    with pytest.raises(DataError, match=r"dataset_1/X/data/c/\d+' is missing; copy the data again"):
        open_cells(tmp_path / "s.zarr").block(np.arange(80))
