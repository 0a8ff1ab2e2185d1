"""What a front class says of genes whose counts are changed.

Shapes: N cells, G genes of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from scforge._checks import check_bool, check_count, check_seed
from scforge.errors import DataError, OptionError, listing, warn
from scforge.estimators.choices import (
    Source,
    cell_groups,
    cells_in_state,
    gene_combinations,
    gene_numbers,
    note,
    ready,
    widely_expressed,
)
from scforge.insilico.screening import Perturbation, centroid, screen, with_rates
from scforge.training.predict import embed

if TYPE_CHECKING:
    from scforge.data.cells import Cells
    from scforge.estimators.base import CellModel

__all__ = ["PerturbationMethods"]

_USUAL_CELLS = 10_000
"""Cells that usual counts are taken from."""

_HIGH_FDR = 0.1


class PerturbationMethods:
    """What a front class adds to :class:`~scforge.estimators.base.CellModel` for perturbing cells in silico."""

    def perturb_in_silico(
        self,
        adata: Source | None = None,
        genes: Sequence[str] | str | None = None,
        mode: str = "delete",
        *,
        groups: str | None = None,
        goal: Mapping[str, Any] | tuple[str, Any] | None = None,
        start: Mapping[str, Any] | tuple[str, Any] | None = None,
        combinations: bool | int = False,
        max_cells: int = 1000,
        n_permutations: int = 100,
        untrained: bool = True,
        seed: int = 0,
        batch_size: int = 256,
        key_added: str | None = "in_silico",
    ) -> pd.DataFrame:
        """Change the counts of genes in cells, and measure how far the embedding of the cells moves.

        The idea is that of Geneformer (Theodoris et al. 2023). Counts are changed before they become tokens, so it
        works with every tokenizer and architecture. ``"delete"`` sets a gene to 0 in the cells that express it.
        ``"overexpress"`` makes it the highest gene of every cell (the first, where a tokenizer ranks; with
        ``"entropy_ranked"`` as far as no more counts than the rest of the cell has make it so). ``"activate"`` gives
        it, in cells without it, as many counts as is usual where it is expressed. The library size of a cell changes by
        as many counts, as if they had been changed in the data; so a deletion gives the embedding of the same AnnData
        with that count set to 0.

        **What the p-values say.** Cells are no replicates here: one gene moves all cells alike, and every perturbation
        moves them somewhat. So the null is that a gene does no more than other genes of like expression. For each gene,
        `n_permutations` other genes of like mean expression are perturbed in the same way, each in up to 100 of the
        cells that it applies to (a deletion: that express it). ``p_value`` is the share of them that shift the cells at
        least as far, ``goal_p_value`` that of those that move them as far to one side, doubled; the gene itself counts
        as one, so none is below ``1 / (n_permutations + 1)``. Where fewer genes are left than are tested
        (``genes=None``), these are compared with each other: then p-values are ranks, no false discovery rate can be
        small, and ``shift_z`` is what to sort by. The highest genes of all have no others like them, so that theirs
        means less. Tokenizers that draw (``side="both"``, truncation by a sample) add their noise to all shifts.

        **What they do not say.** Like mean expression is not a like dose: a gene that few cells express highly loses
        more counts where it is deleted than one that all cells express weakly, and has a small p-value in a model with
        random weights as well. ``shift_z_untrained`` is the z-score of the gene in such a model, with the same controls
        and cells; only what stands above it was learned. And a gene that stands out alone cannot have an
        ``fdr`` below the number of tests divided by ``n_permutations + 1`` (with a goal twice that); the table says how
        low it can be in ``attrs["lowest_fdr"]``, and a warning where that is above 0.1.

        Parameters
        ----------
        adata
            Cells; None for those of the training. As for :meth:`get_latent_representation`.
        genes
            Names of genes that the model knows. None takes those that at least 1 % of the cells express, the 2,000 most
            widely expressed at most.
        mode
            ``"delete"``, ``"overexpress"`` or ``"activate"``.
        groups
            Column of obs: perturb, and compare, within each group. Cells without a group are left out.
        goal
            A column of obs and a value, e.g. ``{"cell_type": "B"}``: also measure whether cells move towards the
            mean direction of the cells with that value.
        start
            The same for the cells to perturb. None takes all, or with a goal all that are not there.
        combinations
            2 perturbs all pairs of `genes` (a deletion: where both are expressed; an activation: where neither is).
        max_cells
            Cells to perturb, drawn at random, in all or in each group; also those that the goal is the mean of.
        n_permutations
            Other genes to compare each with; 0 for no p-values.
        untrained
            Compute ``shift_z_untrained`` (and ``goal_z_untrained``), the z-scores of the same genes in the same
            architecture with random weights. It takes as long again; False leaves it out.
        seed
            Seed of what is drawn.
        batch_size
            Cells a batch.
        key_added
            Key in ``adata.uns["scforge"]`` for the table (``"results"``) and what it was made with. None writes
            nothing.

        Returns
        -------
        One row a gene (or pair: ``gene``, ``gene_2``) and group, by falling shift (with a goal, by falling goal
        shift). ``n_cells``: cells it was perturbed in. ``shift``, ``shift_sd``: mean and standard deviation over these
        of 1 - the cosine between the embedding before and after; NaN without cells. ``shift_z``: the shift in standard
        deviations of the compared genes, NaN in fewer than 3 cells. ``shift_z_untrained``: as above. ``p_value``,
        ``fdr``: as above, and by Benjamini and Hochberg over all rows.
        With a goal ``goal_shift`` (change of the cosine to the goal; above 0 is closer), ``goal_shift_sd``,
        ``goal_z``, ``goal_z_untrained``, ``goal_p_value`` and ``goal_fdr``.

        Raises
        ------
        GeneMismatchError
            If the model does not know a gene.
        DataError
            If cells, groups or states cannot be found, or a gene to activate is expressed nowhere.
        OptionError
            If an argument cannot be used.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> table = model.perturb_in_silico(genes=["ISG15"], n_permutations=0)
        >>> len(table)
        1
        """
        model = cast("CellModel", self)
        for name, value in {"max_cells": max_cells, "batch_size": batch_size}.items():
            check_count(name, value, "cells")
        check_count("n_permutations", n_permutations, "genes", least=0)
        check_bool("untrained", untrained)
        check_seed(seed)
        source = ready(model, adata, "how cells move is")
        perturbation = Perturbation(mode)
        numbers = None if genes is None else gene_numbers(model, genes, source=source)
        if numbers is None and combinations is not False:
            raise OptionError("combinations=2 needs genes, as there are too many pairs of all; name some.")
        cells = model._open(source)
        embed_cells = partial(
            embed,
            model.module,
            tokenizer=model.tokenizer,
            objective=model.spec.build_objective(),
            batch_size=batch_size,
        )
        embeddings: dict[str, Callable[[Cells], np.ndarray]] = {"": embed_cells}
        if untrained and n_permutations:
            try:
                embeddings["_untrained"] = _untrained(model, batch_size)
            except OptionError as error:
                warn(f"untrained=True is left out: {error}")
        chosen, there = cells_in_state(cells, "start", start), cells_in_state(cells, "goal", goal)
        chosen = _starting(chosen, there, len(cells))
        towards = dict.fromkeys(embeddings)
        if there is not None:
            at_goal = cells.sample(max_cells, rows=np.flatnonzero(there), seed=seed)
            towards = {name: centroid(embed_them(at_goal)) for name, embed_them in embeddings.items()}
        if numbers is None:
            numbers = widely_expressed(model.vocab, cells.sample(max_cells, rows=np.flatnonzero(chosen), seed=seed))
        perturbation = Perturbation.of(mode, cells.sample(_USUAL_CELLS, seed=seed), model.tokenizer)
        _check_activated(perturbation, numbers, model.vocab.genes)
        sets = gene_combinations(numbers, combinations)
        tables = []
        for group, rows in cell_groups(cells, groups, chosen):
            some = cells.sample(max_cells, rows=rows, seed=seed)
            moved = {
                name: screen(
                    some, embed_them, perturbation, sets, goal=towards[name], n_controls=n_permutations, seed=seed
                )
                for name, embed_them in embeddings.items()
            }
            table = moved.pop("")
            for name, random in moved.items():
                for z in ("shift_z", "goal_z"):
                    if z in table:
                        table.insert(int(table.columns.get_loc(z)) + 1, f"{z}{name}", random[z])
            named = {
                name: model.vocab.decode(sets[:, i] + model.vocab.n_special)
                for i, name in enumerate(("gene", "gene_2")[: sets.shape[1]])
            }
            tables.append(pd.DataFrame(named if group is None else {**named, "group": group}).join(table))
        if not tables:
            raise DataError(
                f"no cell to perturb has a group in obs[{groups!r}]; choose another column, or other cells."
            )
        results = with_rates(pd.concat(tables, ignore_index=True))
        by = "shift" if there is None else "goal_shift"
        results = results.sort_values(by, ascending=False, kind="stable", ignore_index=True)
        asked: dict[str, Any] = {
            "mode": mode,
            "groups": groups,
            "max_cells": max_cells,
            "n_permutations": n_permutations,
            "seed": seed,
        }
        asked |= {name: None if state is None else str(state) for name, state in {"goal": goal, "start": start}.items()}
        if n_permutations:
            results.attrs["lowest_fdr"] = asked["lowest_fdr"] = _lowest_fdr(results, n_permutations)
        note(model, source, key_added, asked, results=results)
        return results


def _untrained(model: CellModel, batch_size: int) -> Callable[[Cells], np.ndarray]:
    """Return what embeds cells with the architecture of a model and random weights."""
    module, tokenizer = model.spec.build_untrained(seed=0)
    module.to(next(model.module.parameters()).device)
    return partial(embed, module, tokenizer=tokenizer, objective=model.spec.build_pretraining(), batch_size=batch_size)


def _lowest_fdr(results: pd.DataFrame, n_controls: int) -> float:
    """Return the false discovery rate of a test that alone has the lowest p-value there can be; warn if it is high."""
    p_values = results["goal_p_value" if "goal_p_value" in results else "p_value"]
    n_tests, sides = int(p_values.notna().sum()), 2 if "goal_p_value" in results else 1
    lowest = min(1.0, sides * n_tests / (n_controls + 1))
    if not any(name.endswith("_untrained") for name in results):
        warn(
            "Genes are compared with genes of similar mean expression, not of a similar dose; markers stand out in a "
            "network with random weights as well; compare z-scores with those of untrained=True."
        )
    if lowest > _HIGH_FDR:
        warn(
            f"With {n_tests} tests and n_permutations={n_controls} the fdr of a gene that stands out alone is at least "
            f"{lowest:.2g}; raise n_permutations to {math.ceil(sides * n_tests / _HIGH_FDR)} or test fewer genes."
        )
    return lowest


def _starting(chosen: np.ndarray | None, there: np.ndarray | None, n_cells: int) -> np.ndarray:
    """Return the cells to perturb, bool, shape (N,)."""
    if chosen is None:
        chosen = np.ones(n_cells, dtype=np.bool_) if there is None else ~there
    elif there is not None and (chosen & there).any():
        raise OptionError("start and goal share cells, which are there already; choose others.")
    if not chosen.any():
        raise DataError("all cells are at the goal, so none is left to perturb; name cells with start=...")
    return chosen


def _check_activated(perturbation: Perturbation, numbers: np.ndarray, genes: Sequence[str]) -> None:
    """Raise if nothing tells what is usual for a gene to activate."""
    if perturbation.shares is None:
        return
    silent = [genes[number] for number in numbers if np.isnan(perturbation.shares[number])]
    if silent:
        raise DataError(
            f"mode='activate' gives genes the counts that are usual, but no cell expresses {listing(silent, most=5)}; "
            "leave them out, or choose mode='overexpress'."
        )
