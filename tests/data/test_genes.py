import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import GeneVocab, map_genes, open_cells, select_genes
from scforge.data.genes import GeneMap, OverlapReport, map_names
from scforge.errors import DataError, GeneMismatchError, OptionError, ScforgeWarning


def test_permuted_genes_give_the_same_cells(tiny_adata, tiny_vocab):
    order = np.random.default_rng(3).permutation(tiny_adata.n_vars)
    straight, permuted = open_cells(tiny_adata, tiny_vocab), open_cells(tiny_adata[:, order].copy(), tiny_vocab)
    assert permuted.counts.has_canonical_format
    for part in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(permuted.counts, part), getattr(straight.counts, part))
    np.testing.assert_array_equal(permuted.totals, straight.totals)
    np.testing.assert_array_equal(straight.totals, tiny_adata.X.toarray().sum(axis=1, dtype=float))


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32"])
def test_columns_of_one_gene_are_summed(dtype):
    vocab = GeneVocab.from_genes(["ENSG00000000001", "B"])
    counts = sparse.csr_matrix(np.array([[200, 1, 100], [0, 0, 3], [0, 2, 0]], dtype=dtype))
    with pytest.warns(ScforgeWarning, match=r"counts of 1 columns .first: 'ENSG00000000001\.2'. are summed"):
        mapped = map_names(np.array(["ENSG00000000001.1", "B", "ENSG00000000001.2"]), vocab).apply(counts)
    assert mapped.toarray().tolist() == [[300, 1], [3, 0], [0, 2]]
    assert mapped.has_canonical_format
    assert counts.toarray().tolist() == [[200, 1, 100], [0, 0, 3], [0, 2, 0]]
    zeros = sparse.csr_matrix((np.array([0, 2], dtype=dtype), np.array([0, 1]), np.array([0, 2])), shape=(1, 2))
    assert GeneMap(np.array([0, 1], dtype=np.int32), 2).apply(zeros).nnz == 1


def test_mismatches_are_told_with_what_would_fit(tiny_adata, tiny_vocab):
    vocab = GeneVocab.from_genes(list(tiny_adata.var["ensembl"]))
    human = GeneVocab.named("human_protein_coding")
    panel = GeneVocab.from_genes(list(dict.fromkeys(human.symbols[290:1000])))
    kinds = "only 0 of the 80 .*names of an unknown kind such as 'gene0'.*human Ensembl ids such as 'ENSG"
    for call, message in [
        (lambda: open_cells(tiny_adata, vocab), f"{kinds}.*pass gene_key='ensembl'"),
        (
            lambda: open_cells(tiny_adata, tiny_vocab, gene_key="ensembl"),
            "contains 80 of the vocabulary genes: pass gene_key=None",
        ),
        (lambda: open_cells(tiny_adata, GeneVocab.from_genes(["x"]), min_overlap=0.0), "convert the gene names of the"),
        (
            lambda: map_names(np.array(human.symbols[:300]), panel),
            r"10 of the \d+ genes of the vocabulary, and at least 71 are needed.*measure 300 genes, human gene symbols"
            ".*; use cells with more genes of the vocabulary",
        ),
    ]:
        with pytest.raises(GeneMismatchError, match=message):
            call()
    tiny_adata.var["holes"] = pd.Series(["x", None] * 40, index=tiny_adata.var_names)
    for key, message in [
        ("ensemble", "gene_key='ensemble' is not in adata.var; did you mean 'ensembl'"),
        ("holes", "40 missing gene names"),
    ]:
        with pytest.raises(DataError, match=message):
            open_cells(tiny_adata, tiny_vocab, gene_key=key)
    tiny_adata.var["other"] = ["gene0", *[f"x{i}" for i in range(79)]]  # fits hardly better
    tiny_adata.var_names = [f"y{i}" for i in range(80)]
    with pytest.raises(GeneMismatchError, match="only 0 of the 80 .*; convert the gene names of the data"):
        open_cells(tiny_adata, tiny_vocab)


def test_small_overlap_warns_and_smaller_is_an_error():
    names = np.array([f"g{i}" for i in range(10)])
    with pytest.warns(ScforgeWarning, match=r"10 of the 40 genes of the vocabulary \(25%\)"):
        map_names(names, GeneVocab.from_genes([f"g{i}" for i in range(40)]))
    with pytest.raises(GeneMismatchError):
        map_names(names, GeneVocab.from_genes([f"g{i}" for i in range(101)]))
    # The genes of a whole annotation are measured against the smaller set.
    gene_map = map_names(names, GeneVocab.from_genes([f"g{i}" for i in range(1000)], release="all"))
    assert (gene_map.n_matched, gene_map.overlap) == (10, 0.01)


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
    message = (
        rf"adata\.{where}: several columns refer to the same gene.* the counts of 2 columns .first: 'gene3'. are summed"
    )
    with pytest.warns(ScforgeWarning, match=message):
        cells = open_cells(more, tiny_vocab, gene_key=gene_key)
    np.testing.assert_array_equal(cells.counts.toarray(), expected.counts.toarray())
    np.testing.assert_array_equal(cells.totals, expected.totals)
    assert cells.overlap == 1.0
    # Names of one gene outside of the vocabulary are not told.
    cells = open_cells(more, GeneVocab.from_genes(tiny_adata.var_names[6:]), gene_key=gene_key)
    assert cells.totals.sum() == tiny_adata.X.sum()


