"""What a user hands in by name: lists of genes, and which genes to take; columns of obs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from scforge.errors import DataError, OptionError

if TYPE_CHECKING:
    import pandas as pd

    from scforge.data.cells import Cells

__all__ = ["chosen_indices", "listed_names", "n_missing", "named_column"]


def listed_names(argument: str, names: Iterable[str]) -> list[str]:
    """Return names as a list, or raise if they are one text or no list at all."""
    # A text is a list of its letters to Python.
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise OptionError(f"{argument}={names!r} is not a list of names; pass a list, e.g. ['CD3D', 'LYZ'].")
    return list(names)


def chosen_indices(indices: Sequence[int] | np.ndarray, n_genes: int) -> list[int]:
    """Return the indices of genes that a list of indices or a mask means, or raise if it means others."""
    given = np.asarray(indices)
    if given.dtype == bool:
        if given.shape != (n_genes,):
            raise OptionError(f"indices is a mask of shape {given.shape}; give one of shape ({n_genes},).")
        return np.flatnonzero(given).tolist()
    if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu"):
        raise OptionError(f"indices={indices!r} is neither a list of indices nor a mask.")
    if len(wrong := given[(given < 0) | (given >= n_genes)]):
        raise OptionError(f"indices holds {wrong[0]}, which is no gene; indices are from 0 to {n_genes - 1}.")
    return given.tolist()


def n_missing(names: Iterable[object]) -> int:
    """Return how many names are None, NaN or the like."""
    import pandas as pd

    return sum(name is None or name is pd.NA or name != name for name in names)


def named_column(cells: Cells, key: str, *, argument: str | None) -> pd.Series:
    """Return a column of obs of cells; where there is none, the message names the argument that asked for it."""
    try:
        return cells.column(key)
    except DataError as error:
        if argument is None or not str(error).startswith(repr(key)):
            raise
        raise DataError(f"{argument}={error}") from error
