"""How good is the embedding of the light encoder, beside what is simpler, and how long does the whole table take?

For PBMC 3k, PBMC of eight donors (folds hold out whole donors) and the five cell lines of sc_mixology (five batches,
two protocols) a light encoder is trained without labels, three times with different seeds. ``cell_type_probe``,
``scib`` and ``geometry`` score it, the same network with random weights, highly variable genes, PCA, Harmony and scVI,
all on the same cells. It writes one report per data set::

    python benchmarks/evaluation.py --data FOLDER --output reports

FOLDER has the h5ad files; PBMC 3k comes with the package.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path

from scforge.datasets import get_card, load
from scforge.models import Encoder
from scforge.workflows import evaluate_models

DATASETS = ("pbmc3k", "kang_ctrl_8donor", "sc_mixology")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("SCFORGE_DATA"), help="folder with the h5ad files")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=list(DATASETS))
    parser.add_argument("--trainings", type=int, default=3, help="trainings with different seeds")
    parser.add_argument("--epochs", type=int, default=None, help="epochs; the default is the model's")
    parser.add_argument("--output", type=Path, default=None, help="folder for the reports, one file a data set")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in args.datasets:
        card, adata = get_card(name), load(name, args.data)
        keys = {"labels_key": card.labels_key, "batch_key": card.batch_key, "groups_key": card.groups_key}
        Encoder.setup_anndata(adata, labels_key=card.labels_key, batch_key=card.batch_key)
        start, cpu = time.perf_counter(), time.process_time()
        models = []
        for seed in range(args.trainings):
            models.append(Encoder(adata, seed=seed))
            models[-1].train(args.epochs, progress_bar=False)
        trained, trained_cpu = time.perf_counter() - start, time.process_time() - cpu
        start, cpu = time.perf_counter(), time.process_time()
        report = evaluate_models({"scforge": models}, adata, **keys, title=f"Embeddings of {card.title}")
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        times = f"trained in {trained:.0f} s ({trained_cpu:.0f} CPU s), evaluated in {seconds:.0f} s ({cpu:.0f} CPU s)"
        print(report.to_markdown(), f"\n{name}: {times}\n", sep="", flush=True)
        if args.output is not None:
            command = f"python benchmarks/evaluation.py --data FOLDER --datasets {name} --output reports"
            report.facts["made by"] = f"`{command}`"
            args.output.mkdir(parents=True, exist_ok=True)
            (args.output / f"{name}.md").write_text(report.to_markdown())


if __name__ == "__main__":
    main()
