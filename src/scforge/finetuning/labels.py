"""Labels and classes of cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData

from scforge._checks import check_positive
from scforge._columns import UNASSIGNED, labels_of, means_no_label, text_of
from scforge._columns import UNKNOWN as UNKNOWN_TYPE
from scforge._constants import UNS_KEY
from scforge.errors import OptionError, listing

UNLABELED, UNKNOWN = -1, -2
"""Codes of cells without a label, and of cells whose label is unknown to the model."""

BALANCED = "balanced"


def write_probabilities(adata: AnnData, key: str, table: pd.DataFrame) -> None:
    """Write a table with one column per class into ``obsm["<key>_probabilities"]``, and its column names into uns.

    The table itself is not written, because h5ad files do not support column names such as ``"NK/T"``.
    """
    adata.obsm[f"{key}_probabilities"] = np.asarray(table)
    names = np.array([str(name) for name in table.columns], dtype=object)
    adata.uns[UNS_KEY] = {**adata.uns.get(UNS_KEY, {}), f"{key}_classes": names}


def decide_labels(
    probabilities: np.ndarray,
    names: Sequence[str],
    *,
    min_probability: float | None = None,
    broader: Mapping[str, str] | None = None,
    is_unknown: np.ndarray | None = None,
) -> tuple[pd.Categorical, np.ndarray]:
    """Return the label of each cell, and its probability, float32, shape (N,).

    Parameters
    ----------
    probabilities
        Probability of each class, shape (N, C).
    names
        Name of each class.
    min_probability
        Cells whose most probable class has a lower probability are "unassigned".
    broader
        Broader label of each class. An uncertain cell gets the broader label whose classes have the highest sum of
        probabilities, if this sum reaches `min_probability`.
    is_unknown
        Cells that are "unknown", bool, shape (N,).
    """
    categories = list(names)
    labels = np.array(categories, dtype=object)[probabilities.argmax(axis=1)]
    of_labels = probabilities.max(axis=1)
    if min_probability is not None:
        unsure = of_labels < min_probability
        labels[unsure] = UNASSIGNED
        if broader is not None:
            parents = sorted({broader[name] for name in names})
            belongs = np.array([[broader[name] == parent for parent in parents] for name in names], dtype=float)
            of_parents = probabilities @ belongs
            wider = unsure & (of_parents.max(axis=1) >= min_probability)
            labels[wider] = np.array(parents, dtype=object)[of_parents[wider].argmax(axis=1)]
            of_labels[wider] = of_parents[wider].max(axis=1)
            categories += [parent for parent in parents if parent not in categories]
        categories.append(UNASSIGNED)
    if is_unknown is not None:
        labels[is_unknown] = UNKNOWN_TYPE
        categories.append(UNKNOWN_TYPE)
    return pd.Categorical(labels, categories=categories), of_labels.clip(0.0, 1.0).astype(np.float32)


def broader_labels(broader: Any, labels: pd.Categorical, column: Any) -> dict[str, str]:
    """Return the broader label of each label, from a mapping or a column of the reference with this name.

    `column` returns the values of a column of the reference.
    """
    names = list(labels.categories)
    if isinstance(broader, Mapping):
        odd = [name for name, parent in broader.items() if not isinstance(parent, str) or means_no_label(parent)]
        if odd:
            raise OptionError(
                f"has no label for {listing(map(str, odd))}; map every label to a broader label.",
                argument="broader",
            )
        mapping = {str(text_of(name)): str(parent) for name, parent in broader.items()}
        if missing := [name for name in names if name not in mapping]:
            raise OptionError(
                f"has no entry for {listing(missing)}; map every label to a broader label.", argument="broader"
            )
        return mapping
    if not isinstance(broader, str):
        raise OptionError(
            f"is of type {type(broader).__name__!r}; pass a column of the reference, or a mapping.",
            argument="broader",
        )
    parents = labels_of(column(broader), key=str(broader), argument="broader")
    pairs = pd.DataFrame({"label": labels, "parent": parents}).dropna().drop_duplicates()
    counts = pairs["label"].value_counts().reindex(names, fill_value=0)
    if (wrong := counts[counts != 1]).size:
        raise OptionError(
            f"has {wrong.iloc[0]} different values for the label {wrong.index[0]!r}; pass a column "
            "with exactly one broader label for each label.",
            broader=broader,
        )
    return dict(zip(pairs["label"], pairs["parent"], strict=True))


def check_names(argument: str, names: Any) -> list[str] | None:
    """Return an option that lists names. Raises an error if it is neither None nor a list of unique names."""
    if names is None:
        return None
    listed = pd.api.types.is_list_like(names, allow_sets=False) and all(isinstance(name, str) for name in names)
    if not listed or not 0 < len(set(names)) == len(names):
        raise OptionError(
            "is not a list of unique names; pass e.g. ['first', 'second'].", argument=argument, value=names
        )
    return list(names)


def check_weights(argument: str, weights: Any, classes: Sequence[str] | None) -> str | dict[str, float] | None:
    """Return an option that weights classes: None, ``"balanced"`` or a mapping. Raises an error for other values."""
    if weights is None or (isinstance(weights, str) and weights == BALANCED):
        return weights
    if not isinstance(weights, Mapping):
        raise OptionError("must be None, 'balanced' or a dict of weights by class.", argument=argument, value=weights)
    checked = {str(name): check_positive(f"{argument}[{name!r}]", weight) for name, weight in weights.items()}
    if classes is not None and (unknown := set(checked) - set(classes)):
        raise OptionError(
            f"contains {min(unknown)!r}, which is not a class (classes: {listing(classes)}).",
            argument=argument,
        )
    return checked
