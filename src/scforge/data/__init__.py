"""Cells and genes: vocabulary, gene mapping, checks, sources and batches."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "AnnbatchSampler": "scforge.data.annbatch_sampler",
    "CellBlock": "scforge.data.cells",
    "CellOrder": "scforge.data.order",
    "CellSampler": "scforge.data.sampler",
    "CellSource": "scforge.data.cells",
    "CellWeights": "scforge.data.balance",
    "ClassBalance": "scforge.data.balance",
    "ConvertedGenes": "scforge.data.gene_ids",
    "GeneMap": "scforge.data.mapping",
    "GeneVocab": "scforge.data.vocab",
    "Inspection": "scforge.data.inspection",
    "OverlapReport": "scforge.data.overlap",
    "ParsedPerturbations": "scforge.data.perturbation",
    "PerturbationKeys": "scforge.data.perturbation",
    "StreamingMedians": "scforge.data.medians",
    "Window": "scforge.data.windows",
    "convert_gene_ids": "scforge.data.gene_ids",
    "inspect_h5ad": "scforge.data.inspection",
    "list_vocabs": "scforge.data.named",
    "map_genes": "scforge.data.overlap",
    "measure_medians": "scforge.data.medians",
    "open_cells": "scforge.data.sources",
    "parse_perturbations": "scforge.data.perturbation",
    "read_h5ad": "scforge.data.sources",
    "select_genes": "scforge.data.selection",
    "split_cells": "scforge.data.splits",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "open_cells",
    "read_h5ad",
    "CellSource",
    "CellBlock",
    "CellOrder",
    "Window",
    "ClassBalance",
    "CellWeights",
    "AnnbatchSampler",
    "split_cells",
    "PerturbationKeys",
    "parse_perturbations",
    "ParsedPerturbations",
    "CellSampler",
    "GeneVocab",
    "list_vocabs",
    "map_genes",
    "OverlapReport",
    "GeneMap",
    "convert_gene_ids",
    "ConvertedGenes",
    "select_genes",
    "measure_medians",
    "StreamingMedians",
    "inspect_h5ad",
    "Inspection",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
