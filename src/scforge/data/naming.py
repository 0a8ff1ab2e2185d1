"""How genes are named: Ensembl ids, with or without a version, and symbols."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["id_kind", "plain_name", "strip_version"]

_ENSEMBL = re.compile(r"^(ENS[A-Z]*G\d{11})(\.\d+)?(_PAR_Y)?$", re.IGNORECASE)


def id_kind(names: Iterable[str]) -> str:
    """Return ``"Ensembl ids"`` or ``"gene symbols"``, whichever most of the first thousand names look like."""
    sample = [str(name) for name, _ in zip(names, range(1000), strict=False)]
    n_ensembl = sum(bool(_ENSEMBL.match(name)) for name in sample)
    return "Ensembl ids" if n_ensembl > len(sample) / 2 else "gene symbols"


def strip_version(name: str) -> str:
    """Return an Ensembl id without its version (``ENSG00000141510.18`` gives ``ENSG00000141510``)."""
    return _ENSEMBL.sub(r"\1\3", name)


def plain_name(name: str) -> str:
    """Return an Ensembl id in capitals and without its version; any other name as it is."""
    return strip_version(name).upper() if _ENSEMBL.match(name) else name
