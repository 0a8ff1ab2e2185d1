"""Genes of data onto genes of a vocabulary."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import GeneMap, GeneVocab, map_genes, open_cells
from scforge.data.mapping import gene_names
from scforge.errors import DataError, GeneMismatchError, ScforgeWarning


def test_permuted_genes_give_the_same_cells(tiny_adata, tiny_vocab):
    order = np.random.default_rng(3).permutation(tiny_adata.n_vars)
    straight, permuted = open_cells(tiny_adata, tiny_vocab), open_cells(tiny_adata[:, order].copy(), tiny_vocab)
    assert permuted.counts.has_canonical_format
    for part in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(permuted.counts, part), getattr(straight.counts, part))
    np.testing.assert_array_equal(permuted.totals, straight.totals)


def test_columns_equal_a_dense_reference(tiny_adata):
    genes = ["gene7", "absent", "gene3", "gene79", *[f"gene{i}" for i in range(20, 40)]]
    cells = open_cells(tiny_adata, GeneVocab.from_genes(genes))
    dense = tiny_adata.to_df().reindex(columns=genes, fill_value=0.0).to_numpy()
    np.testing.assert_array_equal(cells.counts.toarray(), dense)
    np.testing.assert_array_equal(cells.totals, tiny_adata.X.toarray().sum(axis=1, dtype=float))
    assert cells.overlap == 23 / 24
    assert cells.counts_kept == pytest.approx(dense.sum() / tiny_adata.X.sum())


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64", "float32", "float64"])
def test_columns_of_one_gene_are_summed(dtype):
    names = np.array(["ENSG00000000001.1", "B", "ENSG00000000001.2"])
    vocab = GeneVocab.from_genes(["ENSG00000000001", "B"])
    counts = sparse.csr_matrix(np.array([[200, 1, 100], [0, 0, 3], [0, 2, 0]], dtype=dtype))
    mapped = map_genes(names, vocab).apply(counts)
    assert mapped.toarray().tolist() == [[300, 1], [3, 0], [0, 2]]
    assert mapped.has_canonical_format
    assert counts.toarray().tolist() == [[200, 1, 100], [0, 0, 3], [0, 2, 0]]


def test_explicit_zeros_are_no_genes():
    counts = sparse.csr_matrix((np.array([0.0, 2.0]), np.array([0, 1]), np.array([0, 2])), shape=(1, 2))
    assert GeneMap(np.array([0, 1], dtype=np.int32), 2).apply(counts).nnz == 1


def test_symbols_and_ids_find_the_same_genes(tiny_adata):
    vocab = GeneVocab(tuple(tiny_adata.var["ensembl"]), symbols=tuple(tiny_adata.var_names))
    by_symbol, by_id = open_cells(tiny_adata, vocab), open_cells(tiny_adata, vocab, gene_key="ensembl")
    np.testing.assert_array_equal(by_symbol.counts.toarray(), by_id.counts.toarray())


def test_special_token_names_are_not_genes():
    gene_map = map_genes(np.array(["<cls>", "A", "<pad>"]), GeneVocab.from_genes(["A"]))
    assert gene_map.columns.tolist() == [-1, 0, -1]


def test_mismatch_names_both_kinds_and_the_column_that_fits(tiny_adata):
    vocab = GeneVocab.from_genes(list(tiny_adata.var["ensembl"]))
    with pytest.raises(GeneMismatchError) as caught:
        open_cells(tiny_adata, vocab)
    message = str(caught.value)
    assert "only 0 of the 80 genes" in message
    assert "holds gene symbols such as 'gene0'" in message
    assert "Ensembl ids such as 'ENSG" in message
    assert "pass gene_key='ensembl'" in message


def test_mismatch_names_var_names_where_those_fit(tiny_adata, tiny_vocab):
    with pytest.raises(GeneMismatchError, match=r"adata\.var_names has 80 of them: pass gene_key=None"):
        open_cells(tiny_adata, tiny_vocab, gene_key="ensembl")


def test_mismatch_without_a_fitting_column(tiny_adata):
    with pytest.raises(GeneMismatchError, match="map the gene ids"):
        open_cells(tiny_adata, GeneVocab.from_genes(["x", "y"]))


def test_no_match_at_all_is_an_error_whatever_the_threshold(tiny_adata):
    with pytest.raises(GeneMismatchError):
        open_cells(tiny_adata, GeneVocab.from_genes(["x"]), min_overlap=0.0)


def test_small_overlap_warns_and_smaller_is_an_error():
    names = np.array([f"g{i}" for i in range(10)])
    with pytest.warns(ScforgeWarning, match=r"10 of the 40 genes of the vocabulary \(25%\)"):
        map_genes(names, GeneVocab.from_genes([f"g{i}" for i in range(40)]))
    with pytest.raises(GeneMismatchError):
        map_genes(names, GeneVocab.from_genes([f"g{i}" for i in range(101)]))


def test_whole_annotation_measures_against_the_smaller_set():
    vocab = GeneVocab.from_genes([f"g{i}" for i in range(1000)])
    gene_map = map_genes(np.array([f"g{i}" for i in range(20)]), vocab, whole=True)
    assert gene_map.n_matched == 20
    assert gene_map.overlap == 0.02


def test_gene_names_errors(tiny_adata):
    with pytest.raises(DataError, match="gene_key='ensemble' is not a column of adata.var; did you mean 'ensembl'"):
        gene_names(tiny_adata, "ensemble")
    tiny_adata.var["holes"] = pd.Series(["x", None] * 40, index=tiny_adata.var_names)
    with pytest.raises(DataError, match="40 missing gene names"):
        gene_names(tiny_adata, "holes")
    tiny_adata.var["same"] = ["x"] * 2 + [f"y{i}" for i in range(78)]
    with pytest.raises(DataError, match="1 names more than once .first: 'x'.; choose a column"):
        gene_names(tiny_adata, "same")


def test_duplicate_var_names_name_the_fix(tiny_adata, tiny_vocab):
    tiny_adata.var_names = ["gene0", *tiny_adata.var_names[:-1]]
    with pytest.raises(DataError, match="var_names_make_unique"):
        open_cells(tiny_adata, tiny_vocab)
