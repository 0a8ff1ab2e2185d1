"""Does the default Encoder integrate batches better with labels of some cells, compared with scANVI and scPoli?

In each run a random half of the cells of each type, at least one, keeps its label. Every method learns from all cells,
with the seed of the run; rows "with labels", scANVI and scPoli learn from these labels as well. All scores are of the
other half alone: scib-metrics' on up to 3,000 of these cells, as in ``integration.py``, and the macro-F1 of their
labels, which a logistic regression (`f1_linear`) or the 15 nearest neighbors (`f1_knn`) predict from the half with
labels. scANVI starts from "scVI, larger" and trains for the 20 epochs of its tutorials, scPoli for the 50 of its own;
it needs the package ``scarches``. The data sets are those of ``integration.py`` that are used for tuning: the weight
was chosen on them. The results go into ``benchmarks/results/integration_labels.csv``, from which ``--docs`` makes
tables::

    python benchmarks/integration_labels.py --data FOLDER --runs 3
    python benchmarks/integration_labels.py --docs docs/embeddings.md
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import transfer
from _tables import keep, means, read, rewrite, task_parser
from _transfer_tasks import BATCH, LABEL, UNLABELED, with_hidden_labels
from integration import DATASETS, TUNING, scores
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from scforge.models import Encoder

RESULTS = Path(__file__).parent / "results" / "integration_labels.csv"


def scforge(told: ad.AnnData, seed: int, *, correction: float, **options: object) -> np.ndarray:
    cells = told.copy()
    Encoder.setup_anndata(cells, batch_key=BATCH)
    model = transfer.trained_once(told, lambda: trained(cells, seed, options), f"scforge {options}")
    return model.get_latent_representation(key_added=None, correction=correction)


def trained(cells: ad.AnnData, seed: int, options: dict[str, object]) -> Encoder:
    model = Encoder(cells, objective={"name": "neighbor_denoising", **options}, seed=seed)
    model.train(progress_bar=False, accelerator="cpu")
    return model


def scvi(told: ad.AnnData, seed: int, *, learns_labels: bool) -> np.ndarray:
    return transfer.scvi_of_all(told, told, seed, learns_labels=learns_labels)


def scpoli(told: ad.AnnData, seed: int) -> np.ndarray:
    is_labeled = (told.obs[LABEL] != UNLABELED).to_numpy()
    cells, model = transfer.scpoli_of_reference(told[:, transfer.variable(told)], is_labeled, seed)
    model.model.eval()
    return model.get_latent(cells, mean=True)


METHODS: dict[str, Callable[[ad.AnnData, int], np.ndarray]] = {
    "scforge": partial(scforge, correction=0.0),
    "scforge, corrected": partial(scforge, correction=1.0),
    "scforge with labels": partial(scforge, correction=0.0, labels_key=LABEL),
    "scforge with labels, corrected": partial(scforge, correction=1.0, labels_key=LABEL),
    "scVI, larger": partial(scvi, learns_labels=False),
    "scANVI": partial(scvi, learns_labels=True),
    "scPoli": scpoli,
}


def predicted(embedding: np.ndarray, labels: np.ndarray, is_hidden: np.ndarray) -> dict[str, float]:
    """Return the macro-F1 of hidden labels, predicted from the others."""
    found = {}
    linear = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2_000))
    for name, classifier in {"f1_linear": linear, "f1_knn": KNeighborsClassifier(15)}.items():
        guess = classifier.fit(embedding[~is_hidden], labels[~is_hidden]).predict(embedding[is_hidden])
        found[name] = f1_score(labels[is_hidden], guess, average="macro", zero_division=0)
    return found


def measured(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    for dataset in args.datasets:
        cells = DATASETS[dataset](args.data)
        cells.obs_names_make_unique()
        before, _ = transfer.components((cells, cells), 0, scale=False)
        labels = cells.obs[LABEL].astype(str).to_numpy()
        for run in range(args.first_run, args.first_run + args.runs):
            told, is_hidden = with_hidden_labels(cells, run)
            for method in args.methods:
                embedding = METHODS[method](told, run)
                found = scores(embedding[is_hidden], before[is_hidden], cells[is_hidden], run)
                found |= predicted(embedding, labels, is_hidden)
                print(dataset, run, method, {name: round(value, 3) for name, value in found.items()}, flush=True)
                for metric, value in found.items():
                    yield {"dataset": dataset, "run": run, "method": method, "metric": metric, "value": value}


def table(results: pd.DataFrame, metric: str) -> str:
    """Return means over runs as Markdown, one row per method and one column per data set."""
    return means(results, metric, "dataset", DATASETS, METHODS)


def main() -> None:
    parser = task_parser(__doc__, DATASETS, default=list(TUNING), runs=3, option="--datasets")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    keys = ["dataset", "run", "method", "metric"]
    if args.docs is not None:
        kept = read(RESULTS, keys)
        for page in args.docs:
            rewrite(page, "with_labels", partial(table, kept))
        return
    kept = keep(measured(args), RESULTS, keys)
    for metric in ("total", "bio", "batch", "f1_linear", "f1_knn"):
        print(metric, table(kept, metric), sep="\n\n")


if __name__ == "__main__":
    main()
