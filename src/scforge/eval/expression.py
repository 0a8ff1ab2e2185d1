"""Normalized expression, means by condition, and pseudobulks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from scforge._checks import check_known
from scforge._constants import TARGET_SUM
from scforge.data.cells import Cells
from scforge.data.checks import sound_csr
from scforge.errors import DataError, listing

if TYPE_CHECKING:
    from anndata import AnnData
    from sklearn.decomposition import PCA


_ROOM = 1.01
"""Tolerance for rounding errors of a total of 10,000."""

_ROOM_OF_MADE = 10.0
"""Factor by which totals of predictions on the log scale may differ from 10,000; comparisons with real cells are
stricter."""

_MAX_RATIO = 1.2
"""Maximum ratio of totals over the same genes between cells with the same normalization."""

_SAME_TOTAL = 1e-3
"""Maximum variation of totals in cells normalized to the same total; totals over some of the genes vary more."""

_MIN_CELLS = 3

_MAX = 10.0
"""Standard deviations above the mean at which scaled values are clipped, as in the scanpy and CellTypist tutorials."""

_PIECE = 1 << 14
"""Number of cells that are read at once, to limit memory."""

_BLOCK = 4096
"""Number of cells that are read at once."""


def log_normalized(
    adata: AnnData, layer: str | None = None, *, argument: str = "adata", made: bool = False
) -> sparse.csr_matrix:
    """Return log1p CP10K values from counts or log1p CP10K values, as CSR without stored zeros, shape (N, G).

    Integers are taken as counts. Other values are taken as log1p CP10K if their ``expm1`` sums to 10,000 in each cell,
    or to less if the data contain only some genes. With `made`, the cells are predictions: their median total may
    differ from 10,000 by a factor of at most ten. `argument` is the name of the cells in messages.
    """
    where = f"X of {argument}" if layer is None else f"layers[{layer!r}] of {argument}"
    if layer is not None:
        check_known("layer", layer, adata.layers, f"{argument}.layers")
    matrix = adata.X if layer is None else adata.layers[layer]
    if adata.isbacked or matrix is None:
        raise DataError(
            f"{where} is {'backed by a file' if adata.isbacked else None}; pass an AnnData with values in memory, e.g. "
            "adata.to_memory()."
        )
    if adata.var_names.has_duplicates:
        twice = adata.var_names[adata.var_names.duplicated()].unique()
        raise DataError(f"var_names of {argument} contains duplicates ({listing(twice, most=3)}); make them unique.")
    # SciPy knows no sparse matrices of half precision.
    matrix = matrix.astype(np.float32) if matrix.dtype == np.float16 else matrix
    matrix = sound_csr(matrix if sparse.issparse(matrix) else sparse.csr_matrix(np.asarray(matrix)), where)
    if not matrix.has_canonical_format:
        # A value in two parts is their sum, also under a logarithm.
        matrix = matrix.copy()
        matrix.sum_duplicates()
    kind = np.float64 if matrix.dtype == np.float64 else np.float32
    values = matrix.data.astype(np.float64)
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    counts = bool((values == np.floor(values)).all()) and values.min(initial=0) >= 0
    if not counts and (problem := _scale_problem(values, rows, matrix.shape[0], made=made)):
        raise DataError(
            f"{where} contains {problem}; pass counts or log1p CP10K values, or (for predictions) effects as a "
            "DataFrame."
        )
    if counts:
        total = np.bincount(rows, values, minlength=matrix.shape[0])
        values = np.log1p(values * (TARGET_SUM / np.maximum(total, 1.0))[rows])
    logs = sparse.csr_matrix((values.astype(kind), matrix.indices, matrix.indptr), shape=matrix.shape)
    if not values.all():
        logs = logs.copy()  # the indices are those of `adata`
        logs.eliminate_zeros()
    return logs


def _scale_problem(values: np.ndarray, rows: np.ndarray, n_cells: int, *, made: bool) -> str | None:
    """Return the reason why values are not log1p of counts per 10,000, or None."""
    if not np.isfinite(values).all():
        return f"{int((~np.isfinite(values)).sum())} missing or infinite values"
    if values.min() < 0:
        return f"negative values (smallest: {values.min():g}), which are neither counts nor log1p of counts per 10,000"
    plain = np.expm1(np.minimum(values, 50.0))
    # Counts have ones among them; scaled to a total, all cells would need one of exactly 10,000 for that.
    if np.abs(plain - np.round(plain)).max() < 1e-3 and abs(plain[plain > 0].min() - 1) < 1e-3:
        return "log1p of counts that were not normalized"
    total = np.bincount(rows, plain, minlength=n_cells)
    total = total[total > 0]
    middle = float(np.median(total)) if len(total) else TARGET_SUM
    most, room = (middle, _ROOM_OF_MADE) if made else (total.max(), _ROOM)
    if most > room * TARGET_SUM:
        return f"neither counts nor log1p of counts per 10,000 (expm1 of a cell sums to {most:.4g})"
    # Predicted cells may be one profile many times, so their totals are compared with those of real cells instead.
    if not made and len(total) > 1 and np.ptp(total) < _SAME_TOTAL * middle and abs(middle / TARGET_SUM - 1) > 0.01:
        return f"values normalized to about {middle:,.0f} per cell instead of 10,000"
    return None


def scale_difference(one: sparse.csr_matrix, other: sparse.csr_matrix, *, profiles: bool = False) -> str | None:
    """Return a description of how the totals of two sets of log1p CP10K cells differ, or None.

    With `profiles`, cells may be means on the log scale, which have smaller totals but the same sum of logarithms.
    """
    if not one.shape[0] or not other.shape[0]:
        return None
    totals = [float(np.median(totals_of(some))) for some in (one, other)]
    pairs = [totals, [float(some.sum()) / some.shape[0] for some in (one, other)]][: 1 + profiles]
    if any(min(pair) <= 0 or max(pair) <= _MAX_RATIO * min(pair) for pair in pairs):
        return None
    return f"a median total of {totals[0]:,.0f} over the shared genes, but the other cells have {totals[1]:,.0f}"


def principal_components(cells: sparse.csr_matrix, n_comps: int, seed: int) -> PCA:
    """Fit `n_comps` principal components of a sparse matrix, or fewer if the data have fewer."""
    from sklearn.decomposition import PCA

    return PCA(min(n_comps, min(cells.shape) - 1), svd_solver="arpack", random_state=seed).fit(cells)


def totals_of(logs: sparse.csr_matrix) -> np.ndarray:
    """Return the total of ``expm1`` of each cell, float64, shape (N,)."""
    return np.asarray(logs.astype(np.float64).expm1().sum(axis=1)).ravel()


def log_expression(cells: Cells, rows: np.ndarray | None = None) -> sparse.csr_matrix:
    """Return log1p CP10K of cells over the genes of their vocabulary, CSR, float32, shape (N, G).

    Library sizes are computed over all genes of the data, including genes outside the vocabulary.
    """
    assert cells.vocab is not None
    rows = np.arange(len(cells)) if rows is None else np.asarray(rows, dtype=np.int64)
    n_genes = cells.vocab.n_genes
    parts = [sparse.csr_matrix((0, n_genes), dtype=np.float32)]
    for start in range(0, len(rows), _PIECE):
        block = cells.block(rows[start : start + _PIECE])
        scale = (TARGET_SUM / np.maximum(block.totals, 1.0)).astype(np.float32)
        values = np.log1p(block.counts * np.repeat(scale, np.diff(block.indptr)))
        parts.append(sparse.csr_matrix((values, block.genes, block.indptr), shape=(len(block), n_genes)))
    return sparse.vstack(parts, format="csr")


class ExpressionSpace:
    """Variable genes, their scaling and their principal components, all fitted on training cells only.

    Genes are chosen as :func:`scanpy.pp.highly_variable_genes` does (``flavor="seurat"``).

    Parameters
    ----------
    expression
        log1p CP10K of the training cells, shape (N, G).
    n_top_genes
        Number of genes, selected among genes expressed in at least three cells.
    n_comps
        Number of components; fewer if the data have fewer.
    seed
        Seed for the solver.

    Attributes
    ----------
    genes
        The variable genes, ascending, int64, shape (H,).
    mean, scale
        Mean and standard deviation of each variable gene, float32, shape (H,).
    pca
        The fitted :class:`sklearn.decomposition.PCA`.

    Raises
    ------
    DataError
        If there are too few cells or genes.
    """

    def __init__(
        self, expression: sparse.csr_matrix, *, n_top_genes: int = 2_000, n_comps: int = 50, seed: int = 0
    ) -> None:
        import anndata
        import scanpy as sc
        from sklearn.utils.sparsefuncs import mean_variance_axis

        genes = np.flatnonzero(expression.getnnz(axis=0) >= _MIN_CELLS)
        if len(genes) < 2 or expression.shape[0] < 3:
            found = f"{expression.shape[0]} training cells with {len(genes)} genes"
            raise DataError(f"{found} are too few for expression baselines; use more cells, or pass baselines=False.")
        if n_top_genes < len(genes):
            work = anndata.AnnData(expression[:, genes], uns={"log1p": {"base": None}})
            sc.pp.highly_variable_genes(work, n_top_genes=n_top_genes)
            genes = genes[np.asarray(work.var["highly_variable"], dtype=bool)]
        mean, variance = mean_variance_axis(expression[:, genes], axis=0)
        self.genes, self.mean = genes, mean.astype(np.float32)
        self.scale = np.sqrt(np.where(variance > 0, variance, 1.0)).astype(np.float32)
        self.pca = principal_components(self.scaled(expression), n_comps, seed)

    def scaled(self, expression: sparse.csr_matrix) -> sparse.csr_matrix:
        """Return the variable genes in units of their standard deviation, CSR float32, shape (N, H).

        Values more than ten standard deviations above the mean are clipped. The mean is not subtracted, because this
        would make the matrix dense; PCA and models with an intercept handle it themselves.
        """
        chosen = expression[:, self.genes]
        columns = chosen.indices
        values = np.minimum(chosen.data, (self.mean + _MAX * self.scale)[columns]) / self.scale[columns]
        return sparse.csr_matrix((values, columns, chosen.indptr), shape=chosen.shape)

    def components(self, expression: sparse.csr_matrix) -> np.ndarray:
        """Return the principal components of cells, float32, shape (N, D)."""
        return np.asarray(self.pca.transform(self.scaled(expression)), dtype=np.float32)


@dataclass(frozen=True)
class Moments:
    """Mean and spread of the log1p CP10K values of groups of cells.

    Attributes
    ----------
    n
        Number of cells in each group, int64, shape (P,).
    mean
        Mean of each gene, float64, shape (P, G); 0 for a group without cells.
    variance
        Variance of each gene, with n - 1 in the denominator, float64, shape (P, G); 0 for groups of fewer than two
        cells.
    """

    n: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


@dataclass(frozen=True)
class Effects:
    """Mean effects of perturbations.

    Attributes
    ----------
    deltas
        Mean log1p CP10K of the perturbed cells minus the mean of their controls, float64, shape (Q, G).
    scores
        Welch's t statistic of each gene, float64, shape (Q, G); 0 if neither group varies.
    n_cells, n_controls
        Number of cells of each of the two means, int64, shape (Q,).
    freedom
        Welch-Satterthwaite degrees of freedom of each t statistic, float64, shape (Q, G); 0 if neither group varies.
    """

    deltas: np.ndarray
    scores: np.ndarray
    n_cells: np.ndarray
    n_controls: np.ndarray
    freedom: np.ndarray

    @property
    def p_values(self) -> np.ndarray:
        """Two-sided p-values of Welch's t-test, float64, shape (Q, G); 1 if the test is not defined.

        The test is not defined for genes that do not vary, and for groups of one cell, which have no standard
        deviation.
        """
        from scipy import stats

        known = (self.freedom > 0) & (np.minimum(self.n_cells, self.n_controls) > 1)[:, None]
        found = np.ones_like(self.scores)
        found[known] = 2 * stats.t.sf(np.abs(self.scores[known]), self.freedom[known])
        return found


def moments(cells: Cells, rows: np.ndarray, codes: np.ndarray, n_groups: int) -> Moments:
    """Return mean and variance of groups of cells; `rows` are ascending, and `codes` are their groups."""
    starts = range(0, max(len(rows), 1), _BLOCK)
    taken = (slice(start, start + _BLOCK) for start in starts)
    return _moments(((log_expression(cells, rows[some]), codes[some]) for some in taken), n_groups)


def moments_of(expression: sparse.csr_matrix, codes: np.ndarray, n_groups: int) -> Moments:
    """Return mean and variance of groups of rows in a matrix of shape (N, G); rows with code -1 are ignored."""
    chosen = codes >= 0
    return _moments([(expression[chosen], codes[chosen])], n_groups)


def effects_of(groups: Moments, perturbed: np.ndarray, controls: np.ndarray) -> Effects:
    """Compare each of Q groups of perturbed cells with the group of its controls."""
    deltas = groups.mean[perturbed] - groups.mean[controls]
    errors = [groups.variance[side] / np.maximum(groups.n[side], 1)[:, None] for side in (perturbed, controls)]
    spread = errors[0] + errors[1]
    scores = np.divide(deltas, np.sqrt(spread), out=np.zeros_like(deltas), where=spread > 0)
    parts = sum(
        np.square(error) / np.maximum(groups.n[side] - 1, 1)[:, None]
        for error, side in zip(errors, (perturbed, controls), strict=True)
    )
    freedom = np.divide(np.square(spread), parts, out=np.zeros_like(deltas), where=parts > 0)
    return Effects(deltas, scores, groups.n[perturbed], groups.n[controls], freedom)


def _moments(blocks: Iterable[tuple[sparse.csr_matrix, np.ndarray]], n_groups: int) -> Moments:
    """Return the moments of cells that are read in blocks; each block comes with the groups of its cells."""
    n, total, squares = np.zeros(n_groups, dtype=np.int64), np.float64(0), np.float64(0)
    for expression, codes in blocks:
        members = sparse.csr_matrix((np.ones(len(codes)), (codes, np.arange(len(codes)))), shape=(n_groups, len(codes)))
        n += np.bincount(codes, minlength=n_groups)
        total = total + (members @ expression).toarray()
        squares = squares + (members @ expression.multiply(expression).tocsr()).toarray()
    mean = total / np.maximum(n, 1)[:, None]
    # Rounding must not make a variance negative.
    variance = np.maximum(squares - n[:, None] * mean**2, 0.0) / np.maximum(n - 1, 1)[:, None]
    variance[n < 2] = 0.0
    return Moments(n, mean, variance)
