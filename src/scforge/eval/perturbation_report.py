"""Predicted effects of perturbations beside all baselines and a ceiling.

Shapes: Q effects, G genes, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anndata
import numpy as np
import pandas as pd
from scipy import sparse

from scforge._constants import UNS_KEY
from scforge.data.checks import value_problem
from scforge.errors import DataError, OptionError, did_you_mean, listing
from scforge.eval.harness import compare
from scforge.eval.leaks import check_disjoint, check_features, check_no_copies, check_same_rows
from scforge.eval.perturbation_baselines import N_COMPONENTS, WantedEffects, baseline_effects
from scforge.eval.perturbation_cells import ALL, Effect, EffectKeys, PerturbedCells
from scforge.eval.perturbation_prediction import PerturbationPrediction, TechnicalDuplicate
from scforge.eval.perturbation_reference import known_effects
from scforge.eval.report import Kind, Report

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["evaluate_perturbations", "perturbation_baselines"]

_CEILING = "technical_duplicate"
_FEW_GENES = 0.5
_MOST_RATIO = 1.2
"""Totals of cells over the same genes differ by less if they were scaled alike."""


def evaluate_perturbations(
    real: AnnData,
    predictions: AnnData | pd.DataFrame | Mapping[str, AnnData | pd.DataFrame],
    *,
    train: AnnData,
    perturbation_key: str,
    control: str,
    context_key: str | None = None,
    separator: str | None = "+",
    layer: str | None = None,
    gene_features: pd.DataFrame | Mapping[str, pd.DataFrame] | None = None,
    n_top_genes: int | None = None,
    kinds: Mapping[str, Kind] | None = None,
    seeds: Sequence[int] = (0,),
    intervals: bool = True,
    title: str = "Effects of perturbations, predicted",
) -> Report:
    """Score predicted effects beside every baseline on the same held-out cells, and beside a second experiment.

    Baselines (:func:`baseline_effects`) see `train` alone. Leaks are looked for first: cells and effects that are in
    the training, too, predictions that are copies of held-out cells, and features that were made from them.

    Parameters
    ----------
    real
        Held-out cells: of perturbations (in a context) that `train` does not have, and controls that are not in
        `train`. Counts, or log1p of counts per 10,000.
    predictions
        Predicted cells, with the columns `perturbation_key` and `context_key`, or predicted effects, as
        :class:`PerturbationPrediction` takes them, or what ``model.predict()`` of the task ``"perturbation"`` returns;
        several methods by name.
    train
        Training cells with their controls, from which baselines are computed.
    perturbation_key, control, context_key, separator, layer, n_top_genes
        As for :class:`PerturbationPrediction`.
    gene_features
        Vectors of the targets that a model knows, e.g. its gene embeddings, one row a target, for the linear baseline
        ``linear_embedding``; several by name for ``linear_<name>``.
    kinds
        Method to ``"model"`` or ``"untrained"``; models, unless told otherwise.
    seeds, intervals, title
        As for :func:`compare`.

    Returns
    -------
    The report. Its notes say which genes were left out because a method or the training lacks them.

    Raises
    ------
    DataError
        If the data cannot be read, an effect is not predicted, or there is a leak.
    OptionError
        If a method has the name of a baseline.

    Warns
    -----
    ScforgeWarning
        If single test cells look like training cells.

    Examples
    --------
    >>> genes, names = list("ABCDEFGHIJ"), np.repeat(["control", "A", "B", "C", "D"], 30)
    >>> counts = np.random.default_rng(0).poisson(5 + 10 * (names[:, None] == genes), (2, 150, 10)).astype("float32")
    >>> obs = pd.DataFrame({"target": names}, index=[f"cell{i}" for i in range(150)])
    >>> one, other = (anndata.AnnData(made, obs, pd.DataFrame(index=genes)) for made in counts)
    >>> test, keys = np.r_[:15, 90:150], {"perturbation_key": "target", "control": "control"}
    >>> report = evaluate_perturbations(one[test], other[test], train=one[15:90], **keys, intervals=False)
    >>> report.to_table()["pearson_delta"].loc[["prediction", "train_mean"]].idxmax()
    'prediction'
    """
    keys = EffectKeys(perturbation_key, control, context_key, separator, layer)
    named = (
        {"prediction": predictions} if isinstance(predictions, anndata.AnnData | pd.DataFrame) else dict(predictions)
    )
    if not named:
        raise OptionError("predictions={} names no method; give at least one.")
    named = {name: _effects_of_task(one, keys) for name, one in named.items()}
    features = {} if gene_features is None else gene_features
    features = {"embedding": features} if isinstance(features, pd.DataFrame) else dict(features)
    held_out = PerturbedCells.read(real, keys, argument="real")
    trained = PerturbedCells.read(train, keys, argument="train")
    check_disjoint(trained.names, held_out.names, what="cells")
    check_disjoint(_titles(trained.effects, keys), _titles(held_out.effects, keys), what="effects")
    for name, frame in features.items():
        check_features(
            frame,
            real,
            perturbation_key=perturbation_key,
            control=control,
            separator=separator,
            argument=f"gene_features[{name!r}]",
        )
    if unknown := [name for name in kinds or {} if name not in named]:
        raise OptionError(
            f"kinds names {listing(unknown)}, which predictions does not have{did_you_mean(unknown[0], list(named))}; "
            f"its methods are {listing(named)}."
        )
    _check_train_counts(train, real, layer)
    whole = trained
    genes, notes = _common_genes(held_out.genes, trained.genes, named)
    held_out, trained = held_out.over(genes, argument="real"), trained.over(genes, argument="train")
    check_same_rows(trained.expression, held_out.expression)
    _check_totals(trained, held_out)
    made = {name: _aligned(one, name, genes, keys, held_out, real.n_vars) for name, one in named.items()}
    kept_out = _adata(held_out, keys)
    benchmark = PerturbationPrediction(perturbation_key, control, context_key, separator, n_top_genes=n_top_genes)
    benchmark.trained_on(_adata(trained, keys)).check(kept_out)
    measured_titles = {*_titles(held_out.effects, keys)}
    for name, one in made.items():
        _check_effects(benchmark, name, one, kept_out)
        if more := [title for title in _titles(_predicted(one, keys), keys) if title not in measured_titles]:
            notes.append(
                f"{name} predicts more than was measured (effects: {len(more)}), which is not scored: "
                f"{listing(more, most=5)}."
            )
        if not isinstance(one, pd.DataFrame):
            own = (one.obs[perturbation_key].astype(str) == control).any()
            notes.append(f"Effects of {name} are seen from {'its own' if own else 'the training'} controls.")
    # What is scored is no reason to know less of the training.
    baselines = {
        name: frame[genes] for name, frame in perturbation_baselines(whole, held_out.effects, keys, features).items()
    }
    targets = {target for effect in held_out.effects for target in effect.targets}
    if n_missing := len(targets - {str(gene) for gene in whole.genes}):
        notes.append(
            f"{len(targets) - n_missing} of {len(targets)} targets are genes of the data; baselines that go by the "
            "target's gene predict the mean training effect for the others."
        )
    if taken := [name for name in made if name in baselines or name == _CEILING]:
        raise OptionError(f"predictions names {listing(taken)}, which are names of baselines; rename them.")
    report = compare(
        benchmark,
        {**made, **baselines, _CEILING: TechnicalDuplicate()},
        kept_out,
        kinds={
            **dict.fromkeys(made, "model"),
            **(kinds or {}),
            **dict.fromkeys(baselines, "baseline"),
            _CEILING: "ceiling",
        },
        seeds=seeds,
        intervals=intervals,
        title=title,
    )
    report.facts |= {
        "effects scored": len(held_out.effects),
        "effects in the training": len(trained.effects),
        "held-out cells": int((held_out.groups < len(held_out.effects)).sum()),
        "held-out controls": int((held_out.groups >= len(held_out.effects)).sum()),
        "training cells": len(trained.groups),
        "genes": min(len(genes), n_top_genes or len(genes)),
    }
    report.notes += notes
    if real.n_vars != train.n_vars:
        report.notes.append(
            f"real has {real.n_vars} genes and train {train.n_vars}; counts are scaled by their total over the genes "
            "of each."
        )
    report.notes.append(
        "Effects are changes of the mean log1p CP10K against controls of the same context. Baselines saw the training "
        f"cells alone. {_CEILING} is one half of the held-out cells as a prediction of the other, brought to whole "
        "groups. Calibrated figures: 0 is the mean training effect, 1 that second experiment."
    )
    return report


def perturbation_baselines(
    train: PerturbedCells, effects: Sequence[Effect], keys: EffectKeys, features: Mapping[str, pd.DataFrame]
) -> dict[str, pd.DataFrame]:
    """Return what each baseline predicts, in the form that :class:`PerturbationPrediction` takes.

    Parameters
    ----------
    train
        Training cells.
    effects
        What to predict, Q of them.
    keys
        How effects are called.
    features
        Vectors of targets, for linear models.
    """
    known = known_effects(train, {effect.context for effect in effects})
    targets = tuple(effect.targets for effect in effects)
    contexts = tuple(effect.context for effect in effects)
    number = {str(gene): column for column, gene in enumerate(train.genes)}
    genes = {name: number[name] for some in targets + known.targets for name in some if name in number}
    found = baseline_effects(known, WantedEffects(targets, contexts, genes))
    del found["linear_embedding"]
    for name, frame in features.items():
        wanted = WantedEffects(targets, contexts, genes, _reduced(frame))
        found[f"linear_{name}"] = baseline_effects(known, wanted)["linear_embedding"]
    index = _index(effects, keys)
    return {name: pd.DataFrame(deltas, index=index, columns=train.genes) for name, deltas in found.items()}


def _reduced(features: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return the leading components of features, of unit variance: what the penalty of the linear model is for."""
    values = features.to_numpy(dtype=np.float64)
    if not np.isfinite(values).all() or not features.index.is_unique:
        raise DataError("gene_features holds values that are not numbers, or a target twice; give one row a target.")
    left, sizes, _ = np.linalg.svd(values - values.mean(axis=0), full_matrices=False)
    scores = (left * sizes)[:, : min(N_COMPONENTS, values.shape[1])]
    spread = scores.std(axis=0)
    scores = np.divide(
        scores, spread, out=np.zeros_like(scores), where=spread > 1e-9 * max(spread.max(initial=0), 1e-300)
    )
    return dict(zip(features.index.astype(str), scores, strict=True))


