"""Versioned splits of data sets: bundled files and rules."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scforge._checks import check_choice, check_known
from scforge._io import atomic_write_bytes
from scforge.datasets.cards import Amount, DatasetCard, SplitRule, get_card
from scforge.errors import DataError, MissingFileError, OptionError, listing
from scforge.perturbation.keys import PerturbationKeys, parse_perturbations

if TYPE_CHECKING:
    from anndata import AnnData


PARTS = ("train", "validation", "test")
HELD_OUT = ("test", "validation")
LEFT_OUT = "left_out"

_BETWEEN = " in "


@dataclass(frozen=True)
class Split:
    """Cells of a data set for training, validation and test, by their ids.

    Attributes
    ----------
    name, version
        The data set, and the version of its split.
    train, validation, test
        Cell names (``obs_names``), object, sorted. No cell is in two parts, and no part is empty.
    left_out
        Cells that are in no part, e.g. cells without a perturbation.

    Raises
    ------
    DataError
        If a part is empty, or a cell is in two parts.

    Examples
    --------
    >>> import numpy as np
    >>> names = np.array([f"cell{i}" for i in range(5)])
    >>> split = Split("my_cells", 1, train=names[:3], validation=names[3:4], test=names[4:])
    >>> len(split), split.test.tolist()
    (5, ['cell4'])
    """

    name: str
    version: int
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    left_out: np.ndarray = field(default_factory=lambda: np.array([], dtype=object))

    def __post_init__(self) -> None:
        for part in (*PARTS, LEFT_OUT):
            object.__setattr__(self, part, np.sort(np.asarray(getattr(self, part), dtype=object)))
        for part in PARTS:
            if not len(getattr(self, part)):
                raise DataError(f"the split {self.name!r} has no {part} cells; hold out more or fewer cells.")
        cells = pd.Index(np.concatenate([getattr(self, part) for part in (*PARTS, LEFT_OUT)]))
        if not cells.is_unique:
            twice = cells[cells.duplicated()][0]
            raise DataError(f"the split {self.name!r} contains cell {twice!r} twice; each cell must be in one part.")

    def __len__(self) -> int:
        return sum(len(getattr(self, part)) for part in (*PARTS, LEFT_OUT))

    def labels(self, adata: AnnData) -> pd.Series:
        """Return the part of each cell, e.g. for ``adata.obs["split"]``.

        Parameters
        ----------
        adata
            The data set, or some of its cells.

        Returns
        -------
        Categorical with the part of each cell, N rows; missing for cells that were left out.

        Raises
        ------
        DataError
            If a cell is not in the data set.
        """
        of = {cell: part for part in (*PARTS, LEFT_OUT) for cell in getattr(self, part)}
        unknown = [cell for cell in adata.obs_names if cell not in of]
        if unknown:
            raise DataError(
                f"contains cells that are not in the split {self.name!r} ({listing(unknown, most=3)}); pass "
                "the data that the split was made from.",
                argument="adata",
            )
        parts = [None if of[cell] == LEFT_OUT else of[cell] for cell in adata.obs_names]
        used = [part for part in PARTS if part in parts]
        return pd.Series(pd.Categorical(parts, categories=used), index=adata.obs_names, name="split")

    def rows(self, adata: AnnData, part: str) -> np.ndarray:
        """Return the rows of `adata` that are in a part, int64, ascending.

        Parameters
        ----------
        adata
            The data set, or some of its cells.
        part
            ``"train"``, ``"validation"`` or ``"test"``.

        Raises
        ------
        OptionError
            If there is no such part.
        DataError
            If a cell is not in the data set, or no cell is in the part.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()
        >>> split = scforge.datasets.get_split("pbmc3k")
        >>> adata[split.rows(adata, "test")].n_obs == len(split.test)
        True
        """
        check_choice("part", part, PARTS)
        rows = np.flatnonzero(np.asarray(self.labels(adata) == part))
        if not len(rows):
            raise DataError(f"no cell of adata is in part {part!r} of split {self.name!r}; pass the whole data set.")
        return rows

    def seen_targets(
        self, adata: AnnData, perturbation_key: str, control: str, *, separator: str | None = "+", part: str = "test"
    ) -> pd.Series:
        """Return the number of targets of each held-out perturbation that occur in perturbations of training cells.

        Scores of pairs differ strongly between 0, 1 and 2 known genes, and are reported separately (Roohani et al.
        2024).

        Parameters
        ----------
        adata
            The data set.
        perturbation_key, control, separator
            Column of ``adata.obs`` with the perturbation, its label for control cells, and the separator between the
            targets of a combination. The separator is None if there are no combinations.
        part
            ``"test"`` or ``"validation"``.

        Returns
        -------
        Number of known targets, int64; the index contains the targets, sorted and joined by `separator`.

        Raises
        ------
        OptionError
            If there is no such part.
        DataError
            If a cell is not in the data set, or the column or the control is missing.

        Examples
        --------
        >>> import anndata, numpy as np, pandas as pd
        >>> obs = pd.DataFrame({"gene": ["ctrl", "A", "A+B", "B+C"]}, index=list("wxyz"))
        >>> adata = anndata.AnnData(np.ones((4, 1)), obs=obs)
        >>> split = Split("mine", 1, train=["x"], validation=["w"], test=["y", "z"])
        >>> split.seen_targets(adata, "gene", "ctrl").to_dict()
        {'A+B': 1, 'B+C': 0}
        """
        check_choice("part", part, HELD_OUT)
        labels = self.labels(adata)
        included = labels.notna()
        targets = parse_perturbations(adata.obs[included], PerturbationKeys(perturbation_key, control, separator))
        of: dict[str, set[tuple[str, ...]]] = {name: set() for name in PARTS}
        for name, genes in zip(labels[included], targets, strict=True):
            of[name].add(genes)
        seen = {gene for genes in of["train"] for gene in genes}
        held = sorted(genes for genes in of[part] if genes)
        joined = [(separator or "").join(genes) for genes in held]
        return pd.Series([len(seen & {*genes}) for genes in held], joined, dtype=np.int64, name="seen_targets")


def get_split(name: str, adata: AnnData | None = None, version: int = 1) -> Split:
    """Return the split of a data set, either bundled or created by the rule of its card.

    Parameters
    ----------
    name
        Name of a data set, see :func:`~scforge.datasets.list_cards`.
    adata
        The whole data set. Required if the split is not bundled with the package; otherwise, the split is checked
        against it.
    version
        Version of the split. A split never changes; a different split has another version.

    Returns
    -------
    The split, with the cell names of each part.

    Raises
    ------
    OptionError
        If there is no card with this name, there is no such version, or `adata` is required.
    DataError
        If the cells of `adata` do not match the split, or a held-out group or perturbation has training cells.

    Examples
    --------
    >>> split = get_split("pbmc3k")
    >>> len(split.train), len(split.validation), len(split.test)
    (1892, 269, 539)
    """
    card = get_card(name)
    check_choice("version", version, sorted({*(card.splits or [1]), *card.more_splits}))
    if version in card.splits:
        content = resources.files("scforge.datasets").joinpath("splits", f"{name}-v{version}.csv.gz").read_bytes()
        split = _parse(content, name, version, f"{name}-v{version}.csv.gz")
        if adata is not None:
            if len(split.labels(adata)) < len(split) or not adata.obs_names.is_unique:
                raise DataError(
                    f"has {adata.n_obs} cells, but split {name!r} has {len(split)}; pass all cells.",
                    argument="adata",
                )
            check_rule(split, card, adata)
        return split
    if adata is None:
        raise OptionError(f"no split of {name!r} is included in the package; pass the data set as adata.")
    return make_split(card, adata, version=version)


def write_split(split: Split, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a split as gzipped CSV with the columns ``cell`` and ``part``, for :func:`read_split`.

    Parameters
    ----------
    split
        The split.
    path
        File to write.
    overwrite
        Whether to replace an existing file.

    Raises
    ------
    OptionError
        If the file exists and `overwrite` is False.

    Examples
    --------
    >>> import tempfile
    >>> split = get_split("pbmc3k")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_split(split, f"{folder}/mine.csv.gz")
    ...     again = read_split(f"{folder}/mine.csv.gz")
    >>> again.name, bool((again.test == split.test).all())
    ('mine', True)
    """
    rows = sorted((cell, part) for part in (*PARTS, LEFT_OUT) for cell in getattr(split, part))
    text = pd.DataFrame(rows, columns=["cell", "part"]).to_csv(index=False, lineterminator="\n")
    # Without the time, so that the same split is the same file.
    atomic_write_bytes(path, gzip.compress(text.encode(), mtime=0), overwrite=overwrite)


