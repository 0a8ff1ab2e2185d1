"""How well cell types can be read off an embedding in donors, or batches, that were not learned from.

Shapes: N cells, D dimensions, L labels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd

from scforge._checks import check_seed, check_share
from scforge.errors import DataError, listing, warn
from scforge.eval.base import Benchmark, register_benchmark
from scforge.eval.label_prediction import check_embedding, check_folds, labels_of, warn_of_missing

__all__ = ["CellTypeProbe"]

_CLASSIFIERS = ("linear", "knn")
_DUPLICATES = 0.01
"""Share of cells that may have the coordinates of a cell of another fold before somebody is told."""
_KEPT = 64
"""Embeddings whose predictions are remembered."""


@register_benchmark("cell_type_probe")
class CellTypeProbe(Benchmark):
    """Logistic regression and k nearest neighbours, cross-validated over whole donors, with the rare types apart.

    Each cell is predicted once, by classifiers that saw no cell of its fold. Folds hold out whole groups where there is
    a ``groups_key``, one group a fold if there are no more groups than folds, and are otherwise stratified; they are
    the same for every embedding. The logistic regression, with scikit-learn's defaults, sees standardised dimensions,
    and the scaling is fitted on the training folds.

    Cells without a label or group take no part, and neither do those of a label that cannot be tested: it has fewer
    cells than there are folds, or cells in one group or fold only. A warning names these.

    Parameters
    ----------
    labels_key
        Column of obs with the cell types.
    groups_key
        Column of obs with the groups that are held out whole, e.g. donors; None holds out cells.
    n_folds
        Number of folds.
    n_neighbors
        Neighbours k.
    rare_share
        A label with less than this share of the cells is rare.
    seed
        Seed of the stratified folds; those of groups are always the same.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> obs = pd.DataFrame({"label": np.repeat(["a", "b"], 50), "donor": np.tile(["x", "y"], 50)})
    >>> embedding = np.random.default_rng(0).normal(size=(100, 2)) + (obs["label"] == "a").to_numpy()[:, None] * 10
    >>> scores = CellTypeProbe("label", "donor").run(embedding, obs)
    >>> scores["linear_macro_f1"], scores["knn_accuracy"], scores["knn_rare_recall"]
    (1.0, 1.0, nan)
    """

    metrics = (
        "linear_macro_f1",
        "linear_accuracy",
        "linear_rare_recall",
        "knn_macro_f1",
        "knn_accuracy",
        "knn_rare_recall",
    )
    n_draws: ClassVar[int] = 1_000
    _warned_of: tuple[str, ...] = ()

    def __init__(
        self,
        labels_key: str,
        groups_key: str | None = None,
        n_folds: int = 5,
        n_neighbors: int = 15,
        rare_share: float = 0.02,
        seed: int = 0,
    ) -> None:
        check_folds(n_folds, n_neighbors)
        self.labels_key = labels_key
        self.groups_key = groups_key
        self.n_folds = n_folds
        self.n_neighbors = n_neighbors
        self.rare_share = check_share("rare_share", rare_share)
        self.seed = check_seed(seed)
        self._predicted: dict[bytes, np.ndarray] = {}

    def check(self, obs: pd.DataFrame) -> None:
        """Raise :class:`~scforge.errors.DataError` where :meth:`run` would."""
        self._plan(obs)
        warn_of_missing(obs, self.labels_key)
        if self.groups_key is not None:
            warn_of_missing(obs, self.groups_key, argument="groups_key")

    def describe(self, obs: pd.DataFrame) -> dict[str, str]:
        """Return how many cells are scored, which labels are left out, and what is drawn again for intervals."""
        plan = self._plan(obs)
        facts = {"cells scored": f"{len(plan.rows):,} of {len(obs):,}"}
        if plan.left_out:
            facts["labels left out"] = ", ".join(plan.left_out)
        n_groups = self.n_units(obs)
        return facts | {"drawn again": "cells" if n_groups is None else f"groups of {self.groups_key} ({n_groups})"}

    def n_units(self, obs: pd.DataFrame) -> int | None:
        """Return the number of groups that take part; None without groups."""
        groups = self._plan(obs).groups
        return None if groups is None else len(np.unique(groups))

    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        """Return one figure for each of :attr:`metrics`, in [0, 1].

        Of each classifier: ``macro_f1``, the mean F1 of the labels; ``accuracy``, over cells; and ``rare_recall``, the
        mean recall of the rare labels, NaN if there are none.

        Raises
        ------
        DataError
            If a column is missing, two cells have one name, or fewer than two labels can be tested.

        Warns
        -----
        ScforgeWarning
            If labels are left out, once for each set of them; or if more than 1 % of the cells have exactly the
            coordinates of a cell in another fold, which may be the same cell under another name.
        """
        plan = self._plan(obs)
        return self._figures(plan, self._predict(embedding, plan, len(obs)), np.ones(len(plan.rows)))

    def resampled(self, embedding: np.ndarray, obs: pd.DataFrame, *, n: int, seed: int) -> pd.DataFrame:
        """Return the figures on bootstrap samples of the cells, or of whole groups, after the predictions were made.

        A label that a sample lacks does not count in its means.

        Parameters
        ----------
        embedding, obs
            As in :meth:`run`.
        n
            Number of samples.
        seed
            Seed of the samples.

        Returns
        -------
        `n` rows, one column a metric.
        """
        plan = self._plan(obs)
        predicted = self._predict(embedding, plan, len(obs))
        units = np.arange(len(plan.rows)) if plan.groups is None else plan.groups
        n_units, rng = units.max() + 1, np.random.default_rng(seed)
        times = (np.bincount(rng.integers(n_units, size=n_units), minlength=n_units) for _ in range(n))
        figures = [self._figures(plan, predicted, drawn[units].astype(np.float64)) for drawn in times]
        return pd.DataFrame(figures, columns=list(self.metrics))

    def _plan(self, obs: pd.DataFrame) -> _Plan:
        """Choose the cells that take part, and their folds; warn of labels that are left out."""
        if not obs.index.is_unique:
            twice = obs.index[obs.index.duplicated()].unique()
            raise DataError(
                f"{len(twice)} names of obs stand on several cells (first: {listing(twice[:3])}), so that one cell "
                "could be learned from and tested; remove the copies, or call adata.obs_names_make_unique() if they "
                "are different cells."
            )
        taken, _ = labels_of(obs, self.labels_key)
        if self.groups_key is not None:
            taken = taken & labels_of(obs, self.groups_key, argument="groups_key")[0]
        rows = np.flatnonzero(taken)
        labels, groups = (
            None if key is None else np.asarray(obs[key], dtype=object)[rows].astype(str)
            for key in (self.labels_key, self.groups_key)
        )
        assert labels is not None
        left_out = _untested(labels, groups, self.n_folds)
        kept = ~np.isin(labels, list(left_out))
        folds = np.full(len(rows), -1, dtype=np.int64)
        if len(np.unique(labels[kept])) > 1:
            folds[kept] = self._folds(labels[kept], None if groups is None else groups[kept])
            spans = {str(name): len(np.unique(folds[labels == name])) for name in np.unique(labels[kept])}
            left_out |= {name: f"{name!r} (in one fold)" for name, span in spans.items() if span < 2}
            kept = ~np.isin(labels, list(left_out))
        names, codes = np.unique(labels[kept], return_inverse=True)
        self._tell(tuple(left_out.values()), len(names))
        group_codes = None if groups is None else np.unique(groups[kept], return_inverse=True)[1]
        plan = _Plan(rows[kept], codes, len(names), folds[kept], group_codes, tuple(left_out.values()))
        plan.check(self.n_neighbors)
        return plan

    def _folds(self, labels: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
        """Return the fold of each cell, int64, shape (N,)."""
        from sklearn.model_selection import GroupKFold, StratifiedKFold

        if groups is None:
            splits = StratifiedKFold(self.n_folds, shuffle=True, random_state=self.seed).split(labels, labels)
        else:
            n_folds = min(self.n_folds, len(np.unique(groups)))
            splits = GroupKFold(n_folds).split(labels, labels, groups)
        folds = np.full(len(labels), -1, dtype=np.int64)
        for fold, (_, test) in enumerate(splits):
            folds[test] = fold
        return folds

    def _tell(self, left_out: tuple[str, ...], n_labels: int) -> None:
        """Raise if too few labels are left, and warn of those that are left out."""
        what = f"labels of obs[{self.labels_key!r}]"
        if n_labels < 2:
            raise DataError(
                f"fewer than 2 {what} can be tested in n_folds={self.n_folds} folds (left out: {', '.join(left_out)}); "
                "lower n_folds, choose another groups_key, or score more cells."
            )
        if left_out and left_out != self._warned_of:
            self._warned_of = left_out
            warn(
                f"cell_type_probe leaves out {what} that cannot be tested in n_folds={self.n_folds} folds: "
                f"{', '.join(left_out)}."
            )

    def _predict(self, embedding: np.ndarray, plan: _Plan, n_cells: int) -> np.ndarray:
        """Return the label that each classifier predicts for each cell, int64, shape (2, N)."""
        cells = check_embedding(embedding, n_cells)[plan.rows]
        key = hashlib.blake2b(np.ascontiguousarray(cells).tobytes(), digest_size=16)
        key.update(plan.rows.tobytes() + plan.labels.tobytes() + plan.folds.tobytes())
        if key.digest() not in self._predicted:
            _warn_of_duplicates(cells, plan.folds)
            while len(self._predicted) >= _KEPT:
                self._predicted.pop(next(iter(self._predicted)))
            self._predicted[key.digest()] = _out_of_fold(cells, plan, self.n_neighbors)
        return self._predicted[key.digest()]

    def _figures(self, plan: _Plan, predicted: np.ndarray, weights: np.ndarray) -> dict[str, float]:
        """Score predictions of cells that count as often as `weights` says."""
        n_labels = plan.n_labels
        rare = np.bincount(plan.labels, minlength=n_labels) < self.rare_share * len(plan.labels)
        figures: dict[str, float] = {}
        for classifier, guesses in zip(_CLASSIFIERS, predicted, strict=True):
            counts = np.bincount(plan.labels * n_labels + guesses, weights=weights, minlength=n_labels**2)
            pairs = counts.reshape(n_labels, n_labels)
            true, guessed, hits = pairs.sum(axis=1), pairs.sum(axis=0), pairs.diagonal()
            there = true > 0
            tested = rare & there
            figures[f"{classifier}_macro_f1"] = float(np.mean(2 * hits[there] / (true + guessed)[there]))
            figures[f"{classifier}_accuracy"] = float(hits.sum() / true.sum())
            figures[f"{classifier}_rare_recall"] = (
                float(np.mean(hits[tested] / true[tested])) if tested.any() else float("nan")
            )
        return {name: figures[name] for name in self.metrics}


@dataclass(frozen=True)
class _Plan:
    """Which cells are tested, and when.

    Attributes
    ----------
    rows
        Rows of the cells that take part, int64, shape (N,).
    labels
        Their labels, int64, shape (N,), below `n_labels`.
    n_labels
        Number of labels.
    folds
        Fold in which each is tested, int64, shape (N,).
    groups
        Their groups, int64, shape (N,), or None.
    left_out
        Labels that cannot be tested, and why.
    """

    rows: np.ndarray
    labels: np.ndarray
    n_labels: int
    folds: np.ndarray
    groups: np.ndarray | None
    left_out: tuple[str, ...] = ()

    def check(self, n_neighbors: int) -> None:
        """Raise unless each cell is tested once, no group is in two folds, and there are neighbours enough.

        Raises
        ------
        DataError
            If that is not so.
        """
        if len(np.unique(self.rows)) != len(self.rows) or (self.folds < 0).any():
            raise DataError("the folds do not test each cell once; a cell would be learned from and tested.")
        if self.groups is not None:
            spread = pd.DataFrame({"group": self.groups, "fold": self.folds}).drop_duplicates()["group"].duplicated()
            if spread.any():
                raise DataError(f"{spread.sum()} groups lie in several folds; they would be learned from and tested.")
        fewest = len(self.rows) - np.bincount(self.folds).max()
        if n_neighbors > fewest:
            raise DataError(
                f"n_neighbors={n_neighbors} is more than the {fewest} labelled cells that the largest fold leaves to "
                "learn from; lower it or score more cells."
            )


def _untested(labels: np.ndarray, groups: np.ndarray | None, n_folds: int) -> dict[str, str]:
    """Return the labels that no folds can test, and how to call them."""
    left_out = {}
    for name, size in zip(*np.unique(labels, return_counts=True), strict=True):
        if size < n_folds:
            left_out[str(name)] = f"{str(name)!r} ({size} cells)"
        elif groups is not None and len(np.unique(groups[labels == name])) < 2:
            left_out[str(name)] = f"{str(name)!r} (in one group)"
    return left_out


def _out_of_fold(cells: np.ndarray, plan: _Plan, n_neighbors: int) -> np.ndarray:
    """Return the label that each classifier predicts for each cell, int64, shape (2, N)."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    exact = cells.astype(np.float64)
    predicted = np.empty((len(_CLASSIFIERS), len(cells)), dtype=np.int64)
    for fold in np.unique(plan.folds):
        test = plan.folds == fold
        linear = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2_000))
        # Double precision makes the line search of the regression three times as fast.
        for i, (model, seen) in enumerate(((linear, exact), (KNeighborsClassifier(n_neighbors), cells))):
            predicted[i, test] = model.fit(seen[~test], plan.labels[~test]).predict(seen[test])
    return predicted


def _warn_of_duplicates(cells: np.ndarray, folds: np.ndarray) -> None:
    """Warn if many cells have the coordinates of a cell of another fold."""
    rows = pd.factorize(np.array([hash(row.tobytes()) for row in cells]))[0]
    pairs = pd.DataFrame({"row": rows, "fold": folds}).drop_duplicates()["row"]
    share = float(np.isin(rows, pairs[pairs.duplicated()]).mean())
    if share > _DUPLICATES:
        warn(
            f"{share:.1%} of the cells have exactly the coordinates of a cell in another fold: they are the same cells "
            "under other names, which makes the figures too good, or the embedding has collapsed."
        )
