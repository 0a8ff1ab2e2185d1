"""How many bits does a byte of this repository's own source take, by a model trained on the rest of it?

``scforge soma train`` runs as a user would run it, on one thread. A tenth of the bytes is held out, in whole files.
Beside the model, on the same held-out files: the entropy of single bytes, bytes predicted from the two before them
(counts of the training files, interpolated by Witten and Bell's rule), and gzip and xz, which compress each file by
itself. The bits of the model are counted in full: the end of each file, and 8 bits for the first byte of each sequence.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from pathlib import Path

from scforge.soma import read_documents
from scforge.soma.byte_data import hold_out
from scforge.soma.documents import Document

ROOT = Path(__file__).parents[1]


def source_files() -> list[Path]:
    """Return the Python files of the repository."""
    command = ["git", "ls-files", "src/*.py", "tests/*.py", "benchmarks/*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [path for name in listed.splitlines() if (path := ROOT / name).stat().st_size]


def entropy(train: list[Document], held_out: list[Document]) -> float:
    """Return the bits of a byte by the shares of single bytes, each counted once more than it is."""
    counts = Counter(b"".join(one.data for one in train)) + Counter(range(256))
    total, data = counts.total(), b"".join(one.data for one in held_out)
    return sum(-math.log2(counts[byte] / total) for byte in data) / len(data)


def two_before(train: list[Document], held_out: list[Document]) -> float:
    """Return the bits of a byte by counts behind the two, one and no bytes before it."""
    counts: dict[bytes, Counter[int]] = defaultdict(Counter)
    for one in train:
        for place, byte in enumerate(one.data):
            for order in range(min(place, 2) + 1):
                counts[one.data[place - order : place]][byte] += 1
    totals = {context: (seen.total(), len(seen)) for context, seen in counts.items()}
    bits, n_bytes = 0.0, 0
    for one in held_out:
        n_bytes += len(one.data)
        for place, byte in enumerate(one.data):
            share = 1 / 256
            for order in range(min(place, 2) + 1):
                context = one.data[place - order : place]
                if context in totals:
                    total, kinds = totals[context]
                    share = (counts[context][byte] + kinds * share) / (total + kinds)
            bits -= math.log2(share)
    return bits / n_bytes


def compressed(held_out: list[Document], by: str) -> float:
    """Return the bits of a byte of files that are compressed one by one, without headers."""
    sizes = 0
    for one in held_out:
        if by == "gzip":
            sizes += len(zlib.compress(one.data, 9, wbits=-15))
        else:
            filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
            sizes += len(lzma.compress(one.data, format=lzma.FORMAT_RAW, filters=filters))
    return 8 * sizes / sum(len(one.data) for one in held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=300, help="steps (%(default)s)")
    parser.add_argument("--embedding-dim", type=int, default=128, help="width (%(default)s)")
    parser.add_argument("--num-layers", type=int, default=4, help="layers (%(default)s)")
    parser.add_argument("--optimizer", default="muon", help="adamw or muon (%(default)s)")
    parser.add_argument("--nice", type=int, default=0, help="niceness of the training (%(default)s)")
    arguments = parser.parse_args()
    files = source_files()
    train, held_out = hold_out(read_documents(files, kind="bytes"), 0.1, seed=0)
    told = [f"{sum(len(one.data) for one in part):,} bytes in {len(part)} files" for part in (train, held_out)]
    print(f"Trained on {told[0]}, held out {told[1]}.\n")
    with tempfile.TemporaryDirectory() as folder:
        names = ("max_steps", "embedding_dim", "num_layers", "optimizer")
        flags = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in names]
        command = [sys.executable, "-m", "scforge", "soma", "train", *map(str, files), "--kind", "bytes", "-o", folder]
        start = time.perf_counter()
        subprocess.run(
            [*command, "--overwrite", "--device", "cpu", *flags],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            preexec_fn=lambda: os.nice(arguments.nice),
        )
        wall = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        facts = json.loads((Path(folder) / "final" / "config.json").read_text())
    bits = facts["training"]["bits_per_byte"]
    rows = {
        "single bytes": entropy(train, held_out),
        "gzip -9": compressed(held_out, "gzip"),
        "xz -9e": compressed(held_out, "xz"),
        "the two bytes before": two_before(train, held_out),
        f"soma, {arguments.max_steps} steps of {arguments.optimizer}": bits,
    }
    print("\n| | bits per byte |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value:.2f} |")
    print(
        f"\n{used.ru_utime + used.ru_stime:.0f} s of one CPU ({wall:.0f} s in all), {used.ru_maxrss / 2**20:.1f} GiB."
    )


if __name__ == "__main__":
    main()
