"""Are predicted cell types of another study right, and does the confidence show it if they are not?

The reference of each task trains the light encoder and an annotator with their defaults. "as is" is its fine-tuned head
(``predict(map_query=False)``), "mapped" what ``predict`` does by default. Logistic regressions with the defaults of
scikit-learn give labels and probabilities of the baselines; "Harmony" learns from the query as well, without labels.
`wrong_confident` is the share of wrong cells whose confidence is above 0.9 (lower is better), `calibration_error` the
expected calibration error in 15 bins. Cells of a type that the reference lacks are not scored.
`condition` and `missing` (``transfer.py``) were used to choose the classifiers that `predict` combines; the others are
tests, but run 0 of `facs` and `facs_shared` was inspected before the choice. Labels of `facs` and `cite` do not depend
on RNA: sorted populations, one of them (CD34+) only in the former, and gates on surface proteins. The results go into
``benchmarks/results/annotation.csv``::

    python benchmarks/annotation.py --data FOLDER --runs 3
    python benchmarks/annotation.py --docs docs/fine_tuning.md
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from _tables import best_other, difference, keep, means, read, rewrite, task_parser
from _transfer_tasks import BATCH, LABEL, Pair, drawn, prepared
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, StandardScaler
from transfer import TASKS, components, genes, harmony

from scforge.finetuning.metrics import calibration_error
from scforge.models import Encoder

RESULTS = Path(__file__).parent / "results" / "annotation.csv"
KEYS = ["task", "run", "method", "metric"]
SORTED = {"T cell": "T", "B cell": "B", "NK cell": "NK", "CD14+": "monocyte", "CD34+": "CD34+"}
GATED = {"B": "B", "CD14 Mono": "monocyte", "CD16 Mono": "monocyte", "CD4 T": "T", "CD8 T": "T", "NK": "NK"}
AS_IS, MAPPED = "scforge, as is", "scforge, mapped"


def facs(folder: str | None, seed: int) -> Pair:
    """Cells gated on proteins (CITE-seq, 10x v3, 4,000 genes) by cells sorted by FACS (10x v1); a test."""
    reference = ad.read_h5ad(Path(folder or ".") / "zheng_facs_pbmc.h5ad")
    cells = prepared(reference, reference.obs["cell_type_coarse"].map(SORTED), "facs")
    cells.var_names = reference.var["feature"].astype(str).to_numpy()
    query = ad.read_h5ad(Path(folder or ".") / "pbmc10k_cite.h5ad")
    gated = prepared(query, query.obs["cell_type"].map(GATED), "cite")
    return tuple(part[:, ~part.var_names.duplicated()].copy() for part in (cells, gated))


def facs_shared(folder: str | None, seed: int) -> Pair:
    """The same in the genes of both; a test."""
    reference, query = facs(folder, seed)
    shared = reference.var_names.intersection(query.var_names)
    return reference[:, shared].copy(), query[:, shared].copy()


def cite(folder: str | None, seed: int) -> Pair:
    """Cells sorted by FACS by cells gated on proteins, without CD34+ cells; a test."""
    sorted_cells, gated = facs(folder, seed)
    return gated, sorted_cells[sorted_cells.obs[LABEL] != "CD34+"].copy()


NAMES = ("condition", "missing", "donors", "study")
ALL = {**{name: TASKS[name] for name in NAMES}, "facs": facs, "facs_shared": facs_shared, "cite": cite}
WHOLE = ("facs", "facs_shared", "cite")
"""Tasks of all cells; the others draw 80 % of them in each run."""


def measured(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    for task in args.tasks:
        for run in range(args.first_run, args.first_run + args.runs):
            pair = ALL[task](args.data, run)
            pair = pair if task in WHOLE else drawn(pair, run)
            wanted = pair[1].obs[LABEL].astype(str).to_numpy()
            is_known = np.isin(wanted, pair[0].obs[LABEL].astype(str).unique())
            for method, probabilities, seconds in predictions(pair, run):
                labels = probabilities.columns.to_numpy()[probabilities.to_numpy().argmax(axis=1)][is_known]
                confidence = probabilities.to_numpy().max(axis=1)[is_known]
                is_right = labels == wanted[is_known]
                found = {
                    "macro_f1": f1_score(
                        wanted[is_known], labels, labels=np.unique(wanted[is_known]), average="macro", zero_division=0
                    ),
                    "accuracy": is_right.mean(),
                    "wrong_confident": (confidence[~is_right] > 0.9).mean() if not is_right.all() else 0.0,
                    "calibration_error": calibration_error(confidence, is_right),
                    "cpu_seconds": seconds,
                }
                print(task, run, method, {name: round(float(value), 3) for name, value in found.items()}, flush=True)
                for metric, value in found.items():
                    yield {"task": task, "run": run, "method": method, "metric": metric, "value": value}


def predictions(pair: Pair, seed: int) -> Iterator[tuple[str, pd.DataFrame, float]]:
    """Return the class probabilities of the query by each method, with CPU seconds, training included."""
    began = time.process_time()
    reference = pair[0].copy()
    several = reference.obs[BATCH].nunique() > 1
    Encoder.setup_anndata(reference, labels_key=LABEL, batch_key=BATCH if several else None)
    model = Encoder(reference, seed=seed)
    model.train(progress_bar=False, accelerator="cpu")
    annotator = model.finetune("annotation", progress_bar=False, accelerator="cpu")
    trained = time.process_time() - began
    for method, is_mapped in ((AS_IS, False), (MAPPED, True)):
        began = time.process_time()
        found = annotator.predict(pair[1].copy(), soft=True, map_query=is_mapped)
        yield method, found, trained + time.process_time() - began
    labels = pair[0].obs[LABEL].astype(str).to_numpy()
    shared = pair[0].var_names.intersection(pair[1].var_names)
    pair = tuple(part[:, shared].copy() for part in pair)
    embedders = {
        "genes": lambda: genes(pair, seed),
        "PCA": lambda: components(pair, seed, scale=False),
        "Harmony on both": lambda: harmony(pair, seed, scale=False),
        "Harmony on both, scaled genes": lambda: harmony(pair, seed, scale=True),
    }
    for name, embedded in embedders.items():
        began = time.process_time()
        known, query = embedded()
        scaler = MaxAbsScaler() if name == "genes" else StandardScaler()
        classifiers = {"": make_pipeline(scaler, LogisticRegression(max_iter=2_000))}
        if name.startswith("Harmony"):
            classifiers[", kNN"] = KNeighborsClassifier(15)
        for ending, classifier in classifiers.items():
            found = classifier.fit(known, labels).predict_proba(query)
            yield f"{name}{ending}", pd.DataFrame(found, columns=classifier.classes_), time.process_time() - began


def differences(results: pd.DataFrame, metric: str) -> str:
    """Return paired differences of the mapped predictions as Markdown, one row per task with at least three runs."""
    lines = ["| task | n | mapped vs. as is | best other method | mapped vs. best |", "|---|---|---|---|---|"]
    for task in ALL:
        of_task = results[(results["metric"] == metric) & (results["task"] == task)]
        wide = of_task.pivot(index="run", columns="method", values="value").dropna()
        if len(wide) >= 3:
            best = best_other(wide)
            gains = [difference(wide[MAPPED] - wide[other]) for other in (AS_IS, best)]
            lines.append(f"| {task} | {len(wide)} | {gains[0]} | {wide[best].mean():.3f} ({best}) | {gains[1]} |")
    return "\n".join(lines)


def main() -> None:
    args = task_parser(__doc__, ALL, default=list(ALL), runs=3).parse_args()
    results = read(RESULTS, KEYS) if args.docs else keep(measured(args), RESULTS, KEYS)
    methods = list(dict.fromkeys(results["method"]))
    for page in args.docs or ():
        rewrite(page, "annotation_differences", lambda metric: differences(results, metric))
        rewrite(page, "annotation", lambda metric: means(results, metric, "task", ALL, methods))


if __name__ == "__main__":
    main()
