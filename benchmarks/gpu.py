"""What do training steps cost on one GPU, how near are they to what it can multiply, and do they wait for cells?

Random cells have a quarter to all of the named number of genes; cells and tokens a second count no padding. `MFU` is
the arithmetic that a step needs (as in ``models.py``; for ScDiVa matrix products as torch counts them) over the peak of
the data sheet, `of matmul` over that of large matrix products of the same dtype, measured right before. Peers in the
same run: ``nn.TransformerEncoder``, and the BERT of ``transformers`` (Geneformer's architecture) with torch's attention
and, where ``flash-attn`` is installed, with that. Rows "from a store" are whole trainings by ``Encoder.train``;
`waiting` is the share of their time in which no batch was ready.

Each row is a process of its own, and is written into ``benchmarks/results/gpu.csv`` as soon as it is measured::

    python benchmarks/gpu.py --budget 480                # or: make gpu
    python benchmarks/gpu.py --tiny                      # everything, tiny, on a CPU; results are thrown away
    python benchmarks/gpu.py --docs docs/scaling.md      # rewrite the table behind the comment '% gpu'
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from _tables import rewrite
from models import Row, ceiling, flops, make_batch, make_loss
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

RESULTS = Path(__file__).parent / "results" / "gpu.csv"
VOCAB, N_BATCHES = 20_004, 4
MISSING = "flash-attn is not installed"
PEAKS = {"H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L40": 181, "L4": 121, "RTX 4090": 165}
PEAKS |= {"T4": 65}
"""Dense TFLOP/s of 16-bit products with the first name that is in the device's, from the data sheets."""


@dataclass(frozen=True)
class Case:
    """A row of the table: a training step, or a training."""

    name: str
    size: str
    model: str = "transformer_encoder"
    options: tuple[tuple[str, Any], ...] = ()
    bf16: bool = True
    compiled: bool = False
    ragged: bool = True


@dataclass(frozen=True)
class Size:
    """Width, layers and heads, genes of the longest cells, and cells of a batch on a device of 80 GB."""

    hidden: int
    layers: int
    heads: int
    length: int
    batch: int
    vocab: int = VOCAB


SIZES = {
    "10M, 2,048 genes": Size(256, 6, 4, 2_048, 32),
    "51M, 1,024 genes": Size(512, 12, 8, 1_024, 64),
    "104M, 2,048 genes": Size(768, 12, 12, 2_048, 32),
    "base, 1,200 genes": Size(1_024, 24, 16, 1_200, 16),
    "base, all genes": Size(1_024, 24, 16, 20_000, 512),
    "default": Size(0, 0, 0, 0, 256),
}
TINY = Size(16, 1, 2, 32, 4, 200)
SMALL, MIDDLE, LARGE = list(SIZES)[:3]
AR = (("n_bins", 51), ("pooling", "mean"))
CASES = [
    Case("encoder", SMALL),
    Case("nn.TransformerEncoder", SMALL, "plain"),
    Case("encoder from a store", SMALL, "train"),
    Case("encoder", LARGE),
    Case("nn.TransformerEncoder", LARGE, "plain"),
    Case("encoder", MIDDLE),
    Case("nn.TransformerEncoder", MIDDLE, "plain"),
    Case("default encoder from a store", "default", "train"),
    Case("encoder", SMALL, compiled=True),
    Case("encoder, padded", SMALL, options=(("unpad", False),)),
    Case("encoder, no padding", SMALL, ragged=False),
    Case("encoder", SMALL, bf16=False),
    Case("nn.TransformerEncoder", SMALL, "plain", bf16=False),
    Case("BERT of transformers, sdpa", SMALL, "sdpa"),
    Case("BERT of transformers, flash-attn", SMALL, "flash_attention_2"),
    Case("masked autoencoder", SMALL, "masked_autoencoder"),
    Case("autoregressive", SMALL, "autoregressive_transformer", AR),
    Case("ScDiVa, tokens", "base, 1,200 genes", "scdiva"),
    Case("ScDiVa, vector", "base, all genes", "scdiva"),
    Case("encoder", LARGE, compiled=True),
    Case("encoder", MIDDLE, compiled=True),
    Case("autoregressive", SMALL, "autoregressive_transformer", AR, compiled=True),
    Case("masked autoencoder", SMALL, "masked_autoencoder", compiled=True),
    Case("ScDiVa, tokens", "base, 1,200 genes", "scdiva", compiled=True),
    Case("encoder", LARGE, bf16=False),
    Case("default encoder from a store", "default", "train", bf16=False),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=480, help="seconds after which no further row is begun")
    parser.add_argument("--rows", default="", help="only rows with this in their name")
    parser.add_argument("--tiny", action="store_true", help="all rows in tiny sizes on a CPU, for their code alone")
    parser.add_argument("--docs", type=Path, help="rewrite the table of this page behind the comment '%% gpu'")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.docs is not None:
        if (n := rewrite(args.docs, "gpu", lambda _: table(RESULTS))) != 1:
            sys.exit(f"{args.docs} has {n} tables behind a comment '% gpu'; give a page with one.")
    elif args.one is not None:
        keep(RESULTS, measured(CASES[args.one], "cuda"))
    elif args.tiny:
        torch._dynamo.config.disable = True  # compiling takes longer than all the rest
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "gpu.csv"
            for case in CASES:
                if args.rows in case.name:
                    keep(results, measured(case, "cpu"))
            print(table(results))
            rows = pd.read_csv(results)
            failed = rows[rows["note"].notna() & (rows["note"] != MISSING)]
            if len(failed):
                sys.exit(f"rows failed:\n{failed[['row', 'size', 'note']].to_string()}")
    elif not torch.cuda.is_available():
        sys.exit("there is no CUDA device; --tiny runs everything in tiny sizes on the CPU.")
    else:
        run_all(args)
        print(table(RESULTS))


