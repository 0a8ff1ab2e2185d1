import hashlib
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from scforge.data import CellOrder, open_cells
from scforge.data.sampling import ClassBalance
from scforge.data.store import StoreCells
from scforge.errors import DataError, OptionError
from scforge.testing import raises
from scforge.tokenizers import get_tokenizer
from scforge.training.loading import BatchLoader

ORDERS = {
    "plain": {"batch_size": 40},
    "by length": {"batch_size": 40, "lengths": True},
    "by tokens": {"batch_size": None, "lengths": True, "max_tokens_per_batch": 1500},
    "balanced": {"batch_size": 40, "balance": True},
}


def loader(store: str | Path, options: dict, prepare=None, *, num_threads: int = 2) -> BatchLoader:
    """A loader of a store, with batches of tokens that know the rows of their cells."""
    cells = StoreCells.open(store)
    tokenizer = get_tokenizer("rank_value", cells.vocab)
    options = {"chunk_size": cells.chunk_size, "window_cells": 128, **options}
    if options.get("lengths"):
        options["lengths"] = tokenizer.lengths(cells.n_expressed.astype(np.int32))
    if options.get("balance"):
        options["balance"] = ClassBalance(np.asarray(cells.column("kind").cat.codes), warmup_epochs=3)

    def tokenize(block):
        return {**tokenizer(block), "rows": torch.from_numpy(block.rows), "draw": torch.tensor(block.draw)}

    order = CellOrder(np.arange(len(cells)), **options)
    return BatchLoader(cells, order, prepare or tokenize, num_threads=num_threads)


def mark(batch: dict) -> str:
    digest = hashlib.sha256()
    for name in sorted(batch):
        digest.update(f"{name} {batch[name].dtype} {tuple(batch[name].shape)}".encode())
        digest.update(batch[name].numpy().tobytes())
    return digest.hexdigest()


def epoch(of: BatchLoader, number: int = 0) -> list[dict]:
    of.sampler.set_epoch(number)
    return list(of)


def rows_of(batches: list[dict]) -> list[int]:
    return [row for batch in batches for row in batch["rows"].tolist()]


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("scforge")]
    assert left == []


@pytest.mark.parametrize("name", ORDERS)
def test_batches_follow_from_seed_and_epoch_and_not_from_threads(store, name):
    plain, three, other = (
        loader(store, {**ORDERS[name], "seed": seed}, num_threads=n) for seed, n in ((0, 0), (0, 3), (1, 2))
    )
    first, second = epoch(plain, 0), epoch(plain, 1)
    assert rows_of(first) != rows_of(second)
    for number, batches in ((1, second), (0, first)):
        assert [mark(batch) for batch in epoch(three, number)] == [mark(batch) for batch in batches]
        assert len(batches) == len(plain)
        assert {int(batch["draw"]) for batch in batches} == {number}
        if name != "balanced":  # which draws with replacement
            assert sorted(rows_of(batches)) == list(range(700))
    assert rows_of(epoch(other, 0)) != rows_of(first)


@pytest.mark.parametrize("name", ORDERS)
def test_ranks_share_the_cells(store, many_adata, name):
    parts = [loader(store, {**ORDERS[name], "rank": rank, "world_size": 2}) for rank in range(2)]
    one, two = (epoch(part, 1) for part in parts)
    assert len(one) == len(two) == len(parts[0]) == len(parts[1])
    if name != "balanced":
        assert not set(rows_of(one)) & set(rows_of(two))
        assert sorted(rows_of(one) + rows_of(two)) == list(range(700))
    # Tokens are those of the cells.
    cells = StoreCells.open(store)
    memory = open_cells(many_adata[cells.names()].copy(), cells.vocab)
    expected = get_tokenizer("rank_value", cells.vocab)(memory.block(one[0]["rows"].numpy()))
    assert all(torch.equal(one[0][name], expected[name]) for name in expected)


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_errors_arrive(store, num_threads, monkeypatch):
    def prepare(block):
        if 5 in block.rows:
            raise KeyError("the fifth")
        return {"rows": torch.from_numpy(block.rows)}

    made = loader(store, {"batch_size": 4, "shuffle": False}, prepare, num_threads=num_threads)
    batches = iter(made)
    assert next(batches)["rows"].tolist() == [0, 1, 2, 3]  # those before it come
    with pytest.raises(KeyError, match="the fifth"):
        next(batches)
    assert made.state_dict()["position"] == 1
    whole = StoreCells.stream

    def stream(self, windows):
        for number, block in enumerate(whole(self, windows)):
            if number == 6:
                raise DataError("damaged")
            yield block

    made = loader(store, {"batch_size": 40, "shuffle": False}, num_threads=num_threads)
    monkeypatch.setattr(StoreCells, "stream", stream)
    batches = iter(made)
    assert rows_of([next(batches) for _ in range(6)]) == list(range(240))
    with pytest.raises(DataError, match="damaged"):
        next(batches)
    assert list(batches) == []


def test_few_batches_are_made_ahead_and_who_leaves_early_leaves_no_thread(store):
    made = []

    def prepare(block):
        made.append(block.rows)
        return {"rows": torch.from_numpy(block.rows)}

    for num_threads in (1, 2):
        of = loader(store, {"batch_size": 4}, prepare, num_threads=num_threads)
        made.clear()
        for batch in of:
            assert len(batch["rows"]) == 4
            threading.Event().wait(0.3)
            assert any(thread.name.startswith("scforge-read") for thread in threading.enumerate())
            break
        assert 1 <= len(made) <= 8
        assert not any(thread.name.startswith("scforge") for thread in threading.enumerate())
        assert sorted(rows_of(epoch(of))) == list(range(700))


@pytest.mark.parametrize(("name", "taken"), [("plain", 0), ("plain", 18), *((name, 5) for name in ORDERS)])
def test_a_state_is_of_what_was_handed_out(store, name, taken):
    """Threads have made batches ahead when the state is saved; the state knows those that were handed out."""
    made, again = (loader(store, ORDERS[name], num_threads=3) for _ in range(2))
    made.sampler.set_epoch(2)
    batches = iter(made)
    for _ in range(taken):
        next(batches)
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    again.sampler.set_epoch(2)
    rest = [mark(batch) for batch in batches]
    assert len(rest) == len(made) - taken
    assert [mark(batch) for batch in again] == rest
    assert len(epoch(again, 3)) == len(again)
    with raises(OptionError, "state"):
        loader(store, {"batch_size": 30}).load_state_dict(made.state_dict())


def test_threads_by_default(store, tiny_adata):
    assert BatchLoader(open_cells(tiny_adata), CellOrder(np.arange(9), 3), dict).num_threads == 1
    assert 1 <= loader(store, ORDERS["plain"], num_threads=None).num_threads <= 2
    with raises(OptionError, "num_threads"):
        loader(store, ORDERS["plain"], num_threads=-1)
    with raises(OptionError, "pin_memory"):
        BatchLoader(StoreCells.open(store), CellOrder(np.arange(9), 3), dict, pin_memory="no")
