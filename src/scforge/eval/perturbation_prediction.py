"""The benchmark of predicted effects of perturbations.

Shapes: Q effects, G genes, D components, R draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from scforge._checks import check_count, check_seed
from scforge.errors import DataError, listing
from scforge.eval.base import Benchmark, register_benchmark
from scforge.eval.perturbation_cells import ALL, Effect, EffectKeys, PerturbedCells
from scforge.eval.perturbation_discrimination import DISCRIMINATION, discrimination_scores
from scforge.eval.perturbation_metrics import METRICS, score_deltas
from scforge.eval.perturbation_reference import Reference
from scforge.eval.pseudobulk import Effects
from scforge.eval.statistics import bootstrap_weights

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["PerturbationPrediction", "TechnicalDuplicate"]

_CALIBRATED = ("pearson_delta", "wmse")


@dataclass(frozen=True)
class TechnicalDuplicate:
    """Stands for a second experiment, in place of a prediction: what is left to reach under the noise of few cells.

    See :func:`technical_duplicate` for how halves of the cells tell it.

    Attributes
    ----------
    n_splits
        Splits into halves, of which the mean is taken.

    Examples
    --------
    >>> TechnicalDuplicate(n_splits=3)
    TechnicalDuplicate(n_splits=3)
    """

    n_splits: int = 5


@register_benchmark("perturbation_prediction")
class PerturbationPrediction(Benchmark):
    """How well effects of perturbations are predicted that the training did not see.

    What is predicted is either cells, as an AnnData with the columns below, or the effects themselves: a DataFrame with
    one row a perturbation (with a context: an index of perturbation and context), one column a gene, and the change of
    the mean log1p CP10K. Effects of predicted cells are seen from the predicted controls of the context; if there are
    none, from those of the training, without a training from the measured ones.

    The figures are means over effects of

    - those of :func:`score_deltas`, with genes that change by Welch's t-test at a false discovery rate of 5 %,
    - ``discrimination_l1``, ``_l2`` and ``_cosine`` (:func:`~scforge.eval.discrimination_scores`, over all effects
      of the context that are scored, without the perturbed genes),
    - ``energy_distance`` between predicted and measured cells on principal components of the training cells
      (:func:`~scforge.eval.energy_distance`; unbiased; a predicted
      effect without cells is added to controls; left out where a group has one cell),
    - ``calibrated_pearson_delta`` and ``calibrated_wmse``: :func:`calibrated` figures, 0 for the mean effect of the
      training and 1 for a second experiment, over the effects that have enough cells for one. NaN without a training
      (:meth:`trained_on`), or where a second experiment would do no better than that mean.

    Parameters
    ----------
    perturbation_key
        Column of obs with the perturbation.
    control
        Its label of controls.
    context_key
        Column of obs with the context, e.g. the cell type; effects are seen from controls of the same one.
    separator
        What joins the targets of a combination; None takes labels as they are.
    layer
        Key in layers with counts or log1p CP10K; None reads X.
    n_top_genes
        Score only so many genes: those with the highest mean in the controls. None scores all.
    n_comps
        Principal components of the energy distance; fewer where there are not so many.
    max_cells
        Most cells of a group in the energy distance.
    seed
        Of the cells that these are, and of halves.

    References
    ----------
    Ahlmann-Eltze et al. (Nat Methods 2025), Mejia et al. (arXiv:2506.22641), Wu et al. (arXiv:2408.10609).

    Examples
    --------
    >>> import anndata, numpy as np, pandas as pd
    >>> names = np.repeat(["control", "A", "B"], 30)
    >>> counts = np.random.default_rng(0).poisson(5.0, size=(90, 20)).astype("float32")
    >>> counts[30:60, 0] *= 3
    >>> counts[60:, 1] *= 3
    >>> cells = anndata.AnnData(counts, pd.DataFrame({"target": names}, index=[f"cell{i}" for i in range(90)]))
    >>> scores = PerturbationPrediction("target", "control").run(cells, cells)
    >>> round(scores["pearson_delta"], 2), scores["rank"]
    (1.0, 0.0)
    """

    subject: ClassVar[str] = "perturbation"
    metrics = (
        *METRICS,
        *(f"discrimination_{name}" for name in DISCRIMINATION),
        "energy_distance",
        *(f"calibrated_{name}" for name in _CALIBRATED),
    )
    lower_is_better = frozenset({*(name for name, more in METRICS.items() if not more), "energy_distance"})
    main = "pearson_delta"
    n_draws: ClassVar[int] = 1_000

    def __init__(
        self,
        perturbation_key: str,
        control: str,
        context_key: str | None = None,
        separator: str | None = "+",
        layer: str | None = None,
        n_top_genes: int | None = None,
        n_comps: int = 50,
        max_cells: int = 500,
        seed: int = 0,
    ) -> None:
        if n_top_genes is not None:
            check_count("n_top_genes", n_top_genes, "genes", least=2)
        check_count("n_comps", n_comps, "components")
        check_count("max_cells", max_cells, "cells", least=2)
        self.keys = EffectKeys(perturbation_key, control, context_key, separator, layer)
        self.n_top_genes = n_top_genes
        self.n_comps = n_comps
        self.max_cells = max_cells
        self.seed = check_seed(seed)
        self._train: AnnData | None = None
        # What was read last: the seed and the data it belongs to, and the tables of what was scored against it.
        self._kept: tuple[int, Any, Reference] | None = None
        self._tables: list[tuple[Any, pd.DataFrame]] = []

    def trained_on(self, train: AnnData) -> PerturbationPrediction:
        """Tell the benchmark the training cells: for components, for the mean effect, and for controls.

        Parameters
        ----------
        train
            Cells with the same columns, controls among them.

        Returns
        -------
        The benchmark itself.
        """
        self._train, self._kept, self._tables = train, None, []
        return self

    def check(self, reference: AnnData) -> None:
        """Raise :class:`~scforge.errors.DataError` where no effect can be measured."""
        self._reference(reference)

    def run(self, made: AnnData | pd.DataFrame | TechnicalDuplicate, reference: AnnData) -> dict[str, float]:
        """Return the mean of each figure over effects; NaN as :meth:`table` says.

        Raises
        ------
        DataError
            If the data cannot be read, or an effect is not predicted.
        """
        figures = self._means(made, reference, None)
        return {name: float(value) for name, value in figures.iloc[0].items()}

    def resampled(
        self, made: AnnData | pd.DataFrame | TechnicalDuplicate, reference: AnnData, *, n: int, seed: int
    ) -> pd.DataFrame | None:
        """Return the figures over perturbations drawn with replacement; of contexts, where there is one perturbation.

        None where there is one effect only.
        """
        effects = self._reference(reference).cells.effects
        if len(effects) < 2:
            return None
        groups = self._perturbations(effects)
        weights = bootstrap_weights(len(effects), n, seed=seed, groups=groups if groups.max() else None)
        return self._means(made, reference, weights)

    def n_units(self, reference: AnnData) -> int:
        """Return the number of perturbations; of contexts, where there is one perturbation."""
        effects = self._reference(reference).cells.effects
        groups = self._perturbations(effects)
        return int(groups.max()) + 1 if groups.max() else len(effects)

    def _perturbations(self, effects: Sequence[Effect]) -> np.ndarray:
        """Return the number of the perturbation of each effect."""
        return pd.factorize(pd.Series([self.keys.name_of(effect.targets) for effect in effects]))[0]

    def table(self, made: AnnData | pd.DataFrame | TechnicalDuplicate, reference: AnnData) -> pd.DataFrame:
        """Return the figures of each effect.

        Returns
        -------
        One row an effect: ``perturbation``, ``context``, ``n_cells``, ``n_controls`` and the metrics without the
        calibrated ones, which are of means. NaN: where a figure is not defined (:func:`score_deltas`), and for a
        technical duplicate of an effect with fewer than two cells.
        """
        known = self._reference(reference)
        for other, table in self._tables:
            # Second experiments with as many splits are the same.
            both = isinstance(made, TechnicalDuplicate) and isinstance(other, TechnicalDuplicate)
            if other is made or (both and other == made):
                return table
        described = pd.DataFrame(
            {
                "perturbation": [self.keys.name_of(effect.targets) for effect in known.cells.effects],
                "context": [effect.context for effect in known.cells.effects],
                "n_cells": known.effects.n_cells,
                "n_controls": known.effects.n_controls,
            }
        )
        if isinstance(made, TechnicalDuplicate):
            figures = known.duplicate(self._figures, n_splits=made.n_splits)
        else:
            deltas, cells = self._predicted(made, known)
            figures = self._figures(deltas, known.effects, known.changed, known)
            figures["energy_distance"] = known.energy(deltas, cells)
        table = pd.concat([described, figures], axis=1)
        self._tables.append((made, table))
        return table

    def deltas(self, made: AnnData | pd.DataFrame, reference: AnnData) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return predicted and measured effects, one row an effect and one column a gene, e.g. for a plot."""
        known = self._reference(reference)
        predicted, _ = self._predicted(made, known)
        names = [(self.keys.name_of(effect.targets), effect.context) for effect in known.cells.effects]
        index = pd.MultiIndex.from_tuples(names, names=["perturbation", "context"])
        both = (predicted, known.effects.deltas)
        one, other = (pd.DataFrame(values, index=index, columns=known.cells.genes) for values in both)
        return one, other

    def _figures(self, predicted: np.ndarray, measured: Effects, changed: np.ndarray, known: Reference) -> pd.DataFrame:
        contexts = [effect.context for effect in known.cells.effects]
        table = score_deltas(predicted, measured.deltas, measured.scores, changed, known.center, contexts)
        for metric in DISCRIMINATION:
            table[f"discrimination_{metric}"] = discrimination_scores(
                predicted, measured.deltas, metric, known.own_genes, contexts
            )
        return table

    def _means(self, made: Any, reference: AnnData, weights: np.ndarray | None) -> pd.DataFrame:
        """Return weighted means over effects, one row for each set of weights, shape (R, Q)."""
        table = self.table(made, reference)
        weights = np.ones((1, len(table))) if weights is None else weights
        plain = [name for name in self.metrics if name in table]
        found = pd.DataFrame(_weighted(table[plain].to_numpy(dtype=np.float64), weights), columns=plain)
        for name in _CALIBRATED:
            found[f"calibrated_{name}"] = self._calibrated(name, table, reference, weights)
        return found[list(self.metrics)]

    def _calibrated(self, name: str, table: pd.DataFrame, reference: AnnData, weights: np.ndarray) -> np.ndarray:
        known = self._reference(reference)
        if known.base is None:
            return np.full(len(weights), np.nan)
        ceiling = self.table(known.ceiling, reference)[name].to_numpy()
        columns = np.stack(
            [table[name].to_numpy(), self.table(known.base, reference)[name].to_numpy(), ceiling], axis=1
        )
        columns[np.isnan(ceiling)] = np.nan
        score, base, top = _weighted(columns, weights).T
        room = (top - base) * (1 if METRICS[name] else -1)
        return np.divide(score - base, top - base, out=np.full(len(weights), np.nan), where=room > 0)

    def _reference(self, reference: AnnData) -> Reference:
        if self._kept is None or self._kept[0] != self.seed or self._kept[1] is not reference:
            self._tables = []
            known = Reference.of(
                reference,
                self._train,
                self.keys,
                n_top_genes=self.n_top_genes,
                n_comps=self.n_comps,
                max_cells=self.max_cells,
                seed=self.seed,
                ceiling=TechnicalDuplicate(),
            )
            self._kept = (self.seed, reference, known)
        return self._kept[2]

    def _predicted(self, made: Any, known: Reference) -> tuple[np.ndarray, PerturbedCells | None]:
        """Return predicted effects in the order of the measured ones, shape (Q, G), and the cells, if there are."""
        if isinstance(made, pd.DataFrame):
            return _rows(made, known.cells.effects, known.cells.genes, self.keys), None
        cells = PerturbedCells.read(made, self.keys, argument="predictions", made=True)
        cells = cells.over(known.cells.genes, argument="predictions")
        places = _places({effect: i for i, effect in enumerate(cells.effects)}, known.cells.effects, self.keys)
        groups = cells.moments()
        found = np.empty((len(places), len(known.cells.genes)))
        for row, (place, effect) in enumerate(zip(places, known.cells.effects, strict=True)):
            own = len(cells.effects) + cells.contexts.index(effect.context)
            plain = groups.mean[own] if groups.n[own] else known.plain(effect.context)
            found[row] = groups.mean[place] - plain
        return found, cells


