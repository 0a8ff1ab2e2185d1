"""Genes of the sources of a store onto its vocabulary."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scforge.data.harmonise import stream_genes, union_vocab
from scforge.data.journal import Journal
from scforge.data.mapping import WARN_OUTSIDE, GeneMap, map_names
from scforge.data.named import open_vocab
from scforge.data.streams import CellStream
from scforge.data.vocab import GeneVocab
from scforge.errors import GeneMismatchError, warn

__all__ = ["SourceGenes", "map_sources", "warn_outside"]

logger = logging.getLogger("scforge")


@dataclass(frozen=True)
class SourceGenes:
    """The genes of a source.

    Attributes
    ----------
    columns
        Gene of each column among those of the vocabulary, or -1, int32, shape (n_vars,).
    measured
        True for the genes of the vocabulary that the source has, bool, shape (n_genes,).
    overlap
        Share of the genes of the vocabulary that it has.
    """

    columns: np.ndarray
    measured: np.ndarray
    overlap: float

    @property
    def share(self) -> float:
        """Share of its columns that are genes of the vocabulary."""
        return float((self.columns >= 0).mean())


def map_sources(
    streams: Sequence[CellStream],
    vocab: str | os.PathLike[str] | GeneVocab | None,
    *,
    gene_key: str | None,
    min_overlap: float,
) -> tuple[GeneVocab, list[SourceGenes]]:
    """Return the vocabulary, and the genes of each source over it; log the overlap of each.

    Parameters
    ----------
    streams
        The sources.
    vocab
        As for :func:`scforge.data.convert`.
    gene_key
        Column of ``var`` with the gene names.
    min_overlap
        Smallest share of genes.

    Raises
    ------
    GeneMismatchError
        If a source has too few genes of the vocabulary.

    Warns
    -----
    ScforgeWarning
        If one has less than half of them, or columns that mean one gene.
    """
    taken = union_vocab(streams, gene_key) if vocab is None else open_vocab(vocab)
    found = []
    for stream in streams:
        names = stream_genes(stream, gene_key)
        gene_map = _map(stream, names, taken, gene_key, 0.0 if vocab is None else min_overlap)
        logger.info(
            "%r: %d cells, %d genes; it has %d of the %d genes of the vocabulary (%.1f%%).",
            stream.name,
            stream.n_cells,
            len(names),
            gene_map.n_matched,
            taken.n_genes,
            100 * gene_map.overlap,
        )
        found.append(SourceGenes(gene_map.columns, gene_map.measured, gene_map.overlap))
    return taken, found


def _map(stream: CellStream, names: np.ndarray, vocab: GeneVocab, gene_key: str | None, min_overlap: float) -> GeneMap:
    """Map the names, and tell which source an error or a warning is about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            gene_map = map_names(
                names,
                vocab,
                min_overlap=min_overlap,
                whole=not vocab.chosen_from_data,
                var=stream.var,
                gene_key=gene_key,
            )
        except GeneMismatchError as error:
            raise GeneMismatchError(f"{stream.name!r}: {error}") from error
    for warning in caught:
        warn(f"{stream.name!r}: {warning.message}", warning.category)
    return gene_map


def warn_outside(genes: Sequence[SourceGenes], journal: Journal, vocab: GeneVocab, names: Sequence[str]) -> None:
    """Warn about cells and counts outside of the vocabulary, once all are seen."""
    if journal.n_empty:
        warn(f"{journal.n_empty} cells express no gene of the vocabulary; their embedding tells nothing.")
    if vocab.chosen_from_data:
        return
    for name, kept, total in zip(names, journal.kept, journal.totals, strict=True):
        if kept < (1 - WARN_OUTSIDE) * total:
            warn(
                f"{name!r}: {1 - kept / total:.0%} of the counts lie in genes outside of the vocabulary "
                f"({vocab.release})."
            )