@pytest.mark.parametrize(("within", "n_top_genes"), [(False, 30), (True, None)])
def test_choice_among_summed_columns_is_that_of_the_sums(tiny_adata, tiny_vocab, within, n_top_genes):
    options = {"n_top_genes": n_top_genes, "within": tiny_vocab if within else None, "batch_key": "batch"}
    expected = select_genes(tiny_adata, **options)
    with pytest.warns(ScforgeWarning, match="are summed"):
        assert select_genes(doubled(tiny_adata), gene_key="name", **options).genes == expected.genes


def test_species_are_told_apart():
    human, mouse = GeneVocab.named("human_protein_coding"), GeneVocab.named("mouse_protein_coding")
    with pytest.raises(GeneMismatchError, match="mouse Ensembl ids such as .*human_mouse.*contains both"):
        map_names(np.array(mouse.genes[:500]), human)
    with pytest.raises(GeneMismatchError, match="mouse gene symbols such as .*'mouse_protein_coding'"):
        map_names(np.array(mouse.symbols[:2000]), human)
    with pytest.raises(GeneMismatchError, match="for human genes, use vocab='human_protein_coding'"):
        map_names(np.array(human.symbols[:2000]), mouse)
    bare = GeneVocab.from_genes(mouse.genes[:500])  # by the annotation, they are of another species, too
    with pytest.raises(GeneMismatchError, match="for human genes, use vocab='human_pro"):
        map_names(np.array(human.symbols[:500]), bare)


def test_ids_and_symbols_are_matched_by_the_annotation():
    human = GeneVocab.named("human_protein_coding")
    bare = GeneVocab.from_genes(human.genes[:500])  # knows no symbols
    names = np.array(human.symbols[:500])
    said = (
        r"498 human gene symbols were matched with human Ensembl ids .*; names of several genes were left out: 'CD99', "
    )
    with pytest.warns(ScforgeWarning, match=said):
        found = map_names(names, bare)
    known = ~np.isin(names, ["CD99", "MATR3"])
    np.testing.assert_array_equal(found.columns[known], np.arange(500)[known])
    assert (found.columns[~known] < 0).all()
    symbols = GeneVocab.from_genes(list(dict.fromkeys(human.symbols[:500])))
    with pytest.warns(ScforgeWarning, match="500 human Ensembl ids were matched with human gene symbols"):
        found = map_names(np.array(human.genes[:500]), symbols)
    assert [symbols.genes[i] for i in found.columns] == list(human.symbols[:500])


def test_conversion_is_proposed_only_if_it_helps():
    """Few measured genes are the cause, even if the cells contain symbols and the model contains ids."""
    human = GeneVocab.named("human_protein_coding")
    bare = GeneVocab.from_genes(human.genes[:2000])  # knows no symbols
    few = np.array([*human.symbols[:100], *human.symbols[5000:5199]])
    said = r"only \d+ of the 2000 genes .*, even after conversion to human Ensembl ids, and at least 200 are needed"
    with pytest.raises(GeneMismatchError, match=said + ".* measure 299 genes, human gene symbols such as") as caught:
        map_names(few, bare)
    assert "convert_gene_ids" not in str(caught.value)
    mixed = np.array([*human.genes[:100], *human.symbols[100:700]])  # too many match for a conversion without notice
    with pytest.raises(GeneMismatchError, match="only 100 of the 2000 .*convert_gene_ids.*'ensembl'.* as gene_key"):
        map_names(mixed, bare)


def test_dots_of_r():
    vocab = GeneVocab.from_genes(["CD3D", "HLA-A", "NKX6-1", "MT.CO1", "A-B", "A/B", "H2-K1", "RP11.1"])
    names = np.array(["HLA.A", "CD3D", "NKX6.1", "MT-CO1", "A.B", "H2.K1", "H2-K1", "RP11/1"])
    said = r"4 names in which R replaced characters with dots were matched \('HLA.A' is 'HLA-A', 'NKX6"
    with pytest.warns(ScforgeWarning, match=said):
        found = map_names(names, vocab)
    # A.B may be either of two, and the data have the gene H2-K1 itself.
    assert found.columns.tolist() == [1, 0, 2, 3, -1, -1, 6, 7]
    assert GeneMap.of(["A-B", "A/B"], vocab).columns.tolist() == [4, 5]
    assert GeneMap.of(["HLA/A"], vocab).columns.tolist() == [-1]


