import json
import pickle

import anndata as ad
import numpy as np
import pytest
from scipy import sparse
from scipy.stats import entropy

from scforge.data import CellBlock, GeneVocab, open_cells
from scforge.data.matrix import Matrix
from scforge.data.medians import StreamingMedians
from scforge.data.statistics import _entropies, gene_entropies, gene_medians, measure_entropies, measure_medians
from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError, ScforgeWarning


@pytest.fixture
def cells(tiny_adata, tiny_vocab):
    return open_cells(tiny_adata, tiny_vocab)


@pytest.fixture
def vocab():
    return GeneVocab(("A", "B", "C"), entropies=np.array([0.1, 1 / 3, 1.0]))


def defined(counts, totals):
    """Return the entropies as they are defined, gene by gene, shape (G,)."""
    values = counts / totals[:, None] * 1e4
    return np.array([entropy(column) / np.log(len(values)) if column.any() else 1.0 for column in values.T])


def test_medians_are_within_one_percent_of_numpy():
    generator = np.random.default_rng(0)
    # From one count of a cell with a hundred million to a cell that has one gene only.
    totals = np.round(10 ** generator.uniform(0, 8, 501))
    counts = np.floor(totals[:, None] * generator.uniform(0, 1, (501, 40)) ** 4)
    counts[:, 0], counts[:, 1], counts[:, 2], counts[1:, 3], counts[0, 3] = totals, 1, 0, 0, totals[0]
    block = CellBlock.from_csr(sparse.csr_matrix(counts), totals)
    medians = StreamingMedians(40)
    medians.update(block)
    values = block.counts / np.repeat(totals, np.diff(block.indptr)) * 1e4
    expected = [np.median(values[block.genes == g]) if (block.genes == g).any() else 1.0 for g in range(40)]
    np.testing.assert_allclose(medians.medians(), expected, rtol=0.01)
    assert medians.medians()[2] == 1.0


def test_entropies_equal_the_definition():
    generator = np.random.default_rng(0)
    counts = generator.poisson(generator.gamma(0.3, 3.0, 50), (300, 50)).astype(float)
    counts[:, 3], counts[:, 4], counts[17, 4], counts[:, 5] = 0, 0, 9, 1
    totals = counts.sum(axis=1) + generator.integers(1, 3000, 300)  # genes outside the vocabulary count, too
    found = _entropies([CellBlock.from_csr(sparse.csr_matrix(counts), totals)], 50)
    np.testing.assert_allclose(found, defined(counts, totals), atol=1e-12)
    assert (found[3], found[4]) == (1.0, 0.0)
    assert ((found >= 0) & (found <= 1)).all()
    assert found.dtype == np.float64
    assert _entropies([], 2).tolist() == [1.0, 1.0]
    assert _entropies([CellBlock.from_csr(sparse.csr_matrix([[5, 0]]))], 2).tolist() == [0.0, 1.0]
    even = _entropies([CellBlock.from_csr(sparse.csr_matrix(np.full((1000, 2), [7, 3])))], 2)
    assert even.max() <= 1.0 == pytest.approx(even.min())


def test_blocks_may_come_in_any_order(cells):
    rows = np.random.default_rng(0).permutation(60)
    blocks = [cells.block(part) for part in (rows[:7], rows[7:20], rows[20:])]
    whole, parts = StreamingMedians(80), StreamingMedians(80)
    whole.update(cells.block(np.arange(60)))
    for block in blocks:
        parts.update(block)
    np.testing.assert_array_equal(parts.medians(), whole.medians())
    expected = defined(cells.counts.toarray(), cells.totals)
    for found in (_entropies(blocks, 80), gene_entropies(cells)):
        np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("convert", [sparse.csr_matrix, sparse.csc_matrix, lambda x: x.toarray()])
def test_files_and_memory_agree(tiny_adata, tmp_path, convert, monkeypatch):
    vocab = GeneVocab.from_genes([*tiny_adata.var_names[:40], "absent"])
    medians, entropies = measure_medians(tiny_adata, vocab), measure_entropies(tiny_adata, vocab)
    values = tiny_adata.X.toarray().astype(float) / tiny_adata.X.toarray().sum(axis=1, keepdims=True) * 1e4
    # Those of data in memory are exact.
    np.testing.assert_allclose(medians.medians[:40], [np.median(x[x > 0]) for x in values[:, :40].T], rtol=1e-12)
    assert medians.medians[40] == entropies.entropies[40] == 1.0
    assert medians.genes == entropies.genes == vocab.genes
    assert measure_medians(tiny_adata, medians.with_medians(np.full(41, 3.0))) == medians  # replaced
    for name, part in (("a", tiny_adata[:25].copy()), ("b", tiny_adata[25:, ::-1].copy())):
        part.layers["counts"] = convert(part.X)
        part.X = part.X.log1p()
        part.var["name"] = part.var_names
        part.var_names = [f"n{i}" for i in range(80)]
        part.write_h5ad(tmp_path / f"{name}.h5ad")
    monkeypatch.setattr(Matrix.row_chunks, "__defaults__", (100,))
    paths, options = [tmp_path / "a.h5ad", str(tmp_path / "b.h5ad")], {"layer": "counts", "gene_key": "name"}
    np.testing.assert_allclose(measure_medians(paths, vocab, **options).medians, medians.medians, rtol=0.01)
    np.testing.assert_allclose(measure_entropies(paths, medians, **options).entropies, entropies.entropies, rtol=1e-9)
    one = measure_medians(paths[1], vocab, **options)
    np.testing.assert_allclose(one.medians, measure_medians(tiny_adata[25:].copy(), vocab).medians, rtol=0.01)


