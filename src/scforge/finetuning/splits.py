"""Training, validation and test cells for fine-tuning.

Shapes: N cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from scforge._checks import check_share
from scforge._columns import texts_of
from scforge.data.sampling import split_cells
from scforge.errors import DataError, OptionError, listing, warn

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Split:
    """Disjoint rows of cells, int64, sorted.

    Attributes
    ----------
    train
        Cells that the model is trained on.
    validation
        Cells used to choose the best epoch and to calibrate the model.
    test
        Cells used to score the model, which it was never trained on.

    Examples
    --------
    >>> split = Split(train=np.array([0, 2, 4]), validation=np.array([1]), test=np.array([3]))
    >>> len(split.train), split.test.tolist()
    (3, [3])
    """

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    def __post_init__(self) -> None:
        rows = np.concatenate([self.train, self.validation, self.test])
        if len(np.unique(rows)) < len(rows):  # a custom task may split cells
            raise OptionError(", validation and test share cells; a split must be disjoint.", argument="train")
        if not len(self.train):
            raise OptionError("no training cells are left; lower validation_size or test_size.")


def check_shares(validation_size: float, test_size: float) -> None:
    """Raise :class:`~scforge.errors.OptionError` if the fractions leave no cells to train on."""
    if check_share("validation_size", validation_size) + check_share("test_size", test_size) >= 1:
        raise OptionError(
            f"and test_size={test_size} leave no training cells; lower one of them.", validation_size=validation_size
        )


def split_for(
    n_cells: int,
    *,
    validation_size: float,
    test_size: float,
    seed: int,
    usable: np.ndarray | None = None,
    strata: pd.Series | None = None,
    groups: pd.Series | None = None,
) -> Split:
    """Split cells at random, optionally stratified by class, or by whole groups such as donors.

    Parameters
    ----------
    n_cells
        Number of cells N.
    validation_size, test_size
        Fractions of the cells.
    seed
        Random seed for the split.
    usable
        Cells to split, bool, shape (N,). If None, splits all cells.
    strata
        Class of each cell, length N. In classes with few cells, training has priority: a single cell is used for
        training, and two cells are used for training and test.
    groups
        Group of each cell, length N. If given, whole groups are held out, and `strata` is ignored.

    Returns
    -------
    Rows of the three parts.

    Raises
    ------
    DataError
        If there are too few groups.

    Examples
    --------
    >>> import pandas as pd
    >>> donors = pd.Series(["A", "B", "C", "D"] * 5)
    >>> split = split_for(20, validation_size=0.25, test_size=0.25, seed=0, groups=donors)
    >>> donors[split.train].nunique(), donors[split.test].nunique(), len(split.test)
    (2, 1, 5)
    """
    rows = np.arange(n_cells) if usable is None else np.flatnonzero(usable)
    if groups is not None:
        texts = texts_of(groups, key=str(groups.name), argument="split_by")
        names = sorted(texts[rows].dropna().unique())
        n_parts = 1 + (test_size > 0) + (validation_size > 0)
        if len(names) < n_parts:
            fix = "omit split_by to split by cell"
            if len(names) == 2:
                fix = (
                    "pass validation_size=0 to test on one of them, or as split_key a column of train and validation "
                    "cells of one group and test cells of the other"
                )
            raise DataError(
                f"has {len(names)} group{'' if len(names) == 1 else 's'} with usable cells "
                f"({listing(names)}), but training, validation and test sets need {n_parts} groups; {fix}.",
                split_by=str(groups.name),
            )
        rest, test = split_cells(n_cells, test_size, seed, groups=groups, rows=rows)
        share = validation_size / (1 - test_size)
        train, validation = split_cells(n_cells, share, seed + 1, groups=groups, rows=rest)
        return Split(train, validation, test)
    codes = np.zeros(len(rows), dtype=np.int64)
    if strata is not None:
        codes = np.asarray(strata.iloc[rows].astype("category").cat.codes, dtype=np.int64)
    generator = np.random.default_rng(seed)
    parts: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
    for code in np.unique(codes):
        of_class = generator.permutation(rows[codes == code])
        # At least one cell of each part, if possible.
        size = len(of_class)
        n_test = min(max(1, round(size * test_size)) if test_size else 0, size - 1)
        n_validation = max(1, round(size * validation_size)) if validation_size else 0
        n_validation = min(n_validation, size - 1 - n_test)
        parts["test"].append(of_class[:n_test])
        parts["validation"].append(of_class[n_test : n_test + n_validation])
        parts["train"].append(of_class[n_test + n_validation :])
    return Split(**{part: np.sort(np.concatenate(chunks)) for part, chunks in parts.items()})


def with_each_in_training(split: Split, has: np.ndarray) -> Split:
    """Return a split in which each label without training cells has one held-out cell moved to training.

    Validation and test keep at least one cell each, so some labels may remain without training cells if very many are
    rare.

    Parameters
    ----------
    split
        Rows of the three parts.
    has
        Whether each cell has each label, bool, shape (N, C).
    """
    parts = {part: getattr(split, part) for part in PARTS}
    for of_label in has.T:
        if of_label[parts["train"]].any():
            continue
        for part in ("validation", "test"):  # a label that the test lacks cannot be scored
            if len(rows := parts[part][of_label[parts[part]]]) and len(parts[part]) > 1:
                parts["train"] = np.union1d(parts["train"], rows[:1])
                parts[part] = np.setdiff1d(parts[part], rows[:1])
                break
    return Split(**parts)


def warn_of_unlearned(prefix: str, names: Sequence[str], n_cells: int) -> None:
    """Report labels of held-out cells that no training cell has.

    Parameters
    ----------
    prefix
        The argument and its value, for the message.
    names
        The labels; may be empty.
    n_cells
        Number of held-out cells that have one of these labels.
    """
    if names:
        warn(
            f"{prefix}: {n_cells} held-out cells have values that no training cell has ({listing(names)}); change the "
            "split."
        )


def split_from(column: pd.Series, usable: np.ndarray | None, *, key: str) -> Split:
    """Read the split from a column of obs: ``"train"``, ``"validation"`` or ``"test"``; other cells are not used.

    Raises
    ------
    DataError
        If there are no training cells, or the column contains other values.
    """
    texts = texts_of(column, key=key, argument="split_key")
    values, missing = np.asarray(texts, dtype=object), texts.isna()
    if unknown := sorted(set(texts.categories) - set(PARTS)):
        raise DataError(f"contains {listing(unknown)}; use only {listing(PARTS)}.", split_key=key)
    taking_part = ~missing if usable is None else ~missing & usable
    rows = {part: np.flatnonzero(taking_part & (values == part)) for part in PARTS}
    if not len(rows["train"]):
        raise DataError("is not 'train' for any usable cell; assign cells to 'train'.", split_key=key)
    return Split(**rows)
