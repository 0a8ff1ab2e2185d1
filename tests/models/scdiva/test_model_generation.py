"""Cells that ScDiVa draws by unmasking."""

import pytest
import torch

from scforge.errors import OptionError
from scforge.models import ScDiVaModel
from scforge.models.protocol import GeneratedCells
from scforge.testing import raises

VOCAB = 64
OPTIONS = [{}, {"position_embedding": "rotary"}, {"mode": "vector"}]


def made(**options) -> ScDiVaModel:
    torch.manual_seed(0)
    sizes = {"hidden_dim": 16, "num_layers": 2, "num_heads": 4, "latent_dim": 6, "max_tokens": 40}
    model = ScDiVaModel(VOCAB, **{**sizes, "denoising": True, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def assert_cells(cells: GeneratedCells, lengths: list[int]) -> None:
    """Each cell has its length, and each gene once."""
    assert cells.attention_mask.sum(dim=1).tolist() == lengths
    for ids, mask in zip(cells.input_ids, cells.attention_mask, strict=True):
        genes = ids[mask].tolist()
        assert len(set(genes)) == len(genes)
        assert min(genes) >= 4
    assert not cells.input_ids[~cells.attention_mask].any()
    assert not cells.values[~cells.attention_mask].any()
    assert float(cells.values.min()) >= 0.0
    assert not cells.bin_ids.any()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_cells_have_their_lengths_and_each_gene_once(options):
    model, lengths = made(**options).train(), torch.tensor([30, 5, 40, 1, 17])
    cells = model.generate(5, n_tokens=lengths, seed=3)
    assert_cells(cells, lengths.tolist())
    assert float(cells.values.max()) > 0.0
    assert model.training
    # A cell depends on its number alone.
    torch.manual_seed(7)
    again = model.generate(2, n_tokens=lengths[1:3], seed=3, first_cell=1)
    assert torch.equal(again.input_ids, cells.input_ids[1:3])
    torch.testing.assert_close(again.values, cells.values[1:3], atol=1e-5, rtol=1e-5)
    assert not torch.equal(model.generate(5, n_tokens=lengths, seed=4).input_ids, cells.input_ids)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_all_genes_and_a_first_token(options):
    model = made(**{**options, "max_tokens": 80})
    assert_cells(model.generate(2, n_tokens=60, n_steps=2), [60, 60])
    first = model.generate(1, n_tokens=61, n_steps=2, first_id=3).input_ids[0]
    assert sorted(first.tolist()) == list(range(3, 64))
    for n_tokens, first_id in ((61, None), (62, 3)):
        with raises(OptionError, "n_tokens"):
            model.generate(1, n_tokens=n_tokens, first_id=first_id)
    cells = model.generate(2, {"input_ids": torch.tensor([10])}, n_tokens=6, first_id=3)
    assert cells.input_ids[:, :2].tolist() == [[3, 10], [3, 10]]
    assert not cells.values[:, 0].any()
    assert cells.attention_mask.sum(dim=1).tolist() == [6, 6]
    again = model.generate(2, {"input_ids": torch.tensor([3, 10])}, n_tokens=6, first_id=3)
    assert torch.equal(again.input_ids, cells.input_ids)


def test_a_prompt_stays_as_it_is():
    model = made()
    prompt = {
        "input_ids": torch.tensor([[10, 11, 0], [20, 30, 40]]),
        "values": torch.tensor([[1.5, float("nan"), 0.0], [2.0, 3.0, float("nan")]]),
        "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
    }
    cells = model.generate(2, prompt, n_tokens=torch.tensor([9, 3]), n_steps=4)
    assert_cells(cells, [9, 3])
    assert cells.input_ids[0, :2].tolist() == [10, 11]
    assert cells.input_ids[1].tolist() == [20, 30, 40, 0, 0, 0, 0, 0, 0]
    assert (cells.values[0, 0], cells.values[1, 0], cells.values[1, 1]) == (1.5, 2.0, 3.0)
    # What is known changes what is drawn.
    other = {**prompt, "values": prompt["values"] * 3.0}
    assert not torch.equal(model.generate(2, other, n_tokens=9).input_ids[:1], cells.input_ids[:1])
    # The value of a known gene is the one that predict_values gives.
    hidden = prompt["values"].isnan()
    expected = model.eval().predict_values(
        prompt["input_ids"], prompt["attention_mask"], prompt["values"].nan_to_num(0.0), masked_values=hidden
    )
    alone = model.generate(2, prompt, n_tokens=torch.tensor([2, 3]))
    torch.testing.assert_close(alone.values[hidden], expected[hidden].clamp(min=0.0))


def test_likely_genes_are_drawn():
    model = made()
    counts = torch.zeros(VOCAB)
    counts[20:30] = 10_000.0
    model.init_token_prior(counts)
    drawn = model.generate(20, n_tokens=10, temperature=0.2).input_ids
    share = float(((drawn >= 20) & (drawn < 30)).float().mean())
    assert share > 0.95
    cooler, one = (model.generate(5, n_tokens=8, seed=1, **kind) for kind in ({"temperature": 1e-4}, {"top_k": 1}))
    assert torch.equal(cooler.input_ids.sort().values, one.input_ids.sort().values)
    # Without a prior, a hotter draw takes more genes.
    n_genes = [made().generate(20, n_tokens=5, temperature=t).input_ids.unique().numel() for t in (0.05, 2.0)]
    assert n_genes[0] < n_genes[1]


def test_lengths_are_drawn_from_those_of_training():
    model = made()
    with raises(OptionError, "n_tokens"):
        model.generate(2)
    model.init_lengths(torch.linspace(5.0, 15.0, 101))
    lengths = model.generate(60, n_steps=2).attention_mask.sum(dim=1)
    assert int(lengths.min()) >= 5
    assert int(lengths.max()) <= 15
    assert 8.5 < float(lengths.float().mean()) < 11.5
    again = model.generate(20, n_steps=2, first_cell=40).attention_mask.sum(dim=1)
    assert torch.equal(again, lengths[40:])
    with raises(OptionError, "quantiles"):
        model.init_lengths(torch.ones(100))


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"n_cells": 0}, "n_cells"),
        ({"n_steps": 0}, "n_steps"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"mask_id": 9}, "mask_id"),
        ({"n_tokens": 41}, "n_tokens"),
        ({"n_tokens": 0}, "n_tokens"),
        ({"n_tokens": 1.5}, "n_tokens"),
        ({"n_tokens": torch.tensor([1, 2, 3])}, "n_tokens"),
        ({"prompt": {"values": torch.ones(2)}}, "prompt"),
        ({"prompt": {"input_ids": torch.tensor([5, 5])}}, "prompt"),
        ({"prompt": {"input_ids": torch.tensor([5, 2])}}, "prompt"),
        ({"prompt": {"input_ids": torch.tensor([[5], [6], [7]])}}, "prompt"),
        ({"prompt": {"input_ids": torch.tensor([5]), "values": torch.ones(2)}}, "prompt"),
        ({"prompt": {"input_ids": torch.tensor([5]), "values": torch.tensor([-1.0])}}, "prompt"),
        ({"prompt": {"input_ids": torch.arange(5, 15)}, "n_tokens": 9}, "n_tokens"),
        (
            {"prompt": {"input_ids": torch.arange(5, 46)}, "n_tokens": None},
            "prompt",
        ),
        (
            {"prompt": {"input_ids": torch.arange(5, 45)}, "first_id": 3, "n_tokens": None},
            "prompt",
        ),
    ],
)
def test_bad_arguments_are_refused(options, argument):
    with raises(OptionError, argument):
        made().generate(**{"n_cells": 2, "n_tokens": 12, **options})
    with pytest.raises(OptionError, match="denoising=False"):
        made(denoising=False).generate(2, n_tokens=5)
