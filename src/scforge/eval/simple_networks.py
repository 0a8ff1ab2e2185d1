"""Scores of pairs of genes that need no deep model.

Shapes: N cells, G genes, T transcription factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_bool, check_count, check_seed
from scforge._constants import TARGET_SUM
from scforge.data.checks import check_adata, counts_of
from scforge.data.mapping import gene_names
from scforge.errors import OptionError, did_you_mean, listing
from scforge.eval.gene_network import GeneNetwork, Universe
from scforge.eval.network_scores import edges_of, names_among

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = [
    "NETWORK_BASELINES",
    "coexpression_edges",
    "degree_edges",
    "mean_expression_edges",
    "network_baselines",
    "random_edges",
]

NETWORK_BASELINES = ("pearson", "spearman", "mean_expression", "degree", "in_degree", "random")


def network_baselines(
    adata: AnnData,
    truth: pd.DataFrame,
    names: Sequence[str] = NETWORK_BASELINES,
    *,
    benchmark: GeneNetwork | None = None,
    layer: str | None = None,
    gene_key: str | None = None,
    n_random: int = 3,
    max_cells: int = 10_000,
    seed: int = 0,
) -> dict[str, pd.DataFrame]:
    """Score all pairs of a benchmark in the ways that a model has to beat.

    Parameters
    ----------
    adata
        Annotated data with raw counts.
    truth
        True edges, with the columns ``source`` and ``target``.
    names
        Which:

        ``"pearson"``, ``"spearman"``
            Absolute correlation of log1p CP10K over the cells.
        ``"mean_expression"``
            Product of the means of log1p CP10K of both genes.
        ``"degree"``
            How many edges either gene has in the truth apart from the one in question (cross-fitted). It sees true
            edges, which a model does not, and no cell: it says how far popularity alone gets.
        ``"in_degree"``
            The same of the target alone, which is the fair one to compare the order within a transcription factor with.
        ``"random"``
            Chance.
    benchmark
        Says which pairs there are; None takes all pairs of the truth with measured genes.
    layer
        Key in ``adata.layers`` with raw counts; None reads ``adata.X``.
    gene_key
        Column of ``adata.var`` with names as in the truth; None takes ``adata.var_names``.
    n_random
        Random scores to draw, each a method of its own.
    max_cells
        Cells to correlate at most, drawn at random.
    seed
        Seed of what is drawn.

    Returns
    -------
    Name of a baseline to its edges.

    Raises
    ------
    OptionError
        If a name is unknown.
    DataError
        If there are no raw counts, or no true edge is between measured genes.

    Examples
    --------
    >>> import anndata, numpy as np, pandas as pd
    >>> counts = np.random.default_rng(0).poisson(3.0, size=(50, 6)).astype("float32")
    >>> adata = anndata.AnnData(counts, var=pd.DataFrame(index=list("ABCDEF")))
    >>> truth = pd.DataFrame({"source": ["A", "A", "B"], "target": ["C", "D", "E"]})
    >>> made = network_baselines(adata, truth, ["pearson", "degree"])
    >>> list(made), list(made["degree"])
    (['co-expression (pearson)', 'degree'], ['source', 'target', 'weight'])
    """
    for name in names:
        if name not in NETWORK_BASELINES:
            raise OptionError(
                f"names has {name!r}, which is no baseline of networks{did_you_mean(name, NETWORK_BASELINES)} "
                f"(known: {listing(NETWORK_BASELINES)})"
            )
    check_count("n_random", n_random, "random scores")
    check_adata(adata)
    of_cells: dict[str, Any] = {"layer": layer, "gene_key": gene_key, "max_cells": max_cells, "seed": seed}
    measured = sorted(set(gene_names(adata, gene_key)))
    universe = (GeneNetwork(genes=measured) if benchmark is None else benchmark).universe(truth)
    found: dict[str, pd.DataFrame] = {}
    for name in names:
        if name in ("pearson", "spearman"):
            found[f"co-expression ({name})"] = coexpression_edges(
                adata, universe.tfs, universe.genes, method=name, **of_cells
            )
        elif name == "mean_expression":
            found["mean expression"] = mean_expression_edges(adata, universe.tfs, universe.genes, **of_cells)
        elif name in ("degree", "in_degree"):
            found[name.replace("_", "-")] = degree_edges(universe, out=name == "degree", seed=seed)
        else:
            for number in range(n_random):
                title = "random" if n_random == 1 else f"random {number + 1}"
                found[title] = random_edges(universe.tfs, universe.genes, seed=seed + number)
    return found


def coexpression_edges(
    adata: AnnData,
    tfs: Sequence[str],
    targets: Sequence[str],
    *,
    method: str = "pearson",
    absolute: bool = True,
    layer: str | None = None,
    gene_key: str | None = None,
    max_cells: int = 10_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Score pairs of genes by the correlation of their log1p CP10K over cells.

    Parameters
    ----------
    adata
        Annotated data with raw counts. Genes of the same name are added up.
    tfs, targets
        Sources and targets; those that were not measured are left out.
    method
        ``"pearson"`` or ``"spearman"`` (ties have their mean rank).
    absolute
        Score by the size alone, since transcription factors also repress.
    layer, gene_key, max_cells, seed
        As in :func:`network_baselines`.

    Returns
    -------
    ``source``, ``target`` and ``weight`` (float32). A gene without variance correlates 0 with all.
    """
    if method not in ("pearson", "spearman"):
        raise OptionError(f"method={method!r} is neither 'pearson' nor 'spearman'.")
    expression, names = _expression(adata, layer, gene_key, max_cells, seed)
    sources, genes = names_among("tfs", tfs, names), names_among("targets", targets, names)
    used = names.isin(sources) | names.isin(genes)
    expression, names = expression[:, used], names[used]
    if method == "spearman":
        expression = _ranks(expression)
    n_cells = expression.shape[0]
    mean = np.asarray(expression.mean(axis=0)).ravel()
    square = np.asarray(expression.multiply(expression).mean(axis=0)).ravel()
    scale = np.sqrt(np.maximum(square - mean**2, 0.0))
    # A constant gene has a variance of rounding errors.
    scale[scale <= 1e-7 * np.sqrt(square)] = np.inf
    rows, columns = names.get_indexer(sources), names.get_indexer(genes)
    products = (expression[:, rows].T @ expression[:, columns]).toarray() / n_cells
    weights = (products - np.outer(mean[rows], mean[columns])) / np.outer(scale[rows], scale[columns])
    return edges_of(np.abs(weights) if absolute else weights, sources, genes)


