"""The gene vocabulary: which gene has which token id."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge._constants import CLS_TOKEN, EOS_TOKEN, MASK_TOKEN, PAD_TOKEN, SPECIAL_TOKENS, UNK_TOKEN
from scforge.data.arguments import chosen_indices, listed_names, n_missing
from scforge.data.naming import id_kind, plain_name, strip_version
from scforge.data.vocab_files import read_vocab_file, write_vocab_file
from scforge.errors import DataError, ModelFileError, OptionError

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["FROM_DATA", "GeneVocab"]

FROM_DATA = "from_data"
"""Release of a vocabulary whose genes were chosen from data; behind another release, of a choice among its genes."""


@dataclass(frozen=True)
class GeneVocab:
    """An immutable, ordered, hashable gene vocabulary.

    The special tokens have the first token ids, PAD always 0; gene ``genes[i]`` has the id ``n_special + i``.

    Parameters
    ----------
    genes
        Gene names (Ensembl ids without version, or symbols), each once.
    symbols
        A second name for each gene, accepted when names are looked up. A symbol that several genes share counts for
        the first, which in ``"human_protein_coding"`` is the oldest entry, where
        :func:`scforge.data.convert_gene_ids` calls it ambiguous and converts nothing.
    medians
        Median of the nonzero CP10K values of each gene, float64, shape (G,). Used by the rank tokenizer.
    entropies
        How evenly each gene is spread over cells, from 0 (one cell has all of it) to 1, float64, shape (G,); see
        :func:`scforge.data.measure_entropies`. Used by the tokenizer ``"entropy_ranked"``.
    release
        Where the genes come from, e.g. ``"from_data"`` or ``"CELLxGENE schema 7.1.2"``.
    special_tokens
        Special tokens in the order of their ids: PAD first, and MASK; others as they are needed.
    aliases
        Further names, each with the gene that it stands for: former ids, orthologs. Several names may stand for one
        gene; the counts of their columns are summed.

    Notes
    -----
    Ensembl ids are looked up without their version. Ids that end in ``_PAR_Y`` (copies on Y of genes that X has too)
    match nothing in the vocabularies that ship: their counts are not those of the gene on X.

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
            raise DataError("genes=[] holds no gene; a vocabulary needs at least one.")
        if len(set(self.genes)) < len(self.genes):
            twice = next(gene for gene, count in Counter(self.genes).items() if count > 1)
            raise DataError(f"genes holds {twice!r} twice; a vocabulary needs each gene once.")
        tokens = self.special_tokens
        if tokens[:1] != (PAD_TOKEN,) or MASK_TOKEN not in tokens or len(set(tokens)) < len(tokens):
            raise DataError(
                f"special_tokens={tokens!r} must start with {PAD_TOKEN!r}, hold {MASK_TOKEN!r}, and each token once."
            )
        if special := set(self.genes) & {*SPECIAL_TOKENS, *tokens}:
            raise DataError(f"genes holds {special.pop()!r}, which is the name of a special token; rename that gene.")
        for name in ("symbols", "medians", "entropies"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.genes):
                raise DataError(f"{name} has {len(column)} entries but there are {len(self.genes)} genes.")
        if self.medians is not None:
            medians = np.array(self.medians, dtype=np.float64)
            if not (np.isfinite(medians).all() and (medians > 0).all()):
                raise DataError("medians holds a value that is not a positive number; leave genes without one out.")
            medians.setflags(write=False)
            object.__setattr__(self, "medians", medians)
        if self.entropies is not None:
            entropies = np.array(self.entropies, dtype=np.float64)
            if not ((entropies >= 0) & (entropies <= 1)).all():
                raise DataError("entropies holds a value that is not from 0 to 1; measure them with measure_entropies.")
            entropies.setflags(write=False)
            object.__setattr__(self, "entropies", entropies)
        if self.aliases is not None:
            if unknown := set(self.aliases.values()).difference(self.genes):
                raise DataError(f"aliases names {unknown.pop()!r}, which is not among the genes; leave it out.")
            object.__setattr__(self, "aliases", MappingProxyType(dict(self.aliases)) if self.aliases else None)

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes get a vocabulary too, and a read-only mapping cannot be pickled.
        aliases = None if self.aliases is None else dict(self.aliases)
        known = (self.genes, self.symbols, self.medians, self.release, self.special_tokens, aliases, self.entropies)
        return GeneVocab, known

    @classmethod
    def from_genes(cls, genes: Sequence[str], *, release: str = FROM_DATA) -> GeneVocab:
        """Make a vocabulary of `genes` in the given order.

        Parameters
        ----------
        genes
            Gene names, each once.
        release
            Where they come from.

        Raises
        ------
        OptionError
            If `genes` is one text.
        DataError
            If a name is missing or there twice, or no gene is there.
        """
        names = listed_names("genes", genes)
        if missing := n_missing(names):
            raise DataError(f"genes has {missing} missing names; fill them or leave those genes out.")
        return cls(tuple(str(name) for name in names), release=release)

    @classmethod
    def from_adata(cls, adata: AnnData, *, gene_key: str | None = None) -> GeneVocab:
        """Make a vocabulary of all genes of `adata`, named by ``adata.var[gene_key]`` or ``adata.var_names``."""
        from scforge.data.checks import check_is_adata
        from scforge.data.mapping import gene_names

        check_is_adata(adata)
        return cls(tuple(dict.fromkeys(strip_version(name) for name in gene_names(adata, gene_key))))

    @classmethod
    def named(cls, name: str, *, one_to_many: str | None = None) -> GeneVocab:
        """Return a vocabulary that ships with the package.

        Parameters
        ----------
        name
            One of :func:`scforge.data.list_vocabs`.
        one_to_many
            For ``"human_mouse"``: ``"drop"`` (which None means) leaves out families with one gene in the one species
            and several in the other; ``"sum"`` makes one token of each and sums the counts of its genes, which is
            what the name ``"human_mouse_sum"`` means. That sums human paralogs of a family, e.g. CCL4 and CCL4L2, too.
            The orthologs lack some genes that both species have, e.g. GAPDH, which ``"human_mouse_symbols"`` adds.

        Raises
        ------
        OptionError
            If there is no such vocabulary, or `one_to_many` is no choice for it.

        Examples
        --------
        >>> both = GeneVocab.named("human_mouse")
        >>> both.decode(both.encode(["CD3D", "Cd3d", "ENSMUSG00000032094", "ENSG00000167286.9"]))
        ['ENSG00000167286', 'ENSG00000167286', 'ENSG00000167286', 'ENSG00000167286']
        """
        from scforge.data.named import load_named

        return load_named(name, one_to_many=one_to_many)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> GeneVocab:
        """Read a vocabulary that :meth:`save` wrote.

        Raises
        ------
        OptionError
            If `path` is no path.
        MissingFileError
            If there is no such file.
        ModelFileError
            If the file is not a vocabulary, or its content does not fit the hash or the checksum in it.
        """
        content = read_vocab_file(path)
        try:
            vocab = cls(
                genes=tuple(content["genes"]),
                symbols=None if content["symbols"] is None else tuple(content["symbols"]),
                medians=None if content["medians"] is None else np.array(content["medians"]),
                release=content["release"],
                special_tokens=tuple(content["special_tokens"]),
                aliases=content["aliases"],
                entropies=None if content["entropies"] is None else np.array(content["entropies"]),
            )
        except (DataError, OverflowError) as error:
            reason = str(error).rstrip(".")
            raise ModelFileError(f"{os.fspath(path)!r} is not an scforge vocabulary file: {reason}.") from error
        if vocab.hash != content["hash"]:
            raise ModelFileError(f"{os.fspath(path)!r} is corrupted: its genes do not fit the hash stored in it.")
        return vocab

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vocabulary to a JSON file, atomically.

        Parameters
        ----------
        path
            File to write, with a hash of its content, which :meth:`from_file` checks.
        """
        content = {
            "release": self.release,
            "hash": self.hash,
            "special_tokens": list(self.special_tokens),
            "genes": list(self.genes),
            "symbols": None if self.symbols is None else list(self.symbols),
            "medians": None if self.medians is None else self.medians.tolist(),
            "aliases": None if self.aliases is None else dict(self.aliases),
            "entropies": None if self.entropies is None else self.entropies.tolist(),
        }
        write_vocab_file(path, content)

    def with_medians(self, medians: np.ndarray) -> GeneVocab:
        """Return the same vocabulary with these `medians` of its genes, positive, shape (G,)."""
        return replace(self, medians=medians)

    def with_entropies(self, entropies: np.ndarray) -> GeneVocab:
        """Return the same vocabulary with these `entropies` of its genes, from 0 to 1, shape (G,)."""
        return replace(self, entropies=entropies)

    def with_special_tokens(self, *tokens: str) -> GeneVocab:
        """Return the vocabulary with further special tokens behind the ones that it has; genes move to higher ids.

        Examples
        --------
        >>> GeneVocab.from_genes(["CD3D"]).with_special_tokens("<eos>").tokens
        ('<pad>', '<unk>', '<mask>', '<cls>', '<eos>', 'CD3D')
        """
        return replace(self, special_tokens=tuple(dict.fromkeys([*self.special_tokens, *tokens])))

    def subset(self, indices: Sequence[int] | np.ndarray) -> GeneVocab:
        """Return a vocabulary of the genes at `indices`, with all that is known of them.

        Parameters
        ----------
        indices
            Indices among the genes, or a mask with True for each gene to keep, bool, shape (G,).

        Raises
        ------
        OptionError
            If an index is not among the genes, or a mask has another length.
        """
        chosen = chosen_indices(indices, self.n_genes)
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
        """Return a vocabulary of the genes that `other` has too, also written ``vocab & other``.

        Genes are in the order of this vocabulary, with all that it knows of them. One of Ensembl ids and one of symbols
        are compared by the symbols of the former, if it has them.

        Parameters
        ----------
        other
            Another vocabulary.

        Raises
        ------
        OptionError
            If `other` is no vocabulary.
        DataError
            If they share no gene.

        Examples
        --------
        >>> mine = GeneVocab.from_genes(["LYZ", "no such gene", "CD3D"])
        >>> mine.intersection(GeneVocab.named("human_protein_coding")).genes
        ('LYZ', 'CD3D')
        >>> both = GeneVocab.named("human_protein_coding") & mine
        >>> both.genes, both.symbols
        (('ENSG00000090382', 'ENSG00000167286'), ('LYZ', 'CD3D'))
        """
        if not isinstance(other, GeneVocab):
            raise OptionError(f"other is of type {type(other).__name__!r}; pass a GeneVocab.")
        shared = other.gene_indices(self.genes) >= 0
        if self.symbols is not None and self.kind != other.kind:
            shared |= other.gene_indices(self.symbols) >= 0
        if not shared.any():
            raise DataError(
                f"other has no gene of this vocabulary: it holds {other.kind} such as {other.genes[0]!r}, this one "
                f"{self.kind} such as {self.genes[0]!r}; name the genes alike, e.g. with scforge.data.convert_gene_ids."
            )
        chosen = other.chosen_from_data and not self.chosen_from_data
        return replace(self.subset(shared), release=f"{self.release}, {FROM_DATA}" if chosen else self.release)

    def __and__(self, other: object) -> GeneVocab:
        return self.intersection(other) if isinstance(other, GeneVocab) else NotImplemented

    def encode(self, names: Iterable[str]) -> np.ndarray:
        """Return the token id of each of `names`, int32; the id of UNK, or -1 without UNK, for unknown ones."""
        unknown = -1 if self.unk_id is None else self.unk_id
        return np.array([self._find(str(name), unknown) for name in listed_names("names", names)], dtype=np.int32)

    def gene_indices(self, names: Iterable[str]) -> np.ndarray:
        """Return the index among the genes of each of `names`, int32; -1 where a name is unknown."""
        found = (self._find(str(name), -1) for name in listed_names("names", names))
        return np.array([max(index - self.n_special, -1) for index in found], dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the name behind each of the token `ids`.

        Raises
        ------
        OptionError
            If there is no such id.
        """
        tokens = self.tokens
        found = [int(i) for i in ids]
        if wrong := [i for i in found if not 0 <= i < len(tokens)]:
            raise OptionError(f"ids holds {wrong[0]}, which is no token id; ids are from 0 to {len(tokens) - 1}.")
        return [tokens[i] for i in found]

    def token_id(self, token: str) -> int | None:
        """Return the id of the special token `token`, e.g. ``"<cls>"``, or None if the vocabulary lacks it."""
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
        """SHA-256 over the tokens in order, their other names, their medians and their entropies."""
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
        """Whether the genes were chosen from data, or named one by one, instead of taken from an annotation.

        Of an annotation no data set measures every gene, and of chosen genes one does not expect them to hold most
        of the counts.
        """
        return self.release.split(", ")[-1] == FROM_DATA

    @cached_property
    def kind(self) -> str:
        """``"Ensembl ids"`` or ``"gene symbols"``."""
        return id_kind(self.genes)

    def _find(self, name: str, unknown: int) -> int:
        found = self._lookup.get(name)
        return self._lookup.get(plain_name(name), unknown) if found is None else found

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
        """Number of special tokens, which is the token id of the first gene."""
        return len(self.special_tokens)

    @property
    def n_genes(self) -> int:
        """Number of genes, special tokens not counted."""
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