def run_all(args: argparse.Namespace) -> None:
    """Measure each row in a process of its own until the time is up."""
    end = time.monotonic() + args.budget
    for number, case in enumerate(CASES):
        if args.rows not in case.name:
            continue
        if (left := end - time.monotonic()) < 20:
            print(f"The time is up before {case.name!r}, {case.size}; continue with --rows.", file=sys.stderr)
            return
        note = ""
        try:
            done = subprocess.run([sys.executable, __file__, "--one", str(number)], timeout=min(left, 150), check=False)
            note = f"Error: exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            if left < 150:
                print(f"The time is up in {case.name!r}, {case.size}; continue with --rows.", file=sys.stderr)
                return
            note = "Error: took too long"
        if note:
            keep(RESULTS, described(case, torch.device("cuda")) | {"note": note})


def described(case: Case, device: torch.device) -> dict[str, Any]:
    """Return what names a row."""
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {"row": case.name, "size": case.size, "how": how_of(case), "device": where, "torch": torch.__version__}


def how_of(case: Case) -> str:
    return ("bf16" if case.bf16 else "fp32") + (", compiled" if case.compiled else "")


def measured(case: Case, device_type: str) -> dict[str, Any]:
    """Return the row of a case; an error becomes its note."""
    device = torch.device(device_type)
    row = described(case, device)
    tiny = device.type == "cpu"
    size = SIZES[case.size]
    if tiny:
        size = TINY
    else:
        share = torch.cuda.get_device_properties(device).total_memory / 80e9 / (1 if case.bf16 else 2)
        size = replace(size, batch=max(2, int(size.batch * min(1.0, share))))
    if case.model == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        return row | {"note": MISSING}
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    try:
        peak = ceiling(device.type, dtype, 256 if tiny else None)
        if not tiny:
            torch.cuda.reset_peak_memory_stats()
        found = (
            trained(case, size, tiny) if case.model == "train" else stepped(case, size, device, 0.0 if tiny else 3.0)
        )
    except Exception as error:  # noqa: BLE001 - a row that fails must not take the others with it
        return row | {"note": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    spec = next((value for name, value in PEAKS.items() if name in row["device"]), None) if case.bf16 else None
    rate = found.pop("flops")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if tiny else torch.cuda.max_memory_allocated()
    return row | found | {
        "tflops": rate / 1e12,
        "of_product": rate / peak,
        "mfu": None if spec is None else rate / 1e12 / spec,
        "memory_gb": memory / 1e9,
        "note": "",
    }  # fmt: skip


def stepped(case: Case, size: Size, device: torch.device, seconds: float) -> dict[str, Any]:
    """Time training steps on batches that are on the device already."""
    args = argparse.Namespace(**vars(size))
    row = Row(
        case.name,
        case.model,
        dict(case.options),
        bf16=case.bf16,
        ragged=case.ragged,
        full_head=case.model in ("plain", "sdpa", "flash_attention_2"),
        mask_ratio=0.75 if case.model == "masked_autoencoder" else 0.15,
    )
    batches = [make_batch(row, args, seed) for seed in range(N_BATCHES)]
    n_tokens = [float(batch["attention_mask"].sum()) for batch in batches]
    if case.name == "ScDiVa, vector":
        profiles = [torch.rand(args.batch, args.length) * (torch.rand(args.batch, args.length) < 0.07) for _ in batches]
        batches, n_tokens = [{"input_ids": part, "target": part} for part in profiles], [float(args.batch)] * N_BATCHES
    module, loss_of = build(case, row, args)
    module.to(device).train()
    batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=case.bf16):
            loss = loss_of(batch)
        loss.backward()
        optimizer.step()

    if case.model == "scdiva":
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=case.bf16):
            needed = [3.0 * counted(lambda batch=batch: loss_of(batch)) for batch in batches]
    else:
        needed = [flops(row, args, batch) for batch in batches]
    with compiled(module, case.compiled):
        for batch in batches * 2:  # the first ones make kernels and plans
            step(batch)
        wait(device)
        start, n_rounds = time.perf_counter(), 0
        while not n_rounds or time.perf_counter() - start < seconds:
            for batch in batches:
                step(batch)
            wait(device)
            n_rounds += 1
        wall = (time.perf_counter() - start) / n_rounds
    return {
        "batch": args.batch,
        "parameters_million": sum(p.numel() for p in module.parameters()) / 1e6,
        "cells_per_second": args.batch * N_BATCHES / wall,
        "tokens_per_second": sum(n_tokens) / wall,
        "seconds_per_step": wall / N_BATCHES,
        "flops": sum(needed) / wall,
    }