def _effects_of_task(one: AnnData | pd.DataFrame, keys: EffectKeys) -> AnnData | pd.DataFrame:
    """Return the effects, if this is what the task of perturbations predicts; else the same."""
    if isinstance(one, pd.DataFrame) or "predicted" not in one.uns.get(UNS_KEY, {}) or "delta" not in one.layers:
        return one
    labels = [one.obs["perturbation"].astype(str)]
    if keys.context_key is not None:
        labels.append(one.obs["context"].astype(str))
    index = pd.Index(labels[0]) if len(labels) == 1 else pd.MultiIndex.from_arrays(labels)
    return pd.DataFrame(np.asarray(one.layers["delta"], dtype=np.float64), index=index, columns=one.var_names)


def _titles(effects: Sequence[Effect], keys: EffectKeys) -> list[str]:
    return [
        keys.name_of(effect.targets) + (f" in {effect.context}" if keys.context_key is not None else "")
        for effect in effects
    ]


def _index(effects: Sequence[Effect], keys: EffectKeys) -> pd.Index:
    labels = [keys.name_of(effect.targets) for effect in effects]
    if keys.context_key is None:
        return pd.Index(labels)
    return pd.MultiIndex.from_arrays([labels, [effect.context for effect in effects]])


def _common_genes(real: pd.Index, train: pd.Index, named: Mapping[str, Any]) -> tuple[pd.Index, list[str]]:
    """Return the genes that all have, in the order of the measured cells, and sentences on what is missing."""
    columns = {"train": train} | {
        name: one.columns if isinstance(one, pd.DataFrame) else one.var_names for name, one in named.items()
    }
    genes, notes = real, []
    for name, some in columns.items():
        if len(missing := real[~real.isin(some)]):
            notes.append(
                f"{name} lacks {len(missing)} of the {len(real)} measured genes (first: {str(missing[0])!r}), which "
                "are not scored."
            )
            genes = genes[genes.isin(some)]
    if len(genes) < max(2, _FEW_GENES * len(real)):
        raise DataError(
            f"only {len(genes)} of {len(real)} measured genes are in all of {listing(columns)}; use the same names in "
            "var_names, or take real over the genes that are predicted (after normalising it)."
        )
    return genes, notes


