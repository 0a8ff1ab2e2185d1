"""Columns and labels of perturbed cells, in pertpy's conventions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from scforge._checks import check_known
from scforge._columns import texts_of
from scforge.errors import DataError, OptionError, listing

ALL = "all"
"""Name of the context if there is only one."""


class Effect(NamedTuple):
    """A perturbation in a context, or the controls of the context if there are no targets."""

    targets: tuple[str, ...]
    context: str


@dataclass(frozen=True)
class PerturbationKeys:
    """Columns and labels of perturbations in obs.

    Attributes
    ----------
    perturbation
        Column with the perturbation label, pertpy's `target_col`.
    control
        Label of cells without perturbation, pertpy's `reference_key`, e.g. ``"control"``, ``"NT"`` or ``"ctrl"``.
    separator
        Text between the parts of a combination, pertpy's `sep`. If None, labels are not split, e.g. if drug names
        contain a plus sign, as in ``"(+)-JQ1"``.
    context
        Column with the context, e.g. the cell type. If None, all cells have the same context.
    layer
        Key in ``layers`` with counts or log1p CP10K. If None, reads X.

    Examples
    --------
    >>> keys = PerturbationKeys("gene", control="ctrl")
    >>> keys.targets("KLF1+ctrl"), keys.label(("BAK1", "KLF1"))
    (('KLF1',), 'BAK1+KLF1')
    """

    perturbation: str
    control: str
    separator: str | None = "+"
    context: str | None = None
    layer: str | None = None

    def __post_init__(self) -> None:
        if self.separator is not None and (not isinstance(self.separator, str) or not self.separator.strip()):
            raise OptionError("is not a valid label separator; pass e.g. '+', or None.", separator=self.separator)

    def split(self, label: str) -> list[str]:
        """Split a label at the separator; the control stays whole, even if its name contains the separator.

        Examples
        --------
        >>> PerturbationKeys("gene", control="non+targeting").split("A + non+targeting")
        ['A', 'non+targeting']
        """
        if self.separator is None:
            return [label]
        parts, whole = ([part.strip() for part in text.split(self.separator)] for text in (label, self.control))
        for start in range(len(parts) - len(whole) + 1):
            if parts[start : start + len(whole)] == whole:
                return [*parts[:start], self.control, *parts[start + len(whole) :]]
        return parts

    def targets(self, label: str) -> tuple[str, ...]:
        """Return the targets in a label, sorted; an empty tuple for the control."""
        return tuple(sorted({*self.split(label)} - {self.control, ""}))

    def label(self, targets: Sequence[str]) -> str:
        """Return the label of a perturbation."""
        return (self.separator or "+").join(targets)

    def titles(self, effects: Sequence[Effect]) -> list[str]:
        """Return the names of effects, with their contexts if there are any."""
        context = "" if self.context is None else " in {}"
        return [self.label(effect.targets) + context.format(effect.context) for effect in effects]

    def index(self, effects: Sequence[Effect]) -> pd.Index:
        """Return the index of a table of effects."""
        labels = [self.label(effect.targets) for effect in effects]
        if self.context is None:
            return pd.Index(labels)
        return pd.MultiIndex.from_arrays([labels, [effect.context for effect in effects]])

    def effects(self, table: pd.DataFrame) -> list[Effect]:
        """Return the effect of each row of a table. Raises an error if an effect occurs more than once."""
        n_levels = 1 if self.context is None else 2
        if table.index.nlevels != n_levels:
            wanted = "one row per perturbation" if n_levels == 1 else "an index of perturbation and context"
            raise DataError(f"the index of predictions has {table.index.nlevels} levels; pass {wanted}.")
        labels = [label if n_levels == 2 else (label, ALL) for label in table.index]
        obs = pd.DataFrame({self.perturbation: [*(str(name) for name, _ in labels), self.control]})
        targets = parse_perturbations(obs, self)
        effects = [Effect(names, str(context)) for names, (_, context) in zip(targets, labels, strict=False)]
        twice = self.titles([effect for effect, n in Counter(effects).items() if n > 1])
        if twice := [*twice, *table.columns[table.columns.duplicated()]]:
            raise DataError(
                f"contains {listing(twice)} more than once; pass each effect and gene once.", argument="predictions"
            )
        return effects


def parse_perturbations(obs: pd.DataFrame, keys: PerturbationKeys) -> list[tuple[str, ...]]:
    """Return the targets of each cell, i.e. its perturbed genes or drugs, from obs.

    The conventions are pertpy's: one column contains the labels, one of the labels is the control, and the parts of a
    combination are joined by ``"+"`` (``GuideAssignment``, ``PerturbationSpace.add`` and ``.evaluate_combinations``).
    Labels such as ``"negative"`` and ``"multiple"`` of pertpy's ``GuideAssignment`` are read as targets, so remove
    these cells first. In addition to pertpy's conventions, the control is not a target if it is part of a combination,
    so the only target of ``"KLF1+ctrl"`` is KLF1. Spaces around the parts and the order of the parts do not matter.

    Parameters
    ----------
    obs
        Table of cells, e.g. ``adata.obs``.
    keys
        Column and labels of the perturbations.

    Returns
    -------
    The sorted, unique targets of each cell; an empty tuple for control cells.

    Raises
    ------
    DataError
        If the column is missing, no cell has the control label, a cell has no label, or a label has an empty part.

    Examples
    --------
    >>> import pandas as pd
    >>> obs = pd.DataFrame({"gene": ["KLF1+ctrl", "ctrl", "KLF1+BAK1"]})
    >>> parse_perturbations(obs, PerturbationKeys("gene", control="ctrl"))
    [('KLF1',), (), ('BAK1', 'KLF1')]
    """
    check_known("perturbation", keys.perturbation, obs.columns, "obs")
    texts = texts_of(obs[keys.perturbation], key=keys.perturbation, argument="perturbation")
    if len(missing := np.flatnonzero(texts.codes < 0)):
        raise DataError(
            f"[{keys.perturbation!r}] is missing for {len(missing)} of {len(texts)} cells; label these cells, or "
            "drop them.",
            argument="obs",
        )
    labels = [str(label).strip() for label in texts.categories]
    parts = [keys.split(label) for label in labels]
    for label, split in zip(labels, parts, strict=True):
        cut = any(part.count("(") != part.count(")") for part in split) and label.count("(") == label.count(")")
        if cut or not all(split):
            where = "within brackets" if cut else "into empty parts"
            raise DataError(f"splits {label!r} {where}; use another one, or separator=None.", separator=keys.separator)
    names = sorted({part for split in parts for part in split})
    check_known("control", keys.control, names, f"obs[{keys.perturbation!r}]")
    targets = [keys.targets(label) for label in labels]
    return [targets[code] for code in texts.codes]
