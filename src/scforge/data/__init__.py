"""Cells and genes: vocabularies, gene mapping, checks, sources and batches."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "open_cells": "scforge.data.sources",
    "read_h5ad": "scforge.data.sources",
    "CensusQuery": "scforge.data.census",
    "Cells": "scforge.data.cells",
    "CellBlock": "scforge.data.cells",
    "CellOrder": "scforge.data.sampling",
    "convert": "scforge.data.conversion",
    "GeneVocab": "scforge.data.vocab",
    "list_vocabs": "scforge.data.vocab",
    "map_genes": "scforge.data.genes",
    "convert_gene_ids": "scforge.data.vocab",
    "select_genes": "scforge.data.statistics",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