def read_split(path: str | os.PathLike[str], *, name: str | None = None, version: int = 1) -> Split:
    """Read a split written by :func:`write_split`.

    Parameters
    ----------
    path
        The file.
    name
        Name of the data set. If None, uses the name of the file.
    version
        Version of the split.

    Returns
    -------
    The split, with the cell names of each part.

    Raises
    ------
    DataError
        If the file is not a split, a part is empty, or a cell is in two parts.

    Examples
    --------
    >>> import tempfile
    >>> split = Split("my_cells", 1, train=["a", "b"], validation=["c"], test=["d"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_split(split, f"{folder}/mine.csv.gz")
    ...     read_split(f"{folder}/mine.csv.gz", name="my_cells").train.tolist()
    ['a', 'b']
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError("is not a file; write it with write_split.", path=str(path))
    return _parse(path.read_bytes(), path.name.split(".")[0] if name is None else name, version, path.name)


def _parse(content: bytes, name: str, version: int, file: str) -> Split:
    parts = (*PARTS, LEFT_OUT)
    try:
        table = pd.read_csv(io.BytesIO(content), compression="gzip", dtype=str, keep_default_na=False)
        fits = table.columns.tolist() == ["cell", "part"] and table["part"].isin(parts).all()
    except (gzip.BadGzipFile, EOFError, ValueError):
        fits = False
    if not fits:
        raise DataError(f"{file!r} is not a gzipped CSV with the columns cell and part; write it with write_split.")
    return Split(name, version, **{part: table["cell"][table["part"] == part].to_numpy(object) for part in parts})


def make_split(card: DatasetCard, adata: AnnData, *, version: int = 1) -> Split:
    """Split a data set according to the rule of its card.

    Parameters
    ----------
    card
        The card, whose ``split`` defines the rule.
    adata
        The whole data set.
    version
        Version of the split. A different number samples different cells; the card may have a separate rule for it.

    Returns
    -------
    The split. It depends on the cell names and on the columns that the rule reads, not on the order of the cells.

    Raises
    ------
    OptionError
        If the card has no rule.
    DataError
        If a column is missing, a cell name is duplicated, or there are too few cells or units to hold out.

    Examples
    --------
    >>> import scforge
    >>> card, adata = scforge.datasets.get_card("pbmc3k"), scforge.datasets.pbmc3k()
    >>> split = make_split(card, adata, version=2)
    >>> len(split.train), len(split.validation), len(split.test)
    (1892, 269, 539)
    """
    rule = card.rule(version)
    if rule is None:
        raise OptionError(f"the card {card.name!r} has no split rule; set split=SplitRule(...).")
    for key in filter(None, (rule.column, rule.context_key)):
        check_known("column", key, adata.obs, "obs", fix=f"the split of {card.name!r} requires this column")
    salt, names = f"{card.name}-v{version}", np.asarray(adata.obs_names, dtype=object)
    if rule.kind == "stratified":  # fractions of the cells for each value, and of the cells without a value
        parts = np.full(len(names), "train", dtype=object)
        codes = adata.obs[rule.column].astype("category").cat.codes.to_numpy()
        for code in np.unique(codes):  # -1: cells without a value
            rows = np.flatnonzero(codes == code)
            parts[rows] = _cut(names[rows], {part: float(getattr(rule, part)) for part in HELD_OUT}, salt)
    else:
        parts = _whole_units(rule, card, adata, salt)
    split = Split(card.name, version, **{part: names[parts == part] for part in (*PARTS, LEFT_OUT)})
    check_rule(split, card, adata)
    return split


def check_rule(split: Split, card: DatasetCard, adata: AnnData) -> None:
    """Raise an error if two parts share a unit of the card's split rule (a group, or a perturbation in a context)."""
    rule = card.rule(split.version)
    if rule is None or rule.kind == "stratified":
        return
    units = _units(rule, card, adata.obs)
    labels = split.labels(adata).astype(object)
    counted = units.notna() & labels.notna()
    parts = labels[counted].groupby(units[counted]).unique()
    torn = [unit for unit, where in parts.items() if len(where) > 1]
    if torn:
        raise DataError(
            f"the split {split.name!r} puts cells of {listing(torn, most=3)} in more than one part; check "
            f"adata.obs[{rule.column!r}]."
        )


