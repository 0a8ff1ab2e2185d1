"""Attention between genes."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import torch

from scforge.config.schema import ModelConfig
from scforge.data import GeneVocab, open_cells
from scforge.errors import OptionError, ScforgeWarning
from scforge.insilico import attention_between_genes
from scforge.models import get_model
from scforge.tokenizers import get_tokenizer


def make(architecture: str, vocab: GeneVocab) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_dim": 8, "num_layers": 2, "num_heads": 2, "max_seq_len": 128}
    module = get_model(architecture, ModelConfig(architecture=architecture, vocab_size=len(vocab), **sizes)).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # else all tokens are looked at alike
    return module


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["transformer_encoder", "masked_autoencoder", "autoregressive_transformer"])
@pytest.mark.parametrize("heads", ["mean", "max", 1])
def test_graph_is_a_mean_over_cells(architecture: str, heads: str | int, tiny_adata: ad.AnnData, tiny_vocab: GeneVocab):
    module, tokenizer = make(architecture, tiny_vocab), get_tokenizer("rank_value", tiny_vocab)
    cells = open_cells(tiny_adata, tiny_vocab)
    graph = attention_between_genes(module, cells, tokenizer, heads=heads, top_k=200, min_cells=2, batch_size=7)
    sums, numbers = np.zeros((80, 80)), np.zeros((80, 80))
    for row in range(60):
        batch = tokenizer(cells.block(np.array([row])))
        with torch.inference_mode():
            weights = module(**batch, output_attentions=True).attentions[-1][0].numpy()
        weights = {"mean": weights.mean(0), "max": weights.max(0), 1: weights[1]}[heads]
        genes = batch["input_ids"][0, 1:].numpy() - 4
        sums[np.ix_(genes, genes)] += weights[1:, 1:]
        numbers[np.ix_(genes, genes)] += 1
    expected = np.where(numbers >= 2, sums / np.maximum(numbers, 1), 0)
    np.fill_diagonal(expected, 0)
    np.testing.assert_allclose(graph.toarray(), expected, atol=1e-5)


def test_strongest_are_kept(tiny_adata: ad.AnnData, tiny_vocab: GeneVocab):
    module, tokenizer = make("transformer_encoder", tiny_vocab), get_tokenizer("rank_value", tiny_vocab)
    cells = open_cells(tiny_adata, tiny_vocab)
    whole = attention_between_genes(module, cells, tokenizer, top_k=80, layer=0).toarray()
    few = attention_between_genes(module, cells, tokenizer, top_k=5, layer=0)
    assert np.diff(few.indptr).max() == 5
    np.testing.assert_allclose(np.sort(few.toarray(), axis=1)[:, -5:], np.sort(whole, axis=1)[:, -5:], atol=1e-6)
    with pytest.warns(ScforgeWarning, match="80 genes are expressed, of which the 30 most widely"):
        some = attention_between_genes(module, cells, tokenizer, max_genes=30, top_k=80)
    assert (np.diff(some.indptr) > 0).sum() == 30


def test_refused(tiny_adata: ad.AnnData, tiny_vocab: GeneVocab):
    tokenizer, cells = get_tokenizer("rank_value", tiny_vocab), open_cells(tiny_adata, tiny_vocab)
    module = make("transformer_encoder", tiny_vocab)
    with pytest.raises(OptionError, match="GenePoolingModel has no attention.*'masked_autoencoder'"):
        attention_between_genes(make("gene_pooling", tiny_vocab), cells, tokenizer)
    with pytest.raises(OptionError, match="layer=2 is none of the 2 layers"):
        attention_between_genes(module, cells, tokenizer, layer=2)
    with pytest.raises(OptionError, match="heads='first' is neither"):
        attention_between_genes(module, cells, tokenizer, heads="first")
