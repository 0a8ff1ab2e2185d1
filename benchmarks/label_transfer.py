"""How well does one call label the cells of another donor, protocol, study or species, and what does it cost?

Rows of scforge are ``Encoder(reference).train()``, then ``transfer_labels(query)`` with each of its methods. Genes,
principal components, Harmony, Symphony and scVI have the same logistic regression as scforge: each label has the same
weight, and the regularization is chosen on held-out reference batches, or on random folds of a single batch.
CellTypist's method and ``scanpy.tl.ingest`` have the options of their authors. "classifier of the query" learns from
labels of the query itself, in five folds: a limit that nobody can reach without them.

Rows that learn from the query, without its labels: those of scforge, which map it onto the reference, and whose
consensus includes Harmony of both; "Harmony", which corrects both together; "Symphony", which shifts clusters of the
query; "scPoli", which trains vectors of its batches; and "popV", which runs Harmony and BBKNN and trains scVI and
scANVI on both together. Rows that learn from the reference alone: genes, principal components, scVI, scANVI,
CellTypist's method and ingest.

``--methods trained`` measures methods with packages of their own, of which those that are missing are left out:
Symphony needs ``symphonypy``, and scPoli ``scarches``. ``--methods popv`` needs an environment of its own, whose
interpreter the variable ``POPV_PYTHON`` names.
"scVI" has two layers, 30 latent dimensions and counts with a negative binomial distribution, which was better than its
defaults on the tasks used for tuning, and stops early; scANVI starts from it. scVI trains for at most 400 epochs, as by
default, scANVI for 20 and scPoli for 50, as in their tutorials. So that each takes about four CPU minutes at most, they
train for fewer epochs where epochs times cells would exceed 300,000, 100,000 and 200,000.

`macro_f1` is over the types that reference and query share, `rare_recall` over those of them with less than 5 % of the
cells of the query, `calibration_error` in 15 bins, `cpu_seconds` with training. `macro_f1_5` and `macro_f1_20` learn
from so many labeled cells of each type. Tasks and the split into tuning and test are in ``_transfer_tasks.py``: what is
shown of test tasks was run once, with everything fixed. The results go into ``benchmarks/results/label_transfer.csv``::

    python benchmarks/label_transfer.py --data FOLDER --tasks tuning
    python benchmarks/label_transfer.py --data FOLDER --tasks tuning --methods trained
    python benchmarks/label_transfer.py --docs docs/reference_mapping.md docs/transfer.md README.md
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scanpy as sc
from _tables import best_other, difference, keep, means, read, rewrite, task_parser
from _transfer_tasks import BATCH, GROUPS, LABEL, RUNS, TEST, Pair, in_groups, task_pair
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, recall_score, roc_auc_score
from sklearn.model_selection import GroupKFold, KFold, StratifiedKFold, cross_val_predict
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, StandardScaler
from transfer import (
    celltypist,
    components,
    encoder,
    genes,
    harmony,
    scanvi_of_query,
    scpoli_of_query,
    scvi_embedded,
    scvi_of_reference,
    variable,
)

from scforge.finetuning.metrics import calibration_error

RESULTS = Path(__file__).parent / "results" / "label_transfer.csv"
KEYS = ["task", "run", "method", "metric"]
STRENGTHS = (0.01, 0.1, 1.0)
FEW = (5, 20)
RARE = 0.05
FOLDS = 5
LIMIT = "classifier of the query"
OURS = "scforge, consensus"
METHODS = {"consensus": OURS, "linear": "scforge, embedding", "knn": "scforge, neighbors"}
QUESTIONS = {
    "condition": "control to stimulated cells (tuning)",
    "missing": "the same without one cell type (tuning)",
    "protocol": "CEL-seq2 to Drop-seq, cell lines (tuning)",
    "simulated_donors": "four simulated donors to two others (tuning)",
    "donor_pairs": "six donors to two others",
    "study": "eight donors to PBMC 3k",
    "study_back": "PBMC 3k to eight donors",
    "collection": "two studies to PBMC 3k",
    "species": "half of PBMC 3k to the other as another species",
    "facs_to_cite": "FACS-sorted cells to CITE-seq",
    "cite_to_facs": "CITE-seq to FACS-sorted cells",
    "pbmc3k_to_facs": "PBMC 3k to FACS-sorted cells",
    "pbmc3k_to_cite": "PBMC 3k to CITE-seq",
    "donors_to_facs": "eight donors to FACS-sorted cells",
    "donors_to_cite": "eight donors to CITE-seq",
}

VIEWS = {
    "genes": genes,
    "PCA": partial(components, scale=False),
    "PCA, scaled genes": partial(components, scale=True),
    "Harmony": partial(harmony, scale=False),
    "Harmony, scaled genes": partial(harmony, scale=True),
}
"""Features of reference and query, which baselines learn from."""

type Prediction = tuple[str, pd.DataFrame, float]
"""Method, probability of each label for each query cell, and CPU seconds."""


def scforge(pair: Pair, seed: int) -> Iterator[Prediction]:
    """Predict with each method of ``transfer_labels``, and the default with few labels."""
    reference, query = (cells.copy() for cells in pair)
    began = time.process_time()
    model = encoder(reference, seed)
    trained = time.process_time() - began
    few = {n: few_labels(reference, n, seed) for n in FEW}
    for ending, labels in {"": reference.obs[LABEL], **{f" few {n}": labels for n, labels in few.items()}}.items():
        reference.obs["learned"] = labels
        for method, name in METHODS.items():
            began = time.process_time()
            # The column of the batches has the same name in both.
            table = model.transfer_labels(query, labels_key="learned", method=method)
            yield name + ending, table, trained + time.process_time() - began


def few_labels(reference: ad.AnnData, n: int, seed: int) -> pd.Series:
    """Return the labels of `n` random cells of each type; the others have none."""
    order = pd.Series(np.random.default_rng(seed).random(reference.n_obs), index=reference.obs_names)
    return reference.obs[LABEL].astype(object).where(order.groupby(reference.obs[LABEL].to_numpy()).rank() <= n)


def baselines(pair: Pair, seed: int) -> Iterator[Prediction]:
    """Predict with simple methods, with all labels and with few."""
    reference, query = pair
    for name, view in VIEWS.items():
        began = time.process_time()
        known, to_label = view(pair, seed)
        yield from heads(name, known, to_label, reference, time.process_time() - began, seed)
    began = time.process_time()
    yield "CellTypist's method", labeled_as(celltypist(pair, seed)), time.process_time() - began
    began = time.process_time()
    yield "ingest", labeled_as(ingest(pair, seed)), time.process_time() - began
    known, to_label = genes((query, query), seed)
    truth = query.obs[LABEL].astype(str).to_numpy()
    has_folds = pd.Series(truth).map(pd.Series(truth).value_counts()).to_numpy() >= FOLDS
    if len(np.unique(truth[has_folds])) > 1:
        began = time.process_time()
        classifier = make_pipeline(MaxAbsScaler(), LogisticRegression(C=0.1, class_weight="balanced", max_iter=2_000))
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
        found = np.full(len(truth), "", dtype=object)
        found[has_folds] = cross_val_predict(classifier, known[has_folds], truth[has_folds], cv=folds)
        yield LIMIT, labeled_as(found), time.process_time() - began


def heads(
    name: str, known: Any, to_label: Any, reference: ad.AnnData, embedded: float, seed: int
) -> Iterator[Prediction]:
    """Predict from features of both, with all labels of the reference and with few; they took `embedded` seconds."""
    batches = reference.obs[BATCH].astype(str).to_numpy()
    labels = {"": reference.obs[LABEL], **{f" few {n}": few_labels(reference, n, seed) for n in FEW}}
    for ending, given in labels.items():
        rows = np.flatnonzero(given.notna())
        truth = given.iloc[rows].astype(str).to_numpy()
        began = time.process_time()
        table = linear(known[rows], truth, batches[rows], to_label, seed)
        yield f"{name}, linear{ending}", table, embedded + time.process_time() - began
        if not sparse.issparse(known):
            began = time.process_time()
            voters = KNeighborsClassifier(min(15, len(rows))).fit(known[rows], truth)
            table = labeled(voters.predict_proba(to_label), voters.classes_)
            yield f"{name}, kNN{ending}", table, embedded + time.process_time() - began


def linear(known: Any, truth: np.ndarray, batches: np.ndarray, to_label: Any, seed: int) -> pd.DataFrame:
    """Predict with a logistic regression whose strength has the least log loss on held-out cells."""
    scaler = MaxAbsScaler() if sparse.issparse(known) else StandardScaler()

    def fitted(rows: np.ndarray, strength: float) -> Any:
        classifier = LogisticRegression(C=strength, class_weight="balanced", max_iter=2_000)
        return make_pipeline(scaler, classifier).fit(known[rows], truth[rows])

    several = len(np.unique(batches)) > 1
    folds = (
        GroupKFold(min(FOLDS, len(np.unique(batches)))) if several else KFold(FOLDS, shuffle=True, random_state=seed)
    )
    losses = dict.fromkeys(STRENGTHS, 0.0)
    weights = 1 / pd.Series(truth).map(pd.Series(truth).value_counts()).to_numpy()
    for kept, held_out in folds.split(known, groups=batches if several else None):
        held_out = held_out[np.isin(truth[held_out], truth[kept])]
        for strength in STRENGTHS if len(held_out) and len(np.unique(truth[kept])) > 1 else ():
            model = fitted(kept, strength)
            probabilities = model.predict_proba(known[held_out])
            right = probabilities[np.arange(len(held_out)), np.searchsorted(model.classes_, truth[held_out])]
            losses[strength] -= (weights[held_out] * np.log(right + 1e-6)).sum()
    model = fitted(np.arange(len(truth)), min(STRENGTHS, key=losses.__getitem__))
    return labeled(model.predict_proba(to_label), model.classes_)


def trained_baselines(pair: Pair, seed: int) -> Iterator[Prediction]:
    """Predict with methods that have packages of their own, of which those that are missing are left out."""
    for package, predict in TRAINED.items():
        try:
            yield from predict(pair, seed)
        except ModuleNotFoundError as error:
            print(f"left out: {package} ({error})", flush=True)


def by_symphony(pair: Pair, seed: int) -> Iterator[Prediction]:
    import_module("symphonypy")  # before the clock starts
    began = time.process_time()
    known, to_label = symphony(pair, seed)
    yield from heads("Symphony", known, to_label, pair[0], time.process_time() - began, seed)


def symphony(pair: Pair, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Components of the reference, of which Harmony takes the batches, and the query mapped onto them."""
    import symphonypy

    chosen = variable(pair[0])
    reference, query = (part[:, chosen].copy() for part in pair)
    for cells in (reference, query):
        sc.pp.normalize_total(cells, target_sum=1e4)
        sc.pp.log1p(cells)
    sc.pp.scale(reference, max_value=10)
    sc.pp.pca(reference, random_state=seed)
    # A single batch as well: otherwise version 0.2.4 takes the mean of a cluster for the sum of its cells.
    symphonypy.pp.harmony_integrate(reference, BATCH, random_seed=seed, ncores=1)
    symphonypy.tl.map_embedding(query, reference, key=BATCH, use_genes_column=None)
    return reference.obsm["X_pca_harmony"], query.obsm["X_pca_harmony"]


