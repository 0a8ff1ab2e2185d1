"""Masking: what is chosen, what stands in its place, and that nothing of it can be read off."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse

from scforge.data import GeneVocab
from scforge.errors import OptionError
from scforge.tokenizers import Masking, get_tokenizer

N_GENES = 400
VOCAB = GeneVocab.from_genes([f"g{i}" for i in range(N_GENES)])


@pytest.fixture(scope="module")
def tokens():
    generator = np.random.default_rng(0)
    counts = generator.integers(1, 10, (300, N_GENES)) * (generator.random((300, N_GENES)) < 0.1)
    counts[7] = 0  # a cell without genes
    counts[8] = np.eye(N_GENES)[5]  # a cell with one
    return get_tokenizer("rank_value", VOCAB, use_medians=False)(sparse.csr_matrix(counts))


@pytest.fixture(scope="module")
def rows():
    return np.arange(300)


def equal(one, two, select=slice(None)):
    return all(torch.equal(one[key][select], two[key][select]) for key in one)


@pytest.mark.parametrize("options", [{}, {"mask_ratio": 0.5}, {"mask_token_prob": 0.0, "random_token_prob": 1.0}])
def test_labels_stand_where_masked_and_nowhere_else(tokens, rows, options):
    out = Masking(len(VOCAB), **options)(tokens, rows, epoch=0)
    chosen = out["masked_positions"]
    assert torch.equal(out["labels"] != -100, chosen)
    assert torch.equal(out["labels"][chosen], tokens["input_ids"][chosen])
    assert torch.equal(out["input_ids"][~chosen], tokens["input_ids"][~chosen])
    assert torch.equal(out["values"][~chosen], tokens["values"][~chosen])
    assert torch.equal(out["attention_mask"], tokens["attention_mask"])
    assert not out["values"][chosen].any()


def test_special_tokens_are_neither_chosen_nor_drawn(tokens, rows):
    masking = Masking(len(VOCAB), mask_ratio=0.9, mask_token_prob=0.0, random_token_prob=1.0)
    drawn = []
    for epoch in range(5):
        out = masking(tokens, rows, epoch=epoch)
        chosen = out["masked_positions"]
        assert (tokens["input_ids"][chosen] >= 4).all()
        drawn.append(out["input_ids"][chosen])
    drawn = torch.cat(drawn)
    assert drawn.min() == 4
    assert drawn.max() == len(VOCAB) - 1
    counts = torch.bincount(drawn - 4, minlength=N_GENES).double()
    assert ((counts - counts.mean()).abs() < 6 * counts.mean().sqrt()).all()


@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.5, 0.99])
def test_exact_share_and_at_least_one(tokens, rows, ratio):
    out = Masking(len(VOCAB), mask_ratio=ratio)(tokens, rows, epoch=0)
    n_genes = (tokens["input_ids"] >= 4).sum(dim=1).numpy()
    expected = np.where(n_genes > 0, np.maximum(1, np.floor(n_genes * ratio + 0.5)), 0)
    np.testing.assert_array_equal(out["masked_positions"].sum(dim=1), expected)
    assert n_genes[7] == 0
    assert expected[8] == 1


def test_every_position_is_equally_likely():
    n = 4000
    ids = torch.cat([torch.full((n, 1), 3), torch.arange(4, 24).repeat(n, 1)], dim=1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool), "values": ids.float()}
    out = Masking(len(VOCAB), mask_ratio=0.25)(batch, np.arange(n), epoch=0)
    share = out["masked_positions"].double().mean(dim=0)
    assert share[0] == 0
    assert ((share[1:] - 0.25).abs() < 5 * np.sqrt(0.25 * 0.75 / n)).all()


def test_proportions(tokens, rows):
    masking = Masking(len(VOCAB), mask_ratio=0.5)
    kinds = np.zeros(3)
    for epoch in range(20):
        out = masking(tokens, rows, epoch=epoch)
        chosen = out["masked_positions"]
        now, before = out["input_ids"][chosen], out["labels"][chosen]
        kinds += [int((now == 2).sum()), int(((now != 2) & (now != before)).sum()), int((now == before).sum())]
    n = kinds.sum()
    # A random gene is the same gene once in N_GENES draws.
    for share, expected in zip(kinds / n, (0.8, 0.1 * (1 - 1 / N_GENES), 0.1 * (1 + 1 / N_GENES)), strict=True):
        assert abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / n)


def test_only_masks(tokens, rows):
    out = Masking(len(VOCAB), mask_token_prob=1.0, random_token_prob=0.0)(tokens, rows, epoch=0)
    assert (out["input_ids"][out["masked_positions"]] == 2).all()


def test_a_cell_is_masked_alike_in_every_batch(tokens, rows):
    masking = Masking(len(VOCAB), seed=5)
    whole = masking(tokens, rows, epoch=3)
    pick = np.array([250, 3, 8, 77])
    some = masking({key: value[pick] for key, value in tokens.items()}, rows[pick], epoch=3)
    assert equal(some, {key: value[pick] for key, value in whole.items()})


def test_padding_does_not_change_the_choice(tokens, rows):
    width = tokens["input_ids"].shape[1]
    wider = {key: torch.nn.functional.pad(value, (0, 9)) for key, value in tokens.items()}
    one, two = (Masking(len(VOCAB))(batch, rows, epoch=0) for batch in (tokens, wider))
    assert torch.equal(one["input_ids"], two["input_ids"][:, :width])
    assert not two["masked_positions"][:, width:].any()


def test_seed_epoch_and_cell_change_the_choice(tokens, rows):
    base = Masking(len(VOCAB))(tokens, rows, epoch=0)
    assert equal(base, Masking(len(VOCAB))(tokens, rows, epoch=0))
    others = [
        Masking(len(VOCAB))(tokens, rows, epoch=1),
        Masking(len(VOCAB), seed=1)(tokens, rows, epoch=0),
        Masking(len(VOCAB))(tokens, rows + 1000, epoch=0),
    ]
    for other in others:
        same = (other["masked_positions"] == base["masked_positions"]).all(dim=1)
        assert same.float().mean() < 0.05


def test_the_input_is_left_alone(tokens, rows):
    before = {key: value.clone() for key, value in tokens.items()}
    Masking(len(VOCAB))(tokens, rows, epoch=0)
    assert equal(tokens, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_ratio": 0.0}, "mask_ratio=0.0"),
        ({"mask_ratio": 1.0}, "mask_ratio=1.0"),
        ({"mask_ratio": float("nan")}, "mask_ratio=nan"),
        ({"mask_token_prob": 1.2}, "mask_token_prob=1.2"),
        ({"random_token_prob": -0.1}, "random_token_prob=-0.1"),
        ({"mask_token_prob": 0.8, "random_token_prob": 0.3}, "sum to more than 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(OptionError, match=message):
        Masking(10, **options)
