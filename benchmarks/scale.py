"""What do conversion, loading, training, embedding and label transfer cost for 0.1, 1 and 10 million cells?

Makes cells from real ones, part by part: each adds the counts of two random cells of its type (PBMC 3k, which scforge
bundles), multiplies them by effects of its batch on genes, and thins them to about 500 expressed genes. Parts are
converted with ``append=True`` and deleted, so that the disk holds the store and one part. Rows are added to
``benchmarks/results/scale.csv`` at once, and a row that is there is not measured again::

    python benchmarks/scale.py --millions 0.1 1 10 --folder FOLDER
    python benchmarks/scale.py --tiny
    python benchmarks/scale.py --docs docs/scaling.md
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import anndata as ad
import numba
import numpy as np
import pandas as pd
from _tables import keep, read, rewrite
from scipy import sparse

RESULTS = Path(__file__).parent / "results" / "scale.csv"
KEYS = ["millions", "question", "metric"]
PART, N_BATCHES, BATCH_SIZE, N_GENES = 250_000, 16, 256, 500
STEPS = {"default": (200, 256), "transformer": (20, 32)}
"""Number of training steps that are timed, and of cells per step."""
TYPE, BATCH = "cell_type", "batch"
PEERS = {"annbatch": "annbatch alone", "scdataset": "scDataset", "annloader": "AnnLoader, backed"}
QUESTIONS: dict[str, list[str]] = {
    "conversion": ["cells_per_s", "peak_gb", "bytes_per_cell"],
    "rank tokens, one process": ["first_batch_s", "cells_per_s", "cpu_us", "peak_gb", "types_mixed", "batches_mixed"],
    "rank tokens, two processes": ["cells_per_s", "cpu_us", "peak_gb"],
    **{f"CSR, {peer}": ["first_batch_s", "cells_per_s", "cpu_us", "peak_gb"] for peer in PEERS.values()},
    "training, default encoder": ["first_batch_s", "cells_per_s", "cpu_us", "peak_gb"],
    "training, default encoder, DDP with two processes": ["first_batch_s", "cells_per_s", "cpu_us", "peak_gb"],
    "training, transformer of 4 layers": ["first_batch_s", "cells_per_s", "cpu_us", "peak_gb"],
    "embed, killed once": ["cells_per_s", "peak_gb"],
    "transfer_labels, at most a million query cells": ["cells_per_s", "peak_gb", "accuracy"],
    "evaluate, at most 100,000 cells": ["cells_per_s", "peak_gb"],
}
HEADS = {
    "first_batch_s": "s to the first minibatch",
    "cells_per_s": "cells/s",
    "cpu_us": "CPU µs per cell",
    "peak_gb": "peak memory, GB",
    "bytes_per_cell": "bytes per cell",
    "types_mixed": "types mixed",
    "batches_mixed": "batches mixed",
    "accuracy": "accuracy",
}


@numba.njit(cache=True)
def _mix(seed, indptr, genes, counts, pairs, batches, effects, depth, out_indptr, out_genes, out_counts):
    """Draw the counts of cells, each from a pair of real cells and the effects of its batch; return their number."""
    np.random.seed(seed)
    sums, size = np.zeros(effects.shape[1]), 0
    for cell in range(len(pairs)):
        share = depth * np.exp(np.random.normal(0.0, 0.3))
        for parent in pairs[cell]:
            for entry in range(indptr[parent], indptr[parent + 1]):
                sums[genes[entry]] += counts[entry]
        for parent in pairs[cell]:
            for entry in range(indptr[parent], indptr[parent + 1]):
                gene = genes[entry]
                if sums[gene] > 0:
                    drawn = np.random.poisson(share * sums[gene] * effects[batches[cell], gene])
                    sums[gene] = 0.0
                    if drawn > 0:
                        out_genes[size], out_counts[size] = gene, drawn
                        size += 1
        out_indptr[cell + 1] = size
    return size


def make_cells(n_cells: int, seed: int) -> ad.AnnData:
    """Return cells of unequally frequent types and batches; batches lack some types."""
    import scforge

    real = scforge.datasets.pbmc3k()
    matrix, types = sparse.csr_matrix(real.X), real.obs[TYPE].astype("category")
    members = [np.flatnonzero(types.cat.codes == code) for code in range(len(types.cat.categories))]
    effects = np.random.default_rng(0).lognormal(0.0, 0.25, (N_BATCHES, real.n_vars))
    has_type = np.random.default_rng(1).random((N_BATCHES, len(members))) < 0.85
    generator = np.random.default_rng([2, seed])
    batches = generator.choice(N_BATCHES, n_cells, p=np.arange(1, N_BATCHES + 1) / np.arange(1, N_BATCHES + 1).sum())
    shares = np.array([len(rows) for rows in members]) * has_type
    uniform = generator.random(n_cells)
    limits = np.cumsum(shares / shares.sum(axis=1, keepdims=True), axis=1)
    codes = np.minimum((uniform[:, None] > limits[batches]).sum(axis=1), len(members) - 1)
    pairs = np.empty((n_cells, 2), dtype=np.int64)
    for code, rows in enumerate(members):
        pairs[codes == code] = generator.choice(rows, ((codes == code).sum(), 2))
    indptr = np.zeros(n_cells + 1, dtype=np.int64)
    most = int(np.diff(matrix.indptr)[pairs].sum())
    genes, counts = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.uint16)
    depth = 0.4 * N_GENES / 500
    size = _mix(seed, matrix.indptr, matrix.indices, matrix.data, pairs, batches, effects, depth, indptr, genes, counts)
    cells = sparse.csr_matrix((counts[:size], genes[:size], indptr), shape=(n_cells, real.n_vars))
    cells.sort_indices()
    obs = pd.DataFrame(
        {
            TYPE: pd.Categorical.from_codes(codes, types.cat.categories),
            BATCH: pd.Categorical.from_codes(batches, [f"batch {number}" for number in range(N_BATCHES)]),
        },
        index=[f"part{seed}-{cell}" for cell in range(n_cells)],
    )
    return ad.AnnData(cells, obs=obs, var=pd.DataFrame(index=real.var_names))


def peak_gb() -> float:
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) / 1e6


def convert_parts(store: Path, n_cells: int) -> Iterator[dict[str, float]]:
    """Make the store part by part, each converted in a separate process; parts that are in it are left out."""
    from scforge.data.store import StoreInfo

    done = StoreInfo.read(store).n_cells if store.exists() else 0
    script = (
        "import sys, time; from scforge.data import convert; began = time.perf_counter(); "
        "convert(sys.argv[1], sys.argv[2], append=sys.argv[3] == 'append', progress=False); "
        "print(time.perf_counter() - began, open('/proc/self/status').read())"
    )
    seconds, peak, converted = 0.0, 0.0, 0
    while done < n_cells:
        size = min(PART, n_cells - done)
        part = store.with_name(f"part{done // PART}.h5ad")
        make_cells(size, done // PART).write_h5ad(part)
        how = "append" if done else "new"
        command = [sys.executable, "-W", "ignore", "-c", script, str(part), str(store), how]
        words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        seconds, converted, done = seconds + float(words[0]), converted + size, done + size
        peak = max(peak, int(words[words.index("VmHWM:") + 1]) / 1e6)
        part.unlink()
        print(f"{done:,} cells in the store, {size / float(words[0]):,.0f} cells/s", flush=True)
    os.sync()
    if converted >= n_cells / 2:  # also of a conversion that was resumed
        on_disk = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
        yield {"cells_per_s": converted / seconds, "peak_gb": peak, "bytes_per_cell": on_disk / n_cells}


def timed(batches: Callable[[], Iterator[int]], most: int) -> dict[str, float]:
    """Time an epoch, or its first `most` cells."""
    began = time.perf_counter()
    iterator = batches()
    next(iterator)
    first = time.perf_counter() - began
    began, cpu, n = time.perf_counter(), time.process_time(), 0
    for size in iterator:
        n += size
        if n >= most:
            break
    spent = time.perf_counter() - began
    return {"first_batch_s": first, "cells_per_s": n / spent, "cpu_us": 1e6 * (time.process_time() - cpu) / n}


def rank_tokens(store: str, rank: int, world_size: int, read_rows: list[np.ndarray]) -> Callable[[], Iterator[int]]:
    """Return an epoch of minibatches of tokens, which appends the cells of each to `read_rows`."""
    from scforge.data import CellOrder, open_cells
    from scforge.tokenizers import get_tokenizer
    from scforge.training import BatchLoader

    def batches() -> Iterator[int]:
        cells = open_cells(store, obs=[TYPE, BATCH])
        tokenizer = get_tokenizer("rank_value", cells.vocab, max_len=2048)
        order = CellOrder(
            np.arange(len(cells)), BATCH_SIZE, chunk_size=cells.chunk_size, rank=rank, world_size=world_size
        )

        def prepare(block: Any) -> Any:
            read_rows.append(block.rows)
            return tokenizer(block)

        for batch in BatchLoader(cells, order, prepare, num_threads=1):
            yield batch["input_ids"].shape[0]

    return batches


def mixed(codes: np.ndarray, minibatches: list[np.ndarray]) -> float:
    """Return how well classes are mixed, compared with minibatches drawn at random: 1, or less if they are not.

    The distance of a minibatch is half the sum of absolute differences between the shares of classes in it and in all
    cells.
    """
    shares = np.bincount(codes) / len(codes)

    def distance(rows: np.ndarray) -> float:
        return float(np.abs(np.bincount(codes[rows], minlength=len(shares)) / len(rows) - shares).sum() / 2)

    generator = np.random.default_rng(0)
    perfect = np.mean([distance(generator.integers(len(codes), size=BATCH_SIZE)) for _ in range(200)])
    return float(perfect / np.mean([distance(rows) for rows in minibatches[:2000]]))


def peer(name: str, store: str) -> Callable[[], Iterator[int]]:
    """Return an epoch of minibatches of counts by another package; some read the first dataset of the store only."""
    import zarr
    from annbatch import DatasetCollection, Loader
    from anndata.experimental import AnnLoader
    from torch.utils.data import DataLoader

    def annbatch() -> Iterator[int]:
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})  # makes the others slower
        options: dict[str, Any] = {"chunk_size": 256, "preload_nchunks": 64, "batch_size": BATCH_SIZE, "shuffle": True}
        for batch in Loader(**options, preload_to_gpu=False).use_collection(DatasetCollection(store, mode="r")):
            yield batch["X"].shape[0]

    def backed() -> ad.AnnData:
        group = zarr.open_group(f"{store}/dataset_0", mode="r")
        return ad.AnnData(ad.io.sparse_dataset(group["X"]), obs=ad.io.read_elem(group["obs"]))

    def scdataset() -> Iterator[int]:
        from scdataset import BlockShuffling, scDataset

        data = scDataset(
            backed(),
            BlockShuffling(block_size=16),
            batch_size=BATCH_SIZE,
            fetch_factor=64,
            fetch_transform=lambda cells: cells.to_memory(),
        )
        for batch in DataLoader(data, batch_size=None):
            yield batch.shape[0]

    def annloader() -> Iterator[int]:
        for batch in AnnLoader(backed(), batch_size=BATCH_SIZE, shuffle=True):
            yield batch.X.shape[0]  # reads the counts

    return {"annbatch": annbatch, "scdataset": scdataset, "annloader": annloader}[name]


def train(store: str, name: str, n_cells: int) -> dict[str, float]:
    """Time the start of training and its first steps after compilation."""
    import torch
    from lightning.pytorch.callbacks import Callback

    from scforge.models import Encoder
    from scforge.training import CellDataModule

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    steps, batch_size = STEPS[name]
    steps = min(steps, n_cells // batch_size)
    times: list[tuple[float, float]] = []

    class Clock(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            times.append((time.perf_counter(), time.process_time()))

    began = time.perf_counter()
    batch_key = BATCH if name == "default" else None  # embeds a sample at the end, for the correction of batches
    data = CellDataModule(store, batch_key=batch_key, validation_size=0.001, batch_size=batch_size)
    options: dict[str, Any] = {}
    if name == "transformer":
        sizes = {"hidden_dim": 128, "num_layers": 4, "num_heads": 4}
        options = {"architecture": "transformer_encoder", "tokenizer": {"name": "rank_value", "max_len": 512}, **sizes}
    model = Encoder(datamodule=data, **options)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    devices: dict[str, Any] = {"devices": world_size, "strategy": "ddp"} if world_size > 1 else {}
    model.train(max_steps=steps + 1, progress_bar=False, accelerator="cpu", callbacks=[Clock()], **devices)
    wall, cpu = np.subtract(times[-1], times[0])
    n = (len(times) - 1) * batch_size * world_size
    return {"first_batch_s": times[0][0] - began, "cells_per_s": n / wall, "cpu_us": 1e6 * cpu * world_size / n}


def light_model(store: Path, folder: Path) -> Path:
    """Train and save a small model of 20,000 cells, with labels, for embedding and label transfer."""
    import scforge
    from scforge.models import Encoder

    path = folder / "model"
    if not path.exists():
        cells = make_cells(20_000, 10_000)
        Encoder.setup_anndata(cells, batch_key=BATCH, labels_key=TYPE)
        model = Encoder(cells, vocab=scforge.data.open_cells(store, obs=[]).vocab)
        model.train(5, progress_bar=False, accelerator="cpu")
        model.save(path)
    return path


def embed(store: Path, n_cells: int) -> dict[str, float]:
    """Embed a store, killed after a while and resumed."""
    model, out = light_model(store, store.parent), store.with_name("embedded.zarr")
    shutil.rmtree(out, ignore_errors=True)
    command = ["-W", "ignore", "-m", "scforge", "embed", str(store), "-m", str(model), "-o", str(out)]
    began = time.perf_counter()
    first = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    blocks = out.with_name(f".{out.name}.embedding")
    while first.poll() is None and len(list(blocks.glob("*"))) < 4:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    script = (
        "import sys; from scforge.cli import main; code = main(sys.argv[1:]); "
        "print(open('/proc/self/status').read()); sys.exit(code)"
    )
    words = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *command[4:]], check=True, capture_output=True, text=True
    ).stdout.split()
    seconds = time.perf_counter() - began
    assert len(ad.read_zarr(out).obs) == n_cells
    shutil.rmtree(out)
    return {"cells_per_s": n_cells / seconds, "peak_gb": int(words[words.index("VmHWM:") + 1]) / 1e6}


def transfer(store: Path, n_cells: int) -> dict[str, float]:
    """Label at most a million query cells, 100,000 at a time, by a saved model with its reference cells."""
    from scforge.models import Encoder

    model = Encoder.load(light_model(store, store.parent))
    seconds, right, n = 0.0, 0, 0
    while n < min(n_cells, 1_000_000):
        size = min(100_000, n_cells - n)
        query = make_cells(size, 20_000 + n // 100_000)
        began = time.perf_counter()
        table = model.transfer_labels(query, labels_key=TYPE)
        seconds += time.perf_counter() - began
        right += int((table["label"].astype(str).to_numpy() == query.obs[TYPE].astype(str).to_numpy()).sum())
        n += size
    return {"cells_per_s": n / seconds, "accuracy": right / n}


def evaluate(store: Path, n_cells: int) -> dict[str, float]:
    """Score the embedding of at most 100,000 cells by label prediction and geometry, beside 30 components."""
    import scforge
    from scforge.models import Encoder

    cells = make_cells(min(n_cells, 100_000), 30_000)
    Encoder.load(light_model(store, store.parent)).get_latent_representation(cells, key_added="X_scforge")
    began = time.perf_counter()
    scforge.eval.evaluate(
        cells, ["cell_type_probe", "geometry"], "X_scforge", labels_key=TYPE, baselines=30, progress_bar=False
    )
    return {"cells_per_s": len(cells) / (time.perf_counter() - began)}


def measure(question: str, store: Path, n_cells: int, rank: int, world_size: int, most: int) -> dict[str, float]:
    """Answer one question in this process."""
    name = {f"CSR, {title}": key for key, title in PEERS.items()}.get(question)
    if name is not None:
        return timed(peer(name, str(store)), 20_000 if name == "annloader" else most) | {"peak_gb": peak_gb()}
    if question.startswith("rank tokens"):
        minibatches: list[np.ndarray] = []
        numbers = timed(rank_tokens(str(store), rank, world_size, minibatches), most // world_size)
        numbers["peak_gb"] = peak_gb()
        if world_size == 1:
            from scforge.data import open_cells

            obs = open_cells(store, obs=[TYPE, BATCH]).obs
            for key, metric in ((TYPE, "types_mixed"), (BATCH, "batches_mixed")):
                numbers[metric] = mixed(obs[key].cat.codes.to_numpy(), minibatches)
        return numbers
    if question.startswith("training"):
        name = "default" if "default" in question else "transformer"
        return train(str(store), name, n_cells) | {"peak_gb": peak_gb()}
    if question.startswith("embed"):
        return embed(store, n_cells)
    if question.startswith("evaluate"):
        return evaluate(store, n_cells) | {"peak_gb": peak_gb()}
    return transfer(store, n_cells) | {"peak_gb": peak_gb()}


def in_processes(question: str, store: Path, n_cells: int, most: int) -> dict[str, float] | None:
    """Measure in one process, or in two at once whose speeds add up; None where a peer is not installed."""
    if PEERS["scdataset"] in question and importlib.util.find_spec("scdataset") is None:
        print(f"left out, because it is not installed: {question}", flush=True)
        return None
    arguments = [__file__, "--measure", question, "--store", str(store), "--n-cells", str(n_cells)]
    arguments += ["--most", str(most)]
    python = [sys.executable, "-W", "ignore"]
    if "DDP" in question:
        launcher = [*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        running = [subprocess.Popen([*launcher, *arguments], stdout=subprocess.PIPE, text=True)]
    else:
        world_size = 2 if "two processes" in question else 1
        of_ranks = [[*arguments, "--world", str(world_size), "--rank", str(rank)] for rank in range(world_size)]
        running = [subprocess.Popen([*python, *rank], stdout=subprocess.PIPE, text=True) for rank in of_ranks]
    outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        sys.exit(f"scale.py: failed: {question}")
    parts = pd.DataFrame([json.loads(output.splitlines()[-1]) for output in outputs])
    return {name: float(parts[name].sum() if name == "cells_per_s" else parts[name].max()) for name in parts}


def measured(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    done = read(RESULTS, KEYS)
    for millions in args.millions:
        n_cells = round(millions * 1e6)
        store = args.folder / f"cells{n_cells}.zarr"
        args.folder.mkdir(exist_ok=True, parents=True)
        has = set(done.loc[done["millions"] == millions, "question"])
        for numbers in convert_parts(store, n_cells):
            print(millions, "conversion", {name: round(value, 3) for name, value in numbers.items()}, flush=True)
            yield from lines(millions, "conversion", numbers)
        for question in args.questions:
            if question == "conversion" or (question in has and not args.tiny):
                continue
            numbers = in_processes(question, store, n_cells, args.most)
            if numbers is not None:
                print(millions, question, {name: round(value, 3) for name, value in numbers.items()}, flush=True)
                yield from lines(millions, question, numbers)
        if args.delete:
            shutil.rmtree(store)


def lines(millions: float, question: str, numbers: dict[str, float]) -> Iterator[dict[str, object]]:
    for metric, value in numbers.items():
        yield {"millions": millions, "question": question, "metric": metric, "value": value}


def table(results: pd.DataFrame) -> str:
    """Return one row per question and number of cells as Markdown."""
    text = ["| | million cells | " + " | ".join(HEADS.values()) + " |", "|---|---|" + "---|" * len(HEADS)]
    for question in QUESTIONS:
        rows = results[results["question"] == question]
        for millions, numbers in rows.groupby("millions"):
            values = numbers.set_index("metric")["value"]
            shown = ["" if metric not in values else f"{values[metric]:,.{digits(metric)}f}" for metric in HEADS]
            text.append(f"| {question} | {millions:g} | " + " | ".join(shown) + " |")
    return "\n".join(text)


def digits(metric: str) -> int:
    return {"cells_per_s": 0, "bytes_per_cell": 0}.get(metric, 3 if metric == "accuracy" else 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", nargs="+", type=float, default=[0.1])
    parser.add_argument("--folder", type=Path, default=Path("scale_cells"), help="for the stores (%(default)s)")
    parser.add_argument("--questions", nargs="+", default=list(QUESTIONS), choices=list(QUESTIONS))
    parser.add_argument("--most", type=int, default=2_000_000, help="cells of an epoch that are timed (%(default)s)")
    parser.add_argument("--delete", action="store_true", help="delete each store after its rows")
    parser.add_argument("--tiny", action="store_true", help="3,000 cells in a temporary folder; no results are kept")
    parser.add_argument("--docs", nargs="+", type=Path, help="pages to write the table into; nothing is measured")
    for option, kind in (("--measure", str), ("--store", Path), ("--n-cells", int), ("--rank", int), ("--world", int)):
        parser.add_argument(option, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.measure:
        numbers = measure(args.measure, args.store, args.n_cells, args.rank, args.world, args.most)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(numbers))
    elif args.docs:
        for page in args.docs:
            rewrite(page, "scale", lambda _: table(read(RESULTS, KEYS)))
    elif args.tiny:
        with tempfile.TemporaryDirectory() as folder:
            args.folder, args.millions = Path(folder), [0.003]
            rows = pd.DataFrame(measured(args))
        print(table(rows))
    else:
        print(table(keep(measured(args), RESULTS, KEYS)))


if __name__ == "__main__":
    main()
