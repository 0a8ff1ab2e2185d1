"""A screen: how far the embedding of cells moves when the expression of genes is changed.

Shapes: N cells, C combinations of genes, K genes of a combination, D dimensions, G genes of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from scforge.data.cells import Cells, CellSource
from scforge.errors import DataError
from scforge.insilico.controls import adjust, compare, draw_controls, nearest
from scforge.insilico.perturbation import Perturbation, PerturbedCells

__all__ = ["centroid", "expression_levels", "mean_moves", "screen", "units", "with_rates"]

_COPIES = 16_384
"""Perturbed cells whose embeddings are held at a time."""

_CONTROL_CELLS = 100
"""Most cells that a control is perturbed in. A mean over fewer cells scatters more, which makes p-values larger."""

_FEWEST_CELLS = 3
"""Cells that a gene has to be perturbed in to be compared."""


@dataclass(frozen=True)
class _Moves:
    """Mean and standard deviation over cells of what combinations do, each of shape (C,); NaN without cells."""

    n_cells: np.ndarray
    shift: np.ndarray
    shift_sd: np.ndarray
    goal: np.ndarray
    goal_sd: np.ndarray


def screen(
    cells: CellSource,
    embed_cells: Callable[[Cells], np.ndarray],
    perturbation: Perturbation,
    combinations: np.ndarray,
    *,
    goal: np.ndarray | None = None,
    n_controls: int = 100,
    seed: int = 0,
) -> pd.DataFrame:
    """Perturb genes in cells, and say how far the cells move, beside genes of like expression.

    A gene is the unit of the comparison: it is perturbed in many cells, but these move alike, and every perturbation
    moves them somewhat. So the question is whether they move further than with other genes, and the p-value is the
    share of control genes (of like mean expression, perturbed in the same way, each in up to 100 of the cells that the
    perturbation applies to) that do at least as much. A like mean is not a like dose: see how far the gene stands out
    in a model with random weights as well. Cells are no replicates of it. Where fewer genes are left than are tested,
    the tested ones serve as controls of each other as well.

    Parameters
    ----------
    cells
        Cells to perturb.
    embed_cells
        Returns the embedding of cells, shape (N, D).
    perturbation
        What happens to the genes.
    combinations
        Genes that are perturbed together, each once, index among the genes of the vocabulary, shape (C, K).
    goal
        Centroid of the cells that others might move to, see :func:`centroid`, shape (D,).
    n_controls
        Controls for each combination; 0 for no p-values.
    seed
        Seed of the choice of controls and of their cells.

    Returns
    -------
    One row a combination, in their order: ``n_cells``, ``shift``, ``shift_sd``, ``shift_z``, ``p_value``; with a goal
    ``goal_shift``, ``goal_shift_sd``, ``goal_z``, ``goal_p_value``. NaN where nothing was perturbed; z-scores and
    p-values also where that was in fewer than 3 cells. False discovery rates are up to whoever knows all tests, see
    :func:`with_rates`.

    Raises
    ------
    DataError
        If there are no cells.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:60, :300].copy())
    >>> tokenizer = scforge.tokenizers.get_tokenizer("continuous_projection", cells.vocab)
    >>> sizes = {"hidden_dim": 8, "pooling": "weighted_sum", "latent_dim": 4}
    >>> module = scforge.models.GenePoolingModel(len(cells.vocab), **sizes)
    >>> embed = lambda part: scforge.training.embed(module, part, tokenizer)
    >>> delete, genes = scforge.insilico.Perturbation("delete"), np.array([[0], [1], [2]])
    >>> table = screen(cells, embed, delete, genes, n_controls=5)
    >>> table.columns.tolist()
    ['n_cells', 'shift', 'shift_sd', 'shift_z', 'p_value']
    """
    if not len(cells):
        raise DataError("there are no cells to perturb; choose others.")
    combinations = np.asarray(combinations, dtype=np.int32).reshape(len(combinations), -1)
    rng = np.random.default_rng(seed)
    if perturbation.mode != "delete" and cells.measured is not None:
        # A gene that gets counts was measured, in the copies as in what they are compared with.
        measured = cells.measured.copy()
        measured[combinations.ravel()] = True
        cells = replace(cells, measured=measured)
    before = units(embed_cells(cells))
    tested = _measure(cells, embed_cells, before, perturbation, combinations, goal)
    table = pd.DataFrame({"n_cells": tested.n_cells})
    levels = expression_levels(cells)
    groups, moves = combinations[:0], []
    if n_controls:
        eligible = _eligible(cells, perturbation, combinations)
        groups = draw_controls(combinations, levels, eligible, n_controls, rng)
        moves = [_measure(cells, embed_cells, before, perturbation, groups, goal, most=_CONTROL_CELLS, rng=rng)]
        if len(eligible) < len(np.unique(combinations)):
            # Where most genes are tested, few like them are left.
            groups, moves = np.concatenate([groups, combinations]), [*moves, tested]
    n_drawn = len(groups) - (len(combinations) if len(moves) > 1 else 0)
    level_of = [levels[some].sum(axis=1) for some in (combinations, groups)]
    named = [("shift", "", False), ("goal", "goal_", True)]
    for name, prefix, two_sided in named[: 1 if goal is None else 2]:
        pooled = np.concatenate([getattr(part, name) for part in moves]) if moves else np.empty(0)
        usable = np.concatenate([part.n_cells for part in moves]) >= _FEWEST_CELLS if moves else pooled > 0
        results = []
        for number, value in enumerate(getattr(tested, name)):
            others = usable & (np.arange(len(pooled)) != n_drawn + number)
            like = nearest(level_of[0][number], level_of[1], others, n_controls)
            known = value if tested.n_cells[number] >= _FEWEST_CELLS else np.nan
            results.append(compare(known, pooled[like], two_sided=two_sided))
        table[f"{prefix}shift"], table[f"{prefix}shift_sd"] = getattr(tested, name), getattr(tested, f"{name}_sd")
        table[f"{prefix or 'shift_'}z"], table[f"{prefix}p_value"] = np.array(results).reshape(-1, 2).T
    return table


def mean_moves(
    cells: CellSource,
    embed_cells: Callable[[Cells], np.ndarray],
    perturbation: Perturbation,
    combinations: np.ndarray,
) -> np.ndarray:
    """Return the mean move of the direction of cells that each combination makes, float64, shape (C, D).

    Genes whose perturbations do alike have moves of a high cosine. Subtract the mean over genes before comparing them:
    what is common to all perturbations says nothing of a gene.

    Parameters
    ----------
    cells, embed_cells, perturbation, combinations
        As for :func:`screen`.

    Returns
    -------
    Mean over cells of the embedding after less that before, both of length 1; NaN where nothing was perturbed.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:60, :300].copy())
    >>> tokenizer = scforge.tokenizers.get_tokenizer("continuous_projection", cells.vocab)
    >>> sizes = {"hidden_dim": 8, "pooling": "weighted_sum", "latent_dim": 4}
    >>> module = scforge.models.GenePoolingModel(len(cells.vocab), **sizes)
    >>> embed = lambda part: scforge.training.embed(module, part, tokenizer)
    >>> delete, genes = scforge.insilico.Perturbation("delete"), np.array([[0], [1], [2]])
    >>> mean_moves(cells, embed, delete, genes).shape
    (3, 4)
    """
    combinations = np.asarray(combinations, dtype=np.int32).reshape(len(combinations), -1)
    before = units(embed_cells(cells))
    sums, n_cells = np.zeros((len(combinations), before.shape[1])), np.zeros(len(combinations))
    for which, rows in _pairs(cells, perturbation, combinations, None, None):
        after = units(embed_cells(PerturbedCells(cells, perturbation, rows, combinations[which])))
        np.add.at(sums, which, after - before[rows])
        n_cells += np.bincount(which, minlength=len(combinations))
    return sums / np.where(n_cells > 0, n_cells, np.nan)[:, None]


def with_rates(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of tests with ``fdr`` (and ``goal_fdr``), over all of its rows (Benjamini and Hochberg 1995)."""
    table = table.copy()
    for name in ("p_value", "goal_p_value"):
        if name in table:
            place = int(table.columns.get_loc(name)) + 1
            table.insert(place, name.replace("p_value", "fdr"), adjust(table[name].to_numpy()))
    return table


