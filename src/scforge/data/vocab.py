"""The gene vocabulary: which gene has which token id."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scforge._constants import N_SPECIAL, SPECIAL_TOKENS, UNK_ID
from scforge._io import atomic_write_text
from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError, did_you_mean, listing

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["NAMED_VOCABS", "GeneVocab", "id_kind"]

NAMED_VOCABS = {"human_protein_coding": "CELLxGENE schema 7.1.2"}
"""Vocabularies that ship with the package, and the release each was made from."""

_ENSEMBL = re.compile(r"^ENS[A-Z]*G\d{11}(\.\d+)?(_PAR_Y)?$")
_VERSION = re.compile(r"^(ENS[A-Z]*G\d{11})\.\d+")
_FORMAT = 1


def id_kind(names: Iterable[str]) -> str:
    """Return ``"Ensembl ids"`` or ``"gene symbols"``, whichever most of the first thousand names look like."""
    sample = [str(name) for name, _ in zip(names, range(1000), strict=False)]
    n_ensembl = sum(bool(_ENSEMBL.match(name)) for name in sample)
    return "Ensembl ids" if n_ensembl > len(sample) / 2 else "gene symbols"


def strip_version(name: str) -> str:
    """Return an Ensembl id without its version (``ENSG00000141510.18`` gives ``ENSG00000141510``)."""
    return _VERSION.sub(r"\1", name)


@dataclass(frozen=True)
class GeneVocab:
    """An immutable, ordered, hashable gene vocabulary.

    Token ids 0 to 3 are the special tokens (PAD, UNK, MASK, CLS); gene ``genes[i]`` has the token id ``4 + i``.

    Parameters
    ----------
    genes
        Gene names (Ensembl ids without version, or symbols), each once.
    symbols
        A second name for each gene, accepted when names are looked up. A symbol that several genes share counts for
        the first.
    medians
        Median of the nonzero CP10K values of each gene, float64, shape (G,). Used by the rank tokenizer.
    release
        Where the genes come from, e.g. ``"from_data"`` or ``"CELLxGENE schema 7.1.2"``.

    Examples
    --------
    >>> vocab = GeneVocab.from_genes(["CD3D", "LYZ"])
    >>> len(vocab), vocab.encode(["LYZ", "CD3D", "no such gene"]).tolist(), vocab.decode([4])
    (6, [5, 4, 1], ['CD3D'])
    """

    genes: tuple[str, ...]
    symbols: tuple[str, ...] | None = None
    medians: np.ndarray | None = field(default=None, compare=False, repr=False)
    release: str = "from_data"

    def __post_init__(self) -> None:
        if not self.genes:
            raise DataError("genes=[] holds no gene; a vocabulary needs at least one.")
        if len(set(self.genes)) < len(self.genes):
            twice = next(gene for gene, count in Counter(self.genes).items() if count > 1)
            raise DataError(f"genes holds {twice!r} twice; a vocabulary needs each gene once.")
        if special := set(self.genes) & set(SPECIAL_TOKENS):
            raise DataError(f"genes holds {special.pop()!r}, which is the name of a special token; rename that gene.")
        for name in ("symbols", "medians"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.genes):
                raise DataError(f"{name} has {len(column)} entries but there are {len(self.genes)} genes.")
        if self.medians is not None:
            medians = np.array(self.medians, dtype=np.float64)
            if not (np.isfinite(medians).all() and (medians > 0).all()):
                raise DataError("medians holds a value that is not a positive number; leave genes without one out.")
            medians.setflags(write=False)
            object.__setattr__(self, "medians", medians)

    @classmethod
    def from_genes(cls, genes: Sequence[str], *, release: str = "from_data") -> GeneVocab:
        """Make a vocabulary of `genes` in the given order."""
        return cls(tuple(str(gene) for gene in genes), release=release)

    @classmethod
    def from_adata(cls, adata: AnnData, *, gene_key: str | None = None) -> GeneVocab:
        """Make a vocabulary of all genes of `adata`, named by ``adata.var[gene_key]`` or ``adata.var_names``."""
        from scforge.data.mapping import gene_names

        return cls(tuple(strip_version(name) for name in gene_names(adata, gene_key)))

    @classmethod
    def named(cls, name: str) -> GeneVocab:
        """Return a vocabulary that ships with the package (see ``NAMED_VOCABS``)."""
        if name not in NAMED_VOCABS:
            known = sorted(NAMED_VOCABS)
            raise OptionError(
                f"gene_vocab={name!r} is neither a shipped vocabulary nor a file"
                f"{did_you_mean(name, known) or ';'} (shipped: {listing(known)}, or 'from_data')"
            )
        table = resources.files("scforge.data").joinpath("tables", f"{name}.csv.gz")
        with table.open("rb") as raw, gzip.open(raw, "rt", encoding="utf-8", newline="") as handle:
            rows = list(csv.DictReader(handle))
        return cls(
            genes=tuple(row["gene_id"] for row in rows),
            symbols=tuple(row["symbol"] for row in rows),
            release=f"{name}, {NAMED_VOCABS[name]}",
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> GeneVocab:
        """Read a vocabulary that :meth:`save` wrote.

        Raises
        ------
        MissingFileError
            If there is no such file.
        ModelFileError
            If the file is not a vocabulary, or its content does not fit the hash in it.
        """
        path = Path(path)
        if not path.is_file():
            raise MissingFileError(f"vocabulary file {str(path)!r} does not exist.")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            vocab = cls(
                genes=tuple(content["genes"]),
                symbols=None if content["symbols"] is None else tuple(content["symbols"]),
                medians=None if content["medians"] is None else np.array(content["medians"]),
                release=content["release"],
            )
            expected = content["hash"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelFileError(f"{str(path)!r} is not an scforge vocabulary file: {error}.") from error
        if vocab.hash != expected:
            raise ModelFileError(f"{str(path)!r} is corrupted: its genes do not fit the hash stored in it.")
        return vocab

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vocabulary to a JSON file, atomically."""
        content = {
            "format": _FORMAT,
            "release": self.release,
            "hash": self.hash,
            "special_tokens": list(SPECIAL_TOKENS),
            "genes": list(self.genes),
            "symbols": None if self.symbols is None else list(self.symbols),
            "medians": None if self.medians is None else self.medians.tolist(),
        }
        atomic_write_text(path, json.dumps(content))

    def with_medians(self, medians: np.ndarray) -> GeneVocab:
        """Return the same vocabulary with these medians."""
        return GeneVocab(self.genes, self.symbols, medians, self.release)

    def subset(self, indices: Sequence[int] | np.ndarray) -> GeneVocab:
        """Return a vocabulary of the genes at `indices` (token id minus 4), with their symbols, medians and release."""
        chosen = [int(index) for index in indices]
        return GeneVocab(
            tuple(self.genes[index] for index in chosen),
            None if self.symbols is None else tuple(self.symbols[index] for index in chosen),
            None if self.medians is None else self.medians[chosen],
            self.release,
        )

    def encode(self, names: Iterable[str]) -> np.ndarray:
        """Return the token id of each name, int32; the id of UNK where a name is unknown."""
        lookup = self._lookup
        return np.array([lookup.get(str(n), lookup.get(strip_version(str(n)), UNK_ID)) for n in names], dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the name behind each token id."""
        tokens = self.tokens
        return [tokens[int(i)] for i in ids]

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """All tokens in the order of their ids: special tokens, then genes."""
        return (*SPECIAL_TOKENS, *self.genes)

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the genes in order, their second names and their medians."""
        digest = hashlib.sha256(json.dumps([self.tokens, self.symbols]).encode())
        if self.medians is not None:
            digest.update(self.medians.astype("<f8").tobytes())
        return digest.hexdigest()

    @cached_property
    def kind(self) -> str:
        """``"Ensembl ids"`` or ``"gene symbols"``."""
        return id_kind(self.genes)

    @cached_property
    def _lookup(self) -> dict[str, int]:
        lookup: dict[str, int] = {}
        if self.symbols is not None:
            for index, symbol in enumerate(self.symbols):
                lookup.setdefault(symbol, index + N_SPECIAL)
        lookup.update({gene: index + N_SPECIAL for index, gene in enumerate(self.genes)})
        lookup.update({token: index for index, token in enumerate(SPECIAL_TOKENS)})
        return lookup

    @property
    def n_genes(self) -> int:
        """Number of genes, special tokens not counted."""
        return len(self.genes)

    def __len__(self) -> int:
        return N_SPECIAL + len(self.genes)

    def __contains__(self, name: object) -> bool:
        return str(name) in self._lookup or strip_version(str(name)) in self._lookup

    def __hash__(self) -> int:
        return hash(self.hash)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GeneVocab) and self.hash == other.hash

    def __repr__(self) -> str:
        return f"GeneVocab({self.n_genes} genes, {self.kind}, {self.release!r}, {self.hash[:8]})"
