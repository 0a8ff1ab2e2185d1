"""Split cells into training and validation cells, by cell or by entire groups such as donors."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge.errors import DataError, OptionError

if TYPE_CHECKING:
    import pandas as pd


_N_ORDERS = 1_000
"""Number of random group orders to try."""


def split_cells(
    n_cells: int,
    validation_size: float,
    seed: int,
    *,
    groups: pd.Series | pd.Categorical | np.ndarray | None = None,
    rows: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Split cells at random into disjoint, sorted training and validation rows.

    Parameters
    ----------
    n_cells
        Number of cells.
    validation_size
        Fraction of cells in the validation set, from 0 to below 1.
    seed
        Random seed.
    groups
        Group of each cell, e.g. its donor or data set, as an obs column or as codes, shape (n_cells,). If given, entire
        groups are held out. Among many random choices, the choice whose fraction of cells is closest to
        `validation_size` is used, with at least one group in each part.
    rows
        Rows to split; other rows are in neither part. If None, splits all cells.

    Returns
    -------
    Training rows and validation rows, int64.

    Raises
    ------
    OptionError
        If `validation_size` is not in [0, 1), it leaves no cells for training, or `rows` are not valid cells.
    DataError
        If a cell has no group, or there is only one group.

    Examples
    --------
    >>> train, validation = split_cells(6, 0.3, seed=0, groups=["a", "a", "a", "b", "b", "b"])
    >>> len(train), len(validation)
    (3, 3)
    """
    if not isinstance(validation_size, numbers.Real) or not 0 <= validation_size < 1:
        raise OptionError("must be at least 0 and less than 1.", validation_size=validation_size)
    if rows is not None:
        rows = np.unique(rows)
        if rows.size and (rows.dtype.kind not in "iu" or not 0 <= rows[0] <= rows[-1] < n_cells):
            raise OptionError(f"contains a value that is not a cell position from 0 to {n_cells - 1}.", rows=rows)
        rows = rows.astype(np.int64)
    codes, names = (None, None) if groups is None else _codes(groups, n_cells, rows)
    if codes is None or names is None or validation_size == 0:
        n = n_cells if rows is None else len(rows)
        n_validation = round(n * validation_size)
        if validation_size > 0 and n_validation == 0 and n > 1:
            n_validation = 1
        if n_validation >= n:
            raise OptionError(
                f"leaves none of the {n} cells for training; reduce validation_size.", validation_size=validation_size
            )
        order = np.random.default_rng(seed).permutation(n)
        train, validation = np.sort(order[n_validation:]), np.sort(order[:n_validation])
    else:
        if len(names) < 2:
            raise DataError(
                f"contains only one group, {str(names[0])!r}; use two or more, or split by cell.", argument="groups"
            )
        # The best of many random choices of groups for this fraction of cells; a group is left to train on.
        rng, sizes, best = np.random.default_rng(seed), np.bincount(codes), np.inf
        for _ in range(_N_ORDERS):
            order = rng.permutation(len(sizes))
            off = np.abs(np.cumsum(sizes[order])[:-1] - sizes.sum() * validation_size)
            if off.min() < best:
                best, chosen = off.min(), order[: off.argmin() + 1]
        held_out = np.isin(codes, chosen)
        train, validation = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    return (train, validation) if rows is None else (rows[train], rows[validation])


def _codes(groups: Any, n_cells: int, rows: np.ndarray | None) -> tuple[np.ndarray, Any]:
    """Return the group code of each cell to split, and the group names."""
    import pandas as pd

    if len(groups) != n_cells:
        raise OptionError(f"has {len(groups)} values for {n_cells} cells; pass one value per cell.", argument="groups")
    from scforge._columns import texts_of

    values = pd.Series(groups)
    texts = texts_of(values, key="split_by", argument="groups")
    codes, names = pd.factorize(texts if rows is None else texts[rows])
    without = codes < 0
    if isinstance(groups, np.ndarray) and groups.dtype.kind in "iu":
        # Codes of a categorical: -1 stands for a missing value.
        without |= (groups if rows is None else groups[rows]) < 0
    if without.any():
        first = np.flatnonzero(without)[0] if rows is None else rows[without][0]
        raise DataError(
            f"(split_by) is missing for {without.sum()} of {len(codes)} cells, e.g. cell {first}; fill in the "
            "values or drop these cells.",
            argument="groups",
        )
    return codes, names
