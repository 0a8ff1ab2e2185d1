"""What does a masked-gene training step cost, beside the way it is usually written?

scforge's encoder (fused attention, vocabulary head at labelled positions, batches of like length) against
``nn.TransformerEncoder`` with the head at every position on batches padded to the full length, of the same size, on the
same cells of PBMC 3k.
"""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import scforge
from scforge.training import get_objective
from scforge.training.datamodule import CellDataModule


class Plain(nn.Module):
    """The usual way: a stock encoder, the head over all positions."""

    def __init__(self, vocab_size: int, hidden: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.genes = nn.Embedding(vocab_size, hidden, padding_idx=0)
        self.positions = nn.Embedding(length, hidden)
        self.value = nn.Linear(1, hidden)
        layer = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(
            nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, vocab_size)
        )

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        short = self.length - batch["input_ids"].shape[1]
        ids, values = F.pad(batch["input_ids"], (0, short)), F.pad(batch["values"], (0, short))
        mask, labels = F.pad(batch["attention_mask"], (0, short)), F.pad(batch["labels"], (0, short), value=-100)
        hidden = self.genes(ids) + self.positions(torch.arange(self.length)) + self.value(values[..., None])
        hidden = self.encoder(hidden, src_key_padding_mask=~mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)


def measure(loss_of, module: nn.Module, batches: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """Return wall and CPU seconds a step, after one step to warm up."""
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    for index, batch in enumerate(batches):
        if index == 1:
            wall, cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
    steps = len(batches) - 1
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"hidden": 128, "layers": 4, "heads": 4, "length": 512, "batch": 32, "steps": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    adata = scforge.datasets.pbmc3k()
    scforge.models.Encoder.setup_anndata(adata)
    model = scforge.models.Encoder(
        adata,
        "transformer_encoder",
        {"name": "rank_value", "max_len": args.length},
        hidden_dim=args.hidden,
        num_layers=args.layers,
        num_heads=args.heads,
    )
    objective = get_objective("masked_gene_prediction")
    data = CellDataModule(
        model.cells(),
        model.tokenizer,
        objective,
        train_rows=np.arange(adata.n_obs),
        validation_rows=np.arange(0),
        batch_size=args.batch,
    )
    batches = [batch for batch, _ in zip(data.train_dataloader(), range(args.steps + 1), strict=False)]
    tokens = np.mean([int(batch["attention_mask"].sum()) for batch in batches[1:]])
    plain = Plain(len(model.vocab), args.hidden, args.layers, args.heads, args.length)
    rows = {
        "plain nn.TransformerEncoder, full head, padded": measure(plain.loss, plain, batches),
        "scforge, full head": measure(lambda b: model.module(**b).loss, model.module, batches),
        "scforge": measure(lambda b: objective.loss(model.module, b)[0], model.module, batches),
    }
    reference = next(iter(rows.values()))[1]
    print(f"{args}, vocabulary {len(model.vocab)}, {tokens:.0f} tokens a batch, {torch.get_num_threads()} threads\n")
    print("| training step | wall s | CPU s | tokens/s | CPU s, plain = 1 |\n|---|---|---|---|---|")
    for name, (wall, cpu) in rows.items():
        print(f"| {name} | {wall:.2f} | {cpu:.2f} | {tokens / wall:.0f} | {cpu / reference:.2f} |")


if __name__ == "__main__":
    main()
