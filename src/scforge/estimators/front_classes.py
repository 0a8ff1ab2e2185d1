"""Which front class a model is of: that of its folder, or that of its architecture."""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {"Encoder": "scforge.estimators.encoder", "ScDiVa": "scforge.estimators.scdiva"}
_OF_ARCHITECTURES = {"scdiva": "ScDiVa"}
"""Architectures whose front class can do more than ``Encoder``."""


def class_named(name: str) -> Any:
    """Return the front class of this name; None if scforge has none.

    Examples
    --------
    >>> class_named("ScDiVa").__name__, class_named("SCVI")
    ('ScDiVa', None)
    """
    place = _PLACES.get(name)
    return None if place is None else getattr(importlib.import_module(place), name)


def class_of_architecture(architecture: str | None) -> Any:
    """Return the front class that goes with an architecture.

    Examples
    --------
    >>> [class_of_architecture(name).__name__ for name in ("scdiva", "gene_pooling", None)]
    ['ScDiVa', 'Encoder', 'Encoder']
    """
    return class_named(_OF_ARCHITECTURES.get(architecture or "", "Encoder"))


def class_in_place_of(cls: Any, name: str, architecture: str) -> Any:
    """Return the front class that makes the model of a folder where `cls` was asked to.

    Parameters
    ----------
    cls
        The class whose ``load`` was called.
    name
        The class that the folder says.
    architecture
        Its architecture.

    Returns
    -------
    The class of the folder where it is one of `cls`; `cls` where it is one of that class and made for the architecture;
    else None.
    """
    if name == cls.__name__:
        return cls
    made_by = class_named(name)
    if made_by is not None and issubclass(made_by, cls):
        return made_by
    special = class_of_architecture(architecture)
    return cls if made_by is not None and issubclass(special, cls) and issubclass(cls, made_by) else None
