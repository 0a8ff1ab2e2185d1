"""Cells read once into means of perturbed cells and controls, and the effects that predictors know and predict.

Shapes: N cells, G genes, Q effects, C contexts, P groups of cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._columns import check_column, texts_of
from scforge.data.cells import Cells
from scforge.data.checks import check_is_adata
from scforge.data.expression import log_expression, log_normalized
from scforge.errors import DataError, did_you_mean, listing
from scforge.perturbation.keys import ALL, Effect, PerturbationKeys, parse_perturbations

if TYPE_CHECKING:
    from anndata import AnnData

_BLOCK = 4096
"""Number of cells that are read at once."""


@dataclass(frozen=True)
class Moments:
    """Mean and spread of the log1p CP10K values of groups of cells.

    Attributes
    ----------
    n
        Number of cells in each group, int64, shape (P,).
    mean
        Mean of each gene, float64, shape (P, G); 0 for a group without cells.
    variance
        Variance of each gene, with n - 1 in the denominator, float64, shape (P, G); 0 for groups of fewer than two
        cells.
    """

    n: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


@dataclass(frozen=True)
class Effects:
    """Mean effects of perturbations.

    Attributes
    ----------
    deltas
        Mean log1p CP10K of the perturbed cells minus the mean of their controls, float64, shape (Q, G).
    scores
        Welch's t statistic of each gene, float64, shape (Q, G); 0 if neither group varies.
    n_cells, n_controls
        Number of cells of each of the two means, int64, shape (Q,).
    freedom
        Welch-Satterthwaite degrees of freedom of each t statistic, float64, shape (Q, G); 0 if neither group varies.
    """

    deltas: np.ndarray
    scores: np.ndarray
    n_cells: np.ndarray
    n_controls: np.ndarray
    freedom: np.ndarray

    @property
    def p_values(self) -> np.ndarray:
        """Two-sided p-values of Welch's t-test, float64, shape (Q, G); 1 if the test is not defined.

        The test is not defined for genes that do not vary, and for groups of one cell, which have no standard
        deviation.
        """
        from scipy import stats

        is_defined = (self.freedom > 0) & (np.minimum(self.n_cells, self.n_controls) > 1)[:, None]
        p_values = np.ones_like(self.scores)
        p_values[is_defined] = 2 * stats.t.sf(np.abs(self.scores[is_defined]), self.freedom[is_defined])
        return p_values


def moments(cells: Cells, rows: np.ndarray, codes: np.ndarray, n_groups: int) -> Moments:
    """Return mean and variance of groups of cells; `rows` are ascending, and `codes` are their groups."""
    blocks = (slice(start, start + _BLOCK) for start in range(0, max(len(rows), 1), _BLOCK))
    return _moments(((log_expression(cells, rows[block]), codes[block]) for block in blocks), n_groups)


def moments_of(expression: sparse.csr_matrix, codes: np.ndarray, n_groups: int) -> Moments:
    """Return mean and variance of groups of rows in a matrix of shape (N, G); rows with code -1 are ignored."""
    chosen = codes >= 0
    return _moments([(expression[chosen], codes[chosen])], n_groups)


def effects_of(groups: Moments, perturbed: np.ndarray, controls: np.ndarray) -> Effects:
    """Compare each of Q groups of perturbed cells with the group of its controls."""
    deltas = groups.mean[perturbed] - groups.mean[controls]
    errors = [groups.variance[side] / np.maximum(groups.n[side], 1)[:, None] for side in (perturbed, controls)]
    spread = errors[0] + errors[1]
    scores = np.divide(deltas, np.sqrt(spread), out=np.zeros_like(deltas), where=spread > 0)
    parts = sum(
        np.square(error) / np.maximum(groups.n[side] - 1, 1)[:, None]
        for error, side in zip(errors, (perturbed, controls), strict=True)
    )
    freedom = np.divide(np.square(spread), parts, out=np.zeros_like(deltas), where=parts > 0)
    return Effects(deltas, scores, groups.n[perturbed], groups.n[controls], freedom)


def _moments(blocks: Iterable[tuple[sparse.csr_matrix, np.ndarray]], n_groups: int) -> Moments:
    """Return the moments of cells that are read in blocks; each block comes with the groups of its cells."""
    n, total, squares = np.zeros(n_groups, dtype=np.int64), np.float64(0), np.float64(0)
    for expression, codes in blocks:
        members = sparse.csr_matrix((np.ones(len(codes)), (codes, np.arange(len(codes)))), shape=(n_groups, len(codes)))
        n += np.bincount(codes, minlength=n_groups)
        total = total + (members @ expression).toarray()
        squares = squares + (members @ expression.multiply(expression).tocsr()).toarray()
    mean = total / np.maximum(n, 1)[:, None]
    # Rounding must not make a variance negative.
    variance = np.maximum(squares - n[:, None] * mean**2, 0.0) / np.maximum(n - 1, 1)[:, None]
    variance[n < 2] = 0.0
    return Moments(n, mean, variance)


@dataclass(frozen=True)
class Conditions:
    """Effects that cells belong to.

    Attributes
    ----------
    effects
        The Q effects of the perturbed cells, sorted.
    contexts
        Names of the C contexts, sorted.
    groups
        Index of the effect of each cell, for controls Q plus the index of the context, and -1 for cells without a
        label, int64, shape (N,).
    """

    effects: tuple[Effect, ...]
    contexts: tuple[str, ...]
    groups: np.ndarray

    @classmethod
    def from_columns(cls, column: Callable[[str], pd.Series], keys: PerturbationKeys) -> Conditions:
        """Read perturbations and contexts from columns of obs; cells may lack a label.

        Raises
        ------
        DataError
            If a column is missing or cannot be read, or there are no controls.
        """
        labels = texts_of(column(keys.perturbation), key=keys.perturbation, argument="perturbation_key")
        labeled, contexts = np.asarray(labels.notna()), [ALL] * len(labels)
        if keys.context is not None:
            texts = texts_of(column(keys.context), key=keys.context, argument="context_key")
            labeled, contexts = labeled & np.asarray(texts.notna()), list(texts)
        targets = parse_perturbations(pd.DataFrame({keys.perturbation: labels[labeled]}), keys)
        return cls(*_grouped(targets, list(itertools.compress(contexts, labeled)), labeled))

    @cached_property
    def controls(self) -> np.ndarray:
        """Group of the controls of each effect, int64, shape (Q,)."""
        return np.array([len(self.effects) + self.contexts.index(e.context) for e in self.effects], dtype=np.int64)

    @property
    def is_perturbed(self) -> np.ndarray:
        """Perturbed cells, bool, shape (N,)."""
        return (self.groups >= 0) & (self.groups < len(self.effects))

    def effects_in(self, rows: np.ndarray) -> list[Effect]:
        """Return the effects of the cells `rows`, each once."""
        return [self.effects[group] for group in np.unique(self.groups[rows]) if 0 <= group < len(self.effects)]

    def rows(self, effect: Effect) -> np.ndarray:
        """Return the rows of the cells of an effect, or of the context's controls if it has no targets, int64."""
        pairs = [*self.effects, *(Effect((), context) for context in self.contexts)]
        return np.flatnonzero(self.groups == pairs.index(effect)) if effect in pairs else np.empty(0, dtype=np.int64)

    def control_rows(self, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Return a mapping from context to its controls among `rows`, without contexts that have none."""
        rows = np.arange(len(self.groups)) if rows is None else rows
        groups = self.groups[rows] - len(self.effects)
        return {name: rows[groups == code] for code, name in enumerate(self.contexts) if (groups == code).any()}


def _grouped(
    targets: Sequence[tuple[str, ...]], contexts: Sequence[str], is_labeled: np.ndarray
) -> tuple[tuple[Effect, ...], tuple[str, ...], np.ndarray]:
    """Return the fields of :class:`Conditions` from targets and context of each labeled cell."""
    pairs = {Effect(*pair) for pair in set(zip(targets, contexts, strict=True))}  # few, of many cells
    effects = tuple(sorted(effect for effect in pairs if effect.targets))
    names = tuple(sorted({effect.context for effect in pairs}))
    numbers = {effect: i for i, effect in enumerate([*effects, *(Effect((), name) for name in names)])}
    groups = np.full(len(is_labeled), -1, dtype=np.int64)
    groups[is_labeled] = [numbers[pair] for pair in zip(targets, contexts, strict=True)]  # type: ignore[index]
    return effects, names, groups


@dataclass(frozen=True)
class PerturbedCells(Conditions):
    """Cells in memory with the effects that they belong to; each has a label.

    Attributes
    ----------
    expression
        log1p CP10K, CSR, float32 or float64, shape (N, G).
    genes
        Names of the G genes.
    names
        Names of the N cells.
    """

    expression: sparse.csr_matrix
    genes: pd.Index
    names: pd.Index

    @classmethod
    def read(
        cls, adata: AnnData | PerturbedCells, keys: PerturbationKeys, *, argument: str, made: bool = False
    ) -> PerturbedCells:
        """Read cells with their perturbations.

        Parameters
        ----------
        adata
            Counts, or log1p of counts per 10,000; cells that were already read are returned unchanged.
        keys
            Its columns.
        argument
            Name of the cells in messages.
        made
            Whether the cells are predictions. Predictions need neither controls nor exact totals, and are read from X
            if the layer is missing.

        Raises
        ------
        DataError
            If a column is missing or incomplete, gene names are not unique, or the values are neither counts nor log1p
            CP10K.
        """
        if isinstance(adata, PerturbedCells):
            return adata
        check_is_adata(adata, argument=argument)
        check_column("perturbation_key", keys.perturbation, adata.obs)
        labels = adata.obs[[keys.perturbation]].astype(object)
        if made:
            # Predicted controls are not needed, but only labels with the control among them are read.
            labels = pd.concat([labels, pd.DataFrame({keys.perturbation: [keys.control]}, index=["control"])])
        targets = parse_perturbations(labels, keys)[: adata.n_obs]
        contexts = [ALL] * adata.n_obs
        if keys.context is not None:
            check_column("context_key", keys.context, adata.obs)
            texts = texts_of(adata.obs[keys.context], key=keys.context, argument="context_key")
            if n_missing := int(texts.isna().sum()):
                raise DataError(
                    f"is missing for {n_missing} cells of {argument}; fill in the values or drop these cells.",
                    context_key=keys.context,
                )
            contexts = list(texts)
        # Models predict into X, whatever layer the measured values are in.
        layer = None if made and keys.layer not in adata.layers else keys.layer
        expression = log_normalized(adata, layer, argument=argument, made=made)
        is_labeled = np.ones(adata.n_obs, dtype=bool)
        return cls(*_grouped(targets, contexts, is_labeled), expression, adata.var_names, adata.obs_names)

    def over(self, genes: pd.Index, *, argument: str) -> PerturbedCells:
        """Return the cells over these genes, in this order.

        Raises
        ------
        DataError
            If a gene is missing.
        """
        columns = columns_of(self.genes, genes, argument)
        return replace(self, expression=self.expression[:, columns].tocsr(), genes=genes)

    def moments(self) -> Moments:
        """Return the mean and variance of each group."""
        return moments_of(self.expression, self.groups, len(self.effects) + len(self.contexts))

    def measured(self, groups: Moments, *, argument: str) -> Effects:
        """Return the effects relative to the controls of the same context.

        Raises
        ------
        DataError
            If there is no effect, or a context has no controls.
        """
        if not self.effects:
            raise DataError("contains only controls, so there are no effects; add perturbed cells.", argument=argument)
        without = sorted({e.context for e, n in zip(self.effects, groups.n[self.controls], strict=True) if not n})
        if without:
            raise DataError(
                f"has no control cells in the contexts {listing(without)}; add controls for these contexts.",
                argument=argument,
            )
        return effects_of(groups, np.arange(len(self.effects)), self.controls)


def columns_of(names: pd.Index, genes: pd.Index, argument: str) -> np.ndarray:
    """Return the positions of genes among names, int64. Raises an error if a gene is missing."""
    columns = names.get_indexer(genes)
    if (missing := columns < 0).any():
        first = f"{str(genes[missing][0])!r}{did_you_mean(genes[missing][0], names[:5000])}"
        n_missing = int(missing.sum())
        raise DataError(
            f"lacks {n_missing} of {len(genes)} genes (first: {first}); use only genes that are in both data sets.",
            argument=argument,
        )
    return columns


@dataclass(frozen=True)
class KnownEffects:
    """Effects measured in training cells.

    Attributes
    ----------
    effects
        The N effects; all have the same context if there is only one, e.g. one cell type.
    deltas
        Change in mean log1p CP10K relative to the controls of the context, float, shape (N, G).
    controls
        Mean log1p CP10K of the controls in each context, including contexts without effects, shape (G,) each. Contexts
        without effects may come from other data and contain NaN for genes that were not measured.
    n_cells
        Number of cells per effect, shape (N,). If None, all effects have the same weight.
    """

    effects: Sequence[Effect]
    deltas: np.ndarray
    controls: Mapping[str, np.ndarray]
    n_cells: np.ndarray | None = None

    @property
    def contexts(self) -> list[str]:
        """Context of each effect."""
        return [effect.context for effect in self.effects]

    def within(self, context: str) -> np.ndarray:
        """Return the indices of the effects in a context, or in all contexts if it has no effects, int64."""
        own = [i for i, name in enumerate(self.contexts) if name == context]
        return np.array(own or range(len(self.effects)), dtype=np.int64)

    def same(self, targets: tuple[str, ...]) -> np.ndarray:
        """Return the indices of the effects of a perturbation in any context, int64."""
        return np.array([i for i, effect in enumerate(self.effects) if effect.targets == targets], dtype=np.int64)

    def like(self, effect: Effect) -> tuple[np.ndarray, bool]:
        """Return the indices of the effects to predict from, and whether they are of the same perturbation."""
        same = self.same(effect.targets)
        return (same, True) if len(same) else (self.within(effect.context), False)

    def of(self, targets: tuple[str, ...], context: str, default: np.ndarray) -> np.ndarray:
        """Return the mean effect of a perturbation in a context, else in other contexts, else `default`, shape (G,)."""
        same = self.same(targets)
        here = [i for i in same if self.effects[i].context == context]
        return self.deltas[here or same].mean(axis=0) if len(same) else default

    def mean(self, context: str) -> np.ndarray:
        """Return the mean effect in a context, or in all contexts if it has no effects, shape (G,)."""
        return self.deltas[self.within(context)].mean(axis=0)


@dataclass(frozen=True)
class WantedEffects:
    """Effects to predict.

    Attributes
    ----------
    effects
        The Q effects.
    genes
        A mapping from each target that is a gene to its column in the effects.
    gene_features
        Target vectors from a model, shape (D,) each.
    context_features
        Context vectors from a model, shape (D,) each.
    tables
        A mapping from source name to additional target vectors, for ``kernels``.
    """

    effects: Sequence[Effect]
    genes: Mapping[str, int] = field(default_factory=dict)
    gene_features: Mapping[str, np.ndarray] = field(default_factory=dict)
    context_features: Mapping[str, np.ndarray] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)


def known_effects(train: PerturbedCells, contexts: set[str]) -> KnownEffects:
    """Measure the effects in training cells, as a basis for predicting effects in `contexts`."""
    groups = train.moments()
    effects = train.measured(groups, argument="train")
    sizes, means = groups.n[len(train.effects) :], groups.mean[len(train.effects) :]
    controls = {name: mean for name, n, mean in zip(train.contexts, sizes, means, strict=True) if n}
    if without := sorted(contexts - {*controls}):
        raise DataError(
            f"has no control cells in the contexts {listing(without)}; move control cells of these contexts to train.",
            argument="train",
        )
    return KnownEffects(train.effects, effects.deltas, controls, effects.n_cells)


def control_means(cells: Cells, controls: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the mean log1p CP10K of the controls of each context, NaN for unmeasured genes, float64, shape (G,)."""
    names = sorted(controls)
    rows = np.concatenate([controls[name] for name in names])
    codes = np.repeat(np.arange(len(names)), [len(controls[name]) for name in names])
    order = np.argsort(rows)
    means = moments(cells, rows[order], codes[order], len(names)).mean
    return dict(zip(names, means if cells.measured is None else np.where(cells.measured, means, np.nan), strict=True))


def measured_effects(
    cells: Cells, conditions: Conditions, effects: Sequence[Effect], rows: np.ndarray
) -> tuple[Effects, np.ndarray, np.ndarray, np.ndarray]:
    """Measure sorted effects in the cells `rows`, relative to the controls of their context among them.

    Returns
    -------
    The effects, the rows of the cells used for them, the group of each of these cells (groups of controls follow the
    groups of the effects), and the group of the controls for each effect.
    """
    numbers = {effect: i for i, effect in enumerate(conditions.effects)}
    perturbed = np.array([numbers[effect] for effect in effects])
    rows = np.sort(rows)
    rows = rows[np.isin(conditions.groups[rows], [*perturbed, *conditions.controls[perturbed]])]
    used, groups = np.unique(conditions.groups[rows], return_inverse=True)
    controls = np.searchsorted(used, conditions.controls[perturbed])
    means = moments(cells, rows, groups, len(used))
    return effects_of(means, np.arange(len(effects)), controls), rows, groups, controls
