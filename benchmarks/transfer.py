"""Are cells of a new donor, protocol, study or species labeled better by an encoder than by simple methods?

Each task has a reference with labels and a query without. In each run 80 % of the cells of both are drawn, every method
is fitted with the seed of the run, and a logistic regression and the 15 nearest neighbors carry labels from reference
to query. `mixing` is the share of reference cells among the 30 nearest neighbors of a query cell, over what it would be
if all lay at random. `bras` and `cilisi` are over the types that both have, with reference and query as the two
batches: the batch-removal-adapted silhouette [1]_, and scaled iLISI of each type, of which the mean is shown [2]_.
`auroc_new`, where the reference lacks types of the query, is how well the mean distance to the 15 nearest reference
cells tells their cells from others. `f1_linear_5`, `_20` and `_100` are of a logistic regression that learns from so
many reference cells of each type. Rows "on both" learn from the query without labels, "scforge, mapped" and "scforge,
encoder alone" from the reference alone; the former then moves the query onto it in closed form. scANVI and CellTypist
learn from the labels of the reference and predict those of the query themselves, which is their `f1_linear`. CONCORD
needs the package ``concord-sc``, scPoli ``scarches``.
Hyper-parameters may be chosen on ``kang_ifnb`` and ``sc_mixology`` only; the other data sets are and stay tests.
The results go into ``benchmarks/results/transfer.csv``, from which ``--table`` prints means and paired differences::

    python benchmarks/transfer.py --data FOLDER --runs 5
    python benchmarks/transfer.py --tasks condition --methods "scforge, mapped" PCA --runs 2
    python benchmarks/transfer.py --table
    python benchmarks/transfer.py --docs docs/transfer.md

.. [1] Rautenstrauch and Ohler 2025, doi:10.1038/s41587-025-02743-4
.. [2] Andreatta et al. 2024, doi:10.1038/s41467-024-45240-z
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scanpy as sc
from _tables import best_other, difference, keep, means, read, rewrite
from _transfer_tasks import BATCH, LABEL, TEST, TUNING, UNLABELED, Pair, donors, drawn
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, roc_auc_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, StandardScaler

from scforge.eval.scib import nearest_neighbors
from scforge.models import Encoder

RESULTS = Path(__file__).parent / "results" / "transfer.csv"
N_GENES, N_COMPONENTS = 2_000, 50
FEW = (5, 20, 100)
ALIGNMENT = 0.001
"""Weight of SIGReg within batches in the rows "aligned"; chosen on the data sets used for tuning."""
OURS = ("scforge, mapped", "scforge, trained on both")
QUESTIONS = {
    "condition": "control to interferon-stimulated cells (kang_ifnb, used for tuning)",
    "missing": "the same, with one cell type missing from the reference (used for tuning)",
    "protocol": "CEL-seq2 to Drop-seq, five cell lines (sc_mixology, used for tuning)",
    "donors": "six donors to two unseen donors (kang_ctrl_8donor, test)",
    "study": "eight donors of another study to PBMC 3k (test)",
    "collection": "these eight donors and kang_ifnb together to PBMC 3k (test)",
    "species": "one half of PBMC 3k to the other, with simulated gene loss and scaling (test)",
}
TASKS = {name: donors if name == "donors" else {**TUNING, **TEST}[name] for name in QUESTIONS}


def logs(cells: ad.AnnData) -> sparse.csr_matrix:
    """Return log1p of counts per 10,000."""
    copy = cells.copy()
    sc.pp.normalize_total(copy, target_sum=1e4)
    sc.pp.log1p(copy)
    return sparse.csr_matrix(copy.X)


def variable(reference: ad.AnnData) -> np.ndarray:
    """Return which genes vary most in the reference."""
    if reference.n_vars <= N_GENES:
        return np.ones(reference.n_vars, dtype=bool)
    copy = ad.AnnData(logs(reference), obs=reference.obs, var=reference.var.copy())
    sc.pp.highly_variable_genes(copy, n_top_genes=N_GENES)
    return copy.var["highly_variable"].to_numpy()


def genes(pair: Pair, seed: int) -> tuple[sparse.csr_matrix, sparse.csr_matrix]:
    chosen = variable(pair[0])
    return logs(pair[0])[:, chosen], logs(pair[1])[:, chosen]


def components(pair: Pair, seed: int, *, scale: bool) -> tuple[np.ndarray, np.ndarray]:
    """Project the query on the principal components of the reference."""
    from sklearn.decomposition import PCA

    reference, query = (part.toarray() for part in genes(pair, seed))
    scaler = StandardScaler(with_std=scale).fit(reference)
    reference, query = (np.clip(scaler.transform(part), -10, 10) for part in (reference, query))
    pca = PCA(N_COMPONENTS, random_state=seed).fit(reference)
    return pca.transform(reference), pca.transform(query)


def harmony(pair: Pair, seed: int, *, scale: bool) -> tuple[np.ndarray, np.ndarray]:
    """Components of both, of which Harmony takes the batches."""
    from scforge.data.neighbors import harmony_correct

    both = ad.concat(pair)
    found, _ = components((both, pair[1]), seed, scale=scale)
    return halves(harmony_correct(found, both.obs[BATCH].astype(str).to_numpy(), seed=seed), pair)


def scvi_of_reference(
    pair: Pair, seed: int, *, tuned: bool, early_stopping: bool = False, max_epochs: int | None = None
) -> tuple[ad.AnnData, object]:
    """Return the query's variable genes and a scVI model of the reference, which labels do not change.

    With `max_epochs`, the weight of the KL divergence rises to one over these, as it does over the default's 400.
    """
    import scvi as tools

    tools.settings.seed = seed
    chosen = variable(pair[0])
    reference, query = (part[:, chosen].copy() for part in pair)
    tools.model.SCVI.setup_anndata(reference, batch_key=BATCH, labels_key=LABEL)
    options = {"n_latent": 30, "n_layers": 2, "gene_likelihood": "nb"} if tuned else {}
    model = tools.model.SCVI(reference, **options)
    warmup = {} if max_epochs is None else {"max_epochs": max_epochs, "plan_kwargs": {"n_epochs_kl_warmup": max_epochs}}
    model.train(enable_progress_bar=False, accelerator="cpu", early_stopping=early_stopping, **warmup)
    return query, model


def scvi(pair: Pair, seed: int, *, tuned: bool) -> tuple[np.ndarray, np.ndarray]:
    """scVI of the reference; its encoder, which is not told the batch, embeds the query."""
    return scvi_embedded(*trained_once(pair, lambda: scvi_of_reference(pair, seed, tuned=tuned), f"scvi {tuned}"))


def scvi_embedded(query: ad.AnnData, model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return what a scVI model embeds its reference and the query as; nothing is learned of the query."""
    import scvi as tools

    query = query.copy()
    query.obs[LABEL] = model.adata.obs[LABEL].iloc[0]
    mapped = tools.model.SCVI.load_query_data(query, model)
    mapped.is_trained = True  # nothing is learned of the query
    return model.get_latent_representation(), mapped.get_latent_representation()


