"""Genes of data onto genes of a vocabulary."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import GeneMap, GeneVocab, open_cells, select_genes
from scforge.data.mapping import gene_names, map_names
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
    with pytest.warns(ScforgeWarning, match=r"counts of 1 columns .first: 'ENSG00000000001\.2'. are summed"):
        mapped = map_names(names, vocab).apply(counts)
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
    gene_map = GeneMap.of(np.array(["<cls>", "A", "<pad>"]), GeneVocab.from_genes(["A"]))
    assert gene_map.columns.tolist() == [-1, 0, -1]


def test_mismatch_names_both_kinds_and_the_column_that_fits(tiny_adata):
    vocab = GeneVocab.from_genes(list(tiny_adata.var["ensembl"]))
    with pytest.raises(GeneMismatchError) as caught:
        open_cells(tiny_adata, vocab)
    message = str(caught.value)
    assert "only 0 of the 80 genes" in message
    assert "holds names of no known kind such as 'gene0'" in message
    assert "human Ensembl ids such as 'ENSG" in message
    assert "pass gene_key='ensembl'" in message


def test_mismatch_names_var_names_where_those_fit(tiny_adata, tiny_vocab):
    with pytest.raises(GeneMismatchError, match=r"adata\.var_names has 80 of them: pass gene_key=None"):
        open_cells(tiny_adata, tiny_vocab, gene_key="ensembl")


def test_mismatch_without_a_fitting_column(tiny_adata):
    with pytest.raises(GeneMismatchError, match="map the gene ids"):
        open_cells(tiny_adata, GeneVocab.from_genes(["x", "y"]))


def test_a_panel_of_other_genes_has_nothing_to_map():
    genes = GeneVocab.named("human_protein_coding").symbols
    with pytest.raises(GeneMismatchError, match="the names are of one kind, so the genes differ"):
        map_names(np.array(genes[:300]), GeneVocab.from_genes(list(dict.fromkeys(genes[290:1000]))))


def test_no_match_at_all_is_an_error_whatever_the_threshold(tiny_adata):
    with pytest.raises(GeneMismatchError):
        open_cells(tiny_adata, GeneVocab.from_genes(["x"]), min_overlap=0.0)


def test_small_overlap_warns_and_smaller_is_an_error():
    names = np.array([f"g{i}" for i in range(10)])
    with pytest.warns(ScforgeWarning, match=r"10 of the 40 genes of the vocabulary \(25%\)"):
        map_names(names, GeneVocab.from_genes([f"g{i}" for i in range(40)]))
    with pytest.raises(GeneMismatchError):
        map_names(names, GeneVocab.from_genes([f"g{i}" for i in range(101)]))


def test_whole_annotation_measures_against_the_smaller_set():
    vocab = GeneVocab.from_genes([f"g{i}" for i in range(1000)])
    gene_map = map_names(np.array([f"g{i}" for i in range(20)]), vocab, whole=True)
    assert gene_map.n_matched == 20
    assert gene_map.overlap == 0.02


def test_gene_names_errors(tiny_adata):
    with pytest.raises(DataError, match="gene_key='ensemble' is not a column of adata.var; did you mean 'ensembl'"):
        gene_names(tiny_adata, "ensemble")
    tiny_adata.var["holes"] = pd.Series(["x", None] * 40, index=tiny_adata.var_names)
    with pytest.raises(DataError, match="40 missing gene names"):
        gene_names(tiny_adata, "holes")


def doubled(adata):
    """The same cells, with the counts of gene3 split over two columns of that name, and those of gene5 over two."""
    counts = adata.X.toarray()
    part = np.floor(counts[:, [3, 5]] / 2)
    counts[:, [3, 5]] -= part
    more = ad.AnnData(np.hstack([counts, part]), obs=adata.obs)
    more.var["name"] = [*adata.var_names, "gene3", "gene5"]
    return more


@pytest.mark.filterwarnings("ignore:Variable names are not unique")
@pytest.mark.parametrize("gene_key", [None, "name"])
def test_repeated_names_are_summed_and_told(tiny_adata, tiny_vocab, gene_key):
    expected = open_cells(tiny_adata, tiny_vocab)
    more = doubled(tiny_adata)
    if gene_key is None:
        more.var_names = more.var["name"]
    where = "var_names" if gene_key is None else r"var\['name'\]"
    message = rf"adata\.{where} names genes that .* the counts of 2 columns .first: 'gene3'. are summed"
    with pytest.warns(ScforgeWarning, match=message):
        cells = open_cells(more, tiny_vocab, gene_key=gene_key)
    np.testing.assert_array_equal(cells.counts.toarray(), expected.counts.toarray())
    np.testing.assert_array_equal(cells.totals, expected.totals)
    assert cells.overlap == 1.0


def test_repeated_names_are_summed_before_genes_are_chosen(tiny_adata):
    # A gene seen in two cells by each column is seen in four.
    counts = tiny_adata.X.toarray()
    counts[:, 3] = 0
    counts[:2, 3] = 1
    tiny_adata.X = counts
    more = ad.AnnData(np.hstack([counts, np.zeros((60, 2))]), obs=tiny_adata.obs)
    more.X[10:12, 80] = 1
    more.X[12:14, 81] = 1
    more.var["name"] = [*tiny_adata.var_names, "gene3", "not gene3"]
    with pytest.warns(ScforgeWarning, match="1 columns .first: 'gene3'"):
        genes = select_genes(more, gene_key="name", min_cells=4).genes
    assert "gene3" in genes
    assert "not gene3" not in genes
    assert "gene3" not in select_genes(tiny_adata, min_cells=4).genes


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("n_top_genes", [None, 30])
def test_choice_among_summed_columns_is_that_of_the_sums(tiny_adata, tiny_vocab, within, n_top_genes):
    options = {"n_top_genes": n_top_genes, "within": tiny_vocab if within else None, "batch_key": "batch"}
    expected = select_genes(tiny_adata, **options)
    with pytest.warns(ScforgeWarning, match="are summed"):
        assert select_genes(doubled(tiny_adata), gene_key="name", **options).genes == expected.genes


def test_names_of_one_gene_outside_the_vocabulary_are_not_told(tiny_adata):
    cells = open_cells(doubled(tiny_adata), GeneVocab.from_genes(tiny_adata.var_names[6:]), gene_key="name")
    assert cells.totals.sum() == tiny_adata.X.sum()


def test_species_are_told_apart():
    human, mouse = GeneVocab.named("human_protein_coding"), GeneVocab.named("mouse_protein_coding")
    with pytest.raises(GeneMismatchError, match="mouse Ensembl ids such as .*human_mouse.*takes both"):
        map_names(np.array(mouse.genes[:500]), human, whole=True)
    with pytest.raises(GeneMismatchError, match="mouse gene symbols such as .*'mouse_protein_coding'"):
        map_names(np.array(mouse.symbols[:2000]), human, whole=True)
    with pytest.raises(GeneMismatchError, match="genes of human need .*'human_protein_coding'"):
        map_names(np.array(human.symbols[:2000]), mouse, whole=True)


def test_ids_and_symbols_are_matched_by_the_annotation():
    human = GeneVocab.named("human_protein_coding")
    bare = GeneVocab.from_genes(human.genes[:500])  # knows no symbols
    names = np.array(human.symbols[:500])
    said = r"498 human gene symbols were matched with human Ensembl ids .*; 'CD99', 'MATR3' mean several"
    with pytest.warns(ScforgeWarning, match=said):
        found = map_names(names, bare)
    known = ~np.isin(names, ["CD99", "MATR3"])
    np.testing.assert_array_equal(found.columns[known], np.arange(500)[known])
    assert (found.columns[~known] < 0).all()
    symbols = GeneVocab.from_genes(list(dict.fromkeys(human.symbols[:500])))
    with pytest.warns(ScforgeWarning, match="500 human Ensembl ids were matched with human gene symbols"):
        found = map_names(np.array(human.genes[:500]), symbols)
    assert [symbols.genes[i] for i in found.columns] == list(human.symbols[:500])


def test_names_of_another_species_are_not_matched():
    mouse = GeneVocab.from_genes(GeneVocab.named("mouse_protein_coding").genes[:500])
    with pytest.raises(GeneMismatchError, match="genes of human need a vocabulary of their species, vocab='human_pro"):
        map_names(np.array(GeneVocab.named("human_protein_coding").symbols[:500]), mouse)


def test_dots_of_r():
    vocab = GeneVocab.from_genes(["CD3D", "HLA-A", "NKX6-1", "MT.CO1", "A-B", "A/B", "H2-K1", "RP11.1"])
    names = np.array(["HLA.A", "CD3D", "NKX6.1", "MT-CO1", "A.B", "H2.K1", "H2-K1", "RP11/1"])
    with pytest.warns(ScforgeWarning, match=r"4 names were matched that R wrote with dots \('HLA.A' is 'HLA-A', 'NKX6"):
        found = map_names(names, vocab)
    # A.B may be either of two, and the data have the gene H2-K1 itself.
    assert found.columns.tolist() == [1, 0, 2, 3, -1, -1, 6, 7]
    assert GeneMap.of(["A-B", "A/B"], vocab).columns.tolist() == [4, 5]
    assert GeneMap.of(["HLA/A"], vocab).columns.tolist() == [-1]


def test_a_column_that_fits_hardly_better_is_no_advice(tiny_adata, tiny_vocab):
    tiny_adata.var["other"] = ["gene0", *[f"x{i}" for i in range(79)]]
    tiny_adata.var_names = [f"y{i}" for i in range(80)]
    with pytest.raises(GeneMismatchError, match="only 0 of the 80 .*; map the gene ids"):
        open_cells(tiny_adata, tiny_vocab)


def test_counts_outside_an_annotation_are_told(tiny_adata):
    whole = GeneVocab(tuple(tiny_adata.var_names[:70]), release="some annotation")
    with pytest.warns(ScforgeWarning, match=r"34% of the counts .* outside of the vocabulary .some annotation."):
        open_cells(tiny_adata, whole, whole_annotation=True)
    open_cells(tiny_adata, GeneVocab.from_genes(whole.genes))
    chosen = select_genes(tiny_adata, within=whole, n_top_genes=60)
    assert chosen.release == "some annotation, from_data"
    open_cells(tiny_adata, chosen)