def test_figures(tiny_adata, tiny_vocab):
    vocab = GeneVocab.from_genes([*tiny_adata.var_names[:60], "absent", "gone"])
    names, before = [*tiny_adata.var_names[:-1], "gene2"], tiny_adata.X.copy()
    tiny_adata.var["name"] = names
    with pytest.warns(ScforgeWarning, match="1 columns .first: 'gene2'. are summed"):
        report = map_genes(tiny_adata, vocab, gene_key="name", n_top=3)
    sums = np.asarray(tiny_adata.X.sum(axis=0)).ravel()
    assert isinstance(report, OverlapReport)
    assert (report.where, report.id_kind) == ("adata.var['name']", "names of an unknown kind")
    assert (report.n_genes_data, report.n_genes_vocab) == (80, 62)
    assert (report.n_matched, report.n_columns_matched, report.n_columns_summed) == (60, 61, 1)
    assert report.overlap == 60 / 62
    assert report.counts_kept == pytest.approx((sums[:60].sum() + sums[79]) / sums.sum())
    outside = pd.Series(sums[60:79], index=names[60:79]).sort_values(ascending=False, kind="stable")
    assert [name for name, _ in report.top_missing] == outside.index[:3].tolist()
    assert [share for _, share in report.top_missing] == pytest.approx((outside[:3] / sums.sum()).tolist())
    assert report.gene_map.columns.tolist()[-1] == 2
    assert (before != tiny_adata.X).nnz == 0
    figures = report.to_dict()
    assert (figures["vocab_hash"], figures["overlap"]) == (vocab.hash, 60 / 62)
    assert all(isinstance(value, str | int | float) for value in figures.values())
    assert report.to_frame()["gene"].tolist() == [name for name, _ in report.top_missing]
    full = map_genes(tiny_adata, tiny_vocab)
    assert full.to_frame().shape == (0, 2)
    assert str(full).endswith("none")
    whole = GeneVocab(tuple(tiny_adata.var_names[:70]), release="some annotation")
    with pytest.warns(ScforgeWarning, match=r"34% of the counts .* outside the vocabulary .some annotation."):
        open_cells(tiny_adata, whole)
    open_cells(tiny_adata, GeneVocab.from_genes(whole.genes))
    chosen = select_genes(tiny_adata, within=whole, n_top_genes=60)
    assert chosen.release == "some annotation, from_data"
    open_cells(tiny_adata, chosen)


def test_real_cells_and_names_that_do_not_fit(pbmc, tmp_path):
    vocab = GeneVocab.named("human_protein_coding")
    vocab.save(tmp_path / "vocab.json")
    adata = pbmc[:100].copy()
    adata.var["versioned"] = adata.var["gene_ids"] + ".7"
    plain, versioned = (map_genes(adata, tmp_path / "vocab.json", gene_key=key) for key in ("gene_ids", "versioned"))
    np.testing.assert_array_equal(plain.gene_map.columns, versioned.gene_map.columns)
    report = map_genes(adata, vocab)
    by_symbol = report.gene_map.columns
    both = (by_symbol >= 0) & (plain.gene_map.columns >= 0)
    assert (by_symbol[both] == plain.gene_map.columns[both]).mean() > 0.99
    assert plain.id_kind == versioned.id_kind == "human Ensembl ids"
    assert report.n_matched == 12380
    with pytest.raises(GeneMismatchError) as caught:
        map_genes(pbmc, "mouse_protein_coding")
    message = str(caught.value)
    assert "contains human gene symbols such as " in message
    assert "the vocabulary contains mouse Ensembl ids such as 'ENSMUSG00000000001'" in message
    assert "vocab='human_protein_coding' (data.gene_vocab in a YAML file), or vocab='human_mouse', which" in message
    bare = GeneVocab.from_genes(vocab.genes)
    with pytest.warns(ScforgeWarning, match="12,355 human gene symbols were matched .* 13236 of the vocabulary genes"):
        map_genes(pbmc, bare)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"adata": "cells.h5ad"}, OptionError, "adata is of type 'str'"),
        ({"vocab": ["gene1"]}, OptionError, "vocab is a list"),
        ({"n_top": -1}, OptionError, "n_top=-1"),
        ({"min_overlap": 2}, OptionError, "min_overlap=2 is not a number from 0 to 1"),
        ({"min_overlap": float("nan")}, OptionError, "min_overlap=nan is not a number from 0 to 1"),
        ({"gene_key": "ensembel"}, DataError, "gene_key='ensembel'.*did you mean 'ensembl'"),
        ({"layer": "half"}, DataError, "contains values that are not whole"),
    ],
)
def test_bad_arguments(tiny_adata, tiny_vocab, options, error, message):
    tiny_adata.layers["half"] = tiny_adata.X * 0.5
    with pytest.raises(error, match=message):
        map_genes(**{"adata": tiny_adata, "vocab": tiny_vocab} | options)