def scanvi(pair: Pair, seed: int) -> np.ndarray:
    """Return the labels that scANVI predicts, initialized from "scVI, larger"."""
    query, model = trained_once(pair, lambda: scvi_of_reference(pair, seed, tuned=True), "scvi True")
    return np.asarray(scanvi_of_query(query, model, seed).predict(), dtype=str)


def scanvi_of_query(query: ad.AnnData, model: Any, seed: int, *, max_epochs: int = 20) -> Any:
    """Return scANVI for the query, trained from a scVI model of the reference; nothing is learned of the query."""
    import scvi as tools

    query = query.copy()
    tools.settings.seed = seed
    model = tools.model.SCANVI.from_scvi_model(model, unlabeled_category=UNLABELED)
    model.train(enable_progress_bar=False, accelerator="cpu", max_epochs=max_epochs)
    query.obs[LABEL] = UNLABELED
    mapped = tools.model.SCANVI.load_query_data(query, model)
    mapped.is_trained = True  # nothing is learned of the query
    return mapped


def scvi_of_all(
    key: object, cells: ad.AnnData, seed: int, *, tuned: bool = True, learns_labels: bool = False
) -> np.ndarray:
    """Return what scVI, trained with early stopping, embeds the cells as, or scANVI that starts from it.

    Rows with the same `key` share scVI.
    """
    import scvi as tools

    train = partial(scvi_of_reference, (cells, cells), seed, tuned=tuned, early_stopping=True)
    _, model = trained_once(key, train, f"scvi {tuned}")
    if learns_labels:
        tools.settings.seed = seed
        model = tools.model.SCANVI.from_scvi_model(model, unlabeled_category=UNLABELED)
        model.train(enable_progress_bar=False, accelerator="cpu", max_epochs=20, n_samples_per_label=100)
    return model.get_latent_representation()


