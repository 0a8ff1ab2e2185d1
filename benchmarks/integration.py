"""Does the default Encoder integrate all cells of several batches better than PCA, Harmony, scVI and CONCORD?

Every method is fitted without labels on the same 80 % of the cells, drawn for each run, with the seed of the run. The
scores are scib-metrics' on up to 3,000 of these cells: `total` is 0.6 `bio` + 0.4 `batch`, and `total_without_leiden`
leaves out NMI and ARI of Leiden clusters. Methods are those of ``transfer.py``, but scVI stops early; scANVI alone
learns from labels. Hyper-parameters may be chosen on the data sets in ``TUNING`` only; those in ``TEST`` are and stay
tests, and are run once, with everything fixed. The results go into ``benchmarks/results/integration.csv``, from which
``--docs`` makes tables::

    python benchmarks/integration.py --data FOLDER --runs 3
    python benchmarks/integration.py --datasets protocols --methods scforge Harmony --runs 2
    python benchmarks/integration.py --docs docs/embeddings.md
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import transfer
from _tables import best_other, difference, keep, means, read, rewrite, task_parser
from _transfer_tasks import (
    BATCH,
    LABEL,
    PBMC,
    Pair,
    blood,
    condition,
    drawn,
    kang,
    prepared,
    protocol,
    simulated_donors,
    study,
    with_donor_effects,
    with_hidden_labels,
)
from transfer import trained_once

from scforge.datasets import load
from scforge.eval import Scib
from scforge.training.correction import LatentCorrection

RESULTS = Path(__file__).parent / "results" / "integration.csv"
N_SCORED = 3_000
N_DONORS = 4
QUESTIONS = {
    "protocols": "cell lines, five batches of two protocols (sc_mixology, used for tuning)",
    "condition": "blood with and without interferon, the condition as batch (kang_ifnb, used for tuning)",
    "simulated_donors": "six simulated donors (from kang_ifnb, used for tuning)",
    "many_types": "19 types of 5 to 329 cells in four simulated donors (from paul15_mouse, used for tuning)",
    "donors": "blood of eight donors (kang_ctrl_8donor, test)",
    "studies": "these donors and PBMC 3k of another study (test)",
    "sorted": "FACS-sorted cells and CITE-seq cells, by sort and by protein (test)",
    "patients": "tumors of five patients with and without panobinostat, by treatment (glioblastoma_panobinostat, test)",
    "absent_types": "three simulated donors, each without other types (from pbmc3k, test)",
    "unequal": "simulated donors with 88, 10 and 2 % of the cells (from pbmc3k, test)",
    "tiny": "two simulated donors, and one of 20 cells (from pbmc3k, test)",
    "confounded": "two simulated donors that share one type of eight (from pbmc3k, test)",
}


def halves_drawn(cells: ad.AnnData, seed: int) -> Pair:
    """Return the cells of a run in two parts, as the methods of ``transfer.py`` expect them."""
    half = cells.n_obs // 2
    return drawn((cells[:half].copy(), cells[half:].copy()), seed)


def both(pair: Pair) -> ad.AnnData:
    return ad.concat(pair, index_unique="-")


def many_types(folder: str | None) -> ad.AnnData:
    """Types of very unequal size in four simulated donors; chosen on.

    Of each type a share of the cells is kept, log-normal (sd 0.7) and at most one. A donor has a random share of each
    type (log-normal, sd 1), lacks it with a probability of 0.2, and has an effect as in ``simulated_donors``.
    """
    generator = np.random.default_rng(0)
    adata = load("paul15_mouse", folder)
    cells = prepared(adata, adata.obs["paul15_clusters"], "paul15")
    labels = cells.obs[LABEL].astype(str).to_numpy()
    donors = np.full(cells.n_obs, -1)
    for name in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == name))
        rows = rows[: max(5, round(len(rows) * min(1.0, generator.lognormal(-0.5, 0.7))))]
        shares = generator.lognormal(0, 1.0, N_DONORS) * (generator.random(N_DONORS) > 0.2) + 1e-9
        donors[rows] = generator.choice(N_DONORS, len(rows), p=shares / shares.sum())
    return with_donor_effects(cells[donors >= 0].copy(), donors[donors >= 0], generator)


def simulated(folder: str | None) -> ad.AnnData:
    """Six simulated donors, with type and condition as the label, because donors differ in the share of both."""
    conditions = load("kang_ifnb", folder).obs["condition"].astype(str)
    cells = ad.concat(simulated_donors(folder, 0))
    cells.obs[LABEL] = (cells.obs[LABEL].astype(str) + " " + conditions[cells.obs_names]).astype("category")
    return cells


def patients(folder: str | None) -> ad.AnnData:
    adata = ad.read_h5ad(Path(folder or ".") / "glioblastoma_panobinostat.h5ad")
    return prepared(adata, adata.obs["condition"], adata.obs["donor"].astype(str))


def few_in_common(kind: str, folder: str | None) -> ad.AnnData:
    """Simulated donors, with effects as in ``simulated_donors``, that have few types or few cells in common; tests."""
    generator = np.random.default_rng(2_000)
    adata = load("pbmc3k", folder)
    cells = prepared(adata, adata.obs["cell_type"].map(PBMC), "pbmc3k")
    cells = cells[:, np.asarray((cells.X > 0).sum(axis=0)).ravel() >= 3].copy()
    types = cells.obs[LABEL].cat.codes.to_numpy()
    if kind == "absent_types":
        donors = (types + generator.choice([1, 2], cells.n_obs)) % 3
    elif kind == "unequal":
        donors = generator.choice(3, cells.n_obs, p=[0.88, 0.1, 0.02])
    elif kind == "tiny":
        donors = generator.choice(2, cells.n_obs)
        donors[generator.permutation(cells.n_obs)[:20]] = 2
    else:
        donors = np.where(types == 0, generator.choice(2, cells.n_obs), types % 2)
    return with_donor_effects(cells, donors, generator)


TUNING: dict[str, Callable[[str | None], ad.AnnData]] = {
    "protocols": lambda folder: both(protocol(folder, 0)),
    "condition": lambda folder: both(condition(folder, 0)),
    "simulated_donors": simulated,
    "many_types": many_types,
}
TEST: dict[str, Callable[[str | None], ad.AnnData]] = {
    "donors": kang,
    "studies": lambda folder: both(study(folder, 0)),
    "sorted": lambda folder: both(blood("facs", "cite", folder, 0)),
    "patients": patients,
    **{kind: partial(few_in_common, kind) for kind in ("absent_types", "unequal", "tiny", "confounded")},
}
DATASETS = {**TUNING, **TEST}


def components(pair: Pair, seed: int, *, scale: bool) -> tuple[np.ndarray, np.ndarray]:
    """Principal components of all cells."""
    found, _ = transfer.components((both(pair), pair[1]), seed, scale=scale)
    return transfer.halves(found, pair)


def scvi(pair: Pair, seed: int, *, tuned: bool, learns_labels: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """scVI, or scANVI that starts from it and learns from the labels of half of the scored cells."""
    cells, _ = with_hidden_labels(both(pair), seed)
    return transfer.halves(transfer.scvi_of_all(pair, cells, seed, tuned=tuned, learns_labels=learns_labels), pair)


def scforge(
    pair: Pair, seed: int, *, correction: float = 1.0, power: float | None = None, align: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Our default, with its own correction, or with one that keeps another power of the standard deviations."""
    name = "aligned" if align else "scforge"
    model = trained_once(pair, lambda: transfer.encoder(both(pair), seed, align=align), name)
    if power is None:
        return transfer.halves(model.get_latent_representation(key_added=None, correction=correction), pair)
    embeddings = model.get_latent_representation(key_added=None)
    codes = np.unique(model.adata.obs[BATCH], return_inverse=True)[1]
    return transfer.halves(LatentCorrection.fit(embeddings, codes, power=power).apply_to(embeddings, codes), pair)


