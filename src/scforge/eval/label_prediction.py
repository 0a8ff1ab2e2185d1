"""Benchmarks that predict labels from embeddings, and the geometry of an embedding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd

from scforge._checks import check_count, check_seed, check_share
from scforge._columns import check_column, labels_of, texts_of
from scforge.errors import DataError, listing, warn
from scforge.eval.base import MIN_GROUPS, Benchmark, as_array, register_benchmark

_MAX_DUPLICATES = 0.01
"""Fraction of cells that may share coordinates with a cell in another fold without a warning."""
_MAX_CACHED = 64
"""Number of embeddings whose predictions are cached."""

_CONSTANT = 1e-6
"""Threshold for constant dimensions: standard deviation divided by the root mean square of all values."""

_MIN_RANK, _MAX_COSINE, _MAX_CONSTANT = 2.0, 0.99, 0.9


def check_embedding(embedding: np.ndarray, n_cells: int, name: str = "the embedding") -> np.ndarray:
    """Return an embedding as floats, shape (N, D). Raises :class:`~scforge.errors.DataError` if it is invalid.

    Sparse matrices and numeric tables are accepted.
    """
    embedding = as_array(embedding, name)
    if embedding.ndim != 2 or embedding.shape[0] != n_cells or embedding.shape[1] == 0:
        raise DataError(f"{name} has shape {embedding.shape}, but there are {n_cells} cells; pass one row per cell.")
    if not np.isfinite(embedding).all():
        raise DataError(f"{name} contains NaN or infinite values; remove or replace these values.")
    return embedding if embedding.dtype in (np.float32, np.float64) else embedding.astype(np.float32)


def texts_in(obs: pd.DataFrame, key: str, *, argument: str = "labels_key", warns: bool = False) -> pd.Categorical:
    """Return the text of each cell in a column of labels, or in that of another argument; missing labels are NaN.

    Raises
    ------
    DataError
        If the column is missing, or contains fewer than two labels.

    Warns
    -----
    ScforgeWarning
        With `warns`, if labels are words such as "unknown", which are treated as missing.
    """
    check_column(argument, key, obs)
    if argument == "labels_key":
        texts = labels_of(obs[key], key=key, warns=warns)
    else:
        texts = texts_of(obs[key], key=key, argument=argument)
    if len(texts.categories) < 2:
        contents = f"only one value ({texts.categories[0]!r})" if len(texts.categories) else "no values"
        raise DataError(f"has {contents}; choose a column with at least two values.", argument=argument, value=key)
    return texts


def check_names(obs: pd.DataFrame) -> None:
    """Raise :class:`~scforge.errors.DataError` if cell names are not unique."""
    if not obs.index.is_unique:
        twice = obs.index[obs.index.duplicated()].unique()
        raise DataError(f"{len(twice)} cell names are duplicated ({listing(twice[:3])}); make cell names unique.")


@register_benchmark("cell_type_probe")
class CellTypeProbe(Benchmark):
    """Logistic regression and k-nearest neighbors, cross-validated by donor, with separate scores for rare types.

    Each cell is predicted once, by classifiers trained on the other folds. With a ``groups_key``, folds hold out whole
    groups: one group per fold if there are no more groups than folds. Otherwise, folds are stratified. The folds are
    the same for every embedding. The logistic regression uses the scikit-learn defaults, on dimensions standardized on
    the training folds.

    Cells without a label or group are left out. Labels that cannot be tested are left out with a warning: those with
    fewer cells than folds, or with cells in only one group or fold.

    The scores of each classifier are ``macro_f1``, the mean F1 over labels; ``accuracy`` over cells; and
    ``rare_recall``, the mean recall of the rare labels, NaN if there are no rare labels.

    Parameters
    ----------
    labels_key
        Column of ``obs`` with the cell types.
    groups_key
        Column of ``obs`` with groups that are held out as a whole, e.g. donors. If None, holds out cells.
    n_folds
        Number of folds.
    n_neighbors
        Number of neighbors k.
    rare_share
        A label with less than this fraction of the cells is rare.
    seed
        Seed for the stratified folds. Folds of groups do not depend on it.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> obs = pd.DataFrame({"label": np.repeat(["a", "b"], 50), "donor": np.tile(["x", "y"], 50)})
    >>> embedding = np.random.default_rng(0).normal(size=(100, 2)) + (obs["label"] == "a").to_numpy()[:, None] * 10
    >>> scores = CellTypeProbe("label", "donor").run(embedding, obs)
    >>> scores["linear_macro_f1"], scores["knn_accuracy"], scores["knn_rare_recall"]
    (1.0, 1.0, nan)
    """

    _scores: ClassVar[dict[str, tuple[str, str]]] = {
        f"{classifier}_{score}": (classifier, score)
        for classifier in ("linear", "knn")
        for score in ("macro_f1", "accuracy", "rare_recall")
    }
    """Mapping from each metric to its classifier and the score of the predictions."""
    metrics = tuple(_scores)
    n_draws: ClassVar[int] = 1_000

    def __init__(
        self,
        labels_key: str,
        groups_key: str | None = None,
        n_folds: int = 5,
        n_neighbors: int = 15,
        rare_share: float = 0.02,
        seed: int = 0,
    ) -> None:
        check_count("n_folds", n_folds, "folds", least=2)
        check_count("n_neighbors", n_neighbors, "cells")
        self.labels_key = labels_key
        self.groups_key = groups_key
        self.n_folds = n_folds
        self.n_neighbors = n_neighbors
        self.rare_share = check_share("rare_share", rare_share)
        self.seed = check_seed(seed)
        self._cache: dict[bytes, dict[str, np.ndarray]] = {}
        self._warned_of: tuple[str, ...] = ()

    def check(self, obs: pd.DataFrame) -> None:
        """Raise :class:`~scforge.errors.DataError` in the cases in which :meth:`run` would."""
        texts_in(obs, self.labels_key, warns=True)
        self._plan(obs)

    def describe(self, obs: pd.DataFrame) -> dict[str, str]:
        """Return the number of scored cells, the labels left out, and the units resampled for the intervals."""
        plan = self._plan(obs)
        facts = {"cells scored": f"{len(plan.rows):,} of {len(obs):,}"}
        if plan.left_out:
            facts["labels left out"] = ", ".join(plan.left_out)
        n_groups = self.n_units(obs)
        if n_groups is None:
            return facts | {"resampled": "cells"}
        if n_groups < MIN_GROUPS:
            few = f"nothing, so there are no intervals and tests: {n_groups} groups of {self.groups_key}"
            return facts | {"resampled": f"{few}, but at least {MIN_GROUPS} are needed"}
        return facts | {"resampled": f"groups of {self.groups_key} ({n_groups})"}

    def n_units(self, obs: pd.DataFrame) -> int | None:
        """Return the number of scored groups, or None without groups."""
        groups = self._plan(obs).groups
        return None if groups is None else len(np.unique(groups))

    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        """Return one score for each metric, in [0, 1].

        Raises
        ------
        DataError
            If a column is missing, cell names are not unique although groups are held out, or fewer than two labels can
            be tested.

        Warns
        -----
        ScforgeWarning
            If labels are left out (once for each set of labels), or if more than 1% of the cells have exactly the
            coordinates of a cell in another fold, which may be the same cell under another name.
        """
        plan = self._plan(obs)
        return self._figures(plan, self._predict(embedding, plan, len(obs)), np.ones(len(plan.rows)))

    def resampled(self, embedding: np.ndarray, obs: pd.DataFrame, *, n: int, seed: int) -> pd.DataFrame | None:
        """Return the scores of the predictions on bootstrap samples of the cells, or of whole groups.

        Labels that do not occur in a sample are excluded from its averages. Returns None if there are fewer than four
        groups.
        """
        plan = self._plan(obs)
        units = np.arange(len(plan.rows)) if plan.groups is None else plan.groups
        n_units, rng = units.max() + 1, np.random.default_rng(seed)
        if plan.groups is not None and n_units < MIN_GROUPS:
            return None
        predicted = self._predict(embedding, plan, len(obs))
        times = (np.bincount(rng.integers(n_units, size=n_units), minlength=n_units) for _ in range(n))
        figures = [self._figures(plan, predicted, drawn[units].astype(np.float64)) for drawn in times]
        return pd.DataFrame(figures, columns=list(self.metrics))

    def _plan(self, obs: pd.DataFrame) -> _Plan:
        """Select the cells to score and their folds; warn about labels that are left out."""
        of_labels, of_groups = texts_in(obs, self.labels_key), None
        taken = of_labels.notna()
        if self.groups_key is not None:
            check_names(obs)  # one cell could be learned from and tested
            of_groups = texts_in(obs, self.groups_key, argument="groups_key")
            taken = taken & of_groups.notna()
        rows = np.flatnonzero(taken)
        labels = np.asarray(of_labels, dtype=object)[rows].astype(str)
        groups = None if of_groups is None else np.asarray(of_groups, dtype=object)[rows].astype(str)
        left_out = _untested(labels, groups, self.n_folds)
        kept = ~np.isin(labels, list(left_out))
        folds = np.full(len(rows), -1, dtype=np.int64)
        if len(np.unique(labels[kept])) > 1:
            folds[kept] = self._folds(labels[kept], None if groups is None else groups[kept])
            spans = {str(name): len(np.unique(folds[labels == name])) for name in np.unique(labels[kept])}
            left_out |= {name: f"{name!r} (in one fold)" for name, span in spans.items() if span < 2}
            kept = ~np.isin(labels, list(left_out))
        names, codes = np.unique(labels[kept], return_inverse=True)
        what, why = f"labels of obs[{self.labels_key!r}]", tuple(left_out.values())
        if len(names) < 2:
            raise DataError(
                f"fewer than 2 {what} can be tested with n_folds={self.n_folds} (left out: {', '.join(why)}); lower "
                "n_folds."
            )
        if why and why != self._warned_of:
            self._warned_of = why
            warn(f"{what} that cannot be tested with n_folds={self.n_folds} are left out: {', '.join(why)}.")
        fewest = int(kept.sum() - np.bincount(folds[kept]).max())
        if self.n_neighbors > fewest:
            most = f"the number of labeled training cells ({fewest} with n_folds={self.n_folds})"
            raise DataError(f"is larger than {most}; lower it, or score more cells.", n_neighbors=self.n_neighbors)
        group_codes = None if groups is None else np.unique(groups[kept], return_inverse=True)[1]
        return _Plan(rows[kept], codes, len(names), folds[kept], group_codes, why)

    def _folds(self, labels: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
        """Return the fold of each cell, int64, shape (N,)."""
        from sklearn.model_selection import GroupKFold, StratifiedKFold

        if groups is None:
            splits = StratifiedKFold(self.n_folds, shuffle=True, random_state=self.seed).split(labels, labels)
        else:
            splits = GroupKFold(min(self.n_folds, len(np.unique(groups)))).split(labels, labels, groups)
        folds = np.full(len(labels), -1, dtype=np.int64)
        for fold, (_, test) in enumerate(splits):
            folds[test] = fold
        return folds

    def _predict(self, embedding: np.ndarray, plan: _Plan, n_cells: int) -> dict[str, np.ndarray]:
        """Return the label that each classifier predicts for each cell, int64, shape (N,)."""
        cells = check_embedding(embedding, n_cells)[plan.rows]
        digest = hashlib.blake2b(np.ascontiguousarray(cells).tobytes(), digest_size=16)
        digest.update(plan.rows.tobytes() + plan.labels.tobytes() + plan.folds.tobytes())
        key = digest.digest()
        if key not in self._cache:
            places = pd.factorize(np.array([hash(row.tobytes()) for row in cells]))[0]
            pairs = pd.DataFrame({"row": places, "fold": plan.folds}).drop_duplicates()["row"]
            share = float(np.isin(places, pairs[pairs.duplicated()]).mean())
            if share > _MAX_DUPLICATES:
                warn(
                    f"{share:.1%} of the cells have exactly the same coordinates as a cell in another fold; check for "
                    "duplicated cells or a collapsed embedding."
                )
            while len(self._cache) >= _MAX_CACHED:
                self._cache.pop(next(iter(self._cache)))
            self._cache[key] = {
                classifier: _out_of_fold(classifier, cells, plan, self.n_neighbors)
                for classifier in dict.fromkeys(classifier for classifier, _ in self._scores.values())
            }
        return self._cache[key]

    def _figures(self, plan: _Plan, predicted: dict[str, np.ndarray], weights: np.ndarray) -> dict[str, float]:
        """Score the cell predictions, weighted by `weights`."""
        n_labels = plan.n_labels
        rare = np.bincount(plan.labels, minlength=n_labels) < self.rare_share * len(plan.labels)
        scores: dict[tuple[str, str], float] = {}
        for classifier, guesses in predicted.items():
            counts = np.bincount(plan.labels * n_labels + guesses, weights=weights, minlength=n_labels**2)
            pairs = counts.reshape(n_labels, n_labels)
            true, guessed, hits = pairs.sum(axis=1), pairs.sum(axis=0), pairs.diagonal()
            present = true > 0
            tested = rare & present
            recall = float(np.mean(hits[tested] / true[tested])) if tested.any() else float("nan")
            scores[classifier, "macro_f1"] = float(np.mean(2 * hits[present] / (true + guessed)[present]))
            scores[classifier, "accuracy"] = float(hits.sum() / true.sum())
            scores[classifier, "rare_recall"] = recall
        return {metric: scores[source] for metric, source in self._scores.items()}


@dataclass(frozen=True)
class _Plan:
    """Rows of the tested cells with labels, folds and groups (int64, shape (N,)), and the labels left out."""

    rows: np.ndarray
    labels: np.ndarray
    n_labels: int
    folds: np.ndarray
    groups: np.ndarray | None
    left_out: tuple[str, ...] = ()


def _untested(labels: np.ndarray, groups: np.ndarray | None, n_folds: int) -> dict[str, str]:
    """Return a mapping from the labels that the folds cannot test to a description."""
    left_out = {}
    for name, size in zip(*np.unique(labels, return_counts=True), strict=True):
        if size < n_folds:
            left_out[str(name)] = f"{str(name)!r} ({size} cells)"
        elif groups is not None and len(np.unique(groups[labels == name])) < 2:
            left_out[str(name)] = f"{str(name)!r} (in one group)"
    return left_out


def _out_of_fold(classifier: str, cells: np.ndarray, plan: _Plan, n_neighbors: int) -> np.ndarray:
    """Return the label that a classifier predicts for each cell, int64, shape (N,)."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import PredefinedSplit, cross_val_predict
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = KNeighborsClassifier(n_neighbors)
    if classifier == "linear":
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2_000))
        cells = cells.astype(np.float64)  # makes its line search three times as fast
    return cross_val_predict(model, cells, plan.labels, cv=PredefinedSplit(plan.folds))


