"""Labels and classes of cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData

from scforge._checks import check_positive
from scforge._constants import UNS_KEY
from scforge.errors import OptionError, listing


def write_probabilities(adata: AnnData, key: str, table: pd.DataFrame) -> None:
    """Write a table with one column per class into ``obsm["<key>_probabilities"]``, and its column names into uns.

    The table itself is not written, because h5ad files do not support column names such as ``"NK/T"``.
    """
    adata.obsm[f"{key}_probabilities"] = np.asarray(table)
    names = np.array([str(name) for name in table.columns], dtype=object)
    adata.uns[UNS_KEY] = {**adata.uns.get(UNS_KEY, {}), f"{key}_classes": names}


UNLABELED, UNKNOWN = -1, -2
"""Codes of cells without a label, and of cells whose label is unknown to the model."""


def check_names(argument: str, names: Any) -> list[str] | None:
    """Return an option that lists names. Raises an error if it is neither None nor a list of unique names."""
    if names is None:
        return None
    listed = pd.api.types.is_list_like(names, allow_sets=False) and all(isinstance(name, str) for name in names)
    if not listed or not 0 < len(set(names)) == len(names):
        raise OptionError(f"{argument}={names!r} is not a list of unique names; pass e.g. ['first', 'second'].")
    return list(names)


BALANCED = "balanced"


def check_weights(argument: str, weights: Any, classes: Sequence[str] | None) -> str | dict[str, float] | None:
    """Return an option that weights classes: None, ``"balanced"`` or a mapping. Raises an error for other values."""
    if weights is None or (isinstance(weights, str) and weights == BALANCED):
        return weights
    if not isinstance(weights, Mapping):
        raise OptionError(f"{argument}={weights!r} must be None, 'balanced' or a dict of weights by class.")
    found = {str(name): check_positive(f"{argument}[{name!r}]", weight) for name, weight in weights.items()}
    if classes is not None and (unknown := set(found) - set(classes)):
        raise OptionError(f"{argument} contains {min(unknown)!r}, which is not a class (classes: {listing(classes)}).")
    return found
