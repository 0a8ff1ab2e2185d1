"""What does a training step of each architecture cost, beside the way it is usually written?

The usual way is ``nn.TransformerEncoder`` on padded batches with the vocabulary head at every position. All rows have
the same sizes and tokens, and each runs in a process of its own, so that its peak of memory is its own. Utilization is
the arithmetic that the row needs (matrix products of tokens that are no padding; three times the forward pass) over
that of large matrix products of the same dtype in the same seconds: CPU seconds on a CPU, wall seconds on CUDA.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

MASKED = 0.15


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    model: str
    options: dict
    bf16: bool = False
    ragged: bool = False
    full_head: bool = False
    mask_ratio: float = MASKED


ROWS = [
    Row("plain nn.TransformerEncoder, full head", "plain", {}, full_head=True),
    Row("the same, bf16", "plain", {}, bf16=True, full_head=True),
    Row("encoder, full head", "transformer_encoder", {}, full_head=True),
    Row("encoder", "transformer_encoder", {}),
    Row("encoder, bf16", "transformer_encoder", {}, bf16=True),
    Row("encoder, gradient checkpointing", "transformer_encoder", {"gradient_checkpointing": True}),
    Row("autoregressive", "autoregressive_transformer", {"n_bins": 51, "pooling": "mean"}),
    Row("autoregressive, bf16", "autoregressive_transformer", {"n_bins": 51, "pooling": "mean"}, bf16=True),
    Row("masked autoencoder, 0.75 hidden", "masked_autoencoder", {}, mask_ratio=0.75),
    Row("masked autoencoder, bf16", "masked_autoencoder", {}, bf16=True, mask_ratio=0.75),
    Row("ragged: plain, full head", "plain", {}, ragged=True, full_head=True),
    Row("ragged: encoder, padded", "transformer_encoder", {"unpad": False}, ragged=True),
    Row("ragged: encoder, unpadded", "transformer_encoder", {"unpad": True}, ragged=True),
    Row("ragged: encoder, unpadded, bf16", "transformer_encoder", {"unpad": True}, bf16=True, ragged=True),
]


class Plain(nn.Module):
    """The usual way: a stock encoder, the head over all positions."""

    def __init__(self, vocab_size: int, hidden: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.genes = nn.Embedding(vocab_size, hidden, padding_idx=0)
        self.positions = nn.Embedding(length, hidden)
        self.value = nn.Linear(1, hidden)
        layer = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(
            nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, vocab_size)
        )

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        hidden = self.genes(ids) + self.positions.weight[: ids.shape[1]] + self.value(batch["values"][..., None])
        hidden = self.encoder(hidden, src_key_padding_mask=None if mask.all() else ~mask)
        logits = self.head(hidden).flatten(0, 1).float()
        return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100)


def make_batch(row: Row, args: argparse.Namespace, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random tokens, some of them hidden."""
    torch.manual_seed(seed)
    shape = (args.batch, args.length)
    lengths = torch.randint(args.length // 4, args.length + 1, (args.batch, 1)) if row.ragged else args.length
    mask = torch.arange(args.length) < torch.as_tensor(lengths).expand(args.batch, 1)
    ids = torch.randint(4, args.vocab, shape) * mask
    bins = torch.randint(1, 51, shape) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "values": bins.float()}
    if row.model == "autoregressive_transformer":
        return batch | {"labels": ids.masked_fill(~mask, -100), "bin_ids": bins}
    hidden = (torch.rand(shape) < row.mask_ratio) & mask
    if row.model == "masked_autoencoder":
        return batch | {
            "masked_positions": hidden,
            "value_labels": bins * hidden,
            "labels": ids.masked_fill(~hidden, -100),
        }
    labels = ids.masked_fill(~hidden, -100)
    return batch | {"input_ids": ids.masked_fill(hidden, 2), "values": batch["values"] * ~hidden, "labels": labels}


def make_loss(row: Row, args: argparse.Namespace) -> tuple[nn.Module, Callable[[dict], torch.Tensor]]:
    if row.model == "plain":
        plain = Plain(args.vocab, args.hidden, args.layers, args.heads, args.length)
        return plain, plain.loss
    from scforge.config.schema import ModelConfig
    from scforge.models import get_model

    sizes = {"hidden_dim": args.hidden, "num_layers": args.layers, "num_heads": args.heads, "max_seq_len": args.length}
    if row.model == "masked_autoencoder":
        sizes["decoder_layers"] = args.layers
    module = get_model(row.model, ModelConfig(vocab_size=args.vocab, **sizes, **row.options))
    return module, lambda batch: module(**batch, return_logits=row.full_head).loss


