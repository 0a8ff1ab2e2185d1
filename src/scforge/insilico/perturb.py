"""The table of ``Encoder.perturb_in_silico``: which cells and genes are perturbed, and its controls and rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import combinations as combinations_of
from typing import Any

import numpy as np
import pandas as pd

from scforge._columns import texts_of
from scforge.data.cells import Cells, CellSource
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, OptionError, listing, suggest, warn
from scforge.insilico.screening import Perturbation, centroid, screen, strata_of, with_rates
from scforge.tokenizers.base import Tokenizer

_MAX_GENES = 2000

_MIN_SHARE = 0.01

_USUAL_CELLS = 10_000
"""Maximum number of cells from which usual counts are computed."""

_HIGH_FDR = 0.1

_CONTROLS = 100

_MOST_CONTROLS = 0.5
"""Maximum fraction of model genes used as controls for a gene, because other genes are too dissimilar."""

type State = Mapping[str, Any] | tuple[str, Any]
"""An obs column and the value, or the list of values, that selects cells."""


def perturbation_table(
    cells: Cells,
    embedders: Mapping[str, Callable[[Cells], np.ndarray]],
    tokenizer: Tokenizer,
    genes: np.ndarray | None,
    mode: str,
    *,
    groups: str | None,
    goal: State | None,
    start: State | None,
    combinations: bool | int,
    max_cells: int,
    n_permutations: int | None,
    seed: int,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the table and its settings.

    `embedders` has the model under the name ``""``, and another one by the ending of its columns. `genes` are indices
    in the vocabulary, or None for widely expressed genes.
    """
    vocab = tokenizer.vocab
    is_start, is_goal = cells_in_state(cells, "start", start), cells_in_state(cells, "goal", goal)
    if is_start is None:
        is_start = np.ones(len(cells), dtype=np.bool_) if is_goal is None else ~is_goal
    if not is_start.any() or (is_goal is not None and (is_start & is_goal).any()):
        raise DataError("start selects no cells, or cells that are already in the goal state; choose other cells.")
    toward = dict.fromkeys(embedders)
    if is_goal is not None:
        at_goal = cells.sample(max_cells, rows=np.flatnonzero(is_goal), seed=seed)
        toward = {name: centroid(embed(at_goal)) for name, embed in embedders.items()}
    if genes is None:
        genes = widely_expressed(vocab, cells.sample(max_cells, rows=np.flatnonzero(is_start), seed=seed))
    perturbation = Perturbation.of(mode, cells.sample(_USUAL_CELLS, seed=seed), tokenizer)
    if (shares := perturbation.shares) is not None and (silent := genes[np.isnan(shares[genes])]).size:
        names = listing([vocab.genes[gene] for gene in silent], most=5)
        raise DataError(
            f"requires expressed genes, but no cell expresses {names}; remove these genes.", mode="activate"
        )
    tested = genes[:, None]
    if combinations is not False:
        if combinations is True or combinations != 2 or len(genes) < 2:
            raise OptionError(
                "is invalid; pass combinations=False for single genes, or "
                "combinations=2 and at least two genes for pairs.",
                combinations=combinations,
            )
        tested = np.array(list(combinations_of(genes.tolist(), 2)), dtype=np.int32)
    n_sides = 1 if is_goal is None else 2
    parts = rows_of_groups(cells, groups, is_start)
    if not parts:
        raise DataError(f"none of the cells to perturb has a value in obs[{groups!r}]; choose another column.")
    if n_permutations is None:  # enough for an fdr of 0.1, unless most genes would be controls
        wanted = math.ceil(n_sides * len(tested) * len(parts) / _HIGH_FDR)
        n_permutations = max(_CONTROLS, wanted) if wanted <= _MOST_CONTROLS * vocab.n_genes else _CONTROLS
    tables = []
    for group, rows in parts:
        sampled = cells.sample(max_cells, rows=rows, seed=seed)
        embedding = embedders[""](sampled)
        strata = strata_of(sampled, embedding, seed=seed) if n_permutations else None
        screened = {
            name: screen(
                sampled,
                embed,
                perturbation,
                tested,
                goal=toward[name],
                n_controls=n_permutations,
                strata=strata,
                embedding=None if name else embedding,
                seed=seed,
            )
            for name, embed in embedders.items()
        }
        table = screened.pop("")
        for ending, other in screened.items():
            for z in ("shift_z", "goal_z"):
                if z in table:
                    table.insert(int(table.columns.get_loc(z)) + 1, f"{z}{ending}", other[z])
        decoded = {
            name: vocab.decode(tested[:, column] + vocab.n_special)
            for column, name in enumerate(("gene", "gene_2")[: tested.shape[1]])
        }
        tables.append(pd.DataFrame(decoded if group is None else {**decoded, "group": group}).join(table))
    results = with_rates(pd.concat(tables, ignore_index=True))
    by = "shift" if is_goal is None else "goal_shift"
    results = results.sort_values(by, ascending=False, kind="stable", ignore_index=True)
    settings: dict[str, Any] = {
        "mode": mode,
        "groups": groups,
        "max_cells": max_cells,
        "n_permutations": n_permutations,
        "seed": seed,
        "goal": None if goal is None else str(goal),
        "start": None if start is None else str(start),
    }
    if n_permutations:
        results.attrs["lowest_fdr"] = settings["lowest_fdr"] = lowest_fdr(results, n_sides)
    return results, settings