@register_benchmark("label_prediction")
class LabelPrediction(CellTypeProbe):
    """Macro-F1 of k-nearest neighbors and logistic regression; otherwise like :class:`CellTypeProbe`.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> labels = np.repeat(["a", "b"], 50)
    >>> embedding = np.random.default_rng(0).normal(size=(100, 2)) + (labels == "a")[:, None] * 10
    >>> LabelPrediction("label").run(embedding, pd.DataFrame({"label": labels}))
    {'knn_macro_f1': 1.0, 'logreg_macro_f1': 1.0}
    """

    _scores = {"knn_macro_f1": ("knn", "macro_f1"), "logreg_macro_f1": ("linear", "macro_f1")}
    metrics = tuple(_scores)


@register_benchmark("cell_type_annotation")
class CellTypeAnnotation(CellTypeProbe):
    """Macro-F1 and accuracy of k-nearest neighbors, fast enough for training; otherwise like :class:`CellTypeProbe`.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> labels = np.repeat(["a", "b"], 50)
    >>> embedding = np.random.default_rng(0).normal(size=(100, 2)) + (labels == "a")[:, None] * 10
    >>> CellTypeAnnotation("label").run(embedding, pd.DataFrame({"label": labels}))
    {'macro_f1': 1.0, 'accuracy': 1.0}
    """

    _scores = {"macro_f1": ("knn", "macro_f1"), "accuracy": ("knn", "accuracy")}
    metrics = tuple(_scores)


