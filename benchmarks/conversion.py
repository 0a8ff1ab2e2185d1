"""What does it cost to convert an h5ad file into a store, compared with annbatch's own writer on the same file?

Simulates cells as ``benchmarks/loader.py`` does (about 1,200 genes a cell), and converts them with
``scforge.data.convert`` (all checks, medians, hashes) and with ``DatasetCollection.add_adatas`` of annbatch, both
shuffled and with chunks of 256 cells. Each row is a separate process, which converts a small file before it is timed,
so that imports and compilation do not count. On a machine that others use, only CPU time is comparable.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from _tables import keep
from loader import write_corpus

RESULTS = Path(__file__).parent / "results" / "conversion.csv"
WRITERS = ("scforge", "annbatch")
SMALL = 2_000


def convert(writer: str, corpus: str, store: Path, memory: str) -> None:
    """Write a shuffled store of the cells in an h5ad file."""
    if writer == "scforge":
        from scforge.data import convert

        convert(corpus, store, memory=memory, progress=False)
        return
    import zarr
    from annbatch import DatasetCollection

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    DatasetCollection(store).add_adatas([corpus], n_obs_per_chunk=256, shard_size=2**16, dataset_size=10**6)


def measure(writer: str, small: str, corpus: str, store: Path, memory: str) -> dict[str, float]:
    """Convert a small file, then time the conversion of another one in this process."""
    convert(writer, small, store.with_suffix(".small.zarr"), memory)
    wall, cpu = time.perf_counter(), time.process_time()
    convert(writer, corpus, store, memory)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    status = Path("/proc/self/status").read_text().split()
    return {"seconds": wall, "cpu_seconds": cpu, "rss_gb": int(status[status.index("VmHWM:") + 1]) / 1e6}


def corpus_of(folder: Path, n_cells: int) -> Path:
    """Return the file of simulated cells, which is kept for the next run."""
    corpus = folder / f"cells{n_cells}.h5ad"
    if not corpus.exists():
        write_corpus(corpus.with_suffix(".part"), n_cells)
        corpus.with_suffix(".part").rename(corpus)
    return corpus


def main() -> None:
    """Print the table, and write its figures to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=[50_000, 100_000], help="cells of the files")
    parser.add_argument("--folder", type=Path, default=Path("loader_corpus"), help="for the files (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="conversions of each file (%(default)s)")
    parser.add_argument("--memory", default="4GB", help="of scforge (%(default)s)")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        writer, small, corpus, store = given.measure
        print(json.dumps(measure(writer, small, corpus, Path(store), given.memory)))
        return
    given.folder.mkdir(exist_ok=True, parents=True)
    small = corpus_of(given.folder, SMALL)
    print("| cells | writer | CPU us a cell | k cells/s | peak RSS GB | bytes a cell |\n|---:|---|---:|---:|---:|---:|")
    for n_cells in given.cells:
        corpus = corpus_of(given.folder, n_cells)
        for run in range(given.runs):
            for writer in WRITERS:  # in turn, so that a busy machine is busy for both
                store = given.folder / f"{writer}.zarr"
                command = [sys.executable, "-W", "ignore", __file__, "--memory", given.memory, "--measure", writer]
                done = subprocess.run(
                    [*command, str(small), str(corpus), str(store)], check=True, capture_output=True, text=True
                )
                figures = json.loads(done.stdout.splitlines()[-1])
                size = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
                for left in (store, store.with_suffix(".small.zarr")):
                    shutil.rmtree(left)
                keys = {"cells": n_cells, "writer": writer, "run": run}
                figures["bytes_per_cell"] = size / n_cells
                lines = [{**keys, "metric": metric, "value": value} for metric, value in figures.items()]
                results = keep(lines, RESULTS, [*keys, "metric"])
        for writer in WRITERS:
            rows = results[(results["cells"] == n_cells) & (results["writer"] == writer)]
            row = rows.groupby("metric")["value"].median()
            print(
                f"| {n_cells:,} | {writer} | {1e6 * row['cpu_seconds'] / n_cells:.0f} "
                f"| {n_cells / row['seconds'] / 1e3:.1f} | {row['rss_gb']:.2f} | {row['bytes_per_cell']:,.0f} |"
            )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
