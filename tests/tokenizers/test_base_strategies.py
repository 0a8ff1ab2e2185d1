"""Each tokenizer against a plain reference of its definition, one cell at a time, in float64."""

import numpy as np
import pytest
from scipy import sparse

from scforge.data import GeneVocab, open_cells
from scforge.errors import DataError, OptionError
from scforge.testing import raises
from scforge.tokenizers import get_tokenizer


def reference(name, counts, total, medians, most):
    """Return the genes of one cell: Geneformer's ranking, or the most expressed in the order of the vocabulary."""
    if name == "rank_value":  # equal keys up to rounding are ties of count / median
        keyed = [(round(-(count / total * 1e4) / medians[gene], 9), gene) for gene, count in enumerate(counts) if count]
        return [gene for _, gene in sorted(keyed)[:most]]
    return sorted(sorted(np.flatnonzero(counts), key=lambda gene: (-counts[gene], gene))[:most])


@pytest.mark.parametrize("cls", [True, False])
@pytest.mark.parametrize("max_len", [None, 20, 5])
@pytest.mark.parametrize("name", ["rank_value", "rank_value without medians", "continuous_projection"])
@pytest.mark.filterwarnings("ignore:. of 60 cells express no gene")
def test_tokens_and_values(tiny_adata, tiny_vocab, cls, max_len, name):
    """The vocabulary lacks genes of the data, which count in the library size all the same."""
    vocab = tiny_vocab.subset(np.arange(70))
    options = {"use_medians": False} if "without" in name else {}
    medians, name = np.ones(70) if options else vocab.medians, name.split(" ")[0]
    tokenizer = get_tokenizer(name, vocab, append_cls=cls, max_len=max_len, **options)
    cells = open_cells(tiny_adata, vocab)
    batch = tokenizer(cells.block(np.arange(60)))
    most = 10**6 if max_len is None else max_len - cls
    dense, totals = tiny_adata.X.toarray()[:, :70].astype(float), tiny_adata.X.toarray().sum(axis=1)
    for i, (counts, total) in enumerate(zip(dense, totals, strict=True)):
        genes = reference(name, counts, total, medians, most)
        n = len(genes) + cls
        assert batch["input_ids"][i, :n].tolist() == [3] * cls + [4 + gene for gene in genes]
        values = [0.0] * cls + np.log1p(counts[genes] / total * 1e4).tolist()
        np.testing.assert_allclose(batch["values"][i, :n], values, rtol=2e-6)
        assert not any(tensor[i, n:].any() for tensor in batch.values())
    given = tokenizer(sparse.csr_matrix(dense), totals=totals)
    assert all(batch[key].equal(given[key]) for key in batch)


def test_errors(tiny_vocab):
    with raises(OptionError, "use_medians"):
        get_tokenizer("rank_value", GeneVocab.from_genes(["a"]))
    for options in ({"max_len": 1}, {"max_len": 0, "append_cls": False}):
        with raises(OptionError, "max_len"):
            get_tokenizer("rank_value", tiny_vocab, **options)
    with raises(OptionError, "max_length"):
        get_tokenizer("rank_value", tiny_vocab, max_length=5)
    with raises(OptionError, "tokenizer"):
        get_tokenizer("rank_values", tiny_vocab)
    with raises(DataError, "cells"):
        get_tokenizer("rank_value", tiny_vocab)(sparse.csr_matrix(np.ones((2, 5))))
