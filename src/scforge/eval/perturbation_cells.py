"""Perturbed cells of an AnnData: their log-normalised expression, and which effect each belongs to.

Shapes: N cells, G genes, Q effects (a perturbation in a context), C contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
from scipy import sparse

from scforge.data.checks import check_is_adata
from scforge.data.perturbation import PerturbationKeys, parse_perturbations
from scforge.errors import DataError, did_you_mean, listing
from scforge.eval.base import check_column
from scforge.eval.log_scale import log_normalised
from scforge.eval.pseudobulk import Effects, Moments, effects_of, moments_of

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["ALL", "Effect", "EffectKeys", "PerturbedCells"]

ALL = "all"
"""Name of the context where there is one only."""


class Effect(NamedTuple):
    """A perturbation in a context."""

    targets: tuple[str, ...]
    context: str


@dataclass(frozen=True)
class EffectKeys:
    """Where an AnnData says what was done to a cell.

    Attributes
    ----------
    perturbation_key, control, separator
        As in :class:`~scforge.data.PerturbationKeys`.
    context_key
        Column of obs with the context, e.g. the cell type; None: there is one only.
    layer
        Key in layers with the counts or log-normalised values; None reads X.
    """

    perturbation_key: str
    control: str
    context_key: str | None = None
    separator: str | None = "+"
    layer: str | None = None

    def name_of(self, targets: Sequence[str]) -> str:
        """Return the label of a perturbation."""
        return (self.separator or "+").join(targets)

    def effect(self, label: str, context: str = ALL) -> Effect:
        """Return the effect that a label means."""
        keys = PerturbationKeys(self.perturbation_key, control=self.control, separator=self.separator)
        labels = pd.DataFrame({self.perturbation_key: [label, self.control]})
        return Effect(parse_perturbations(labels, keys).targets[0], context)


@dataclass(frozen=True)
class PerturbedCells:
    """Cells with what was done to them.

    Attributes
    ----------
    expression
        log1p CP10K, CSR, float32 or float64, shape (N, G).
    genes
        Names, G of them.
    names
        Names of the cells, N of them.
    effects
        What was done to the perturbed ones, sorted, Q of them.
    contexts
        Names of the contexts, sorted, C of them.
    groups
        Number of the effect of each cell; Q plus the number of the context for controls, int64, shape (N,).
    """

    expression: sparse.csr_matrix
    genes: pd.Index
    names: pd.Index
    effects: tuple[Effect, ...]
    contexts: tuple[str, ...]
    groups: np.ndarray

    @classmethod
    def read(cls, adata: AnnData, keys: EffectKeys, *, argument: str, made: bool = False) -> PerturbedCells:
        """Read them.

        Parameters
        ----------
        adata
            Counts, or log1p of counts per 10,000.
        keys
            Its columns.
        argument
            What it is called in messages.
        made
            Whether the cells are predicted ones, which need no controls and no exact total, and are read from X where
            they lack the layer.

        Raises
        ------
        DataError
            If a column is missing or incomplete, genes have no names of their own, or the values are of another kind.
        """
        check_is_adata(adata, argument=argument)
        check_column("perturbation_key", keys.perturbation_key, adata.obs)
        if adata.var_names.has_duplicates:
            twice = adata.var_names[adata.var_names.duplicated()]
            raise DataError(f"{argument}.var_names has {listing(twice[:3])} more than once; name each gene once.")
        labels = adata.obs[[keys.perturbation_key]].astype(object)
        if made:
            # Predicted controls are not needed, but only labels with the control among them are read.
            labels = pd.concat([labels, pd.DataFrame({keys.perturbation_key: [keys.control]}, index=["control"])])
        parsed = parse_perturbations(
            labels, PerturbationKeys(keys.perturbation_key, control=keys.control, separator=keys.separator)
        )
        targets = parsed.targets[: adata.n_obs]
        if keys.context_key is None:
            places = [ALL] * adata.n_obs
        else:
            check_column("context_key", keys.context_key, adata.obs)
            column = adata.obs[keys.context_key]
            if n_missing := int(column.isna().sum()):
                raise DataError(
                    f"{argument}.obs[{keys.context_key!r}] has no value for {n_missing} of {adata.n_obs} cells; label "
                    "them or leave them out."
                )
            places = column.astype(str).tolist()
        # Models predict into X, whatever layer the measured values are in.
        layer = None if made and keys.layer not in adata.layers else keys.layer
        pairs = [Effect(some, place) for some, place in zip(targets, places, strict=True)]
        effects = tuple(sorted({pair for pair in pairs if pair.targets}))
        contexts = tuple(sorted(set(places)))
        number = {effect: i for i, effect in enumerate(effects)}
        number |= {Effect((), place): len(effects) + i for i, place in enumerate(contexts)}
        return cls(
            log_normalised(adata, layer, argument=argument, made=made),
            adata.var_names,
            adata.obs_names,
            effects,
            contexts,
            np.array([number[pair] for pair in pairs], dtype=np.int64),
        )

    @property
    def controls(self) -> np.ndarray:
        """Group of the controls of each effect, int64, shape (Q,)."""
        return np.array([len(self.effects) + self.contexts.index(e.context) for e in self.effects], dtype=np.int64)

    @property
    def n_groups(self) -> int:
        """Number of groups, Q + C."""
        return len(self.effects) + len(self.contexts)

    def over(self, genes: pd.Index, *, argument: str) -> PerturbedCells:
        """Return the cells over these genes, in this order.

        Raises
        ------
        DataError
            If one is missing.
        """
        columns = self.genes.get_indexer(genes)
        if (missing := columns < 0).any():
            raise DataError(
                f"{argument} lacks {int(missing.sum())} of {len(genes)} genes (first: {str(genes[missing][0])!r}"
                f"{did_you_mean(genes[missing][0], self.genes[:5000])}); leave them out of the measured cells too, or "
                "use evaluate_perturbations, which scores the genes that all have."
            )
        matrix = self.expression[:, columns].tocsr()
        return PerturbedCells(matrix, genes, self.names, self.effects, self.contexts, self.groups)

    def moments(self) -> Moments:
        """Return mean and variance of each group."""
        return moments_of(self.expression, self.groups, self.n_groups)

    def measured(self, groups: Moments, *, argument: str) -> Effects:
        """Return the effects against the controls of the same context.

        Raises
        ------
        DataError
            If there is none, or a context has no controls.
        """
        if not self.effects:
            raise DataError(f"{argument} has no perturbed cells, only controls; there is no effect to measure.")
        without = sorted({e.context for e, n in zip(self.effects, groups.n[self.controls], strict=True) if not n})
        if without:
            raise DataError(
                f"{argument} has no control cell in the contexts {listing(without)}; add controls of its own there."
            )
        return effects_of(groups, np.arange(len(self.effects)), self.controls)