def flops(row: Row, args: argparse.Namespace, batch: dict[str, torch.Tensor]) -> float:
    """Return the floating-point operations of a training step that matrix products of tokens need."""
    mask = batch["attention_mask"]
    lengths, n_tokens = mask.sum(dim=1).double(), float(mask.sum())
    n_targets = float((batch["labels"] != -100).sum())

    def layers(lengths: torch.Tensor, width: int) -> float:
        causal = 0.5 if row.model == "autoregressive_transformer" else 1.0
        return args.layers * float(24 * width**2 * lengths.sum() + 4 * width * causal * lengths.square().sum())

    if row.model == "masked_autoencoder":
        visible = (mask & ~batch["masked_positions"]).sum(dim=1).double()
        small = args.hidden // 2
        forward = layers(visible, args.hidden) + layers(lengths, small) + 2 * args.hidden * small * n_tokens
        return 3 * (forward + 2 * small**2 * n_targets)
    head = 2 * args.hidden * (args.hidden + args.vocab)
    return 3 * (layers(lengths, args.hidden) + head * (n_tokens if row.full_head else n_targets))


def ceiling(device: str, dtype: torch.dtype, size: int | None = None) -> float:
    """Return the operations a second of large matrix products: a CPU second, or a wall second of CUDA."""
    size = size or (4096 if device == "cpu" else 8192)
    one, two = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(4):
        start = _now(device)
        for _ in range(3):
            one @ two
        best = max(best, 3 * 2 * size**3 / (_now(device) - start))
    return best


def _now(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(row: Row, args: argparse.Namespace) -> dict[str, float]:
    """Run the steps of a row in this process."""
    module, loss_of = make_loss(row, args)
    module.to(args.device).train()
    batch = {name: tensor.to(args.device) for name, tensor in make_batch(row, args).items()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(args.device, torch.bfloat16, enabled=row.bf16):
            loss = loss_of(batch)
        loss.backward()
        optimizer.step()

    for _ in range(args.warmup):
        step()
    cpu, wall = time.process_time(), time.perf_counter()
    busy = _now(args.device)
    for _ in range(args.steps):
        step()
    busy = (_now(args.device) - busy) / args.steps
    cpu, wall = (time.process_time() - cpu) / args.steps, (time.perf_counter() - wall) / args.steps
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if args.device != "cpu":
        memory = torch.cuda.max_memory_allocated()
    dtype = torch.bfloat16 if row.bf16 else torch.float32
    needed = flops(row, args, batch)
    return {
        "cpu": cpu,
        "wall": wall,
        "tokens": float(batch["attention_mask"].sum()),
        "memory": memory / 1e9,
        "utilization": needed / busy / ceiling(args.device, dtype),
        "gflop": needed / 1e9,
        "parameters": sum(p.numel() for p in module.parameters()) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"vocab": 20_004, "hidden": 128, "layers": 4, "heads": 4, "length": 512, "batch": 32}
    for name, default in {**sizes, "steps": 5, "warmup": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", default="", help="only rows whose name has this in it")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many runs of each row counts")
    parser.add_argument("--one", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(ROWS[args.one], args)))
        return
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{', '.join(f'{name} {getattr(args, name)}' for name in sizes)}; {where}, torch {torch.__version__}\n")
    memory = "peak GB of device" if args.device == "cuda" else "peak RSS, GB"
    print(f"| training step | CPU s | wall s | tokens/s | {memory} | GFLOP | utilization | plain / this |")
    print("|---|---|---|---|---|---|---|---|")
    plain: dict[bool, float] = {}
    key = "wall" if args.device == "cuda" else "cpu"
    for number, row in enumerate(ROWS):
        if args.rows not in row.name:
            continue
        runs = []
        for _ in range(args.repeats):
            command = [sys.executable, *sys.argv, "--one", str(number)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                break
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        if len(runs) < args.repeats:
            print(f"| {row.name} | failed with exit code {done.returncode} |", flush=True)
            continue
        best = min(runs, key=lambda run: run[key])
        if row.model == "plain" and not row.bf16:
            plain[row.ragged] = best[key]
        ratio = f"{plain[row.ragged] / best[key]:.1f}" if row.ragged in plain else ""
        print(
            f"| {row.name} | {best['cpu']:.2f} | {best['wall']:.2f} | {best['tokens'] / best['wall']:.0f} "
            f"| {best['memory']:.2f} | {best['gflop']:.0f} | {100 * best['utilization']:.0f} % | {ratio} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