def _units(rule: SplitRule, card: DatasetCard, obs: pd.DataFrame) -> pd.Series:
    """Return the held-out unit of each cell as text; missing for controls and cells without a value."""
    values = obs[rule.column].astype(object).where(obs[rule.column].notna())
    values = values.map(str, na_action="ignore")
    if rule.kind == "groups":
        return values
    if rule.separator is not None:
        # A_B and B_A are the same genes.
        names = {
            value: rule.separator.join(sorted(part for part in value.split(rule.separator) if part != card.control))
            for value in values.dropna().unique()
        }
        values = values.map({value: name or str(card.control) for value, name in names.items()}, na_action="ignore")
    units = values.where(values != str(card.control))
    if rule.context_key is not None:
        units = units + _BETWEEN + obs[rule.context_key].astype(object).map(str, na_action="ignore")
    return pd.Series(units, index=obs.index)


def _rank(salt: str, name: str) -> str:
    return hashlib.sha256(f"{salt}:{name}".encode()).hexdigest()


def _drawn(units: list[str], amounts: dict[str, Amount], salt: str, what: str) -> dict[str, str]:
    """Return a mapping from each held-out unit to its part."""
    held: dict[str, str] = {}
    for part, amount in amounts.items():
        if isinstance(amount, tuple):
            for unit in amount:
                check_known(part, unit, units, f"the column {what!r}")
            held |= dict.fromkeys(amount, part)
    free = sorted((unit for unit in units if unit not in held), key=lambda unit: (_rank(salt, unit), unit))
    for part, amount in amounts.items():
        if not isinstance(amount, tuple):
            number = max(1, round(amount * len(units))) if amount < 1 else int(amount)
            held |= dict.fromkeys(free[:number], part)
            free = free[number:]
    if not set(units) - set(held) or len(set(held.values())) < len(amounts):
        raise DataError(f"the column {what!r} has only {len(units)} values, which is too few to hold out {amounts}.")
    return held


