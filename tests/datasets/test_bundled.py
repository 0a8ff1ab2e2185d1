import subprocess
import sys
import time
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
from scipy import sparse

from scforge.datasets import lung_cell_lines, pbmc3k

CELLS = Path(__file__).parents[3] / "shared" / "data" / "cells"
SOURCE, MIXTURE = CELLS / "pbmc3k.h5ad", CELLS / "sc_mixology.h5ad"


def test_counts_genes_and_cell_types(pbmc: ad.AnnData) -> None:
    assert pbmc.shape == (2700, 16634)
    assert isinstance(pbmc.X, sparse.csr_matrix)
    assert (pbmc.X.dtype, pbmc.X.indices.dtype) == (np.float32, np.int32)
    assert pbmc.X.has_canonical_format
    assert pbmc.X.data.min() >= 1
    assert not (pbmc.X.data % 1).any()
    assert (np.bincount(pbmc.X.indices, minlength=pbmc.n_vars) > 0).all()
    assert pbmc.obs_names.is_unique
    assert pbmc.var_names.is_unique
    assert pbmc.var["gene_ids"].is_unique
    assert pbmc.var["gene_ids"].str.match(r"^ENSG\d{11}$").all()
    assert pbmc.var["gene_ids"]["CD3D"] == "ENSG00000167286"
    types = {"B", "CD14+ Mono", "CD8 T", "DC", "FCGR3A+ Mono", "Memory CD4 T", "NK", "Naive CD4 T", "Platelet"}
    assert set(pbmc.obs["cell_type"].cat.categories) == types
    assert pbmc.obs["cell_type"].isna().sum() == 62
    assert pbmc.obs["cell_type"].value_counts()["Naive CD4 T"] == 697


def test_markers_are_where_biology_puts_them(pbmc: ad.AnnData) -> None:
    for gene, cell_type in {"MS4A1": "B", "LYZ": "CD14+ Mono", "GNLY": "NK", "PPBP": "Platelet"}.items():
        counts = pbmc.X[:, pbmc.var_names.get_loc(gene)].toarray().ravel()
        inside = (pbmc.obs["cell_type"] == cell_type).to_numpy()
        assert counts[inside].mean() > 3 * counts[~inside].mean()


def test_provenance_is_flat_text(pbmc: ad.AnnData) -> None:
    about = pbmc.uns["scforge_dataset"]
    assert {"name", "source", "license", "citation", "annotation"} <= set(about)
    assert all(isinstance(text, str) and text for text in about.values())
    assert "CC BY 4.0" in about["license"]


def test_each_call_returns_a_fresh_object_within_a_second() -> None:
    first, start = pbmc3k(), time.process_time()
    first.X.data[:] = 0
    first.obs["new"] = 1
    first.uns["scforge_dataset"]["name"] = "changed"
    second = pbmc3k()
    assert time.process_time() - start < 1
    assert second.X.data.min() >= 1
    assert "new" not in second.obs
    assert second.uns["scforge_dataset"]["name"] == "pbmc3k"


@pytest.mark.skipif(not SOURCE.exists(), reason="the source file of the data is not on this machine")
def test_equal_to_the_source(pbmc: ad.AnnData) -> None:
    source = ad.read_h5ad(SOURCE)
    detected = np.asarray((source.X > 0).sum(axis=0)).ravel() > 0
    assert (source.X[:, detected] != pbmc.X).nnz == 0
    assert list(source.obs_names) == list(pbmc.obs_names)
    assert list(source.var_names[detected]) == list(pbmc.var_names)
    assert list(source.var["gene_ids"][detected]) == list(pbmc.var["gene_ids"])
    assert list(source.obs["cell_type"].cat.codes) == list(pbmc.obs["cell_type"].cat.codes)


def test_cell_lines_are_in_batches_of_two_protocols() -> None:
    adata = lung_cell_lines()
    assert adata.shape == (1021, 11504)
    assert adata.X.dtype == np.float32
    assert adata.X.has_canonical_format
    assert adata.X.data.min() >= 1
    assert float(np.median(np.asarray(adata.X.sum(axis=1)))) == 708.0
    assert adata.var_names.str.match(r"^ENSG\d{11}$").all()
    lines = adata.obs.groupby("batch", observed=True)["cell_line"].nunique()
    assert lines.to_dict() == {
        "sc_celseq2": 3,
        "sc_celseq2_5cl_p1": 5,
        "sc_celseq2_5cl_p2": 5,
        "sc_celseq2_5cl_p3": 5,
        "sc_dropseq": 3,
    }
    license_text = adata.uns["scforge_dataset"]["license"]
    assert "Copyright (c) 2018 Luyi Tian" in license_text
    assert "shall be included in all copies" in license_text


@pytest.mark.skipif(not MIXTURE.exists(), reason="the source file of the data is not on this machine")
def test_counts_of_cell_lines_are_those_that_the_card_describes() -> None:
    source, adata = ad.read_h5ad(MIXTURE), lung_cell_lines()
    counts = source.X.tocsr().copy()
    counts.data = np.random.default_rng(0).binomial(counts.data.astype(np.int64), 0.03)
    counts.eliminate_zeros()
    seen = np.asarray(counts.sum(axis=0)).ravel() > 0
    assert (counts[:, seen] != adata.X).nnz == 0
    assert list(source.var_names[seen]) == list(adata.var_names)
    assert list(source.obs_names) == list(adata.obs_names)
    for column in ("batch", "cell_line"):
        assert source.obs[column].astype(str).tolist() == adata.obs[column].astype(str).tolist()


def test_importing_data_sets_imports_no_anndata() -> None:
    code = "import sys, scforge.datasets; sys.exit('anndata' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
