"""Ensembl ids to gene symbols and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from scforge.data.gene_tables import ANNOTATION, gene_table
from scforge.data.naming import plain_name
from scforge.errors import OptionError, listing, warn

__all__ = ["ConvertedGenes", "convert_gene_ids", "converted_genes"]


@dataclass(frozen=True, eq=False)
class ConvertedGenes:
    """Gene names of another kind; a column of a data frame can be set to it as it is.

    Attributes
    ----------
    names
        The converted names, object, shape (n,): str, or NaN where a name could not be converted.
    unknown
        Names that the annotation does not have, in the order given, each once.
    ambiguous
        Symbols that several genes bear, each with their ids.

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
    """Convert gene names to Ensembl ids or to symbols, over all genes of the annotation (CELLxGENE schema 7.1.2).

    Parameters
    ----------
    names
        Ensembl ids, with or without version, or symbols; both may be mixed.
    to
        ``"ensembl"`` or ``"symbol"``. A gene that has no symbol of its own keeps its id for one, as in CELLxGENE.
    species
        ``"human"`` or ``"mouse"``.
    keep_unknown
        Leave names that cannot be converted as they are, instead of NaN, so that every column keeps a name.

    Returns
    -------
    The names in the order given, with a report. Nothing is guessed: a name that the annotation lacks, or that several
    genes bear, is not converted. (A look-up in a :class:`scforge.data.GeneVocab` takes the first of several genes
    instead, because counts have to go somewhere: 28 symbols of human protein-coding genes belong to two genes each.)

    Raises
    ------
    OptionError
        If `to` or `species` is not known.

    Warns
    -----
    ScforgeWarning
        If names could not be converted: how many, and the first of them.

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
    if to not in ("ensembl", "symbol"):
        raise OptionError(f"to={to!r} is not known (known: 'ensembl', 'symbol')")
    if isinstance(names, str):
        raise OptionError(f"names={names!r} is one text; pass a list of names.")
    result = converted_genes(names, to, species, keep_unknown=keep_unknown)
    if result.unknown or result.ambiguous:
        warn(f"{result} (by the {species} genes of {ANNOTATION}).")
    return result


def converted_genes(names: Iterable[str], to: str, species: str, *, keep_unknown: bool = False) -> ConvertedGenes:
    """Convert names as :func:`convert_gene_ids` does, without a warning."""
    table = gene_table(species)
    converted: list[object] = []
    unknown: dict[str, None] = {}
    ambiguous: dict[str, tuple[str, ...]] = {}
    for given in names:
        name = str(given)
        plain = plain_name(name)
        found = (plain,) if plain in table.symbols else table.ids.get(name, ())
        symbols = {table.symbols[gene] for gene in found}
        if len(found) == 1 or (found and to == "symbol" and len(symbols) == 1):
            converted.append(found[0] if to == "ensembl" else symbols.pop())
            continue
        converted.append(given if keep_unknown else np.nan)
        if found:
            ambiguous[name] = found
        else:
            unknown[name] = None
    values = np.empty(len(converted), dtype=object)
    values[:] = converted
    return ConvertedGenes(values, tuple(unknown), ambiguous)
