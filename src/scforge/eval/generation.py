"""How like real cells generated cells are, gene by gene and as a population.

Shapes: N cells, G genes, D components, R draws.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_count, check_seed
from scforge.errors import DataError, listing, warn
from scforge.eval.base import Benchmark, check_column, register_benchmark
from scforge.eval.log_scale import log_normalised

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["Generation", "mmd_squared"]

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