def mean_expression_edges(
    adata: AnnData,
    tfs: Sequence[str],
    targets: Sequence[str],
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    max_cells: int = 10_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Score pairs of genes by the product of their mean log1p CP10K: what is highly expressed is well known.

    Parameters
    ----------
    adata, tfs, targets, layer, gene_key, max_cells, seed
        As in :func:`coexpression_edges`.

    Returns
    -------
    ``source``, ``target`` and ``weight`` (float32).
    """
    expression, names = _expression(adata, layer, gene_key, max_cells, seed)
    mean = np.asarray(expression.mean(axis=0)).ravel()
    sources, genes = names_among("tfs", tfs, names), names_among("targets", targets, names)
    return edges_of(np.outer(mean[names.get_indexer(sources)], mean[names.get_indexer(genes)]), sources, genes)


def degree_edges(universe: Universe, *, out: bool = True, n_folds: int = 5, seed: int = 0) -> pd.DataFrame:
    """Score pairs of genes by the share of true edges of either, apart from what is asked for.

    The weight of an edge is the out-degree of its source times the in-degree of its target, both as shares. They are
    cross-fitted: transcription factors and genes are dealt into folds, and for a pair of fold a and fold b the
    out-degree is counted over the genes outside b, the in-degree over the transcription factors outside a. To take one
    edge off each count would not do: among the pairs of a gene, true ones would then have the lower counts, by which
    they could be told. Folds keep some of that. Among the pairs of one transcription factor, the out-degree brings
    random edges somewhat below chance (AUROC 0.47 where 60 have 20 of 200 genes each). And where most genes of the
    truth have one edge, to know that they have no other tells the true one, the wrong way round: figures below chance
    say that the truth is too small for degrees. Shares are shrunk towards that of all pairs by one pseudo-observation.

    Parameters
    ----------
    universe
        The pairs and the true edges, of :meth:`scforge.eval.GeneNetwork.universe`.
    out
        Whether the out-degree counts as well.
    n_folds
        Number of folds of either.
    seed
        Seed of the folds.

    Returns
    -------
    ``source``, ``target`` and ``weight`` (float32).
    """
    check_count("n_folds", n_folds, "folds", least=2)
    rng = np.random.default_rng(check_seed(seed))
    edges, pairs = universe.edges, universe.pairs
    of_tf, of_gene = (rng.permutation(size) % n_folds for size in edges.shape)
    share = edges.sum() / pairs.sum()
    weights = np.empty(edges.shape)
    for fold in range(n_folds):
        rest = of_tf != fold
        weights[~rest] = (edges[rest].sum(axis=0) + share) / (pairs[rest].sum(axis=0) + 1.0)
    for fold in range(n_folds) if check_bool("out", out) else ():
        rest = of_gene != fold
        weights[:, ~rest] *= ((edges[:, rest].sum(axis=1) + share) / (pairs[:, rest].sum(axis=1) + 1.0))[:, None]
    return edges_of(weights, universe.tfs, universe.genes)


def random_edges(tfs: Sequence[str], targets: Sequence[str], *, seed: int = 0) -> pd.DataFrame:
    """Score pairs of genes by random numbers between 0 and 1.

    Parameters
    ----------
    tfs, targets
        Sources and targets.
    seed
        Seed.

    Returns
    -------
    ``source``, ``target`` and ``weight`` (float32).
    """
    sources, genes = pd.Index(tfs), pd.Index(targets)
    return edges_of(np.random.default_rng(check_seed(seed)).random((len(sources), len(genes))), sources, genes)


def _expression(
    adata: AnnData, layer: str | None, gene_key: str | None, max_cells: int, seed: int
) -> tuple[sparse.csc_matrix, pd.Index]:
    """Return log1p CP10K of some cells, shape (N, G), float64, and the names of the genes, each once."""
    check_adata(adata)
    check_count("max_cells", max_cells, "cells", least=3)
    counts = counts_of(adata, layer).astype(np.float64)
    if counts.shape[0] > max_cells:
        rows = np.random.default_rng(check_seed(seed)).choice(counts.shape[0], max_cells, replace=False)
        counts = counts[np.sort(rows)]
    totals = np.asarray(counts.sum(axis=1)).ravel()
    codes, names = pd.factorize(gene_names(adata, gene_key))
    if len(names) < len(codes):
        same = sparse.csr_matrix((np.ones(len(codes)), (np.arange(len(codes)), codes)), (len(codes), len(names)))
        counts = counts @ same
    scaled = sparse.diags_array(TARGET_SUM / totals) @ counts
    return sparse.csc_matrix(scaled).log1p(), pd.Index(names)


def _ranks(expression: sparse.csc_matrix) -> sparse.csc_matrix:
    """Return the ranks of cells for each gene, less that of cells without it, which leaves them sparse."""
    from scipy.stats import rankdata

    ranks = expression.copy()
    ranks.eliminate_zeros()
    n_cells = ranks.shape[0]
    for start, stop in zip(ranks.indptr[:-1], ranks.indptr[1:], strict=True):
        n_zeros = n_cells - (stop - start)
        # The mean rank of zeros is (n_zeros + 1) / 2, and the first of the others comes after them.
        ranks.data[start:stop] = rankdata(ranks.data[start:stop]) + n_zeros - (n_zeros + 1) / 2
    return ranks
