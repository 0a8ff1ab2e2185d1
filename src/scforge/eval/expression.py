"""Log-normalised expression, and the components of it that baselines learn from.

Shapes: N cells, G genes of the vocabulary, H variable genes, D components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from scforge._checks import check_count, check_seed
from scforge._constants import TARGET_SUM
from scforge.errors import DataError, OptionError

if TYPE_CHECKING:
    from scforge.data.cells import Cells

__all__ = ["ExpressionSpace", "log_expression"]

_MIN_CELLS = 3
_MOST = 10.0
"""Standard deviations above the mean at which scaled values are cut, as scanpy's and CellTypist's tutorials do."""

_PIECE = 1 << 14
"""Cells that are read at once: bounds what is held twice."""


def log_expression(cells: Cells, rows: np.ndarray | None = None) -> sparse.csr_matrix:
    """Return log1p CP10K of cells over the genes of their vocabulary.

    Library sizes are those over all genes of the data, also over those outside the vocabulary.

    Parameters
    ----------
    cells
        The cells.
    rows
        Only these, in this order; all if None.

    Returns
    -------
    CSR, float32, shape (N, G).

    Raises
    ------
    OptionError
        If the cells have no vocabulary.
    """
    if cells.vocab is None:
        raise OptionError("the cells have no vocabulary; open them with scforge.data.open_cells(source, vocab).")
    rows = np.arange(len(cells)) if rows is None else np.asarray(rows, dtype=np.int64)
    n_genes = cells.vocab.n_genes
    parts = [sparse.csr_matrix((0, n_genes), dtype=np.float32)]
    for start in range(0, len(rows), _PIECE):
        block = cells.block(rows[start : start + _PIECE])
        scale = (TARGET_SUM / np.maximum(block.totals, 1.0)).astype(np.float32)
        values = np.log1p(block.counts * np.repeat(scale, np.diff(block.indptr)))
        parts.append(sparse.csr_matrix((values, block.genes, block.indptr), shape=(len(block), n_genes)))
    return sparse.vstack(parts, format="csr")


@dataclass(frozen=True)
class ExpressionSpace:
    """Variable genes, their scaling and their principal components, all fitted on training cells alone.

    Attributes
    ----------
    genes
        The variable genes, ascending, int64, shape (H,).
    mean, scale
        Mean and standard deviation of each, float32, shape (H,).
    pca
        The fitted :class:`sklearn.decomposition.PCA`.
    """

    genes: np.ndarray
    mean: np.ndarray
    scale: np.ndarray
    pca: Any

    @classmethod
    def fit(
        cls, expression: sparse.csr_matrix, *, n_top_genes: int = 2_000, n_comps: int = 50, seed: int = 0
    ) -> ExpressionSpace:
        """Choose genes as :func:`scanpy.pp.highly_variable_genes` does (``flavor="seurat"``), scale them, and find PCs.

        Parameters
        ----------
        expression
            log1p CP10K of the training cells, shape (N, G).
        n_top_genes
            Number of genes, among those that three cells express.
        n_comps
            Number of components; fewer where there are not so many.
        seed
            Seed of the solver.

        Raises
        ------
        DataError
            If there are too few cells or genes.
        """
        import anndata
        import scanpy as sc
        from sklearn.decomposition import PCA
        from sklearn.utils.sparsefuncs import mean_variance_axis

        check_count("n_top_genes", n_top_genes, "genes")
        check_count("n_comps", n_comps, "components")
        check_seed(seed)
        genes = np.flatnonzero(expression.getnnz(axis=0) >= _MIN_CELLS)
        if len(genes) < 2 or expression.shape[0] < 3:
            raise DataError(
                f"{expression.shape[0]} training cells with {len(genes)} genes that {_MIN_CELLS} of them express are "
                "too few for baselines on expression; take more cells, or baselines=False."
            )
        if n_top_genes < len(genes):
            work = anndata.AnnData(expression[:, genes], uns={"log1p": {"base": None}})
            sc.pp.highly_variable_genes(work, n_top_genes=n_top_genes)
            genes = genes[np.asarray(work.var["highly_variable"], dtype=bool)]
        mean, variance = mean_variance_axis(expression[:, genes], axis=0)
        scale = np.sqrt(np.where(variance > 0, variance, 1.0))
        space = cls(genes, mean.astype(np.float32), scale.astype(np.float32), None)
        scaled = space.scaled(expression)
        pca = PCA(min(n_comps, min(scaled.shape) - 1), svd_solver="arpack", random_state=seed).fit(scaled)
        return cls(space.genes, space.mean, space.scale, pca)

    def scaled(self, expression: sparse.csr_matrix) -> sparse.csr_matrix:
        """Return the variable genes in units of their standard deviation, CSR float32, shape (N, H).

        Values more than ten standard deviations above the mean are cut. The mean is not taken off, which would fill
        the matrix; components and models with an intercept do so themselves.
        """
        chosen = expression[:, self.genes]
        columns = chosen.indices
        values = np.minimum(chosen.data, (self.mean + _MOST * self.scale)[columns]) / self.scale[columns]
        return sparse.csr_matrix((values, columns, chosen.indptr), shape=chosen.shape)

    def components(self, expression: sparse.csr_matrix) -> np.ndarray:
        """Return the principal components of cells, float32, shape (N, D)."""
        return np.asarray(self.pca.transform(self.scaled(expression)), dtype=np.float32)
