"""Parse the targets of perturbed cells from obs labels in pertpy's conventions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scforge._checks import check_known
from scforge.errors import DataError, OptionError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class PerturbationKeys:
    """Column and labels of perturbations in obs.

    Attributes
    ----------
    perturbation
        Column with the perturbation label, pertpy's `target_col`.
    control
        Label of cells without perturbation, pertpy's `reference_key`, e.g. ``"control"``, ``"NT"`` or ``"ctrl"``.
    separator
        Text between the parts of a combination, pertpy's `sep`. If None, labels are not split, e.g. if drug names
        contain a plus sign, as in ``"(+)-JQ1"``.

    Examples
    --------
    >>> PerturbationKeys("gene", control="ctrl")
    PerturbationKeys(perturbation='gene', control='ctrl', separator='+')
    """

    perturbation: str
    control: str
    separator: str | None = "+"

    def __post_init__(self) -> None:
        if self.separator is not None and (not isinstance(self.separator, str) or not self.separator.strip()):
            raise OptionError(f"separator={self.separator!r} is not a valid label separator; pass e.g. '+', or None.")


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
    from scforge._columns import texts_of

    check_known("perturbation", keys.perturbation, obs.columns, "obs")
    texts = texts_of(obs[keys.perturbation], key=keys.perturbation, argument="perturbation")
    codes, labels = texts.codes, texts.categories
    if len(missing := np.flatnonzero(codes < 0)):
        raise DataError(
            f"obs[{keys.perturbation!r}] is missing for {len(missing)} of {len(codes)} cells; label these cells, or "
            "drop them."
        )
    parts = [_parts(str(label).strip(), keys) for label in labels]
    known = sorted({part for some in parts for part in some})
    check_known("control", keys.control, known, f"obs[{keys.perturbation!r}]")
    targets = [tuple(sorted(set(some) - {keys.control})) for some in parts]
    return [targets[code] for code in codes]


def label_parts(label: str, control: str, separator: str | None) -> list[str]:
    """Split a label at the separator; the control stays whole, even if its name contains the separator.

    Examples
    --------
    >>> label_parts("A + non+targeting", "non+targeting", "+")
    ['A', 'non+targeting']
    """
    if separator is None:
        return [label]
    parts, whole = ([part.strip() for part in text.split(separator)] for text in (label, control))
    for start in range(len(parts) - len(whole) + 1):
        if parts[start : start + len(whole)] == whole:
            return [*parts[:start], control, *parts[start + len(whole) :]]
    return parts


def _parts(label: str, keys: PerturbationKeys) -> list[str]:
    """Split a label into its parts."""
    parts = label_parts(label, keys.control, keys.separator)
    cut = any(part.count("(") != part.count(")") for part in parts) and label.count("(") == label.count(")")
    if cut or not all(parts):
        what = "within brackets" if cut else "into empty parts"
        raise DataError(f"separator={keys.separator!r} splits {label!r} {what}; use another one, or separator=None.")
    return parts
