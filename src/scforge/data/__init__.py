"""Cells and genes: vocabulary, gene mapping, checks, sources and batches."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "CellBlock": "scforge.data.cells",
    "CellOrder": "scforge.data.sampling",
    "CensusQuery": "scforge.data.census",
    "Cells": "scforge.data.cells",
    "GeneVocab": "scforge.data.vocab",
    "StoreCells": "scforge.data.store",
    "convert": "scforge.data.conversion",
    "convert_gene_ids": "scforge.data.vocab",
    "inspect_store": "scforge.data.store",
    "inspect_h5ad": "scforge.data.sources",
    "list_vocabs": "scforge.data.vocab",
    "map_genes": "scforge.data.genes",
    "open_cells": "scforge.data.sources",
    "read_h5ad": "scforge.data.sources",
    "select_genes": "scforge.data.statistics",
    "split_cells": "scforge.data.splits",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "open_cells",
    "read_h5ad",
    "CensusQuery",
    "Cells",
    "StoreCells",
    "CellBlock",
    "CellOrder",
    "split_cells",
    "convert",
    "GeneVocab",
    "list_vocabs",
    "map_genes",
    "convert_gene_ids",
    "select_genes",
    "inspect_h5ad",
    "inspect_store",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