def by_scvi(pair: Pair, seed: int) -> Iterator[Prediction]:
    """Predict from scVI's embedding, and by scANVI, which is trained from the same model."""
    began = time.process_time()
    options = {"tuned": True, "early_stopping": True, "max_epochs": epochs(pair[0], "scVI")}
    query, model = scvi_of_reference(pair, seed, **options)
    trained = time.process_time() - began
    known, to_label = scvi_embedded(query, model)
    yield from heads("scVI", known, to_label, pair[0], time.process_time() - began, seed)
    began = time.process_time()
    mapped = scanvi_of_query(query, model, seed, max_epochs=epochs(pair[0], "scANVI"))
    found = mapped.predict(soft=True)
    table = labeled(found.to_numpy(), found.columns.to_numpy())
    yield "scANVI", table, trained + time.process_time() - began


def by_scpoli(pair: Pair, seed: int) -> Iterator[Prediction]:
    began = time.process_time()
    _, query, model = scpoli_of_query(pair, seed, tuple(epochs(part, "scPoli") for part in pair))
    found = model.classify(query, get_prob=True)[LABEL]
    table = pd.DataFrame({"label": found["preds"], "probability": found["uncert"]})
    yield "scPoli", table, time.process_time() - began


def by_popv(pair: Pair, seed: int) -> Iterator[Prediction]:
    """Predict with popV in an environment of its own; the share of its methods that agree is the probability."""
    if not (python := os.environ.get("POPV_PYTHON")):
        print("left out: popV (POPV_PYTHON does not name the interpreter of an environment with it)", flush=True)
        return
    chosen = variable(pair[0])
    with tempfile.TemporaryDirectory() as folder:
        for name, part in zip(("reference", "query"), pair, strict=True):
            sparse.save_npz(f"{folder}/{name}.npz", sparse.csr_matrix(part.X[:, chosen]))
            part.obs[[LABEL, BATCH]].to_csv(f"{folder}/{name}.csv", index=False)
        limits = [str(epochs(pair[0], name)) for name in ("scVI", "scANVI")]
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [python, str(Path(__file__).with_name("_popv.py")), folder, str(seed), *limits]
        subprocess.run(command, check=True, env=own)
        table = pd.read_csv(f"{folder}/predicted.csv", dtype={"label": str}, keep_default_na=False)
        yield "popV", table[["label", "probability"]], table["cpu_seconds"].iloc[0]


