"""What does tokenizing a cell cost, beside the way it is usually written?

Each strategy of scforge on blocks of cells, the tokens alone and as a padded batch with CLS, against the
same algorithm in NumPy, cell by cell and vectorized over the block. The references do no padding. Everything runs in
one thread. The results of the references are compared with those of scforge before anything is timed.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy import sparse

import scforge
from scforge.data import CellBlock, GeneVocab
from scforge.data.cells import CellSource
from scforge.data.statistics import gene_medians
from scforge.tokenizers import Masking, Tokenizer, get_tokenizer

N_BINS = 51
Tokens = tuple[np.ndarray, np.ndarray]
Reference = Callable[[CellBlock, Tokenizer], Tokens]


def rank_per_cell(block: CellBlock, tokenizer: Tokenizer) -> Tokens:
    """Return ids and values, one cell after the other."""
    medians, ids, values = tokenizer.vocab.medians, [], []
    for cell in range(len(block)):
        part = slice(block.indptr[cell], block.indptr[cell + 1])
        scaled = block.counts[part].astype(np.float64) * (1 / block.totals[cell]) * 1e4
        order = np.argsort(-(scaled * (1 / medians[block.genes[part]])), kind="stable")[: tokenizer.most_genes]
        ids.append(block.genes[part][order] + tokenizer.vocab.n_special)
        values.append(np.log1p(scaled[order]))
    return np.concatenate(ids), np.concatenate(values)


def rank_vectorized(block: CellBlock, tokenizer: Tokenizer) -> Tokens:
    """Return ids and values, with one sort over the block."""
    lengths = np.diff(block.indptr)
    cells = np.repeat(np.arange(len(block)), lengths)
    scaled = block.counts.astype(np.float64) * np.repeat(1 / block.totals, lengths) * 1e4
    keys = scaled * (1 / tokenizer.vocab.medians)[block.genes]
    order = np.lexsort((-keys, cells))
    order = order[np.arange(len(order)) - np.repeat(block.indptr[:-1], lengths) < tokenizer.most_genes]
    return block.genes[order] + tokenizer.vocab.n_special, np.log1p(scaled[order])


def bins_per_cell(block: CellBlock, tokenizer: Tokenizer) -> Tokens:
    """Return ids and bins, one cell after the other, as scGPT's preprocessing with side "one"."""
    bins = []
    for cell in range(len(block)):
        counts = block.counts[block.indptr[cell] : block.indptr[cell + 1]]
        bins.append(np.digitize(counts, np.quantile(counts, np.linspace(0, 1, N_BINS - 1))))
    return block.genes + tokenizer.vocab.n_special, np.concatenate(bins)


def bins_vectorized(block: CellBlock, tokenizer: Tokenizer) -> Tokens:
    """Return ids and bins, with one sort and one search over the block."""
    lengths = np.diff(block.indptr)
    cells = np.repeat(np.arange(len(block)), lengths)
    counts = block.counts.astype(np.float64)
    ranked = counts[np.lexsort((counts, cells))]
    position = (lengths - 1)[:, None] * np.linspace(0, 1, N_BINS - 1)
    lower = np.floor(position).astype(np.int64)
    low = ranked[block.indptr[:-1, None] + lower]
    high = ranked[block.indptr[:-1, None] + np.minimum(lower + 1, (lengths - 1)[:, None])]
    share = position - lower
    edges = np.where(share >= 0.5, high - (high - low) * (1 - share), low + (high - low) * share)
    step = counts.max() + 1  # shifts each cell to a range of its own, so that one search serves all
    shifted = (edges + step * np.arange(len(block))[:, None]).ravel()
    found = np.searchsorted(shifted, counts + step * cells, side="right") - cells * (N_BINS - 1)
    return block.genes + tokenizer.vocab.n_special, found


def values_per_cell(block: CellBlock, tokenizer: Tokenizer) -> Tokens:
    """Return ids and log1p CP10K, one cell after the other."""
    values = []
    for cell in range(len(block)):
        counts = block.counts[block.indptr[cell] : block.indptr[cell + 1]]
        values.append(np.log1p(counts.astype(np.float64) / block.totals[cell] * 1e4))
    return block.genes + tokenizer.vocab.n_special, np.concatenate(values)


def values_vectorized(block: CellBlock, tokenizer: Tokenizer) -> Tokens:
    """Return ids and log1p CP10K of the block."""
    scale = np.repeat(1e4 / block.totals, np.diff(block.indptr))
    return block.genes + tokenizer.vocab.n_special, np.log1p(block.counts * scale)


STRATEGIES: list[tuple[str, str, dict[str, Any], tuple[Reference, Reference] | None]] = [
    ("rank_value", "rank_value", {}, (rank_per_cell, rank_vectorized)),
    ("rank_value, 512 tokens", "rank_value", {"max_len": 512}, (rank_per_cell, rank_vectorized)),
    ("binned, side one", "binned_expression", {"side": "one", "max_len": 8192}, (bins_per_cell, bins_vectorized)),
    ("binned, side both", "binned_expression", {"side": "both", "max_len": 8192}, None),
    ("binned, 512 drawn tokens", "binned_expression", {"side": "one", "max_len": 512}, None),
    ("continuous_projection", "continuous_projection", {}, (values_per_cell, values_vectorized)),
    ("continuous, TranscriptFormer", "continuous_projection",
     {"transform": "counts", "clip": 30.0, "order": "random", "attention_bias": True, "max_len": 2048}, None),
]  # fmt: skip


