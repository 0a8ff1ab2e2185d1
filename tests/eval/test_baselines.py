from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scanpy as sc

from scforge.errors import OptionError
from scforge.eval import pca_embedding
from scforge.eval.baselines import variable_genes


def reference(adata: ad.AnnData, *, scale: bool) -> np.ndarray:
    work = ad.AnnData(adata.X.copy(), var=adata.var[[]].copy())
    sc.pp.filter_genes(work, min_cells=3)
    sc.pp.normalize_total(work, target_sum=1e4)
    sc.pp.log1p(work)
    sc.pp.highly_variable_genes(work, n_top_genes=50)
    work = work[:, work.var["highly_variable"]].copy()
    if scale:
        work.X = work.X.toarray()
        sc.pp.scale(work, max_value=10)
    sc.pp.pca(work, n_comps=5, random_state=0)
    return work.obsm["X_pca"]


@pytest.mark.parametrize("scale", [False, True])
def test_it_is_what_scanpy_computes(tiny_adata: ad.AnnData, scale: bool) -> None:
    before = tiny_adata.copy()
    embedding = pca_embedding(tiny_adata, n_comps=5, n_top_genes=50, scale=scale)
    assert embedding.shape == (60, 5)
    assert embedding.dtype == np.float32
    np.testing.assert_allclose(np.abs(embedding), np.abs(reference(tiny_adata, scale=scale)), atol=1e-4)
    assert (tiny_adata.X != before.X).nnz == 0
    assert list(tiny_adata.obsm) == []
    assert list(tiny_adata.var) == list(before.var)


def test_counts_in_a_layer(tiny_adata: ad.AnnData) -> None:
    expected = pca_embedding(tiny_adata, n_comps=5)
    tiny_adata.layers["counts"] = tiny_adata.X.copy()
    tiny_adata.X = tiny_adata.X * 0.1
    np.testing.assert_array_equal(pca_embedding(tiny_adata, n_comps=5, layer="counts"), expected)


@pytest.mark.parametrize("n_comps", [0, 60, 100])
def test_as_many_components_as_there_can_be(tiny_adata: ad.AnnData, n_comps: int) -> None:
    with pytest.raises(OptionError, match=rf"n_comps={n_comps} is not between 1 and the smaller side of \(60, 80\)"):
        pca_embedding(tiny_adata, n_comps=n_comps)


def test_genes_are_chosen_within_batches(tiny_adata: ad.AnnData) -> None:
    import scanpy as sc

    work = tiny_adata.copy()
    sc.pp.filter_genes(work, min_cells=3)
    sc.pp.normalize_total(work, target_sum=1e4)
    sc.pp.log1p(work)
    sc.pp.highly_variable_genes(work, n_top_genes=20, batch_key="batch")
    found = set(variable_genes(tiny_adata, n_top_genes=20, batch_key="batch").var_names)
    assert found == set(work.var_names[work.var["highly_variable"]])
    assert found != set(variable_genes(tiny_adata, n_top_genes=20).var_names)
