"""scFoundation's and TranscriptFormer's presentation of a cell, against references of their definition."""

import numpy as np
import pytest
from scipy import sparse

from scforge.data import GeneVocab
from scforge.errors import OptionError
from scforge.models import Encoder
from scforge.testing import raises
from scforge.tokenizers import ContinuousProjectionTokenizer

rng = np.random.default_rng(0)
COUNTS = rng.poisson(rng.lognormal(0, 1.5, 60), (30, 60)) * (rng.random((30, 60)) < 0.4)
COUNTS[4] = 0
GENES = [f"g{i}" for i in range(60)]
PANEL = [*GENES[10:50], "absent1", "absent2"]
"""Genes of the vocabulary: some of the data, and two that the data do not have."""


def scfoundation(counts, target, *, zeros):
    """Return gene names and values of one cell: its code zero-fills the panel, and appends T and S."""
    panel = np.array([counts[GENES.index(gene)] if gene in GENES else 0 for gene in PANEL])
    total = panel.sum()
    values = np.log1p(panel / max(total, 1) * 1e4)
    source = np.log10(max(total, 1))
    number = float(target[1:])
    wanted = {"t": number, "a": source + number, "f": np.log10(max(total, 1) * number)}[target[0]]
    kept = np.arange(len(PANEL)) if zeros else np.flatnonzero(panel)
    return [*np.array(PANEL)[kept], "<target_depth>", "<source_depth>"], [*values[kept], wanted, source]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("target", ["t4", "f2.5", "a0.5"])
def test_scfoundation(target, zeros):
    tokenizer = ContinuousProjectionTokenizer.scfoundation(
        GeneVocab.from_genes(PANEL), target_depth=target, include_zero_genes=zeros
    )
    batch = tokenizer(sparse.csr_matrix(COUNTS), GENES)
    for row, counts in enumerate(COUNTS):
        names, values = scfoundation(counts, target, zeros=zeros)
        n_tokens = int(batch["attention_mask"][row].sum())
        assert tokenizer.vocab.decode(batch["input_ids"][row, :n_tokens]) == names
        np.testing.assert_allclose(batch["values"][row, :n_tokens].numpy(), values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["4", "t", "fnan", "f0", "f-1", 4])
def test_bad_depths(target):
    with raises(OptionError, "target_depth"):
        ContinuousProjectionTokenizer.scfoundation(GeneVocab.from_genes(PANEL), target_depth=target)


def test_transcriptformer():
    vocab = GeneVocab.from_genes(PANEL)
    tokenizer = ContinuousProjectionTokenizer.transcriptformer(vocab)
    batch = tokenizer(sparse.csr_matrix(COUNTS), GENES)
    orders = set()
    for row, counts in enumerate(COUNTS):
        n_tokens = int(batch["attention_mask"][row].sum())
        names = vocab.decode(batch["input_ids"][row, 1:n_tokens])
        expected = {gene: min(counts[GENES.index(gene)], 30) for gene in PANEL[:-2] if counts[GENES.index(gene)]}
        assert dict(zip(names, batch["values"][row, 1:n_tokens].tolist(), strict=True)) == expected
        bias = np.log([expected[gene] for gene in names])
        np.testing.assert_allclose(batch["attention_bias"][row, 1:n_tokens].numpy(), bias, rtol=1e-6)
        orders.add(tuple(np.argsort([PANEL.index(gene) for gene in names])))
    assert batch["attention_bias"][:, 0].eq(0).all()
    assert len(orders) > 25


@pytest.fixture
def cells(pbmc):
    adata = pbmc[:60].copy()
    Encoder.setup_anndata(adata)
    return adata


@pytest.mark.parametrize("name", ["binned_expression", "continuous_projection"])
def test_a_list_of_all_genes_does_not_go_with_masked_genes(cells, name):
    tokenizer = {"name": name, "include_zero_genes": True}
    with raises(OptionError, "include_zero_genes"):
        Encoder(cells, "gene_pooling", tokenizer, "masked_gene_prediction")
    Encoder(cells, "gene_pooling", tokenizer, "joint_embedding", n_top_genes=50)
