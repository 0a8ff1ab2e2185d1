"""Cells, scenarios and figures of ``embedding_quality.py``.

Shapes: N cells that are scored, D dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from anndata import AnnData
from scipy.sparse import csr_matrix

from scforge.datasets import get_card, load
from scforge.eval import CellTypeProbe, Scib

DATASETS = ("sc_mixology", "kang_ctrl_8donor", "pbmc3k", "kang_ifnb")
UNSEEN = ("paul15_mouse", "merfish_mouse_brain")
"""Data sets on which nothing about the defaults was chosen."""
SCENARIOS = ("whole", "shift", "donors")
BATCH_KEYS = {"kang_ifnb": "condition"}
"""Batches of data sets whose cards name none."""
DONOR_SHARES = (0.5, 0.25, 0.17, 0.08)
"""Cells of the made donors of the scenario ``donors``, about."""
MIN = 20
"""Cells that a batch has to keep, or no label is taken from it."""
NEIGHBORS, FOLDS, RAREST = 15, 5, 3
SCORING = 1
"""To be raised when a figure is computed in another way, so that kept figures are not taken for it."""

FIGURES = {
    "total": "total",
    "bio": "bio",
    "batch": "batch",
    "knn_f1": "F1 kNN",
    "linear_f1": "F1 LR",
    "knn_f1_batches": "F1 kNN, new batch",
    "linear_f1_batches": "F1 LR, new batch",
    "knn_rare": "rare kNN",
    "linear_rare": "rare LR",
    "purity": "purity",
    "purity_absent": "purity, absent",
    "seconds": "s",
    "cpu_seconds": "CPU s",
}
"""Figures to the headings of their columns."""


@dataclass(frozen=True)
class Data:
    """Cells of a data set in a scenario.

    Attributes
    ----------
    name, scenario
        Which data set, and which scenario.
    title
        What its table is called.
    adata
        All cells, on which everything is fitted.
    labels_key, batch_key
        Columns of obs; no `batch_key` where there are no batches.
    scored
        Rows that are scored, int64, shape (N,), ascending.
    notes
        Sentences for below the table.
    """

    name: str
    scenario: str
    title: str
    adata: AnnData
    labels_key: str
    batch_key: str | None
    scored: np.ndarray
    notes: tuple[str, ...]


def open_data(name: str, folder: str | None, scenario: str, n_scored: int) -> Data | None:
    """Read a data set and draw the cells that are scored; None where the scenario needs batches, or has its own."""
    card, adata = get_card(name), load(name, folder)
    labels_key, batch_key = card.labels_key, card.batch_key
    assert labels_key is not None
    notes: list[str] = []
    if batch_key is None and name in BATCH_KEYS:
        batch_key = BATCH_KEYS[name]
        notes.append(f"The card of {name} names no batches; those here are obs[{batch_key!r}], so that what is mixed")
        notes[-1] += " away is partly a response of the cells."
    if (scenario == "shift" and batch_key is None) or (scenario == "donors" and batch_key is not None):
        return None
    if scenario == "donors":
        batch_key = "donor"
        adata, note = _with_donors(adata, labels_key)
        notes.append(note)
    if scenario == "shift":
        kept, note = _shifted(adata.obs, labels_key, batch_key)
        adata = adata[kept].copy()
        notes.append(note)
    known = adata.obs[labels_key].notna()
    if batch_key is not None:
        known &= adata.obs[batch_key].notna()
    rows = np.flatnonzero(known)
    scored = np.sort(np.random.default_rng(0).permutation(rows)[:n_scored])
    n_batches = "" if batch_key is None else f", {adata.obs[batch_key].nunique()} batches by obs[{batch_key!r}]"
    notes.insert(
        0, f"{adata.n_obs:,} cells are fitted, {len(scored):,} of {len(rows):,} with a label scored{n_batches}."
    )
    return Data(name, scenario, card.title, adata, labels_key, batch_key, scored, tuple(notes))


def _with_donors(adata: AnnData, labels_key: str) -> tuple[AnnData, str]:
    """Deal the cells of each label to donors that lose counts, each of other genes; return them, and what was done.

    Shares of a label among donors are Dirichlet with 3 times `DONOR_SHARES`. Of the counts of a gene each donor keeps
    a share of its own, half times a log-normal factor with a standard deviation of 0.5 (binomial thinning).
    """
    generator = np.random.default_rng(0)
    donors = np.array([f"donor {i}" for i in range(len(DONOR_SHARES))])
    of_labels, labels = pd.factorize(adata.obs[labels_key], use_na_sentinel=False)
    shares = generator.dirichlet(3 * np.array(DONOR_SHARES), len(labels))
    of_cells = (shares.cumsum(axis=1)[of_labels] < generator.random((adata.n_obs, 1))).sum(axis=1)
    of_cells = np.minimum(of_cells, len(donors) - 1)
    kept = np.minimum(1.0, 0.5 * np.exp(generator.normal(0, 0.5, (len(donors), adata.n_vars))))
    counts = csr_matrix(adata.X, copy=True)
    of_counts = np.repeat(of_cells, np.diff(counts.indptr))
    counts.data = generator.binomial(counts.data.astype(np.int64), kept[of_counts, counts.indices]).astype(np.float32)
    counts.eliminate_zeros()
    made = AnnData(counts, obs=adata.obs.assign(donor=pd.Categorical(donors[of_cells])), var=adata.var)
    made = made[counts.getnnz(axis=1) > 0].copy()
    sizes = ", ".join(f"{(made.obs['donor'] == donor).sum():,}" for donor in donors)
    return made, f"The donors are made ({sizes} cells): each has other shares of the labels, and half of the counts."


def _shifted(obs: pd.DataFrame, labels_key: str, batch_key: str) -> tuple[np.ndarray, str]:
    """Take the commonest label from the first half of the batches; return the cells that stay, and what was done."""
    labels, batches = obs[labels_key].astype(str).to_numpy(), obs[batch_key].astype(str).to_numpy()
    commonest = str(obs[labels_key].astype(str)[obs[labels_key].notna()].value_counts().idxmax())
    names = sorted(obs[batch_key].dropna().astype(str).unique())
    kept = np.ones(len(obs), dtype=bool)
    taken, spared = [], []
    for batch in names[: len(names) // 2]:
        gone = (batches == batch) & (labels == commonest)
        if ((batches == batch) & ~gone).sum() < MIN:
            spared.append(batch)
        else:
            kept &= ~gone
            taken.append(batch)
    note = f"{(~kept).sum():,} cells of {commonest!r} were taken from {len(taken)} of {len(names)} batches"
    note += f" ({', '.join(taken)})." if taken else "."
    if spared:
        note += f" Left alone, for they would keep fewer than {MIN} cells: {', '.join(spared)}."
    return np.flatnonzero(kept), note


class Scorer:
    """All figures of an embedding of some cells.

    Parameters
    ----------
    data
        The cells.
    components
        Their principal components, those of all cells: coordinates before integration, for ``pcr_comparison``.
    """

    def __init__(self, data: Data, components: np.ndarray) -> None:
        self._rows = data.scored
        self._obs = data.adata.obs.iloc[data.scored]
        labels_key, batch_key = data.labels_key, data.batch_key
        self._labels = self._obs[labels_key].astype(str).to_numpy()
        before = pd.DataFrame(components[data.scored], index=self._obs.index)
        self._scib = Scib(labels_key, batch_key, max_cells=None).before_integration(before)
        sizes = np.sort([n for n in self._obs[labels_key].value_counts() if n >= FOLDS])
        # The probe calls a label rare by its share of the cells that are tested.
        share = (sizes[min(RAREST, len(sizes)) - 1] + 0.5) / sizes.sum()
        self._probe = CellTypeProbe(labels_key, n_folds=FOLDS, n_neighbors=NEIGHBORS, rare_share=float(min(share, 1)))
        self._in_batches: CellTypeProbe | None = None
        self._absent = np.zeros(len(self._obs), dtype=bool)
        if batch_key is not None:
            self._batches = self._obs[batch_key].astype(str).to_numpy()
            n_batches = len(np.unique(self._batches))
            self._in_batches = CellTypeProbe(labels_key, batch_key, n_folds=n_batches, n_neighbors=NEIGHBORS)
            everywhere = pd.crosstab(data.adata.obs[labels_key].astype(str), data.adata.obs[batch_key].astype(str)) > 0
            self._absent = ~everywhere.all(axis=1).loc[self._labels].to_numpy()

    def figures(self, embedding: np.ndarray) -> dict[str, float]:
        """Return the figures but for seconds; what needs batches is not there without them."""
        one = embedding[self._rows]
        found = {name: value for name, value in self._scib.run(one, self._obs).items() if name in FIGURES}
        of_cells = self._probe.run(one, self._obs)
        for classifier in ("knn", "linear"):
            found[f"{classifier}_f1"] = of_cells[f"{classifier}_macro_f1"]
            found[f"{classifier}_rare"] = of_cells[f"{classifier}_rare_recall"]
        if self._in_batches is not None:
            of_batches = self._in_batches.run(one, self._obs)
            for classifier in ("knn", "linear"):
                found[f"{classifier}_f1_batches"] = of_batches[f"{classifier}_macro_f1"]
            purity = _purity(one, self._labels, self._batches)
            for name, cells in {"purity": purity, "purity_absent": purity[self._absent]}.items():
                if not np.isnan(cells).all():
                    found[name] = float(np.nanmean(cells))
        return found


def _purity(embedding: np.ndarray, labels: np.ndarray, batches: np.ndarray) -> np.ndarray:
    """Return the share of a cell's nearest neighbors in other batches that have its label, float64, shape (N,).

    NaN for a cell whose label no other batch has.
    """
    from sklearn.neighbors import NearestNeighbors

    shares = np.full(len(labels), np.nan)
    for batch in np.unique(batches):
        mine, others = np.flatnonzero(batches == batch), np.flatnonzero(batches != batch)
        mine = mine[np.isin(labels[mine], labels[others])]
        if len(mine):
            near = NearestNeighbors(n_neighbors=min(NEIGHBORS, len(others))).fit(embedding[others])
            found = labels[others][near.kneighbors(embedding[mine], return_distance=False)]
            shares[mine] = (found == labels[mine, None]).mean(axis=1)
    return shares
