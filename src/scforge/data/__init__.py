"""Cells and genes: vocabulary, gene mapping, checks, sources and batches."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "CellBlock": "scforge.data.cells",
    "CellSampler": "scforge.data.sampler",
    "CellSource": "scforge.data.cells",
    "GeneMap": "scforge.data.mapping",
    "GeneVocab": "scforge.data.vocab",
    "map_genes": "scforge.data.mapping",
    "open_cells": "scforge.data.sources",
    "read_h5ad": "scforge.data.sources",
    "select_genes": "scforge.data.selection",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "open_cells",
    "read_h5ad",
    "CellSource",
    "CellBlock",
    "CellSampler",
    "GeneVocab",
    "GeneMap",
    "map_genes",
    "select_genes",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