def units(embedding: np.ndarray) -> np.ndarray:
    """Return the rows scaled to length 1, float64; rows of zeros stay."""
    embedding = embedding.astype(np.float64)
    lengths = np.linalg.norm(embedding, axis=1, keepdims=True)
    return embedding / np.where(lengths > 0, lengths, 1.0)


def centroid(embedding: np.ndarray) -> np.ndarray:
    """Return the mean direction of cells, length 1, shape (D,): each cell counts the same, however long its vector."""
    return units(units(embedding).mean(axis=0, keepdims=True))[0]


def expression_levels(cells: CellSource) -> np.ndarray:
    """Return the mean share of the counts of a cell that each gene has, float64, shape (G,)."""
    scale = 1.0 / np.maximum(cells.totals, 1.0)
    return np.asarray(cells.counts.T @ scale).ravel() / max(len(cells), 1)


def _eligible(cells: CellSource, perturbation: Perturbation, combinations: np.ndarray) -> np.ndarray:
    """Return the genes that may serve as controls: expressed, perturbed in some cells, and not tested."""
    n_expressing = np.bincount(cells.counts.indices, minlength=cells.counts.shape[1])
    n_cells = {"delete": n_expressing, "activate": len(cells) - n_expressing}.get(perturbation.mode, n_expressing)
    fit = (n_expressing > 0) & (n_cells >= min(_FEWEST_CELLS, len(cells)))
    fit[combinations.ravel()] = False
    return np.flatnonzero(fit)


