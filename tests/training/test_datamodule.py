"""Splits and batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scforge.errors import OptionError


def test_shared_cells_are_refused(setup):
    data = setup.data()
    with pytest.raises(OptionError, match="must be disjoint"):
        type(data)(
            setup.cells, setup.tokenizer, setup.objective,
            train_rows=np.arange(5), validation_rows=np.arange(4, 8), batch_size=2,
        )  # fmt: skip
    with pytest.raises(OptionError, match="batch_size=0"):
        setup.data(batch_size=0)


def epoch(loader, number=0):
    loader.sampler.set_epoch(number)
    return list(loader)


def test_validation_batches_are_the_same_each_epoch(masked_setup):
    loader = masked_setup.data().val_dataloader()
    for one, two in zip(epoch(loader, 0), epoch(loader, 5), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_training_batches_differ_each_epoch_and_continue(masked_setup):
    loader = masked_setup.data().train_dataloader()
    assert not torch.equal(epoch(loader, 0)[0]["input_ids"], epoch(loader, 1)[0]["input_ids"])
    later = masked_setup.data(first_epoch=3).train_dataloader()
    for one, two in zip(epoch(loader, 4), epoch(later, 1), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_batch_size_does_not_change_what_happens_to_a_cell(masked_setup):
    def masked_genes(batch_size):
        batches = epoch(masked_setup.data(batch_size=batch_size).val_dataloader())
        return sorted(tuple(row[row >= 0].tolist()) for batch in batches for row in batch["labels"])

    assert masked_genes(3) == masked_genes(10)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_prepare_the_same_batches(masked_setup, num_threads):
    plain, threads = (masked_setup.data(num_threads=n).train_dataloader() for n in (0, num_threads))
    for one, two in zip(epoch(plain), epoch(threads), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_without_validation(setup):
    assert setup.data(n_validation=0).val_dataloader() == []


def test_views_come_view_after_view(setup):
    block = setup.cells.block(np.arange(5))
    batch = setup.objective.prepare(block, setup.tokenizer, epoch=0, seed=0)
    assert batch["input_ids"].shape[0] == 10
    original = setup.tokenizer(block)["input_ids"]
    for i, row in enumerate(batch["input_ids"]):
        assert set(row.tolist()) <= set(original[i % 5].tolist()) | {0}
    assert not torch.equal(batch["input_ids"][:5], batch["input_ids"][5:])
