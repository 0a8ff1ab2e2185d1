"""Which options of the default objective help integration, before and after the correction for batches?

Each row is the default encoder with one change, trained on the cells of a data set that is used for tuning, and scored
on them as in ``integration.py``. The results go into ``benchmarks/results/integration_objective.csv``::

    python benchmarks/integration_objective.py --data FOLDER --runs 2
    python benchmarks/integration_objective.py --docs docs/objectives.md
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from _tables import keep, read, rewrite, task_parser
from _transfer_tasks import BATCH
from integration import TUNING, all_scores, both, components, halves_drawn

from scforge.models import Encoder

RESULTS = Path(__file__).parent / "results" / "integration_objective.csv"
KEYS = ["dataset", "run", "change", "correction", "metric"]
EPOCHS = 60
"""Epochs of the default on these data sets, which are small."""
METRICS = {
    "total": "total",
    "bio": "bio",
    "batch": "batch",
    "bras": "BRAS",
    "kmeans_ari": "ARI",
    "cpu_seconds": "CPU s",
}
CHANGES: dict[str, dict[str, Any]] = {
    "none": {},
    "`alignment=0.0003`": {"alignment": 0.0003},
    "`alignment=0.001`": {"alignment": 0.001},
    "`alignment=0.003`": {"alignment": 0.003},
    "`alignment=0.01`": {"alignment": 0.01},
    "`alignment=0.1`": {"alignment": 0.1},
    "`within=0`": {"within": 0},
    "`across=10`": {"across": 10},
    "`temperature=None`": {"temperature": None},
    "`translation=0.5`": {"translation": 0.5},
    "`agreement=0.3`": {"agreement": 0.3},
    "`gene_dropout=0.2`": {"gene_dropout": 0.2},
    "twice the epochs": {"epochs": 2 * EPOCHS},
}


def measured(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    for dataset in args.datasets:
        cells = TUNING[dataset](args.data)
        for run in range(args.first_run, args.first_run + args.runs):
            pair = halves_drawn(cells, run)
            whole, before = both(pair), np.vstack(components(pair, 0, scale=False))
            for change in args.changes:
                options = dict(CHANGES[change])
                epochs = options.pop("epochs", None)
                began = time.process_time()
                Encoder.setup_anndata(whole, batch_key=BATCH)
                model = Encoder(whole, objective={"name": "neighbor_denoising", **options}, seed=run)
                model.train(epochs, progress_bar=False, accelerator="cpu")
                spent = time.process_time() - began
                for correction in (0, 1):
                    embeddings = model.get_latent_representation(key_added=None, correction=correction)
                    found = {**all_scores(embeddings, before, whole, run), "cpu_seconds": spent}
                    print(
                        dataset, run, change, correction, {name: round(found[name], 3) for name in METRICS}, flush=True
                    )
                    for metric in METRICS:
                        row = {"dataset": dataset, "run": run, "change": change, "correction": correction}
                        yield row | {"metric": metric, "value": found[metric]}


def table(results: pd.DataFrame) -> str:
    """Return a row per change as Markdown: total of each data set, and means of all scores, over the same runs."""
    lines = [f"| change | {' | '.join([*TUNING, *METRICS.values()])} | corrected: total | bio | batch |"]
    lines.append(f"|{'---|' * (len(TUNING) + len(METRICS) + 4)}")
    means = results.groupby(["change", "correction", "metric", "dataset"])["value"].mean()
    for change in CHANGES:
        if change not in means.index.get_level_values("change"):
            continue
        plain, corrected = means[change, 0], means[change, 1]
        if set(plain["total"].index) != set(TUNING):
            continue
        values = [*plain["total"][list(TUNING)], *(plain[metric].mean() for metric in METRICS)]
        values += [corrected[metric].mean() for metric in ("total", "bio", "batch")]
        lines.append(f"| {change} | {' | '.join(f'{value:.3f}' for value in values)} |")
    return "\n".join(lines)


def main() -> None:
    parser = task_parser(__doc__, TUNING, default=list(TUNING), runs=2, option="--datasets")
    parser.add_argument("--changes", nargs="+", default=list(CHANGES), choices=list(CHANGES))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.docs is not None:
        for page in args.docs:
            rewrite(page, "changes", lambda _: table(read(RESULTS, KEYS)))
        return
    print(table(keep(measured(args), RESULTS, KEYS)))


if __name__ == "__main__":
    main()
