import anndata as ad
import numpy as np
import pytest
import torch
from scipy import sparse

from scforge.config.schema import ModelConfig
from scforge.data import GeneVocab, open_cells
from scforge.errors import OptionError, ScforgeWarning
from scforge.insilico.attention import attention_between_genes
from scforge.insilico.gene_embeddings import contextual_gene_embeddings, input_gene_embeddings
from scforge.models import get_model
from scforge.models.components.gene_vectors import fill_gene_vectors
from scforge.tokenizers import get_tokenizer

ARCHITECTURES = ["transformer_encoder", "masked_autoencoder", "autoregressive_transformer", "gene_pooling"]


def make(architecture: str, vocab: GeneVocab, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    options = {"hidden_dim": 8, "num_layers": 2, "num_heads": 2, "max_seq_len": 128, **options}
    module = get_model(architecture, ModelConfig(architecture=architecture, vocab_size=len(vocab), **options)).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # else all tokens are looked at alike
    return module


def test_input_embeddings(tiny_vocab: GeneVocab):
    tokenizer = get_tokenizer("continuous_projection", tiny_vocab)
    for architecture in ARCHITECTURES:  # what a token becomes
        module = make(architecture, tiny_vocab)
        weight = getattr(module, "body", module).embedding.gene_embedding.weight
        np.testing.assert_array_equal(input_gene_embeddings(module, tokenizer), weight.detach().numpy()[4:])
    bag = make("gene_pooling", tiny_vocab, pooling="weighted_sum")
    np.testing.assert_array_equal(input_gene_embeddings(bag, tokenizer), bag.body.bag.weight.detach().numpy()[4:])
    table = torch.randn(84, 3)
    table[:4] = torch.nan
    for pooling in ("weighted_sum", "mean"):
        module = make("gene_pooling", tiny_vocab, pooling=pooling, gene_vectors={"dim": 3, "learned": 4})
        fill_gene_vectors(module, table)
        vectors = input_gene_embeddings(module, tokenizer)
        assert vectors.shape == (80, 8)
        assert len(np.unique(vectors, axis=0)) == 80


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_contextual_embedding_is_a_mean_over_cells(architecture: str, tiny_adata: ad.AnnData, tiny_vocab: GeneVocab):
    tiny_adata.X = sparse.csr_matrix(tiny_adata.X.toarray() * (np.arange(80) != 7)).astype(np.float32)
    module = make(architecture, tiny_vocab)
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


@pytest.mark.parametrize("architecture", ["transformer_encoder", "masked_autoencoder", "autoregressive_transformer"])
@pytest.mark.parametrize("heads", ["max", 1])
def test_graph_is_a_mean_over_cells(architecture: str, heads: str | int, tiny_adata: ad.AnnData, tiny_vocab: GeneVocab):
    module, tokenizer = make(architecture, tiny_vocab), get_tokenizer("rank_value", tiny_vocab)
    cells = open_cells(tiny_adata, tiny_vocab)
    graph = attention_between_genes(module, cells, tokenizer, heads=heads, top_k=200, min_cells=2, batch_size=7)
    sums, numbers = np.zeros((80, 80)), np.zeros((80, 80))
    for row in range(60):
        batch = tokenizer(cells.block(np.array([row])))
        with torch.inference_mode():
            weights = module(**batch, output_attentions=True).attentions[-1][0].numpy()
        weights = weights.max(0) if heads == "max" else weights[1]
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
    with pytest.warns(ScforgeWarning, match="the 30 most widely expressed of 80 genes"):
        some = attention_between_genes(module, cells, tokenizer, max_genes=30, top_k=80)
    assert (np.diff(some.indptr) > 0).sum() == 30


def test_refused(tiny_adata: ad.AnnData, tiny_vocab: GeneVocab):
    tokenizer, cells = get_tokenizer("rank_value", tiny_vocab), open_cells(tiny_adata, tiny_vocab)
    bag, pooling = make("gene_pooling", tiny_vocab, pooling="weighted_sum"), make("gene_pooling", tiny_vocab)
    transformer, linear = make("transformer_encoder", tiny_vocab), torch.nn.Linear(2, 2)
    for call, module, options, message in [
        (contextual_gene_embeddings, bag, {}, "the same embedding for all tokens of a cell"),
        (contextual_gene_embeddings, pooling, {"layer": 4}, "layer=4 is out of range for .* layers"),
        (contextual_gene_embeddings, linear, {}, "Linear does not return token embeddings.*'transformer_encoder'"),
        (
            attention_between_genes,
            pooling,
            {},
            "GenePoolingModel does not return attention weights.*'masked_autoencoder'",
        ),
        (attention_between_genes, transformer, {"layer": 2}, "layer=2 is out of range for 2 layers"),
        (attention_between_genes, transformer, {"heads": "first"}, "heads='first' must be 'mean'"),
    ]:
        with pytest.raises(OptionError, match=message):
            call(module, cells, tokenizer, **options)
    with pytest.raises(OptionError, match="Linear has no GeneExpressionEmbedding with 84 tokens"):
        input_gene_embeddings(linear, tokenizer)
