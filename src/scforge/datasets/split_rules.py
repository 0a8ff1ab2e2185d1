"""Splits made by the rule of a card: drawn by the hash of names, so that they are the same everywhere.

Shapes: N cells.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from scforge.datasets.cards import Amount, DatasetCard, SplitRule
from scforge.datasets.split_files import LEFT_OUT, PARTS, Split
from scforge.errors import DataError, OptionError, did_you_mean, listing

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

__all__ = ["check_rule", "make_split"]

HELD_OUT = ("test", "validation")
_BETWEEN = " in "


def make_split(card: DatasetCard, adata: AnnData, *, version: int = 1) -> Split:
    """Divide a data set by the rule of its card.

    Parameters
    ----------
    card
        The card; its ``split`` says how.
    adata
        The whole data set.
    version
        Another number draws others.

    Returns
    -------
    The split. It depends on the names of the cells and on the columns that the rule reads, not on the order of the
    cells.

    Raises
    ------
    OptionError
        If the card has no rule.
    DataError
        If a column is missing, names of cells are not unique, or there is too little to hold out.

    Examples
    --------
    >>> import scforge
    >>> card, adata = scforge.datasets.get_card("pbmc3k"), scforge.datasets.pbmc3k()
    >>> split = make_split(card, adata, version=2)
    >>> len(split.train), len(split.validation), len(split.test)
    (1892, 269, 539)
    """
    rule = card.split
    if rule is None:
        raise OptionError(f"the card {card.name!r} has no rule to split by; give it one, split=SplitRule(...).")
    if not adata.obs_names.is_unique:
        raise DataError("the names of the cells of adata are not unique; call adata.obs_names_make_unique() first.")
    for key in filter(None, (rule.column, rule.context_key)):
        if key not in adata.obs:
            known = list(adata.obs)
            raise DataError(
                f"the split of {card.name!r} needs the column {key!r} of obs{did_you_mean(key, known)} "
                f"(obs has: {listing(known)})."
            )
    salt = f"{card.name}-v{version}"
    divide = {"stratified": _stratified, "groups": _groups, "perturbations": _perturbations}[rule.kind]
    parts = divide(rule, card, adata, salt)
    names = np.asarray(adata.obs_names, dtype=object)
    split = Split(card.name, version, **{part: names[parts == part] for part in (*PARTS, LEFT_OUT)})
    check_rule(split, card, adata)
    return split


def check_rule(split: Split, card: DatasetCard, adata: AnnData) -> None:
    """Raise :class:`~scforge.errors.DataError` if what the rule of a card holds out whole has cells in two parts.

    Parameters
    ----------
    split
        The split of all cells of `adata`.
    card
        Its ``split`` says what is held out: whole groups, or perturbations (in a context).
    adata
        The data set.
    """
    rule = card.split
    if rule is None or rule.kind == "stratified":
        return
    units = _units(rule, card, adata.obs)
    labels = split.labels(adata).astype(object)
    counted = units.notna() & labels.notna()
    parts = labels[counted].groupby(units[counted]).unique()
    torn = [unit for unit, where in parts.items() if len(where) > 1]
    if torn:
        raise DataError(
            f"the split {split.name!r} has cells of {listing(torn, most=3)} in more than one part; hold out all cells "
            f"of a value of {rule.column!r}."
        )


def _units(rule: SplitRule, card: DatasetCard, obs: pd.DataFrame) -> pd.Series:
    """Return what is held out whole, of each cell: text, missing for controls and where there is no value."""
    import pandas as pd

    values = obs[rule.column].astype(object).where(obs[rule.column].notna())
    values = values.map(str, na_action="ignore")
    if rule.kind == "groups":
        return values
    if rule.separator is not None:
        # A_B and B_A are the same genes.
        names = {value: _sorted(value, rule.separator, card.control) for value in values.dropna().unique()}
        values = values.map(names, na_action="ignore")
    units = values.where(values != str(card.control))
    if rule.context_key is not None:
        units = units + _BETWEEN + obs[rule.context_key].astype(object).map(str, na_action="ignore")
    return pd.Series(units, index=obs.index)


def _sorted(value: str, separator: str, control: str | None) -> str:
    parts = [part for part in value.split(separator) if part != control]
    return separator.join(sorted(parts)) or str(control)


def _rank(salt: str, name: str) -> str:
    return hashlib.sha256(f"{salt}:{name}".encode()).hexdigest()


def _drawn(units: list[str], amounts: dict[str, Amount], salt: str, what: str) -> dict[str, str]:
    """Return the part of the units that are held out."""
    held: dict[str, str] = {}
    for part, amount in amounts.items():
        if isinstance(amount, tuple):
            absent = [unit for unit in amount if unit not in units]
            if absent:
                raise DataError(
                    f"{part}: {listing(absent)} is not in the column {what!r}{did_you_mean(absent[0], units)} "
                    f"(there are: {listing(units)})"
                )
            held |= dict.fromkeys(amount, part)
    free = sorted((unit for unit in units if unit not in held), key=lambda unit: (_rank(salt, unit), unit))
    for part, amount in amounts.items():
        if not isinstance(amount, tuple):
            number = max(1, round(amount * len(units))) if amount < 1 else int(amount)
            held |= dict.fromkeys(free[:number], part)
            free = free[number:]
    if not set(units) - set(held) or len(set(held.values())) < len(amounts):
        raise DataError(
            f"the column {what!r} has {len(units)} values to hold out from, too few for {amounts} with some left to "
            "train on."
        )
    return held


def _cut(ids: np.ndarray, shares: dict[str, float], salt: str) -> np.ndarray:
    """Return the part of each cell of a stratum: shares of them, drawn by hash; at least one each of three or more."""
    order = np.array(sorted(range(len(ids)), key=lambda row: (_rank(salt, str(ids[row])), ids[row])), dtype=np.int64)
    parts = np.full(len(ids), "train", dtype=object)
    start = 0
    for part, share in shares.items():
        number = max(round(share * len(ids)), int(len(ids) > len(shares)))
        parts[order[start : start + number]] = part
        start += number
    return parts


def _stratified(rule: SplitRule, card: DatasetCard, adata: AnnData, salt: str) -> np.ndarray:
    ids = np.asarray(adata.obs_names, dtype=object)
    codes = adata.obs[rule.column].astype("category").cat.codes.to_numpy()
    parts = np.full(len(ids), "train", dtype=object)
    for code in np.unique(codes):  # -1: cells without a value
        rows = np.flatnonzero(codes == code)
        parts[rows] = _cut(ids[rows], {part: float(getattr(rule, part)) for part in HELD_OUT}, salt)
    return parts


def _groups(rule: SplitRule, card: DatasetCard, adata: AnnData, salt: str) -> np.ndarray:
    units = _units(rule, card, adata.obs)
    held = _drawn(sorted(units.dropna().unique()), {part: getattr(rule, part) for part in HELD_OUT}, salt, rule.column)
    return np.array([held.get(u, "train") if isinstance(u, str) else LEFT_OUT for u in units], dtype=object)


def _perturbations(rule: SplitRule, card: DatasetCard, adata: AnnData, salt: str) -> np.ndarray:
    obs = adata.obs
    units = _units(rule, card, obs)
    known = sorted(units.dropna().unique())
    if rule.separator is not None:
        combined = [unit for unit in known if rule.separator in unit.split(_BETWEEN)[0]]
        if not combined:
            raise DataError(
                f"no value of {rule.column!r} joins two perturbations by {rule.separator!r}; check how the data name "
                "combinations."
            )
        known = combined
    held = _drawn(known, {part: getattr(rule, part) for part in HELD_OUT}, salt, rule.column)
    parts = np.array([held.get(u, "train") if isinstance(u, str) else LEFT_OUT for u in units], dtype=object)
    control = np.asarray(obs[rule.column].astype(object).map(str, na_action="ignore") == str(card.control))
    if not control.any():
        raise DataError(
            f"no cell has {rule.column}={card.control!r}, the control of {card.name!r}; rename the control cells."
        )
    ids = np.asarray(adata.obs_names, dtype=object)
    contexts = np.full(len(ids), "", dtype=object)
    if rule.context_key is not None:
        named = obs[rule.context_key].notna().to_numpy()
        contexts = np.asarray(obs[rule.context_key].astype(str), dtype=object)
        parts[~named] = LEFT_OUT
        control = control & named
    for context in sorted(set(contexts[control])):
        here = contexts == context
        rows = np.flatnonzero(control & here)
        shares = {part: rule.control_share for part in HELD_OUT if (parts[here] == part).any()}
        parts[rows] = _cut(ids[rows], shares, salt)
    return parts