LABELED = "scANVI, half of the labels"
METHODS: dict[str, Callable[[Pair, int], tuple[np.ndarray, np.ndarray]]] = {
    "scforge": partial(scforge, correction=0.0),
    "scforge, half corrected": partial(scforge, correction=0.5),
    "scforge, corrected": partial(scforge, correction=1.0),
    "scforge, aligned": partial(scforge, correction=0.0, align=True),
    "scforge, aligned and corrected": partial(scforge, correction=1.0, align=True),
    "scforge, Harmony on it": partial(scforge, power=1.0),
    "scforge, half whitened, Harmony": partial(scforge, power=0.5),
    "scforge, whitened, Harmony": partial(scforge, power=0.0),
    "PCA": partial(components, scale=False),
    "PCA, scaled genes": partial(components, scale=True),
    "Harmony": partial(transfer.harmony, scale=False),
    "Harmony, scaled genes": partial(transfer.harmony, scale=True),
    "scVI": partial(scvi, tuned=False),
    "scVI, larger": partial(scvi, tuned=True),
    LABELED: partial(scvi, tuned=True, learns_labels=True),
    "CONCORD": partial(transfer.concord, both=True),
}


def all_scores(embedding: np.ndarray, before: np.ndarray, cells: ad.AnnData, seed: int) -> dict[str, float]:
    """Return all scores of scIB of some of the cells."""
    rows = np.sort(np.random.default_rng(seed).permutation(cells.n_obs)[:N_SCORED])
    obs = cells.obs.iloc[rows]
    components = pd.DataFrame(before[rows], index=obs.index)
    return Scib(LABEL, BATCH, max_cells=None, pre_integrated=components).run(embedding[rows], obs)


