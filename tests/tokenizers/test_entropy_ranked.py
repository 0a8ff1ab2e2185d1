import numpy as np
import pytest
import torch

from scforge.data import GeneVocab, open_cells
from scforge.data.statistics import measure_entropies
from scforge.errors import OptionError
from scforge.models import Encoder
from scforge.testing import raises
from scforge.tokenizers import get_tokenizer
from scforge.tokenizers.entropy_ranked import serialization_weights
from scforge.training import CellDataModule


@pytest.fixture
def vocab(tiny_adata):
    return measure_entropies(tiny_adata, GeneVocab.from_adata(tiny_adata))


def ranked(dense, totals, weights, most):
    """Rank the genes of each cell with NumPy: float32 products, equal ones in the order of the genes."""
    lists = []
    for row, total in zip(dense, totals, strict=True):
        values = np.log1p(row * (1e4 / total)).astype(np.float32)
        order = np.argsort(-(values * weights), kind="stable")
        lists.append([gene for gene in order if row[gene] > 0][:most])
    return lists


@pytest.mark.parametrize("weighting", ["complement", "inverse"])
@pytest.mark.parametrize("most", [None, 7])
def test_equals_numpy(tiny_adata, vocab, weighting, most):
    cells = open_cells(tiny_adata, vocab)
    tokenizer = get_tokenizer("entropy_ranked", vocab, weighting=weighting, max_len=most)
    batch = tokenizer(cells.block(np.arange(60)))
    weights = serialization_weights(vocab, weighting)
    expected = ranked(cells.counts.toarray(), cells.totals, weights, most)
    for ids, mask, genes in zip(batch["input_ids"], batch["attention_mask"], expected, strict=True):
        assert (ids[mask] - vocab.n_special).tolist() == genes
    dense = np.log1p(cells.counts.toarray() * (1e4 / cells.totals[:, None]))
    seen = batch["values"][batch["attention_mask"]].numpy()
    np.testing.assert_allclose(seen, [dense[c, g] for c, genes in enumerate(expected) for g in genes], rtol=1e-6)


def test_weights_and_defaults():
    vocab = GeneVocab.from_genes(["A", "B", "C"]).with_entropies(np.array([0.0, 0.25, 1.0]))
    assert serialization_weights(vocab).tolist() == [1.0, 0.75, 0.0]
    np.testing.assert_allclose(serialization_weights(vocab, "inverse"), [100, 4, 1])
    with raises(OptionError, "weighting"):
        get_tokenizer("entropy_ranked", vocab, weighting="entropy")
    with pytest.raises(OptionError, match="the vocabulary has no entropies"):
        get_tokenizer("entropy_ranked", GeneVocab.from_genes(["A"]))
    default = {"max_len": None, "append_cls": False, "append_eos": False, "weighting": "complement"}
    assert get_tokenizer("entropy_ranked", vocab).config() == default
    vocab = GeneVocab.from_genes(["A", "B", "C", "D"]).with_entropies(np.array([1.0, 0.5, 1.0, 0.5]))
    tokens = get_tokenizer("entropy_ranked", vocab)(np.array([[9, 2, 1, 2]]))["input_ids"]
    assert tokens.tolist() == [[5, 7, 4, 6]]  # weight 0: A before C


def test_a_model_measures_entropies_once(tiny_adata, tmp_path):
    Encoder.setup_anndata(tiny_adata)
    options = {"tokenizer": "entropy_ranked", "hidden_dim": 8, "n_top_genes": 40}
    model = Encoder(tiny_adata, "gene_pooling", **options)
    expected = measure_entropies(tiny_adata, model.vocab)
    np.testing.assert_allclose(model.vocab.entropies, expected.entropies, rtol=1e-12)
    before = model.tokenizer(open_cells(tiny_adata, model.vocab).block(np.arange(20)))
    model.save(tmp_path / "model")
    other = tiny_adata[:20].copy()  # other cells, from which nothing is measured
    again = Encoder.load(tmp_path / "model")
    np.testing.assert_array_equal(again.vocab.entropies, model.vocab.entropies)
    after = again.tokenizer(open_cells(other, again.vocab).block(np.arange(20)))
    assert all(torch.equal(after[key], before[key]) for key in before)
    known = GeneVocab.from_adata(tiny_adata).with_entropies(np.linspace(0, 1, 80))
    kept = Encoder(tiny_adata, "gene_pooling", tokenizer="entropy_ranked", vocab=known, hidden_dim=8)
    np.testing.assert_array_equal(kept.vocab.entropies, known.entropies)


def test_a_model_of_a_data_module_measures_training_cells(tiny_adata):
    cells = open_cells(tiny_adata, GeneVocab.from_adata(tiny_adata))
    rows = np.arange(60)
    data = CellDataModule(cells, train_rows=rows[:40], validation_rows=rows[40:])
    model = Encoder(architecture="gene_pooling", tokenizer="entropy_ranked", datamodule=data, hidden_dim=8)
    expected = measure_entropies(tiny_adata[:40].copy(), model.vocab)
    np.testing.assert_allclose(model.vocab.entropies, expected.entropies, rtol=1e-12)
    assert not np.allclose(model.vocab.entropies, measure_entropies(tiny_adata, model.vocab).entropies)
