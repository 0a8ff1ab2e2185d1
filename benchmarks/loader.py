"""How fast do shuffled, tokenized batches come from disk, and how much memory does that take?

Makes a corpus of counts drawn gene by gene (log-normal popularity, about 1,200 genes a cell), converts it into a store
with ``scforge.data.convert``, and reads an epoch of it: with annbatch alone (CSR batches, its random sampler), and as
batches of tokens. Each row is a process of its own, which reads the store once before it is timed. Two processes share
the cells as the ranks of a training do. The ceiling is what unpacking the chunks takes on one core, nothing else done.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import h5py
import numba
import numpy as np

N_GENES, N_TYPES, UMIS, BATCH = 20_000, 20, 1_760, 256
PIECE = 20_000


@numba.njit(cache=True)
def draw_cells(seed, umis, cumulative, indptr, indices, data):
    """Draw the counts of some cells; return the number of entries."""
    np.random.seed(seed)
    counts, n = np.zeros(len(cumulative), dtype=np.uint16), 0
    for cell in range(len(indptr) - 1):
        for _ in range(int(umis * np.exp(np.random.normal(0, 0.4)))):
            counts[np.searchsorted(cumulative, np.random.random())] += 1
        for gene in range(len(counts)):
            if counts[gene]:
                indices[n], data[n] = gene, counts[gene]
                counts[gene] = 0
                n += 1
        indptr[cell + 1] = n
    return n


def write_corpus(path: Path, n_cells: int, *, spread: float = 0.0) -> None:
    """Write an h5ad file, some cells at a time; genes of the 20 types differ by exp(normal(0, spread))."""
    import anndata
    import pandas as pd
    from scipy import sparse

    popularity = np.random.default_rng(0).lognormal(0, 2.0, N_GENES)
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical.from_codes(
                np.arange(n_cells) * N_TYPES // n_cells, [f"type{i}" for i in range(N_TYPES)]
            )
        },
        index=pd.RangeIndex(n_cells).astype(str),
    )
    empty = sparse.csr_matrix((n_cells, N_GENES), dtype=np.uint16)
    anndata.AnnData(empty, obs=obs, var=pd.DataFrame(index=[f"gene{i}" for i in range(N_GENES)])).write_h5ad(path)
    boundaries = [np.zeros(1, dtype=np.int64)]
    with h5py.File(path, "r+") as file:
        for name, dtype in (("data", np.uint16), ("indices", np.int32)):
            del file[f"X/{name}"]
            file["X"].create_dataset(name, shape=(0,), maxshape=(None,), dtype=dtype, chunks=(2**20,))
        bounds = -(-np.arange(N_TYPES + 1) * n_cells // N_TYPES)
        pieces = [(kind, start) for kind in range(N_TYPES) for start in range(bounds[kind], bounds[kind + 1], PIECE)]
        for kind, start in pieces:
            size = min(PIECE, bounds[kind + 1] - start)
            profile = popularity * np.random.default_rng(kind).lognormal(0, spread, N_GENES)
            cumulative = np.cumsum(profile / profile.sum())
            indptr = np.zeros(size + 1, dtype=np.int64)
            indices, data = np.empty(size * 6_000, dtype=np.int32), np.empty(size * 6_000, dtype=np.uint16)
            n = draw_cells(start, UMIS, cumulative, indptr, indices, data)
            before = int(boundaries[-1][-1])
            for name, values in (("data", data), ("indices", indices)):
                file[f"X/{name}"].resize((before + n,))
                file[f"X/{name}"][before:] = values[:n]
            boundaries.append(indptr[1:] + before)
        del file["X/indptr"]
        file["X/indptr"] = np.concatenate(boundaries)


def raw(store: str) -> Callable[[], Iterator[int]]:
    """Return an epoch of annbatch alone."""
    import zarr
    from annbatch import DatasetCollection, Loader

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    options: dict[str, Any] = {"chunk_size": 256, "preload_nchunks": 64, "batch_size": BATCH, "shuffle": True}
    loader = Loader(**options, preload_to_gpu=False).use_collection(DatasetCollection(store, mode="r"))
    return lambda: (batch["X"].shape[0] for batch in loader)


def tokens(store: str, strategy: str, num_threads: int, rank: int, world_size: int) -> Callable[[], Iterator[int]]:
    """Return an epoch of batches of tokens, cells of like length together."""
    from scforge.data import CellOrder, open_cells
    from scforge.tokenizers import get_tokenizer
    from scforge.training import BatchLoader

    cells = open_cells(store, obs=[])
    tokenizer = get_tokenizer(strategy, cells.vocab, max_len=2048)
    order = CellOrder(
        np.arange(len(cells)),
        BATCH,
        chunk_size=cells.chunk_size,
        lengths=tokenizer.lengths(cells.n_expressed.astype(np.int32)),
        rank=rank,
        world_size=world_size,
    )
    loader = BatchLoader(cells, order, tokenizer, num_threads=num_threads)
    return lambda: (batch["input_ids"].shape[0] for batch in loader)


def ceiling(store: str) -> Callable[[], Iterator[int]]:
    """Return the unpacking of all chunks, in their order, by one thread."""
    import zarr

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "threading.max_workers": 1})
    group = zarr.open_group(store, mode="r")
    datasets = [group[name] for name in group.group_keys() if name.startswith("dataset_")]

    def read() -> Iterator[int]:
        for dataset in datasets:
            boundaries = dataset["X/indptr"][...]
            for start in range(0, len(boundaries) - 1, 16_384):
                stop = min(start + 16_384, len(boundaries) - 1)
                for part in ("data", "indices"):
                    dataset[f"X/{part}"][int(boundaries[start]) : int(boundaries[stop])]
                yield stop - start

    return read


def measure(what: str, store: str, num_threads: int, rank: int, world_size: int, repeats: int) -> dict[str, float]:
    """Time epochs in this process; return the median of each figure."""
    kinds: dict[str, Callable[[], Callable[[], Iterator[int]]]] = {
        "raw": lambda: raw(store),
        "ceiling": lambda: ceiling(store),
    }
    epoch = kinds.get(what, lambda: tokens(store, what, num_threads, rank, world_size))()
    sum(epoch())  # the files come into the page cache, and the compiled loops from theirs
    runs = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        n = sum(epoch())
        runs.append((n / (time.perf_counter() - wall), 1e6 * (time.process_time() - cpu) / n))
    status = Path("/proc/self/status").read_text().split()
    peak = int(status[status.index("VmHWM:") + 1]) / 1e6
    speed, cpu_us = np.median(runs, axis=0)
    return {"cells_per_s": float(speed), "cpu_us": float(cpu_us), "rss_gb": peak}


def in_process(*arguments: str, processes: int = 1) -> dict[str, float]:
    """Measure in processes of their own, several at once; speeds add up."""
    command = [sys.executable, "-W", "ignore", __file__, *arguments]
    running = [
        subprocess.Popen([*command, "--rank", str(rank), "--world", str(processes)], stdout=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
    speed = sum(one["cells_per_s"] for one in found)
    return {"cells_per_s": speed, **{k: max(one[k] for one in found) for k in ("cpu_us", "rss_gb")}}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=100_000, help="cells of the corpus (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("loader_corpus"), help="for corpus and store (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="epochs that are timed (%(default)s)")
    parser.add_argument("--memory", default="4GB", help="of the conversion (%(default)s)")
    for hidden, default in (
        ("--measure", None),
        ("--store", None),
        ("--threads", "1"),
        ("--rank", "0"),
        ("--world", "1"),
    ):
        parser.add_argument(hidden, default=default, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        found = measure(
            given.measure, given.store, int(given.threads), int(given.rank), int(given.world), given.repeats
        )
        print(json.dumps(found))
        return
    store = make_store(given.folder, given.cells, given.memory)
    size = sum(file.stat().st_size for file in store.rglob("*") if file.is_file()) / given.cells
    print(f"\n{given.cells:,} cells, {size:,.0f} bytes a cell on disk, {os.cpu_count()} cores\n")
    print("| loader | k cells/s | CPU us a cell | of annbatch alone | of the ceiling | peak RSS GB |")
    print("|---|---:|---:|---:|---:|---:|")
    common = ("--store", str(store), "--repeats", str(given.repeats))
    top = in_process("--measure", "ceiling", *common)
    alone = in_process("--measure", "raw", *common)
    rows = {"unpacking alone, one thread (the ceiling)": top, "annbatch alone, CSR batches": alone}
    for strategy in ("rank_value", "binned_expression"):
        for threads in (0, 1, 2):
            rows[f"scforge, {strategy}, {threads} threads"] = in_process(
                "--measure", strategy, "--threads", str(threads), *common
            )
    rows["scforge, rank_value, 2 processes, 1 thread each"] = in_process(
        "--measure", "rank_value", "--threads", "1", *common, processes=2
    )
    for name, row in rows.items():
        print(
            f"| {name} | {row['cells_per_s'] / 1e3:.1f} | {row['cpu_us']:.1f} "
            f"| {row['cells_per_s'] / alone['cells_per_s']:.2f} | {row['cells_per_s'] / top['cells_per_s']:.2f} "
            f"| {row['rss_gb']:.2f} |"
        )


def make_store(folder: Path, n_cells: int, memory: str) -> Path:
    """Return a store of the corpus; both are kept for the next run."""
    folder.mkdir(exist_ok=True, parents=True)
    corpus, store = folder / f"cells{n_cells}.h5ad", folder / f"cells{n_cells}.zarr"
    if store.exists():
        return store
    if not corpus.exists():
        write_corpus(corpus.with_suffix(".part"), n_cells)
        corpus.with_suffix(".part").rename(corpus)
    script = (
        "import sys, scforge; scforge.data.convert(sys.argv[1], sys.argv[2], memory=sys.argv[3], progress=False); "
        "print(open('/proc/self/status').read())"
    )
    start = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-c", script, str(corpus), str(store), memory]
    status = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    seconds, peak = time.perf_counter() - start, int(status[status.index("VmHWM:") + 1]) / 1e6
    print(f"Conversion: {n_cells / seconds / 1e3:.1f} k cells/s, peak RSS {peak:.2f} GB (memory={memory})")
    return store


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
