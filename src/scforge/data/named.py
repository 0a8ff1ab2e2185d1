"""Gene vocabularies that ship with the package and need no network."""

from __future__ import annotations

import csv
import gzip
from importlib import resources

from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError, did_you_mean, listing

__all__ = ["NAMED_VOCABS", "list_vocabs", "load_named"]

NAMED_VOCABS = {"human_protein_coding": "CELLxGENE schema 7.1.2"}
"""Vocabularies that ship with the package, and the release each was made from."""


def list_vocabs() -> list[str]:
    """Return the names of the vocabularies that ship with the package."""
    return sorted(NAMED_VOCABS)


def load_named(name: str) -> GeneVocab:
    """Return the vocabulary that ships as `name`."""
    if name not in NAMED_VOCABS:
        known = list_vocabs()
        raise OptionError(
            f"gene_vocab={name!r} is neither a shipped vocabulary nor a file"
            f"{did_you_mean(name, known) or ';'} (shipped: {listing(known)}, or 'from_data')"
        )
    table = resources.files("scforge.data").joinpath("tables", f"{name}.csv.gz")
    with table.open("rb") as raw, gzip.open(raw, "rt", encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    return GeneVocab(
        genes=tuple(row["gene_id"] for row in rows),
        symbols=tuple(row["symbol"] for row in rows),
        release=f"{name}, {NAMED_VOCABS[name]}",
    )
