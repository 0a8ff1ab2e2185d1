"""What predicted effects are scored against: measured effects, their noise, and coordinates of cells.

Shapes: N cells, Q effects, C contexts, G genes, V variable genes, D components.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import sparse

from scforge.errors import DataError, listing
from scforge.eval.pertpy_distances import energy_distance, mean_distance
from scforge.eval.perturbation_baselines import KnownEffects
from scforge.eval.perturbation_cells import EffectKeys, PerturbedCells
from scforge.eval.perturbation_discrimination import own_genes
from scforge.eval.perturbation_metrics import de_genes, halves, of_whole
from scforge.eval.pseudobulk import Effects, Moments, effects_of, moments_of

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["CellSpace", "Reference", "known_effects"]

_N_VARIABLE = 2_000
_MOST_FITTED = 20_000


@dataclass(frozen=True)
class CellSpace:
    """Principal components of log1p CP10K, in which an effect on the mean is a shift.

    Attributes
    ----------
    genes
        The genes of the largest variance, int64, shape (V,).
    mean
        Their mean, shape (V,).
    axes
        Orthonormal axes, shape (D, V).
    """

    genes: np.ndarray
    mean: np.ndarray
    axes: np.ndarray

    @classmethod
    def fit(cls, expression: sparse.csr_matrix, *, n_comps: int, seed: int) -> CellSpace:
        """Find them on the 2,000 genes of the largest variance, of at most 20,000 cells drawn at random."""
        from sklearn.decomposition import PCA
        from sklearn.utils.sparsefuncs import mean_variance_axis

        rows = np.random.default_rng(seed).permutation(expression.shape[0])[:_MOST_FITTED]
        expression = expression[np.sort(rows)].astype(np.float64)
        _, variance = mean_variance_axis(expression, axis=0)
        genes = np.sort(np.argsort(-variance, kind="stable")[:_N_VARIABLE])
        n_comps = min(n_comps, min(expression.shape[0], len(genes)) - 1)
        if n_comps < 1:
            raise DataError(
                f"{expression.shape[0]} cells with {len(genes)} genes are too few for components; add cells."
            )
        pca = PCA(n_comps, svd_solver="arpack", random_state=seed).fit(expression[:, genes])
        return cls(genes, pca.mean_, pca.components_)

    def cells(self, expression: sparse.csr_matrix) -> np.ndarray:
        """Return the coordinates of cells, float64, shape (N, D)."""
        return np.asarray(expression[:, self.genes] @ self.axes.T - self.mean @ self.axes.T, dtype=np.float64)

    def shift(self, deltas: np.ndarray) -> np.ndarray:
        """Return what effects on the mean are there, shape (Q, D)."""
        return deltas[:, self.genes] @ self.axes.T


@dataclass
class Reference:
    """Measured effects with what figures need; see :class:`PerturbationPrediction`.

    Attributes
    ----------
    cells
        The measured cells, over the scored genes.
    effects
        The measured effects.
    changed
        Genes that change, bool, shape (Q, G).
    own_genes
        Perturbed genes, bool, shape (Q, G).
    center
        Mean training effect in the context of each effect, shape (Q, G); None without training cells.
    base
        The same as a prediction.
    ceiling
        What stands for a second experiment.
    """

    cells: PerturbedCells
    effects: Effects
    changed: np.ndarray
    own_genes: np.ndarray
    center: np.ndarray | None
    base: pd.DataFrame | None
    ceiling: Any
    space: CellSpace
    controls: dict[str, np.ndarray]
    coordinates: np.ndarray
    of_controls: dict[str, np.ndarray]
    max_cells: int
    seed: int
    spreads: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        real: AnnData,
        train: AnnData | None,
        keys: EffectKeys,
        *,
        n_top_genes: int | None,
        n_comps: int,
        max_cells: int,
        seed: int,
        ceiling: Any,
    ) -> Reference:
        """Measure what there is to measure.

        Raises
        ------
        DataError
            If a context has no controls, or the training lacks a gene.
        """
        cells = PerturbedCells.read(real, keys, argument="real")
        groups = cells.moments()
        cells.measured(groups, argument="real")
        if n_top_genes is not None and n_top_genes < len(cells.genes):
            # Ahlmann-Eltze et al. score the genes that are highest in the controls, too.
            share = groups.n[len(cells.effects) :].astype(np.float64)
            highest = np.argsort(-(share @ groups.mean[len(cells.effects) :]), kind="stable")[:n_top_genes]
            cells = cells.over(cells.genes[np.sort(highest)], argument="real")
            groups = cells.moments()
        effects = cells.measured(groups, argument="real")
        plain = {name: groups.mean[len(cells.effects) + i] for i, name in enumerate(cells.contexts)}
        center = base = None
        fitted, starts = cells, cells
        if train is not None:
            fitted = PerturbedCells.read(train, keys, argument="train").over(cells.genes, argument="train")
            starts = fitted
            known = known_effects(fitted, {effect.context for effect in cells.effects})
            center = np.array([known.mean(effect.context) for effect in cells.effects])
            labels = [(keys.name_of(e.targets), e.context) for e in cells.effects]
            index = pd.MultiIndex.from_tuples(labels) if keys.context_key else pd.Index([name for name, _ in labels])
            base = pd.DataFrame(center, index=index, columns=cells.genes)
            plain = dict(known.controls)
        space = CellSpace.fit(fitted.expression, n_comps=n_comps, seed=seed)
        rng = np.random.default_rng(seed)
        of_controls = {}
        for i, name in enumerate(starts.contexts):
            rows = np.flatnonzero(starts.groups == len(starts.effects) + i)
            if name in plain and len(rows):
                of_controls[name] = space.cells(starts.expression[_some(rows, max_cells, rng)])
        return cls(
            cells,
            effects,
            de_genes(effects.p_values),
            own_genes([effect.targets for effect in cells.effects], np.asarray(cells.genes)),
            center,
            base,
            ceiling,
            space,
            plain,
            space.cells(cells.expression),
            of_controls,
            max_cells,
            seed,
        )

    def plain(self, context: str) -> np.ndarray:
        """Return the mean of the controls that predictions start from, shape (G,)."""
        return self.controls[context]

    def energy(self, deltas: np.ndarray, made: PerturbedCells | None) -> np.ndarray:
        """Return the energy distance of each effect; of shifted controls where no cells are predicted, shape (Q,)."""
        shifts = self.space.shift(deltas)
        found = np.empty(len(deltas))
        for number, effect in enumerate(self.cells.effects):
            # The same cells for all methods, whatever was scored before.
            rng = np.random.default_rng((self.seed, number))
            target = self.coordinates[_some(np.flatnonzero(self.cells.groups == number), self.max_cells, rng)]
            if number not in self.spreads:
                self.spreads[number] = mean_distance(target, target)
            if made is None:
                predicted = self.of_controls[effect.context] + shifts[number]
            else:
                rows = np.flatnonzero(made.groups == made.effects.index(effect))
                predicted = self.space.cells(made.expression[_some(rows, self.max_cells, rng)])
            found[number] = energy_distance(predicted, target, within=(None, self.spreads[number]), unbiased=True)
        return found

    def duplicate(
        self, figures: Callable[[np.ndarray, Effects, np.ndarray, Reference], pd.DataFrame], *, n_splits: int
    ) -> pd.DataFrame:
        """Score one half of the cells as a prediction of the other, brought to whole groups where there is a formula.

        See :func:`technical_duplicate`; the energy distance between halves, too, is left as it is.
        """
        cells, rng = self.cells, np.random.default_rng(self.seed)
        n_effects, perturbed = len(cells.effects), np.arange(len(cells.effects))
        sizes = np.bincount(cells.groups, minlength=cells.n_groups)
        tables = []
        for _ in range(n_splits):
            half = halves(cells.groups, sizes, rng)
            both: Moments = moments_of(cells.expression, cells.groups + cells.n_groups * half, 2 * cells.n_groups)
            one = effects_of(both, perturbed, cells.controls).deltas
            other = effects_of(both, perturbed + cells.n_groups, cells.controls + cells.n_groups)
            table = of_whole(figures(one, other, de_genes(other.p_values), self))
            energy = np.full(n_effects, np.nan)
            for number in perturbed[sizes[:n_effects] > 1]:
                own = cells.groups == number
                sides = [_some(np.flatnonzero(own & (half == side)), self.max_cells, rng) for side in (0, 1)]
                energy[number] = energy_distance(*(self.coordinates[rows] for rows in sides), unbiased=True)
            tables.append(table.assign(energy_distance=energy))
        mean = sum(tables[1:], start=tables[0]) / n_splits
        mean.loc[(sizes[perturbed] < 2) | (sizes[cells.controls] < 2)] = np.nan
        return mean


def known_effects(train: PerturbedCells, contexts: set[str]) -> KnownEffects:
    """Measure the effects in training cells.

    Parameters
    ----------
    train
        The cells.
    contexts
        Where something is to be predicted.

    Raises
    ------
    DataError
        If there is no effect, or a context lacks controls.
    """
    groups = train.moments()
    effects = train.measured(groups, argument="train")
    plain = {
        name: groups.mean[len(train.effects) + i]
        for i, name in enumerate(train.contexts)
        if groups.n[len(train.effects) + i]
    }
    if without := sorted(contexts - {*plain}):
        raise DataError(
            f"train has no control cell in the contexts {listing(without)}, where predictions and baselines start; "
            "give a part of the controls there to train, and the others to real."
        )
    return KnownEffects(
        tuple(effect.targets for effect in train.effects),
        tuple(effect.context for effect in train.effects),
        effects.deltas,
        plain,
    )


def _some(rows: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    return rows if len(rows) <= most else np.sort(rng.permutation(rows)[:most])
