"""What do a training step and `encode` of soma cost, beside the published package ``soma-models``?

Both have the same weights and tokens; without dropout their losses have to be equal. Each row runs in a process of its
own, so that its peak of memory is its own, and rows of both take turns, so that a busy machine is busy for both. A
training step is the loss, the gradients and AdamW. The default is a model of 50 million parameters at sequence 1,024.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

THEIRS, OURS = "soma_models.v1.torch", "scforge.soma.v1.torch"


@dataclass(frozen=True)
class Job:
    """What is timed."""

    name: str
    training: bool
    dropout: float = 0.0
    bf16: bool = False
    checkpointing: bool = False


JOBS = [
    Job("encode", training=False),
    Job("encode, bf16", training=False, bf16=True),
    Job("training step", training=True),
    Job("training step, dropout 0.1", training=True, dropout=0.1),
    Job("training step, bf16", training=True, bf16=True),
    Job("training step, checkpointing", training=True, checkpointing=True),
]


def resident() -> float:
    """Return the memory that this process has now, in GB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e9


def peak() -> float:
    """Return the most memory that this process had so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def run(job: Job, package: str, args: argparse.Namespace) -> dict[str, float]:
    """Time a job with one of the two packages."""
    soma = __import__(package, fromlist=["Model"])
    torch.set_num_threads(args.threads)
    sizes = {
        "embedding_dim": args.dim,
        "pwff_hidden_dim": 4 * args.dim,
        "num_layers": args.layers,
        "num_heads": args.heads,
    }
    torch.manual_seed(0)
    options = {"gradient_checkpointing": True} if job.checkpointing and package == OURS else {}
    model = soma.Model(soma.ModelConfig(dropout_rate=job.dropout, **sizes), **options).to(args.device)
    regularizer = soma.SIGReg(soma.SIGRegConfig()).to(args.device)
    # The package draws attention dropout by its attribute and not by F's default; both follow train() and eval().
    model.train(job.training)
    tokens = torch.randint(0, 256, (args.batch, args.length + 1), device=args.device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(args.length, device=args.device).expand(args.batch, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if job.training else None
    losses: list[float] = []
    before = resident()

    def step() -> None:
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=job.bf16):
            if optimizer is None:
                with torch.no_grad():
                    losses.append(float(model.encode(inputs, positions).square().mean()))
                return
            loss, _ = soma.compute_loss(model, regularizer, inputs, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))

    step()  # allocates the moments of AdamW
    times = []
    for _ in range(args.repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu, wall = (sorted(values)[len(values) // 2] for values in zip(*times, strict=True))
    most = torch.cuda.max_memory_allocated() / 1e9 if args.device == "cuda" else peak()
    n_parameters = sum(p.numel() for p in model.parameters())
    return {"cpu": cpu, "wall": wall, "peak": most, "before": before, "loss": losses[-1], "parameters": n_parameters}


def in_a_process(job: Job, package: str, arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, *arguments, "--one", json.dumps([asdict(job), package])]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", nargs="+", default=[job.name for job in JOBS], help="rows, by name")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        job, package = json.loads(args.one)
        print(json.dumps(run(Job(**job), package, args)))
        return
    print("| | package | CPU s | wall s | peak RSS, GB | of it by the step | loss | times as fast (CPU) | (wall) |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for job in JOBS:
        if job.name not in args.jobs:
            continue
        results = {package: in_a_process(job, package, sys.argv[1:]) for package in (THEIRS, OURS)}
        for package, row in results.items():
            numbers = f"{row['cpu']:.2f} | {row['wall']:.2f} | {row['peak']:.2f} | {row['peak'] - row['before']:.2f}"
            gains = " | ".join(f"{results[THEIRS][key] / row[key]:.2f}" for key in ("cpu", "wall"))
            print(f"| {job.name} | {package.split('.')[0]} | {numbers} | {row['loss']:.5f} | {gains} |", flush=True)
    print(f"\n{row['parameters'] / 1e6:.1f} million parameters, {args.batch} x {args.length} tokens.")


if __name__ == "__main__":
    main()
