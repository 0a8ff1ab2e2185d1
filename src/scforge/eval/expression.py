"""Variable genes and principal components of expression."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from scforge.errors import DataError

if TYPE_CHECKING:
    from sklearn.decomposition import PCA

_MIN_CELLS = 3

_MAX = 10.0
"""Standard deviations above the mean at which scaled values are clipped, as in the scanpy and CellTypist tutorials."""


def principal_components(cells: sparse.csr_matrix, n_comps: int, seed: int) -> PCA:
    """Fit `n_comps` principal components of a sparse matrix, or fewer if the data have fewer."""
    from sklearn.decomposition import PCA

    return PCA(min(n_comps, min(cells.shape) - 1), svd_solver="arpack", random_state=seed).fit(cells)


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
            size = f"{expression.shape[0]} training cells with {len(genes)} genes"
            raise DataError(f"{size} are too few for expression baselines; use more cells, or pass baselines=False.")
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
