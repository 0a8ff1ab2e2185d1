"""Each tokenizer against a plain reference of its definition, one cell at a time, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from scforge.data import GeneVocab, open_cells
from scforge.errors import DataError, OptionError
from scforge.tokenizers import Tokenizer, get_tokenizer


def log1p_cp10k(count: float, total: float) -> float:
    return float(np.log1p(count / total * 1e4))


def rank_reference(counts, total, medians, most, cls):
    """Token ids and values of one cell, from Geneformer's definition, ties by token id."""
    keyed = [(-(count / total * 1e4) / medians[gene], gene) for gene, count in enumerate(counts) if count > 0]
    # Equal keys up to rounding are ties of count / median.
    keyed = sorted(((round(key, 9), gene) for key, gene in keyed))[:most]
    ids = [4 + gene for _, gene in keyed]
    values = [log1p_cp10k(counts[gene], total) for _, gene in keyed]
    return ([3, *ids], [0.0, *values]) if cls else (ids, values)


def continuous_reference(counts, total, most, cls):
    genes = sorted(np.flatnonzero(counts), key=lambda gene: (-counts[gene], gene))[:most]
    genes = sorted(genes)
    ids, values = [4 + gene for gene in genes], [log1p_cp10k(counts[gene], total) for gene in genes]
    return ([3, *ids], [0.0, *values]) if cls else (ids, values)


def assert_cells(batch, expected):
    for i, (ids, values) in enumerate(expected):
        n = int(batch["attention_mask"][i].sum())
        assert batch["input_ids"][i, :n].tolist() == ids
        np.testing.assert_allclose(batch["values"][i, :n], values, rtol=2e-6)
        assert not batch["attention_mask"][i, n:].any()
        assert not batch["input_ids"][i, n:].any()
        assert not batch["values"][i, n:].any()


@pytest.mark.parametrize("cls", [True, False])
@pytest.mark.parametrize("max_len", [None, 20, 5])
@pytest.mark.parametrize("use_medians", [True, False])
def test_rank_value(tiny_adata, tiny_vocab, cls, max_len, use_medians):
    cells = open_cells(tiny_adata, tiny_vocab)
    tokenizer = get_tokenizer("rank_value", tiny_vocab, append_cls=cls, max_len=max_len, use_medians=use_medians)
    medians = tiny_vocab.medians if use_medians else np.ones(80)
    most = 10**6 if max_len is None else max_len - cls
    dense = cells.counts.toarray().astype(float)
    expected = [rank_reference(row, row.sum(), medians, most, cls) for row in dense]
    assert_cells(tokenizer(cells.block(np.arange(60))), expected)


@pytest.mark.parametrize("cls", [True, False])
@pytest.mark.parametrize("max_len", [None, 20, 5])
def test_continuous_projection(tiny_adata, tiny_vocab, cls, max_len):
    cells = open_cells(tiny_adata, tiny_vocab)
    tokenizer = get_tokenizer("continuous_projection", tiny_vocab, append_cls=cls, max_len=max_len)
    most = 10**6 if max_len is None else max_len - cls
    dense = cells.counts.toarray().astype(float)
    expected = [continuous_reference(row, row.sum(), most, cls) for row in dense]
    assert_cells(tokenizer(cells.block(np.arange(60))), expected)


@pytest.mark.parametrize("name", ["rank_value", "continuous_projection"])
def test_truncation_keeps_the_highest(name):
    counts = np.array([[1, 9, 2, 8, 3, 7]])
    options = {"use_medians": False} if name == "rank_value" else {}
    vocab = GeneVocab.from_genes(list("abcdef"))
    batch = get_tokenizer(name, vocab, max_len=4, **options)(sparse.csr_matrix(counts))
    assert set(batch["input_ids"][0].tolist()) == {3, 5, 7, 9}


@pytest.mark.filterwarnings("ignore:10 of 60 cells express no gene")
def test_library_size_counts_genes_outside_the_vocabulary(tiny_adata):
    cells = open_cells(tiny_adata, GeneVocab.from_genes(["gene0", "gene1"]), min_overlap=0)
    tokenizer = get_tokenizer("continuous_projection", GeneVocab.from_genes(["gene0", "gene1"]), append_cls=False)
    batch = tokenizer(cells.block(np.array([0])))
    totals = tiny_adata.X[0].sum()
    expected = [log1p_cp10k(count, totals) for count in tiny_adata.X[0, :2].toarray()[0] if count]
    np.testing.assert_allclose(batch["values"][0, : len(expected)], expected, rtol=1e-6)


def test_totals_may_be_given_with_a_matrix():
    tokenizer = get_tokenizer("continuous_projection", GeneVocab.from_genes(["a"]), append_cls=False)
    values = tokenizer(sparse.csr_matrix(np.array([[5]])), totals=np.array([1000.0]))["values"]
    assert values.item() == pytest.approx(np.log1p(50.0), rel=1e-6)


def test_geneformer_order_by_hand():
    # count / median: a 4/8, b 1/0.5, c 3/3
    vocab = GeneVocab(("a", "b", "c"), medians=np.array([8.0, 0.5, 3.0]))
    batch = get_tokenizer("rank_value", vocab, append_cls=False)(sparse.csr_matrix(np.array([[4, 1, 3]])))
    assert batch["input_ids"].tolist() == [[5, 6, 4]]


def test_a_strategy_that_returns_no_tokens_is_told(tiny_adata, tiny_vocab):
    class Ids(Tokenizer):
        def _tokenize(self, block):
            return block.genes

    tokenizer, cells = Ids(tiny_vocab), open_cells(tiny_adata, tiny_vocab)
    for tokenize in (tokenizer, tokenizer.ragged):
        with pytest.raises(OptionError, match="Ids._tokenize returned ndarray; return scforge.tokenizers.RaggedTokens"):
            tokenize(cells.block(np.arange(3)))


def test_errors(tiny_vocab):
    with pytest.raises(OptionError, match="has no medians; add them with vocab.with_medians"):
        get_tokenizer("rank_value", GeneVocab.from_genes(["a"]))
    for options in ({"max_len": 1}, {"max_len": 0, "append_cls": False}):
        with pytest.raises(OptionError, match="leaves no room for a gene"):
            get_tokenizer("rank_value", tiny_vocab, **options)
    with pytest.raises(OptionError, match="'max_length' is unknown to 'rank_value'; did you mean 'max_len'"):
        get_tokenizer("rank_value", tiny_vocab, max_length=5)
    with pytest.raises(OptionError, match="did you mean 'rank_value'"):
        get_tokenizer("rank_values", tiny_vocab)
    with pytest.raises(DataError, match="cells has 5 columns but the vocabulary 80 genes"):
        get_tokenizer("rank_value", tiny_vocab)(sparse.csr_matrix(np.ones((2, 5))))