def scpoli(pair: Pair, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """scPoli of the reference and its labels, with the epochs of its tutorials."""
    *parts, model = scpoli_of_query(pair, seed)
    return tuple(model.get_latent(part, mean=True) for part in parts)


def scpoli_of_query(pair: Pair, seed: int, epochs: tuple[int, int] = (50, 50)) -> tuple[ad.AnnData, ad.AnnData, Any]:
    """Return variable genes of both, and scPoli trained on the reference and its labels, then on the query.

    Of the query it learns the vectors of the batches, without labels. `epochs` are those on the reference and on the
    query.
    """
    chosen = variable(pair[0])
    is_labeled = np.ones(pair[0].n_obs, dtype=bool)
    reference, model = scpoli_of_reference(pair[0][:, chosen], is_labeled, seed, n_epochs=epochs[0])
    query = dense(pair[1][:, chosen])
    mapped = type(model).load_query_data(query, model, labeled_indices=np.zeros(query.n_obs, dtype=bool))
    mapped.train(**scpoli_options(epochs[1]), eta=10)
    mapped.model.eval()
    return reference, query, mapped


def scpoli_of_reference(
    cells: ad.AnnData, is_labeled: np.ndarray, seed: int, *, n_epochs: int = 50
) -> tuple[ad.AnnData, Any]:
    """Return the cells with dense counts, and scPoli trained on them and on the labels of some."""
    ad.read = ad.read_h5ad  # removed from anndata; scArches imports it
    from scarches.models.scpoli import scPoli
    from scvi import settings

    settings.seed = seed
    cells = dense(cells)
    # Masks, where it expects positions: those do not index a Series of pandas 3.
    keys = {"condition_keys": BATCH, "cell_type_keys": LABEL, "labeled_indices": is_labeled}
    model = scPoli(cells, **keys, embedding_dims=5, recon_loss="nb")
    # Prototypes of unlabeled cells have no weight in its loss, and need another package.
    model.train(**scpoli_options(n_epochs), eta=5, unlabeled_prototype_training=False)
    return cells, model


def dense(cells: ad.AnnData) -> ad.AnnData:
    copy = cells.copy()
    copy.X = copy.X.toarray().astype(np.float32)
    return copy


def scpoli_options(n_epochs: int) -> dict[str, Any]:
    """Return options of scPoli's tutorials, in which the first 80 % of the epochs learn no prototypes of labels."""
    stop = {
        "early_stopping_metric": "val_prototype_loss",
        "mode": "min",
        "threshold": 0,
        "patience": 20,
        "reduce_lr": True,
        "lr_patience": 13,
        "lr_factor": 0.1,
    }
    return {"n_epochs": n_epochs, "pretraining_epochs": n_epochs * 4 // 5, "early_stopping_kwargs": stop}


def celltypist(pair: Pair, seed: int) -> np.ndarray:
    """Return the labels that a logistic regression per type predicts from all genes, scaled: how CellTypist trains.

    (Its package does not work with the current scikit-learn.)
    """
    expressed = np.asarray((pair[0].X > 0).sum(axis=0)).ravel() > 0
    reference, query = (logs(part)[:, expressed].toarray() for part in pair)
    scaler = StandardScaler().fit(reference)
    reference, query = (np.minimum(scaler.transform(part), 10) for part in (reference, query))
    classifier = OneVsRestClassifier(LogisticRegression(max_iter=200)).fit(reference, pair[0].obs[LABEL].astype(str))
    return classifier.predict(query)


def concord(pair: Pair, seed: int, *, both: bool) -> tuple[np.ndarray, np.ndarray]:
    """CONCORD with its defaults, of variable genes; its encoder embeds the query, or learns from it as well."""
    import concord as tools

    chosen = variable(pair[0])
    parts = [ad.AnnData(logs(part)[:, chosen], obs=part.obs[[BATCH]].copy()) for part in pair]
    cells = ad.concat(parts) if both else parts[0].copy()
    cells.obs[BATCH] = cells.obs[BATCH].astype("category")
    with tempfile.TemporaryDirectory() as folder:
        model = tools.Concord(cells, save_dir=folder, domain_key=BATCH, device="cpu", seed=seed)
        model.fit_transform(output_key="X_concord", save_model=False)
        if both:
            return halves(cells.obsm["X_concord"], pair)
        query = parts[1].copy()
        query.obs[BATCH] = pd.Categorical([cells.obs[BATCH].iloc[0]] * query.n_obs, cells.obs[BATCH].cat.categories)
        model.predict_adata(query, output_key="X_concord")
        return cells.obsm["X_concord"], query.obsm["X_concord"]


def halves(embedding: np.ndarray, pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    return embedding[: pair[0].n_obs], embedding[pair[0].n_obs :]


def encoder(cells: ad.AnnData, seed: int, *, align: bool = False) -> Encoder:
    """Our default, or the same with SIGReg within batches."""
    Encoder.setup_anndata(cells, batch_key=BATCH if cells.obs[BATCH].nunique() > 1 else None)
    objective = {"name": "neighbor_denoising", "alignment": ALIGNMENT}
    model = Encoder(cells, seed=seed, **({"objective": objective} if align else {}))
    model.train(progress_bar=False, accelerator="cpu")
    return model


LAST: dict[str, object] = {}
"""The last pair with models of its reference, the seconds of their training, and those that the next row has to add."""


def trained_once[Model](pair: object, train: Callable[[], Model], name: str) -> Model:
    """Return a model of a reference, trained once for the rows that share it."""
    if LAST.get("pair") is not pair:
        LAST.clear()
        LAST["pair"] = pair
    if name in LAST:
        model, LAST["to_add"] = LAST[name]
        return model
    began = time.process_time()
    model = train()
    LAST[name] = (model, time.process_time() - began)
    return model


def scforge(
    pair: Pair, seed: int, *, how: str = "moved", correction: float = 0.0, align: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Our default on the reference; the query is embedded, then moved, or trained on together with the reference.

    A reference of a single batch has no correction.
    """
    name = "aligned" if align else "scforge"
    model = trained_once(pair, lambda: encoder(pair[0].copy(), seed, align=align), name)
    reference, query = model.adata, pair[1].copy()
    if how == "moved":
        mapped = Encoder.load_query_data(query, model)
    elif how == "together":
        model = mapped = Encoder.load_query_data(query, model, reference_cells=reference)
        model.train(progress_bar=False, accelerator="cpu")
    else:
        mapped = model
    share = correction if pair[0].obs[BATCH].nunique() > 1 else 0.0
    return tuple(
        one.get_latent_representation(part, key_added=None, correction=share)
        for one, part in ((model, reference), (mapped, query))
    )


def scratch(pair: Pair, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Our default on both from the start."""
    return halves(encoder(ad.concat(pair), seed).get_latent_representation(key_added=None), pair)


METHODS: dict[str, Callable[[Pair, int], tuple | np.ndarray]] = {
    "scforge, mapped": scforge,
    "scforge, mapped, corrected": partial(scforge, correction=1.0),
    "scforge, mapped, aligned": partial(scforge, align=True),
    "scforge, mapped, aligned and corrected": partial(scforge, correction=1.0, align=True),
    "scforge, encoder alone": lambda pair, seed: scforge(pair, seed, how="embedded"),
    "scforge, trained further on both": lambda pair, seed: scforge(pair, seed, how="together"),
    "scforge, trained on both": scratch,
    "genes": genes,
    "PCA": lambda pair, seed: components(pair, seed, scale=False),
    "PCA, scaled genes": lambda pair, seed: components(pair, seed, scale=True),
    "Harmony on both": lambda pair, seed: harmony(pair, seed, scale=False),
    "Harmony on both, scaled genes": lambda pair, seed: harmony(pair, seed, scale=True),
    "scVI": lambda pair, seed: scvi(pair, seed, tuned=False),
    "scVI, larger": lambda pair, seed: scvi(pair, seed, tuned=True),
    "scANVI": scanvi,
    "scPoli": scpoli,
    "CellTypist's method": celltypist,
    "CONCORD": lambda pair, seed: concord(pair, seed, both=False),
    "CONCORD on both": lambda pair, seed: concord(pair, seed, both=True),
}


def scores(embeddings: tuple | np.ndarray, pair: Pair, seed: int) -> dict[str, float]:
    """Return macro-F1 of the labels of the query, over the types that it has, and how it mixes with the reference."""
    known, wanted = (cells.obs[LABEL].astype(str).to_numpy() for cells in pair)
    types = np.intersect1d(wanted, known)

    def f1(predicted: np.ndarray) -> float:
        return f1_score(wanted, predicted, labels=types, average="macro", zero_division=0)

    if isinstance(embeddings, np.ndarray):  # a method that predicts the labels itself
        return {"f1_linear": f1(embeddings)}
    reference, query = embeddings
    scaler = MaxAbsScaler() if sparse.issparse(reference) else StandardScaler()

    def linear(rows: np.ndarray | slice) -> float:
        classifier = make_pipeline(scaler, LogisticRegression(max_iter=2_000))
        return f1(classifier.fit(reference[rows], known[rows]).predict(query))

    found = {"f1_linear": linear(slice(None))}
    order = pd.Series(np.random.default_rng(seed).random(len(known))).groupby(known).rank().to_numpy()
    found |= {f"f1_linear_{n}": linear(np.flatnonzero(order <= n)) for n in FEW}
    if sparse.issparse(reference):
        return found
    found["f1_knn"] = f1(KNeighborsClassifier(15).fit(reference, known).predict(query))
    if (is_new := ~np.isin(wanted, known)).any():
        far = NearestNeighbors(n_neighbors=15).fit(reference).kneighbors(query)[0].mean(axis=1)
        found["auroc_new"] = roc_auc_score(is_new, far)
    near = NearestNeighbors(n_neighbors=31).fit(np.vstack([reference, query])).kneighbors(query, return_distance=False)
    share = float((near[:, 1:] < len(reference)).mean())
    found["mixing"] = share * (len(reference) + len(query)) / len(reference)
    return found | mixing_within_types(np.vstack([reference, query]), np.concatenate([known, wanted]), len(reference))


def mixing_within_types(cells: np.ndarray, labels: np.ndarray, n_reference: int) -> dict[str, float]:
    """Return BRAS and CiLISI of reference and query, over the types with ten cells of each."""
    import scib_metrics

    is_query = np.arange(len(labels)) >= n_reference
    counts = pd.crosstab(labels, is_query)
    types = counts.index[(counts >= 10).all(axis=1)]
    scored = np.isin(labels, types)
    if len(types) < 2:
        return {}
    sides = np.where(is_query, "query", "reference")
    mixed = []
    for name in types:
        rows = np.flatnonzero(labels == name)
        near = nearest_neighbors(cells[rows], min(90, len(rows) - 1))
        mixed.append(scib_metrics.ilisi_knn(near, sides[rows]))
    bras = scib_metrics.bras(cells[scored].astype(np.float32), labels[scored], sides[scored])
    return {"bras": float(bras), "cilisi": float(np.mean(mixed))}


def measured(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    for task in args.tasks:
        for run in range(args.first_run, args.first_run + args.runs):
            pair = drawn(TASKS[task](args.data, run), run)
            for method in args.methods:
                began = time.process_time()
                embeddings = METHODS[method](pair, run)
                spent = time.process_time() - began + LAST.pop("to_add", 0.0)
                found = {**scores(embeddings, pair, run), "cpu_seconds": spent}
                print(task, run, method, {name: round(value, 3) for name, value in found.items()}, flush=True)
                for metric, value in found.items():
                    yield {"task": task, "run": run, "method": method, "metric": metric, "value": value}


def table(results: pd.DataFrame) -> str:
    """Return means over runs as Markdown, with the paired difference of the best row of ours from each baseline."""
    lines = []
    for task, of_task in results.groupby("task", sort=False):
        wide = of_task.pivot_table(index="method", columns="metric", values="value", sort=False)
        linear = of_task[of_task["metric"] == "f1_linear"].pivot(index="run", columns="method", values="value")
        lines += [
            f"### {task}, up to {len(linear)} runs",
            "",
            f"| method | {' | '.join(wide.columns)} | ours minus it |",
        ]
        lines.append(f"|{'---|' * (wide.shape[1] + 2)}")
        for method, row in wide.iterrows():
            figures = " | ".join("" if np.isnan(value) else f"{value:.3f}" for value in row)
            lines.append(f"| {method} | {figures} | {gain(linear, str(method))} |")
        lines.append("")
    return "\n".join(lines)


def summary(results: pd.DataFrame, metric: str) -> str:
    """Return means over runs as Markdown, one row per method and one column per task."""
    return means(results, metric, "task", TASKS, METHODS)


def overview(results: pd.DataFrame, metric: str) -> str:
    """Return one row per task as Markdown: both ways of scforge, and their differences from the best other method.

    The best other method is one that has three runs or more.
    """
    names = ("query mapped", "trained on both", "best other method", "mapped vs. best", "both vs. best")
    lines = [f"| task | n | {' | '.join(names)} |"]
    lines.append(f"|{'---|' * 7}")
    for task in TASKS:
        of_task = results[(results["metric"] == metric) & (results["task"] == task)]
        if OURS[0] not in set(of_task["method"]):
            continue
        wide = of_task.pivot(index="run", columns="method", values="value")
        best = best_other(wide)
        wide = wide.dropna(subset=[OURS[0], best])
        means = wide.mean().reindex([*OURS, best])
        cells = ["" if np.isnan(value) else f"{value:.3f}" for value in means]
        cells[2] += f" ({best})"
        cells += [gain(wide, best, ours) for ours in OURS]
        lines.append(f"| {QUESTIONS[task]} | {len(wide)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gain(linear: pd.DataFrame, method: str, ours: str = OURS[0]) -> str:
    """Return the mean paired difference of F1 of our row from a method, with its 95 % interval over runs."""
    if method == ours or ours not in linear:
        return ""
    paired = (linear[ours] - linear[method]).dropna()
    if len(paired) < 2:
        return f"{paired.mean():+.3f}, one run" if len(paired) else ""
    return difference(paired) + (f" (n = {len(paired)})" if len(paired) < len(linear) else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("SCFORGE_DATA"), help="folder with the h5ad files")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--first-run", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="print the table of what is kept, and measure nothing")
    parser.add_argument(
        "--docs",
        type=Path,
        nargs="+",
        help="rewrite the tables of these pages behind comments '%% transfer METRIC' or '<!-- overview METRIC -->'",
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    keys = ["task", "run", "method", "metric"]
    if args.docs is not None:
        kept = read(RESULTS, keys)
        for page in args.docs:
            rewrite(page, "transfer", partial(summary, kept))
            rewrite(page, "overview", partial(overview, kept))
        return
    kept = read(RESULTS, keys) if args.table else keep(measured(args), RESULTS, keys)
    print(table(kept))


if __name__ == "__main__":
    main()