def _measure(
    cells: CellSource,
    embed_cells: Callable[[Cells], np.ndarray],
    before: np.ndarray,
    perturbation: Perturbation,
    combinations: np.ndarray,
    goal: np.ndarray | None,
    *,
    most: int | None = None,
    rng: np.random.Generator | None = None,
) -> _Moves:
    """Perturb each combination in the cells that it applies to, or in `most` of them."""
    n = len(combinations)
    sums = np.zeros((5, n))
    near = None if goal is None else before @ goal
    for which, rows in _pairs(cells, perturbation, combinations, most, rng):
        after = units(embed_cells(PerturbedCells(cells, perturbation, rows, combinations[which])))
        shift = 1.0 - np.einsum("nd,nd->n", after, before[rows])
        closer = np.zeros(len(rows)) if near is None or goal is None else after @ goal - near[rows]
        weights = (np.ones(len(rows)), shift, shift**2, closer, closer**2)
        sums += np.array([np.bincount(which, weights=weight, minlength=n) for weight in weights])
    n_cells = sums[0]
    with np.errstate(invalid="ignore", divide="ignore"):
        shift_mean, goal_mean = sums[1] / n_cells, sums[3] / n_cells
        shift_sd = np.sqrt(np.maximum(0, sums[2] - n_cells * shift_mean**2) / (n_cells - 1))
        goal_sd = np.sqrt(np.maximum(0, sums[4] - n_cells * goal_mean**2) / (n_cells - 1))
    shift_sd[n_cells < 2] = goal_sd[n_cells < 2] = np.nan
    return _Moves(n_cells.astype(np.int64), shift_mean, shift_sd, goal_mean, goal_sd)


def _pairs(
    cells: CellSource,
    perturbation: Perturbation,
    combinations: np.ndarray,
    most: int | None,
    rng: np.random.Generator | None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield which combination is perturbed in which cell, a bounded number of pairs at a time."""
    by_gene = cells.counts.tocsc()
    waiting: list[tuple[np.ndarray, np.ndarray]] = []
    n_waiting = 0
    for number, genes in enumerate(combinations):
        expressed = np.zeros((len(cells), len(genes)), dtype=np.bool_)
        for place, gene in enumerate(genes):
            expressed[by_gene.indices[by_gene.indptr[gene] : by_gene.indptr[gene + 1]], place] = True
        rows = np.flatnonzero(perturbation.applies(expressed))
        if most is not None and rng is not None and len(rows) > most:
            rows = np.sort(rng.choice(rows, most, replace=False))
        for start in range(0, len(rows), _COPIES):
            some = rows[start : start + _COPIES]
            if n_waiting + len(some) > _COPIES:
                yield _joined(waiting)
                waiting, n_waiting = [], 0
            waiting.append((np.full(len(some), number), some))
            n_waiting += len(some)
    if waiting:
        yield _joined(waiting)


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
