"""Ensembl ids to symbols and back, and what kind names are."""

from __future__ import annotations

from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.data import GeneVocab, convert_gene_ids
from scforge.data.gene_tables import gene_table
from scforge.data.id_kinds import OTHER_NAMES, recognise_ids
from scforge.errors import OptionError, ScforgeWarning

CELLS = Path(__file__).parents[3] / "shared" / "data" / "cells"


def test_both_ways():
    ids = ["ENSG00000167286", "ENSG00000090382"]
    for given in (["CD3D", "LYZ"], ids, [f"{name}.12" for name in ids], [name.lower() for name in ids]):
        assert list(convert_gene_ids(given, to="ensembl")) == ids
        assert list(convert_gene_ids(given, to="symbol")) == ["CD3D", "LYZ"]
    assert list(convert_gene_ids(["Cd3d", "ENSMUSG00000069516.4"], to="symbol", species="mouse")) == ["Cd3d", "Lyz2"]
    assert list(convert_gene_ids(["Cd3d", "Lyz2"], to="ensembl", species="mouse"))[1] == "ENSMUSG00000069516"


@pytest.mark.parametrize("species", ["human", "mouse"])
def test_every_gene_there_and_back(species):
    table = gene_table(species)
    alone = [gene for gene, symbol in table.symbols.items() if len(table.ids[symbol]) == 1]
    assert len(alone) > 0.97 * len(table.symbols)
    symbols = convert_gene_ids(alone, to="symbol", species=species)
    assert list(convert_gene_ids(symbols, to="ensembl", species=species)) == alone


def test_not_only_protein_coding_genes():
    assert list(convert_gene_ids(["MALAT1"], to="ensembl")) == ["ENSG00000251562"]
    assert "MALAT1" not in GeneVocab.named("human_protein_coding")


def test_what_cannot_be_converted_is_reported_and_not_guessed():
    names = ["CD3D", "no gene", "MATR3", "Cd3d", "no gene", "ENSG00000000000.1"]
    with pytest.warns(ScforgeWarning) as caught:
        found = convert_gene_ids(names, to="ensembl")
    (warning,) = caught
    assert str(warning.message) == (
        "1 of 6 names converted; 3 unknown: 'no gene', 'Cd3d', 'ENSG00000000000.1'; "
        "1 ambiguous: 'MATR3' (ENSG00000015479, ENSG00000280987) (by the human genes of CELLxGENE schema 7.1.2)."
    )
    assert warning.filename == __file__
    assert found.names[0] == "ENSG00000167286"
    assert pd.isna(found.names[1:]).all()
    assert found.unknown == ("no gene", "Cd3d", "ENSG00000000000.1")
    assert found.ambiguous == {"MATR3": ("ENSG00000015479", "ENSG00000280987")}
    assert (len(found), found.n_converted) == (6, 1)
    with pytest.warns(ScforgeWarning):
        kept = convert_gene_ids(names, to="ensembl", keep_unknown=True)
    assert list(kept) == ["ENSG00000167286", *names[1:]]


def test_a_symbol_of_several_genes_is_still_a_symbol():
    assert list(convert_gene_ids(["MATR3", "ENSG00000280987"], to="symbol")) == ["MATR3", "MATR3"]


def test_a_gene_without_symbol_keeps_its_id():
    assert list(convert_gene_ids(["ENSG00000237613.2", "ENSG00000228463"], to="symbol", keep_unknown=True))[1] == (
        "ENSG00000228463"
    )


def test_errors():
    with pytest.raises(OptionError, match="to='symbols' is not known .known: 'ensembl', 'symbol'"):
        convert_gene_ids(["CD3D"], to="symbols")
    with pytest.raises(OptionError, match="species='humans' has no gene table; did you mean 'human'"):
        convert_gene_ids(["CD3D"], to="symbol", species="humans")
    with pytest.raises(OptionError, match="names='CD3D' is one text"):
        convert_gene_ids("CD3D", to="ensembl")


