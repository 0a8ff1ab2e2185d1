"""Versioned splits: which cells of a data set are for training, validation and test.

Shapes: N cells.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scforge._io import atomic_write_bytes
from scforge.datasets.cards import get_card
from scforge.errors import DataError, MissingFileError, OptionError, did_you_mean, listing

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

__all__ = ["PARTS", "Split", "get_split", "read_split", "write_split"]

PARTS = ("train", "validation", "test")
LEFT_OUT = "left_out"
_HEADER = ("cell", "part")
_NOBODY: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    """Cells of a data set for training, validation and test, by their ids.

    Attributes
    ----------
    name, version
        The data set, and the version of its split.
    train, validation, test
        Names of cells (``obs_names``), object, sorted. None is in two parts, and no part is empty.
    left_out
        Cells that are in no part, e.g. those without a perturbation.

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
    left_out: np.ndarray = field(default_factory=lambda: np.array(_NOBODY, dtype=object))

    def __post_init__(self) -> None:
        for part in (*PARTS, LEFT_OUT):
            object.__setattr__(self, part, np.sort(np.asarray(getattr(self, part), dtype=object)))
        for part in PARTS:
            if not len(getattr(self, part)):
                raise DataError(f"the split {self.name!r} has no cell for {part}; hold out another amount.")
        where: dict[str, str] = {}
        for part in (*PARTS, LEFT_OUT):
            for cell in getattr(self, part):
                if cell in where:
                    raise DataError(
                        f"the split {self.name!r} has the cell {cell!r} in {where[cell]} and in {part}; a cell belongs "
                        "to one part."
                    )
                where[cell] = part

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
        Categorical with the parts that the cells have, N rows; missing where a cell was left out.

        Raises
        ------
        DataError
            If a cell is not one of the data set.
        """
        import pandas as pd

        of = {cell: part for part in (*PARTS, LEFT_OUT) for cell in getattr(self, part)}
        unknown = [cell for cell in adata.obs_names if cell not in of]
        if unknown:
            raise DataError(
                f"adata has {len(unknown)} cells that the split {self.name!r} does not know ({listing(unknown, most=3)}"
                "); pass the data set that the split is of."
            )
        found = [None if of[cell] == LEFT_OUT else of[cell] for cell in adata.obs_names]
        used = [part for part in PARTS if part in found]
        return pd.Series(pd.Categorical(found, categories=used), index=adata.obs_names, name="split")

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
            If a cell is not one of the data set, or none is in the part.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()
        >>> split = scforge.datasets.get_split("pbmc3k")
        >>> adata[split.rows(adata, "test")].n_obs == len(split.test)
        True
        """
        if part not in PARTS:
            raise OptionError(f"part={part!r} is none of {listing(PARTS)}{did_you_mean(part, PARTS)}.")
        rows = np.flatnonzero(np.asarray(self.labels(adata) == part))
        if not len(rows):
            raise DataError(f"no cell of adata is in {part!r} of the split {self.name!r}; pass the whole data set.")
        return rows

    def check_covers(self, adata: AnnData) -> None:
        """Raise :class:`~scforge.errors.DataError` unless the cells of `adata` are those of the split, all of them.

        Parameters
        ----------
        adata
            The data set.

        Raises
        ------
        DataError
            If cells of the split are missing, unknown, or there twice.
        """
        missing = len(self) - len(self.labels(adata))
        if missing or not adata.obs_names.is_unique:
            raise DataError(
                f"adata has {adata.n_obs} cells but the split {self.name!r} has {len(self)}; pass the whole data set, "
                "each cell once."
            )


def get_split(name: str, adata: AnnData | None = None, version: int = 1) -> Split:
    """Return the split of a data set: the shipped one, or the one that the rule of its card makes.

    Parameters
    ----------
    name
        One of :func:`~scforge.datasets.list_cards`.
    adata
        The whole data set. Needed where no split of it ships with the package; otherwise the split is checked against
        it.
    version
        A split never changes; another way to split is another version.

    Returns
    -------
    The split.

    Raises
    ------
    OptionError
        If there is no card of that name, no such version, or `adata` is needed.
    DataError
        If the cells of `adata` are not those of the split, or a held-out group or perturbation has training cells.

    Examples
    --------
    >>> split = get_split("pbmc3k")
    >>> len(split.train), len(split.validation), len(split.test)
    (1892, 269, 539)
    """
    from scforge.datasets.split_rules import check_rule, make_split

    card = get_card(name)
    if version in card.splits:
        content = resources.files("scforge.datasets").joinpath("splits", f"{name}-v{version}.csv.gz").read_bytes()
        if hashlib.sha256(content).hexdigest() != card.splits[version]:
            raise DataError(
                f"the shipped split {name}-v{version} is not the file that its card tells of; install scforge anew."
            )
        split = _parse(content, name, version, f"{name}-v{version}.csv.gz")
        if adata is not None:
            split.check_covers(adata)
            check_rule(split, card, adata)
        return split
    if card.splits or version != 1:
        raise OptionError(
            f"version={version!r} of the split {name!r} is unknown; take one of {listing(card.splits or [1])}."
        )
    if adata is None:
        raise OptionError(
            f"adata=None: no split of {name!r} ships with the package; pass the data set, and the rule of its card "
            "makes the same split on every machine."
        )
    return make_split(card, adata)


def write_split(split: Split, path: str | os.PathLike[str]) -> None:
    """Write a split as gzipped CSV with the columns ``cell`` and ``part``; :func:`read_split` reads it.

    Parameters
    ----------
    split
        The split.
    path
        File to write.

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
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEADER)
    writer.writerows(rows)
    # Without the time, so that the same split is the same file.
    atomic_write_bytes(path, gzip.compress(text.getvalue().encode(), mtime=0))


def read_split(path: str | os.PathLike[str], *, name: str | None = None, version: int = 1) -> Split:
    """Read a split that :func:`write_split` wrote.

    Parameters
    ----------
    path
        The file.
    name
        Name of its data set; None takes the name of the file.
    version
        Its version.

    Returns
    -------
    The split.

    Raises
    ------
    MissingFileError
        If there is no such file.
    DataError
        If it is no split, a part is empty, or a cell is in two parts.

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
        raise MissingFileError(f"path={str(path)!r} does not exist; check the path.")
    return _parse(path.read_bytes(), path.name.split(".")[0] if name is None else name, version, path.name)


def _parse(content: bytes, name: str, version: int, file: str) -> Split:
    try:
        lines: Iterable[list[str]] = csv.reader(io.StringIO(gzip.decompress(content).decode()))
        header, *rows = lines
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"{file!r} is no gzipped CSV of cells and parts; write it with write_split.") from error
    parts: dict[str, list[str]] = {part: [] for part in (*PARTS, LEFT_OUT)}
    if tuple(header) != _HEADER or any(len(row) != 2 or row[1] not in parts for row in rows):
        raise DataError(
            f"{file!r} has not the columns cell and part (one of {listing(parts)}); write it with write_split."
        )
    for cell, part in rows:
        parts[part].append(cell)
    made = {part: np.array(cells, dtype=object) for part, cells in parts.items()}
    return Split(name, version, **made)