def build(case: Case, row: Row, args: argparse.Namespace) -> tuple[nn.Module, Callable[[dict], torch.Tensor]]:
    """Return the module of a case, and the loss of a batch."""
    if case.model in ("sdpa", "flash_attention_2"):
        from transformers import BertConfig, BertForMaskedLM

        names = {"vocab_size": "vocab", "hidden_size": "hidden", "num_hidden_layers": "layers"}
        names |= {"num_attention_heads": "heads", "max_position_embeddings": "length"}
        sizes = {name: getattr(args, own) for name, own in names.items()} | {"intermediate_size": 4 * args.hidden}
        bert = BertForMaskedLM._from_config(BertConfig(**sizes), attn_implementation=case.model)
        keys = ("input_ids", "attention_mask", "labels")
        return bert, lambda batch: bert(**{key: batch[key].long() for key in keys}).loss
    if case.model == "scdiva":
        from scforge.models import ScDiVaConfig

        tokens = case.name == "ScDiVa, tokens"
        sizes = {"hidden_size": args.hidden, "num_hidden_layers": args.layers, "num_attention_heads": args.heads}
        n_genes = args.vocab - 4 if tokens else args.length
        config = ScDiVaConfig(num_genes=n_genes, max_tokens=args.length, mode=case.name.split()[-1], **sizes)
        module = config.build()
        return module, lambda batch: module(**batch, return_logits=False).loss
    return make_loss(row, args)


def counted(job: Callable[[], Any]) -> float:
    """Return the floating-point operations of the matrix products of a job."""
    with FlopCounterMode(display=False) as counter:
        job()
    return float(counter.get_total_flops())


