import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from scforge.data import CellBlock, GeneVocab, open_cells
from scforge.insilico.screening import Perturbation, PerturbedCells, with_counts
from scforge.tokenizers import get_tokenizer

N_GENES = 6
TOKENIZERS = {
    "rank": ("rank_value", {}),
    "rank without medians": ("rank_value", {"use_medians": False}),
    "binned": ("binned_expression", {}),
    "binned, with zeros": ("binned_expression", {"side": "one", "include_zero_genes": True}),
    "continuous": ("continuous_projection", {}),
    "continuous, random": ("continuous_projection", {"order": "random", "max_len": 20}),
    "continuous, all genes": ("continuous_projection", {"include_zero_genes": True}),
    "continuous, own depth": ("continuous_projection", {"library_size": "vocabulary", "attention_bias": True}),
    "vectors": ("gene_embedding", {"table": {f"gene{i}": [float(i), 1.0] for i in range(0, 80, 2)}}),
}


@given(st.lists(st.lists(st.integers(0, 3), min_size=N_GENES, max_size=N_GENES), min_size=1, max_size=5), st.data())
def test_with_counts_is_assignment(rows: list[list[int]], data: st.DataObject):
    dense, size = np.array(rows, dtype=np.float32), data.draw(st.integers(1, 3))
    genes = np.array([data.draw(st.permutations(range(N_GENES)))[:size] for _ in rows])
    counts = np.array([[data.draw(st.integers(0, 4)) for _ in range(size)] for _ in rows], dtype=np.float64)
    outside = np.arange(len(rows)) + 2.0  # counts in genes that the vocabulary does not have
    block = CellBlock.from_csr(sparse.csr_matrix(dense), dense.sum(axis=1) + outside)
    changed = with_counts(block, genes, counts)
    np.put_along_axis(dense, genes, counts.astype(np.float32), axis=1)
    expected = CellBlock.from_csr(sparse.csr_matrix(dense), dense.sum(axis=1) + outside)
    for name in ("indptr", "genes", "counts", "totals"):
        np.testing.assert_array_equal(getattr(changed, name), getattr(expected, name))
        assert getattr(changed, name).dtype == getattr(expected, name).dtype


@pytest.mark.parametrize(("name", "options"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_deletion_is_a_count_of_zero_in_the_data(name: str, options: dict, tiny_adata: ad.AnnData, tiny_vocab):
    tokenizer = get_tokenizer(name, tiny_vocab, **options)
    tiny_adata = tiny_adata[tiny_adata.X[:, 3].toarray()[:, 0] > 0].copy()
    cells = open_cells(tiny_adata, tiny_vocab)
    rows = np.arange(len(cells))
    copies = PerturbedCells(cells, Perturbation("delete"), rows, np.full((len(rows), 1), 3, dtype=np.int32))
    tiny_adata.X[:, 3] = 0
    tiny_adata.X.eliminate_zeros()
    expected = tokenizer(open_cells(tiny_adata, tiny_vocab).block(rows))
    given = tokenizer(copies.block(rows))
    assert set(given) == set(expected)
    for key in expected:
        np.testing.assert_array_equal(given[key].numpy(), expected[key].numpy())


@pytest.mark.parametrize(("name", "options"), list(TOKENIZERS.values())[:2])
def test_overexpressed_gene_ranks_first(name: str, options: dict, tiny_adata: ad.AnnData, tiny_vocab: GeneVocab):
    tokenizer = get_tokenizer(name, tiny_vocab, **options)
    cells = open_cells(tiny_adata, tiny_vocab)
    perturbation = Perturbation.of("overexpress", cells, tokenizer)
    for gene in (0, 40, 79):
        block = perturbation.apply(cells.block(np.arange(60)), np.full((60, 1), gene))
        assert set(tokenizer(block)["input_ids"][:, 1].tolist()) == {tiny_vocab.n_special + gene}
    again = perturbation.apply(block, np.full((60, 1), gene))
    np.testing.assert_array_equal(again.counts, block.counts)


def test_activation_gives_usual_counts(tiny_vocab: GeneVocab):
    counts = np.zeros((5, 80), dtype=np.float32)
    counts[:, 0] = [96, 98, 95, 10, 1000]
    counts[:3, 1] = [4, 2, 5]  # shares of 4, 2 and 5 %
    cells = open_cells(ad.AnnData(sparse.csr_matrix(counts)), GeneVocab.from_genes([str(i) for i in range(80)]))
    perturbation = Perturbation.of("activate", cells, get_tokenizer("continuous_projection", cells.vocab))
    assert perturbation.shares[1] == pytest.approx(0.04)
    assert np.isnan(perturbation.shares[2])
    block = perturbation.apply(cells.block(np.arange(5)), np.ones((5, 1), dtype=int))
    assert block.counts[block.genes == 1].tolist() == [4, 2, 5, 1, 40]
    assert block.totals.tolist() == [100, 100, 100, 11, 1040]
    expressed = np.array([[True, True], [True, False], [False, False]])
    assert perturbation.applies(expressed).tolist() == [False, False, True]
    assert Perturbation("delete").applies(expressed).tolist() == [True, False, False]


@pytest.mark.parametrize("weighting", ["complement", "inverse"])
def test_overexpressed_genes_are_first_by_value_times_weight(weighting: str):
    generator = np.random.default_rng(0)
    dense = generator.poisson(3.0, (6, 20)).astype(np.float32)
    genes = [f"gene{i}" for i in range(20)]
    vocab = GeneVocab.from_genes(genes).with_entropies(np.append(np.linspace(0.1, 0.9, 19), 1.0))
    tokenizer = get_tokenizer("entropy_ranked", vocab, weighting=weighting)
    block = CellBlock.from_csr(sparse.csr_matrix(dense))
    perturbation = Perturbation.of(
        "overexpress", open_cells(ad.AnnData(dense, var=pd.DataFrame(index=genes))), tokenizer
    )

    def first(cells: CellBlock) -> np.ndarray:
        return tokenizer(cells)["input_ids"][:, 0].numpy() - vocab.n_special

    for gene in (0, 7, 12, 19):
        changed = perturbation.apply(block, np.full((6, 1), gene))
        counts = changed.counts[changed.genes == gene]
        others = np.delete(dense, gene, axis=1)
        assert (counts > others.max(axis=1)).all()
        was_first = first(changed) == gene
        assert (was_first | (counts == others.sum(axis=1))).all()
        if gene == 0:
            assert was_first.all()
            fewer = first(with_counts(block, np.full((6, 1), gene), counts[:, None] - 1.0)) == gene
            assert (~fewer | (counts <= others.max(axis=1) + 1) | (counts == dense[:, gene])).all()
    two = perturbation.apply(block, np.tile([0, 1], (6, 1)))
    leading = tokenizer(two)["input_ids"][:, :2].numpy() - vocab.n_special
    assert (np.sort(leading, axis=1) == [0, 1]).all()
