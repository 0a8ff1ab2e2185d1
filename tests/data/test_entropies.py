"""Streaming entropies against the definition, and their way through vocabularies."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from scipy import sparse
from scipy.stats import entropy

from scforge.data import CellBlock, GeneVocab, StreamingEntropies, measure_entropies, open_cells
from scforge.data.entropies import gene_entropies
from scforge.data.h5ad import Matrix
from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError


@pytest.fixture
def cells(tiny_adata, tiny_vocab):
    return open_cells(tiny_adata, tiny_vocab)


def streamed(cells, *rows):
    entropies = StreamingEntropies(cells.counts.shape[1])
    for part in rows:
        entropies.update(cells.block(part))
    return entropies


def defined(counts, totals):
    """Return the entropies as they are defined, gene by gene, shape (G,)."""
    values = counts / totals[:, None] * 1e4
    return np.array([entropy(column) / np.log(len(values)) if column.any() else 1.0 for column in values.T])


def test_equals_the_definition():
    generator = np.random.default_rng(0)
    counts = generator.poisson(generator.gamma(0.3, 3.0, 50), (300, 50)).astype(float)
    counts[:, 3] = 0
    counts[:, 4] = 0
    counts[17, 4] = 9
    counts[:, 5] = 1
    totals = counts.sum(axis=1) + generator.integers(1, 3000, 300)  # genes outside the vocabulary count, too
    entropies = StreamingEntropies(50)
    entropies.update(CellBlock.from_csr(sparse.csr_matrix(counts), totals))
    found = entropies.entropies()
    np.testing.assert_allclose(found, defined(counts, totals), atol=1e-12)
    assert (found[3], found[4]) == (1.0, 0.0)
    assert ((found >= 0) & (found <= 1)).all()
    assert found.dtype == np.float64


def test_a_gene_that_all_cells_express_alike():
    entropies = StreamingEntropies(2)
    entropies.update(CellBlock.from_csr(sparse.csr_matrix(np.full((1000, 2), [7, 3]))))
    assert entropies.entropies().tolist() == pytest.approx([1.0, 1.0], abs=1e-12)
    assert entropies.entropies().max() <= 1.0


def test_no_cell_and_one():
    entropies = StreamingEntropies(2)
    assert entropies.entropies().tolist() == [1.0, 1.0]
    entropies.update(CellBlock.from_csr(sparse.csr_matrix([[5, 0]])))
    assert entropies.entropies().tolist() == [0.0, 1.0]


def test_parts_and_merging(cells):
    rows = np.random.default_rng(0).permutation(60)
    whole = streamed(cells, np.arange(60)).entropies()
    np.testing.assert_allclose(streamed(cells, rows[:7], rows[7:20], rows[20:]).entropies(), whole, rtol=1e-12)
    first, second = streamed(cells, rows[:13]), streamed(cells, rows[13:])
    first.merge(second)
    np.testing.assert_allclose(first.entropies(), whole, rtol=1e-12)
    np.testing.assert_allclose(whole, defined(cells.counts.toarray(), cells.totals), rtol=1e-9)
    np.testing.assert_allclose(gene_entropies(cells), whole, rtol=1e-12)


def test_what_cannot_be_added(cells):
    with pytest.raises(DataError, match="block has the gene 79 but there are n_genes=3"):
        StreamingEntropies(3).update(cells.block(np.arange(5)))
    with pytest.raises(DataError, match="other has 4 genes but this has 3"):
        StreamingEntropies(3).merge(StreamingEntropies(4))
    entropies = StreamingEntropies(2)
    with pytest.raises(DataError, match="block has a count that is not above zero and at most the total"):
        entropies.update(CellBlock.from_csr(sparse.csr_matrix([[5, 1], [3, 1]]), np.array([10, 2])))
    assert entropies.entropies().tolist() == [1.0, 1.0]  # nothing of it was added
    assert entropies.n_cells == 0


def test_files_and_memory_agree(tiny_adata, tmp_path, monkeypatch):
    vocab = GeneVocab.from_genes([*tiny_adata.var_names[:40], "absent"])
    made = measure_entropies(tiny_adata, vocab)
    assert made.entropies[40] == 1.0
    assert made.genes == vocab.genes
    tiny_adata[:25].copy().write_h5ad(tmp_path / "a.h5ad")
    tiny_adata[25:, ::-1].copy().write_h5ad(tmp_path / "b.h5ad")
    monkeypatch.setattr(Matrix.row_chunks, "__defaults__", (100,))
    of_files = measure_entropies([tmp_path / "a.h5ad", tmp_path / "b.h5ad"], made)
    np.testing.assert_allclose(of_files.entropies, made.entropies, rtol=1e-9)
    with pytest.raises(MissingFileError, match=r"nothing.h5ad"):
        measure_entropies(tmp_path / "nothing.h5ad", vocab)
    with pytest.raises(OptionError, match="source=\\[\\] names no file"):
        measure_entropies([], vocab)


def test_housekeeping_genes_are_spread_evenly(pbmc):
    vocab = measure_entropies(pbmc, "human_protein_coding")
    housekeeping, markers = (
        vocab.entropies[vocab.gene_indices(names)] for names in (["RPL13", "RPS27", "ACTB"], ["PPBP", "LYZ", "MS4A1"])
    )
    assert housekeeping.min() > 0.95
    assert markers.max() < 0.85


@pytest.fixture
def vocab():
    return GeneVocab(("A", "B", "C"), entropies=np.array([0.1, 1 / 3, 1.0]))


def test_a_vocabulary_keeps_them(vocab, tmp_path):
    vocab.save(tmp_path / "vocab.json")
    for again in (
        GeneVocab.from_file(tmp_path / "vocab.json"),
        pickle.loads(pickle.dumps(vocab)),
        vocab.with_special_tokens("<eos>"),
        vocab.with_medians(np.ones(3)),
    ):
        np.testing.assert_array_equal(again.entropies, vocab.entropies)  # to the last bit
    np.testing.assert_array_equal(vocab.subset([2, 0]).entropies, [1.0, 0.1])
    assert GeneVocab.from_file(tmp_path / "vocab.json") == vocab
    with pytest.raises(ValueError, match="read-only"):
        vocab.entropies[0] = 1.0


def test_they_are_in_the_hash_where_there_are_any(vocab):
    plain = GeneVocab(("A", "B", "C"))
    assert len({plain.hash, vocab.hash, plain.with_medians(vocab.entropies).hash}) == 3
    assert vocab.with_entropies(np.array([0.1, 0.3, 1.0])) != vocab
    # That of a vocabulary without entropies is what it was before there were any.
    assert plain.hash == "eec71c2d1d0d2cfdb1f701d3d2f663de383f49d7fea393a34c1693dcc518fe15"


def test_files_without_them(vocab, tmp_path):
    GeneVocab(("A", "B")).save(tmp_path / "old.json")
    content = json.loads((tmp_path / "old.json").read_text())
    assert content["format"] == 1
    assert "entropies" not in content
    assert GeneVocab.from_file(tmp_path / "old.json").entropies is None
    vocab.save(tmp_path / "new.json")
    content = json.loads((tmp_path / "new.json").read_text())
    assert content["format"] == 2
    del content["checksum"]
    content["entropies"][0] = 0.2
    (tmp_path / "other.json").write_text(json.dumps(content))
    with pytest.raises(ModelFileError, match="do not fit the hash"):
        GeneVocab.from_file(tmp_path / "other.json")
    content["entropies"] = "high"
    (tmp_path / "text.json").write_text(json.dumps(content))
    with pytest.raises(ModelFileError, match="'entropies' is not a list of numbers or null"):
        GeneVocab.from_file(tmp_path / "text.json")


@pytest.mark.parametrize("bad", [[0.1, 0.2], [0.1, 0.2, 1.1], [0.1, -0.2, 1.0], [0.1, np.nan, 1.0]])
def test_values_that_are_none(bad):
    with pytest.raises(DataError, match="entropies h(as 2 entries|olds a value)"):
        GeneVocab(("A", "B", "C"), entropies=np.array(bad))