def synthetic(n_cells: int, n_genes: int = 20_000, n_nonzero: int = 1_200, seed: int = 0) -> CellSource:
    """Return cells with about `n_nonzero` expressed genes each; over half of the counts are 1, as in droplet data."""
    rng = np.random.default_rng(seed)
    level = rng.lognormal(0, 1.6, n_genes)
    genes = [np.sort(rng.choice(n_genes, size, replace=False)) for size in rng.poisson(n_nonzero, n_cells)]
    indptr = np.cumsum([0, *[len(part) for part in genes]])
    indices = np.concatenate(genes)
    counts = (rng.poisson(0.5 * level[indices]) + 1).astype(np.float32)
    matrix = sparse.csr_matrix((counts, indices.astype(np.int32), indptr), shape=(n_cells, n_genes))
    return CellSource(matrix, np.asarray(matrix.sum(axis=1), dtype=np.float64).ravel())


def pbmc(n_cells: int) -> CellSource:
    """Return the cells of PBMC 3k, repeated."""
    counts = sparse.csr_matrix(scforge.datasets.pbmc3k().X)
    matrix = counts[np.arange(n_cells) % counts.shape[0]]
    return CellSource(matrix, np.asarray(matrix.sum(axis=1), dtype=np.float64).ravel())


def blocks_of(cells: CellSource, size: int) -> Iterator[CellBlock]:
    """Yield the cells in blocks."""
    for start in range(0, len(cells), size):
        yield cells.block(np.arange(start, min(start + size, len(cells))))


def measure(function: Callable[[CellBlock], Any], blocks: list[CellBlock], repeats: int) -> tuple[float, float]:
    """Return wall and CPU microseconds a cell, the best of some repeats."""
    function(blocks[0])
    n_cells = sum(len(block) for block in blocks)
    best = (np.inf, np.inf)
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        for block in blocks:
            function(block)
        best = min(best, (time.perf_counter() - wall, time.process_time() - cpu), key=lambda pair: pair[1])
    return best[0] / n_cells * 1e6, best[1] / n_cells * 1e6


def check(name: str, reference: Reference, block: CellBlock, tokenizer: Tokenizer) -> None:
    """Raise unless the reference and scforge agree on a block."""
    ids, values = reference(block, tokenizer)
    tokens = tokenizer._tokenize(block)
    if not (np.array_equal(ids, tokens.ids) and np.allclose(values, tokens.values, rtol=1e-6)):
        raise AssertionError(f"{reference.__name__} and {name} differ")


def compare(title: str, cells: CellSource, size: int, repeats: int) -> None:
    """Print the table of one data set."""
    blocks = list(blocks_of(cells, size))
    genes = [f"gene{index}" for index in range(cells.counts.shape[1])]
    vocab = GeneVocab.from_genes(genes).with_medians(gene_medians(cells.counts, cells.totals))
    print(
        f"\n{title}: {len(cells):,} cells, {cells.n_expressed.mean():,.0f} nonzeros a cell, blocks of {size:,} cells\n"
    )
    print("| strategy | tokens, CPU-us a cell | k cells / CPU-s | wall-us | padded batch with CLS, CPU-us "
          "| NumPy a cell, ratio | NumPy vectorized, ratio |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for label, name, options, references in STRATEGIES:
        tokenizer = get_tokenizer(name, vocab, **options)
        wall, cpu = measure(tokenizer._tokenize, blocks, repeats)
        _, padded = measure(tokenizer, blocks, repeats)
        ratios = ["", ""]
        if references is not None:
            for column, reference in enumerate(references):
                check(label, reference, blocks[0], tokenizer)
                _, cost = measure(lambda block, of=reference, t=tokenizer: of(block, t), blocks, max(1, repeats // 3))
                ratios[column] = f"{cost:.1f} us, {cost / cpu:.1f}x"
        print(f"| {label} | {cpu:.2f} | {1e3 / cpu:.0f} | {wall:.2f} | {padded:.2f} | {ratios[0]} | {ratios[1]} |")
    tokenizer = get_tokenizer("rank_value", vocab)
    masking = Masking(vocab)
    batches = [(tokenizer(block), block.rows) for block in blocks[:4]]
    masking(batches[0][0], batches[0][1], epoch=0)
    start = time.process_time()
    for batch, rows in batches:
        masking(batch, rows, epoch=0, hidden_last=True)
    cost = (time.process_time() - start) / sum(len(rows) for _, rows in batches) * 1e6
    print(f"\nMasking 15 % of a padded batch, hidden tokens last: {cost:.2f} CPU-us a cell")


def main() -> None:
    """Print a table for real and one for synthetic cells."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=8_192, help="cells of each data set (%(default)s)")
    parser.add_argument("--block", type=int, default=1_024, help="cells a block (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="repeats, the best counts (%(default)s)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    compare("PBMC 3k, repeated", pbmc(options.cells), options.block, options.repeats)
    compare("Synthetic", synthetic(options.cells), options.block, options.repeats)


if __name__ == "__main__":
    main()
