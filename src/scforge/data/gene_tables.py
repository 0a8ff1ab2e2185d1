"""The gene annotations that ship with the package: ids and symbols of all genes of man and mouse."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from scforge.errors import OptionError, did_you_mean, listing

__all__ = ["ANNOTATION", "SPECIES", "GeneTable", "gene_table", "read_table"]

ANNOTATION = "CELLxGENE schema 7.1.2"
"""Release of the annotations."""

SPECIES = ("human", "mouse")
"""Species with an annotation."""


@dataclass(frozen=True)
class GeneTable:
    """All genes of a species.

    Attributes
    ----------
    symbols
        The symbol of each Ensembl id; the id itself where a gene has no other name, as CELLxGENE does.
    ids
        The ids that bear each symbol, in ascending order.
    """

    symbols: Mapping[str, str]
    ids: Mapping[str, tuple[str, ...]]


def read_table(name: str) -> list[list[str]]:
    """Return the rows of the table ``tables/<name>.csv.gz``, its header left out."""
    table = resources.files("scforge.data").joinpath("tables", f"{name}.csv.gz")
    with table.open("rb") as raw, gzip.open(raw, "rt", encoding="utf-8", newline="") as handle:
        return list(csv.reader(handle))[1:]


@cache
def gene_table(species: str) -> GeneTable:
    """Return all genes of ``"human"`` or ``"mouse"``; read once.

    Raises
    ------
    OptionError
        If the species is another.
    """
    if species not in SPECIES:
        raise OptionError(
            f"species={species!r} has no gene table{did_you_mean(species, SPECIES)} (known: {listing(SPECIES)})"
        )
    symbols = {gene: symbol or gene for gene, symbol in read_table(f"{species}_genes")}
    ids: dict[str, tuple[str, ...]] = {}
    for gene, symbol in symbols.items():
        ids[symbol] = (*ids.get(symbol, ()), gene)
    return GeneTable(MappingProxyType(symbols), MappingProxyType(ids))