def _check_train_counts(train: AnnData, real: AnnData, layer: str | None) -> None:
    if train.n_vars < real.n_vars and value_problem(_values(train.X if layer is None else train.layers[layer])) is None:
        raise DataError(
            f"train holds counts of {train.n_vars} genes and real has {real.n_vars}, so that the totals of the "
            "training cells are not known; give train with all genes, or log1p of counts per 10,000, scaled before "
            "genes were left out."
        )


def _check_totals(train: PerturbedCells, real: PerturbedCells) -> None:
    """Raise where the controls of the same contexts are of another scale."""
    places = sorted({effect.context for effect in real.effects} & {*train.contexts} & {*real.contexts})
    one, other = (
        _total(cells.expression[np.isin(cells.groups, [len(cells.effects) + cells.contexts.index(p) for p in places])])
        for cells in (train, real)
    )
    if min(one, other) > 0 and max(one, other) > _MOST_RATIO * min(one, other):
        raise DataError(
            f"over the common genes controls of train have a median total of {one:,.0f} and those of real of "
            f"{other:,.0f}; scale both to 10,000 over the same genes, or give counts of all genes."
        )


def _total(expression: sparse.csr_matrix) -> float:
    return float(np.median(np.asarray(expression.expm1().sum(axis=1)))) if expression.shape[0] else 0.0


