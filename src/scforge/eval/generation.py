"""Benchmarks of generated cells, with checks for copies of training cells."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_count, check_seed
from scforge._constants import TARGET_SUM, UNS_KEY
from scforge.data.checks import counts_of, value_problem
from scforge.data.perturbation import PerturbationKeys, parse_perturbations
from scforge.errors import DataError, OptionError, listing, warn
from scforge.eval.base import Benchmark, check_column, register_benchmark
from scforge.eval.expression import log_normalised, totals_of

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.eval.report import Kind, Report


FEWEST_CELLS = 20
_FOLDS = 5
_ROUNDING = 1e-12


@dataclass(frozen=True)
class _Parts:
    """What the figures are made of; rows of made cells first, then of real ones, where both are in one array.

    Attributes
    ----------
    made, real
        log1p CP10K, CSR, shapes (N, G).
    rows_made, rows_real
        Cells that the population figures look at.
    kernels
        Kernel between made cells, between real cells, and of made to real ones.
    scores
        Probability of being real that the classifier gives to made and then to real cells, out of the fold.
    groups
        Label to which made and which real cells have it.
    """

    made: sparse.csr_matrix
    real: sparse.csr_matrix
    rows_made: np.ndarray
    rows_real: np.ndarray
    kernels: tuple[np.ndarray, ...]
    scores: np.ndarray
    groups: dict[str, tuple[np.ndarray, np.ndarray]]


@register_benchmark("generation")
class Generation(Benchmark):
    """Compares generated cells with real ones that the generator did not see.

    Everything is on log1p CP10K: counts are brought to it, and other values are taken as being on it.

    ``gene_mean_r``, ``gene_variance_r``, ``gene_dropout_r``
        Pearson correlation over genes, between generated and real cells, of the mean, of the variance, and of the share
        of cells without the gene, for the genes that a real cell has. NaN where a side does not vary.
    ``mmd``
        Squared maximum mean discrepancy, unbiased, thus sometimes below zero [1]_, of a Gaussian kernel as wide as the
        median distance of real cells, on their principal components. Less is better. The components fit these very
        cells, so that even other real ones are not quite at zero: look at a ceiling.
    ``c2st``
        Classifier two-sample test [2]_: the area under the ROC curve of extremely randomised trees that tell real
        from generated cells they did not see, by components of both together, by the distance from them, and by the
        number of genes. 0.5 is best; below 0.5 it is turned around, since trees that are systematically wrong have met
        copies.
    ``label_gene_mean_r``, ``label_mmd``
        With `labels_key`: both within each label, averaged. Labels with fewer than 20 real cells are left out, with a
        warning; where fewer than 20 generated cells have one of the others, both are NaN, with a warning, so that all
        methods are averaged over the same labels.

    Parameters
    ----------
    labels_key
        Column of obs of both, e.g. cell types that were asked for.
    n_comps
        Components of the real cells; fewer where there are not so many.
    max_cells
        Cells of each side that ``mmd`` and ``c2st`` look at, drawn at random; the same number of both, fewer where a
        side has fewer. A classifier that sees fewer cells tells them less well, so methods can be compared only if
        the number is the same for all of them, as :func:`evaluate_generation` makes it.
    seed
        Seed of what is drawn, of the components and of the trees.

    References
    ----------
    .. [1] Gretton et al. (2012), Journal of Machine Learning Research 13, 723-773, lemma 6.
    .. [2] Lopez-Paz and Oquab (2017), ICLR.

    Examples
    --------
    >>> import anndata, numpy as np
    >>> counts = np.random.default_rng(0).poisson(np.arange(1, 31), size=(200, 30)).astype(np.float32)
    >>> scores = Generation().run(anndata.AnnData(counts[:100]), anndata.AnnData(counts[100:]))
    >>> round(scores["gene_mean_r"], 2), abs(scores["mmd"]) < 0.01, scores["c2st"] < 0.65
    (1.0, True, True)
    """

    subject = "expression"
    metrics: tuple[str, ...] = ("gene_mean_r", "gene_variance_r", "gene_dropout_r", "mmd", "c2st")
    lower_is_better = frozenset({"mmd", "c2st", "label_mmd"})
    main = "mmd"
    n_draws = 100
    _last: tuple[bytes, tuple[np.ndarray, ...], np.ndarray] | None = None

    def __init__(self, labels_key: str | None = None, n_comps: int = 50, max_cells: int = 1_000, seed: int = 0) -> None:
        check_count("n_comps", n_comps, "components")
        check_count("max_cells", max_cells, "cells", least=FEWEST_CELLS)
        self.labels_key = labels_key
        self.n_comps = n_comps
        self.max_cells = max_cells
        self.seed = check_seed(seed)
        if labels_key is not None:
            self.metrics = (*type(self).metrics, "label_gene_mean_r", "label_mmd")

    def check(self, reference: AnnData) -> None:
        """Raise :class:`~scforge.errors.DataError` where real cells cannot be compared with."""
        log_normalised(reference, argument="the real cells")
        if reference.n_obs < FEWEST_CELLS:
            raise DataError(f"there are {reference.n_obs} real cells; generation needs at least {FEWEST_CELLS}.")
        if self.labels_key is not None:
            check_column("labels_key", self.labels_key, reference.obs)

    def run(self, made: AnnData, reference: AnnData) -> dict[str, float]:
        """Return one figure for each of :attr:`metrics`.

        Parameters
        ----------
        made
            Generated cells: counts or log1p CP10K in ``X``.
        reference
            Real cells, the same way, with the same genes in any order.

        Raises
        ------
        DataError
            If genes differ, there are fewer than 20 cells, or ``X`` holds something else.
        """
        parts = self._parts(made, reference)
        weights = tuple(np.ones((1, matrix.shape[0])) for matrix in (parts.made, parts.real))
        return {name: float(values[0]) for name, values in self._figures(parts, *weights).items()}

    def resampled(self, made: AnnData, reference: AnnData, *, n: int, seed: int) -> pd.DataFrame:
        """Return the figures on random halves of the cells; those of the real cells are the same for all methods.

        The trees and the components stay those of all cells.
        """
        parts = self._parts(made, reference)
        # Made cells are drawn from a generator of their own: their number may differ between methods.
        of_real = _halves(parts.real.shape[0], n, np.random.default_rng([seed, 0]))
        of_made = _halves(parts.made.shape[0], n, np.random.default_rng([seed, 1]))
        return pd.DataFrame(self._figures(parts, of_made, of_real))[list(self.metrics)]

    def _parts(self, made: AnnData, reference: AnnData) -> _Parts:
        """Compute what does not depend on the draw."""
        self.check(reference)
        if made.n_obs < FEWEST_CELLS:
            raise DataError(f"there are {made.n_obs} generated cells; generation needs at least {FEWEST_CELLS}.")
        _check_same_genes(made, reference)
        real = log_normalised(reference, argument="the real cells")
        cells = log_normalised(made, argument="the generated cells", made=True)[
            :, made.var_names.get_indexer(reference.var_names)
        ]
        rng = np.random.default_rng(self.seed)
        n_cells = min(self.max_cells, *(matrix.shape[0] for matrix in (real, cells)))
        rows_real, rows_made = (np.sort(rng.permutation(matrix.shape[0])[:n_cells]) for matrix in (real, cells))
        groups = self._groups(made, reference)
        genes = np.flatnonzero(real.getnnz(axis=0))
        asked = hashlib.blake2b(repr((cells.shape, real.shape, self.n_comps, self.max_cells, self.seed)).encode())
        for array in (cells.data, cells.indices, cells.indptr, real.data, real.indices, real.indptr):
            asked.update(np.ascontiguousarray(array).tobytes())
        if self._last is None or self._last[0] != asked.digest():
            pca = _components(real, self.n_comps, self.seed)
            kernels = _kernels(pca.transform(cells[rows_made]), pca.transform(real[rows_real]))
            self._last = (
                asked.digest(),
                kernels,
                _told_apart(cells[rows_made], real[rows_real], self.n_comps, self.seed),
            )
        _, kernels, scores = self._last
        return _Parts(cells[:, genes], real[:, genes], rows_made, rows_real, kernels, scores, groups)

    def _groups(self, made: AnnData, reference: AnnData) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        if self.labels_key is None:
            return {}
        check_column("labels_key", self.labels_key, made.obs)
        columns = [some.obs[self.labels_key].astype(str).to_numpy() for some in (made, reference)]
        names = sorted(set(columns[1][~reference.obs[self.labels_key].isna().to_numpy()]))
        groups = {name: (columns[0] == name, columns[1] == name) for name in names}
        # The real cells alone decide: a method must not choose what it is judged by.
        if few := [name for name, (_, real) in groups.items() if real.sum() < FEWEST_CELLS]:
            warn(
                f"Figures of each label leave out {listing(few)} of obs[{self.labels_key!r}], which have fewer than "
                f"{FEWEST_CELLS} real cells."
            )
        groups = {name: pair for name, pair in groups.items() if name not in few}
        if lacking := [name for name, (cells, _) in groups.items() if cells.sum() < FEWEST_CELLS]:
            warn(
                f"Figures of each label are NaN: fewer than {FEWEST_CELLS} generated cells are {listing(lacking)} of "
                f"obs[{self.labels_key!r}]."
            )
        return groups

    def _figures(self, parts: _Parts, of_made: np.ndarray, of_real: np.ndarray) -> dict[str, np.ndarray]:
        """Return each figure for each draw, shape (R,), from weights 0 or 1 of the cells, shapes (R, N)."""
        moments = [_moments(parts.made, of_made), _moments(parts.real, of_real)]
        both = [weights[:, rows] for weights, rows in ((of_made, parts.rows_made), (of_real, parts.rows_real))]
        figures = {
            name: _correlations(one, other)
            for name, one, other in zip(("gene_mean_r", "gene_variance_r", "gene_dropout_r"), *moments, strict=True)
        }
        figures["mmd"] = mmd_squared(parts.kernels, *both)
        figures["c2st"] = _areas(parts.scores, np.hstack(both))
        if self.labels_key is not None:
            each = []
            for made, real in parts.groups.values():
                means = [_moments(parts.made, of_made * made)[0], _moments(parts.real, of_real * real)[0]]
                weights = both[0] * made[parts.rows_made], both[1] * real[parts.rows_real]
                each.append([_correlations(*means), mmd_squared(parts.kernels, *weights)])
            few = any(made.sum() < FEWEST_CELLS for made, _ in parts.groups.values())
            averaged = np.full((2, len(of_made)), np.nan) if few or not each else np.mean(each, axis=0)
            figures["label_gene_mean_r"], figures["label_mmd"] = averaged
        return figures


def mmd_squared(kernels: tuple[np.ndarray, ...], made: np.ndarray, real: np.ndarray) -> np.ndarray:
    r"""Return the unbiased squared maximum mean discrepancy of subsets of cells, float64, shape (R,).

    .. math:: \frac{\sum_{i \ne j} k(x_i, x_j)}{m (m - 1)} + \frac{\sum_{i \ne j} k(y_i, y_j)}{n (n - 1)}
        - \frac{2 \sum_{i, j} k(x_i, y_j)}{m n}

    Parameters
    ----------
    kernels
        Kernel between m made cells, between n real cells, and of made to real ones, shapes (m, m), (n, n) and (m, n).
    made, real
        Which cells are in the subsets, 0 or 1, shapes (R, m) and (R, n). NaN where a subset has fewer than two.

    Examples
    --------
    >>> same, apart = np.eye(3), np.zeros((3, 3))
    >>> mmd_squared((same, same, apart), np.ones((1, 3)), np.ones((1, 3)))
    array([0.])
    """
    of_made, of_real, across = kernels
    within = []
    for kernel, weights in ((of_made, made), (of_real, real)):
        n = weights.sum(axis=1)
        total = ((weights @ kernel) * weights).sum(axis=1) - weights @ np.diagonal(kernel)
        within.append(np.where(n > 1, total / np.maximum(n * (n - 1), 1), np.nan))
    pairs = made.sum(axis=1) * real.sum(axis=1)
    return within[0] + within[1] - 2 * ((made @ across) * real).sum(axis=1) / np.maximum(pairs, 1)


def _halves(n_cells: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Return which cells are in each random half, 0 or 1, float64, shape (R, N)."""
    return (rng.random((n, n_cells)).argsort(axis=1) < n_cells // 2).astype(np.float64)


def _components(cells: sparse.csr_matrix, n_comps: int, seed: int) -> Any:
    from sklearn.decomposition import PCA

    return PCA(min(n_comps, min(cells.shape) - 1), svd_solver="arpack", random_state=seed).fit(cells)


def _kernels(made: np.ndarray, real: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return Gaussian kernels, as wide as the median distance of real cells."""
    from sklearn.metrics import pairwise_distances

    between = [pairwise_distances(*pair, metric="sqeuclidean") for pair in ((made, made), (real, real), (made, real))]
    width = float(np.median(between[1][np.triu_indices(len(real), 1)]))
    if width == 0:
        raise DataError("more than half of the real cells have the same expression; give other cells.")
    made_made, real_real, across = (np.exp(-squares / (2 * width)) for squares in between)
    return made_made, real_real, across


def _told_apart(made: sparse.csr_matrix, real: sparse.csr_matrix, n_comps: int, seed: int) -> np.ndarray:
    """Return the probability of being real that trees give to cells they did not see, made ones first; (2 N,)."""
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    cells = sparse.vstack([made, real], format="csr")
    # Components of one side would lie nearer to its own cells, which alone would tell them.
    pca = _components(cells, n_comps, seed)
    places = np.asarray(pca.transform(cells), dtype=np.float64)
    lengths = np.asarray(cells.power(2).sum(axis=1)).ravel() - 2 * (cells @ pca.mean_) + pca.mean_ @ pca.mean_
    away = np.sqrt(np.maximum(lengths - (places**2).sum(axis=1), 0.0))
    seen = np.column_stack([places, away, np.diff(cells.indptr)])
    truth = np.repeat([False, True], [made.shape[0], real.shape[0]])
    folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=seed)
    trees = ExtraTreesClassifier(50, random_state=seed)
    return cross_val_predict(trees, seen, truth, cv=folds, method="predict_proba")[:, 1]


def _areas(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the area under the ROC curve for each set of weights of the cells, turned above 0.5, shape (R,).

    It is the share of pairs of a real and a made cell in which the real one has the higher score; ties count half.
    """
    _, places = np.unique(scores, return_inverse=True)
    order = np.argsort(places, kind="stable")
    starts = np.flatnonzero(np.diff(places[order], prepend=-1))
    real = np.arange(len(scores)) >= len(scores) // 2
    of_made, of_real = (np.add.reduceat((weights * side)[:, order], starts, axis=1) for side in (~real, real))
    pairs = (of_real * (of_made.cumsum(axis=1) - of_made / 2)).sum(axis=1)
    areas = pairs / (of_made.sum(axis=1) * of_real.sum(axis=1))
    return 0.5 + np.abs(areas - 0.5)


def _moments(cells: sparse.csr_matrix, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean, variance and share without the gene of each draw, shape (R, G) each."""
    cells = cells.astype(np.float64)
    n = np.maximum(weights.sum(axis=1, keepdims=True), 1.0)
    mean, squares, with_gene = (
        np.asarray((matrix.T @ weights.T).T) / n for matrix in (cells, cells.power(2), cells.astype(bool))
    )
    variance = squares - mean**2
    return mean, np.where(variance > _ROUNDING * squares, variance, 0.0), 1.0 - with_gene


def _correlations(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return Pearson correlations of rows, float64, shape (R,); NaN where one does not vary."""
    one, other = (rows - rows.mean(axis=1, keepdims=True) for rows in (one, other))
    lengths = np.sqrt((one**2).sum(axis=1) * (other**2).sum(axis=1))
    return np.where(lengths > 0, (one * other).sum(axis=1) / np.where(lengths > 0, lengths, 1.0), np.nan)


def _check_same_genes(made: AnnData, reference: AnnData) -> None:
    """Raise :class:`~scforge.errors.DataError` unless both have the same genes, in any order, each once."""
    for some, what in ((made, "the generated cells"), (reference, "the real cells")):
        if not some.var_names.is_unique:
            twice = listing(some.var_names[some.var_names.duplicated()].unique(), most=3)
            raise DataError(f"{what} have genes twice ({twice}); make var_names unique.")
    of_made, of_real = made.var_names.difference(reference.var_names), reference.var_names.difference(made.var_names)
    if len(of_made) or len(of_real):
        raise DataError(
            f"{len(of_made)} genes are in the generated cells only and {len(of_real)} in the real ones only (first: "
            f"{str([*of_made, *of_real][0])!r}); take the genes of both, as evaluate_generation does."
        )


_FEWEST_GENES_OF_A_CELL = 10
"""A cell with fewer expressed genes may well look like another one."""

_TELLING_SHARE = 0.01
"""Share of the cells that may be the same by chance."""

_DECIMALS = 3
_SAME = 1e-4
_FEWEST_ROWS = 5
_BLOCK = 512


def check_disjoint(train: Iterable[object] | AnnData, test: Iterable[object] | AnnData, *, what: str = "cells") -> None:
    """Raise where something is both in the training and in the test data.

    Parameters
    ----------
    train, test
        Identifiers, e.g. names of cells, donors or perturbations; or AnnData, whose ``obs_names`` are compared and,
        over the genes that both have, the expression of their cells in ``X``.
    what
        What the identifiers are of, for the message.

    Raises
    ------
    DataError
        If an identifier is in both, or more than 1 % of the test cells have the same expression as a training cell.

    Warns
    -----
    ScforgeWarning
        If fewer have. Cells with fewer than 10 expressed genes are not looked at.

    Examples
    --------
    >>> check_disjoint(["a", "b"], ["b", "c"], what="donors")
    Traceback (most recent call last):
        ...
    scforge.errors.DataError: 1 of 2 test donors are training donors, too (first: 'b'); take them out of one of the two.
    """
    ids = [pd.Index(_ids(some)) for some in (train, test)]
    if (both := ids[1].isin(ids[0])).any():
        raise DataError(
            f"{int(both.sum())} of {len(ids[1])} test {what} are training {what}, too (first: "
            f"{str(ids[1][both][0])!r}); take them out of one of the two."
        )
    if _is_adata(train) and _is_adata(test):
        genes = test.var_names[test.var_names.isin(train.var_names)]  # type: ignore[union-attr]
        one, other = (_matrix(some)[:, some.var_names.get_indexer(genes)] for some in (train, test))  # type: ignore[union-attr]
        check_same_rows(one, other, what=what)


def check_same_rows(train: sparse.csr_matrix, test: sparse.csr_matrix, *, what: str = "cells") -> None:
    """Raise where more than 1 % of the rows of `test`, each of which is a cell, are rows of `train`; warn below.

    Values count as the same if they round to the same three decimals.
    """
    # Logs that scanpy made are those of the same counts made here but for rounding.
    found, looked_at = row_hashes(test, decimals=_DECIMALS)
    known, telling = row_hashes(train, decimals=_DECIMALS)
    same = np.isin(found, known[telling]) & looked_at
    if not same.any():
        return
    message = f"{int(same.sum())} of {len(same)} test {what} have the same expression of all genes as a training cell"
    if same.mean() > _TELLING_SHARE:
        raise DataError(f"{message}: they are copies under another name; take them out of one of the two.")
    warn(f"{message}; look whether they are copies.")


def check_no_copies(
    made: sparse.csr_matrix, real: sparse.csr_matrix, *, what: str = "predicted cells", argument: str = "predictions"
) -> None:
    """Raise where what was predicted is a copy of what was to be predicted.

    Parameters
    ----------
    made, real
        Expression of predicted and of held-out cells (or profiles, one a row) on the same scale, CSR, shapes (N, G) and
        (M, G). Values count as the same if they round to the same three decimals.
    what
        What the rows are, for the message.
    argument
        Where they come from, for the message.

    Raises
    ------
    DataError
        If more than 1 % of the rows of `made` are rows of `real`; rows with fewer than 10 genes are not looked at.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> real, other = (sparse.csr_matrix(rng.poisson(3.0, size=(20, 40)).astype("float32")) for _ in range(2))
    >>> check_no_copies(other, real)
    >>> check_no_copies(real, real)
    Traceback (most recent call last):
        ...
    scforge.errors.DataError: ...
    """
    found, looked_at = row_hashes(made, decimals=_DECIMALS)
    known, telling = row_hashes(real, decimals=_DECIMALS)
    same = np.isin(found, known[telling]) & looked_at
    if len(same) and same.mean() > _TELLING_SHARE:
        raise DataError(
            f"{int(same.sum())} of {len(same)} {what} of {argument} are copies of held-out cells (first: row "
            f"{int(np.flatnonzero(same)[0])}); a prediction may not see what it is scored on."
        )


def check_features(
    features: pd.DataFrame,
    real: AnnData,
    *,
    perturbation_key: str,
    control: str,
    separator: str | None = "+",
    argument: str = "gene_features",
) -> None:
    """Raise where the features of a held-out perturbation were made from its own cells.

    The mean embedding of the cells under a perturbation is not known before the experiment. A regression that is fed
    with it, in place of something known of the gene, reads the answer.

    Parameters
    ----------
    features
        One row a perturbation or target, by name; any columns.
    real
        Held-out cells.
    perturbation_key, control, separator
        Columns of obs, as for :func:`evaluate_perturbations`.
    argument
        What `features` is called in the message.

    Raises
    ------
    DataError
        If a row is the mean, or the mean less that of the controls, of ``X``, of a layer (of counts also of their
        log1p CP10K) or of an entry of ``obsm`` over the cells of that perturbation, up to a factor; or, for at least
        five perturbations, if a column is any column of such means up to a factor and an offset. Columns of fewer than
        five values, e.g. indicators, are too easily met by chance to be told.

    Examples
    --------
    >>> import anndata
    >>> rng, names = np.random.default_rng(0), np.repeat(["control", "A", "B"], 10)
    >>> obs = pd.DataFrame({"target": names}, index=[f"cell{i}" for i in range(30)])
    >>> real = anndata.AnnData(rng.normal(size=(30, 12)), obs)
    >>> keys = {"perturbation_key": "target", "control": "control"}
    >>> check_features(pd.DataFrame(rng.normal(size=(2, 12)), index=["A", "B"]), real, **keys)
    >>> check_features(real.to_df().groupby(names).mean(), real, **keys)
    Traceback (most recent call last):
        ...
    scforge.errors.DataError: gene_features has for 'A' the mean of X over the held-out cells under 'A' themselves...
    """
    keys = PerturbationKeys(perturbation_key, control=control, separator=separator)
    parsed = parse_perturbations(real.obs, keys)
    cells_of: dict[str, list[int]] = {}
    for row, targets in enumerate(parsed.targets):
        cells_of.setdefault((separator or "+").join(targets), []).append(row)
    controls = cells_of.pop("", [])
    named = [(str(name), row) for row, name in enumerate(features.index) if str(name) in cells_of]
    if not named:
        return
    values = features.to_numpy(dtype=np.float64)
    for where, matrix in _representations(real):
        plain = _mean(matrix, controls)
        means = np.array([_mean(matrix, cells_of[name]) for name, _ in named])
        own = values[[row for _, row in named]]
        copied = []
        if own.shape == means.shape:
            copied = [i for i in range(len(named)) if _same(own[i], means[i]) or _same(own[i], means[i] - plain)]
        if not copied and _same_columns(own, means):
            copied = [0]
        if copied:
            name = named[copied[0]][0]
            raise DataError(
                f"{argument} has for {name!r} the mean of {where} over the held-out cells under {name!r} themselves, "
                "which nobody knows before the experiment; give features of the gene that need no such cells."
            )


def row_hashes(matrix: sparse.csr_matrix, *, decimals: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return a hash of each row, uint64, and which rows have enough genes to be told from others, bool, shape (N,).

    Parameters
    ----------
    matrix
        Shape (N, G).
    decimals
        Round values to these first; None takes them as float32.
    """
    matrix = matrix.tocsr().copy()
    matrix.sum_duplicates()
    values = matrix.data.astype(np.float64) if decimals is None else np.round(matrix.data.astype(np.float64), decimals)
    matrix = sparse.csr_matrix((values, matrix.indices, matrix.indptr), shape=matrix.shape)
    matrix.eliminate_zeros()
    # An order-free sum of a hash of each pair of gene and value, modulo 2^64.
    mixed = pd.util.hash_array(matrix.data.astype(np.float32).view(np.uint32).astype(np.uint64))
    mixed = pd.util.hash_array(mixed ^ pd.util.hash_array(matrix.indices.astype(np.uint64)))
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    sums = np.zeros(matrix.shape[0], dtype=np.uint64)
    np.add.at(sums, rows, mixed)
    return sums, np.diff(matrix.indptr) >= _FEWEST_GENES_OF_A_CELL


def _ids(some: Iterable[object] | AnnData) -> list[object]:
    return list(some.obs_names) if _is_adata(some) else list(some)  # type: ignore[union-attr]


def _is_adata(some: object) -> bool:
    import anndata

    return isinstance(some, anndata.AnnData)


def _matrix(adata: AnnData) -> sparse.csr_matrix:
    matrix = adata.X.astype(np.float32) if adata.X.dtype == np.float16 else adata.X
    return matrix.tocsr() if sparse.issparse(matrix) else sparse.csr_matrix(np.asarray(matrix))


def _representations(adata: AnnData) -> list[tuple[str, np.ndarray | sparse.csr_matrix]]:
    found = [(f"obsm[{key!r}]", np.asarray(adata.obsm[key])) for key in adata.obsm]
    found += [(f"layers[{key!r}]", adata.layers[key]) for key in adata.layers if key is not None]
    if adata.X is not None:
        found.append(("X", adata.X))
    for key in [None, *(key for key in adata.layers if key is not None)]:
        matrix = adata.X if key is None else adata.layers[key]
        if matrix is not None and value_problem(matrix.data if sparse.issparse(matrix) else np.ravel(matrix)) is None:
            where = "X" if key is None else f"layers[{key!r}]"
            found.append((f"the log1p CP10K of {where}", log_normalised(adata, key, argument="real")))
    return [(where, matrix) for where, matrix in found if len(matrix.shape) == 2]


def _mean(matrix: np.ndarray | sparse.csr_matrix, rows: list[int]) -> np.ndarray:
    if not rows:
        return np.zeros(matrix.shape[1])
    return np.asarray(matrix[np.array(rows)].mean(axis=0), dtype=np.float64).ravel()


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two vectors are the same up to a factor; without one where a direction is soon met by chance."""
    lengths = np.linalg.norm(one) * np.linalg.norm(other)
    if not np.isfinite(lengths) or lengths == 0:
        return False
    if len(one) < 3:
        return bool(np.allclose(one, other, rtol=_SAME, atol=0))
    return bool(one @ other / lengths > 1 - _SAME**2)


def _same_columns(ours: np.ndarray, means: np.ndarray) -> bool:
    """Return whether a column is one of the others, scaled and shifted, e.g. standardised."""
    if len(ours) < _FEWEST_ROWS or not np.isfinite(ours).all():
        return False
    one, other = (_unit_columns(values) for values in (ours, means))
    blocks = (one[:, start : start + _BLOCK].T @ other for start in range(0, one.shape[1], _BLOCK))
    return any(bool(np.abs(alike).max(initial=0.0) > 1 - _SAME**2) for alike in blocks)


def _unit_columns(values: np.ndarray) -> np.ndarray:
    """Return centred columns of length 1, of those that take enough values to be told from others."""
    values = values[:, np.isfinite(values).all(axis=0)]
    size = np.abs(values).max(axis=0, initial=0.0)
    steps = np.diff(np.sort(values, axis=0), axis=0) > 1e-6 * size
    centred = values[:, steps.sum(axis=0) >= _FEWEST_ROWS - 1]
    centred = centred - centred.mean(axis=0)
    return centred / np.linalg.norm(centred, axis=0)


CEILING = "training cells"
_FEWEST_GENES = 10

_MISSING = 0.01
"""Share of the counts that genes may hold which are not there, so that the total is still about right."""

_OFF = 0.2
"""How far totals of log-normalised cells may be from those of the real cells, as a share."""


def generation_baselines(
    train: AnnData,
    n_cells: int | None = None,
    *,
    labels: Sequence[str] | pd.Series | None = None,
    labels_key: str | None = None,
    layer: str | None = None,
    seed: int = 0,
) -> dict[str, AnnData]:
    """Make cells from training cells without a model.

    ``"training cells"``
        Training cells themselves, as far as there are enough each once: a ceiling, not a baseline, since it is real
        data of another split. Where they are better than real cells can be told from each other, nothing is left to
        gain; a model that repeats its training cells reaches it, too.
    ``"independent genes"``
        Each gene takes its log1p CP10K from a training cell of its own: every gene is right, no two go together.
    ``"mean and Poisson"``
        Counts drawn about the mean share of each gene, times the library size of a training cell: every cell is of the
        same kind.

    Parameters
    ----------
    train
        Training cells with raw counts.
    n_cells
        Number of cells; not needed with `labels`.
    labels
        Draw each cell among the training cells of this label.
    labels_key
        Column of ``train.obs`` with the labels.
    layer
        Key in ``train.layers`` with raw counts; None reads ``train.X``.
    seed
        Seed.

    Returns
    -------
    Name to cells, `n_cells` each, with log1p CP10K in ``X`` (CSR, float32) and the labels in ``obs[labels_key]``.

    Raises
    ------
    DataError
        If there are no raw counts, or a label has no training cell.
    OptionError
        If neither `n_cells` nor `labels` with `labels_key` are given.

    Examples
    --------
    >>> import anndata, numpy as np
    >>> def cells(seed):
    ...     counts = np.random.default_rng(seed).poisson(np.arange(1, 31), size=(80, 30)).astype("float32")
    ...     adata = anndata.AnnData(counts)
    ...     adata.obs_names = [f"{seed}-{i}" for i in range(80)]
    ...     return adata
    >>> made = generation_baselines(cells(0), n_cells=20)
    >>> {name: part.shape for name, part in made.items()}
    {'training cells': (20, 30), 'independent genes': (20, 30), 'mean and Poisson': (20, 30)}
    """
    import anndata

    if (labels is None) == (n_cells is None) or (labels is None) != (labels_key is None):
        raise OptionError(
            f"n_cells={n_cells!r} and labels_key={labels_key!r} do not fit; give n_cells, or labels with labels_key."
        )
    rng = np.random.default_rng(check_seed(seed))
    counts = counts_of(train, layer).astype(np.float64)
    if labels is None:
        check_count("n_cells", n_cells, "cells")
        wanted, known = np.zeros(int(n_cells or 0), dtype=object), np.zeros(train.n_obs, dtype=object)
        obs = pd.DataFrame(index=[f"cell{row}" for row in range(len(wanted))])
    else:
        check_column("labels_key", str(labels_key), train.obs)
        wanted, known = np.asarray(labels).astype(str), train.obs[labels_key].astype(str).to_numpy()
        obs = pd.DataFrame({labels_key: wanted}, index=[f"cell{row}" for row in range(len(wanted))])
    if missing := sorted(set(wanted) - set(known)):
        raise DataError(
            f"no training cell has the label {listing(missing, most=3)} of obs[{labels_key!r}]; leave those cells out."
        )
    totals = np.asarray(counts.sum(axis=1)).ravel()
    logs = log_normalised(train, layer, argument="train")
    parts: dict[str, list[sparse.csr_matrix]] = {CEILING: [], "independent genes": [], "mean and Poisson": []}
    places = []
    for label in dict.fromkeys(wanted):
        rows, n = np.flatnonzero(known == label), int((wanted == label).sum())
        places.append(np.flatnonzero(wanted == label))
        parts[CEILING].append(logs[rng.choice(rows, n, replace=n > len(rows))])
        parts["independent genes"].append(_independent(logs[rows].tocsc(), n, rng))
        share = np.asarray(counts[rows].sum(axis=0)).ravel() / totals[rows].sum()
        parts["mean and Poisson"].append(_poisson(share, totals[rng.choice(rows, n)], rng))
    back = np.argsort(np.concatenate(places), kind="stable")
    return {
        name: anndata.AnnData(sparse.vstack(blocks, format="csr")[back].astype(np.float32), obs.copy(), train.var[[]])
        for name, blocks in parts.items()
    }


def evaluate_generation(
    generated: AnnData | Mapping[str, AnnData],
    real: AnnData,
    train: AnnData,
    *,
    labels_key: str | None = None,
    layer: str | None = None,
    kinds: Mapping[str, Kind] | None = None,
    n_comps: int = 50,
    max_cells: int = 1_000,
    seeds: Sequence[int] = (0,),
    intervals: bool = True,
    title: str = "Generated cells compared",
) -> Report:
    """Score generated cells against real ones, beside :func:`generation_baselines` of the training cells.

    Library sizes are those over all genes of each data set; then only genes count that all of them have. So counts have
    to be over all genes. ``mmd`` and ``c2st`` look at the same number of cells of each method and of the real ones, the
    fewest that one of them has.

    Parameters
    ----------
    generated
        Cells of one method, or of several by name; counts or log1p CP10K in ``X``, as of
        :meth:`scforge.models.Encoder.generate`.
    real
        Real cells that no method has seen, raw counts.
    train
        Real cells that the methods have learned from, raw counts.
    labels_key
        Column of obs of all of them, for figures of each label.
    layer
        Key in ``layers`` of `real` and `train` with raw counts; None reads ``X``.
    kinds
        Name to what it is, e.g. ``"untrained"``; a model, if not told.
    n_comps, max_cells
        As in :class:`Generation`.
    seeds
        Seeds of what is drawn for ``mmd`` and ``c2st``; the first is that of the baselines, too.
    intervals
        Add 95 % intervals, and tests against the best baseline.
    title
        Heading of the report.

    Returns
    -------
    The report: figures of :class:`Generation` of each method and baseline.

    Raises
    ------
    DataError
        If real cells are training cells, under other names, too; generated cells are copies of the real ones; counts
        are over part of the genes; or data are on another scale.
    OptionError
        If an option makes no sense, or a kind names no method.

    Examples
    --------
    >>> import anndata, numpy as np
    >>> def cells(seed):
    ...     counts = np.random.default_rng(seed).poisson(np.arange(1, 31), size=(80, 30)).astype("float32")
    ...     adata = anndata.AnnData(counts)
    ...     adata.obs_names = [f"{seed}-{i}" for i in range(80)]
    ...     return adata
    >>> report = evaluate_generation({"mine": cells(0)}, cells(1), cells(2), n_comps=5, intervals=False)
    >>> [row.name for row in report.rows]
    ['mine', 'training cells', 'independent genes', 'mean and Poisson']
    """
    from scforge.eval.harness import compare

    made = dict(generated) if isinstance(generated, Mapping) else {"generated": generated}
    if not len(seeds):
        raise OptionError("seeds=() leaves nothing to run; give at least one seed.")
    if unknown := [name for name in kinds or {} if name not in made]:
        raise OptionError(f"kinds names {listing(unknown)}, not among the generated cells ({listing(made)}).")
    check_disjoint(train.obs_names, real.obs_names)
    names = real.var_names
    for some in (train, *made.values()):
        names = names[names.isin(some.var_names)]
    if len(names) < _FEWEST_GENES:
        raise DataError(
            f"{len(names)} genes are in real, train and all generated cells, fewer than {_FEWEST_GENES}; give all of "
            "them the same var_names."
        )
    if labels_key is None:
        baselines = generation_baselines(train, real.n_obs, layer=layer, seed=seeds[0])
    else:
        check_column("labels_key", labels_key, real.obs)
        kept = ~real.obs[labels_key].isna().to_numpy()
        if not kept.all():
            warn(f"{int((~kept).sum())} real cells without obs[{labels_key!r}] are left out.")
            real = real[kept]
        wanted = real.obs[labels_key].astype(str)
        baselines = generation_baselines(train, labels=wanted, labels_key=labels_key, layer=layer, seed=seeds[0])
    if both := set(made) & set(baselines):
        raise OptionError(f"generated names {listing(sorted(both))}, which is a baseline; choose another name.")
    reference = _on_genes(real, "the real cells", names, layer)
    cells = {name: _on_genes(some, f"the cells of {name!r}", names, made=True) for name, some in made.items()}
    learned = _on_genes(train, "train", names, layer)
    check_same_rows(learned.X, reference.X)
    _check_complete(train, "train", real, layer, layer)
    _check_complete(real, "the real cells", train, layer, layer)
    notes = []
    for name, some in cells.items():
        _check_complete(made[name], f"the cells of {name!r}", real, None, layer)
        notes += _scale_notes(name, made[name], some.X, reference.X)
        check_no_copies(some.X, reference.X, what="generated cells", argument=f"generated[{name!r}]")
    cells |= {name: some[:, names].copy() for name, some in baselines.items()}
    told = dict.fromkeys(made, "model") | dict(kinds or {})
    told |= {name: "ceiling" if name == CEILING else "baseline" for name in baselines}
    check_count("max_cells", max_cells, "cells")
    n_cells = min(max_cells, reference.n_obs, *(some.n_obs for some in cells.values()))
    if n_cells < FEWEST_CELLS:
        fewest = min(cells, key=lambda name: cells[name].n_obs)
        raise DataError(
            f"mmd and c2st would look at {n_cells} cells of each (max_cells={max_cells}, {reference.n_obs} real cells, "
            f"{cells[fewest].n_obs} of {fewest!r}); give at least {FEWEST_CELLS}."
        )
    report = compare(
        Generation(labels_key, n_comps, n_cells, int(seeds[0])),
        cells,
        reference,
        kinds=told,  # type: ignore[arg-type]
        seeds=seeds,
        intervals=intervals,
        title=title,
    )
    report.facts |= {"real cells": real.n_obs, "training cells": train.n_obs, "genes": len(names)}
    report.facts |= {"cells of each in mmd and c2st": n_cells}
    report.notes += notes
    report.notes.append(
        f"Figures are over {len(names)} of {real.n_vars} genes of the real cells, those that all cells have, on log1p "
        f"CP{TARGET_SUM:,.0f}."
    )
    return report


def _on_genes(adata: AnnData, what: str, names: pd.Index, layer: str | None = None, *, made: bool = False) -> AnnData:
    """Return log1p CP10K of some genes, in their order; library sizes are over all genes."""
    import anndata

    if not adata.var_names.is_unique:
        raise DataError(f"{what} have genes twice; make var_names unique.")
    logs = log_normalised(adata, layer, argument=what, made=made)[:, adata.var_names.get_indexer(names)]
    return anndata.AnnData(logs, obs=adata.obs.copy(), var=pd.DataFrame(index=names))


def _check_complete(adata: AnnData, what: str, whole: AnnData, layer: str | None, layer_of_whole: str | None) -> None:
    """Raise where counts are over part of the genes of others, so that their totals are no library sizes."""
    lacking = ~whole.var_names.isin(adata.var_names)
    if not lacking.any() or value_problem(_values(adata, layer)) is not None:
        return
    logs = log_normalised(whole, layer_of_whole, argument="the others")
    share = float(totals_of(logs[:, np.flatnonzero(lacking)]).sum() / totals_of(logs).sum())
    if share > _MISSING:
        raise DataError(
            f"{what} are counts without {int(lacking.sum())} genes that hold {share:.0%} of the counts of others, so "
            "that their totals are no library sizes; give all genes, or log1p of counts per 10,000 of all genes."
        )


def _scale_notes(name: str, adata: AnnData, logs: sparse.csr_matrix, real: sparse.csr_matrix) -> list[str]:
    """Raise where logarithms are far from the totals of the real cells; say so where their scale is known."""
    if value_problem(_values(adata, None)) is None:
        return []
    usual, expected = (float(np.median(totals_of(some))) for some in (logs, real))
    if abs(usual - expected) <= _OFF * expected:
        return []
    found = f"expm1 of the cells of {name!r} has a median total of {usual:,.0f}, that of real cells {expected:,.0f}"
    # What scforge generates is on this scale, however wrong it is.
    if "generated" in adata.uns.get(UNS_KEY, {}):
        return [f"{found}: they have too much or too little of all genes together."]
    raise DataError(
        f"{found} over the same genes, so that they are not both log1p CP10K; give raw counts, or "
        "sc.pp.normalize_total(adata, target_sum=1e4) and sc.pp.log1p(adata) over all genes."
    )


def _values(adata: AnnData, layer: str | None) -> np.ndarray:
    return sparse.csr_matrix(adata.X if layer is None else adata.layers[layer]).data


def _independent(logs: sparse.csc_matrix, n_cells: int, rng: np.random.Generator) -> sparse.csr_matrix:
    """Draw each gene of each cell from any cell: the number of cells with it, which of them, and its values."""
    n_train, n_genes = logs.shape
    sizes = np.diff(logs.indptr)
    drawn = rng.binomial(n_cells, sizes / n_train)
    rows = [rng.choice(n_cells, n, replace=False) for n in drawn]
    values = [
        logs.data[start + rng.integers(0, size, n)] if n else np.empty(0, logs.dtype)
        for start, size, n in zip(logs.indptr[:-1], sizes, drawn, strict=True)
    ]
    columns = np.repeat(np.arange(n_genes), drawn)
    return sparse.csr_matrix((np.concatenate(values), (np.concatenate(rows), columns)), shape=(n_cells, n_genes))


def _poisson(share: np.ndarray, totals: np.ndarray, rng: np.random.Generator) -> sparse.csr_matrix:
    """Draw counts about the same shares, and return their log1p CP10K."""
    blocks = []
    for start in range(0, len(totals), 1_000):
        counts = rng.poisson(totals[start : start + 1_000, None] * share).astype(np.float64)
        library = np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
        blocks.append(sparse.csr_matrix(np.log1p(counts * (TARGET_SUM / library))))
    return sparse.vstack(blocks, format="csr")