def cells_in_state(cells: Cells, argument: str, state: State | None) -> np.ndarray | None:
    """Return a mask of the cells in a state, bool, shape (N,), or None without a state."""
    if state is None:
        return None
    pairs = list(state.items()) if isinstance(state, Mapping) else [state]
    if len(pairs) != 1 or not isinstance(pairs[0], tuple) or len(pairs[0]) != 2 or not isinstance(pairs[0][0], str):
        raise OptionError(
            f'is not a valid state; pass e.g. {argument}={{"cell_type": "B"}}.', argument=argument, value=state
        )
    key, value = pairs[0]
    values = list(value) if isinstance(value, (list, tuple, set, np.ndarray)) else [value]
    texts = texts_of(cells.column(key), key=key, argument=argument)
    names = list(texts_of(pd.Series(values, dtype=object), key=key, argument=argument))
    for name, value in zip(names, values, strict=True):
        if name not in texts.categories:
            raise DataError(
                f": no cell has {value!r} in obs[{key!r}]{suggest(value, texts.categories, 'available')}",
                argument=argument,
            )
    return np.asarray(texts.isin(names))


def rows_of_groups(cells: Cells, key: str | None, is_start: np.ndarray) -> list[tuple[str | None, np.ndarray]]:
    """Return the name of each group and the rows of its cells to perturb, or one group named None without a key."""
    if key is None:
        return [(None, np.flatnonzero(is_start))]
    texts = texts_of(cells.column(key), key=key, argument="groups")
    rows = [np.flatnonzero((texts.codes == code) & is_start) for code in range(len(texts.categories))]
    return [(str(name), members) for name, members in zip(texts.categories, rows, strict=True) if len(members)]


def widely_expressed(vocab: GeneVocab, cells: CellSource) -> np.ndarray:
    """Return the genes expressed by at least 1% of the cells, at most the 2,000 most widely expressed, int32."""
    n_cells = np.bincount(cells.counts.indices, minlength=vocab.n_genes)
    least = max(3, int(np.ceil(_MIN_SHARE * len(cells))))
    expressed = np.flatnonzero(n_cells >= least)
    if not len(expressed):
        raise DataError(f"no model gene is expressed in at least {least} of {len(cells)} cells; pass a list of genes.")
    chosen = np.sort(expressed[np.argsort(-n_cells[expressed], kind="stable")[:_MAX_GENES]])
    if len(chosen) < len(expressed):
        warn(
            f"genes=None selects the {len(chosen)} most widely expressed of {len(expressed)} expressed genes; pass a "
            "list to select other genes."
        )
    return chosen.astype(np.int32)


def lowest_fdr(results: pd.DataFrame, n_sides: int) -> float:
    """Return the false discovery rate if only one test has the lowest possible p-value, and warn if it is high."""
    n_controls = results.loc[results["p_value"].notna(), "n_controls"]
    lowest = min(1.0, n_sides * len(n_controls) / (n_controls.max() + 1)) if len(n_controls) else float("nan")
    if lowest > _HIGH_FDR:
        enough = math.ceil(n_sides * len(n_controls) / _HIGH_FDR)
        warn(
            f"The fdr of a single significant gene is at least {lowest:.2g}, above {_HIGH_FDR:g}; test fewer genes, "
            f"or pass n_permutations={enough} if the model has that many other genes."
        )
    return lowest
