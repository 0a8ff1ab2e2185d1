import anndata as ad
import numpy as np
import pytest
import scanpy as sc
from scipy import sparse

from scforge.data import GeneVocab, select_genes
from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.testing import raises


@pytest.mark.slow
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
    assert len(expected ^ set(vocab.genes)) <= 8  # rounding at the edge of a bin, and bins of few genes
    assert (adata.X != pbmc[:600].X).nnz == 0
    assert list(vocab.genes) == [gene for gene in adata.var_names if gene in set(vocab.genes)]


@pytest.fixture
def hormones():
    """300 genes of 400 cells; "GCG" is the most expressed by far, "INS" comes next, each in a quarter of the cells."""
    generator = np.random.default_rng(0)
    counts = generator.poisson(generator.gamma(0.5, 1.0, 300), (400, 300)).astype(float)
    for gene, (level, cells) in enumerate([(3000, slice(0, 100)), (900, slice(100, 200))]):
        counts[:, gene] = 1
        counts[cells, gene] = generator.poisson(level, 100)
    counts[:, 40:60] *= generator.integers(0, 2, (400, 1)) * 4
    adata = ad.AnnData(sparse.csr_matrix(counts))
    adata.var_names = ["GCG", "INS", *[f"gene{i}" for i in range(2, 300)]]
    adata.obs["donor"] = np.tile(["a", "b"], 200)
    return adata


@pytest.mark.parametrize("batch_key", [None, "donor"])
def test_a_gene_that_is_alone_among_the_most_expressed_is_chosen(hormones, batch_key):
    genes = select_genes(hormones, n_top_genes=25, batch_key=batch_key).genes
    assert {"GCG", "INS"} <= set(genes)
    assert len(genes) == 25
    if batch_key is not None:
        hormones.obs[batch_key] = ["one", *["a", "b"] * 199, "a"]
        with pytest.warns(ScforgeWarning, match="batch_key has batches with only one cell .'one'."):
            assert {"GCG", "INS"} <= set(select_genes(hormones, n_top_genes=25, batch_key=batch_key).genes)
        return
    # scanpy gives a gene that is alone in its bin the normalized dispersion 1.
    work = hormones.copy()
    sc.pp.normalize_total(work, target_sum=1e4)
    sc.pp.log1p(work)
    sc.pp.highly_variable_genes(work, n_top_genes=25)
    assert "GCG" not in work.var_names[work.var["highly_variable"]]


def test_genes_to_keep(hormones):
    usual = select_genes(hormones, n_top_genes=20).genes
    flat = next(name for name in hormones.var_names[100:] if name not in usual)
    counts = hormones.X.toarray()
    counts[:, 299] = 0
    hormones.X = sparse.csr_matrix(counts)
    genes = select_genes(hormones, n_top_genes=20, keep_genes=[flat, "gene299", "GCG"]).genes
    assert len(genes) == 20
    assert {flat, "gene299", "GCG"} <= set(genes)
    assert len(set(genes) & set(usual)) == 18
    assert list(genes) == sorted(genes, key=list(hormones.var_names).index)
    assert "gene299" in select_genes(hormones, keep_genes=["gene299"]).genes
    assert set(select_genes(hormones, n_top_genes=1, keep_genes=["INS", "GCG"]).genes) == {"INS", "GCG"}
    with raises(OptionError, "keep_genes"):
        select_genes(hormones, keep_genes=["GCGG"])
    with raises(OptionError, "n_top_genes"):
        select_genes(hormones, n_top_genes=0)
    with pytest.raises(DataError, match="no gene is detected in at least 401 of 400 cells"):
        select_genes(hormones, min_cells=401)
    with raises(OptionError, "keep_genes"):
        select_genes(hormones, within=GeneVocab.from_genes(["GCG", "gene7"]), keep_genes=["INS"])


def test_min_cells(tiny_adata):
    counts = tiny_adata.X.toarray()
    counts[2:, 3] = 0
    counts[:2, 3] = 1
    tiny_adata.X = sparse.csr_matrix(counts)
    detected = np.asarray((tiny_adata.X > 0).sum(axis=0)).ravel()
    for min_cells in (1, 3, 30):
        genes = select_genes(tiny_adata, min_cells=min_cells).genes
        assert genes == tuple(tiny_adata.var_names[detected >= min_cells])
    assert select_genes(tiny_adata, n_top_genes=1000, min_cells=1).n_genes == 80
    vocab = GeneVocab.from_genes([f"ENSG{i:011d}" for i in (70, 3, 12)])
    tiny_adata.var["ensembl"] = tiny_adata.var["ensembl"] + ".2"
    chosen = select_genes(tiny_adata, gene_key="ensembl", within=vocab, min_cells=1)
    assert chosen.genes == tuple(f"ENSG{i:011d}" for i in (3, 12, 70))
    tiny_adata.X.data[tiny_adata.X.indices == 5] = 0  # explicit zeros are not detected
    assert "gene5" not in select_genes(tiny_adata, min_cells=1).genes


def test_a_batch_of_one_cell_is_named(hormones):
    hormones.obs["donor"] = ["one", *["a", "b"] * 199, "a"]
    with pytest.warns(ScforgeWarning, match="batch_key has batches with only one cell .'one'."):
        found = select_genes(hormones, n_top_genes=25, batch_key="donor").genes
    assert {"GCG", "INS"} <= set(found)
