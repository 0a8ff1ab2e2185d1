"""The overlap report."""

from __future__ import annotations

from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import GeneVocab, OverlapReport, map_genes
from scforge.errors import DataError, GeneMismatchError, OptionError, ScforgeWarning

PAUL = Path(__file__).parents[3] / "shared" / "data" / "cells" / "paul15_mouse.h5ad"


def test_figures(tiny_adata):
    vocab = GeneVocab.from_genes([*tiny_adata.var_names[:60], "absent", "gone"])
    names = [*tiny_adata.var_names[:-1], "gene2"]
    tiny_adata.var["name"] = names
    with pytest.warns(ScforgeWarning, match="1 columns .first: 'gene2'. are summed"):
        report = map_genes(tiny_adata, vocab, gene_key="name", n_top=3)
    sums = np.asarray(tiny_adata.X.sum(axis=0)).ravel()
    assert isinstance(report, OverlapReport)
    assert (report.where, report.id_kind) == ("adata.var['name']", "names of no known kind")
    assert (report.n_genes_data, report.n_genes_vocab) == (80, 62)
    assert (report.n_matched, report.n_columns_matched, report.n_columns_summed) == (60, 61, 1)
    assert report.overlap == 60 / 62
    assert report.counts_kept == pytest.approx((sums[:60].sum() + sums[79]) / sums.sum())
    outside = pd.Series(sums[60:79], index=names[60:79]).sort_values(ascending=False, kind="stable")
    assert [name for name, _ in report.top_missing] == outside.index[:3].tolist()
    assert [share for _, share in report.top_missing] == pytest.approx((outside[:3] / sums.sum()).tolist())
    assert report.gene_map.columns.tolist()[-1] == 2


def test_to_read_and_to_compare(tiny_adata, tiny_vocab):
    report = map_genes(tiny_adata, tiny_vocab)
    lines = str(report).splitlines()
    assert lines[0].split(None, 2)[2] == "names of no known kind in adata.var_names"
    assert "80 of 80 (100.0%) are in the vocabulary" in lines[2]
    assert lines[-2].endswith("100.0%")
    assert lines[-1].endswith("none")
    figures = report.to_dict()
    assert figures["vocab_hash"] == tiny_vocab.hash
    assert all(isinstance(value, str | int | float) for value in figures.values())
    assert report.to_frame().shape == (0, 2)
    frame = pd.DataFrame([figures, figures])
    assert frame["overlap"].tolist() == [1.0, 1.0]
    part = map_genes(tiny_adata, tiny_vocab.subset(range(70)), n_top=4)
    assert part.to_frame()["share_of_counts"].is_monotonic_decreasing
    assert part.to_frame()["gene"].tolist() == [name for name, _ in part.top_missing]


def test_nothing_is_changed(tiny_adata, tiny_vocab):
    before = tiny_adata.copy()
    map_genes(tiny_adata, tiny_vocab)
    assert (tiny_adata.X != before.X).nnz == 0
    pd.testing.assert_frame_equal(tiny_adata.var, before.var)


def test_layer_and_name_and_file(pbmc, tmp_path):
    adata = pbmc[:100].copy()
    adata.layers["counts"] = adata.X.copy()
    adata.X = adata.X.log1p()
    GeneVocab.named("human_protein_coding").save(tmp_path / "vocab.json")
    for vocab in ("human_protein_coding", str(tmp_path / "vocab.json"), tmp_path / "vocab.json"):
        assert map_genes(adata, vocab, layer="counts").n_matched == 12380
    with pytest.raises(DataError, match="layer='counts' holds counts"):
        map_genes(adata, "human_protein_coding")


def test_ids_symbols_and_versions_agree_on_what_they_share(pbmc):
    vocab = GeneVocab.named("human_protein_coding")
    adata = pbmc[:200].copy()
    adata.var["versioned"] = adata.var["gene_ids"] + ".7"
    plain, versioned = (map_genes(adata, vocab, gene_key=key) for key in ("gene_ids", "versioned"))
    np.testing.assert_array_equal(plain.gene_map.columns, versioned.gene_map.columns)
    by_symbol = map_genes(adata, vocab).gene_map.columns
    both = (by_symbol >= 0) & (plain.gene_map.columns >= 0)
    assert (by_symbol[both] == plain.gene_map.columns[both]).mean() > 0.99
    assert plain.id_kind == versioned.id_kind == "human Ensembl ids"


def test_threshold(tiny_adata):
    vocab = GeneVocab.from_genes([*tiny_adata.var_names, *[f"x{i}" for i in range(320)]])
    with pytest.warns(ScforgeWarning, match="80 of the 400 genes"):
        assert map_genes(tiny_adata, vocab).overlap == 0.2
    with pytest.raises(GeneMismatchError, match="only 80 of the 400 genes"):
        map_genes(tiny_adata, vocab, min_overlap=0.3)


def test_species_that_do_not_fit(pbmc):
    with pytest.raises(GeneMismatchError) as caught:
        map_genes(pbmc, "mouse_protein_coding")
    message = str(caught.value)
    assert "holds human gene symbols such as " in message
    assert "the vocabulary mouse Ensembl ids such as 'ENSMUSG00000000001'" in message
    assert "vocab='human_protein_coding' (in a YAML file data.gene_vocab), or 'human_mouse', which" in message
    bare = GeneVocab.from_genes(GeneVocab.named("human_protein_coding").genes)
    with pytest.warns(ScforgeWarning, match="12,355 human gene symbols were matched .* 13236 of them: pass gene_key"):
        map_genes(pbmc, bare)


@pytest.mark.real_data
def test_mouse_data():
    if not PAUL.exists():
        pytest.skip("the shared real data are not here")
    adata = ad.read_h5ad(PAUL)
    report = map_genes(adata, "mouse_protein_coding")
    assert report.id_kind == "mouse gene symbols"
    assert report.n_matched > 2900
    assert 0.8 < report.counts_kept < 0.9
    with pytest.warns(ScforgeWarning) as caught:
        both = map_genes(adata, "human_mouse")
    assert {str(warning.message).split(" ")[0] for warning in caught} == {"22%", "adata.var_names"}
    assert 2700 < both.n_matched < report.n_matched
    with pytest.raises(GeneMismatchError, match="mouse gene symbols .*human_mouse"):
        map_genes(adata, "human_protein_coding")


def test_bad_arguments(tiny_adata, tiny_vocab):
    with pytest.raises(OptionError, match="adata is of type 'str'"):
        map_genes("cells.h5ad", tiny_vocab)
    with pytest.raises(OptionError, match="vocab is a list"):
        map_genes(tiny_adata, ["gene1"])
    with pytest.raises(OptionError, match="n_top=-1"):
        map_genes(tiny_adata, tiny_vocab, n_top=-1)
    with pytest.raises(DataError, match="gene_key='ensembel'.*did you mean 'ensembl'"):
        map_genes(tiny_adata, tiny_vocab, gene_key="ensembel")
    with pytest.raises(DataError, match="holds values that are not whole"):
        map_genes(ad.AnnData(sparse.csr_matrix(tiny_adata.X * 0.5), var=tiny_adata.var), tiny_vocab)


@pytest.mark.parametrize("share", ["x", 2, -0.1, float("nan"), None, True])
def test_min_overlap_is_a_share(tiny_adata, tiny_vocab, share):
    with pytest.raises(OptionError, match=f"min_overlap={share!r} is not a number from 0 to 1"):
        map_genes(tiny_adata, tiny_vocab, min_overlap=share)