def _values(matrix: Any) -> np.ndarray:
    return matrix.data if sparse.issparse(matrix) else np.ravel(matrix)


def _aligned(
    one: AnnData | pd.DataFrame, name: str, genes: pd.Index, keys: EffectKeys, held_out: PerturbedCells, n_measured: int
) -> AnnData | pd.DataFrame:
    """Return a prediction over the scored genes, after a look whether it is a copy of the answer."""
    if isinstance(one, pd.DataFrame):
        return one[genes] if one.columns.is_unique else one
    matrix = one.X if keys.layer is None else one.layers.get(keys.layer, one.X)
    if matrix is not None and one.n_vars < n_measured and value_problem(_values(matrix)) is None:
        raise DataError(
            f"predictions[{name!r}] holds counts of {one.n_vars} genes, fewer than were measured, so that their "
            "total is not known; give log1p of counts per 10,000."
        )
    cells = PerturbedCells.read(one, keys, argument=f"predictions[{name!r}]", made=True)
    cells = cells.over(genes, argument=f"predictions[{name!r}]")
    perturbed = cells.expression[cells.groups < len(cells.effects)]
    _check_scale_of_made(perturbed, held_out.expression[held_out.groups < len(held_out.effects)], name)
    check_no_copies(
        perturbed,
        held_out.expression[held_out.groups < len(held_out.effects)],
        argument=f"predictions[{name!r}]",
    )
    return _adata(cells, keys)


def _check_scale_of_made(made: sparse.csr_matrix, real: sparse.csr_matrix, name: str) -> None:
    """Raise where predicted cells are of another scale.

    A mean profile on the log scale has a smaller total than its cells, but the same sum of logarithms: only where both
    differ is the scale another one.
    """
    if not made.shape[0]:
        return
    totals = _total(made), _total(real)
    sums = [float(some.sum()) / some.shape[0] for some in (made, real)]
    if all(min(pair) > 0 and max(pair) > _MOST_RATIO * min(pair) for pair in (totals, sums)):
        raise DataError(
            f"over the common genes cells of predictions[{name!r}] have a median total of {totals[0]:,.0f} and those "
            f"of real of {totals[1]:,.0f}; give log1p of counts per 10,000, or effects as a DataFrame."
        )


def _check_effects(benchmark: PerturbationPrediction, name: str, one: AnnData | pd.DataFrame, real: AnnData) -> None:
    """Raise where predicted effects are the measured ones."""
    predicted, measured = (table.to_numpy() for table in benchmark.deltas(one, real))
    size = np.abs(measured).max(axis=1)
    same = (np.abs(predicted - measured).max(axis=1) <= 1e-4 * size) & (size > 0)
    if same.any():
        raise DataError(
            f"predictions[{name!r}] has for {int(same.sum())} of {len(same)} effects what was measured in the held-out "
            "cells, gene by gene; a prediction may not see what it is scored on."
        )


def _predicted(one: AnnData | pd.DataFrame, keys: EffectKeys) -> list[Effect]:
    if isinstance(one, pd.DataFrame):
        labels = [(label, ALL) if keys.context_key is None else label for label in one.index]
        return [keys.effect(str(label), str(context)) for label, context in labels]
    plain = replace(keys, layer=None)
    return list(PerturbedCells.read(one, plain, argument="predictions", made=True).effects)


def _adata(cells: PerturbedCells, keys: EffectKeys) -> AnnData:
    """Return log-normalised cells as AnnData with the columns of `keys`, except that the values are in X."""
    groups = [*cells.effects, *(Effect((), name) for name in cells.contexts)]
    labels = [keys.name_of(group.targets) if group.targets else keys.control for group in groups]
    obs = pd.DataFrame(index=cells.names)
    obs[keys.perturbation_key] = pd.Categorical.from_codes(*_codes(labels, cells.groups))
    if keys.context_key is not None:
        obs[keys.context_key] = pd.Categorical.from_codes(*_codes([group.context for group in groups], cells.groups))
    return anndata.AnnData(cells.expression, obs=obs, var=pd.DataFrame(index=cells.genes))


def _codes(labels: list[str], groups: np.ndarray) -> tuple[np.ndarray, list[str]]:
    codes, unique = pd.factorize(np.array(labels, dtype=object))
    return codes[groups], [str(name) for name in unique]
