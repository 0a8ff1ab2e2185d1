"""Lists that a user hands in: names of genes, and which genes to take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from scforge.errors import OptionError

__all__ = ["chosen_indices", "listed_names", "n_missing"]


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