def _cut(ids: np.ndarray, shares: dict[str, float], salt: str) -> np.ndarray:
    """Return the part of each cell in a stratum, chosen by hash; with three or more cells, no part is empty."""
    order = np.array(sorted(range(len(ids)), key=lambda row: (_rank(salt, str(ids[row])), ids[row])), dtype=np.int64)
    parts = np.full(len(ids), "train", dtype=object)
    start = 0
    for part, share in shares.items():
        number = max(round(share * len(ids)), int(len(ids) > len(shares)))
        parts[order[start : start + number]] = part
        start += number
    return parts


def _whole_units(rule: SplitRule, card: DatasetCard, adata: AnnData, salt: str) -> np.ndarray:
    """Return the part of each cell: whole groups or perturbations, and for each held-out part some control cells."""
    units = _units(rule, card, adata.obs)
    names = sorted(units.dropna().unique())
    what = rule.column if rule.separator is None else f"{rule.column} (joined by {rule.separator})"
    amounts = {part: getattr(rule, part) for part in HELD_OUT}
    if rule.kind == "targets":
        held = _with_targets(names, amounts, rule, salt, what)
    else:
        if rule.separator is not None:
            names = [unit for unit in names if rule.separator in unit.split(_BETWEEN)[0]]
        held = _drawn(names, amounts, salt, what)
    parts = np.array([held.get(u, "train") if isinstance(u, str) else LEFT_OUT for u in units], dtype=object)
    if rule.kind != "groups":
        _share_controls(parts, rule, card, adata, salt)
    return parts


def _with_targets(
    units: list[str], amounts: dict[str, Amount], rule: SplitRule, salt: str, what: str
) -> dict[str, str]:
    """Return the part of perturbations with held-out genes, and of a fraction of the combinations of other genes."""
    genes = {unit: unit.split(rule.separator) for unit in units}
    of_gene = _drawn(sorted({gene for members in genes.values() for gene in members}), amounts, salt, what)
    held: dict[str, str] = {}
    for unit, members in genes.items():
        # A pair of a test gene and a validation gene is in the test.
        held_out = {of_gene.get(gene) for gene in members}.intersection(HELD_OUT)
        if held_out:
            held[unit] = "test" if "test" in held_out else "validation"
    free = np.array([unit for unit, members in genes.items() if unit not in held and len(members) > 1], dtype=object)
    return held | dict(zip(free, _cut(free, dict.fromkeys(HELD_OUT, rule.combination_share), salt), strict=True))


def _share_controls(parts: np.ndarray, rule: SplitRule, card: DatasetCard, adata: AnnData, salt: str) -> None:
    """Divide the control cells in each context between the parts that have cells in the context."""
    obs, ids = adata.obs, np.asarray(adata.obs_names, dtype=object)
    control = np.asarray(obs[rule.column].astype(object).map(str, na_action="ignore") == str(card.control))
    if not control.any():
        raise DataError(
            f"no cell has {rule.column}={card.control!r}, the control of {card.name!r}; use this label for "
            "the control cells."
        )
    contexts = np.full(len(ids), "", dtype=object)
    if rule.context_key is not None:
        named = obs[rule.context_key].notna().to_numpy()
        contexts = np.asarray(obs[rule.context_key].astype(str), dtype=object)
        parts[~named] = LEFT_OUT
        control = control & named
    for context in sorted(set(contexts[control])):
        in_context = contexts == context
        rows = np.flatnonzero(control & in_context)
        shares = {part: rule.control_share for part in HELD_OUT if (parts[in_context] == part).any()}
        parts[rows] = _cut(ids[rows], shares, salt)
