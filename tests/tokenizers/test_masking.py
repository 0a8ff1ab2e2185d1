"""Masking: how often what is chosen. That nothing of it can be read off is tested in test_base_properties.py."""

import numpy as np
import pytest
import torch
from scipy import sparse

from scforge.data import GeneVocab
from scforge.errors import OptionError
from scforge.testing import raises
from scforge.tokenizers import Masking, get_tokenizer

N_GENES = 400
ROWS = np.arange(300)
VOCAB = GeneVocab.from_genes([f"g{i}" for i in range(N_GENES)])


@pytest.fixture(scope="module")
def tokens():
    generator = np.random.default_rng(0)
    counts = generator.integers(1, 10, (300, N_GENES)) * (generator.random((300, N_GENES)) < 0.1)
    counts[7] = 0  # a cell without genes
    return get_tokenizer("rank_value", VOCAB, use_medians=False)(sparse.csr_matrix(counts))


def test_special_tokens_are_neither_chosen_nor_drawn(tokens):
    masking = Masking(len(VOCAB), mask_ratio=0.9, mask_token_prob=0.0, random_token_prob=1.0)
    drawn = []
    for epoch in range(5):
        out = masking(tokens, ROWS, epoch=epoch)
        chosen = out["masked_positions"]
        assert (tokens["input_ids"][chosen] >= 4).all()
        drawn.append(out["input_ids"][chosen])
    drawn = torch.cat(drawn)
    assert drawn.min() == 4
    assert drawn.max() == len(VOCAB) - 1
    counts = torch.bincount(drawn - 4, minlength=N_GENES).double()
    assert ((counts - counts.mean()).abs() < 6 * counts.mean().sqrt()).all()


def test_every_position_is_equally_likely():
    n = 4000
    ids = torch.cat([torch.full((n, 1), 3), torch.arange(4, 24).repeat(n, 1)], dim=1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool), "values": ids.float()}
    out = Masking(len(VOCAB), mask_ratio=0.25)(batch, np.arange(n), epoch=0)
    share = out["masked_positions"].double().mean(dim=0)
    assert share[0] == 0
    assert ((share[1:] - 0.25).abs() < 5 * np.sqrt(0.25 * 0.75 / n)).all()


def test_proportions(tokens):
    masking = Masking(len(VOCAB), mask_ratio=0.5)
    kinds = np.zeros(3)
    for epoch in range(20):
        out = masking(tokens, ROWS, epoch=epoch)
        chosen = out["masked_positions"]
        now, before = out["input_ids"][chosen], out["labels"][chosen]
        kinds += [int((now == 2).sum()), int(((now != 2) & (now != before)).sum()), int((now == before).sum())]
    n = kinds.sum()
    # A random gene is the same gene once in N_GENES draws.
    for share, expected in zip(kinds / n, (0.8, 0.1 * (1 - 1 / N_GENES), 0.1 * (1 + 1 / N_GENES)), strict=True):
        assert abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / n)


def test_seed_epoch_and_cell_change_the_choice(tokens):
    base = Masking(len(VOCAB))(tokens, ROWS, epoch=0)
    for other in (
        Masking(len(VOCAB))(tokens, ROWS, epoch=1),
        Masking(len(VOCAB), seed=1)(tokens, ROWS, epoch=0),
        Masking(len(VOCAB))(tokens, ROWS + 1000, epoch=0),
    ):
        same = (other["masked_positions"] == base["masked_positions"]).all(dim=1)
        assert same.float().mean() < 0.05


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"mask_ratio": 0.0}, "mask_ratio"),
        ({"random_token_prob": -0.1}, "random_token_prob"),
        ({"mask_token_prob": 0.8, "random_token_prob": 0.3}, "mask_token_prob"),
    ],
)
def test_bad_options(options, argument):
    with raises(OptionError, argument):
        Masking(10, **options)
