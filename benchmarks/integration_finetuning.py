"""Does ``finetune("integration")`` of a pretrained model give a better embedding than Harmony on its frozen embedding?

A model is pretrained on the cells of a data set of ``integration.py`` without labels and without batches: a small
transformer that predicts masked genes, and the light encoder with joint embedding; "light" is the default, which learns
across batches already. Rows: its frozen embedding, Harmony on it, and the model fine-tuned on the same cells, with and
without neighbors and SIGReg, each before and after the correction for batches that is fitted at the end. Data sets,
cells and scores are those of ``integration.py``; options may be chosen on ``TUNING`` only. The results go into
``benchmarks/results/integration_finetuning.csv``::

    python benchmarks/integration_finetuning.py --data FOLDER --runs 2
    python benchmarks/integration_finetuning.py --docs docs/reference_mapping.md
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
from _tables import difference, keep, means, read, rewrite, task_parser
from _transfer_tasks import BATCH
from integration import DATASETS, TUNING, both, components, halves_drawn, scores

from scforge.data.neighbors import harmony_correct
from scforge.models import Encoder

RESULTS = Path(__file__).parent / "results" / "integration_finetuning.csv"
KEYS = ["model", "dataset", "run", "method", "metric"]
TRAINING = {"progress_bar": False, "accelerator": "cpu"}
SMALL = {"hidden_dim": 64, "num_layers": 2, "num_heads": 2, "max_seq_len": 128, "n_top_genes": 1_000}
BASES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "transformer": ("transformer_encoder", {"objective": "masked_gene_prediction", **SMALL}, 10),
    "joint": ("gene_pooling", {"objective": "joint_embedding"}, 20),
    "light": ("gene_pooling", {}, None),
}
FINE_TUNED: dict[str, dict[str, float]] = {
    "fine-tuned": {},
    "fine-tuned, without SIGReg": {"alignment": 0.0},
    "fine-tuned, without neighbors": {"translation": 0.0, "alignment": 0.001},
}
FROZEN, HARMONY = "frozen", "Harmony on frozen"
METHODS = [FROZEN, HARMONY, *(name + ending for name in FINE_TUNED for ending in ("", ", not corrected"))]
EPOCHS = 40


def pretrained(cells: ad.AnnData, base: str, seed: int) -> Encoder:
    name, options, epochs = BASES[base]
    Encoder.setup_anndata(cells, batch_key=BATCH if base == "light" else None)
    model = Encoder(cells, name, seed=seed, **options)
    model.train(epochs, **TRAINING)
    return model


def embeddings(
    model: Encoder, cells: ad.AnnData, names: list[str], epochs: int
) -> Iterator[tuple[str, np.ndarray, float]]:
    """Return the name, the embedding and the CPU seconds beyond pretraining of each method."""
    frozen = model.get_latent_representation(key_added=None)
    yield FROZEN, frozen, 0.0
    began = time.process_time()
    corrected = harmony_correct(frozen, np.unique(cells.obs[BATCH], return_inverse=True)[1])
    yield HARMONY, corrected, time.process_time() - began
    for name in names:
        began = time.process_time()
        tuned = model.finetune(
            "integration", batch_key=BATCH, test_size=0.0, max_epochs=epochs, **FINE_TUNED[name], **TRAINING
        )
        embedding = tuned.get_latent_representation(key_added=None, correction=1)
        spent = time.process_time() - began
        yield name, embedding, spent
        yield f"{name}, not corrected", tuned.get_latent_representation(key_added=None), spent


def measured(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    for dataset in args.datasets:
        cells = DATASETS[dataset](args.data)
        for run in range(args.first_run, args.first_run + args.runs):
            pair = halves_drawn(cells, run)
            whole, before = both(pair), np.vstack(components(pair, 0, scale=False))
            for base in args.models:
                model = pretrained(whole, base, run)
                for method, embedding, spent in embeddings(model, whole, args.methods, args.epochs):
                    found = {**scores(embedding, before, whole, run), "cpu_seconds": spent}
                    print(
                        base, dataset, run, method, {name: round(value, 3) for name, value in found.items()}, flush=True
                    )
                    for metric, value in found.items():
                        row = {"model": base, "dataset": dataset, "run": run, "method": method}
                        yield row | {"metric": metric, "value": value}


def table(results: pd.DataFrame, argument: str) -> str:
    """Return means on the data sets used for tuning as Markdown, for an argument such as ``transformer_total``."""
    base, metric = argument.split("_", 1)
    return means(results[results["model"] == base], metric, "dataset", TUNING, METHODS)


def against_harmony(results: pd.DataFrame) -> str:
    """Return the total of each model and data set, with the paired difference from Harmony, as Markdown."""
    lines = ["| model | data set | n | frozen | Harmony on it | fine-tuned | difference |", f"|{'---|' * 7}"]
    of_total = results[results["metric"] == "total"]
    for base, dataset in product(BASES, DATASETS):
        part = of_total[(of_total["model"] == base) & (of_total["dataset"] == dataset)]
        wide = part.pivot(index="run", columns="method", values="value").reindex(columns=METHODS)
        wide = wide.dropna(subset=[HARMONY, "fine-tuned"])
        if wide.empty:
            continue
        values = " | ".join(f"{wide[name].mean():.3f}" for name in (FROZEN, HARMONY, "fine-tuned"))
        gains = wide["fine-tuned"] - wide[HARMONY]
        gain = difference(gains) if len(gains) > 1 else f"{gains.item():+.3f}, one run"
        name = dataset if dataset in TUNING else f"{dataset} (test)"
        lines.append(f"| {base} | {name} | {len(wide)} | {values} | {gain} |")
    return "\n".join(lines)


def main() -> None:
    parser = task_parser(__doc__, DATASETS, default=list(TUNING), runs=2, option="--datasets")
    parser.add_argument("--models", nargs="+", default=list(BASES), choices=list(BASES))
    parser.add_argument("--methods", nargs="+", default=list(FINE_TUNED), choices=list(FINE_TUNED))
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.docs is not None:
        kept = read(RESULTS, KEYS)
        for page in args.docs:
            rewrite(page, "tuned", partial(table, kept))
            rewrite(page, "against_harmony", lambda _: against_harmony(kept))
        return
    print(against_harmony(keep(measured(args), RESULTS, KEYS)))


if __name__ == "__main__":
    main()
