"""Expression of hidden genes."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import torch

from scforge.data import GeneVocab, open_cells
from scforge.errors import OptionError
from scforge.insilico import predict_counted, predict_uncounted
from scforge.insilico.imputation import check_predicts, hide_genes
from scforge.models.protocol import ModelOutput
from scforge.tokenizers import get_tokenizer
from scforge.training.objectives.registry import get_objective

OBJECTIVE = get_objective("masked_value_prediction", mask_ratio=0.5)


class Spy(torch.nn.Module):
    """Predicts of a hidden gene its number, and keeps what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.shown: list[dict[str, torch.Tensor]] = []

    def forward(self, **batch) -> ModelOutput:
        self.shown.append(batch)
        return ModelOutput(logits=torch.where(batch["masked_positions"], batch["input_ids"] - 4.0, torch.nan))


@pytest.mark.parametrize("name", ["rank_value", "continuous_projection", "binned_expression"])
@pytest.mark.parametrize("append_eos", [False, True])
def test_hidden_genes_stand_last_and_show_nothing(name: str, append_eos: bool, tiny_adata, tiny_vocab: GeneVocab):
    vocab = tiny_vocab.with_special_tokens("<eos>")
    tokenizer = get_tokenizer(name, vocab, append_eos=append_eos)
    tokens = dict(tokenizer(open_cells(tiny_adata, vocab).block(np.arange(8))))
    hidden = torch.rand(8, 80, generator=torch.Generator().manual_seed(0)) < 0.3
    hidden[0] = False
    batch, genes = hide_genes(tokens, hidden, tokenizer)
    for row in range(8):
        n_tokens = int(batch["attention_mask"][row].sum())
        assert batch["attention_mask"][row, :n_tokens].all()
        assert not batch["input_ids"][row, n_tokens:].any()
        asked = genes[row][genes[row] >= 0]
        assert sorted(asked.tolist()) == torch.nonzero(hidden[row]).flatten().tolist()
        masked = batch["masked_positions"][row]
        for key in set(batch) & {"values", "bin_ids"}:
            assert not batch[key][row][masked].any()
        before = tokens["input_ids"][row][tokens["attention_mask"][row] != 0]
        stays = (before < vocab.n_special) | ~hidden[row][(before - vocab.n_special).clamp(min=0)]
        assert batch["input_ids"][row][~masked & (batch["attention_mask"][row])].tolist() == before[stays].tolist()
        if append_eos:
            assert batch["input_ids"][row, n_tokens - 1] == vocab.eos_id
        if len(asked):
            last = torch.nonzero(masked).max()
            assert last == n_tokens - 1 - append_eos


def test_no_value_is_predicted_from_itself(tiny_adata: ad.AnnData, tiny_vocab: GeneVocab):
    tokenizer, cells = get_tokenizer("continuous_projection", tiny_vocab), open_cells(tiny_adata, tiny_vocab)
    spy = Spy()
    values = predict_counted(spy, cells, tokenizer, OBJECTIVE, n_folds=3, batch_size=60)
    counts = tiny_adata.X.toarray()
    np.testing.assert_array_equal(values.toarray(), np.where(counts > 0, np.arange(80), 0))
    assert len(spy.shown) == 3
    for batch in spy.shown:
        for row in range(60):
            ids = batch["input_ids"][row][batch["attention_mask"][row]].tolist()
            assert len(ids) == len(set(ids))  # no gene is both visible and hidden
            assert sorted(ids)[1:] == (np.flatnonzero(counts[row]) + 4).tolist()


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


def test_refused():
    with pytest.raises(OptionError, match="MaskedGenePrediction predicts no expression.*masked_value_prediction"):
        check_predicts(get_objective("masked_gene_prediction"))
