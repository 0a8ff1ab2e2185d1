"""How many query cells of a type that the reference lacks are found, and how many others are called unknown?

Each type that reference and query share is left out of the reference in turn, before training. "scforge" calls cells
unknown whose p-value is at most 0.05 (``transfer_labels(unknown=0.05)``). Other scores are the AUROC and
the share of unknown cells that a method finds (`found_at_5`) if exactly 5 % of the other query cells are called
unknown, which nobody can set without labels of the query. The other methods are one minus the highest probability of a
logistic regression on genes, of CellTypist's method, and of the consensus, and the mean distance to the 15 nearest
reference cells in principal components. Averages weight each left-out type equally. Tasks are in
``_transfer_tasks.py``: the measures and weights of the p-value were chosen on those for tuning. The results go into
``benchmarks/results/unknown_types.csv``::

    python benchmarks/unknown_types.py --data FOLDER --tasks tuning
    python benchmarks/unknown_types.py --docs docs/reference_mapping.md
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from _tables import keep, read, rewrite, task_parser
from _transfer_tasks import BATCH, GROUPS, LABEL, RUNS, in_groups, task_pair
from label_transfer import QUESTIONS, VIEWS, linear
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler
from transfer import encoder

RESULTS = Path(__file__).parent / "results" / "unknown_types.csv"
KEYS = ["task", "run", "left_out", "method", "metric"]
RATE, FEWEST = 0.05, 20
OURS = "scforge, p-value"


def measures(reference: ad.AnnData, query: ad.AnnData, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Return a number for each query cell by each method, which is high for unknown types."""
    table = encoder(reference.copy(), seed).transfer_labels(query.copy(), labels_key=LABEL)
    yield OURS, -table["p_value"].to_numpy(dtype=float)
    yield "scforge, probability", -table["probability"].to_numpy(dtype=float)
    truth, batches = (reference.obs[key].astype(str).to_numpy() for key in (LABEL, BATCH))
    known, to_label = VIEWS["genes"]((reference, query), seed)
    yield "genes, logistic regression", -linear(known, truth, batches, to_label, seed)["probability"].to_numpy()
    scaler = StandardScaler().fit(known.toarray())
    dense = [np.minimum(scaler.transform(part.toarray()), 10) for part in (known, to_label)]
    classifier = OneVsRestClassifier(LogisticRegression(max_iter=200)).fit(dense[0], truth)
    yield "CellTypist's method", -classifier.decision_function(dense[1]).reshape(query.n_obs, -1).max(axis=1)
    known, to_label = VIEWS["PCA"]((reference, query), seed)
    yield "PCA, distance", NearestNeighbors(n_neighbors=15).fit(known).kneighbors(to_label)[0].mean(axis=1)


def scores(found: np.ndarray, is_new: np.ndarray, *, with_rate: bool) -> dict[str, float]:
    limit = np.quantile(found[~is_new], 1 - RATE)
    result = {"auroc": roc_auc_score(is_new, found), "found_at_5": float((found[is_new] > limit).mean())}
    if with_rate:
        is_unknown = found >= -RATE
        result |= {"found": float(is_unknown[is_new].mean()), "false": float(is_unknown[~is_new].mean())}
    return result


def measured(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    for run in range(args.first_run, args.first_run + args.runs):
        for task in args.tasks:
            if task == "missing" or run >= RUNS.get(task, np.inf):  # "missing" is "condition" without a type
                continue
            reference, query = task_pair(task, args.data, run)
            query = query[query.obs[LABEL].isin(reference.obs[LABEL].unique())].copy()
            sizes = query.obs[LABEL].value_counts()
            for left_out in sorted(sizes.index[sizes >= FEWEST]):
                kept = reference[reference.obs[LABEL] != left_out].copy()
                is_new = (query.obs[LABEL] == left_out).to_numpy()
                if kept.obs[LABEL].nunique() < 2 or is_new.all():
                    continue
                for method, found in measures(kept, query, run):
                    values = scores(found, is_new, with_rate=method == OURS)
                    rounded = {name: round(value, 3) for name, value in values.items()}
                    print(task, run, left_out, method, rounded, flush=True)
                    for metric, value in values.items():
                        yield dict(zip([*KEYS, "value"], [task, run, left_out, method, metric, value], strict=True))


def overview(results: pd.DataFrame) -> str:
    """Return one row per task as Markdown: false and found at a p-value of 0.05, then `found_at_5` of all methods."""
    methods = list(dict.fromkeys(results["method"]))
    lines = [
        "| task | n | called unknown: known cells | called unknown: unknown cells | "
        + " | ".join(f"{method}, at 5 %" for method in methods)
        + " |",
        "|---|---|---|---|" + "---|" * len(methods),
    ]
    for task, question in QUESTIONS.items():
        of_task = results[results["task"] == task]
        if len(of_task):
            n = len(of_task[["run", "left_out"]].drop_duplicates())
            means = of_task.groupby(["method", "metric"])["value"].mean()
            shown = [means[OURS, "false"], means[OURS, "found"], *(means[method, "found_at_5"] for method in methods)]
            lines.append(f"| {question} | {n} | " + " | ".join(f"{value:.2f}" for value in shown) + " |")
    return "\n".join(lines)


def main() -> None:
    args = task_parser(__doc__, [*GROUPS, *QUESTIONS], default=["tuning"], runs=2).parse_args()
    warnings.simplefilter("ignore")
    args.tasks = in_groups(args.tasks)
    results = read(RESULTS, KEYS) if args.docs else keep(measured(args), RESULTS, KEYS)
    for page in args.docs or ():
        rewrite(page, "unknown_types", lambda _: overview(results))


if __name__ == "__main__":
    main()
