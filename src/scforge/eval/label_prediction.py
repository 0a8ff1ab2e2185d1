"""Benchmarks that predict labels from embeddings, and the geometry of an embedding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from scforge._checks import check_count, check_seed, check_share
from scforge.errors import DataError, OptionError, listing, warn
from scforge.eval.base import Benchmark, as_array, check_column, register_benchmark
from scforge.eval.report import bootstrap_weights, weighted_f1

_MISSING_TEXTS = ("nan", "NaN", "None", "<NA>", "", "unknown")
"""Labels that may stand for none."""


@register_benchmark("label_prediction")
class LabelPrediction(Benchmark):
    """Cross-validated macro-F1 of k nearest neighbours and of logistic regression.

    The folds are stratified and the same for every embedding. Cells without a label take no part. The logistic
    regression sees standardised dimensions; the scaling is fitted on the training folds.

    Parameters
    ----------
    labels_key
        Column of obs with the labels.
    n_folds
        Number of folds.
    n_neighbors
        Neighbours k.
    seed
        Seed of the folds.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> labels = np.repeat(["a", "b"], 50)
    >>> embedding = np.random.default_rng(0).normal(size=(100, 2)) + (labels == "a")[:, None] * 10
    >>> LabelPrediction("label").run(embedding, pd.DataFrame({"label": labels}))
    {'knn_macro_f1': 1.0, 'logreg_macro_f1': 1.0}
    """

    metrics = ("knn_macro_f1", "logreg_macro_f1")
    n_draws = 1_000
    _last: tuple[bytes, dict[str, np.ndarray]] | None = None

    def __init__(self, labels_key: str, n_folds: int = 5, n_neighbors: int = 15, seed: int = 0) -> None:
        check_folds(n_folds, n_neighbors)
        self.labels_key = labels_key
        self.n_folds = n_folds
        self.n_neighbors = n_neighbors
        self.seed = check_seed(seed)

    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        """Return ``knn_macro_f1`` and ``logreg_macro_f1``, in [0, 1].

        Raises
        ------
        DataError
            If the column is missing, or a label has fewer cells than there are folds.
        """
        from sklearn.metrics import f1_score

        labels, predicted = self._predicted(embedding, obs)
        return {name: float(f1_score(labels, found, average="macro")) for name, found in predicted.items()}

    def resampled(self, embedding: np.ndarray, obs: pd.DataFrame, *, n: int, seed: int) -> pd.DataFrame:
        """Return the figures on bootstrapped cells, each with the label that was predicted for it in its fold."""
        labels, predicted = self._predicted(embedding, obs)
        names, codes = np.unique(labels, return_inverse=True)
        weights = bootstrap_weights(len(labels), n, seed=seed)
        draws = {
            name: weighted_f1(codes, np.searchsorted(names, found), len(names), weights)[:, 0]
            for name, found in predicted.items()
        }
        return pd.DataFrame(draws)

    def _predicted(self, embedding: np.ndarray, obs: pd.DataFrame) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the labels, and those that each model predicts for cells that it did not see; the last are kept."""
        from sklearn.model_selection import StratifiedKFold, cross_val_predict

        kept, labels = self._labels(obs)
        cells = check_embedding(embedding, len(obs))[kept]
        asked = hashlib.blake2b(repr((cells.shape, self.seed, labels.tolist())).encode())
        asked.update(np.ascontiguousarray(cells).tobytes())
        if self._last is None or self._last[0] != asked.digest():
            folds = StratifiedKFold(self.n_folds, shuffle=True, random_state=self.seed)
            found = {name: cross_val_predict(model, cells, labels, cv=folds) for name, model in self._models().items()}
            self._last = asked.digest(), found
        return labels, self._last[1]

    def _models(self) -> dict[str, Any]:
        from sklearn.linear_model import LogisticRegression
        from sklearn.neighbors import KNeighborsClassifier
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        return {
            "knn_macro_f1": KNeighborsClassifier(self.n_neighbors),
            "logreg_macro_f1": make_pipeline(StandardScaler(), LogisticRegression(max_iter=2_000)),
        }

    def check(self, obs: pd.DataFrame) -> None:
        """Raise :class:`~scforge.errors.DataError` where :meth:`run` would."""
        self._labels(obs)
        warn_of_missing(obs, self.labels_key)

    def describe(self, obs: pd.DataFrame) -> dict[str, str]:
        """Return how many cells are scored, which labels are left out, and what is drawn again for intervals."""
        facts = {"cells scored": f"{len(self._labels(obs)[0]):,} of {len(obs):,}"}
        if left_out := self._left_out(obs):
            facts["labels left out"] = ", ".join(left_out)
        return facts | {"drawn again": "cells"}

    def _left_out(self, obs: pd.DataFrame) -> tuple[str, ...]:
        """Return the labels that take no part, each with the number of its cells; here, none."""
        return ()

    def _labels(self, obs: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the cells that take part, and their labels."""
        labelled, labels = labels_of(obs, self.labels_key)
        names, sizes = np.unique(labels, return_counts=True)
        if (sizes < self.n_folds).any():
            rarest = f"label {str(names[sizes.argmin()])!r} has {sizes.min()} cells"
            raise DataError(
                f"labels_key={self.labels_key!r}: {rarest}, fewer than n_folds={self.n_folds}; leave it out, lower "
                "n_folds, or take cell_type_annotation, which passes over rare types."
            )
        check_neighbors(self.n_neighbors, self.n_folds, len(labels))
        return np.flatnonzero(labelled), labels


def check_folds(n_folds: int, n_neighbors: int) -> None:
    """Raise :class:`~scforge.errors.OptionError` unless so many folds and neighbours make sense."""
    check_count("n_folds", n_folds, "folds")
    if n_folds < 2:
        raise OptionError(f"n_folds={n_folds} is too few; cross-validation needs at least 2.")
    check_count("n_neighbors", n_neighbors, "cells")


def check_neighbors(n_neighbors: int, n_folds: int, n_cells: int) -> None:
    """Raise :class:`~scforge.errors.DataError` if the training folds have fewer cells than neighbours are asked for."""
    fewest = n_cells - -(-n_cells // n_folds)
    if n_neighbors > fewest:
        raise DataError(
            f"n_neighbors={n_neighbors} is more than the {fewest} labelled cells that n_folds={n_folds} leaves to "
            "learn from; lower it or score more cells."
        )


def check_finite(embedding: np.ndarray) -> np.ndarray:
    """Return an embedding as an array, or raise :class:`~scforge.errors.DataError` if it holds NaN or infinity.

    A sparse matrix, or a table of numbers, is one, too.
    """
    embedding = as_array(embedding)
    if not np.isfinite(embedding).all():
        raise DataError("the embedding holds values that are not numbers; it cannot be evaluated.")
    return embedding


def check_embedding(embedding: np.ndarray, n_cells: int) -> np.ndarray:
    """Return an embedding of so many cells as floats, shape (N, D), or raise :class:`~scforge.errors.DataError`."""
    embedding = check_finite(embedding)
    if embedding.ndim != 2 or embedding.shape[0] != n_cells or embedding.shape[1] == 0:
        raise DataError(
            f"the embedding has the shape {embedding.shape}, but there are {n_cells} cells; give one row for each, in "
            "the order of obs."
        )
    return embedding if embedding.dtype in (np.float32, np.float64) else embedding.astype(np.float32)


def labels_of(obs: pd.DataFrame, key: str, *, argument: str = "labels_key") -> tuple[np.ndarray, np.ndarray]:
    """Return which cells have a label, bool, shape (N,), and the labels of those, as text.

    Raises
    ------
    DataError
        If the column is missing, there are fewer than two labels, or two of them are the same text, e.g. 1 and "1".
    """
    check_column(argument, key, obs)
    labelled = np.asarray(obs[key].notna())
    labels = np.asarray(obs[key], dtype=object)[labelled].astype(str)
    n_labels = len(np.unique(labels))
    texts: dict[str, Any] = {}
    for value in pd.unique(np.asarray(obs[key], dtype=object)[labelled]):
        if (other := texts.setdefault(str(value), value)) is not value:
            kinds = type(other).__name__, type(value).__name__
            raise DataError(
                f"{argument}={key!r} holds {str(value)!r} as {kinds[0]} and as {kinds[1]}, which are one text; rename "
                "one of them, or make all of them text."
            )
    if n_labels < 2:
        found = f"one value only ({str(labels[0])!r})" if n_labels else "no value in any cell"
        raise DataError(f"{argument}={key!r} has {found}; choose a column with two or more.")
    return labelled, labels


def warn_of_missing(obs: pd.DataFrame, key: str, *, argument: str = "labels_key") -> None:
    """Warn of labels that may stand for a missing one, e.g. the text "nan"."""
    if odd := [text for text in _MISSING_TEXTS if (obs[key].astype(object) == text).any()]:
        warn(
            f"{argument}={key!r} has the label {listing(odd)}, which is taken for a class; if it stands for a missing "
            "label, replace it by numpy.nan."
        )


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


@register_benchmark("cell_type_annotation")
class CellTypeAnnotation(LabelPrediction):
    """Cross-validated macro-F1 and accuracy of k nearest neighbours.

    Cheap enough to run during training, where :class:`~scforge.eval.LabelPrediction` would take long. The folds are
    stratified and the same for every embedding. Cells without a label take no part, and neither do those of a label
    that has fewer cells than there are folds: a warning names these.

    Parameters
    ----------
    labels_key
        Column of obs with the cell types.
    n_folds
        Number of folds.
    n_neighbors
        Neighbours k.
    seed
        Seed of the folds.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> labels = np.repeat(["a", "b"], 50)
    >>> embedding = np.random.default_rng(0).normal(size=(100, 2)) + (labels == "a")[:, None] * 10
    >>> CellTypeAnnotation("label").run(embedding, pd.DataFrame({"label": labels}))
    {'macro_f1': 1.0, 'accuracy': 1.0}
    """

    metrics = ("macro_f1", "accuracy")
    _warned_of: tuple[str, ...] = ()

    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        """Return ``macro_f1`` (the mean over labels) and ``accuracy`` (over cells), in [0, 1].

        Raises
        ------
        DataError
            If the column is missing, or fewer than two labels have enough cells.

        Warns
        -----
        ScforgeWarning
            If labels are left out; once for each set of them.
        """
        from sklearn.metrics import accuracy_score, f1_score

        labels, predicted = self._predicted(embedding, obs)
        return {
            "macro_f1": float(f1_score(labels, predicted["knn"], average="macro")),
            "accuracy": float(accuracy_score(labels, predicted["knn"])),
        }

    def resampled(self, embedding: np.ndarray, obs: pd.DataFrame, *, n: int, seed: int) -> pd.DataFrame:
        """Return the figures on bootstrapped cells, each with the label that was predicted for it in its fold."""
        labels, predicted = self._predicted(embedding, obs)
        names, codes = np.unique(labels, return_inverse=True)
        found = np.searchsorted(names, predicted["knn"])
        weights = bootstrap_weights(len(labels), n, seed=seed)
        return pd.DataFrame(weighted_f1(codes, found, len(names), weights), columns=list(self.metrics))

    def _models(self) -> dict[str, Any]:
        from sklearn.neighbors import KNeighborsClassifier

        return {"knn": KNeighborsClassifier(self.n_neighbors)}

    def _labels(self, obs: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the cells that take part, and their labels; warn of labels that are left out."""
        labelled, labels = labels_of(obs, self.labels_key)
        names, sizes = np.unique(labels, return_counts=True)
        rare = sizes < self.n_folds
        left_out = self._left_out(obs)
        if (~rare).sum() < 2:
            raise DataError(
                f"fewer than 2 labels of obs[{self.labels_key!r}] have the {self.n_folds} cells that n_folds asks for "
                f"(too few: {', '.join(left_out)}); lower n_folds or score more cells."
            )
        if left_out and left_out != self._warned_of:
            self._warned_of = left_out
            warn(
                f"cell_type_annotation leaves out labels of obs[{self.labels_key!r}] with fewer cells than "
                f"n_folds={self.n_folds}: {', '.join(left_out)}."
            )
        common = ~np.isin(labels, names[rare])
        check_neighbors(self.n_neighbors, self.n_folds, int(common.sum()))
        return np.flatnonzero(labelled)[common], labels[common]

    def _left_out(self, obs: pd.DataFrame) -> tuple[str, ...]:
        names, sizes = np.unique(labels_of(obs, self.labels_key)[1], return_counts=True)
        pairs = zip(names.tolist(), sizes, strict=True)
        return tuple(f"{name!r} ({size})" for name, size in pairs if size < self.n_folds)


_CONSTANT = 1e-6
"""A dimension that varies by less than this share of the size of the embedding does not vary."""
_FEWEST_RANKS, _MOST_COSINE, _MOST_CONSTANT = 2.0, 0.99, 0.9


@register_benchmark("geometry")
class Geometry(Benchmark):
    """Effective rank, mean cosine and share of the first component: figures in which a collapse shows.

    They need no labels, and say nothing of what an embedding knows: noise has a higher effective rank than any
    embedding of cells. So no intervals are computed, and nothing is tested.

    ``effective_rank``
        exp of the entropy of the singular values divided by their sum [1]_, of the embedding as it is, not centred, as
        in RankMe [2]_; from 1, where all cells lie on one line through the origin, to D. 0 if all values are zero.
    ``mean_cosine``
        Mean cosine of all pairs of different cells: (S - N) / (N (N - 1)), where S is the squared length of the sum
        of the unit vectors of the cells. 1 if all point the same way. Cells at the origin are left out.
    ``top_component_share``
        Share of the variance along the first principal component; 1 if nothing varies.
    ``constant_dims``
        Share of the dimensions whose standard deviation is less than 1e-6 of the root mean square of all values.

    References
    ----------
    .. [1] Roy and Vetterli (2007), EUSIPCO, 606-610.
    .. [2] Garrido et al. (2023), ICML, arXiv:2210.02885; its epsilon is left out.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> embedding = np.random.default_rng(0).normal(size=(500, 10))
    >>> scores = Geometry().run(embedding, pd.DataFrame(index=range(500)))
    >>> round(scores["effective_rank"]), scores["constant_dims"], is_collapsed(scores)
    (10, 0.0, False)
    >>> is_collapsed(Geometry().run(embedding + 100, pd.DataFrame(index=range(500))))
    True
    """

    metrics = ("effective_rank", "mean_cosine", "top_component_share", "constant_dims")
    ranks = False
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"mean_cosine", "top_component_share", "constant_dims"})

    def check(self, obs: pd.DataFrame) -> None:
        """Raise :class:`~scforge.errors.DataError` if there are fewer than two cells."""
        if len(obs) < 2:
            raise DataError(f"geometry needs at least 2 cells, but there are {len(obs)}; score more cells.")

    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        """Return one figure for each of :attr:`metrics`.

        ``mean_cosine`` is NaN if fewer than two cells have a direction.

        Raises
        ------
        DataError
            If there are fewer than two cells, or the embedding is not finite or not one of these cells.
        """
        self.check(obs)
        cells = check_embedding(embedding, len(obs)).astype(np.float64)
        centred = cells - cells.mean(axis=0)
        deviations, size = centred.std(axis=0), np.sqrt(np.mean(cells**2))
        variances = _spectrum(centred)
        # Rounding leaves a little variance even where all rows are the same.
        varies = deviations.max() > _CONSTANT * size
        return {
            "effective_rank": _effective_rank(np.sqrt(_spectrum(cells))),
            "mean_cosine": _mean_cosine(cells),
            "top_component_share": float(variances.max() / variances.sum()) if varies else 1.0,
            "constant_dims": float(np.mean(deviations <= _CONSTANT * size)),
        }

    def resampled(self, embedding: np.ndarray, obs: pd.DataFrame, *, n: int, seed: int) -> None:
        """Return None: see the class."""


