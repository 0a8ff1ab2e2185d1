"""Genes of a data set onto the genes of a vocabulary, with a report of what was lost."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from scforge.data.vocab import GeneVocab, id_kind
from scforge.errors import DataError, GeneMismatchError, ScforgeWarning, did_you_mean, listing

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

__all__ = ["MIN_OVERLAP", "GeneMap", "gene_names", "map_genes"]

MIN_OVERLAP = 0.1
"""Smallest share of a model's genes that a data set must have."""

WARN_OVERLAP = 0.5
"""Share of a model's genes below which a warning is given."""


def gene_names(adata: AnnData, gene_key: str | None = None) -> np.ndarray:
    """Return the gene names of `adata` as an array of str, shape (n_vars,).

    Raises
    ------
    DataError
        If ``adata.var`` has no column `gene_key`, or names are missing or repeated.
    """
    if gene_key is None:
        names, where = adata.var_names, "adata.var_names"
        fix = "call adata.var_names_make_unique(), or name a column of unique ids with gene_key"
    elif gene_key in adata.var:
        names, where = adata.var[gene_key], f"adata.var[{gene_key!r}]"
        fix = "choose a column of adata.var with unique ids"
    else:
        columns = list(adata.var.columns)
        raise DataError(
            f"gene_key={gene_key!r} is not a column of adata.var{did_you_mean(gene_key, columns) or ';'} "
            f"(adata.var has: {listing(columns)})"
        )
    missing = np.asarray(names.isna())
    if missing.any():
        raise DataError(f"{where} has {int(missing.sum())} missing gene names; fill them or drop those genes.")
    array = np.asarray(names, dtype=object).astype(str)
    unique, counts = np.unique(array, return_counts=True)
    repeated = unique[counts > 1]
    if len(repeated):
        raise DataError(f"{where} has {len(repeated)} names more than once (first: {str(repeated[0])!r}); {fix}.")
    return array


@dataclass(frozen=True)
class GeneMap:
    """Which column of a data set is which gene of a vocabulary.

    Attributes
    ----------
    columns
        For each column of the data its gene index in the vocabulary (token id minus 4), -1 where it has none. Int32,
        shape (n_vars,).
    n_genes
        Number of genes of the vocabulary.
    """

    columns: np.ndarray
    n_genes: int

    @classmethod
    def of(cls, names: Iterable[str], vocab: GeneVocab) -> GeneMap:
        """Look up the name of each column."""
        return cls(vocab.gene_indices(names), vocab.n_genes)

    @property
    def n_matched(self) -> int:
        """Number of vocabulary genes that the data have."""
        return len(np.unique(self.columns[self.columns >= 0]))

    @property
    def measured(self) -> np.ndarray:
        """True for the vocabulary genes that the data have, bool, shape (n_genes,)."""
        return np.isin(np.arange(self.n_genes), self.columns)

    @property
    def overlap(self) -> float:
        """Share of the vocabulary's genes that the data have."""
        return self.n_matched / self.n_genes

    def apply(self, counts: sparse.csr_matrix) -> sparse.csr_matrix:
        """Return `counts` with vocabulary columns: sorted, duplicates summed, genes outside left out.

        Parameters
        ----------
        counts
            Shape (n_cells, n_vars).

        Returns
        -------
        Matrix of shape (n_cells, n_genes) and the dtype of `counts`; small integers that are summed become int64.
        """
        columns = self.columns[counts.indices]
        keep = columns >= 0
        kept_before = np.concatenate([[0], np.cumsum(keep)])
        mapped = sparse.csr_matrix(
            (counts.data[keep], columns[keep], kept_before[counts.indptr]), shape=(counts.shape[0], self.n_genes)
        )
        if mapped.dtype.kind in "iu" and self.n_matched < np.count_nonzero(self.columns >= 0):
            mapped = mapped.astype(np.int64)  # a sum may not fit into e.g. uint8
        # Also sums the columns that mean the same gene.
        mapped.sum_duplicates()
        mapped.eliminate_zeros()
        return mapped


def map_genes(
    names: np.ndarray,
    vocab: GeneVocab,
    *,
    min_overlap: float = MIN_OVERLAP,
    whole: bool = False,
    var: pd.DataFrame | None = None,
    gene_key: str | None = None,
) -> GeneMap:
    """Map gene names onto a vocabulary.

    Parameters
    ----------
    names
        Gene names of the data, shape (n_vars,).
    vocab
        The vocabulary.
    min_overlap
        Smallest share of the vocabulary's genes (or, with `whole`, of the smaller of the two sets) to accept.
    whole
        The vocabulary is a whole annotation, e.g. all protein-coding genes, of which no data set measures all.
    var, gene_key
        ``adata.var`` and the column in use: when the overlap is too small, the message names a column that fits.

    Raises
    ------
    GeneMismatchError
        If too few genes of the vocabulary are among `names`.
    """
    gene_map = GeneMap.of(names, vocab)
    possible = min(vocab.n_genes, len(names)) if whole else vocab.n_genes
    share = gene_map.n_matched / possible
    where = "adata.var_names" if gene_key is None else f"adata.var[{gene_key!r}]"
    if share < min_overlap or gene_map.n_matched == 0:
        hint = _better_column(var, vocab, gene_key, gene_map.n_matched)
        raise GeneMismatchError(
            f"{where} has only {gene_map.n_matched} of the {vocab.n_genes} genes of the vocabulary: it holds "
            f"{id_kind(names)} such as {listing(names[:2])}, the vocabulary {vocab.kind} such as "
            f"{listing(vocab.genes[:2])}; {hint}."
        )
    if share < WARN_OVERLAP:
        warnings.warn(
            f"{where} has {gene_map.n_matched} of the {vocab.n_genes} genes of the vocabulary ({share:.0%}); "
            "the others count as not expressed.",
            ScforgeWarning,
            stacklevel=3,
        )
    return gene_map


def _better_column(var: pd.DataFrame | None, vocab: GeneVocab, gene_key: str | None, n_matched: int) -> str:
    """Name the column of ``adata.var`` that fits the vocabulary best, or say what is needed."""
    candidates: dict[str | None, np.ndarray] = {}
    if var is not None:
        candidates[None] = np.asarray(var.index.astype(str))
    if var is not None:
        text = [c for c in var.columns if var[c].dtype.kind not in "biufcmM"]
        candidates |= {c: np.asarray(var[c], dtype=object).astype(str) for c in text}
    candidates.pop(gene_key, None)
    matches = {key: int((np.unique(vocab.gene_indices(names)) >= 0).sum()) for key, names in candidates.items()}
    best = max(matches, key=lambda key: matches[key], default=None)
    if best is None and None not in matches or matches.get(best, 0) <= n_matched:
        return "map the gene ids of the data to those of the vocabulary first"
    name = "adata.var_names" if best is None else f"adata.var[{best!r}]"
    # A saved model keeps its gene_key, so the names of new data must come to where it looks for them.
    target = "adata.var_names" if gene_key is None else f"adata.var[{gene_key!r}]"
    return (
        f"{name} has {matches[best]} of them: pass gene_key={best!r} to setup_anndata, "
        f"or for a trained model set {target} = {name}"
    )