@contextlib.contextmanager
def compiled(module: nn.Module, wanted: bool) -> Iterator[None]:
    """Compile layers as ``Encoder.train(compile=True)`` does."""
    if not wanted:
        yield
        return
    from scforge.training.devices import compiled as as_in_training

    with as_in_training(module, True):
        yield


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def trained(case: Case, size: Size, tiny: bool) -> dict[str, Any]:
    """Train from a store, and return the means of the log."""
    from loader import write_corpus

    from scforge.data import convert
    from scforge.models import Encoder
    from scforge.training import CellDataModule, make_loggers

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_corpus(folder / "corpus.h5ad", 400 if tiny else 20_000, spread=1.0)
        convert(str(folder / "corpus.h5ad"), folder / "store.zarr", progress=False)
        data = CellDataModule(folder / "store.zarr", batch_size=size.batch, validation_size=0.05)
        if case.size == "default":
            model = Encoder(datamodule=data, n_top_genes=50) if tiny else Encoder(datamodule=data)
        else:
            sizes = {"hidden_dim": size.hidden, "num_layers": size.layers, "num_heads": size.heads}
            tokens = {"name": "rank_value", "max_len": size.length}
            parts = {"architecture": "transformer_encoder", "max_seq_len": size.length, **sizes}
            model = Encoder(tokenizer=tokens, objective="masked_gene_prediction", datamodule=data, **parts)
        model.train(
            max_steps=6 if tiny else 150,
            precision="bf16-mixed" if case.bf16 else "32-true",
            accelerator="cpu" if tiny else "gpu",
            logger=make_loggers(["csv"], folder / "logs"),
            log_every_n_steps=2 if tiny else 25,
            progress_bar=False,
        )
        log = pd.read_csv(folder / "logs" / "metrics.csv").dropna(subset="cells_per_second")
    from scforge.training.monitoring import peak_flops

    of_log = log.iloc[1:].mean(numeric_only=True)  # the first steps make kernels, and fill the queue of batches
    return {
        "batch": size.batch,
        "parameters_million": sum(p.numel() for p in model.module.parameters()) / 1e6,
        "cells_per_second": of_log["cells_per_second"],
        "tokens_per_second": of_log["tokens_per_second"],
        "seconds_per_step": size.batch / of_log["cells_per_second"],
        "waiting": of_log["waiting"],
        "flops": of_log["utilization"] * peak_flops(model.device, "bf16-mixed" if case.bf16 else "32-true"),
    }


def keep(path: Path, row: dict[str, Any]) -> None:
    """Write a row at once, in the place of an earlier one of the same name on the same device."""
    print(
        " ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in row.items()
        )
    )
    rows = [pd.DataFrame([row])]
    if path.exists():
        rows.insert(0, pd.read_csv(path))
    path.parent.mkdir(exist_ok=True)
    kept = pd.concat(rows).drop_duplicates(["row", "size", "how", "device"], keep="last")
    kept.to_csv(path, index=False, float_format="%.5g")


COLUMNS = {
    "row": "training step",
    "size": "size",
    "how": "computed in",
    "batch": "batch",
    "cells_per_second": "cells/s",
    "tokens_per_second": "tokens/s",
    "mfu": "MFU",
    "of_product": "of matmul",
    "memory_gb": "peak memory, GB",
    "waiting": "waiting",
}


def table(path: Path) -> str:
    """Return the rows of each device as a table."""
    shown = [f"| {' | '.join(COLUMNS.values())} |", f"|{'---|' * len(COLUMNS)}"]
    if not path.exists():
        return "\n".join([*shown, f"| not measured yet {'| ' * (len(COLUMNS) - 1)}|"])
    kept = pd.read_csv(path)
    places = {(case.name, case.size, how_of(case)): place for place, case in enumerate(CASES)}
    kept.index = [places.get(key, len(CASES)) for key in zip(kept["row"], kept["size"], kept["how"], strict=True)]
    for device, rows in kept.sort_index().groupby("device", sort=False):
        shown.append(f"| **{device}**, torch {rows['torch'].iloc[-1]} {'| ' * (len(COLUMNS) - 1)}|")
        for row in rows.to_dict("records"):
            values = [text_of(name, row.get(name)) for name in COLUMNS]
            if isinstance(row.get("note"), str):
                values[3] = row["note"].replace("|", "/")
            shown.append(f"| {' | '.join(values)} |")
    return "\n".join(shown)


def text_of(name: str, value: Any) -> str:
    if value is None or value != value:
        return ""
    if name in ("mfu", "of_product", "waiting"):
        return f"{100 * value:.0f}%"
    if name == "memory_gb":
        return f"{value:.1f}"
    return value if isinstance(value, str) else f"{value:,.0f}"


if __name__ == "__main__":
    main()