def test_explicit_zeros_are_no_values():
    counts = sparse.csr_matrix((np.array([0.0, 0.0, 4.0]), np.array([0, 0, 0]), np.array([0, 1, 2, 3])), shape=(3, 1))
    assert gene_medians(counts, np.full(3, 1e4)).tolist() == [4.0]
    assert counts.nnz == 3


def test_real_cells(pbmc, tmp_path):
    pbmc.write_h5ad(tmp_path / "cells.h5ad")
    made = measure_medians(tmp_path / "cells.h5ad", "human_protein_coding")
    vocab = measure_entropies(pbmc, measure_medians(pbmc, "human_protein_coding"))
    np.testing.assert_allclose(made.medians, vocab.medians, rtol=0.01)
    # Housekeeping genes are spread evenly, markers are not.
    assert vocab.entropies[vocab.gene_indices(["RPL13", "RPS27", "ACTB"])].min() > 0.95
    assert vocab.entropies[vocab.gene_indices(["PPBP", "LYZ", "MS4A1"])].max() < 0.85


def test_files_that_cannot_be_used(tiny_adata, tiny_vocab, tmp_path):
    path, counts = tmp_path / "a.h5ad", tiny_adata.X.toarray()
    with pytest.raises(OptionError, match=r"source=\[\] is empty"):
        measure_medians([], tiny_vocab)
    with pytest.raises(MissingFileError):
        measure_entropies(tmp_path / "none.h5ad", tiny_vocab)
    tiny_adata.var["name"] = [*tiny_adata.var_names[:-1], "gene0"]
    tiny_adata.write_h5ad(path)
    with pytest.warns(ScforgeWarning, match="1 columns .first: 'gene0'. are summed"):
        made = measure_medians(path, tiny_vocab, gene_key="name")
    with pytest.warns(ScforgeWarning):
        exact = measure_medians(tiny_adata, tiny_vocab, gene_key="name")
    np.testing.assert_allclose(made.medians, exact.medians, rtol=0.01)
    ad.AnnData(counts * 0.5, var=tiny_adata.var).write_h5ad(path)
    with pytest.raises(DataError, match=r"a\.h5ad' contains values that are not whole .*pass the layer"):
        measure_medians(path, tiny_vocab)
    counts[[7, 9]] = 0
    ad.AnnData(counts, var=tiny_adata.var).write_h5ad(path)
    with pytest.raises(DataError, match="cells without counts .first: row 7."):
        measure_medians(path, tiny_vocab)


def test_a_vocabulary_keeps_entropies(vocab, tmp_path):
    vocab.save(tmp_path / "vocab.json")
    for again in (
        GeneVocab.from_file(tmp_path / "vocab.json"),
        pickle.loads(pickle.dumps(vocab)),
        vocab.with_special_tokens("<eos>"),
        vocab.with_medians(np.ones(3)),
    ):
        np.testing.assert_array_equal(again.entropies, vocab.entropies)  # to the last bit
    np.testing.assert_array_equal(vocab.subset([2, 0]).entropies, [1.0, 0.1])
    with pytest.raises(ValueError, match="read-only"):
        vocab.entropies[0] = 1.0
    plain = GeneVocab(("A", "B", "C"))
    assert len({plain.hash, vocab.hash, plain.with_medians(vocab.entropies).hash}) == 3
    assert vocab.with_entropies(np.array([0.1, 0.3, 1.0])) != vocab
    # That of a vocabulary without entropies is what it was before there were any.
    assert plain.hash == "eec71c2d1d0d2cfdb1f701d3d2f663de383f49d7fea393a34c1693dcc518fe15"
    plain.save(tmp_path / "old.json")
    old, new = (json.loads((tmp_path / name).read_text()) for name in ("old.json", "vocab.json"))
    del old["checksum"], old["entropies"], new["checksum"]
    (tmp_path / "old.json").write_text(json.dumps(old | {"format": 1}))
    assert GeneVocab.from_file(tmp_path / "old.json").entropies is None
    for entropies in ([0.2, 1 / 3, 1.0], "high"):
        (tmp_path / "other.json").write_text(json.dumps(new | {"entropies": entropies}))
        with pytest.raises(ModelFileError):
            GeneVocab.from_file(tmp_path / "other.json")
    for bad in ([0.1, 0.2], [0.1, 0.2, 1.1], [0.1, -0.2, 1.0], [0.1, np.nan, 1.0]):
        with pytest.raises(DataError, match="entropies (has 2 entries|contains a value)"):
            GeneVocab(("A", "B", "C"), entropies=np.array(bad))
