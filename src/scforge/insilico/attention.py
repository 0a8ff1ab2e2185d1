"""Attention between genes, as a sparse graph.

Shapes: B cells, S tokens, N heads, G genes of the vocabulary, U selected genes.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from scipy import sparse
from torch import nn

from scforge.data.cells import CellSource
from scforge.errors import OptionError, warn
from scforge.insilico.gene_embeddings import check_offers, of_layer, visit
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives.base import Objective

_NUMBERS = 2**26
"""Maximum number of attention weights per layer and batch (256 MB), unless a single cell has more."""


def attention_between_genes(
    module: nn.Module,
    cells: CellSource,
    tokenizer: Tokenizer,
    *,
    objective: Objective | None = None,
    layer: int = -1,
    heads: str | int = "mean",
    top_k: int = 20,
    min_cells: int = 3,
    max_genes: int = 5000,
    batch_size: int = 32,
) -> sparse.csr_matrix:
    """Return the attention of each gene (row) to each other gene (column), averaged over cells.

    The mean is over the cells in which the layer attends to the tokens of both genes (an architecture may keep only the
    first tokens). Attention of a gene to itself and to special tokens is left out, and the remaining weights are not
    rescaled to sum to 1.

    The result is float32, shape (G, G), with at most `top_k` entries per row, for pairs of genes whose tokens occur
    together in at least `min_cells` cells. Sums over all pairs need eight bytes per pair, so only the `max_genes` most
    widely expressed genes are used. `heads` is ``"mean"``, ``"max"`` or the index of a head.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.data.open_cells(scforge.datasets.pbmc3k()[:40, :200].copy())
    >>> tokenizer = scforge.tokenizers.get_tokenizer("rank_value", cells.vocab, use_medians=False)
    >>> module = scforge.models.TransformerEncoder(len(cells.vocab), hidden_dim=8, num_layers=1, num_heads=2)
    >>> graph = attention_between_genes(module, cells, tokenizer, top_k=5)
    >>> graph.shape[0] == cells.vocab.n_genes, bool(np.diff(graph.indptr).max() <= 5)
    (True, True)
    """
    check_offers(module, "output_attentions", "does not return attention weights")
    n_genes, n_special = tokenizer.vocab.n_genes, tokenizer.vocab.n_special
    n_cells = np.bincount(cells.counts.indices, minlength=n_genes)
    seen = np.flatnonzero(n_cells)
    used = np.sort(seen[np.argsort(-n_cells[seen], kind="stable")[:max_genes]])
    if len(seen) > len(used):
        warn(
            f"only the {len(used)} most widely expressed of {len(seen)} genes are analyzed; raise max_genes to include "
            "more."
        )
    positions = np.full(len(tokenizer.vocab), -1, dtype=np.int64)
    positions[n_special + used] = np.arange(len(used))
    sums = np.zeros((len(used), len(used)), dtype=np.float32)
    numbers = np.zeros(sums.shape, dtype=np.int32)
    longest = int(tokenizer.lengths(cells.n_expressed).max())

    def add(batch: dict[str, torch.Tensor]) -> None:
        output = module(**batch, return_logits=False, output_attentions=True)
        weights = _over_heads(of_layer(output.attentions, layer), heads).float().cpu().numpy()
        at = positions[batch["input_ids"].cpu().numpy()]
        at[~batch["attention_mask"].cpu().numpy()] = -1
        at[~weights.any(axis=2)] = -1  # a token that had no room
        _add(weights, at, sums, numbers)

    # In all layers.
    n_heads = sum(part.num_heads for part in module.modules() if isinstance(getattr(part, "num_heads", None), int))
    batch_size = max(1, min(batch_size, _NUMBERS // (max(1, n_heads) * longest**2)))
    visit(module, cells, tokenizer, add, objective=objective, batch_size=batch_size)
    return _strongest(sums, numbers, used, n_genes, top_k, min_cells)


def _over_heads(weights_bnss: torch.Tensor, heads: str | int) -> torch.Tensor:
    """Return the attention of the selected heads, shape (B, S, S)."""
    n_heads = weights_bnss.shape[1]
    if heads == "mean":
        return weights_bnss.mean(dim=1)
    if heads == "max":
        return weights_bnss.amax(dim=1)
    if isinstance(heads, bool) or not isinstance(heads, int) or not -n_heads <= heads < n_heads:
        raise OptionError(f"must be 'mean', 'max' or the index of one of {n_heads} heads.", heads=heads)
    return weights_bnss[:, heads]


@numba.njit(cache=True, nogil=True)
def _add(weights, at, sums, numbers):
    """Add the weights between tokens with a selected gene; other genes have the value -1."""
    for cell in range(len(at)):
        for query in range(at.shape[1]):
            row = at[cell, query]
            if row < 0:
                continue
            for key in range(at.shape[1]):
                column = at[cell, key]
                if column >= 0 and column != row:
                    sums[row, column] += weights[cell, query, key]
                    numbers[row, column] += 1


def _strongest(
    sums: np.ndarray, numbers: np.ndarray, used: np.ndarray, n_genes: int, top_k: int, min_cells: int
) -> sparse.csr_matrix:
    """Return the largest mean weights of each row, shape (G, G)."""
    rows, columns, values = [], [], []
    for row in range(len(used)):
        candidates = np.flatnonzero(numbers[row] >= min_cells)
        means = sums[row, candidates] / numbers[row, candidates]
        best = np.sort(np.argsort(-means, kind="stable")[:top_k])
        best = best[means[best] > 0]
        rows.append(np.full(len(best), used[row]))
        columns.append(used[candidates[best]])
        values.append(means[best])
    if not rows:
        return sparse.csr_matrix((n_genes, n_genes), dtype=np.float32)
    entries = (np.concatenate(values).astype(np.float32), (np.concatenate(rows), np.concatenate(columns)))
    return sparse.csr_matrix(entries, shape=(n_genes, n_genes))
