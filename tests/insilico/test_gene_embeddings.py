"""Vectors of genes."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import torch
from scipy import sparse

from scforge.config.schema import ModelConfig
from scforge.data import GeneVocab, open_cells
from scforge.errors import OptionError
from scforge.insilico import contextual_gene_embeddings, input_gene_embeddings
from scforge.models import get_model
from scforge.models.components import fill_gene_vectors
from scforge.tokenizers import get_tokenizer

ARCHITECTURES = ["transformer_encoder", "masked_autoencoder", "autoregressive_transformer", "gene_pooling"]


def make(architecture: str, vocab: GeneVocab, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "max_seq_len": 128}
    return get_model(architecture, ModelConfig(architecture=architecture, vocab_size=len(vocab), **sizes, **options))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_input_embedding_is_what_a_token_becomes(architecture: str, tiny_vocab: GeneVocab):
    module = make(architecture, tiny_vocab)
    tokenizer = get_tokenizer("continuous_projection", tiny_vocab)
    vectors = input_gene_embeddings(module, tokenizer)
    body = getattr(module, "body", module)
    assert vectors.shape == (80, 8)
    np.testing.assert_array_equal(vectors, body.embedding.gene_embedding.weight.detach().numpy()[4:])


def test_input_embedding_of_bags_and_gene_vectors(tiny_vocab: GeneVocab):
    bag = make("gene_pooling", tiny_vocab, pooling="weighted_sum")
    tokenizer = get_tokenizer("continuous_projection", tiny_vocab)
    np.testing.assert_array_equal(input_gene_embeddings(bag, tokenizer), bag.body.bag.weight.detach().numpy()[4:])
    table = torch.randn(84, 3)
    table[:4] = torch.nan
    for pooling, width in (("weighted_sum", 8), ("mean", 8)):
        module = make("gene_pooling", tiny_vocab, pooling=pooling, gene_vectors={"dim": 3, "learned": 4})
        fill_gene_vectors(module, table)
        vectors = input_gene_embeddings(module, tokenizer)
        assert vectors.shape == (80, width)
        assert len(np.unique(vectors, axis=0)) == 80
    with pytest.raises(OptionError, match="Linear has no embedding of 84 tokens"):
        input_gene_embeddings(torch.nn.Linear(2, 2), tokenizer)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_contextual_embedding_is_a_mean_over_cells(architecture: str, tiny_adata: ad.AnnData, tiny_vocab: GeneVocab):
    tiny_adata.X = sparse.csr_matrix(tiny_adata.X.toarray() * (np.arange(80) != 7)).astype(np.float32)
    module = make(architecture, tiny_vocab).eval()
    tokenizer, cells = get_tokenizer("continuous_projection", tiny_vocab), open_cells(tiny_adata, tiny_vocab)
    means, n_cells = contextual_gene_embeddings(module, cells, tokenizer, batch_size=7)
    np.testing.assert_array_equal(n_cells, (tiny_adata.X.toarray() > 0).sum(axis=0))
    assert np.isnan(means[7]).all()
    batch = tokenizer(cells.block(np.arange(60)))
    with torch.inference_mode():
        states = module(**batch, output_hidden_states=True).hidden_states[-1]
    for gene in (0, 33):
        expected = states[batch["input_ids"] == gene + 4].mean(dim=0)
        np.testing.assert_allclose(means[gene], expected, atol=1e-5)


def test_what_has_no_states_of_tokens(tiny_adata: ad.AnnData, tiny_vocab: GeneVocab):
    tokenizer, cells = get_tokenizer("continuous_projection", tiny_vocab), open_cells(tiny_adata, tiny_vocab)
    bag = make("gene_pooling", tiny_vocab, pooling="weighted_sum")
    with pytest.raises(OptionError, match="one state for all tokens of a cell"):
        contextual_gene_embeddings(bag, cells, tokenizer)
    with pytest.raises(OptionError, match="layer=3 is none of the 1 layers"):
        contextual_gene_embeddings(make("gene_pooling", tiny_vocab), cells, tokenizer, layer=3)
    with pytest.raises(OptionError, match="Linear returns no states of tokens.*'transformer_encoder'"):
        contextual_gene_embeddings(torch.nn.Linear(2, 2), cells, tokenizer)
