"""Gene networks of models beside baselines, and their curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scforge._checks import check_count
from scforge.data.checks import check_is_adata
from scforge.data.mapping import gene_names
from scforge.errors import OptionError, listing
from scforge.eval.gene_network import GeneNetwork, RankedPairs, Universe
from scforge.eval.harness import compare
from scforge.eval.simple_networks import NETWORK_BASELINES, network_baselines

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.eval.report import Kind, Report

__all__ = ["evaluate_network", "network_curves"]


def evaluate_network(
    scores: Mapping[str, pd.DataFrame],
    truth: pd.DataFrame,
    adata: AnnData,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    genes: Sequence[str] | None = None,
    tfs: Sequence[str] | None = None,
    targets: str = "truth",
    kinds: Mapping[str, Kind] | None = None,
    baselines: Sequence[str] = NETWORK_BASELINES,
    n_random: int = 3,
    max_cells: int = 10_000,
    seed: int = 0,
    intervals: bool = True,
    title: str = "Gene networks compared",
) -> Report:
    """Score networks of genes against known edges, beside baselines on the same pairs.

    Parameters
    ----------
    scores
        Name of a method to its edges, with the columns ``source``, ``target`` and ``weight``: from
        :func:`scforge.eval.edges_from_embeddings` and its like.
    truth
        True edges, with the columns ``source`` and ``target``: from :func:`scforge.eval.read_network`.
    adata
        Annotated data with raw counts: says which genes were measured, and is what baselines correlate.
    layer
        Key in ``adata.layers`` with raw counts; None reads ``adata.X``.
    gene_key
        Column of ``adata.var`` with names as in the truth; None takes ``adata.var_names``.
    genes
        Genes to restrict the pairs to, among those that were measured: e.g. those that a model knows, if the question
        is what it knows of them. Pairs without a score count as its last ones otherwise. None takes all.
    tfs
        Transcription factors to restrict the pairs to; None takes all of the truth that are among the genes.
    targets
        ``"truth"``: genes with an edge in the truth. ``"measured"``: all genes.
    kinds
        Name of a method to ``"model"``, ``"baseline"``, ``"untrained"`` or ``"ceiling"``; those that are not named are
        models.
    baselines
        Names of :func:`scforge.eval.network_baselines`; at least one unless `scores` has one.
    n_random
        Random scores to draw.
    max_cells
        Cells to correlate at most.
    seed
        Seed of what baselines draw.
    intervals
        Add 95 % intervals from a bootstrap of transcription factors, and tests against the best baseline.
    title
        Heading of the report.

    Returns
    -------
    The report: metrics of :class:`scforge.eval.GeneNetwork`; its facts say what the pairs are, its notes which methods
    left pairs without a score.

    Raises
    ------
    OptionError
        If there are no scores, a kind names no method, or there is no baseline.
    DataError
        If scores or true edges cannot be used, or there are no raw counts.

    Examples
    --------
    >>> import anndata, numpy as np, pandas as pd
    >>> counts = np.random.default_rng(0).poisson(3.0, size=(50, 6)).astype("float32")
    >>> adata = anndata.AnnData(counts, var=pd.DataFrame(index=list("ABCDEF")))
    >>> truth = pd.DataFrame({"source": ["A", "A", "B"], "target": ["C", "D", "E"]})
    >>> mine = {"mine": truth.assign(weight=1.0)}
    >>> report = evaluate_network(mine, truth, adata, baselines=["pearson"], intervals=False)
    >>> report.to_table()["auprc"].idxmax()
    'mine'
    """
    if not isinstance(scores, Mapping) or not scores:
        raise OptionError("scores names no method; give a mapping of names to tables of edges.")
    check_is_adata(adata)
    if unknown := [name for name in kinds or {} if name not in scores]:
        raise OptionError(f"kinds names {listing(unknown)}, not among the scores ({listing(scores)}).")
    benchmark = GeneNetwork(genes=_among(genes, gene_names(adata, gene_key).tolist()), tfs=tfs, targets=targets)
    universe = benchmark.universe(truth)
    made = dict(scores)
    of_kind: dict[str, Kind] = {**dict.fromkeys(scores, "model"), **(kinds or {})}
    simple = network_baselines(
        adata,
        truth,
        baselines,
        benchmark=benchmark,
        layer=layer,
        gene_key=gene_key,
        n_random=n_random,
        max_cells=max_cells,
        seed=seed,
    )
    if taken := [name for name in simple if name in made]:
        raise OptionError(f"scores calls a method {taken[0]!r}, which is the name of a baseline; call it otherwise.")
    made |= simple
    of_kind |= dict.fromkeys(simple, "baseline")
    report = compare(benchmark, made, truth, kinds=of_kind, intervals=intervals, title=title)
    report.facts |= universe.describe()
    report.notes += _notes(scores, universe, simple)
    return report


def network_curves(
    scores: Mapping[str, pd.DataFrame],
    truth: pd.DataFrame,
    *,
    benchmark: GeneNetwork | None = None,
    n_points: int = 500,
) -> pd.DataFrame:
    """Return precision over recall of networks, for a plot.

    Parameters
    ----------
    scores
        Name of a method to its edges, as in :func:`evaluate_network`.
    truth
        True edges.
    benchmark
        Says which pairs there are; None takes all pairs of the truth.
    n_points
        Points of a curve at most, evenly spaced along the ranks of true edges.

    Returns
    -------
    ``method``, ``recall``, ``precision`` and ``auprc``, by rising recall. ``auprc`` is the average precision of the
    whole network, as :class:`GeneNetwork` has it, the same on all its rows. Points stand where the weight changes, so
    that pairs that tie are one step. The last point, at recall 1, is where all pairs are taken: its precision is that
    of random scores.

    Examples
    --------
    >>> truth = pd.DataFrame({"source": ["A", "B"], "target": ["x", "y"]})
    >>> scores = pd.DataFrame({"source": ["A"], "target": ["x"], "weight": [1.0]})
    >>> network_curves({"mine": scores}, truth).values.tolist()
    [['mine', 0.5, 1.0, 0.75], ['mine', 1.0, 0.5, 0.75]]
    """
    check_count("n_points", n_points, "points", least=2)
    universe = (GeneNetwork() if benchmark is None else benchmark).universe(truth)
    curves = []
    for method, made in scores.items():
        ranked = RankedPairs.of(made, universe)
        last = np.flatnonzero(np.append(np.diff(ranked.ties) > 0, True))
        hits = np.cumsum(ranked.true)[last]
        # Only where another true edge was found: between these precision just falls.
        found = np.flatnonzero(np.diff(hits, prepend=0) > 0)
        found = found if found[-1] == len(last) - 1 else np.append(found, len(last) - 1)
        if len(found) > n_points:
            found = found[np.unique(np.linspace(0, len(found) - 1, n_points).round().astype(np.int64))]
        curves.append(
            pd.DataFrame(
                {
                    "method": method,
                    "recall": hits[found] / hits[-1],
                    "precision": hits[found] / (last[found] + 1.0),
                    "auprc": ranked.figures(np.ones(len(universe.tfs)), ranked.within())["auprc"],
                }
            )
        )
    return pd.concat(curves, ignore_index=True)


def _among(genes: Sequence[str] | None, measured: Sequence[str]) -> list[str]:
    """Return the genes that are asked for and were measured."""
    if genes is None:
        return sorted(set(measured))
    found = [] if isinstance(genes, str) else sorted(set(genes) & set(measured))
    if not found:
        raise OptionError(
            f"genes={listing([genes] if isinstance(genes, str) else genes, most=3)} names none of the measured genes "
            f"({listing(measured, most=3)}); give a list of names like these."
        )
    return found


def _notes(scores: Mapping[str, pd.DataFrame], universe: Universe, simple: Mapping[str, pd.DataFrame]) -> list[str]:
    """Say what a reader would not guess."""
    n_pairs = int(universe.pairs.sum())
    notes = []
    for name, made in scores.items():
        n_scored = int((np.isfinite(universe.matrix(made)) & universe.pairs).sum())
        if n_scored < n_pairs:
            notes.append(
                f"{name} has a score for {n_scored:,} of {n_pairs:,} pairs; the others tie behind all that have one."
            )
    if {"degree", "in-degree"} & set(simple):
        notes.append(
            "Baselines of degree know how many true edges a gene has apart from the pair in question, and no cell."
        )
    notes.append("An edge that is not in the truth counts as wrong, although it may only be unknown.")
    return notes
