import json
import warnings
from pathlib import Path

import annbatch
import anndata as ad
import numpy as np
import pytest
import zarr
from scipy import sparse
from torch.utils.data._utils.worker import WorkerInfo

from scforge.data import AnnbatchSampler, CellOrder, CellWeights, Window
from scforge.errors import OptionError

N_CELLS, N_GENES, CHUNK = 700, 30, 16
BOUNDARY = 300  # between two data sets, where no chunk ends


COUNTS = sparse.csr_matrix(np.random.default_rng(0).poisson(0.4, (N_CELLS, N_GENES)).astype(np.uint16))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "cells.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=3)
    for number, part in enumerate([slice(0, BOUNDARY), slice(BOUNDARY, N_CELLS)]):
        adata = ad.AnnData(COUNTS[part])
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


LENGTHS = np.random.default_rng(1).integers(1, 100, N_CELLS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rows": np.flatnonzero(np.arange(N_CELLS) % 50 < 7)},
        {"batch_size": None, "lengths": LENGTHS, "max_tokens_per_batch": 2000},
        {"balance": CellWeights(np.arange(N_CELLS))},
        {"chunk_size": 1},
    ],
)
def test_the_loader_yields_the_batches_of_the_order(store, options):
    sampler = AnnbatchSampler(order(**options), gap=32 if "rows" in options else 0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        of = order(**options, first_epoch=epoch)
        batches = list(loader(store, sampler))
        of_windows = [rows.tolist() for window in of.windows() for rows in window.batches()]
        assert len(batches) == sampler.n_batches(N_CELLS) == len(of)
        for batch, rows in zip(batches, of_windows, strict=True):
            assert batch["index"].tolist() == rows
            assert batch["X"].dtype == np.uint16
            assert (batch["X"] != COUNTS[rows]).nnz == 0


def test_a_resumed_sampler_goes_on_with_the_rest(store):
    whole, begun, again = (AnnbatchSampler(order(seed=5, world_size=2)) for _ in range(3))
    for sampler in (whole, begun):
        sampler.set_epoch(3)
    batches = iter(loader(store, begun))
    taken = []
    for _ in range(6):
        taken.append(next(batches)["index"].tolist())
        begun.advance()
    again.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    again.set_epoch(3)
    assert taken + indices(store, again) == indices(store, whole)


def test_any_and_whole_windows(store):
    windows = [
        Window(rows=np.array([5, 3, 699, 3]), ends=np.array([1, 4]), draw=0),
        Window(rows=np.array([298, 301]), ends=np.array([2]), draw=0),
    ]
    sampler = AnnbatchSampler(windows)
    assert indices(store, sampler) == [[5], [3, 699, 3], [298, 301]]
    assert sampler.n_batches(N_CELLS) == 3
    assert indices(store, AnnbatchSampler(iter(windows))) == [[5], [3, 699, 3], [298, 301]]
    whole = AnnbatchSampler(order(), whole_windows=True)
    assert indices(store, whole) == [window.rows.tolist() for window in order().windows()]
    assert whole.n_batches(N_CELLS) == len(list(order().windows()))
    for call in (sampler.state_dict, lambda: sampler.set_epoch(0), lambda: AnnbatchSampler(iter([])).n_batches(1)):
        with pytest.raises(OptionError, match="give a"):
            call()


def test_small_gaps_are_read_along():
    for rows, options, requests in [
        ([9, 1, 2], {"gap": 5}, [slice(1, 3), slice(9, 10)]),
        ([9, 1, 2], {"gap": 6}, [slice(1, 10)]),
        ([4, 4, 3, 6], {"gap": 0}, [slice(3, 5), slice(6, 7)]),
        ([4, 999, 36], {}, [slice(4, 37), slice(999, 1000)]),
    ]:
        window = Window(rows=np.array(rows), ends=np.array([len(rows)]), draw=0)
        assert next(AnnbatchSampler([window], **options).sample(1000))["requests"] == requests


def test_what_the_loader_cannot_do(store, monkeypatch):
    for row, message in [(N_CELLS, "the cell 700, but .* 0 to 699"), (-1, "the cell -1")]:
        sampler = AnnbatchSampler([Window(rows=np.array([0, row]), ends=np.array([2]), draw=0)])
        with pytest.raises(OptionError, match=message):
            indices(store, sampler)
    sampler = AnnbatchSampler(order())
    sampler.mask = slice(0, 100)
    with pytest.raises(OptionError, match=r"mask=slice\(0, 100, None\) is not for this sampler"):
        next(sampler.sample(N_CELLS))
    for num_workers in (1, 2):
        requests = AnnbatchSampler(order()).sample(N_CELLS)
        told = WorkerInfo(id=0, num_workers=num_workers, seed=0, dataset=None)
        monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", told)
        if num_workers == 1:
            next(requests)
    with pytest.raises(OptionError, match="num_workers=2 would each yield every batch"):
        next(requests)
