import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scforge.data import CellOrder
from scforge.data.sampling import CellWeights, cut_by_tokens
from scforge.errors import OptionError
from scforge.testing import raises

LENGTHS = np.random.default_rng(0).integers(10, 500, 1000)


def batches(order: CellOrder, epoch: int | None = None) -> list[np.ndarray]:
    if epoch is not None:
        order.set_epoch(epoch)
    return [batch for window in order.windows() for batch in window.batches()]


def sorted_rows(parts: list[np.ndarray]) -> np.ndarray:
    return np.sort(np.concatenate(parts))


@st.composite
def options(draw: st.DrawFn) -> dict:
    """Draw the arguments of an order, except rank and world_size."""
    n = draw(st.integers(1, 400))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = np.sort(generator.choice(4 * n, n, replace=False))
    shuffle = draw(st.booleans())
    chosen = {
        "rows": rows if shuffle else generator.permutation(rows),
        "batch_size": draw(st.integers(1, 40)),
        "chunk_size": draw(st.sampled_from([1, 2, 16, 256])),
        "window_cells": draw(st.none() | st.integers(1, 200)),
        "shuffle": shuffle,
        "seed": draw(st.integers(0, 2**63 - 1)),
        "first_epoch": draw(st.integers(0, 3)),
    }
    packing = draw(st.sampled_from(["none", "sorted", "tokens"]))
    if packing != "none":
        chosen["lengths"] = generator.integers(0, 50, n).astype(draw(st.sampled_from(["i8", "i4", "u2"])))
    if packing == "tokens":
        chosen["max_tokens_per_batch"] = draw(st.integers(100, 3000))
        chosen["batch_size"] = draw(st.none() | st.integers(2, 40))
    return chosen


def ranks(chosen: dict, world_size: int) -> list[CellOrder]:
    assume(world_size <= len(chosen["rows"]))
    assume(chosen["batch_size"] != 1 or len(chosen["rows"]) % world_size == 0)
    return [CellOrder(**chosen, rank=rank, world_size=world_size) for rank in range(world_size)]


