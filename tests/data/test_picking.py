"""Compiled loops over cells that were just read."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from scforge.data.picking import first_damaged, pick_genes, row_checks

N_CELLS, N_GENES = 30, 50


def counts(dtype=np.uint16, indices=np.uint8) -> sparse.csr_matrix:
    matrix = sparse.random(N_CELLS, N_GENES, 0.2, format="csr", random_state=0)
    matrix.data = np.random.default_rng(0).integers(1, np.iinfo(dtype).max, matrix.nnz, endpoint=True).astype(dtype)
    matrix.indices = matrix.indices.astype(indices)
    matrix.sort_indices()
    return matrix


def test_a_check_number_is_as_documented():
    matrix = sparse.csr_matrix(np.array([[0, 3, 0, 7], [0, 0, 0, 0]], dtype=np.uint16))
    assert row_checks(matrix).tolist() == [(0x9E3779B1 * (1 + 3) + 0x85EBCA77 * (3 + 7) + 2) % 2**32, 0]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("indices", [np.uint8, np.int32])
def test_check_numbers_do_not_depend_on_the_width_of_numbers(dtype, indices):
    matrix = counts(dtype)
    expected = row_checks(matrix)
    matrix.indices = matrix.indices.astype(indices)
    matrix.indptr = matrix.indptr.astype(np.int64)
    assert (row_checks(matrix.astype(np.uint32)) == expected).all()
    assert (row_checks(matrix) == expected).all()
    assert first_damaged(matrix, expected) == -1


@pytest.mark.parametrize("part", ["data", "indices"])
@pytest.mark.parametrize("change", ["one more", "zeros"])
def test_the_first_damaged_row_is_found(part, change):
    matrix = counts()
    expected = row_checks(matrix)
    row = 17
    entries = slice(matrix.indptr[row], matrix.indptr[row + 1])
    values = getattr(matrix, part)
    if change == "zeros":
        values[entries] = 0
    else:
        values[entries.start] ^= 1
    later = matrix.indptr[row + 5]
    matrix.data[later] ^= 1
    assert first_damaged(matrix, expected) == row


def test_a_row_that_lost_its_entries_is_found():
    matrix = counts()
    expected = row_checks(matrix)
    rest = matrix.copy()
    start, stop = matrix.indptr[4:6]
    rest.data, rest.indices = np.delete(matrix.data, slice(start, stop)), np.delete(matrix.indices, slice(start, stop))
    rest.indptr = matrix.indptr - np.where(np.arange(N_CELLS + 1) > 4, stop - start, 0)
    assert first_damaged(rest, expected) == 4


@pytest.mark.parametrize("kept", [range(0, N_GENES, 3), [0], [N_GENES - 1], [], range(N_GENES)])
def test_genes_are_picked_like_columns_are(kept):
    matrix = counts()
    kept = np.array(kept, dtype=np.int64)
    columns = np.full(N_GENES, -1, dtype=np.int32)
    columns[kept] = 2 * np.arange(len(kept))  # the genes between are not in the data
    indptr, genes, values = pick_genes(matrix, columns)
    assert (indptr.dtype, genes.dtype, values.dtype) == (np.int64, np.int32, np.float32)
    expected = matrix.astype(np.float32)[:, kept]
    picked = sparse.csr_matrix((values, genes, indptr), shape=(N_CELLS, 2 * N_GENES))
    assert picked.has_canonical_format
    assert (picked[:, 2 * np.arange(len(kept))] != expected).nnz == 0
    assert picked.nnz == expected.nnz


def test_genes_of_no_cells():
    indptr, genes, values = pick_genes(counts()[:0], np.arange(N_GENES, dtype=np.int32))
    assert (indptr.tolist(), len(genes), len(values)) == ([0], 0, 0)
