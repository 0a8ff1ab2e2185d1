"""Pairs of labeled reference and query cells for the benchmarks of label transfer.

Hyper-parameters, also those of baselines, may be chosen on the tasks in ``TUNING`` only. Those in ``TEST`` are and stay
tests. Labels of the FACS-sorted and of the CITE-seq cells do not depend on RNA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from scipy import sparse

from scforge.datasets import load

LABEL, BATCH, UNLABELED = "label", "batch", "unlabeled"
SHARE = 0.8
KANG_TO_PBMC = {
    "CD4 T cells": "CD4 T",
    "CD8 T cells": "CD8 T",
    "B cells": "B",
    "NK cells": "NK",
    "CD14+ Monocytes": "CD14 monocyte",
    "FCGR3A+ Monocytes": "FCGR3A monocyte",
    "Dendritic cells": "dendritic",
    "Megakaryocytes": "megakaryocyte",
}
IFNB_TO_PBMC = {
    "CD4T": "CD4 T",
    "CD8T": "CD8 T",
    "B": "B",
    "NK": "NK",
    "CD14+Mono": "CD14 monocyte",
    "FCGR3A+Mono": "FCGR3A monocyte",
    "Dendritic": "dendritic",
}
PBMC = {
    "Naive CD4 T": "CD4 T",
    "Memory CD4 T": "CD4 T",
    "CD8 T": "CD8 T",
    "B": "B",
    "NK": "NK",
    "CD14+ Mono": "CD14 monocyte",
    "FCGR3A+ Mono": "FCGR3A monocyte",
    "DC": "dendritic",
    "Platelet": "megakaryocyte",
}

type Pair = tuple[ad.AnnData, ad.AnnData]
"""Reference and query: raw counts of the same genes in the same order, labels and batches in obs."""


def prepared(adata: ad.AnnData, labels: pd.Series, batches: pd.Series | str) -> ad.AnnData:
    """Return the cells with a label, with labels and batches under the names that all tasks have."""
    obs = pd.DataFrame({LABEL: labels.astype(object), BATCH: batches}, index=adata.obs_names)
    cells = ad.AnnData(sparse.csr_matrix(adata.X), obs=obs, var=pd.DataFrame(index=adata.var_names.astype(str)))
    cells = cells[obs[LABEL].notna()].copy()
    cells.obs = cells.obs.astype({LABEL: str, BATCH: str}).astype("category")
    return cells


def kang(folder: str | None) -> ad.AnnData:
    adata = load("kang_ctrl_8donor", folder)
    cells = prepared(adata, adata.obs["cluster_id"].map(KANG_TO_PBMC), adata.obs["sample_id"].astype(str))
    cells.var_names = adata.var["feature"].astype(str).to_numpy()
    return cells[:, ~cells.var_names.duplicated()].copy()


def condition(folder: str | None, seed: int) -> Pair:
    """Stimulated cells by those of the control; chosen on."""
    adata = load("kang_ifnb", folder)
    cells = prepared(adata, adata.obs["cell_type"], adata.obs["condition"])
    return cells[cells.obs[BATCH] == "control"].copy(), cells[cells.obs[BATCH] == "stimulated"].copy()


def missing(folder: str | None, seed: int) -> Pair:
    """Stimulated cells by those of the control without one type, another one in each run; chosen on."""
    reference, query = condition(folder, seed)
    types = sorted(set(reference.obs[LABEL]) & set(query.obs[LABEL]))
    return reference[reference.obs[LABEL] != types[seed % len(types)]].copy(), query


def protocol(folder: str | None, seed: int) -> Pair:
    """Drop-seq by CEL-seq2; chosen on."""
    adata = load("sc_mixology", folder)
    cells = prepared(adata, adata.obs["cell_line"], adata.obs["batch"])
    is_query = cells.obs[BATCH] == "sc_dropseq"
    return cells[~is_query].copy(), cells[is_query].copy()


def donors(folder: str | None, seed: int) -> Pair:
    """Two donors, drawn for each run, by the other six; a test."""
    cells = kang(folder)
    left_out = np.random.default_rng(seed).choice(sorted(cells.obs[BATCH].unique()), 2, replace=False)
    is_query = cells.obs[BATCH].isin(left_out)
    return cells[~is_query].copy(), cells[is_query].copy()


def study(folder: str | None, seed: int) -> Pair:
    """PBMC 3k by the eight donors of Kang et al.; a test."""
    reference, adata = kang(folder), load("pbmc3k", folder)
    query = prepared(adata, adata.obs["cell_type"].map(PBMC), "pbmc3k")
    genes = reference.var_names.intersection(query.var_names)
    return reference[:, genes].copy(), query[:, genes].copy()


def collection(folder: str | None, seed: int) -> Pair:
    """PBMC 3k by two data sets at once, of eight donors and of two conditions, in the genes of all; a test."""
    eight, query = study(folder, seed)
    adata = load("kang_ifnb", folder)
    ifnb = prepared(adata, adata.obs["cell_type"].map(IFNB_TO_PBMC), adata.obs["condition"])
    genes = eight.var_names.intersection(ifnb.var_names)
    reference = ad.concat([eight[:, genes], ifnb[:, genes]], index_unique="-", keys=["donors", "ifnb"])
    return reference, query[:, genes].copy()


def species(folder: str | None, seed: int) -> Pair:
    """Half of PBMC 3k by the other half as another species would have it; a test.

    A third of the genes has no ortholog, each other gene has a scale of its own (log-normal, sd 1, of mean one), and
    the composition differs (shares of types times log-normal factors).
    """
    generator = np.random.default_rng(seed)
    adata = load("pbmc3k", folder)
    cells = prepared(adata, adata.obs["cell_type"], "pbmc3k")
    cells = cells[:, np.asarray((cells.X > 0).sum(axis=0)).ravel() >= 3].copy()
    is_query = generator.permutation(cells.n_obs) % 2 == 1
    reference, query = cells[~is_query].copy(), cells[is_query].copy()
    labels = query.obs[LABEL].astype(str)
    factors = {name: generator.lognormal(0, 0.7) for name in sorted(labels.unique())}
    kept = generator.random(query.n_obs) < labels.map(factors).to_numpy() / max(factors.values())
    rare = labels.map(labels[kept].value_counts()).fillna(0).to_numpy() < 5
    query = query[kept | rare].copy()
    query = query[:, generator.random(query.n_vars) > 1 / 3].copy()
    scales = generator.lognormal(-0.5, 1.0, query.n_vars)
    counts = sparse.csr_matrix(query.X)
    counts.data = generator.poisson(counts.data * scales[counts.indices]).astype(np.float32)
    counts.eliminate_zeros()
    query.X = counts
    query = query[counts.getnnz(axis=1) > 0].copy()
    query.obs[BATCH] = pd.Categorical(["species"] * query.n_obs)
    return reference[:, query.var_names].copy(), query


SORTED = {
    "CD19+ B": "B",
    "CD56+ NK": "NK",
    "CD14+ Monocyte": "CD14 monocyte",
    "CD4+ T Helper2": "CD4 T",
    "CD4+/CD45RO+ Memory": "CD4 T",
    "CD4+/CD25 T Reg": "CD4 T",
    "CD4+/CD45RA+/CD25- Naive T": "CD4 T",
    "CD8+ Cytotoxic T": "CD8 T",
    "CD8+/CD45RA+ Naive Cytotoxic": "CD8 T",
}
"""Sorted populations; the CD34+ sort is left out, because it contains many other cells."""
GATED = {
    "B": "B",
    "NK": "NK",
    "CD14 Mono": "CD14 monocyte",
    "CD16 Mono": "FCGR3A monocyte",
    "CD4 T": "CD4 T",
    "CD8 T": "CD8 T",
}
DONOR_PAIRS = list(combinations(["1015", "1016", "1039", "107", "101", "1244", "1256", "1488"], 2))


def with_symbols(name: str, folder: str | None, labels: str, names: dict[str, str], batches: str) -> ad.AnnData:
    """Return a data set with gene symbols, of which the first of equal ones is kept."""
    adata = ad.read_h5ad(Path(folder or ".") / f"{name}.h5ad")
    batch = adata.obs[batches].astype(str) if batches in adata.obs else batches
    cells = prepared(adata, adata.obs[labels].map(names), batch)
    if "feature" in adata.var:
        cells.var_names = adata.var["feature"].astype(str).to_numpy()
    return cells[:, ~cells.var_names.duplicated()].copy()


BLOOD: dict[str, tuple[str, str, dict[str, str], str]] = {
    "donors": ("kang_ctrl_8donor", "cluster_id", KANG_TO_PBMC, "sample_id"),
    "pbmc3k": ("pbmc3k", "cell_type", PBMC, "pbmc3k"),
    "facs": ("zheng_facs_pbmc", "cell_type", SORTED, "facs"),
    "cite": ("pbmc10k_cite", "cell_type", GATED, "cite"),
}
"""Data sets of blood: name, column of the labels, their common names, and column of the batches or the only batch."""


def blood(reference: str, query: str, folder: str | None, seed: int) -> Pair:
    """Return two data sets of blood in the genes of both; all of these are tests."""
    pair = tuple(with_symbols(name, folder, *rest) for name, *rest in (BLOOD[reference], BLOOD[query]))
    shared = pair[0].var_names.intersection(pair[1].var_names)
    return pair[0][:, shared].copy(), pair[1][:, shared].copy()


def donor_pairs(folder: str | None, seed: int) -> Pair:
    """Two donors by the other six, another pair in each of 28 runs, all cells; a test.

    Each donor is in one pair of the runs 0, 13, 22 and 27; so in 1, 8, 23 and 26, and in 2, 7, 24 and 25.
    """
    cells = kang(folder)
    is_query = cells.obs[BATCH].isin(DONOR_PAIRS[seed])
    return cells[~is_query].copy(), cells[is_query].copy()


def simulated_donors(folder: str | None, seed: int) -> Pair:
    """Two simulated donors by four others, made of the cells of ``kang_ifnb``; chosen on.

    Each donor has a random share of each condition and type (log-normal, sd 0.7), of the counts of a cell (0.4 to 1),
    and a factor of each gene (log-normal, sd 0.4, the same in all its cells).
    """
    generator = np.random.default_rng(1_000 + seed)
    adata = load("kang_ifnb", folder)
    cells = prepared(adata, adata.obs["cell_type"], adata.obs["condition"])
    groups = cells.obs[BATCH].astype(str) + cells.obs[LABEL].astype(str)
    donors = np.empty(cells.n_obs, dtype=int)
    for rows in groups.groupby(groups).indices.values():
        shares = generator.lognormal(0, 0.7, 6)
        donors[rows] = generator.choice(6, len(rows), p=shares / shares.sum())
    cells = with_donor_effects(cells, donors, generator)
    is_query = cells.obs[BATCH].isin(["donor 4", "donor 5"]).to_numpy()
    return cells[~is_query].copy(), cells[is_query].copy()


def with_donor_effects(cells: ad.AnnData, donors: np.ndarray, generator: np.random.Generator) -> ad.AnnData:
    """Return the cells with counts as of their simulated donors, numbers from zero on, without those that lose all.

    Each donor has a share of the counts of a cell (0.4 to 1), and a factor of each gene (log-normal, sd 0.4).
    """
    shape = (donors.max() + 1, cells.n_vars)
    factors = np.minimum(generator.lognormal(-0.08, 0.4, shape), 2.5) * generator.uniform(0.4, 1, (shape[0], 1))
    counts = sparse.csr_matrix(cells.X).astype(np.float64)
    of_entries = np.repeat(donors, np.diff(counts.indptr))
    counts.data = generator.poisson(counts.data * factors[of_entries, counts.indices]).astype(np.float32)
    counts.eliminate_zeros()
    cells.X = counts.astype(np.float32)
    cells.obs[BATCH] = pd.Categorical([f"donor {donor}" for donor in donors])
    return cells[counts.getnnz(axis=1) > 0].copy()


TUNING: dict[str, Callable[[str | None, int], Pair]] = {
    "condition": condition,
    "missing": missing,
    "protocol": protocol,
    "simulated_donors": simulated_donors,
}
TEST: dict[str, Callable[[str | None, int], Pair]] = {
    "donor_pairs": donor_pairs,
    "study": study,
    "study_back": partial(blood, "pbmc3k", "donors"),
    "collection": collection,
    "species": species,
    "facs_to_cite": partial(blood, "facs", "cite"),
    "cite_to_facs": partial(blood, "cite", "facs"),
    "pbmc3k_to_facs": partial(blood, "pbmc3k", "facs"),
    "pbmc3k_to_cite": partial(blood, "pbmc3k", "cite"),
    "donors_to_facs": partial(blood, "donors", "facs"),
    "donors_to_cite": partial(blood, "donors", "cite"),
}
RUNS = {"donor_pairs": len(DONOR_PAIRS)}
"""Number of runs of a task, instead of five. The cells of these are not resampled."""


def task_pair(task: str, folder: str | None, run: int) -> Pair:
    """Return reference and query of a run: all cells of a pair of donors, else 80 % of the cells of both."""
    pair = {**TUNING, **TEST}[task](folder, run)
    return pair if task in RUNS else drawn(pair, run)


def drawn(pair: Pair, seed: int) -> Pair:
    """Return a share of the cells of both, of each type at least five where it has them."""
    parts = []
    for cells in pair:
        order = pd.Series(np.random.default_rng(seed).random(cells.n_obs), index=cells.obs_names)
        rank = order.groupby(cells.obs[LABEL].to_numpy()).rank()
        parts.append(cells[(order < SHARE).to_numpy() | (rank <= 5).to_numpy()].copy())
    return parts[0], parts[1]


GROUPS = {"tuning": list(TUNING), "test": list(TEST)}


def in_groups(names: list[str]) -> list[str]:
    """Return names of tasks, in which names of groups are replaced by their tasks."""
    return [task for name in names for task in GROUPS.get(name, [name])]


def with_hidden_labels(cells: ad.AnnData, seed: int) -> tuple[ad.AnnData, np.ndarray]:
    """Return the cells without the labels of half of the cells of each type, and which cells these are."""
    order = pd.Series(np.random.default_rng(seed).random(cells.n_obs)).groupby(cells.obs[LABEL].to_numpy())
    is_hidden = (order.rank() > np.ceil(order.transform("size") / 2)).to_numpy()
    told = cells.copy()
    told.obs[LABEL] = cells.obs[LABEL].astype(str).mask(is_hidden, UNLABELED).astype("category")
    return told, is_hidden