@settings(deadline=None)
@given(options(), st.integers(1, 4), st.integers(0, 2))
def test_each_cell_once_and_as_many_batches_on_each_rank(chosen, world_size, epoch):
    orders = ranks(chosen, world_size)
    parts = [batches(order, epoch) for order in orders]
    np.testing.assert_array_equal(sorted_rows([row for part in parts for row in part]), np.sort(chosen["rows"]))
    assert {len(part) for part in parts} == {len(order) for order in orders} == {len(parts[0])}
    sizes = [sum(map(len, part)) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    for part in parts:
        assert min(map(len, part)) > 0
        assert max(map(len, part)) <= (chosen["batch_size"] or len(chosen["rows"]))
        if "max_tokens_per_batch" in chosen:
            lengths = dict(zip(chosen["rows"].tolist(), chosen["lengths"].tolist(), strict=True))
            longest = [max(lengths[row] for row in batch.tolist()) for batch in part]
            assert max(map(np.multiply, map(len, part), longest)) <= chosen["max_tokens_per_batch"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(30, 200), st.integers(1, 20))
def test_as_few_batches_as_fit(lengths, budget, most):
    ends = cut_by_tokens(np.sort(lengths), budget, most)
    fewest, ordered = [0], sorted(lengths)  # of the first cells, by trying all cuts
    for end in range(1, len(lengths) + 1):
        starts = [s for s in range(max(0, end - most), end) if (end - s) * max(1, ordered[end - 1]) <= budget]
        fewest.append(1 + min(fewest[start] for start in starts))
    sizes = np.diff(ends, prepend=0)
    assert (len(ends), ends[-1]) == (fewest[-1], len(lengths))
    assert sizes.min() > 0
    assert sizes.max() <= most
    assert (sizes * np.sort(lengths)[ends - 1] <= budget).all()


@settings(deadline=None)
@given(options(), st.integers(1, 3), st.data())
def test_a_resumed_order_yields_the_rest(chosen, world_size, data):
    first = ranks(chosen, world_size)
    epoch = data.draw(st.integers(0, 2), label="epoch")
    for order in first:
        order.set_epoch(epoch)
    position = data.draw(st.integers(0, len(first[0])), label="position")
    first[0].advance(position)
    state = json.loads(json.dumps(first[0].state_dict()))
    for order, again in zip(first, ranks(chosen, world_size), strict=True):
        again.load_state_dict(state)
        again.set_epoch(epoch)
        assert again.position == position
        whole = batches(order)
        rest = batches(again)
        assert len(rest) == len(whole) - position
        for one, other in zip(whole[position:], rest, strict=True):
            np.testing.assert_array_equal(one, other)
        # Once only: the next pass is a whole one.
        assert again.position == position
        assert len(batches(again)) == len(whole)
        assert again.position == 0


@settings(deadline=None)
@given(options())
def test_seed_and_epoch_determine_the_order(chosen):
    order, again = CellOrder(**chosen), CellOrder(**chosen)
    batches(again, 2)
    epochs = [batches(order, epoch) for epoch in range(3)]
    for one, other in zip(epochs[1], batches(again, 1), strict=True):
        np.testing.assert_array_equal(one, other)
    # A window of few cells in one chunk leaves little to shuffle.
    if chosen["shuffle"] and min(len(chosen["rows"]), chosen["window_cells"] or 30) >= 30:
        assert not np.array_equal(np.concatenate(epochs[0]), np.concatenate(epochs[1]))
        other_seed = CellOrder(**{**chosen, "seed": chosen["seed"] ^ 1})
        assert not np.array_equal(np.concatenate(epochs[0]), np.concatenate(batches(other_seed, 0)))


@pytest.mark.parametrize("chunk_size", [1, 256])
def test_sorting_by_length_saves_padding(chunk_size):
    lengths = np.random.default_rng(0).integers(10, 500, 20_000)

    def padding(**options) -> float:
        order = CellOrder(np.arange(20_000), options.pop("batch_size", 64), chunk_size=chunk_size, **options)
        padded = sum(lengths[rows].max() * len(rows) for rows in batches(order))
        return 1 - lengths.sum() / padded

    order = CellOrder(np.arange(1000), 64, lengths=LENGTHS, chunk_size=min(chunk_size, 16))
    first, second = ({frozenset(batch.tolist()) for batch in batches(order, epoch)} for epoch in range(2))
    assert not first & second  # other cells share a batch in another epoch
    assert padding() > 0.4
    assert padding(lengths=lengths) < 0.05
    assert padding(lengths=lengths, batch_size=None, max_tokens_per_batch=8192) < 0.05
    # Batches do not come by length.
    means = [LENGTHS[rows].mean() for rows in batches(CellOrder(np.arange(1000), 50, lengths=LENGTHS))]
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.6
    # With batch_size, both limits hold.
    order = CellOrder(np.arange(1000), 12, lengths=LENGTHS, max_tokens_per_batch=5000)
    assert max(map(len, batches(order))) == 12


def test_a_window_holds_few_whole_chunks():
    rows = np.arange(100_000)
    balanced = CellOrder(rows, 64, chunk_size=256, window_cells=2048, balance=CellWeights(np.ones(len(rows))))
    assert max(len(np.unique(window.rows // 256)) for window in balanced.windows()) <= 14
    order = CellOrder(rows, 64, chunk_size=256, window_cells=2048)
    windows = list(order.windows())
    assert len(windows) == 49
    for window in windows:
        assert len(np.unique(window.rows // 256)) <= 2048 // 256 + 1
    # Cells of several chunks share a batch.
    assert np.mean([len(np.unique(rows // 256)) for rows in windows[0].batches()]) > 6


def test_cells_are_mixed_well():
    # Every cell is as likely in one place of the epoch as in another, and next to any other.
    order = CellOrder(np.arange(64), 8, chunk_size=4, window_cells=32)
    places = np.stack([np.argsort(np.concatenate(batches(order, epoch))) for epoch in range(500)])
    assert np.abs(places.mean(axis=0) - 31.5).max() < 4 * 18.5 / np.sqrt(500)


def test_without_shuffling_cells_keep_their_order_or_are_sorted_by_length():
    rows = np.array([5, 3, 9, 1, 700])
    for chunk_size in (1, 4):
        order = CellOrder(rows, 2, shuffle=False, chunk_size=chunk_size)
        assert np.concatenate(batches(order, 3)).tolist() == rows.tolist()
    lengths = np.array([5, 1, 4, 2, 3, 9, 7, 8])
    order = CellOrder(np.arange(8), 2, shuffle=False, lengths=lengths, window_cells=2)
    assert lengths[np.concatenate(batches(order))].tolist() == [1, 2, 3, 4, 5, 7, 8, 9]
    # On disk within a window only, so that windows are read as they stand.
    order = CellOrder(np.arange(8), 2, shuffle=False, lengths=lengths, window_cells=4, chunk_size=2)
    assert lengths[np.concatenate(batches(order))].tolist() == [1, 2, 4, 5, 3, 7, 8, 9]
    orders = [CellOrder(np.arange(8), 2, shuffle=False, lengths=lengths, rank=rank, world_size=2) for rank in range(2)]
    assert [lengths[np.concatenate(batches(order))].tolist() for order in orders] == [[1, 2, 4, 5], [3, 7, 8, 9]]


def test_epochs_count_on_from_the_first_and_validation_has_one():
    later, validation = (CellOrder(np.arange(100), 10, first_epoch=first) for first in (5, None))
    later.set_epoch(1)
    assert later.epoch == 6
    assert {window.draw for window in later.windows()} == {6}
    np.testing.assert_array_equal(batches(later, 1), batches(CellOrder(np.arange(100), 10), 6))
    np.testing.assert_array_equal(batches(validation, 0), batches(validation, 9))
    assert validation.epoch == 0


def test_the_position_is_kept_until_its_epoch_begins():
    order = CellOrder(np.arange(100), 10, window_cells=20)
    windows = order.windows()
    begun = [next(windows)]
    order.set_epoch(3)  # a pass that has begun keeps its epoch
    rows = np.concatenate([window.rows for window in [*begun, *windows]])
    np.testing.assert_array_equal(rows, np.concatenate(batches(order, 0)))
    order.set_epoch(3)
    order.advance(4)
    state = order.state_dict()
    order.set_epoch(4)
    assert order.position == 0
    again = CellOrder(np.arange(100), 10, window_cells=20)
    again.load_state_dict(state)
    again.set_epoch(0)  # as trainers do before they know
    assert again.position == 0
    again.set_epoch(3)
    assert again.position == 4
    assert len(batches(again)) == 6
    # The epoch after it is whole.
    assert len(batches(again, 4)) == len(batches(again, 3)) == 10


STATE_OPTIONS = {"rows": np.arange(0, 200, 2), "batch_size": 10, "lengths": LENGTHS[:100], "chunk_size": 4}


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"rows": np.arange(100)}, "state"),
        ({"rows": np.arange(99), "lengths": LENGTHS[:99]}, "state"),
        ({"lengths": LENGTHS[100:200]}, "state"),
        ({"seed": 1}, "state"),
        ({"max_tokens_per_batch": 1000}, "state"),
        ({"world_size": 2}, "state"),
        ({"shuffle": False}, "state"),
    ],
)
def test_a_state_of_another_order(changed, argument):
    state = CellOrder(**STATE_OPTIONS).state_dict()
    with raises(OptionError, argument):
        CellOrder(**{**STATE_OPTIONS, **changed}).load_state_dict(state)


def test_states_that_cannot_be_loaded():
    order = CellOrder(**STATE_OPTIONS)
    state = order.state_dict()
    with raises(OptionError, "state"):
        order.load_state_dict({key: value for key, value in state.items() if key != "seed"})
    with raises(OptionError, "state"):
        order.load_state_dict({key: value for key, value in state.items() if key != "position"})
    for position in (-1, 11):
        with raises(OptionError, "state"):
            order.load_state_dict({**state, "position": position})
    assert CellOrder(**{**STATE_OPTIONS, "lengths": LENGTHS[:100].astype(np.int16)}).state_dict() == state


PACKED = {"batch_size": None, "max_tokens_per_batch": 10}


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"rows": []}, "rows"),
        ({"rows": [2, 1]}, "rows"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": None}, "batch_size"),
        ({"world_size": 4}, "rows"),
        (
            {"world_size": 2, "batch_size": 1},
            "batch_size",
        ),
        ({"max_tokens_per_batch": 9}, "max_tokens_per_batch"),
        ({"max_tokens_per_batch": 9, "lengths": [1, 2, 10]}, "max_tokens_per_batch"),
        ({**PACKED, "lengths": [9, 9, 9], "world_size": 2}, "max_tokens_per_batch"),
    ],
)
def test_arguments(options, argument):
    with raises(OptionError, argument):
        len(CellOrder(**{"rows": [0, 1, 2], "batch_size": 2, **options}))
