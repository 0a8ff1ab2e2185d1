"""The embedded PBMC 3k data is what its documentation says, and equal to its source."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
from scipy import sparse

from scforge.datasets import pbmc3k

SOURCE = Path(__file__).parents[3] / "shared" / "data" / "cells" / "pbmc3k.h5ad"
CELL_TYPES = [
    "B", "CD14+ Mono", "CD8 T", "DC", "FCGR3A+ Mono", "Memory CD4 T", "NK", "Naive CD4 T", "Platelet",
]  # fmt: skip


@pytest.fixture(scope="module")
def adata() -> ad.AnnData:
    return pbmc3k()


def test_counts_are_whole_numbers_in_sorted_rows(adata: ad.AnnData) -> None:
    assert adata.shape == (2700, 16634)
    assert isinstance(adata.X, sparse.csr_matrix)
    assert adata.X.dtype == np.float32
    assert adata.X.indices.dtype == np.int32
    assert adata.X.has_canonical_format
    assert adata.X.data.min() >= 1
    assert not (adata.X.data % 1).any()


def test_every_gene_is_detected_and_has_an_ensembl_id(adata: ad.AnnData) -> None:
    assert (np.bincount(adata.X.indices, minlength=adata.n_vars) > 0).all()
    assert adata.var_names.is_unique
    assert adata.var["gene_ids"].is_unique
    assert adata.var["gene_ids"].str.match(r"^ENSG\d{11}$").all()
    assert adata.var["gene_ids"]["CD3D"] == "ENSG00000167286"


def test_cell_types(adata: ad.AnnData) -> None:
    assert adata.obs_names.is_unique
    assert list(adata.obs["cell_type"].cat.categories) == CELL_TYPES
    assert adata.obs["cell_type"].isna().sum() == 62
    assert adata.obs["cell_type"].value_counts()["Naive CD4 T"] == 697


def test_markers_are_where_biology_puts_them(adata: ad.AnnData) -> None:
    for gene, cell_type in {"MS4A1": "B", "LYZ": "CD14+ Mono", "GNLY": "NK", "PPBP": "Platelet"}.items():
        counts = adata.X[:, adata.var_names.get_loc(gene)].toarray().ravel()
        inside = (adata.obs["cell_type"] == cell_type).to_numpy()
        assert counts[inside].mean() > 3 * counts[~inside].mean()


def test_provenance_is_flat_text(adata: ad.AnnData) -> None:
    about = adata.uns["scforge_dataset"]
    assert {"name", "source", "licence", "citation", "annotation"} <= set(about)
    assert all(isinstance(text, str) and text for text in about.values())
    assert "CC BY 4.0" in about["licence"]


def test_each_call_returns_a_fresh_object(adata: ad.AnnData) -> None:
    first, second = pbmc3k(), pbmc3k()
    first.X.data[:] = 0
    first.obs["new"] = 1
    first.uns["scforge_dataset"]["name"] = "changed"
    assert second.X.data.min() >= 1
    assert "new" not in second.obs
    assert second.uns["scforge_dataset"]["name"] == "pbmc3k"


def test_loads_within_a_second(adata: ad.AnnData) -> None:
    start = time.process_time()
    pbmc3k()
    assert time.process_time() - start < 1


def test_file_is_small() -> None:
    folder = resources.files("scforge.datasets").joinpath("data")
    with resources.as_file(folder) as path:
        assert sum(file.stat().st_size for file in path.iterdir()) <= 6_000_000


# anndata itself asks pandas for an option that pandas is about to drop.
@pytest.mark.filterwarnings("ignore:.*infer_string.*")
def test_write_and_read_back(adata: ad.AnnData, tmp_path: Path) -> None:
    adata.write_h5ad(tmp_path / "copy.h5ad")
    copy = ad.read_h5ad(tmp_path / "copy.h5ad")
    assert (copy.X != adata.X).nnz == 0
    assert copy.obs["cell_type"].equals(adata.obs["cell_type"])
    assert list(copy.var["gene_ids"]) == list(adata.var["gene_ids"])
    assert dict(copy.uns["scforge_dataset"]) == dict(adata.uns["scforge_dataset"])


@pytest.mark.skipif(not SOURCE.exists(), reason="the source file of the data is not on this machine")
def test_equal_to_the_source(adata: ad.AnnData) -> None:
    source = ad.read_h5ad(SOURCE)
    detected = np.asarray((source.X > 0).sum(axis=0)).ravel() > 0
    assert (source.X[:, detected] != adata.X).nnz == 0
    assert list(source.obs_names) == list(adata.obs_names)
    assert list(source.var_names[detected]) == list(adata.var_names)
    assert list(source.var["gene_ids"][detected]) == list(adata.var["gene_ids"])
    assert list(source.obs["cell_type"].cat.codes) == list(adata.obs["cell_type"].cat.codes)


def test_importing_the_room_imports_no_anndata() -> None:
    code = "import sys, scforge.datasets; sys.exit('anndata' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
