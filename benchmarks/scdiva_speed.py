"""How fast does ScDiVa embed cells, how near is that to what the machine can multiply, and what memory does it take?

Cells come as expression over all genes. The ceiling is a large matrix product of the same type, measured in turn with
the model. Arithmetic of a cell in mode "vector" is what is done: ``2 G H + 20 L H^2`` for G genes, width H, L layers.
The publication computes ``24 L H^2``, keys and queries included, which one token alone does not need and the module
leaves out. Memory is the peak of a process of its own::

    python benchmarks/scdiva_speed.py --sizes laptop released base --threads 1
    python benchmarks/scdiva_speed.py --device cuda --dtype bfloat16 --batch 4096
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch

SIZES = {
    "laptop": {"num_genes": 2_000, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    "released": {"num_genes": 41_818, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8},
    "base": {},
    "large": {"num_genes": 30_000, "hidden_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 32},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["laptop", "base"], choices=list(SIZES))
    parser.add_argument("--mode", default="vector", choices=["vector", "tokens"])
    parser.add_argument("--max-tokens", type=int, default=1_200)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(measured(args.child, args)))
        return
    print("| size | parameters | cells/s | GFLOP a cell | GFLOP/s | ceiling, GFLOP/s | share | peak memory, GB |")
    print("|---|---|---|---|---|---|---|---|")
    for size in args.sizes:
        found = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--child", size], capture_output=True, text=True, check=False
        )
        if found.returncode:
            sys.exit(found.stderr)
        row = json.loads(found.stdout.splitlines()[-1])
        print(
            f"| {size} | {row['parameters']:,} | {row['cells']:,.0f} | {row['gflop']:.3f} | {row['speed']:,.0f} "
            f"| {row['ceiling']:,.0f} | {row['speed'] / row['ceiling']:.0%} | {row['memory']:.2f} |",
            flush=True,
        )


def measured(size: str, args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one size."""
    from scforge.models import ScDiVaConfig

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    config = ScDiVaConfig(**SIZES[size], mode=args.mode, max_tokens=args.max_tokens)
    torch.set_default_dtype(dtype)
    with device:
        model = config.build().eval()
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(0)
    expressed = torch.rand((args.batch, config.num_genes), generator=generator) < 0.07
    x = (torch.rand((args.batch, config.num_genes), generator=generator) * 4 * expressed).to(device, dtype)
    width = 2_048 if device.type == "cpu" else 8_192
    one, other = (torch.randn((width, width), device=device, dtype=dtype) for _ in range(2))
    best = {"model": float("inf"), "ceiling": float("inf")}
    with torch.inference_mode():
        for _ in range(args.repeats + 1):
            for name, job in {"model": lambda: model.encode(x), "ceiling": lambda: one @ other}.items():
                wait(device)
                start = time.perf_counter()
                job()
                wait(device)
                best[name] = min(best[name], time.perf_counter() - start)
    hidden, layers, genes = config.hidden_size, config.num_hidden_layers, config.num_genes
    tokens = 1 if args.mode == "vector" else 1 + min(args.max_tokens, int(expressed.sum(dim=1).float().mean()))
    of_layer = 20 * hidden**2 if args.mode == "vector" else 24 * hidden**2 + 4 * tokens * hidden
    per_cell = 2 * genes * hidden + tokens * layers * of_layer
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "cells": args.batch / best["model"],
        "gflop": per_cell / 1e9,
        "speed": args.batch * per_cell / best["model"] / 1e9,
        "ceiling": 2 * width**3 / best["ceiling"] / 1e9,
        "memory": peak / 1e9,
    }


def wait(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
