"""Scores of predicted effects beside baselines.

Shapes: Q effects to predict, G genes, D dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scforge.data.cells import Cells, choose_rows
from scforge.errors import DataError, listing
from scforge.eval.expression import log_expression
from scforge.eval.perturbation_baselines import N_COMPONENTS, KnownEffects, WantedEffects, baseline_effects
from scforge.eval.perturbation_metrics import (
    METRICS,
    calibrated,
    comparable,
    de_genes,
    score_deltas,
    technical_duplicate,
)
from scforge.eval.pseudobulk import Effects, effects_of, moments
from scforge.finetuning.context import Evaluated
from scforge.finetuning.tasks._perturbation_predict import (
    MOST_INPUTS,
    Pair,
    control_means,
    effects_for,
    rows_by_context,
)

if TYPE_CHECKING:
    from scforge.data.vocab import GeneVocab
    from scforge.finetuning.context import EvaluationContext, Predictor
    from scforge.finetuning.tasks._perturbation_conditions import Conditions
    from scforge.finetuning.tasks._perturbation_head import PerturbationHead
    from scforge.finetuning.tasks.perturbation import Perturbation

__all__ = ["evaluate_effects"]


def evaluate_effects(task: Perturbation, context: EvaluationContext) -> Evaluated:
    """Score effects of perturbations that the model was not trained on, on means of their cells.

    The controls among the scored cells are what effects are measured against; the other controls of the same data are
    the inputs of the model. Where a context has no others, half of its controls are inputs.

    Returns
    -------
    The mean of each metric of :func:`~scforge.eval.perturbation_metrics.score_deltas` over perturbations, for the
    model, each of :func:`~scforge.eval.perturbation_baselines.baseline_effects`, and ``technical_duplicate``; the
    tables ``per_perturbation``, and ``calibrated`` (0: the mean of the training effects, 1: the duplicate; over the
    effects that have enough cells for a duplicate). Without baselines, ``no_change`` and, where the training cells are
    at hand, ``train_mean`` stay.

    Raises
    ------
    DataError
        If no scored cell has a perturbation that the model was not trained on, or there are too few controls.
    """
    import pandas as pd

    cells = context.predictor.cells
    assert cells.vocab is not None
    conditions = task.conditions(cells.column)
    scored = context.rows[conditions.perturbation[context.rows] >= 0]
    pairs = [
        pair
        for name, where in conditions.pairs(scored).items()
        for pair in (Pair(task.parts(name), place) for place in where)
        if not task.is_seen(*pair)
    ]
    if not pairs:
        raise DataError(
            "none of the scored cells has a perturbation that the model was not trained on; hold some out "
            "(heldout=[...]), or pass other cells."
        )
    inputs, tested = _divide_controls(conditions, context, {pair.context for pair in pairs})
    real = _Real.of(conditions, cells, scored, pairs, tested)
    genes = _measured(context.predictor, context.train)
    known = None if context.train is None else _known(task, context, inputs)
    predictions = {"scforge": effects_for(task, context.predictor, pairs, inputs)[:, genes]}
    predictions |= _baselines(task, context, pairs, inputs, known, genes, cells.vocab)
    effects, scores = real.effects.deltas[:, genes], real.effects.scores[:, genes]
    changed = de_genes(real.effects.p_values[:, genes])
    center = predictions.get("train_mean")
    places = [pair.context for pair in pairs]
    tables = {name: score_deltas(made, effects, scores, changed, center, places) for name, made in predictions.items()}
    tables["technical_duplicate"] = technical_duplicate(
        log_expression(cells, real.rows)[:, genes],
        real.groups,
        real.controls,
        center,
        places,
        seed=context.seed,
    )
    described = pd.DataFrame(
        {
            "perturbation": [task.name_of(pair.targets) for pair in pairs],
            "context": [pair.context for pair in pairs],
            "n_cells": real.effects.n_cells,
            "n_controls": real.effects.n_controls,
        }
    )
    metrics = pd.DataFrame({name: table.mean() for name, table in tables.items()}).T[list(METRICS)]
    whole = [pd.concat([described.assign(method=name), table], axis=1) for name, table in tables.items()]
    found = {"per_perturbation": pd.concat(whole, ignore_index=True)}
    if "train_mean" in metrics.index:
        same = comparable(found["per_perturbation"], "technical_duplicate")
        means = same.groupby("method")[list(METRICS)].mean().reindex(metrics.index)
        found["calibrated"] = calibrated(means, "train_mean", "technical_duplicate")
    return Evaluated(metrics, found)


class _Real(NamedTuple):
    """Measured effects, and the cells behind them: `rows`, their `groups`, and the group of `controls` of each."""

    effects: Effects
    rows: np.ndarray
    groups: np.ndarray
    controls: np.ndarray

    @classmethod
    def of(
        cls,
        conditions: Conditions,
        cells: Cells,
        scored: np.ndarray,
        pairs: Sequence[Pair],
        tested: Mapping[str, np.ndarray],
    ) -> _Real:
        """Measure effects of `pairs` in the cells `scored`, against the controls `tested` of their context."""
        places = sorted({pair.context for pair in pairs})
        number = {pair: place for place, pair in enumerate(pairs)}
        of_cells = [
            number.get(Pair(conditions.targets[p], conditions.contexts[c]), -1)
            for p, c in zip(conditions.perturbation[scored], conditions.context[scored], strict=True)
        ]
        rows = np.concatenate([scored, *(tested[place] for place in places)])
        groups = np.concatenate(
            [of_cells, *(np.full(len(tested[place]), len(pairs) + i) for i, place in enumerate(places))]
        ).astype(np.int64)
        order = np.argsort(rows)
        order = order[groups[order] >= 0]
        rows, groups = rows[order], groups[order]
        controls = np.array([len(pairs) + places.index(pair.context) for pair in pairs])
        found = moments(cells, rows, groups, len(pairs) + len(places))
        return cls(effects_of(found, np.arange(len(pairs)), controls), rows, groups, controls)


def _divide_controls(
    conditions: Conditions, context: EvaluationContext, needed: set[str]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the controls that are inputs, and those that effects are measured against, of each needed context."""
    controls = np.flatnonzero(conditions.controls)
    tested = rows_by_context(conditions, np.intersect1d(controls, context.rows))
    inputs = rows_by_context(conditions, np.setdiff1d(controls, context.rows))
    rng = np.random.default_rng(context.seed)
    few = [name for name in sorted(needed) if len(tested.get(name, ())) < (1 if name in inputs else 2)]
    if few:
        raise DataError(
            f"the contexts {listing(few)} have too few control cells to measure effects against among the scored "
            "cells; add controls of the same experiment."
        )
    for name in sorted(needed - {*inputs}):
        shuffled = rng.permutation(tested[name])
        inputs[name] = np.sort(shuffled[: len(shuffled) // 2])
        tested[name] = np.sort(shuffled[len(shuffled) // 2 :])
    inputs = {name: choose_rows(len(conditions.perturbation), MOST_INPUTS, rows=rows) for name, rows in inputs.items()}
    return inputs, tested


def _measured(*predictors: Predictor | None) -> np.ndarray:
    """Return the genes that the cells of all predictors have, int64."""
    vocab = next(predictor.cells.vocab for predictor in predictors if predictor is not None)
    assert vocab is not None
    measured = np.ones(vocab.n_genes, dtype=bool)
    for predictor in predictors:
        if predictor is not None and predictor.cells.measured is not None:
            measured &= predictor.cells.measured
    return np.flatnonzero(measured)


def _known(task: Perturbation, context: EvaluationContext, inputs: Mapping[str, np.ndarray]) -> KnownEffects:
    """Measure the effects of the training cells alone, over all genes that these have."""
    assert context.train is not None
    assert context.train_rows is not None
    cells = context.train.cells
    conditions = task.conditions(cells.column)
    rows = context.train_rows
    controls = rows_by_context(conditions, rows[conditions.controls[rows]])
    pairs = [Pair(task.parts(name), place) for name, where in conditions.pairs(rows).items() for place in where]
    of_training = _Real.of(conditions, cells, rows[conditions.perturbation[rows] >= 0], pairs, controls)
    means = control_means(cells, controls)
    elsewhere = {name: some for name, some in inputs.items() if name not in means}
    if elsewhere:
        scored = context.predictor.cells
        seen = np.True_ if scored.measured is None else scored.measured
        means |= {name: np.where(seen, mean, np.nan) for name, mean in control_means(scored, elsewhere).items()}
    genes = _measured(context.train)
    return KnownEffects(
        targets=tuple(pair.targets for pair in pairs),
        contexts=tuple(pair.context for pair in pairs),
        deltas=of_training.effects.deltas[:, genes],
        controls={name: mean[genes] for name, mean in means.items()},
    )


def _baselines(
    task: Perturbation,
    context: EvaluationContext,
    pairs: Sequence[Pair],
    inputs: Mapping[str, np.ndarray],
    known: KnownEffects | None,
    genes: np.ndarray,
    vocab: GeneVocab,
) -> dict[str, np.ndarray]:
    if known is None:
        return {"no_change": np.zeros((len(pairs), len(genes)))}
    targets = sorted({target for some in (*known.targets, *(pair.targets for pair in pairs)) for target in some})
    # A baseline knows what the training tells of a gene, also where the scored data lack it.
    trained = _measured(context.train)
    number = {int(gene): place for place, gene in enumerate(trained)}
    indices = {target: int(index) for target, index in zip(targets, vocab.gene_indices(targets), strict=True)}
    head: PerturbationHead = context.predictor.module.head
    features = head.features[vocab.n_special :, :N_COMPONENTS].cpu().numpy().astype(np.float64)
    spread = features.std(axis=0)
    # In units of their spread: the penalty of the linear model is for features of that size.
    features = np.divide(features, spread, out=np.zeros_like(features), where=spread > 0)
    wanted = WantedEffects(
        targets=tuple(pair.targets for pair in pairs),
        contexts=tuple(pair.context for pair in pairs),
        genes={target: number[index] for target, index in indices.items() if index in number},
        gene_features={target: features[index] for target, index in indices.items() if index >= 0},
        context_features=_context_features(context, inputs) if task.context_key is not None else {},
    )
    common = np.isin(trained, genes)
    found = {name: made[:, common] for name, made in baseline_effects(known, wanted).items()}
    return found if context.baselines else {name: found[name] for name in ("no_change", "train_mean")}


def _context_features(context: EvaluationContext, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return components of the mean embedding of the controls of contexts, of the model before fine-tuning."""
    predictor = context.predictor if context.base is None else context.base
    means = np.array([predictor.embedding(rows).mean(axis=0) for rows in inputs.values()], dtype=np.float64)
    left, values, _ = np.linalg.svd(means - means.mean(axis=0), full_matrices=False)
    scores = (left * values)[:, :N_COMPONENTS]
    scale = max(float(scores.std()), 1e-12)
    return dict(zip(inputs, scores / scale, strict=True))
