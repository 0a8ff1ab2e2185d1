"""Streaming medians against NumPy's."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
from scipy import sparse

from scforge.data import CellBlock, GeneVocab, StreamingMedians, measure_medians, open_cells
from scforge.data.h5ad import Matrix
from scforge.data.medians import _N_BINS
from scforge.data.selection import gene_medians
from scforge.errors import DataError, GeneMismatchError, MissingFileError, OptionError, ScforgeWarning


@pytest.fixture
def cells(tiny_adata, tiny_vocab):
    return open_cells(tiny_adata, tiny_vocab)


def streamed(cells, *rows):
    medians = StreamingMedians(cells.counts.shape[1])
    for part in rows:
        medians.update(cells.block(part))
    return medians


def test_within_one_percent_of_numpy():
    generator = np.random.default_rng(0)
    # From one count of a cell with a hundred million to a cell that has one gene only.
    totals = np.round(10 ** generator.uniform(0, 8, 501))
    counts = np.floor(totals[:, None] * generator.uniform(0, 1, (501, 40)) ** 4)
    counts[:, 0] = totals
    counts[:, 1] = 1
    counts[:, 2] = 0
    counts[1:, 3] = 0
    counts[0, 3] = totals[0]
    block = CellBlock.from_csr(sparse.csr_matrix(counts), totals)
    medians = StreamingMedians(40)
    medians.update(block)
    values = block.counts / np.repeat(totals, np.diff(block.indptr)) * 1e4
    expected = [np.median(values[block.genes == g]) if (block.genes == g).any() else 1.0 for g in range(40)]
    np.testing.assert_allclose(medians.medians(), expected, rtol=0.01)
    assert medians.medians()[2] == 1.0


@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_even_and_odd_numbers_of_values(n):
    counts = np.array([[1], [10], [100], [1000], [7], [5], [90], [3], [33], [2]])[:n]
    medians = StreamingMedians(1)
    medians.update(CellBlock.from_csr(sparse.csr_matrix(counts), np.full(n, 2000)))
    np.testing.assert_allclose(medians.medians(), np.median(counts / 2000 * 1e4), rtol=0.01)


def test_order_and_parts_do_not_matter(cells):
    rows = np.random.default_rng(0).permutation(60)
    whole = streamed(cells, np.arange(60)).medians()
    np.testing.assert_array_equal(streamed(cells, rows[:7], rows[7:20], rows[20:]).medians(), whole)
    first, second = streamed(cells, rows[:13]), streamed(cells, rows[13:])
    first.merge(second)
    np.testing.assert_array_equal(first.medians(), whole)


def test_memory_does_not_grow(cells):
    medians = streamed(cells, np.arange(60))
    size = medians._counts.nbytes
    for _ in range(5):
        medians.update(cells.block(np.arange(60)))
    assert medians._counts.nbytes == size == 80 * _N_BINS * 4
    assert size / 80 < 4300


def test_what_cannot_be_added(cells):
    with pytest.raises(DataError, match="block has the gene 79 but there are n_genes=3"):
        StreamingMedians(3).update(cells.block(np.arange(5)))
    with pytest.raises(DataError, match="other has 4 genes but this has 3"):
        StreamingMedians(3).merge(StreamingMedians(4))
    medians = StreamingMedians(2)
    with pytest.raises(DataError, match="block has a count that is not above zero and at most the total"):
        medians.update(CellBlock.from_csr(sparse.csr_matrix([[5, 1], [3, 1]]), np.array([10, 2])))
    assert medians.medians().tolist() == [1.0, 1.0]  # nothing of it was added


def test_data_in_memory_are_exact(tiny_adata, cells):
    vocab = GeneVocab.from_adata(tiny_adata)
    made = measure_medians(tiny_adata, vocab)
    np.testing.assert_array_equal(made.medians, gene_medians(cells.counts, cells.totals))
    assert made.genes == vocab.genes
    assert measure_medians(tiny_adata, made.with_medians(np.ones(80))) == made  # replaced


@pytest.mark.parametrize("convert", [sparse.csr_matrix, sparse.csc_matrix, lambda x: x.toarray()])
def test_files(tiny_adata, tmp_path, convert):
    vocab = GeneVocab.from_genes([*tiny_adata.var_names[:40], "absent"])
    expected = measure_medians(tiny_adata, vocab).medians
    first, second = tiny_adata[:25].copy(), tiny_adata[25:, ::-1].copy()
    for part, name in ((first, "a"), (second, "b")):
        part.layers["counts"] = convert(part.X)
        part.X = part.X.log1p()
        part.var["name"] = part.var_names
        part.var_names = [f"n{i}" for i in range(80)]
        part.write_h5ad(tmp_path / f"{name}.h5ad")
    paths = [tmp_path / "a.h5ad", str(tmp_path / "b.h5ad")]
    made = measure_medians(paths, vocab, layer="counts", gene_key="name")
    np.testing.assert_allclose(made.medians, expected, rtol=0.01)
    assert made.medians[40] == 1.0
    one = measure_medians(paths[1], vocab, layer="counts", gene_key="name")
    np.testing.assert_allclose(one.medians, measure_medians(tiny_adata[25:].copy(), vocab).medians, rtol=0.01)


def test_real_cells_in_many_pieces(pbmc, tmp_path, monkeypatch):
    pbmc.write_h5ad(tmp_path / "cells.h5ad")
    monkeypatch.setattr(Matrix.row_chunks, "__defaults__", (100_000,))
    made = measure_medians(tmp_path / "cells.h5ad", "human_protein_coding")
    exact = measure_medians(pbmc, "human_protein_coding")
    np.testing.assert_allclose(made.medians, exact.medians, rtol=0.01)


def test_files_that_cannot_be_used(tiny_adata, tiny_vocab, tmp_path):
    path = tmp_path / "a.h5ad"
    with pytest.raises(OptionError, match=r"source=\[\] names no file"):
        measure_medians([], tiny_vocab)
    with pytest.raises(OptionError, match="source is of type 'int'"):
        measure_medians(3, tiny_vocab)
    with pytest.raises(MissingFileError):
        measure_medians(path, tiny_vocab)
    tiny_adata.write_h5ad(path)
    with pytest.raises(GeneMismatchError, match="only 0 of the 20120 genes"):
        measure_medians(path, "human_protein_coding")
    counts = tiny_adata.X.toarray()
    ad.AnnData(counts * 0.5, var=tiny_adata.var).write_h5ad(path)
    with pytest.raises(DataError, match=r"a\.h5ad', X holds values that are not whole .*name the layer"):
        measure_medians(path, tiny_vocab)
    counts[[7, 9]] = 0
    ad.AnnData(counts, var=tiny_adata.var).write_h5ad(path)
    with pytest.raises(DataError, match="cells without any count .first: row 7."):
        measure_medians(path, tiny_vocab)


@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_repeated_names_in_a_file_are_told(tiny_adata, tiny_vocab, tmp_path):
    tiny_adata.var["name"] = [*tiny_adata.var_names[:-1], "gene0"]
    tiny_adata.write_h5ad(tmp_path / "a.h5ad")
    with pytest.warns(ScforgeWarning, match="1 columns .first: 'gene0'. are summed"):
        made = measure_medians(tmp_path / "a.h5ad", tiny_vocab, gene_key="name")
    with pytest.warns(ScforgeWarning):
        np.testing.assert_allclose(
            made.medians, measure_medians(tiny_adata, tiny_vocab, gene_key="name").medians, rtol=0.01
        )