EPOCHS = {"scVI": (400, 300_000), "scANVI": (20, 100_000), "scPoli": (50, 200_000)}
"""Epochs that the authors of a method take, and the most that epochs times cells may be."""


def epochs(cells: ad.AnnData, method: str) -> int:
    usual, most = EPOCHS[method]
    return min(usual, max(1, most // cells.n_obs))


TRAINED = {"symphonypy": by_symphony, "scvi-tools": by_scvi, "scarches": by_scpoli}
PREDICT = {"scforge": scforge, "simple": baselines, "trained": trained_baselines, "popv": by_popv}


def labeled(probabilities: np.ndarray, classes: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({"label": classes[probabilities.argmax(axis=1)], "probability": probabilities.max(axis=1)})


def labeled_as(labels: np.ndarray) -> pd.DataFrame:
    """Return labels of a method without probabilities."""
    return pd.DataFrame({"label": labels, "probability": np.nan})


def ingest(pair: Pair, seed: int) -> np.ndarray:
    """Return the labels that scanpy's ingest transfers, with its tutorial's steps."""
    reference, query = (cells.copy() for cells in pair)
    for cells in (reference, query):
        sc.pp.normalize_total(cells, target_sum=1e4)
        sc.pp.log1p(cells)
    sc.pp.highly_variable_genes(reference, n_top_genes=min(2_000, reference.n_vars))
    chosen = reference.var["highly_variable"].to_numpy()
    reference, query = reference[:, chosen].copy(), query[:, chosen].copy()
    sc.pp.pca(reference, random_state=seed)
    sc.pp.neighbors(reference, random_state=seed)
    sc.tl.ingest(query, reference, obs=LABEL, embedding_method="pca")
    return query.obs[LABEL].astype(str).to_numpy()


def scores(table: pd.DataFrame, pair: Pair) -> dict[str, float]:
    """Return the metrics of a prediction; types that the reference lacks are not scored."""
    known, truth = (cells.obs[LABEL].astype(str).to_numpy() for cells in pair)
    scored = np.isin(truth, known)
    types, counts = np.unique(truth[scored], return_counts=True)
    predicted, probability = table["label"].astype(str).to_numpy(), table["probability"].to_numpy()
    found = {
        "macro_f1": f1_score(truth[scored], predicted[scored], labels=types, average="macro", zero_division=0),
        "accuracy": float((predicted == truth)[scored].mean()),
    }
    if len(rare := types[counts < RARE * len(truth)]):
        found["rare_recall"] = recall_score(
            truth[scored], predicted[scored], labels=rare, average="macro", zero_division=0
        )
    if not np.isnan(probability).any():
        is_right = (predicted == truth)[scored]
        found["calibration_error"] = calibration_error(probability[scored], is_right)
        found["wrong_confident"] = float((probability[scored][~is_right] > 0.9).mean()) if not is_right.all() else 0.0
        if not scored.all():
            found["auroc_new"] = roc_auc_score(~scored, -probability)
    return found


def measured(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    for task in args.tasks:
        for run in range(args.first_run, min(args.first_run + args.runs, RUNS.get(task, np.inf))):
            pair = task_pair(task, args.data, run)
            for methods in args.methods:
                for method, table, seconds in PREDICT[methods](pair, run):
                    found = {**scores(table, pair), "cpu_seconds": seconds}
                    name, _, few = method.partition(" few ")
                    print(
                        task, run, method, {name: round(float(value), 3) for name, value in found.items()}, flush=True
                    )
                    for metric, value in found.items():
                        if few and metric != "macro_f1":
                            continue
                        metric = f"{metric}_{few}" if few else metric
                        yield {"task": task, "run": run, "method": name, "metric": metric, "value": value}


def overview(results: pd.DataFrame, metric: str) -> str:
    """Return the consensus against the best other method as Markdown, one row per task with at least three runs.

    The last row has means over the test tasks, of the method with the highest mean among those with three runs of each.
    """
    lines = ["| task | n | consensus | best other method | difference | limit |", "|---|---|---|---|---|---|"]
    tests = {}
    for task, question in QUESTIONS.items():
        wide = results[(results["metric"] == metric) & (results["task"] == task)]
        wide = wide.pivot(index="run", columns="method", values="value")
        if OURS not in wide or wide[OURS].count() < 3:
            continue
        limit = f"{wide.pop(LIMIT).mean():.3f}" if LIMIT in wide else ""
        best = best_other(wide)
        gain = difference((wide[OURS] - wide[best]).dropna())
        ours, other = wide[OURS].mean(), wide[best].mean()
        lines.append(f"| {question} | {wide[OURS].count()} | {ours:.3f} | {other:.3f} ({best}) | {gain} | {limit} |")
        if task in TEST:
            tests[task] = wide.mean().where(wide.count() >= 3)
    if len(tests) > 1:
        over_tests = pd.DataFrame(tests).dropna().mean(axis=1)
        best = over_tests[~over_tests.index.str.startswith("scforge")].idxmax()
        gain = over_tests[OURS] - over_tests[best]
        lines.append(
            f"| mean of the {len(tests)} test tasks | | {over_tests[OURS]:.3f} | {over_tests[best]:.3f} ({best}) "
            f"| {gain:+.3f} | |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = task_parser(__doc__, [*GROUPS, *QUESTIONS], default=["tuning"], runs=5)
    parser.add_argument("--methods", nargs="+", default=["scforge", "simple"], choices=list(PREDICT))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    args.tasks = in_groups(args.tasks)
    results = read(RESULTS, KEYS) if args.docs else keep(measured(args), RESULTS, KEYS)
    methods = [method for method in dict.fromkeys(results["method"]) if method != LIMIT]
    for page in args.docs or ():
        rewrite(page, "label_transfer_overview", lambda metric: overview(results, metric))
        rewrite(page, "label_transfer", lambda metric: means(results, metric, "task", QUESTIONS, methods))


if __name__ == "__main__":
    main()
