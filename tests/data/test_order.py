"""Which cells make which batch of which epoch on which rank."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from scforge.data import CellOrder

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


@given(options(), st.integers(1, 3))
def test_no_batch_has_more_tokens_than_allowed(chosen, world_size):
    assume("max_tokens_per_batch" in chosen)
    lengths = dict(zip(chosen["rows"].tolist(), chosen["lengths"].tolist(), strict=True))
    for order in ranks(chosen, world_size):
        for batch in batches(order):
            assert len(batch) * max(lengths[row] for row in batch.tolist()) <= chosen["max_tokens_per_batch"]


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


@given(options())
def test_seed_and_epoch_determine_the_order(chosen):
    order, again = CellOrder(**chosen), CellOrder(**chosen)
    batches(again, 2)
    epochs = [batches(order, epoch) for epoch in range(3)]
    for one, other in zip(epochs[1], batches(again, 1), strict=True):
        np.testing.assert_array_equal(one, other)
    if chosen["shuffle"] and len(chosen["rows"]) > 30:
        assert not np.array_equal(np.concatenate(epochs[0]), np.concatenate(epochs[1]))
        other_seed = CellOrder(**{**chosen, "seed": chosen["seed"] ^ 1})
        assert not np.array_equal(np.concatenate(epochs[0]), np.concatenate(batches(other_seed, 0)))
