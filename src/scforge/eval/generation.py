"""Benchmarks of generated cells, with checks for copies of training cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import anndata
import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_count, check_known, check_seed
from scforge._columns import check_column, labels_of
from scforge._constants import TARGET_SUM, UNS_KEY
from scforge.data.checks import content_mark, counts_of, value_problem
from scforge.data.expression import log_normalized, scale_difference, totals_of
from scforge.errors import DataError, OptionError, listing, warn
from scforge.eval.base import Benchmark, register_benchmark
from scforge.eval.expression import principal_components
from scforge.eval.harness import check_seeds, compare
from scforge.perturbation.keys import PerturbationKeys, parse_perturbations

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.eval.report import Kind, Report


MIN_CELLS = 20
_ROUNDING = 1e-12

_MIN_GENES_OF_A_CELL = 10
"""Minimum number of expressed genes; cells with fewer genes may equal another cell by chance."""

_TELLING_SHARE = 0.01
"""Maximum fraction of cells that may be equal by chance."""

_DECIMALS = 3

_SAME = 1e-4

_MIN_ROWS = 5

_BLOCK = 512

SAME_CELL = "have exactly the same expression as a training cell"

CEILING = "training cells"

_MIN_GENES = 10

_MISSING = 0.01
"""Maximum fraction of counts in missing genes at which totals are still accurate enough."""


def mark_of(made: AnnData | pd.DataFrame | str) -> Any:
    """Return a fingerprint of cells or effects, or None if there is none."""
    if isinstance(made, str):
        return made
    if isinstance(made, pd.DataFrame):
        return content_mark(made.to_numpy()), hash(tuple(made.index)), hash(tuple(made.columns))
    mark = content_mark(made.X)
    table = pd.util.hash_pandas_object(made.obs.astype(str), index=True).sum()
    return None if mark is None else (mark, hash(tuple(made.var_names)), int(table))


class _Parts(NamedTuple):
    """Statistics used by the scores. Arrays with both kinds of cells contain the generated cells first."""

    made: sparse.csr_matrix
    real: sparse.csr_matrix
    rows_made: np.ndarray
    rows_real: np.ndarray
    kernels: tuple[np.ndarray, ...]
    scores: np.ndarray
    groups: list[tuple[np.ndarray, np.ndarray]]


@register_benchmark("generation")
class Generation(Benchmark):
    """Compare generated cells with real cells that were not used to train the generator.

    All scores are computed on log1p CP10K: counts are normalized; other values must be log1p CP10K.

    ``gene_mean_r``, ``gene_variance_r``, ``gene_dropout_r``
        Pearson correlation over genes, between generated and real cells, of the mean, the variance, and the fraction of
        cells without the gene, over genes expressed in at least one real cell. NaN if either side does not vary.
    ``mmd``
        Squared maximum mean discrepancy, unbiased and thus sometimes below zero [1]_. It uses a Gaussian kernel, with
        the median distance between real cells as bandwidth, on the principal components of the real cells. Lower is
        better. The components are fitted on these cells, so even other real cells do not score exactly zero. Compare
        with the upper bound.
    ``c2st``
        Classifier two-sample test [2]_: the area under the ROC curve of extremely randomized trees that distinguish
        held-out real and generated cells by joint principal components, the distance from them, and the number of
        genes. 0.5 is best; values below 0.5 are mirrored (1 - x), because a classifier that is systematically wrong
        indicates copies.
    ``label_gene_mean_r``, ``label_mmd``
        With `labels_key`: the two scores within each label, averaged over labels. Labels with fewer than 20 real cells
        are left out, with a warning. If one of the other labels has fewer than 20 generated cells, both scores are NaN,
        with a warning, so that all methods are averaged over the same labels.

    Parameters
    ----------
    labels_key
        Column of ``obs`` in both data sets, e.g. the requested cell types.
    n_comps
        Number of principal components of the real cells; fewer if the data have fewer.
    max_cells
        Number of real and generated cells for ``mmd`` and ``c2st``, sampled at random; fewer if either has fewer. A
        classifier with fewer training cells is less accurate, so compare methods only at the same number of cells, as
        :func:`~scforge.eval.generation.evaluate_generation` does.
    seed
        Random seed for the components and the trees.

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
    _last: tuple[Any, _Parts] | None = None

    def __init__(self, labels_key: str | None = None, n_comps: int = 50, max_cells: int = 1_000, seed: int = 0) -> None:
        check_count("n_comps", n_comps, "components")
        check_count("max_cells", max_cells, "cells", least=MIN_CELLS)
        self.labels_key = labels_key
        self.n_comps = n_comps
        self.max_cells = max_cells
        self.seed = check_seed(seed)
        if labels_key is not None:
            self.metrics = (*type(self).metrics, "label_gene_mean_r", "label_mmd")

    def check(self, reference: AnnData) -> None:
        """Raise :class:`~scforge.errors.DataError` if the real cells cannot be used as a reference."""
        self._cells(reference, "real")

    def run(self, made: AnnData, reference: AnnData) -> dict[str, float]:
        """Return one score for each of :attr:`metrics`.

        Parameters
        ----------
        made
            Generated cells: counts or log1p CP10K in ``X``.
        reference
            Real cells in the same format, with the same genes in any order.

        Raises
        ------
        DataError
            If the genes differ, there are fewer than 20 cells, or ``X`` contains neither counts nor log1p CP10K.
        """
        parts = self._parts(made, reference)
        weights = tuple(np.ones((1, matrix.shape[0])) for matrix in (parts.made, parts.real))
        return {name: float(values[0]) for name, values in self._figures(parts, *weights).items()}

    def resampled(self, made: AnnData, reference: AnnData, *, n: int, seed: int) -> pd.DataFrame:
        """Return the scores on random halves of the cells; the halves of the real cells are the same for all methods.

        Trees and components are not refitted; the ones fitted on all cells are used.
        """
        parts = self._parts(made, reference)
        # Generated cells use a separate random generator, because their number may differ between methods.
        of_real = _halves(parts.real.shape[0], n, np.random.default_rng([seed, 0]))
        of_made = _halves(parts.made.shape[0], n, np.random.default_rng([seed, 1]))
        return pd.DataFrame(self._figures(parts, of_made, of_real))[list(self.metrics)]

    def _cells(self, adata: AnnData, what: str) -> sparse.csr_matrix:
        """Return log1p CP10K of cells, after checking their number."""
        if self.labels_key is not None:
            check_column("labels_key", self.labels_key, adata.obs)
        if adata.n_obs < MIN_CELLS:
            raise DataError(f"there are only {adata.n_obs} {what} cells; pass at least {MIN_CELLS} {what} cells.")
        return log_normalized(adata, argument=f"the {what} cells", made=what == "generated")

    def _parts(self, made: AnnData, reference: AnnData) -> _Parts:
        """Compute the quantities that do not depend on the draw, once for all scores."""
        key = ((self.seed, self.n_comps, self.max_cells), mark_of(made), mark_of(reference))
        if self._last is not None and self._last[0] == key and None not in key:
            return self._last[1]
        real, cells = self._cells(reference, "real"), self._cells(made, "generated")
        if {*made.var_names} != {*reference.var_names}:
            of_one = made.var_names.symmetric_difference(reference.var_names)
            raise DataError(f"{len(of_one)} genes are only in the generated or only in the real cells; remove them.")
        cells = cells[:, made.var_names.get_indexer(reference.var_names)]
        rng = np.random.default_rng(self.seed)
        n_cells = min(self.max_cells, *(matrix.shape[0] for matrix in (real, cells)))
        rows_real, rows_made = (np.sort(rng.permutation(matrix.shape[0])[:n_cells]) for matrix in (real, cells))
        pca = principal_components(real, self.n_comps, self.seed)
        kernels = _kernels(pca.transform(cells[rows_made]), pca.transform(real[rows_real]))
        scores = _told_apart(cells[rows_made], real[rows_real], self.n_comps, self.seed)
        groups, genes = self._groups(made, reference), np.flatnonzero(real.getnnz(axis=0))
        parts = _Parts(cells[:, genes], real[:, genes], rows_made, rows_real, kernels, scores, groups)
        self._last = (key, parts)
        return parts

    def _groups(self, made: AnnData, reference: AnnData) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the masks of generated and real cells for each label."""
        if self.labels_key is None:
            return []
        of_made, of_real = (_labels(adata, self.labels_key) for adata in (made, reference))
        n_real = of_real.value_counts().sort_index()
        # The real cells alone decide: a method must not choose what it is judged by.
        names, few = n_real.index[n_real >= MIN_CELLS], n_real.index[n_real < MIN_CELLS]
        lacking = [name for name in names if (of_made == name).sum() < MIN_CELLS]
        too_few = {"leave out": (few, "real"), "are NaN because of": (lacking, "generated")}
        for what, (labels, of) in too_few.items():
            if len(labels):
                warn(f"Per-label scores {what} labels with fewer than {MIN_CELLS} {of} cells: {listing(labels)}.")
        return [((of_made == name).to_numpy(), (of_real == name).to_numpy()) for name in names]

    def _figures(self, parts: _Parts, of_made: np.ndarray, of_real: np.ndarray) -> dict[str, np.ndarray]:
        """Return each score for each draw, shape (R,), from cell weights of 0 or 1, shapes (R, N)."""
        moments = [_moments(parts.made, of_made), _moments(parts.real, of_real)]
        both = [weights[:, rows] for weights, rows in ((of_made, parts.rows_made), (of_real, parts.rows_real))]
        figures = {
            name: _correlations(values, other)
            for name, values, other in zip(("gene_mean_r", "gene_variance_r", "gene_dropout_r"), *moments, strict=True)
        }
        figures["mmd"] = mmd_squared(parts.kernels, *both)
        figures["c2st"] = _areas(parts.scores, np.hstack(both))
        if self.labels_key is not None:
            each = []
            for generated, real in parts.groups:
                means = [_moments(parts.made, of_made * generated)[0], _moments(parts.real, of_real * real)[0]]
                weights = both[0] * generated[parts.rows_made], both[1] * real[parts.rows_real]
                each.append([_correlations(*means), mmd_squared(parts.kernels, *weights)])
            few = any(generated.sum() < MIN_CELLS for generated, _ in parts.groups)
            averaged = np.full((2, len(of_made)), np.nan) if few or not each else np.mean(each, axis=0)
            figures["label_gene_mean_r"], figures["label_mmd"] = averaged
        return figures


def _labels(adata: AnnData, key: str, *, warns: bool = False) -> pd.Series:
    """Return the label of each cell as text; missing labels are NaN."""
    return pd.Series(np.asarray(labels_of(adata.obs[key], key=key, warns=warns), dtype=object), index=adata.obs_names)


def mmd_squared(kernels: tuple[np.ndarray, ...], made: np.ndarray, real: np.ndarray) -> np.ndarray:
    r"""Return the unbiased squared maximum mean discrepancy of subsets of cells, float64, shape (R,).

    .. math:: \frac{\sum_{i \ne j} k(x_i, x_j)}{m (m - 1)} + \frac{\sum_{i \ne j} k(y_i, y_j)}{n (n - 1)}
        - \frac{2 \sum_{i, j} k(x_i, y_j)}{m n}

    Parameters
    ----------
    kernels
        Kernel between m generated cells, between n real cells, and between generated and real cells, shapes (m, m), (n,
        n) and (m, n).
    made, real
        Membership of the cells in each subset, 0 or 1, shapes (R, m) and (R, n). The result is NaN if a subset has
        fewer than two cells.

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


