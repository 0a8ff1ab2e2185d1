"""Blocks of cells against SciPy's own slicing."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from scforge.data import CellBlock, CellSource, open_cells
from scforge.data.cells import choose_chunks
from scforge.errors import DataError


def dense(block: CellBlock, n_genes: int) -> np.ndarray:
    return sparse.csr_matrix((block.counts, block.genes, block.indptr), shape=(len(block), n_genes)).toarray()


@pytest.mark.parametrize("rows", [[0], [59, 0, 30], [5, 5, 5], [], list(range(60)), list(range(59, -1, -1))])
def test_block_equals_scipy(tiny_adata, tiny_vocab, rows):
    cells = open_cells(tiny_adata, tiny_vocab)
    block = cells.block(np.array(rows, dtype=int))
    assert len(block) == len(rows)
    np.testing.assert_array_equal(dense(block, 80), cells.counts[rows].toarray())
    np.testing.assert_array_equal(block.totals, cells.totals[rows])
    np.testing.assert_array_equal(block.rows, rows)


def test_block_with_empty_cells():
    matrix = sparse.random(30, 12, density=0.1, format="csr", random_state=0, dtype=np.float32)
    source = CellSource(matrix, np.ones(30))
    assert (source.n_expressed == 0).any()
    rows = np.random.default_rng(0).permutation(30)
    np.testing.assert_array_equal(dense(source.block(rows), 12), matrix[rows].toarray())
    np.testing.assert_array_equal(source.n_expressed, (matrix.toarray() > 0).sum(axis=1))


def test_dtypes_of_a_block(tiny_adata, tiny_vocab):
    tiny_adata.X = tiny_adata.X.astype(np.uint16)
    block = open_cells(tiny_adata, tiny_vocab).block(np.array([1, 2]))
    dtypes = [block.indptr.dtype, block.genes.dtype, block.counts.dtype, block.totals.dtype, block.rows.dtype]
    assert dtypes == ["int64", "int32", "float32", "float64", "int64"]


def test_from_csr_puts_a_matrix_in_order():
    # Two entries of one gene, an explicit zero, genes not ascending.
    matrix = sparse.csr_matrix((np.array([1.0, 0.0, 2.0, 4.0]), np.array([2, 1, 0, 2]), np.array([0, 4])), shape=(1, 3))
    block = CellBlock.from_csr(matrix)
    assert block.genes.tolist() == [0, 2]
    assert block.counts.tolist() == [2.0, 5.0]
    assert block.totals.tolist() == [7.0]
    assert matrix.data.tolist() == [1.0, 0.0, 2.0, 4.0]


def test_from_csr_with_totals_of_other_cells():
    with pytest.raises(DataError, match=r"totals has the shape \(3,\) but there are 2 cells"):
        CellBlock.from_csr(sparse.csr_matrix(np.eye(2)), np.ones(3))


def test_of_more_chunks_than_are_needed_random_rows_are_left_out():
    chosen = [choose_chunks(100, 15, 10, seed=seed) for seed in range(20)]
    assert all(len(set(rows // 10)) == 2 and len(set(rows)) == 15 and (np.diff(rows) > 0).all() for rows in chosen)
    assert len({rows[-1] % 10 for rows in chosen}) > 1