def is_collapsed(scores: Mapping[str, float]) -> bool:
    """Tell from the figures of :class:`Geometry` whether an embedding has collapsed.

    So it is where the effective rank is below 2, the mean cosine above 0.99, or more than 0.9 of the dimensions are
    constant: all cells lie at about one point, in one direction, or on one line. The limits are ours.

    Parameters
    ----------
    scores
        What :meth:`Geometry.run` returned.

    Returns
    -------
    Whether it has.

    Examples
    --------
    >>> is_collapsed({"effective_rank": 24.0, "mean_cosine": 0.1, "constant_dims": 0.0})
    False
    >>> is_collapsed({"effective_rank": 1.2, "mean_cosine": 0.999, "constant_dims": 0.0})
    True
    """
    return (
        scores["effective_rank"] < _FEWEST_RANKS
        or scores["mean_cosine"] > _MOST_COSINE
        or scores["constant_dims"] > _MOST_CONSTANT
    )


def _spectrum(cells: np.ndarray) -> np.ndarray:
    """Return the squared singular values of a matrix, float64, by the smaller of its two Gram matrices."""
    gram = cells.T @ cells if cells.shape[0] >= cells.shape[1] else cells @ cells.T
    return np.clip(np.linalg.eigvalsh(gram), 0, None)


def _effective_rank(singular: np.ndarray) -> float:
    if not singular.any():
        return 0.0
    shares = singular[singular > 0] / singular.sum()
    return float(np.exp(-np.sum(shares * np.log(shares))))


def _mean_cosine(cells: np.ndarray) -> float:
    lengths = np.linalg.norm(cells, axis=1)
    units = cells[lengths > 0] / lengths[lengths > 0, None]
    n = len(units)
    return float((np.sum(units.sum(axis=0) ** 2) - n) / (n * (n - 1))) if n > 1 else float("nan")
