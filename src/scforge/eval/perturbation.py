"""Benchmark of predicted perturbation responses, with baselines and limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import anndata
import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_count, check_seed
from scforge._constants import UNS_KEY
from scforge.data.checks import content_mark
from scforge.data.expression import scale_difference
from scforge.errors import DataError, OptionError, listing
from scforge.eval.base import Benchmark, register_benchmark
from scforge.eval.expression import principal_components
from scforge.eval.generation import (
    SAME_CELL,
    check_complete,
    check_copies,
    check_disjoint,
    check_features,
    compare_beside,
    copied_rows,
    mark_of,
)
from scforge.eval.report import bootstrap_weights
from scforge.perturbation.baselines import perturbation_baselines
from scforge.perturbation.effects import PerturbedCells, columns_of, known_effects
from scforge.perturbation.keys import Effect, PerturbationKeys
from scforge.perturbation.metrics import (
    DISCRIMINATION,
    METRICS,
    TECHNICAL_DUPLICATE,
    de_genes,
    discrimination_scores,
    energy_distance,
    own_genes,
    score_deltas,
    technical_duplicate,
    warn_of_few,
)

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.eval.report import Kind, Report


_N_VARIABLE = 2_000

_MAX_FITTED = 20_000

_CALIBRATED = ("pearson_delta", "wmse")

_FEW_GENES = 0.5


class CellSpace:
    """Principal components of the most variable genes, in which an effect on the mean is a shift.

    They are fitted on 2,000 genes of at most 20,000 cells sampled at random.
    """

    def __init__(self, expression: sparse.csr_matrix, *, n_comps: int, seed: int) -> None:
        from sklearn.utils.sparsefuncs import mean_variance_axis

        rows = np.random.default_rng(seed).permutation(expression.shape[0])[:_MAX_FITTED]
        expression = expression[np.sort(rows)].astype(np.float64)
        _, variance = mean_variance_axis(expression, axis=0)
        self.genes = np.sort(np.argsort(-variance, kind="stable")[:_N_VARIABLE])
        self.pca = principal_components(expression[:, self.genes], n_comps, seed)

    def cells(self, expression: sparse.csr_matrix) -> np.ndarray:
        """Return the coordinates of cells, float64, shape (N, D)."""
        return self.pca.transform(expression[:, self.genes].astype(np.float64))

    def shift(self, deltas: np.ndarray) -> np.ndarray:
        """Return effects on the mean as shifts along the components, shape (Q, D)."""
        return deltas[:, self.genes] @ self.pca.components_.T


class Reference:
    """Measured effects, with the input for the metrics; see :class:`PerturbationPrediction`.

    Attributes
    ----------
    cells, effects
        The measured cells over the scored genes, and their effects.
    contexts
        Context of each effect.
    changed, own_genes
        Masks of changed genes and of perturbed genes, bool, shape (Q, G).
    base, center
        The mean training effect in the context of each effect as a prediction, and as an array of shape (Q, G); None
        without training cells.
    controls
        Mean of the controls in each context, shape (G,), relative to which predictions are defined.
    space, coordinates, of_controls
        Principal components, and the coordinates of the measured cells and of the controls for predictions.

    Raises
    ------
    DataError
        If a context has no controls, or training cells lack a gene.
    """

    def __init__(
        self,
        real: AnnData | PerturbedCells,
        train: AnnData | PerturbedCells | None,
        benchmark: PerturbationPrediction,
    ) -> None:
        keys, n_top_genes = benchmark.keys, benchmark.n_top_genes
        cells = starts = PerturbedCells.read(real, keys, argument="real")
        groups = cells.moments()
        if n_top_genes is not None and n_top_genes < len(cells.genes):
            # Ahlmann-Eltze et al. score the genes that are highest in the controls, too.
            share = groups.n[len(cells.effects) :].astype(np.float64)
            highest = np.argsort(-(share @ groups.mean[len(cells.effects) :]), kind="stable")[:n_top_genes]
            cells = starts = cells.over(cells.genes[np.sort(highest)], argument="real")
            groups = cells.moments()
        self.max_cells, self.seed = benchmark.max_cells, benchmark.seed
        self.cells, self.effects = cells, cells.measured(groups, argument="real")
        self.contexts = [effect.context for effect in cells.effects]
        self.changed = de_genes(self.effects.p_values)
        self.own_genes = own_genes([effect.targets for effect in cells.effects], np.asarray(cells.genes))
        self.controls = {name: groups.mean[len(cells.effects) + i] for i, name in enumerate(cells.contexts)}
        warn_of_few(len(cells.effects))
        self.base: pd.DataFrame | None = None
        self.trained: tuple[np.ndarray, Sequence[object]] | None = None
        self.center: np.ndarray | None = None
        if train is not None:
            starts = PerturbedCells.read(train, keys, argument="train").over(cells.genes, argument="train")
            train_effects = known_effects(starts, set(self.contexts))
            self.controls = dict(train_effects.controls)
            self.trained = train_effects.deltas, train_effects.contexts
            self.center = np.array([train_effects.mean(context) for context in self.contexts])
            self.base = pd.DataFrame(self.center, index=keys.index(cells.effects), columns=cells.genes)
        self.space = CellSpace(starts.expression, n_comps=benchmark.n_comps, seed=self.seed)
        self.coordinates = self.space.cells(cells.expression)
        rng = np.random.default_rng(self.seed)
        self.of_controls = {
            name: self.space.cells(starts.expression[_some(rows, self.max_cells, rng)])
            for name, rows in starts.control_rows().items()
            if name in self.controls
        }

    def discriminated(self, predicted: np.ndarray, measured: np.ndarray) -> dict[str, np.ndarray]:
        """Return the discrimination scores of effects, shape (Q,) each."""
        return {
            f"discrimination_{metric}": discrimination_scores(
                predicted, measured, metric, self.own_genes, self.contexts
            )
            for metric in DISCRIMINATION
        }

    def figures(self, deltas: np.ndarray, made: PerturbedCells | None) -> pd.DataFrame:
        """Score predicted effects and, if available, predicted cells."""
        effects = self.effects
        asked = (effects.deltas, effects.scores, self.changed, self.center, self.contexts, self.trained)
        table = score_deltas(deltas, *asked)
        return table.assign(**self.discriminated(deltas, effects.deltas), energy_distance=self.energy(deltas, made))

    def energy(self, deltas: np.ndarray, made: PerturbedCells | None) -> np.ndarray:
        """Return the energy distance of each effect, shape (Q,), from shifted controls if no cells are predicted."""
        shifts, distances = self.space.shift(deltas), np.empty(len(deltas))
        for number, effect in enumerate(self.cells.effects):
            # The same cells for all methods, whatever was scored before.
            rng = np.random.default_rng((self.seed, number))
            target = self.coordinates[_some(self.cells.rows(effect), self.max_cells, rng)]
            if made is None:
                predicted = self.of_controls[effect.context] + shifts[number]
            else:
                predicted = self.space.cells(made.expression[_some(made.rows(effect), self.max_cells, rng)])
            distances[number] = energy_distance(predicted, target)
        return distances

    def duplicate(self) -> pd.DataFrame:
        """Score one half of the cells as a prediction of the other half; see :func:`technical_duplicate`."""
        cells = self.cells

        def more(
            predicted: np.ndarray, measured: np.ndarray, half: np.ndarray, rng: np.random.Generator
        ) -> dict[str, np.ndarray]:
            energy = np.full(len(cells.effects), np.nan)
            for number, effect in enumerate(cells.effects):
                rows = cells.rows(effect)
                if len(rows) > 1:
                    sides = [_some(rows[half[rows] == side], self.max_cells, rng) for side in (0, 1)]
                    energy[number] = energy_distance(*(self.coordinates[side] for side in sides))
            return {**self.discriminated(predicted, measured), "energy_distance": energy}

        asked = (cells.groups, cells.controls, self.center, self.contexts, self.trained)
        return technical_duplicate(cells.expression, *asked, seed=self.seed, more=more)


def _some(rows: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    return rows if len(rows) <= most else np.sort(rng.permutation(rows)[:most])


def _fingerprint(made: AnnData | PerturbedCells | pd.DataFrame | str) -> Any:
    """Return a fingerprint of predicted or measured effects, or None if there is none."""
    if not isinstance(made, PerturbedCells):
        return mark_of(made)
    names = hash((made.effects, made.contexts, tuple(made.genes)))
    return content_mark(made.expression), content_mark(made.groups), names


@register_benchmark("perturbation_prediction")
class PerturbationPrediction(Benchmark):
    """Accuracy of predicted effects of perturbations that were not used for training.

    Predictions are either cells or effects. Cells are an AnnData with the columns below. Effects are a DataFrame of
    changes in mean log1p CP10K with one column per gene and one row per perturbation (with contexts: an index of
    perturbation and context). Effects of predicted cells are relative to the predicted controls of the context. Without
    predicted controls, they are relative to the training controls, and without training data to the measured controls.

    The metrics are averaged over effects:

    - the metrics of :func:`~scforge.perturbation.metrics.score_deltas`; changed genes are determined by Welch's
      t-test at a false discovery rate of 5%,
    - ``discrimination_l1``, ``_l2`` and ``_cosine`` (:func:`~scforge.perturbation.metrics.discrimination_scores`,
      over all scored effects of the context, without the perturbed genes),
    - ``energy_distance`` between predicted and measured cells on principal components of the training cells (unbiased).
      Predicted effects without cells are added to the controls. Groups with one cell are left out,
    - ``calibrated_pearson_delta`` and ``calibrated_wmse``, scaled to 0 for the mean training effect and 1 for the
      technical duplicate, over the effects with enough cells for a duplicate. NaN without training cells
      (:meth:`trained_on`), or if the technical duplicate is not better than the mean.

    Parameters
    ----------
    perturbation_key
        Column of ``obs`` with the perturbation.
    control
        Label of control cells.
    context_key
        Column of ``obs`` with the context, e.g. the cell type; effects are relative to controls of the same context.
    separator
        Separator between the targets of a combination. If None, labels are not split.
    layer
        Key in layers with counts or log1p CP10K. If None, reads X.
    n_top_genes
        Number of genes to score, those with the highest mean in the controls. If None, scores all genes.
    n_comps
        Number of principal components for the energy distance; fewer if the data have fewer.
    max_cells
        Maximum number of cells per group in the energy distance.
    seed
        Random seed for the choice of these cells and of the halves.

    Warns
    -----
    ScforgeWarning
        If fewer than ten effects are scored.

    References
    ----------
    Ahlmann-Eltze et al. (Nat Methods 2025), Mejia et al. (arXiv:2506.22641), Wu et al. (arXiv:2408.10609).

    Examples
    --------
    >>> import anndata, numpy as np, pandas as pd
    >>> names = np.repeat(["control", *"ABCDEFGHIJ"], 30)
    >>> counts = np.random.default_rng(0).poisson(5.0, size=(330, 20)).astype("float32")
    >>> for gene in range(10):
    ...     counts[30 * (gene + 1) : 30 * (gene + 2), gene] *= 3
    >>> cells = anndata.AnnData(counts, pd.DataFrame({"target": names}, index=[f"cell{i}" for i in range(330)]))
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
        check_count("max_cells", max_cells, "cells", least=2)
        self.keys = PerturbationKeys(perturbation_key, control, separator, context_key, layer)
        self.n_top_genes = n_top_genes
        self.n_comps = n_comps
        self.max_cells = max_cells
        self.seed = check_seed(seed)
        self._train: AnnData | PerturbedCells | None = None
        # What was read last: the seed and the data it belongs to, and the tables of what was scored against it.
        self._kept: tuple[int, Any, Reference] | None = None
        self._tables: list[tuple[Any, pd.DataFrame]] = []

    def trained_on(self, train: AnnData) -> PerturbationPrediction:
        """Set the training cells, which define the components, the mean effect and the controls.

        Returns the same benchmark object.
        """
        self._train, self._kept, self._tables = train, None, []
        return self

    def check(self, reference: AnnData) -> None:
        """Raise :class:`~scforge.errors.DataError` if no effect can be measured."""
        self._reference(reference)

    def run(self, made: AnnData | pd.DataFrame | str, reference: AnnData) -> dict[str, float]:
        """Return each metric averaged over effects; see :meth:`table` for NaN values.

        Raises
        ------
        DataError
            If the data cannot be read, or an effect is not predicted.
        """
        figures = self._means(made, reference, None)
        return {name: float(value) for name, value in figures.iloc[0].items()}

    def resampled(
        self, made: AnnData | pd.DataFrame | str, reference: AnnData, *, n: int, seed: int
    ) -> pd.DataFrame | None:
        """Return the metrics over bootstrapped perturbations, or contexts if there is only one perturbation.

        Returns None if there is only one effect.
        """
        groups = self._perturbations(reference)
        if len(groups) < 2:
            return None
        return self._means(made, reference, bootstrap_weights(len(groups), n, seed=seed, groups=groups))

    def n_units(self, reference: AnnData) -> int:
        """Return the number of perturbations, or the number of contexts if there is only one perturbation."""
        return int(self._perturbations(reference).max()) + 1

    def _perturbations(self, reference: AnnData) -> np.ndarray:
        """Return the index of the perturbation of each effect, or of the effect if there is only one perturbation."""
        effects = self._reference(reference).cells.effects
        groups = pd.factorize(pd.Series([effect.targets for effect in effects]))[0]
        return groups if groups.max() else np.arange(len(effects))

    def table(self, made: AnnData | pd.DataFrame | str, reference: AnnData) -> pd.DataFrame:
        """Return the metrics of each effect.

        Returns
        -------
        One row per effect: ``perturbation``, ``context``, ``n_cells``, ``n_controls`` and all metrics except the
        calibrated ones, which are computed from means. Values are NaN if a metric is undefined, and for the technical
        duplicate of an effect with fewer than two cells.
        """
        truth = self._reference(reference)
        mark = _fingerprint(made)
        for its_mark, table in self._tables:
            if mark is not None and its_mark == mark:
                return table
        described = pd.DataFrame(
            {
                "perturbation": [self.keys.label(effect.targets) for effect in truth.cells.effects],
                "context": truth.contexts,
                "n_cells": truth.effects.n_cells,
                "n_controls": truth.effects.n_controls,
            }
        )
        figures = truth.duplicate() if isinstance(made, str) else truth.figures(*self._predicted(made, truth))
        table = pd.concat([described, figures], axis=1)
        self._tables.append((mark, table))
        return table

    def deltas(self, made: AnnData | pd.DataFrame, reference: AnnData) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return predicted and measured effects, one row per effect and one column per gene, e.g. for a plot."""
        truth = self._reference(reference)
        names = [(self.keys.label(effect.targets), effect.context) for effect in truth.cells.effects]
        index = pd.MultiIndex.from_tuples(names, names=["perturbation", "context"])
        both = (self._predicted(made, truth)[0], truth.effects.deltas)
        predicted, measured = (pd.DataFrame(values, index=index, columns=truth.cells.genes) for values in both)
        return predicted, measured

    def _means(self, made: Any, reference: AnnData, weights: np.ndarray | None) -> pd.DataFrame:
        """Return weighted means over effects, one row for each set of `weights`, shape (R, Q)."""
        table, base = self.table(made, reference), self._reference(reference).base
        weights = np.ones((1, len(table))) if weights is None else weights
        plain = [name for name in self.metrics if name in table]
        means = pd.DataFrame(_weighted(table[plain].to_numpy(dtype=np.float64), weights), columns=plain)
        for name in _CALIBRATED:
            means[f"calibrated_{name}"] = np.nan
            if base is not None:
                methods = (made, base, TECHNICAL_DUPLICATE)
                columns = np.stack([self.table(method, reference)[name] for method in methods], axis=1)
                columns[np.isnan(columns[:, 2])] = np.nan
                score, low, top = _weighted(columns, weights).T
                room = (top - low) * (1 if METRICS[name] else -1) > 0
                means.loc[room, f"calibrated_{name}"] = (score[room] - low[room]) / (top[room] - low[room])
        return means[list(self.metrics)]

    def _reference(self, reference: AnnData | PerturbedCells) -> Reference:
        mark = _fingerprint(reference)
        if self._kept is None or mark is None or self._kept[:2] != (self.seed, mark):
            self._tables = []
            self._kept = (self.seed, mark, Reference(reference, self._train, self))
        return self._kept[2]

    def _predicted(self, made: Any, truth: Reference) -> tuple[np.ndarray, PerturbedCells | None]:
        """Return predicted effects in the order of the measured effects, shape (Q, G), and predicted cells, if any."""
        cells = None
        if isinstance(made, pd.DataFrame):
            number = {effect: row for row, effect in enumerate(self.keys.effects(made))}
        else:
            cells = PerturbedCells.read(made, self.keys, argument="predictions", made=True)
            cells = cells.over(truth.cells.genes, argument="predictions")
            number = {effect: row for row, effect in enumerate(cells.effects)}
        effects = truth.cells.effects
        if without := [effect for effect in effects if effect not in number]:
            names = listing(self.keys.titles(without), most=5)
            raise DataError(
                f"is missing {len(without)} of {len(effects)} measured effects ({names}); add these effects.",
                argument="predictions",
            )
        rows = [number[effect] for effect in effects]
        if cells is None:
            columns = columns_of(made.columns, truth.cells.genes, "predictions")
            return made.to_numpy(dtype=np.float64)[np.ix_(rows, columns)], None
        groups = cells.moments()
        controls = [
            groups.mean[own] if groups.n[own] else truth.controls[effect.context]
            for own, effect in zip(cells.controls[rows], effects, strict=True)
        ]
        return groups.mean[rows] - np.array(controls), cells


def _weighted(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return weighted means over rows, ignoring NaN, shape (R, metrics); NaN if no values are sampled."""
    is_finite = np.isfinite(values)
    total = weights @ is_finite
    sums = weights @ np.where(is_finite, values, 0.0)
    return np.divide(sums, total, out=np.full(sums.shape, np.nan), where=total > 0)


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
    """Compare predicted effects with all baselines and a technical duplicate on the same held-out cells.

    Baselines (:func:`~scforge.perturbation.baselines.baseline_effects`) use `train` only. The function first checks for
    leakage: cells and effects that are also in `train`, predictions that copy held-out cells, and features that were
    computed from held-out cells.

    Parameters
    ----------
    real
        Held-out cells, as counts or log1p of counts per 10,000: perturbations (in a context) that are not in `train`,
        and controls that are not in `train`.
    predictions
        Predicted cells, with the columns `perturbation_key` and `context_key`, or predicted effects as for
        :class:`PerturbationPrediction`, or the result of ``model.predict()`` for the task ``"perturbation"``. For
        several methods, a mapping from method name to predictions.
    train
        Training cells with their controls, from which baselines are computed.
    perturbation_key, control, context_key, separator, layer, n_top_genes
        See :class:`PerturbationPrediction`.
    gene_features
        Target vectors from a model, e.g. its gene embeddings, one row per target, for the linear baseline
        ``linear_embedding``. A mapping from name to vectors adds a baseline ``linear_<name>`` for each.
    kinds
        Mapping from method name to ``"model"`` or ``"untrained"``. The default is ``"model"``.
    seeds, intervals, title
        See :func:`compare`.

    Returns
    -------
    The report. Its notes list the genes that were left out because a method or `train` lacks them.

    Raises
    ------
    DataError
        If the data cannot be read, an effect is not predicted, or there is leakage.
    OptionError
        If a method has the name of a baseline.

    Warns
    -----
    ScforgeWarning
        If a few test cells equal training cells.

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
    keys = PerturbationKeys(perturbation_key, control, separator, context_key, layer)
    if isinstance(predictions, anndata.AnnData | pd.DataFrame):
        predictions = {"prediction": predictions}
    named = {name: _task_effects(prediction, keys) for name, prediction in predictions.items()}
    features = {} if gene_features is None else gene_features
    features = {"embedding": features} if isinstance(features, pd.DataFrame) else dict(features)
    if "pca" in features:
        raise OptionError(
            "contains the name 'pca', which is reserved for a built-in baseline; choose another name.",
            argument="gene_features",
        )
    held_out = PerturbedCells.read(real, keys, argument="real")
    trained = whole = PerturbedCells.read(train, keys, argument="train")
    check_disjoint(trained.names, held_out.names, what="cells")
    check_disjoint(keys.titles(trained.effects), keys.titles(held_out.effects), what="effects")
    for name, frame in features.items():
        check_features(frame, real, keys, f"gene_features[{name!r}]")
    check_complete(train, "train", real, layer=layer, layer_of_whole=layer)
    genes, notes = _common_genes(held_out.genes, trained.genes, named)
    held_out, trained = held_out.over(genes, argument="real"), trained.over(genes, argument="train")
    check_copies(copied_rows(held_out.expression, trained.expression), f"test cells {SAME_CELL}")
    controls = [Effect((), context) for context in {effect.context for effect in held_out.effects}]
    plain = [cells.expression[np.concatenate([cells.rows(e) for e in controls])] for cells in (trained, held_out)]
    _check_scale(plain[0], plain[1], "the training controls")
    benchmark = PerturbationPrediction(perturbation_key, control, context_key, separator, n_top_genes=n_top_genes)
    # It takes cells that are read already, too.
    benchmark.trained_on(trained).check(held_out)
    checked: dict[str, PerturbedCells | pd.DataFrame] = {}
    for name, prediction in named.items():
        if isinstance(prediction, pd.DataFrame):
            effects = keys.effects(prediction)
            checked[name] = prediction[genes]
        else:
            cells = _checked_cells(prediction, f"predictions[{name!r}]", genes, keys, held_out, real)
            checked[name], effects = cells, list(cells.effects)
            own = (cells.groups >= len(cells.effects)).any()
            notes.append(f"Effects of {name} are relative to {'its own' if own else 'the training'} controls.")
        _check_effects(benchmark, name, checked[name], held_out)
        if more := [effect for effect in effects if effect not in held_out.effects]:
            notes.append(
                f"{name} predicts {len(more)} effects that were not measured and are not scored: "
                f"{listing(keys.titles(more), most=5)}."
            )
    # What is scored is no reason to know less of the training.
    baselines: dict[str, Any] = {
        name: frame[genes] for name, frame in perturbation_baselines(whole, held_out.effects, keys, features).items()
    }
    targets = {target for effect in held_out.effects for target in effect.targets}
    if n_missing := len(targets - {str(gene) for gene in whole.genes}):
        notes.append(
            f"{len(targets) - n_missing} of {len(targets)} targets are genes of the data; baselines that use the gene "
            "of a target predict the mean training effect for the others."
        )
    report = compare_beside(
        benchmark,
        "predictions",
        checked,
        {**baselines, TECHNICAL_DUPLICATE: TECHNICAL_DUPLICATE},
        held_out,
        kinds=kinds,
        ceiling=TECHNICAL_DUPLICATE,
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
            f"real has {real.n_vars} genes and train {train.n_vars}; counts are normalized by their total over the "
            "genes of each data set."
        )
    report.notes.append(
        "Effects are changes of the mean log1p CP10K against controls of the same context. Baselines use only the "
        f"training cells. {TECHNICAL_DUPLICATE} is one half of the held-out cells as a prediction of the other, "
        "corrected to whole groups. Calibrated metrics: 0 is the mean training effect, 1 the technical duplicate."
    )
    return report


def _task_effects(prediction: AnnData | pd.DataFrame, keys: PerturbationKeys) -> AnnData | pd.DataFrame:
    """Return the effects if the input is a prediction of the perturbation task, otherwise the input."""
    if (
        isinstance(prediction, pd.DataFrame)
        or "predicted" not in prediction.uns.get(UNS_KEY, {})
        or "delta" not in prediction.layers
    ):
        return prediction
    labels = [prediction.obs["perturbation"].astype(str)]
    if keys.context is not None:
        labels.append(prediction.obs["context"].astype(str))
    index = pd.Index(labels[0]) if len(labels) == 1 else pd.MultiIndex.from_arrays(labels)
    return pd.DataFrame(
        np.asarray(prediction.layers["delta"], dtype=np.float64), index=index, columns=prediction.var_names
    )


def _common_genes(real: pd.Index, train: pd.Index, named: Mapping[str, Any]) -> tuple[pd.Index, list[str]]:
    """Return the shared genes in the order of the measured cells, and notes about missing genes."""
    columns = {"train": train} | {
        name: prediction.columns if isinstance(prediction, pd.DataFrame) else prediction.var_names
        for name, prediction in named.items()
    }
    genes, notes = real, []
    for name, available in columns.items():
        if len(missing := real[~real.isin(available)]):
            notes.append(
                f"{name} lacks {len(missing)} of the {len(real)} measured genes (first: {str(missing[0])!r}), which "
                "are not scored."
            )
            genes = genes[genes.isin(available)]
    if len(genes) < max(2, _FEW_GENES * len(real)):
        raise DataError(
            f"only {len(genes)} of {len(real)} measured genes are in all of {listing(columns)}; use the same gene "
            "names in all of them."
        )
    return genes, notes


def _checked_cells(
    adata: AnnData, what: str, genes: pd.Index, keys: PerturbationKeys, held_out: PerturbedCells, real: AnnData
) -> PerturbedCells:
    """Return predicted cells over the scored genes, after checking their scale and checking for copies."""
    layer = keys.layer if keys.layer in adata.layers else None
    check_complete(adata, what, real, layer=layer, layer_of_whole=keys.layer)
    cells = PerturbedCells.read(adata, keys, argument=what, made=True).over(genes, argument=what)
    perturbed, measured = (source.expression[source.groups < len(source.effects)] for source in (cells, held_out))
    _check_scale(perturbed, measured, f"the cells of {what}", profiles=True)
    check_copies(copied_rows(perturbed, measured), f"cells of {what} are identical to held-out cells")
    return cells


def _check_scale(predicted: sparse.csr_matrix, real: sparse.csr_matrix, what: str, *, profiles: bool = False) -> None:
    """Raise an error if the scale of the cells over the shared genes differs from that of the measured cells."""
    if difference := scale_difference(predicted, real, profiles=profiles):
        raise DataError(f"{what} have {difference}; scale both to 10,000, or pass counts of all genes.")


def _check_effects(
    benchmark: PerturbationPrediction, name: str, prediction: PerturbedCells | pd.DataFrame, real: PerturbedCells
) -> None:
    """Raise an error if predicted effects equal the measured effects."""
    predicted, measured = (table.to_numpy() for table in benchmark.deltas(prediction, real))
    size = np.abs(measured).max(axis=1)
    same = (np.abs(predicted - measured).max(axis=1) <= 1e-4 * size) & (size > 0)
    if same.any():
        n_same = f"{int(same.sum())} of {len(same)} effects"
        raise DataError(
            f"[{name!r}] equals the measurement in the held-out cells for {n_same}; pass predictions that "
            "were made without these cells.",
            argument="predictions",
        )
