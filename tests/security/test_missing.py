"""Stores and zarr folders that vanish, or lose a chunk, are errors wherever cells are read."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
from scipy import sparse

from scforge.data import convert, open_cells
from scforge.errors import DataError
from scforge.estimators import Encoder
from scforge.training import CellDataModule

LIGHT = {"hidden_dim": 8, "ffn_dim": 8, "latent_dim": 4}
MISSING = r"\.zarr/.*c/\d+' is missing; copy the data again"


@pytest.fixture
def copied(store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store, tmp_path / "copy.zarr"))


@pytest.fixture
def model(copied: Path) -> Encoder:
    return Encoder(datamodule=CellDataModule(copied, batch_size=64), **LIGHT)


def train(model: Encoder) -> None:
    model.train(2, progress_bar=False, accelerator="cpu")


def embed(model: Encoder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model is not trained
        model.get_latent_representation(model.datamodule.cells)


@pytest.mark.parametrize("use", [train, embed])
@pytest.mark.parametrize("vanishes", ["", "dataset_1/X/data", "dataset_1/X/indices"])
def test_cells_of_a_store(model: Encoder, copied: Path, use: Callable[[Encoder], None], vanishes: str):
    shutil.rmtree(copied / vanishes)
    with pytest.raises(DataError, match=MISSING):
        use(model)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("part", ["X/data", "X/indices", "X/indptr", "obs/_index", "var/_index"])
def test_an_anndata_in_zarr(tiny_adata: ad.AnnData, tmp_path: Path, version: int, part: str):
    place = tmp_path / "a.zarr"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ad.settings.override(zarr_write_format=version):
            tiny_adata.write_zarr(place)
    (chunk,) = (path for path in (place / part).rglob("0") if path.is_file() and "mask" not in path.parts)
    chunk.unlink()
    for read in (open_cells, lambda source: convert(source, tmp_path / "s.zarr", progress=False)):
        with pytest.raises(DataError, match=rf"a\.zarr.*{part}.* is missing|{part[2:]} in 'X' .* not found|cannot be"):
            read(place)
    assert not (tmp_path / "s.zarr").exists()


@pytest.mark.parametrize("n_genes", [1, 2])
def test_chunks_of_zeros_are_written(tmp_path: Path, n_genes: int):
    """Only the first gene is expressed, in all cells or in a few, so that indices or boundaries are zeros."""
    counts = sparse.csr_matrix(
        (np.ones(50, dtype=np.int32), np.zeros(50, dtype=np.int32), np.arange(51)), (50, n_genes)
    )
    adata = ad.AnnData(counts)
    adata.obs["one"] = 0
    adata.obs["no"] = False
    convert(adata, tmp_path / "s.zarr", progress=False)
    cells = open_cells(tmp_path / "s.zarr")
    assert cells.block(np.arange(50)).genes.tolist() == [0] * 50
    assert not cells.obs[["one", "no"]].to_numpy().any()
