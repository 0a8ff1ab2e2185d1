import anndata as ad
import numpy as np
import pytest
import torch

from scforge.data import GeneVocab, open_cells
from scforge.insilico.imputation import predict_counted, predict_uncounted
from scforge.models.protocol import ModelOutput
from scforge.tokenizers import get_tokenizer
from scforge.training.objectives.base import get_objective

OBJECTIVE = get_objective("masked_value_prediction", mask_ratio=0.5)


class Spy(torch.nn.Module):
    """Predicts of a hidden gene its number, and keeps what it was shown."""

    def __init__(self, n_special: int = 4) -> None:
        super().__init__()
        self.n_special = n_special
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.shown: list[dict[str, torch.Tensor]] = []

    def forward(self, **batch) -> ModelOutput:
        self.shown.append(batch)
        return ModelOutput(
            logits=torch.where(batch["masked_positions"], batch["input_ids"] - float(self.n_special), torch.nan)
        )


@pytest.mark.parametrize("name", ["rank_value", "continuous_projection", "binned_expression"])
@pytest.mark.parametrize("append_eos", [False, True])
def test_no_value_is_predicted_from_itself(name: str, append_eos: bool, tiny_adata, tiny_vocab: GeneVocab):
    vocab = tiny_vocab.with_special_tokens("<eos>")
    tokenizer, cells = get_tokenizer(name, vocab, append_eos=append_eos), open_cells(tiny_adata, vocab)
    spy = Spy(vocab.n_special)
    values = predict_counted(spy, cells, tokenizer, OBJECTIVE, n_folds=3, batch_size=60)
    counts, whole = tiny_adata.X.toarray(), tokenizer(cells.block(np.arange(60)))
    np.testing.assert_array_equal(values.toarray(), np.where(counts > 0, np.arange(80), 0))
    assert len(spy.shown) == 3
    for batch in spy.shown:
        hidden = batch["masked_positions"]
        assert hidden.any(dim=1).any()
        assert not any(batch[key][hidden].any() for key in set(batch) & {"values", "bin_ids"})
        for row in range(60):
            mask = batch["attention_mask"][row]
            ids, asked = batch["input_ids"][row][mask].tolist(), hidden[row][mask].tolist()
            # No gene is both visible and hidden, and hidden ones stand last, before the end.
            assert sorted(ids) == sorted(whole["input_ids"][row][whole["attention_mask"][row] != 0].tolist())
            n_hidden = sum(asked)
            assert asked == [False] * (len(ids) - n_hidden - append_eos) + [True] * n_hidden + [False] * append_eos
            assert not append_eos or ids[-1] == vocab.eos_id
            visible = [i for i, one in zip(ids, asked, strict=True) if not one]
            assert visible == [i for i in whole["input_ids"][row].tolist() if i in set(visible)]


@pytest.mark.parametrize("options", [{}, {"include_zero_genes": True}])
def test_bins_of_visible_genes_tell_nothing_of_hidden_ones(options: dict, tiny_adata, tiny_vocab: GeneVocab):
    tokenizer = get_tokenizer("binned_expression", tiny_vocab, n_bins=8, **options)
    first = np.random.default_rng(0).permutation(80) % 3 == 0  # the genes that are hidden first
    shown = []
    for factor in (1, 50):
        counts = tiny_adata.X.toarray() * np.where(first, factor, 1)
        adata = ad.AnnData(counts.astype(np.float32), obs=tiny_adata.obs, var=tiny_adata.var)
        predict_counted(spy := Spy(), open_cells(adata, tiny_vocab), tokenizer, OBJECTIVE, n_folds=3)
        shown.append(spy.shown[0])
    for name in ("input_ids", "bin_ids", "values", "masked_positions"):
        assert torch.equal(shown[0][name], shown[1][name])


@pytest.mark.parametrize("options", [{}, {"max_len": 20}, {"include_zero_genes": True}])
def test_uncounted_genes_are_asked_about(options: dict, tiny_adata: ad.AnnData, tiny_vocab: GeneVocab):
    tokenizer = get_tokenizer("continuous_projection", tiny_vocab, **options)
    cells, genes = open_cells(tiny_adata, tiny_vocab), np.arange(1, 80)
    spy = Spy()
    values = predict_uncounted(spy, cells, tokenizer, OBJECTIVE, genes, batch_size=16)
    tokens = tokenizer(cells.block(np.arange(60)))
    known = np.zeros((60, 84))
    known[np.arange(60)[:, None], tokens["input_ids"].numpy()] = tokens["values"].numpy()
    known = known[:, 4:][:, genes]
    np.testing.assert_allclose(values, np.where(known > 0, known, genes), rtol=1e-6)
    assert len(spy.shown) > len(range(0, 60, 16))  # not all at once
    again = predict_uncounted(Spy(), cells, tokenizer, OBJECTIVE, genes, batch_size=60, seed=3)
    np.testing.assert_allclose(again, values)
