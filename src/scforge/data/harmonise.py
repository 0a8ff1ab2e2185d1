"""Genes of several sources over one vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scforge.data.id_kinds import recognise_ids
from scforge.data.mapping import MIN_OVERLAP, names_of
from scforge.data.vocab import GeneVocab, strip_version
from scforge.errors import DataError, GeneMismatchError, listing

if TYPE_CHECKING:
    from scforge.data.streams import CellStream

__all__ = ["check_shared", "stream_genes", "union_vocab"]


def stream_genes(stream: CellStream, gene_key: str | None = None) -> np.ndarray:
    """Return the gene names of a source, array of str, shape (n_genes,).

    Raises
    ------
    DataError
        If it has no such column, or names are missing.
    """
    try:
        return names_of(stream.var, gene_key)
    except DataError as error:
        if stream.name == "adata":
            raise
        raise DataError(f"{stream.name!r}: {error}") from error


def check_shared(names: dict[str, np.ndarray]) -> None:
    """Raise unless sources share genes with the first, as sources do that name them alike.

    Parameters
    ----------
    names
        Gene names of each source.

    Raises
    ------
    GeneMismatchError
        If one shares less than a tenth of its genes, or of those of the first source if they are fewer.
    """
    (first, known), *others = names.items()
    for source, found in others:
        shared = len(np.intersect1d(known, found))
        if shared < MIN_OVERLAP * min(len(known), len(found)):
            kinds = recognise_ids(found), recognise_ids(known)
            raise GeneMismatchError(
                f"{source!r} shares {shared} gene names with {first!r}: they hold {kinds[0]} such as "
                f"{listing(found[:2])} and {kinds[1]} such as {listing(known[:2])}; "
                "name the genes alike before joining files."
            )


def union_vocab(streams: Sequence[CellStream], gene_key: str | None = None) -> GeneVocab:
    """Return a vocabulary of all genes of all sources, in the order in which they come.

    Raises
    ------
    DataError
        If gene names cannot be used.
    GeneMismatchError
        If sources share hardly any gene, e.g. because one has symbols and the other Ensembl ids.
    """
    names = [stream_genes(stream, gene_key) for stream in streams]
    check_shared({stream.name: found for stream, found in zip(streams, names, strict=True)})
    return GeneVocab(tuple(dict.fromkeys(strip_version(name) for found in names for name in found)))