def scores(embedding: np.ndarray, before: np.ndarray, cells: ad.AnnData, seed: int) -> dict[str, float]:
    """Return total, bio and batch of some of the cells, with and without Leiden clusters."""
    found = all_scores(embedding, before, cells, seed)
    biology = [found[name] for name in ("isolated_labels", "kmeans_nmi", "kmeans_ari", "silhouette_label", "clisi")]
    without = 0.6 * float(np.mean(biology)) + 0.4 * found["batch"]
    return {name: found[name] for name in ("total", "bio", "batch")} | {"total_without_leiden": without}


def measured(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    for dataset in args.datasets:
        cells = DATASETS[dataset](args.data)
        for run in range(args.first_run, args.first_run + args.runs):
            pair = halves_drawn(cells, run)
            whole, before = both(pair), np.vstack(components(pair, 0, scale=False))
            for method in args.methods:
                began = time.process_time()
                embedding = np.vstack(METHODS[method](pair, run))
                spent = time.process_time() - began + transfer.LAST.pop("to_add", 0.0)
                found = {**scores(embedding, before, whole, run), "cpu_seconds": spent}
                print(dataset, run, method, {name: round(value, 3) for name, value in found.items()}, flush=True)
                for metric, value in found.items():
                    yield {"dataset": dataset, "run": run, "method": method, "metric": metric, "value": value}


def table(results: pd.DataFrame, metric: str) -> str:
    """Return means over runs as Markdown, one row per method and one column per data set."""
    return means(results, metric, "dataset", DATASETS, METHODS)


OURS = ("scforge", "scforge, aligned and corrected")
"""The default, and what the documentation recommends for integration; both were fixed before the tests."""


def overview(results: pd.DataFrame, metric: str, names: Iterable[str] = tuple(QUESTIONS)) -> str:
    """Return a row per data set as Markdown: ours, the best other method without labels, and the paired differences."""
    lines = ["| data set | n | default (1) | aligned, corrected (2) | best other method (3) | (1) - (3) | (2) - (3) |"]
    lines.append(f"|{'---|' * 7}")
    for name in names:
        part = results[(results["dataset"] == name) & (results["metric"] == metric)]
        wide = part.pivot(index="run", columns="method", values="value").drop(columns=LABELED, errors="ignore")
        if not {*OURS} <= {*wide} or wide[list(OURS)].count().min() < 3:
            continue
        best = best_other(wide)
        paired = wide[[*OURS, best]].dropna()
        shown = [f"{paired[ours].mean():.3f}" for ours in OURS]
        gains = [difference(paired[ours] - paired[best]) for ours in OURS]
        other = f"{paired[best].mean():.3f} ({best})"
        lines.append(f"| {QUESTIONS[name]} | {len(paired)} | {' | '.join([*shown, other, *gains])} |")
    return "\n".join(lines)


def main() -> None:
    parser = task_parser(__doc__, DATASETS, default=list(DATASETS), runs=3, option="--datasets")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    keys = ["dataset", "run", "method", "metric"]
    if args.docs is not None:
        kept = read(RESULTS, keys)
        for page in args.docs:
            rewrite(page, "integration", partial(table, kept))
            rewrite(page, "whole", partial(overview, kept))
            rewrite(page, "whole_tests", partial(overview, kept, names=TEST))
        return
    kept = keep(measured(args), RESULTS, keys)
    print(overview(kept, "total"))
    print(table(kept, "total"))


if __name__ == "__main__":
    main()