def _weighted(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return means over rows that are numbers, shape (R, metrics); NaN where none is drawn."""
    known = np.isfinite(values)
    total = weights @ known
    sums = weights @ np.where(known, values, 0.0)
    return np.divide(sums, total, out=np.full(sums.shape, np.nan), where=total > 0)


def _rows(made: pd.DataFrame, effects: tuple[Effect, ...], genes: pd.Index, keys: EffectKeys) -> np.ndarray:
    if made.index.nlevels != (1 if keys.context_key is None else 2):
        wanted = "one row a perturbation" if keys.context_key is None else "an index of perturbation and context"
        raise DataError(f"predictions has an index of {made.index.nlevels} levels; give {wanted}.")
    if not made.columns.is_unique or not made.index.is_unique:
        raise DataError("predictions has a perturbation or a gene more than once; give each effect and gene once.")
    columns = made.columns.get_indexer(genes)
    if (missing := columns < 0).any():
        raise DataError(
            f"predictions lacks {int(missing.sum())} of {len(genes)} genes (first: {str(genes[missing][0])!r}); leave "
            "them out of the measured cells too, or use evaluate_perturbations, which scores the genes that all have."
        )
    labels = [(label, ALL) if keys.context_key is None else label for label in made.index]
    number = {keys.effect(str(label), str(context)): i for i, (label, context) in enumerate(labels)}
    if len(number) < len(labels):
        effects_of_rows = [keys.effect(str(label), str(context)) for label, context in labels]
        twice = next(effect for i, effect in enumerate(effects_of_rows) if number[effect] != i)
        raise DataError(
            f"predictions has {len(labels) - len(number)} rows that mean the same effect as another (first: "
            f"{keys.name_of(twice.targets)!r}); give each effect once."
        )
    return made.to_numpy(dtype=np.float64)[np.ix_(_places(number, effects, keys), columns)]


def _places(number: Mapping[Effect, int], effects: tuple[Effect, ...], keys: EffectKeys) -> list[int]:
    without = [
        keys.name_of(e.targets) + ("" if e.context == ALL else f" in {e.context}") for e in effects if e not in number
    ]
    if without:
        raise DataError(
            f"predictions lacks {len(without)} of {len(effects)} effects ({listing(without, most=5)}); predict all "
            "that were measured, or leave them out of the measured cells."
        )
    return [number[effect] for effect in effects]
