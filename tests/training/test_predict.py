import numpy as np
import pytest
import torch

from scforge.data import open_cells
from scforge.data.cells import CellSource
from scforge.data.store import StoreCells
from scforge.errors import DataError, OptionError, TrainingError
from scforge.models import AutoregressiveTransformer, GenePoolingModel
from scforge.testing import raises
from scforge.tokenizers import get_tokenizer
from scforge.training import NextGenePrediction
from scforge.training.predict import embed


def test_rows_are_in_the_order_of_the_source(setup):
    result = embed(setup.module, setup.cells, setup.tokenizer, batch_size=7)
    assert result.shape == (60, 4)
    assert result.dtype == np.float32
    setup.module.eval()
    with torch.no_grad():
        alone = [setup.module.encode(**setup.tokenizer(setup.cells.block(np.array([i]))))[0].numpy() for i in range(60)]
    np.testing.assert_allclose(result, alone, atol=1e-5)
    rows = np.array([41, 3, 3, 59])
    np.testing.assert_allclose(embed(setup.module, setup.cells, setup.tokenizer, rows=rows), result[rows], atol=1e-5)
    with raises(OptionError, "rows"):
        embed(setup.module, setup.cells, setup.tokenizer, rows=[])


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_module_is_left_alone(setup, training, monkeypatch):
    setup.module.train(training)
    setup.module.head.eval()  # e.g. a part that is frozen
    modes = [part.training for part in setup.module.modules()]
    weights = {name: value.clone() for name, value in setup.module.state_dict().items()}
    one, two = (embed(setup.module, setup.cells, setup.tokenizer) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    # An error does not change it either.
    monkeypatch.setattr(setup.module, "encode", lambda input_ids, **batch: input_ids.unsqueeze(-1).float())
    message = r"GenePoolingModel returned an embedding of shape \(60, \d+, 1\) for 60 cells"
    with pytest.raises(TrainingError, match=message):
        embed(setup.module, setup.cells, setup.tokenizer)
    assert [part.training for part in setup.module.modules()] == modes
    assert all(parameter.grad is None for parameter in setup.module.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in setup.module.state_dict().items())


def test_cells_without_genes_are_embedded(setup):
    counts = setup.cells.counts.copy()
    counts.data[counts.indptr[5] : counts.indptr[6]] = 0
    counts.eliminate_zeros()
    result = embed(setup.module, CellSource(counts, setup.cells.totals), setup.tokenizer)
    assert np.isfinite(result).all()
    whole = embed(setup.module, setup.cells, setup.tokenizer)
    np.testing.assert_allclose(np.delete(result, 5, axis=0), np.delete(whole, 5, axis=0), atol=1e-5)


@pytest.mark.parametrize("tokenizer", ["rank_value", "continuous_projection"])
def test_cells_of_a_store_are_embedded_as_those_in_memory(store, many_adata, tokenizer, monkeypatch):
    cells = StoreCells.open(store)
    made = get_tokenizer(tokenizer, cells.vocab)
    module = GenePoolingModel(len(cells.vocab), 8, 1, ffn_dim=8)
    memory = embed(module, open_cells(many_adata, cells.vocab), made, batch_size=64)
    stored = embed(module, cells, made, batch_size=50)
    place = many_adata.obs_names.get_indexer(cells.names())
    np.testing.assert_allclose(stored, memory[place], atol=1e-5)
    assert np.abs(memory - memory[0]).max() > 1e-3
    rows = np.array([699, 3, 466, 3, 0])
    np.testing.assert_allclose(embed(module, cells, made, rows=rows), memory[place[rows]], atol=1e-5)

    def stream(self, windows):
        raise DataError("damaged")
        yield

    monkeypatch.setattr(StoreCells, "stream", stream)
    with pytest.raises(DataError, match="damaged"):
        embed(module, cells, made)


@pytest.mark.parametrize("order", ["rank", "random"])
def test_cells_are_embedded_in_the_order_of_the_objective(setup, tiny_vocab, order):
    tokenizer = get_tokenizer("binned_expression", tiny_vocab, side="one")
    objective = NextGenePrediction(order=order)
    torch.manual_seed(0)
    module = AutoregressiveTransformer(len(tiny_vocab), tokenizer.n_bins, 16, 1, 2, dropout=0.0).eval()
    rows = np.array([41, 3, 59])
    result = embed(module, setup.cells, tokenizer, objective=objective, rows=rows)
    block = setup.cells.block(rows)
    arranged = objective.arrange(tokenizer(block), tokenizer, np.zeros(3, dtype=np.int64), epoch=0, seed=0)
    with torch.no_grad():
        np.testing.assert_allclose(result, module.encode(**arranged).numpy(), atol=1e-5)
        assert np.abs(result - module.encode(**tokenizer(block)).numpy()).max() > 1e-3
    whole = embed(module, setup.cells, tokenizer, objective=objective)
    np.testing.assert_allclose(result, whole[rows], atol=1e-5)


def test_values_that_are_not_finite(setup):
    with torch.no_grad():
        next(setup.module.parameters()).fill_(3e38)
    with pytest.raises(TrainingError, match=r"computed NaN or infinite values for 60 of 60 cells \(first: cell 0\)"):
        embed(setup.module, setup.cells, setup.tokenizer)

    def encode(input_ids, **batch):
        values = torch.zeros(len(input_ids), 2)
        values[batch["values"].sum(dim=1).argmax(), 1] = torch.inf
        return values

    setup.module.encode = encode
    with pytest.raises(TrainingError, match=r"for 1 of \d+ cells \(first: cell \d+\); check its weights, and the coun"):
        embed(setup.module, setup.cells, setup.tokenizer, batch_size=20)
