"""The order of cells."""

from __future__ import annotations

import numpy as np
import pytest

from scforge.data import CellSampler

LENGTHS = np.random.default_rng(0).integers(10, 500, 1000)


def epoch(sampler: CellSampler, number: int) -> list[np.ndarray]:
    sampler.set_epoch(number)
    return [batch.rows for batch in sampler]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["any", "bucketed"])
@pytest.mark.parametrize("batch_size", [1, 64, 1000, 5000])
def test_each_cell_once_an_epoch(shuffle, lengths, batch_size):
    rows = np.arange(1000) * 3 + 1
    sampler = CellSampler(rows, batch_size, lengths=lengths, shuffle=shuffle)
    for number in range(2):
        batches = epoch(sampler, number)
        assert len(batches) == len(sampler)
        assert max(map(len, batches)) <= batch_size
        np.testing.assert_array_equal(np.sort(np.concatenate(batches)), rows)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["any", "bucketed"])
def test_each_epoch_another_order_that_seed_and_epoch_determine(lengths):
    sampler = CellSampler(np.arange(1000), 64, lengths=lengths, seed=7)
    orders = [np.concatenate(epoch(sampler, number)) for number in range(3)]
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[1], orders[2])
    again = CellSampler(np.arange(1000), 64, lengths=lengths, seed=7)
    np.testing.assert_array_equal(np.concatenate(epoch(again, 2)), orders[2])
    other = CellSampler(np.arange(1000), 64, lengths=lengths, seed=8)
    assert not np.array_equal(np.concatenate(epoch(other, 0)), orders[0])


def test_batches_differ_between_epochs_and_not_only_their_order():
    lengths = np.random.default_rng(0).integers(10, 500, 10_000)
    sampler = CellSampler(np.arange(10_000), 64, lengths=lengths)
    first, second = ({frozenset(batch.tolist()) for batch in epoch(sampler, number)} for number in range(2))
    assert not first & second


def test_buckets_save_padding():
    # More than one group of buckets, so that sorting happens within groups only.
    lengths = np.random.default_rng(0).integers(10, 500, 10_000)

    def padding(sampler: CellSampler) -> float:
        batches = epoch(sampler, 0)
        padded = sum(lengths[rows].max() * len(rows) for rows in batches)
        return 1 - lengths.sum() / padded

    plain = padding(CellSampler(np.arange(10_000), 64))
    bucketed = padding(CellSampler(np.arange(10_000), 64, lengths=lengths))
    assert plain > 0.4
    assert bucketed < 0.05


def test_batches_do_not_come_by_length():
    sampler = CellSampler(np.arange(1000), 50, lengths=LENGTHS)
    means = [LENGTHS[rows].mean() for rows in epoch(sampler, 0)]
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.6


def test_first_epoch_counts_on():
    later = CellSampler(np.arange(100), 10, first_epoch=5)
    assert next(iter(later)).epoch == 5
    np.testing.assert_array_equal(
        np.concatenate(epoch(later, 1)), np.concatenate(epoch(CellSampler(np.arange(100), 10), 6))
    )


def test_validation_is_always_epoch_zero():
    sampler = CellSampler(np.arange(100), 10, shuffle=False, first_epoch=None)
    sampler.set_epoch(9)
    assert {batch.epoch for batch in sampler} == {0}


def test_without_shuffling_rows_keep_their_order():
    rows = np.array([5, 3, 9, 1])
    assert np.concatenate(epoch(CellSampler(rows, 2, shuffle=False), 3)).tolist() == [5, 3, 9, 1]
