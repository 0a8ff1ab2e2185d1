"""What does a training cost, all of it: reading a store, tokenizing, the steps, validation, and keeping its state?

Makes a corpus of 20 planted cell types (about 1,200 genes a cell), converts it into a store, and trains the same
transformer on the same masked cells in the same order:

- ``engine``: ``Encoder.train``, as ``scforge train`` does it, with its log and the states to go on with;
- ``usual way``: a loop around ``nn.TransformerEncoder``: every cell padded to the longest, the head at all positions,
  32 bits, AdamW; batches come ready from the same loader;
- ``bare steps``: the engine's own module and optimizer, on batches that are ready before the clock starts.

Each row is a process of its own. Times are those of the steps, and of what happens between them; the losses are those
of the same held-out cells after the same number of cells. Two processes (DDP) have half a batch and one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from loader import write_corpus
from models import Plain
from torch import nn

HELD_OUT = 256


def parts(args: argparse.Namespace, *, batch_size: int, n_cells: int) -> tuple[Any, Any]:
    """Return a model and the data module of its training, of so many cells of the store."""
    from scforge.data import open_cells
    from scforge.models import Encoder
    from scforge.training import CellDataModule

    cells = open_cells(args.store, obs=[])
    data = CellDataModule(
        cells,
        train_rows=np.arange(HELD_OUT, HELD_OUT + n_cells),
        validation_rows=np.arange(HELD_OUT),
        batch_size=batch_size,
    )
    model = Encoder(
        None,
        "transformer_encoder",
        {"name": "rank_value", "max_len": args.length},
        datamodule=data,
        hidden_dim=args.hidden,
        num_layers=args.layers,
        num_heads=args.heads,
        max_seq_len=args.length,
    )
    return model, data


class Clock(Callback):
    """The time from the first step to the last, which the start of processes and the validation are not part of."""

    def on_train_epoch_start(self, *args: Any) -> None:
        self.start = time.process_time(), time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.cpu, self.wall = time.process_time() - self.start[0], time.perf_counter() - self.start[1]


def engine(args: argparse.Namespace) -> dict[str, float]:
    """Train with the engine."""
    from scforge.training.monitoring import make_loggers

    model, _ = parts(args, batch_size=args.batch // args.processes, n_cells=args.cells)
    folder = Path(args.folder) / f"run_{args.precision}_{args.processes}"
    clock = Clock()
    model.train(
        1,
        lr=args.lr,
        schedule="constant",
        precision=args.precision,
        accelerator="cpu",
        devices=args.processes,
        progress_bar=False,
        early_stopping=False,
        checkpoint_dir=folder,
        checkpoint_every_n_steps=50,
        overwrite=True,
        logger=make_loggers(["csv"], folder / "logs"),
        callbacks=[clock],
    )
    return figures(args, clock.cpu, clock.wall, float(model.history_["validation_loss"]["validation_loss"].iloc[-1]))


def usual(args: argparse.Namespace) -> dict[str, float]:
    """Train in the way that is usual."""
    from scforge.models._utils import init_weights

    class Usual(Plain):
        def init_token_prior(self, counts: torch.Tensor) -> None:
            shares = counts.double() + 1
            with torch.no_grad():
                self.head[-1].bias.copy_((shares / shares.sum()).log())

    model, data = parts(args, batch_size=args.batch, n_cells=args.cells)
    objective = model.spec.build_objective()
    data.bind(model.tokenizer, objective, cells=model.open_cells(data.cells))
    torch.manual_seed(0)
    module = Usual(len(model.vocab), args.hidden, args.layers, args.heads, args.length)
    module.apply(init_weights)
    objective.initialize(module, data.bound.sample(10_000, rows=data.train_rows, seed=0), model.tokenizer)
    decayed = [p for p in module.parameters() if p.ndim > 1]
    rest = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr)

    def padded(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        missing = args.length - batch["input_ids"].shape[1]
        fill = {"labels": -100}
        return {name: nn.functional.pad(part, (0, missing), value=fill.get(name, 0)) for name, part in batch.items()}

    cpu, wall = time.process_time(), time.perf_counter()
    for batch in data.train_dataloader():
        optimizer.zero_grad()
        module.loss(padded(batch)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    module.eval()
    losses = []
    with torch.no_grad():
        for batch in data.val_dataloader():
            losses += [float(module.loss(padded(batch)))] * len(batch["input_ids"])
    return figures(args, cpu, wall, float(np.mean(losses)))


def bare(args: argparse.Namespace) -> dict[str, float]:
    """Take the engine's steps, without the engine."""
    from scforge.training.optimizers import make_optimizer

    model, data = parts(args, batch_size=args.batch, n_cells=args.cells)
    objective = model.spec.build_objective()
    data.bind(model.tokenizer, objective, cells=model.open_cells(data.cells))
    batches = list(data.train_dataloader())
    module = model.module.train()
    optimizer = make_optimizer(module, name="adamw", lr=args.lr, weight_decay=0.01)
    cpu, wall = time.process_time(), time.perf_counter()
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16-mixed"):
            loss, _ = objective.loss(module, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    return figures(args, time.process_time() - cpu, time.perf_counter() - wall, float("nan"))


def figures(args: argparse.Namespace, cpu: float, wall: float, loss: float) -> dict[str, float]:
    """Return what a row shows."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu": cpu,
        "wall": wall,
        "cells": args.cells / wall,
        "rss": max(own.ru_maxrss, others.ru_maxrss) * 1024 / 1e9,
        "loss": loss,
    }


ROWS = [
    ("usual way", usual, "32-true", 1),
    ("bare steps", bare, "32-true", 1),
    ("engine", engine, "32-true", 1),
    ("engine, 2 processes", engine, "32-true", 2),
    ("engine, 1 process of 1 thread", engine, "32-true", 1),
    ("bare steps, bf16", bare, "bf16-mixed", 1),
    ("engine, bf16", engine, "bf16-mixed", 1),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"hidden": 128, "layers": 4, "heads": 4, "length": 512, "batch": 32, "cells": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--corpus", type=int, default=100_000, help="cells of the store")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--folder", default="benchmark_training", help="where the corpus and the runs go")
    parser.add_argument("--rows", default="", help="only rows whose name has this in it")
    parser.add_argument("--one", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.store = str(Path(args.folder) / f"store_{args.corpus}.zarr")
    if args.one is not None:
        _, run, args.precision, args.processes = ROWS[args.one]
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = run(args)
        from lightning.fabric.utilities.rank_zero import rank_zero_only

        if rank_zero_only.rank in (0, None):
            print(json.dumps(found))
        return
    if not Path(args.store).exists():
        from scforge.data import convert

        Path(args.folder).mkdir(parents=True, exist_ok=True)
        corpus = Path(args.folder) / "corpus.h5ad"
        write_corpus(corpus, args.corpus, spread=1.0)
        convert(str(corpus), args.store, progress=False)
        corpus.unlink()
    sizes = f"{args.corpus:,} cells in the store, {args.cells:,} trained on in batches of {args.batch}"
    print(f"{sizes}; torch {torch.__version__}\n")
    print("| training | cells/s | CPU s | wall s | peak RSS, GB | held-out loss | cells/s of the usual way |")
    print("|---|---|---|---|---|---|---|")
    rates: dict[str, float] = {}
    for number, (name, _, _, processes) in enumerate(ROWS):
        if args.rows not in name:
            continue
        command = [sys.executable, *sys.argv, "--one", str(number)]
        threads = 1 if "1 thread" in name or processes > 1 else os.cpu_count()
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        found = json.loads(done.stdout.splitlines()[-1])
        rates[name] = found["cells"]
        ratio = f"{found['cells'] / rates['usual way']:.1f} x" if "usual way" in rates else ""
        loss = "" if np.isnan(found["loss"]) else f"{found['loss']:.3f}"
        print(
            f"| {name} | {found['cells']:.1f} | {found['cpu']:.1f} | {found['wall']:.1f} | {found['rss']:.2f} | {loss} "
            f"| {ratio} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
