"""annbatch reads the windows of an order."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import annbatch
import anndata as ad
import numpy as np
import pytest
import zarr
from scipy import sparse

from scforge.data import AnnbatchSampler, CellOrder, CellWeights, Window
from scforge.errors import OptionError

N_CELLS, N_GENES, CHUNK = 700, 30, 16
BOUNDARY = 300  # between two data sets, where no chunk ends


def counts() -> sparse.csr_matrix:
    matrix = sparse.random(N_CELLS, N_GENES, 0.3, format="csr", random_state=0)
    matrix.data = np.arange(1, matrix.nnz + 1)
    return matrix.astype(np.uint16)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "cells.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=3)
    for number, part in enumerate([slice(0, BOUNDARY), slice(BOUNDARY, N_CELLS)]):
        adata = ad.AnnData(counts()[part])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Consolidated metadata")
            annbatch.write_sharded(group, adata, n_obs_per_chunk=CHUNK, key=f"dataset_{number}")
    return path


def loader(store: Path, sampler: AnnbatchSampler) -> annbatch.Loader:
    group = zarr.open_group(store, mode="r")
    made = annbatch.Loader(batch_sampler=sampler, preload_to_gpu=False, return_index=True)
    return made.add_datasets([ad.io.sparse_dataset(group[f"dataset_{number}/X"]) for number in range(2)])


def order(**options) -> CellOrder:
    chosen = {"rows": np.arange(N_CELLS), "batch_size": 32, "chunk_size": CHUNK, "window_cells": 128, **options}
    return CellOrder(**chosen)


def indices(store: Path, sampler: AnnbatchSampler) -> list[list[int]]:
    return [batch["index"].tolist() for batch in loader(store, sampler)]


def expected(of: CellOrder) -> list[list[int]]:
    return [rows.tolist() for window in of.windows() for rows in window.batches()]


LENGTHS = np.random.default_rng(1).integers(1, 100, N_CELLS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rows": np.flatnonzero(np.arange(N_CELLS) % 50 < 7)},
        {"shuffle": False},
        {"batch_size": None, "lengths": LENGTHS, "max_tokens_per_batch": 2000},
        {"balance": CellWeights(np.arange(N_CELLS))},
        {"chunk_size": 1},
    ],
    ids=["all", "some", "as they stand", "packed", "draws", "by cell"],
)
@pytest.mark.parametrize("gap", [0, 32])
def test_the_loader_yields_the_batches_of_the_order(store, options, gap):
    sampler = AnnbatchSampler(order(**options), gap=gap)
    expected_counts = counts()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        of = order(**options, first_epoch=epoch)
        batches = list(loader(store, sampler))
        assert len(batches) == sampler.n_batches(N_CELLS) == len(of)
        for batch, rows in zip(batches, expected(of), strict=True):
            assert batch["index"].tolist() == rows
            assert batch["X"].dtype == np.uint16
            assert (batch["X"] != expected_counts[rows]).nnz == 0


def test_each_cell_once_an_epoch_and_ranks_share_them(store):
    epochs = []
    for epoch in range(2):
        parts = []
        for rank in range(2):
            sampler = AnnbatchSampler(order(rank=rank, world_size=2))
            sampler.set_epoch(epoch)
            parts.append(np.concatenate(indices(store, sampler)))
        assert [len(part) for part in parts] == [350, 350]
        epochs.append(np.concatenate(parts))
        np.testing.assert_array_equal(np.sort(epochs[-1]), np.arange(N_CELLS))
    assert not np.array_equal(*epochs)
    assert set(epochs[0][:350]) != set(epochs[1][:350])


@pytest.mark.slow
def test_a_new_process_goes_on_with_the_rest(store):
    options = {"seed": 5, "world_size": 2}
    sampler = AnnbatchSampler(order(**options))
    sampler.set_epoch(3)
    batches = iter(loader(store, sampler))
    taken = []
    for _ in range(6):
        taken.append(next(batches)["index"].tolist())
        sampler.advance()
    state = json.dumps(sampler.state_dict())
    script = (
        f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_annbatch_sampler import *\n"
        f"sampler = AnnbatchSampler(order(**{options}))\n"
        f"sampler.load_state_dict(json.loads({state!r}))\n"
        "sampler.set_epoch(3)\n"
        f"print(json.dumps(indices(Path({str(store)!r}), sampler)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    whole = AnnbatchSampler(order(**options))
    whole.set_epoch(3)
    assert taken + json.loads(done.stdout) == indices(store, whole)
    assert len(taken) == 6


def test_whole_windows(store):
    of = order()
    sampler = AnnbatchSampler(of, whole_windows=True)
    windows = list(order().windows())
    assert sampler.n_batches(N_CELLS) == len(windows)
    for rows, window in zip(indices(store, sampler), windows, strict=True):
        assert rows == window.rows.tolist()


def test_any_windows(store):
    windows = [
        Window(rows=np.array([5, 3, 699, 3]), ends=np.array([1, 4]), draw=0),
        Window(rows=np.array([298, 301]), ends=np.array([2]), draw=0),
    ]
    sampler = AnnbatchSampler(windows)
    assert indices(store, sampler) == [[5], [3, 699, 3], [298, 301]]
    assert sampler.n_batches(N_CELLS) == 3
    assert indices(store, AnnbatchSampler(iter(windows))) == [[5], [3, 699, 3], [298, 301]]
    for call in (sampler.state_dict, lambda: sampler.set_epoch(0), lambda: AnnbatchSampler(iter([])).n_batches(1)):
        with pytest.raises(OptionError, match="give a"):
            call()


def requested(rows: list[int], **options) -> list[slice]:
    window = Window(rows=np.array(rows), ends=np.array([len(rows)]), draw=0)
    return next(AnnbatchSampler([window], **options).sample(1000))["requests"]


def test_small_gaps_are_read_along():
    assert requested([9, 1, 2], gap=5) == [slice(1, 3), slice(9, 10)]
    assert requested([9, 1, 2], gap=6) == [slice(1, 10)]
    assert requested([4, 4, 3, 6], gap=0) == [slice(3, 5), slice(6, 7)]
    assert requested([4, 999, 36]) == [slice(4, 37), slice(999, 1000)]


@pytest.mark.parametrize(("row", "message"), [(N_CELLS, "the cell 700, but .* 0 to 699"), (-1, "the cell -1")])
def test_cells_that_the_loader_does_not_have(store, row, message):
    sampler = AnnbatchSampler([Window(rows=np.array([0, row]), ends=np.array([2]), draw=0)])
    with pytest.raises(OptionError, match=message):
        indices(store, sampler)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_several_workers_would_yield_every_batch_each(monkeypatch, num_workers):
    from torch.utils.data._utils.worker import WorkerInfo

    told = WorkerInfo(id=0, num_workers=num_workers, seed=0, dataset=None)
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", told)
    requests = AnnbatchSampler(order()).sample(N_CELLS)
    if num_workers == 1:
        next(requests)
        return
    with pytest.raises(OptionError, match="num_workers=2 would each yield every batch"):
        next(requests)


def test_a_mask_is_not_left_out_silently():
    sampler = AnnbatchSampler(order())
    sampler.mask = slice(0, 100)
    with pytest.raises(OptionError, match=r"mask=slice\(0, 100, None\) is not for this sampler"):
        next(sampler.sample(N_CELLS))