@register_benchmark("geometry")
class Geometry(Benchmark):
    """Effective rank, mean cosine similarity and variance share of the first component, to detect collapsed embeddings.

    These scores require no labels and do not measure the quality of an embedding: noise has a higher effective rank
    than any embedding of cells. Therefore there are no intervals and no tests.

    ``effective_rank``
        Exponential of the entropy of the singular values divided by their sum [1]_, computed without centering the
        embedding, as in RankMe [2]_. It ranges from 1, if all cells lie on one line through the origin, to D. It is 0
        if all values are zero.
    ``mean_cosine``
        Mean cosine similarity of all pairs of different cells: (S - N) / (N (N - 1)), where S is the squared length of
        the sum over the cells' unit vectors. It is 1 if all vectors have the same direction. Cells at the origin are
        left out.
    ``top_component_share``
        Fraction of the variance along the first principal component; 1 if nothing varies.
    ``constant_dims``
        Fraction of the dimensions whose standard deviation is less than 1e-6 of the root mean square of all values.

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
        """Return one score for each of :attr:`metrics`.

        ``mean_cosine`` is NaN if fewer than two cells have nonzero vectors.

        Raises
        ------
        DataError
            If there are fewer than two cells, or the embedding is not finite or has a different number of cells.
        """
        self.check(obs)
        cells = check_embedding(embedding, len(obs)).astype(np.float64)
        centered = cells - cells.mean(axis=0)
        deviations, size = centered.std(axis=0), np.sqrt(np.mean(cells**2))
        variances = _spectrum(centered)
        # Rounding leaves a little variance even where all rows are the same.
        varies = deviations.max() > _CONSTANT * size
        return {
            "effective_rank": _effective_rank(np.sqrt(_spectrum(cells))),
            "mean_cosine": _mean_cosine(cells),
            "top_component_share": float(variances.max() / variances.sum()) if varies else 1.0,
            "constant_dims": float(np.mean(deviations <= _CONSTANT * size)),
        }

    def resampled(self, embedding: np.ndarray, obs: pd.DataFrame, *, n: int, seed: int) -> None:
        """Return None, because there are no intervals; see the class."""


def is_collapsed(scores: Mapping[str, float]) -> bool:
    """Return whether the scores of :class:`Geometry` show a collapsed embedding.

    An embedding is collapsed if its effective rank is below 2, its mean cosine above 0.99, or more than 90% of its
    dimensions constant. All cells are then close to one point, direction or line. These thresholds were chosen by
    scforge.

    Parameters
    ----------
    scores
        Result of :meth:`Geometry.run`.

    Returns
    -------
    Whether the embedding has collapsed.

    Examples
    --------
    >>> is_collapsed({"effective_rank": 24.0, "mean_cosine": 0.1, "constant_dims": 0.0})
    False
    >>> is_collapsed({"effective_rank": 1.2, "mean_cosine": 0.999, "constant_dims": 0.0})
    True
    """
    return (
        scores["effective_rank"] < _MIN_RANK
        or scores["mean_cosine"] > _MAX_COSINE
        or scores["constant_dims"] > _MAX_CONSTANT
    )


def _spectrum(cells: np.ndarray) -> np.ndarray:
    """Return the squared singular values of a matrix, float64, computed from the smaller of its two Gram matrices."""
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
