"""What the training on perturbations needs to know of its cells: effects, and the controls that are its inputs.

Shapes: N cells, P effects (a perturbation in a context), G genes, B cells of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scforge.data.cells import Cells, CellSource, choose_rows
from scforge.data.random import cell_keys
from scforge.errors import DataError, OptionError, listing
from scforge.eval.perturbation_metrics import de_weights
from scforge.eval.pseudobulk import Moments, effects_of, moments
from scforge.finetuning.tasks._perturbation_conditions import Conditions

__all__ = ["BoundEffects"]

_MOST_CONTROLS = 2048
"""Controls of a context among which inputs are drawn."""

_STREAM = 0x6374726C  # "ctrl"


@dataclass(frozen=True)
class BoundEffects:
    """Effects in the cells of a training, and its controls.

    Attributes
    ----------
    conditions
        Of all cells.
    groups
        Perturbation and context of each effect, int64, shape (P, 2).
    group
        Number of the effect that a cell belongs to, -1 for none, int64, shape (N,).
    trained
        Effects of training cells, bool, shape (P,).
    deltas
        Change of the mean log1p CP10K against the training controls of the context, float32, shape (P, G).
    weights
        Weights of genes in the error of each effect, float32, shape (P, G).
    n_cells
        Cells of each effect, int64, shape (P,).
    pool
        Training controls, in memory.
    inputs
        Rows of `pool` of each context.
    """

    conditions: Conditions
    groups: np.ndarray
    group: np.ndarray
    trained: np.ndarray
    deltas: np.ndarray
    weights: np.ndarray
    n_cells: np.ndarray
    pool: CellSource
    inputs: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, cells: Cells, conditions: Conditions, train_rows: np.ndarray, *, weighted: bool) -> BoundEffects:
        """Measure effects; each is that of training cells or of held-out ones, never of both.

        Raises
        ------
        OptionError
            If a perturbation is in training and in held-out cells.
        DataError
            If there is nothing to learn from, or a context has no controls to begin with.
        """
        in_training = np.zeros(len(cells), dtype=bool)
        in_training[train_rows] = True
        perturbed = np.flatnonzero(conditions.perturbed)
        pairs = np.stack([conditions.perturbation[perturbed], conditions.context[perturbed]], axis=1)
        groups, codes = np.unique(pairs, axis=0, return_inverse=True)
        codes = codes.ravel()
        n_trained = np.bincount(codes, weights=in_training[perturbed], minlength=len(groups))
        n_cells = np.bincount(codes, minlength=len(groups))
        partly = (n_trained > 0) & (n_trained < n_cells)
        if partly.any():
            raise OptionError(
                f"the split puts cells of the perturbations {listing(_names(conditions, groups[partly]))} both into "
                "training and elsewhere; hold out whole perturbations, as finetune does without split_key."
            )
        if not (n_trained > 0).any():
            raise DataError("no training cell is perturbed, so that there is no effect to learn; check the split.")
        controls = np.flatnonzero(conditions.controls & in_training)
        without = sorted({*groups[:, 1].tolist()} - {*conditions.context[controls].tolist()})
        if without:
            raise DataError(
                f"no training cell of the contexts {listing(conditions.contexts[code] for code in without)} is a "
                "control, which effects are measured against; leave these contexts out, or split otherwise."
            )
        group = np.full(len(cells), -1, dtype=np.int64)
        group[perturbed] = codes
        measured = _moments(cells, conditions, perturbed, codes, controls, len(groups))
        effects = effects_of(measured, np.arange(len(groups)), len(groups) + groups[:, 1])
        seen = np.ones(effects.deltas.shape[1], dtype=bool) if cells.measured is None else cells.measured
        weights = np.zeros(effects.deltas.shape, dtype=np.float32)
        weights[:, seen] = de_weights(effects.scores[:, seen]) if weighted else 1.0
        weights /= weights.mean(axis=1, keepdims=True)
        chosen = [
            choose_rows(len(cells), _MOST_CONTROLS, rows=controls[conditions.context[controls] == code])
            for code in range(len(conditions.contexts))
        ]
        pooled = np.sort(np.concatenate(chosen))
        return cls(
            conditions=conditions,
            groups=groups,
            group=group,
            trained=n_trained > 0,
            deltas=effects.deltas.astype(np.float32),
            weights=weights,
            n_cells=effects.n_cells,
            pool=cells.sample(len(pooled), rows=pooled),
            inputs=tuple(np.searchsorted(pooled, rows) for rows in chosen),
        )

    def targets_of(self, group: int) -> tuple[str, ...]:
        """Return the targets of an effect."""
        return self.conditions.targets[int(self.groups[group, 0])]

    def draw(self, rows: np.ndarray, *, epoch: int, seed: int) -> np.ndarray:
        """Return a random training control of the context of each perturbed cell, as rows of the pool, (B,)."""
        keys = cell_keys(rows, seed=seed, epoch=epoch, stream=_STREAM)
        contexts = self.conditions.context[rows]
        drawn = np.empty(len(rows), dtype=np.int64)
        for context in np.unique(contexts):
            here = contexts == context
            candidates = self.inputs[context]
            drawn[here] = candidates[(keys[here] % np.uint64(len(candidates))).astype(np.int64)]
        return drawn


def _names(conditions: Conditions, groups: np.ndarray) -> list[str]:
    return sorted({conditions.names[perturbation] for perturbation in groups[:, 0].tolist()})


def _moments(
    cells: Cells, conditions: Conditions, perturbed: np.ndarray, codes: np.ndarray, controls: np.ndarray, n: int
) -> Moments:
    """Return mean and variance of the effects' cells, and behind them those of the controls of each context."""
    rows = np.concatenate([perturbed, controls])
    of_rows = np.concatenate([codes, n + conditions.context[controls]])
    order = np.argsort(rows)
    return moments(cells, rows[order], of_rows[order], n + len(conditions.contexts))