def test_a_column_of_var(tiny_adata, tmp_path):
    vocab = GeneVocab.named("human_protein_coding")
    tiny_adata.var_names = ["no gene", *vocab.symbols[500:579]]
    with pytest.warns(ScforgeWarning, match="79 of 80"):
        tiny_adata.var["gene_id"] = convert_gene_ids(tiny_adata.var_names, to="ensembl")
    assert tiny_adata.var["gene_id"].isna().sum() == 1
    assert tiny_adata.var["gene_id"].tolist()[1:] == list(vocab.genes[500:579])
    tiny_adata.write_h5ad(tmp_path / "cells.h5ad")
    again = ad.read_h5ad(tmp_path / "cells.h5ad")
    assert again.var["gene_id"].tolist()[1:] == list(vocab.genes[500:579])
    assert again.var["gene_id"].isna().sum() == 1
    array = np.asarray(convert_gene_ids(["CD3D"], to="ensembl"))
    assert array.tolist() == ["ENSG00000167286"]


@pytest.mark.real_data
@pytest.mark.filterwarnings("ignore::scforge.errors.ScforgeWarning")
def test_names_of_real_data_against_their_ids():
    path = CELLS / "pbmc3k.h5ad"
    if not path.exists():
        pytest.skip("the shared real data are not here")
    var = ad.read_h5ad(path).var
    given = var["gene_ids"].to_numpy(dtype=str)
    ids = convert_gene_ids(var.index, to="ensembl")
    known = np.array([isinstance(name, str) for name in ids])
    # The data are of 2016: clones and symbols that were renamed since are unknown now, and some genes have new ids.
    assert known.mean() > 0.55
    assert (np.asarray(ids)[known] == given[known]).mean() > 0.97
    symbols = convert_gene_ids(given, to="symbol")
    assert symbols.n_converted > 0.85 * len(given)
    same = np.asarray(symbols)[known] == var.index.to_numpy(dtype=str)[known]
    assert same.mean() > 0.97
    assert set(ids.unknown).isdisjoint(ids.ambiguous)
    assert known.sum() == ids.n_converted


HUMAN, MOUSE = GeneVocab.named("human_protein_coding"), GeneVocab.named("mouse_protein_coding")


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (HUMAN.genes, "human Ensembl ids"),
        ([f"{gene}.4" for gene in HUMAN.genes[:10]], "human Ensembl ids"),
        (MOUSE.genes, "mouse Ensembl ids"),
        (["ENSDARG00000000001", "ENSDARG00000000002"], "Ensembl ids of another species"),
        (HUMAN.symbols, "human gene symbols"),
        (MOUSE.symbols, "mouse gene symbols"),
        ([*HUMAN.symbols[:40], *[f"clone {i}" for i in range(60)]], "human gene symbols"),
        (["7157", "672", "1956"], "numbers (Entrez ids?)"),
        ([f"gene{i}" for i in range(50)], OTHER_NAMES),
        ([], OTHER_NAMES),
        (["GRCh38_CD3D", "mm10_Cd3d"], OTHER_NAMES),
    ],
)
def test_kinds(names, kind):
    assert recognise_ids(list(names)) == kind
    assert recognise_ids(np.array(names, dtype=str)) == kind
    assert recognise_ids(pd.Index(names, dtype=str)) == kind


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("pbmc3k", "human gene symbols"),
        ("kang_ctrl_8donor", "human Ensembl ids"),
        ("merfish_mouse_brain", "mouse Ensembl ids"),
        ("paul15_mouse", "mouse gene symbols"),
        ("papalexi_eccite", "human gene symbols"),
    ],
)
def test_kinds_of_real_data(file, kind):
    path = CELLS / f"{file}.h5ad"
    if not path.exists():
        pytest.skip("the shared real data are not here")
    adata = ad.read_h5ad(path, backed="r")
    assert recognise_ids(adata.var_names) == kind
    adata.file.close()
