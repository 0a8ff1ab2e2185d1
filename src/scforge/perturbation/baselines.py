"""Baselines: effects predicted from the training effects without a trained model.

Shapes: N training effects, Q requested effects, G genes, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from scforge.errors import DataError
from scforge.perturbation.effects import KnownEffects, PerturbedCells, WantedEffects, known_effects
from scforge.perturbation.kernels import BANDS, N_COMPONENTS, kernel_effects, linear_effects
from scforge.perturbation.keys import Effect, PerturbationKeys


def perturbation_baselines(
    train: PerturbedCells, effects: Sequence[Effect], keys: PerturbationKeys, features: Mapping[str, pd.DataFrame]
) -> dict[str, pd.DataFrame]:
    """Return the predictions of all baselines, including a linear model for each entry of target `features`.

    The format is the same as in :class:`~scforge.eval.PerturbationPrediction`.
    """
    train_effects = known_effects(train, {effect.context for effect in effects})
    columns = {str(gene): column for column, gene in enumerate(train.genes)}
    targets = {target for effect in (*effects, *train_effects.effects) for target in effect.targets}
    wanted = WantedEffects(effects, {target: columns[target] for target in targets if target in columns})
    tables, scaled = {}, {}
    for name, frame in features.items():
        values = frame.to_numpy(dtype=np.float64)
        if not np.isfinite(values).all() or not frame.index.is_unique:
            raise DataError(
                "has non-finite values or duplicate targets; pass one row of numbers per target.",
                argument="gene_features",
            )
        names = frame.index.astype(str)
        tables[name] = dict(zip(names, _scores(values, BANDS[-1]), strict=True))
        # The penalty of the linear model assumes features with unit variance.
        leading = _scores(values)
        spread = leading.std(axis=0)
        kept = spread > 1e-9 * max(spread.max(initial=0), 1e-300)
        leading = np.divide(leading, spread, out=np.zeros_like(leading), where=kept)
        scaled[name] = dict(zip(names, leading, strict=True))
    predicted, scores = baseline_effects(train_effects, replace(wanted, tables=tables)), gene_scores(train_effects)
    del predicted["linear_embedding"]
    for name, table in scaled.items():
        predicted[f"linear_{name}"] = _linear(train_effects, wanted, table, {}, scores)
    return {name: pd.DataFrame(deltas, keys.index(effects), train.genes) for name, deltas in predicted.items()}


def baseline_effects(known: KnownEffects, wanted: WantedEffects, *, fitted: bool = True) -> dict[str, np.ndarray]:
    """Return the predictions of all baselines, or only of the first two without `fitted`.

    Returns
    -------
    Deltas, float64, shape (Q, G). Values are NaN if they depend on the `controls` of a context without the gene. The
    baselines are

    ``no_change``
        No gene changes.
    ``train_mean``
        The mean of all training effects in the same context, or in all contexts if there are none.
    ``overall_mean``
        The mean of all training effects in all contexts. Included only if it differs from the mean of a requested
        context.
    ``control_mean``
        The mean of the controls of all contexts, minus the mean of the controls of the context.
    ``perturbation_mean``
        The mean effect of the same perturbation in other contexts. Included only if a requested perturbation has one.
    ``additive``
        The sum of the effects of a combination's parts; parts without a known single effect use the mean single effect.
        Included only if a combination is requested.
    ``linear_pca``, ``linear_embedding``
        :func:`linear_effects` with gene vectors from the training effects or from the model. For perturbations seen in
        other contexts, context vectors are used.
    ``kernels``
        :func:`kernel_effects` with all of these features and `tables`. Sources are weighted by how well they predict
        held-out training effects. If no source predicts them, the prediction is the mean.
    ``nearest``
        The effect of the training perturbation whose genes are most similar in :func:`gene_scores` (cosine). For
        perturbations seen in other contexts, the effect in the context with the most similar controls.

    Examples
    --------
    >>> import numpy as np
    >>> deltas = np.array([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    >>> known = KnownEffects([Effect(("A",), "all"), Effect(("B",), "all")], deltas, {"all": np.ones(3)})
    >>> predicted = baseline_effects(known, WantedEffects([Effect(("A", "B"), "all")]))
    >>> predicted["train_mean"].tolist(), predicted["additive"].tolist()
    ([[0.5, 1.0, 0.0]], [[1.0, 2.0, 0.0]])
    """
    means = np.array([known.mean(effect.context) for effect in wanted.effects])
    predicted = {"no_change": np.zeros(means.shape), "train_mean": means}
    if not fitted:
        return predicted
    scores, control = gene_scores(known), np.mean(list(known.controls.values()), axis=0)
    predicted["control_mean"] = np.array([control - known.controls[effect.context] for effect in wanted.effects])
    if len({*known.contexts}) > 1 and {*known.contexts} & {effect.context for effect in wanted.effects}:
        predicted["overall_mean"] = np.tile(known.deltas.mean(axis=0), (len(means), 1))
    if any(len(known.same(effect.targets)) for effect in wanted.effects):
        predicted["perturbation_mean"] = np.array(
            [known.of(*effect, mean) for effect, mean in zip(wanted.effects, means, strict=True)]
        )
    if any(len(effect.targets) > 1 for effect in wanted.effects):
        predicted["additive"] = np.array([_additive(known, effect) for effect in wanted.effects])
    features, contexts = {name: scores[gene] for name, gene in wanted.genes.items()}, _context_scores(known)
    predicted["linear_pca"] = _linear(known, wanted, features, contexts, scores)
    predicted["linear_embedding"] = _linear(known, wanted, wanted.gene_features, wanted.context_features, scores)
    predicted["kernels"] = _kernels(known, wanted, features, contexts)
    predicted["nearest"] = np.array([_nearest(known, features, effect) for effect in wanted.effects])
    return predicted


def _additive(known: KnownEffects, effect: Effect) -> np.ndarray:
    """Return the sum of the effects of a combination's parts."""
    singles = [i for i in known.within(effect.context) if len(known.effects[i].targets) == 1]
    typical = known.deltas[singles].mean(axis=0) if singles else known.mean(effect.context)
    return np.sum([known.of((target,), effect.context, typical) for target in effect.targets], axis=0)


def _linear(
    known: KnownEffects,
    wanted: WantedEffects,
    gene_features: Mapping[str, np.ndarray],
    context_features: Mapping[str, np.ndarray],
    genes: np.ndarray,
) -> np.ndarray:
    """Predict effects with :func:`linear_effects` from scores of `genes` and these features, shape (Q, G)."""
    sides = (known.effects, wanted.effects)
    by_context = [_sums([(effect.context,) for effect in side], context_features) for side in sides]
    by_targets = [_sums([effect.targets for effect in side], gene_features) for side in sides]
    predicted = np.empty((len(wanted.effects), known.deltas.shape[1]))
    for row, effect in enumerate(wanted.effects):
        rows, elsewhere = known.like(effect)
        seen, own = by_context if elsewhere else by_targets
        predicted[row] = linear_effects(known.deltas[rows], genes, seen[rows], own[row : row + 1])[0]
    return predicted


def _kernels(
    known: KnownEffects,
    wanted: WantedEffects,
    features: Mapping[str, np.ndarray],
    contexts: Mapping[str, np.ndarray],
) -> np.ndarray:
    """Predict effects with context kernels for perturbations seen in other contexts, and gene kernels otherwise."""
    predicted = np.empty((len(wanted.effects), known.deltas.shape[1]))
    groups: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    for row, effect in enumerate(wanted.effects):
        rows, elsewhere = known.like(effect)
        groups.setdefault((elsewhere, tuple(rows.tolist())), []).append(row)
    for (elsewhere, seen), asked in groups.items():
        rows = np.array(seen, dtype=np.int64)
        parts: list[list[tuple[str, ...]]] = [
            [(effect.context,) if elsewhere else effect.targets for effect in side]
            for side in ([known.effects[i] for i in rows], [wanted.effects[i] for i in asked])
        ]
        names = [] if elsewhere else sorted({target for targets in parts[0] for target in targets})
        # A table with this name takes the place of the embedding.
        of_genes = [features, *{"embedding": wanted.gene_features, **wanted.tables}.values()]
        tables = [contexts, wanted.context_features] if elsewhere else of_genes
        members = [
            np.array([[name in part for name in names] for part in side], float).reshape(len(side), len(names))
            for side in parts
        ]
        counts = [np.array([len(part) for part in side], float) for side in parts]
        sources = [[_sums(side, table) for side in parts] for table in tables if table]
        blocks = np.unique([" ".join(part) for part in parts[0]], return_inverse=True)[1]
        n_cells = np.ones(len(rows)) if known.n_cells is None else np.maximum(known.n_cells[rows], 1)
        noise = n_cells.mean() / n_cells
        predicted[asked] = kernel_effects(known.deltas[rows], noise, counts, members, sources, blocks)
    return predicted


def _nearest(known: KnownEffects, features: Mapping[str, np.ndarray], effect: Effect) -> np.ndarray:
    """Return the effect of the nearest training perturbation, or of the same one in the most similar context."""
    rows, elsewhere = known.like(effect)
    if elsewhere:
        # Over the genes that both measured.
        control = known.controls[effect.context]
        away = [np.nansum((known.controls[known.effects[i].context] - control) ** 2) for i in rows]
        return known.deltas[rows[int(np.argmin(away))]]
    seen, own = _sums([known.effects[i].targets for i in rows], features), _sums([effect.targets], features)[0]
    finite = np.isfinite(seen).all(axis=1)
    if not finite.any() or not np.isfinite(own).all():
        return known.mean(effect.context)
    rows, seen = rows[finite], seen[finite]
    lengths = np.linalg.norm(seen, axis=1) * np.linalg.norm(own)
    similar = np.divide(seen @ own, lengths, out=np.zeros(len(rows)), where=lengths > 0)
    return known.deltas[rows[int(np.argmax(similar))]]


def gene_scores(known: KnownEffects) -> np.ndarray:
    """Return gene scores from a PCA of the expression under all training perturbations, float64, shape (G, D).

    Genes are observations and the mean expression of each group of cells is a variable, as in the linear model of
    Ahlmann-Eltze et al. 2025.
    """
    expression = np.array([known.controls[name] for name in known.contexts]) + known.deltas
    controls = np.array([known.controls[name] for name in sorted({*known.contexts})])
    return _scores(np.concatenate([controls, expression]).T)


def _context_scores(known: KnownEffects) -> dict[str, np.ndarray]:
    """Return principal components of the context controls, including the contexts of the requested effects."""
    names = sorted(known.controls)
    means = np.array([known.controls[name] for name in names])
    means = means[:, np.isfinite(means).all(axis=0)]
    return dict(zip(names, _scores(means), strict=True))


def _scores(values: np.ndarray, n_comps: int = N_COMPONENTS) -> np.ndarray:
    """Return the scores of the rows on the leading principal components."""
    left, sizes, _ = np.linalg.svd(values - values.mean(axis=0), full_matrices=False)
    return (left * sizes)[:, :n_comps]


def _sums(parts: Sequence[tuple[str, ...]], features: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the summed features of the parts of each perturbation, shape (., D); NaN if a part has no features."""
    n_dims = len(next(iter(features.values()))) if features else 1
    nothing = np.full(n_dims, np.nan)
    return np.array([np.sum([features.get(name, nothing) for name in part], axis=0) for part in parts])
