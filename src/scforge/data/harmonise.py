"""Genes of several sources over one vocabulary."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from scforge.data.id_kinds import recognise_ids
from scforge.data.mapping import MIN_OVERLAP, GeneMap, map_names, names_of
from scforge.data.naming import strip_version
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, GeneMismatchError, ScforgeWarning, listing, warn

if TYPE_CHECKING:
    from scforge.data.streams import CellStream

__all__ = ["check_shared", "map_streams", "stream_genes", "union_vocab"]


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


def check_shared(names: Sequence[tuple[str, np.ndarray]], *, what: str = "gene names") -> None:
    """Raise unless sources share genes with the first, as sources do that name them alike.

    Parameters
    ----------
    names
        Name of each source, and its gene names.
    what
        What they are called in the message.

    Raises
    ------
    GeneMismatchError
        If one shares less than a tenth of its genes, or of those of the first source if they are fewer.
    """
    (first, known), *others = names
    for source, found in others:
        shared = len(np.intersect1d(known, found))
        if shared < MIN_OVERLAP * min(len(known), len(found)):
            kinds = recognise_ids(found), recognise_ids(known)
            raise GeneMismatchError(
                f"{source!r} shares {shared} {what} with {first!r}: they hold {kinds[0]} such as "
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
    check_shared([(stream.name, found) for stream, found in zip(streams, names, strict=True)])
    return GeneVocab(tuple(dict.fromkeys(strip_version(name) for found in names for name in found)))


def map_streams(
    streams: Sequence[CellStream],
    vocab: GeneVocab | None,
    *,
    gene_key: str | None = None,
    min_overlap: float = MIN_OVERLAP,
    whole: bool | None = None,
) -> tuple[GeneVocab, list[GeneMap]]:
    """Map the genes of each source onto one vocabulary.

    Parameters
    ----------
    streams
        The sources.
    vocab
        The vocabulary; None takes all genes of all sources.
    gene_key
        Column of var with the gene names; None reads ``var_names``.
    min_overlap, whole
        As for :func:`scforge.data.mapping.map_names`; `whole` is None: what the release of the vocabulary tells.

    Raises
    ------
    DataError
        If gene names cannot be used.
    GeneMismatchError
        If too few genes of the vocabulary are in a source, or sources share hardly any gene.

    Warns
    -----
    ScforgeWarning
        As :func:`scforge.data.mapping.map_names` does, with the name of the source.
    """
    if vocab is None:
        vocab, min_overlap, whole = union_vocab(streams, gene_key), 0.0, True
    elif whole is None:
        whole = not vocab.chosen_from_data
    maps = []
    for stream in streams:
        names = stream_genes(stream, gene_key)
        with _named(stream):
            mapped = map_names(names, vocab, min_overlap=min_overlap, whole=whole, var=stream.var, gene_key=gene_key)
        maps.append(mapped)
    return vocab, maps


@contextlib.contextmanager
def _named(stream: CellStream) -> Iterator[None]:
    """Put the name of a file before what is told of its genes, which says ``adata`` whatever the source."""
    prefix = "" if stream.name == "adata" else f"{stream.name!r}: "
    told: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", ScforgeWarning)
            yield
    except GeneMismatchError as error:
        raise GeneMismatchError(f"{prefix}{error}") from error
    for warning in told:
        warn(f"{prefix}{warning.message}", warning.category)
