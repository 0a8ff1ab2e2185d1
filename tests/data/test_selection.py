"""Choice of genes against scanpy, medians against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import scanpy as sc
from scipy import sparse

from scforge.data import GeneVocab, open_cells, select_genes
from scforge.data.selection import gene_medians
from scforge.errors import DataError, OptionError


@pytest.mark.parametrize("batch_key", [None, "half"])
def test_highly_variable_genes_are_those_of_scanpy(pbmc, batch_key):
    adata = pbmc[:600].copy()
    adata.obs["half"] = ["x", "y"] * 300
    vocab = select_genes(adata, n_top_genes=300, min_cells=3, batch_key=batch_key)

    reference = adata.copy()
    totals = reference.X.sum(axis=1)
    reference.X = sparse.csr_matrix(reference.X.multiply(1e4 / totals)).astype(np.float32)
    sc.pp.filter_genes(reference, min_cells=3)
    sc.pp.log1p(reference)
    sc.pp.highly_variable_genes(reference, n_top_genes=300, batch_key=batch_key)
    expected = set(reference.var_names[reference.var["highly_variable"]])
    assert len(expected ^ set(vocab.genes)) <= 4  # rounding at the edge of a bin
    assert (adata.X != pbmc[:600].X).nnz == 0
    assert list(vocab.genes) == [gene for gene in adata.var_names if gene in set(vocab.genes)]


def test_min_cells(tiny_adata):
    counts = tiny_adata.X.toarray()
    counts[2:, 3] = 0
    counts[:2, 3] = 1
    tiny_adata.X = sparse.csr_matrix(counts)
    detected = np.asarray((tiny_adata.X > 0).sum(axis=0)).ravel()
    for min_cells in (1, 3, 30):
        genes = select_genes(tiny_adata, min_cells=min_cells).genes
        assert genes == tuple(tiny_adata.var_names[detected >= min_cells])


def test_explicit_zeros_are_not_detected(tiny_adata):
    counts = tiny_adata.X.copy()
    counts.data[counts.indices == 5] = 0
    tiny_adata.X = counts
    assert "gene5" not in select_genes(tiny_adata, min_cells=1).genes


def test_within_a_vocabulary(tiny_adata):
    vocab = GeneVocab.from_genes([f"ENSG{i:011d}" for i in (70, 3, 12)])
    tiny_adata.var["ensembl"] = tiny_adata.var["ensembl"] + ".2"
    chosen = select_genes(tiny_adata, gene_key="ensembl", within=vocab, min_cells=1)
    assert chosen.genes == tuple(f"ENSG{i:011d}" for i in (3, 12, 70))


def test_more_genes_than_there_are(tiny_adata):
    assert select_genes(tiny_adata, n_top_genes=1000, min_cells=1).n_genes == 80


def test_errors(tiny_adata):
    with pytest.raises(OptionError, match="n_top_genes=0"):
        select_genes(tiny_adata, n_top_genes=0)
    with pytest.raises(DataError, match="min_cells=61"):
        select_genes(tiny_adata, min_cells=61)
    with pytest.raises(DataError, match="batch_key='bach' is not a column of adata.obs; did you mean 'batch'"):
        select_genes(tiny_adata, n_top_genes=10, batch_key="bach")


def test_medians_equal_numpy(tiny_adata):
    cells = open_cells(tiny_adata, GeneVocab.from_genes([*tiny_adata.var_names[:30], "absent"]))
    values = tiny_adata.X.toarray().astype(float) / tiny_adata.X.toarray().sum(axis=1, keepdims=True) * 1e4
    expected = [np.median(column[column > 0]) for column in values[:, :30].T]
    medians = gene_medians(cells.counts, cells.totals)
    np.testing.assert_allclose(medians[:30], expected, rtol=1e-12)
    assert medians[30] == 1.0


def test_medians_leave_explicit_zeros_out():
    counts = sparse.csr_matrix((np.array([0.0, 0.0, 4.0]), np.array([0, 0, 0]), np.array([0, 1, 2, 3])), shape=(3, 1))
    assert gene_medians(counts, np.full(3, 1e4)).tolist() == [4.0]
    assert counts.nnz == 3