def _kernels(generated: np.ndarray, real: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return Gaussian kernels with the median distance between real cells as bandwidth."""
    from sklearn.metrics.pairwise import euclidean_distances, rbf_kernel

    width = float(np.median(euclidean_distances(real, squared=True)[np.triu_indices(len(real), 1)]))
    if width == 0:
        raise DataError("more than half of the real cells have identical expression; use other cells.")
    return tuple(
        rbf_kernel(*pair, gamma=1 / (2 * width)) for pair in ((generated, generated), (real, real), (generated, real))
    )


def _told_apart(generated: sparse.csr_matrix, real: sparse.csr_matrix, n_comps: int, seed: int) -> np.ndarray:
    """Return the probability that held-out cells are real according to trees, generated cells first, shape (2 N,)."""
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    cells = sparse.vstack([generated, real], format="csr")
    # Components of one side would lie nearer to its own cells, which alone would tell them.
    pca = principal_components(cells, n_comps, seed)
    places = np.asarray(pca.transform(cells), dtype=np.float64)
    lengths = np.asarray(cells.power(2).sum(axis=1)).ravel() - 2 * (cells @ pca.mean_) + pca.mean_ @ pca.mean_
    away = np.sqrt(np.maximum(lengths - (places**2).sum(axis=1), 0.0))
    seen = np.column_stack([places, away, np.diff(cells.indptr)])
    truth = np.repeat([False, True], [generated.shape[0], real.shape[0]])
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    trees = ExtraTreesClassifier(50, random_state=seed)
    return cross_val_predict(trees, seen, truth, cv=folds, method="predict_proba")[:, 1]


def _areas(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the area under the ROC curve for each set of cell weights, shape (R,); values below 0.5 are mirrored."""
    from sklearn.metrics import roc_auc_score

    real = np.arange(len(scores)) >= len(scores) // 2
    areas = [roc_auc_score(real, scores, sample_weight=draw) for draw in weights]
    return 0.5 + np.abs(np.array(areas) - 0.5)


def _moments(cells: sparse.csr_matrix, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean, variance and dropout of each gene in each draw, each of shape (R, G)."""
    cells = cells.astype(np.float64)
    n = np.maximum(weights.sum(axis=1, keepdims=True), 1.0)
    mean, squares, with_gene = (
        np.asarray((matrix.T @ weights.T).T) / n for matrix in (cells, cells.power(2), cells.astype(bool))
    )
    variance = squares - mean**2
    return mean, np.where(variance > _ROUNDING * squares, variance, 0.0), 1.0 - with_gene


def _correlations(first: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return Pearson correlations of rows, float64, shape (R,), or NaN if one of the two rows does not vary."""
    first, other = (rows - rows.mean(axis=1, keepdims=True) for rows in (first, other))
    lengths = np.sqrt((first**2).sum(axis=1) * (other**2).sum(axis=1))
    return np.where(lengths > 0, (first * other).sum(axis=1) / np.where(lengths > 0, lengths, 1.0), np.nan)


def check_disjoint(train: Iterable[object] | AnnData, test: Iterable[object] | AnnData, *, what: str = "cells") -> None:
    """Raise an error if training and test data overlap.

    Parameters
    ----------
    train, test
        Identifiers, e.g. names of cells, donors or perturbations; or AnnData. For AnnData, ``obs_names`` are compared,
        and the expression in ``X`` over shared genes.
    what
        Kind of identifiers, used in the message.

    Raises
    ------
    DataError
        If an identifier is in both, or more than 1% of the test cells have the same expression as a training cell.

    Warns
    -----
    ScforgeWarning
        If at most 1% of the test cells have the same expression as a training cell. Cells with fewer than 10 expressed
        genes are not checked.

    Examples
    --------
    >>> check_disjoint(["a", "b"], ["b", "c"], what="donors")
    Traceback (most recent call last):
        ...
    scforge.errors.DataError: 1 of 2 test donors are also training donors (first: 'b'); remove them from one of the two.
    """
    ids = [pd.Index(cells.obs_names if isinstance(cells, anndata.AnnData) else list(cells)) for cells in (train, test)]
    if (both := ids[1].isin(ids[0])).any():
        first = f"(first: {str(ids[1][both][0])!r}); remove them from one of the two"
        raise DataError(f"{int(both.sum())} of {len(ids[1])} test {what} are also training {what} {first}.")
    if isinstance(train, anndata.AnnData) and isinstance(test, anndata.AnnData):
        genes = test.var_names.intersection(train.var_names)
        seen, other = (
            sparse.csr_matrix(cells.X, dtype=np.float32)[:, cells.var_names.get_indexer(genes)]
            for cells in (train, test)
        )
        check_copies(copied_rows(other, seen), f"test {what} {SAME_CELL}")


def check_copies(same: np.ndarray, what: str) -> None:
    """Raise an error if more than 1% of the cells are copies; warn about fewer copies, which may occur by chance."""
    message = f"{int(same.sum())} of {len(same)} {what}"
    if same.any() and same.mean() > _TELLING_SHARE:
        raise DataError(f"{message}; remove these copies, because the reference must not contain the scored cells.")
    if same.any():
        warn(f"{message}; check whether these are copies.")


def copied_rows(matrix: sparse.csr_matrix, known: sparse.csr_matrix) -> np.ndarray:
    """Return which rows also occur in another matrix, bool, shape (N,); rows with fewer than 10 genes are ignored.

    Values are equal if they agree to three decimals, because log values from scanpy and scforge differ by rounding.
    """
    (hashes, looked_at), (others, telling) = _row_hashes(matrix), _row_hashes(known)
    return np.isin(hashes, others[telling]) & looked_at


def _row_hashes(matrix: sparse.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
    """Return a hash of each row, uint64, and whether the row has enough genes for a comparison, bool, shape (N,)."""
    matrix = matrix.tocsr().astype(np.float64)
    matrix.sum_duplicates()
    matrix.data = np.round(matrix.data, _DECIMALS)
    matrix.eliminate_zeros()
    # An order-free sum of a hash of each pair of gene and value, modulo 2^64.
    mixed = pd.util.hash_array(matrix.data.astype(np.float32).view(np.uint32).astype(np.uint64))
    mixed = pd.util.hash_array(mixed ^ pd.util.hash_array(matrix.indices.astype(np.uint64)))
    sums = np.zeros(matrix.shape[0], dtype=np.uint64)
    np.add.at(sums, np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)), mixed)
    return sums, np.diff(matrix.indptr) >= _MIN_GENES_OF_A_CELL


def check_features(
    features: pd.DataFrame, real: AnnData, keys: PerturbationKeys, argument: str = "gene_features"
) -> None:
    """Raise an error if the features of a held-out perturbation were computed from its own cells.

    The mean embedding of the perturbed cells is not known before the experiment, so a regression on it uses the answer.
    Leakage is detected if a row is, up to a factor, the mean over the cells of that perturbation, or this mean minus
    the mean of the controls. The check covers means of ``X``, of each layer (for counts, also of their log1p CP10K) and
    of each entry of ``obsm``. With at least five perturbations, leakage is also detected if a column equals a column of
    such means up to a factor and an offset. Columns with fewer than five distinct values, e.g. indicators, match too
    easily by chance.

    Parameters
    ----------
    features
        One row per perturbation or target, with names as index; any columns.
    real
        Held-out cells.
    keys
        Columns of ``obs`` with the perturbations.
    argument
        Name of `features` in the message.

    Examples
    --------
    >>> import anndata
    >>> rng, names = np.random.default_rng(0), np.repeat(["control", "A", "B"], 10)
    >>> obs = pd.DataFrame({"target": names}, index=[f"cell{i}" for i in range(30)])
    >>> real = anndata.AnnData(rng.normal(size=(30, 12)), obs)
    >>> keys = PerturbationKeys("target", control="control")
    >>> check_features(pd.DataFrame(rng.normal(size=(2, 12)), index=["A", "B"]), real, keys)
    >>> check_features(real.to_df().groupby(names).mean(), real, keys)
    Traceback (most recent call last):
        ...
    scforge.errors.DataError: gene_features contains the mean of X over the held-out cells of 'A'...
    """
    of_cells = parse_perturbations(real.obs, keys)
    labels = pd.Series([keys.label(targets) for targets in of_cells])
    cells_of = labels.groupby(labels).indices
    controls = cells_of.pop("", None)
    table = features.set_axis(features.index.astype(str))
    table = table[table.index.isin(list(cells_of))]
    own = table.to_numpy(dtype=np.float64)
    for where, matrix in _representations(real) if len(table) else ():
        means = np.array([_mean(matrix, cells_of[name]) for name in table.index])
        plain = 0.0 if controls is None else _mean(matrix, controls)
        copied = table.index[:0]
        if own.shape == means.shape:
            copied = table.index[_same_rows(own, means) | _same_rows(own, means - plain)]
        if len(copied) or _same_columns(own, means):
            name = [*copied, table.index[0]][0]
            raise DataError(
                f"contains the mean of {where} over the held-out cells of {name!r}; pass features that were "
                "computed without these cells.",
                argument=argument,
            )


def _representations(adata: AnnData) -> list[tuple[str, np.ndarray | sparse.csr_matrix]]:
    """Return the name of each cell matrix, with the matrix on its scale."""
    matrices = [(f"obsm[{key!r}]", np.asarray(adata.obsm[key])) for key in adata.obsm]
    for key, matrix in {None: adata.X, **dict(adata.layers)}.items():
        if matrix is not None:
            where = "X" if key is None else f"layers[{key!r}]"
            matrices.append((where, matrix))
            if holds_counts(adata, key):
                matrices.append((f"the log1p CP10K values of {where}", log_normalized(adata, key, argument="real")))
    return matrices


def _mean(matrix: np.ndarray | sparse.csr_matrix, rows: np.ndarray) -> np.ndarray:
    return np.asarray(matrix[rows].mean(axis=0), dtype=np.float64).ravel()


def _same_rows(first: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return which rows are equal up to a factor; short rows, which match by chance, must be exactly equal."""
    if first.shape[1] < 3:
        return np.isclose(first, other, rtol=_SAME, atol=0).all(axis=1) & first.any(axis=1)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(other, axis=1)
    return ((first * other).sum(axis=1) > (1 - _SAME**2) * lengths) & (lengths > 0) & np.isfinite(lengths)


def _same_columns(ours: np.ndarray, means: np.ndarray) -> bool:
    """Return whether a column equals a column of means up to scale and offset, e.g. after standardization."""
    if len(ours) < _MIN_ROWS or not np.isfinite(ours).all():
        return False
    first, other = (_unit_columns(values) for values in (ours, means))
    blocks = (first[:, start : start + _BLOCK].T @ other for start in range(0, first.shape[1], _BLOCK))
    return any(bool(np.abs(alike).max(initial=0.0) > 1 - _SAME**2) for alike in blocks)


def _unit_columns(values: np.ndarray) -> np.ndarray:
    """Return centered columns of length 1, for columns with enough distinct values."""
    values = values[:, np.isfinite(values).all(axis=0)]
    size = np.abs(values).max(axis=0, initial=0.0)
    steps = np.diff(np.sort(values, axis=0), axis=0) > 1e-6 * size
    centered = values[:, steps.sum(axis=0) >= _MIN_ROWS - 1]
    centered = centered - centered.mean(axis=0)
    return centered / np.linalg.norm(centered, axis=0)


def compare_beside(
    benchmark: Benchmark,
    argument: str,
    made: Mapping[str, Any],
    baselines: Mapping[str, Any],
    reference: Any,
    *,
    kinds: Mapping[str, Kind] | None,
    ceiling: str | None = None,
    **options: Any,
) -> Report:
    """Compare methods (models unless `kinds` specifies otherwise) with baselines, one of which may be an upper bound.

    `argument` is the name of the methods in messages. For the other options, see :func:`scforge.eval.compare`.
    """
    for name in kinds or {}:
        check_known("kinds", name, made, argument, error=OptionError)
    taken = [name for name in made if name in baselines]
    if taken or not made:
        raise OptionError(
            f"contains {listing(taken)}; pass at least one method, and do not use the names of baselines.",
            argument=argument,
        )
    all_kinds: dict[str, Kind] = {
        **dict.fromkeys(made, "model"),
        **(kinds or {}),
        **dict.fromkeys(baselines, "baseline"),
    }
    if ceiling is not None:
        all_kinds[ceiling] = "ceiling"
    return compare(benchmark, {**made, **baselines}, reference, kinds=all_kinds, **options)


def generation_baselines(
    train: AnnData,
    labels: int | Sequence[str] | pd.Series,
    *,
    labels_key: str | None = None,
    layer: str | None = None,
    seed: int = 0,
) -> dict[str, AnnData]:
    """Generate cells from training cells without a model.

    ``"training cells"``
        The training cells themselves, each used once if there are enough. This is an upper bound, not a baseline,
        because they are real data from another split. A model that copies its training cells also reaches it.
    ``"independent genes"``
        Each gene takes its log1p CP10K from a different training cell, so each gene has the right distribution, but no
        two genes are correlated.
    ``"mean and Poisson"``
        Poisson counts around the mean fraction of each gene times the library size of a training cell, so all cells
        have the same expected profile.

    Generates `labels` cells, or one cell per entry of `labels` from the training cells with this value of
    ``obs[labels_key]``: log1p CP10K in ``X`` (CSR, float32) and the labels in ``obs[labels_key]``.

    Examples
    --------
    >>> import anndata, numpy as np
    >>> train = anndata.AnnData(np.random.default_rng(0).poisson(np.arange(1, 31), size=(80, 30)).astype("float32"))
    >>> {name: part.shape for name, part in generation_baselines(train, 20).items()}
    {'training cells': (20, 30), 'independent genes': (20, 30), 'mean and Poisson': (20, 30)}
    """
    rng = np.random.default_rng(seed)
    counts = counts_of(train, layer).astype(np.float64)
    wanted = np.full(labels, "") if isinstance(labels, int) else np.asarray(labels).astype(str)
    train_labels = np.full(train.n_obs, "") if labels_key is None else _labels(train, labels_key).to_numpy()
    obs = pd.DataFrame(
        {} if labels_key is None else {labels_key: wanted}, index=[f"cell{i}" for i in range(len(wanted))]
    )
    if missing := sorted(set(wanted) - set(train_labels)):
        raise DataError(f"no training cell has the label {listing(missing, most=3)}; leave out cells with this label.")
    totals = np.asarray(counts.sum(axis=1)).ravel()
    logs = log_normalized(train, layer, argument="train")
    parts: dict[str, list[sparse.csr_matrix]] = {CEILING: [], "independent genes": [], "mean and Poisson": []}
    places = []
    for label in dict.fromkeys(wanted):
        rows, n = np.flatnonzero(train_labels == label), int((wanted == label).sum())
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
    """Score generated cells against real cells, with baselines derived from the training cells.

    Library sizes are computed over all genes of each data set, so counts must contain all genes. Scores then use the
    shared genes. ``mmd`` and ``c2st`` use the same number of cells for each method and for the real cells, the minimum
    over all of them.

    Parameters
    ----------
    generated
        Generated cells of one method, or a mapping from method name to generated cells, with counts or log1p CP10K in
        ``X``, e.g. from :meth:`scforge.models.Encoder.generate`.
    real
        Real cells that were not used for training, with raw counts.
    train
        Real cells used for training, with raw counts.
    labels_key
        Column of ``obs`` in all three data sets, for scores within labels.
    layer
        Key in ``layers`` of `real` and `train` with raw counts. If None, reads ``X``.
    kinds
        A mapping from method name to kind, e.g. ``"untrained"``. The default is ``"model"``.
    n_comps, max_cells
        As in :class:`Generation`.
    seeds
        Random seeds for ``mmd`` and ``c2st``; the first is also used for the baselines.
    intervals
        Whether to add 95% intervals, and tests against the best baseline.
    title
        Heading of the report.

    Returns
    -------
    The report with the :class:`Generation` scores of each method and baseline.

    Raises
    ------
    DataError
        If real cells are also training cells (under any name), generated cells are copies of real cells, counts cover
        only some genes, or the data sets differ in scale.
    OptionError
        If an option is invalid, or `kinds` names an unknown method.

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
    methods = dict(generated) if isinstance(generated, Mapping) else {"generated": generated}
    check_seeds(seeds)
    benchmark = Generation(labels_key, n_comps, max_cells, int(seeds[0]))
    check_disjoint(train.obs_names, real.obs_names)
    names = real.var_names
    for adata in (train, *methods.values()):
        names = names[names.isin(adata.var_names)]
    if len(names) < _MIN_GENES:
        raise DataError(
            f"only {len(names)} genes are shared by real, train and all generated cells; use the same gene names in "
            "all of them."
        )
    notes: list[str] = []
    labels: Any = real.n_obs
    if labels_key is not None:
        check_column("labels_key", labels_key, real.obs)
        check_column("labels_key", labels_key, train.obs)
        labeled = _labels(real, labels_key, warns=True).notna()
        if not labeled.all():
            notes.append(f"{int((~labeled).sum())} real cells without obs[{labels_key!r}] are left out.")
        real = real[labeled]
        labels = _labels(real, labels_key).astype(str)
    baselines = generation_baselines(train, labels, labels_key=labels_key, layer=layer, seed=int(seeds[0]))
    reference = _on_genes(real, "the real cells", names, layer)
    cells = {name: _on_genes(adata, f"the cells of {name!r}", names, made=True) for name, adata in methods.items()}
    learned = _on_genes(train, "train", names, layer)
    check_copies(copied_rows(reference.X, learned.X), f"test cells {SAME_CELL}")
    check_complete(train, "train", real, layer=layer, layer_of_whole=layer)
    check_complete(real, "the real cells", train, layer=layer, layer_of_whole=layer)
    for name, adata in cells.items():
        check_complete(methods[name], f"the cells of {name!r}", real, layer_of_whole=layer)
        same = copied_rows(adata.X, reference.X)
        check_copies(same, f"cells of generated[{name!r}] are identical to held-out cells")
        if not holds_counts(methods[name]) and (difference := scale_difference(adata.X, reference.X)):
            # What scforge generates is on this scale, however wrong it is.
            if "generated" not in methods[name].uns.get(UNS_KEY, {}):
                raise DataError(f"the cells of {name!r} have {difference}; pass counts.")
            notes.append(f"The cells of {name} have {difference}, so their total expression is too high or too low.")
    baselines = {name: adata[:, names].copy() for name, adata in baselines.items()}
    benchmark.max_cells = min(max_cells, reference.n_obs, *(adata.n_obs for adata in cells.values()))
    report = compare_beside(
        benchmark,
        "generated",
        cells,
        baselines,
        reference,
        kinds=kinds,
        ceiling=CEILING,
        seeds=seeds,
        intervals=intervals,
        title=title,
    )
    report.facts |= {"real cells": real.n_obs, "training cells": train.n_obs, "genes": len(names)}
    report.facts["cells of each in mmd and c2st"] = benchmark.max_cells
    report.notes += notes
    report.notes.append(
        f"Scores use log1p CP{TARGET_SUM:,.0f} of {len(names)} of the {real.n_vars} genes of the real cells (the genes "
        "in all data sets)."
    )
    return report


def _on_genes(adata: AnnData, what: str, names: pd.Index, layer: str | None = None, *, made: bool = False) -> AnnData:
    """Return log1p CP10K of the named genes in the given order; library sizes are computed over all genes."""
    logs = log_normalized(adata, layer, argument=what, made=made)[:, adata.var_names.get_indexer(names)]
    return anndata.AnnData(logs, obs=adata.obs.copy(), var=pd.DataFrame(index=names))


def holds_counts(adata: AnnData, layer: str | None = None) -> bool:
    """Return whether the values can be counts."""
    matrix = adata.X if layer is None else adata.layers[layer]
    return value_problem(matrix.data if sparse.issparse(matrix) else np.ravel(matrix)) is None


def check_complete(
    adata: AnnData, what: str, whole: AnnData, *, layer: str | None = None, layer_of_whole: str | None = None
) -> None:
    """Raise an error if counts cover only some genes of the other data, so that totals are not library sizes."""
    lacking = ~whole.var_names.isin(adata.var_names)
    if not lacking.any() or not holds_counts(adata, layer):
        return
    logs = log_normalized(whole, layer_of_whole, argument="the others")
    share = float(totals_of(logs[:, np.flatnonzero(lacking)]).sum() / totals_of(logs).sum())
    if share > _MISSING:
        lost = f"{int(lacking.sum())} genes with {share:.0%} of the counts of the other cells"
        raise DataError(
            f"the counts of {what} lack {lost}; pass counts of all genes, or log1p of counts per 10,000 over all genes."
        )


def _independent(logs: sparse.csc_matrix, n_cells: int, rng: np.random.Generator) -> sparse.csr_matrix:
    """Sample each gene of each generated cell from a random cell, independently of the other genes."""
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
    """Sample counts with the given mean fractions, and return their log1p CP10K."""
    blocks = []
    for start in range(0, len(totals), 1_000):
        counts = rng.poisson(totals[start : start + 1_000, None] * share).astype(np.float64)
        library = np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
        blocks.append(sparse.csr_matrix(np.log1p(counts * (TARGET_SUM / library))))
    return sparse.vstack(blocks, format="csr")
