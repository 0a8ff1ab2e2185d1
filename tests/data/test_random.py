"""Random numbers of cells."""

import numpy as np
from scipy import sparse

from scforge.data import CellBlock
from scforge.data.random import content_keys


def block(rows, draw=0):
    counts = np.random.default_rng(0).poisson(0.5, (50, 40))
    source = CellBlock.from_csr(sparse.csr_matrix(counts[rows].astype(np.float32)))
    return CellBlock(source.indptr, source.genes, source.counts, source.totals, source.rows, draw=draw)


def test_a_cell_keeps_its_numbers_wherever_it_stands():
    whole = content_keys(block(np.arange(50)), seed=3)
    order = np.random.default_rng(1).permutation(50)[:20]
    assert np.array_equal(content_keys(block(order), seed=3), whole[order])


def test_cells_seeds_draws_and_streams_have_numbers_of_their_own():
    rows = np.arange(50)
    keys = [
        content_keys(block(rows, draw), seed=seed, stream=stream)
        for draw in (0, 1)
        for seed in (0, 1)
        for stream in (0, 1)
    ]
    assert len(np.unique(np.concatenate(keys))) == 8 * 50


def test_one_count_more_or_another_gene_changes_the_numbers():
    cells = sparse.csr_matrix(
        np.array([[1, 2, 0, 0], [1, 3, 0, 0], [2, 1, 0, 0], [1, 0, 2, 0], [0, 0, 0, 0]], dtype=np.float32)
    )
    assert len(np.unique(content_keys(CellBlock.from_csr(cells), seed=0))) == 5


def test_bits_of_the_keys_are_even():
    rng = np.random.default_rng(0)
    cells = sparse.csr_matrix(rng.poisson(0.3, (4000, 30)).astype(np.float32))
    keys = content_keys(CellBlock.from_csr(cells), seed=0)
    bits = (keys[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.04
