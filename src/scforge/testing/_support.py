"""Cells and tokens for the checks of tokenizers.

Shapes: B cells, S tokens of the longest cell, G genes of the vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from scipy import sparse

from scforge.data.cells import CellBlock, CellSource
from scforge.data.vocab import GeneVocab
from scforge.testing._rules import require
from scforge.tokenizers.base import Tokenizer

__all__ = [
    "EQUAL",
    "N_GENES",
    "Batch",
    "all_cells",
    "genes_of",
    "require_same",
    "small_cells",
    "taken",
    "tokens_of",
]

Batch = dict[str, torch.Tensor]

N_GENES = 60
EQUAL = np.arange(4, 8)
"""Rows of :func:`small_cells` with the same genes, each with one count."""


def small_cells(vocab: GeneVocab) -> CellSource:
    generator = np.random.default_rng(0)
    n_genes = vocab.n_genes
    counts = np.zeros((16, n_genes))
    counts[1, -1], counts[2] = 3, generator.integers(1, 9, n_genes)
    for row in range(3, 16):
        genes = generator.choice(n_genes, min(40, n_genes), replace=False)
        counts[row, genes] = generator.geometric(0.3, len(genes)) * generator.choice([1, 1, 1, 30], len(genes))
    counts[3, :3] = [1, 2**20, 2**31][-n_genes:]
    counts[EQUAL] = counts[EQUAL[0]] > 0
    counts[8] = np.arange(1, n_genes + 1)
    return CellSource(sparse.csr_matrix(counts.astype(np.float32)), counts.sum(axis=1))


def tokens_of(
    tokenizer: Tokenizer, cells: CellSource | CellBlock | sparse.csr_matrix, gene_ids: Any = None, **options: Any
) -> Batch:
    return cast(Batch, tokenizer(all_cells(cells) if isinstance(cells, CellSource) else cells, gene_ids, **options))


def taken(tokenizer: Tokenizer, cells: CellSource) -> np.ndarray:
    """Return which genes can be tokens, bool, shape (G,): a strategy may leave genes out of all cells."""
    config, n_genes = tokenizer.config(), tokenizer.vocab.n_genes
    long = type(tokenizer)(tokenizer.vocab, **{**config, "max_len": n_genes + 99}) if "max_len" in config else tokenizer
    return np.isin(np.arange(n_genes), genes_of(long, tokens_of(long, cells), 2))


def all_cells(cells: CellSource) -> CellBlock:
    return cells.block(np.arange(len(cells)))


def require_same(one: Batch, two: Batch, sentence: str) -> None:
    """Raise unless two batches are equal up to padding."""
    require(set(one) == set(two), f"{sentence} (its keys: {sorted(one)} and {sorted(two)}).")
    for key in one:
        pair = [batch[key] for batch in (one, two)]
        width = max(tensor.shape[1] for tensor in pair)
        a, b = (torch.nn.functional.pad(tensor, (0, width - tensor.shape[1])) for tensor in pair)
        differs = (a != b).any(dim=1)
        require(not differs.any(), f"{sentence} ({key!r} differs in cell {int(differs.int().argmax())}).")


def genes_of(tokenizer: Tokenizer, batch: Batch, row: int) -> np.ndarray:
    """Return the gene indices of the tokens of one cell, in their order."""
    ids = batch["input_ids"][row].numpy()
    return ids[ids >= tokenizer.vocab.n_special] - tokenizer.vocab.n_special
