from collections import defaultdict

import numpy as np
import pandas as pd
import pytest

from scforge.data import GeneVocab, convert_gene_ids, list_vocabs
from scforge.data.vocab import NAMED_VOCABS, OTHER_NAMES, gene_table, open_vocab, recognize_ids, strip_version
from scforge.errors import OptionError, ScforgeWarning


@pytest.mark.parametrize(
    ("name", "n_genes", "first_hash"),
    [
        ("human_protein_coding", 20120, "e370bd11"),
        ("mouse_protein_coding", 21807, "a7175c09"),
        ("human_mouse", 16084, "34378703"),
        ("human_mouse_sum", 16623, "50466429"),
        ("human_mouse_symbols", 17532, "eec77c88"),
    ],
)
def test_token_ids_never_change(name, n_genes, first_hash):
    # Saved models rest on them: a change is a new vocabulary with a new name.
    vocab = GeneVocab.named(name)
    assert (vocab.n_genes, vocab.hash[:8]) == (n_genes, first_hash)
    assert vocab.kind == "Ensembl ids"
    assert all(strip_version(gene) == gene for gene in vocab.genes)
    assert vocab.release == f"{name}, {NAMED_VOCABS[name]}"
    assert not vocab.chosen_from_data
    assert GeneVocab.named(name) is vocab
    assert len(list_vocabs()) == 5
    # Copies on Y match nothing.
    assert vocab.gene_indices(["ENSG00000002586.20_PAR_Y", "ENSG00000002586_PAR_Y"]).tolist() == [-1, -1]
    assert not any(gene.endswith("_PAR_Y") for gene in (*vocab.genes, *gene_table("human").symbols))


@pytest.mark.parametrize("name", ["human_mouse", "human_mouse_sum", "human_mouse_symbols"])
def test_orthologs_have_one_token(name):
    vocab = GeneVocab.named(name)
    for human, human_id, mouse, mouse_id in [
        ("CD3D", "ENSG00000167286", "Cd3d", "ENSMUSG00000032094"),
        ("ACTB", "ENSG00000075624", "Actb", "ENSMUSG00000029580"),
        ("TP53", "ENSG00000141510", "Trp53", "ENSMUSG00000059552"),  # symbols that are not alike
    ]:
        assert set(vocab.encode([human, human_id, mouse, mouse_id, f"{mouse_id}.3"])) == set(vocab.encode([human_id]))
        assert vocab.decode(vocab.encode([mouse])) == [human_id]


def test_families_are_dropped_or_summed():
    drop, summed = GeneVocab.named("human_mouse"), GeneVocab.named("human_mouse_sum")
    assert summed.genes[: drop.n_genes] == drop.genes
    assert summed.aliases is not None
    # CCL4 and CCL4L2 are Ccl4 of the mouse; FTL is Ftl1 and a copy of it.
    for names in (["CCL4", "CCL4L2", "Ccl4", "ENSMUSG00000018930"], ["FTL", "Ftl1", "ENSMUSG00000050708"]):
        assert (drop.gene_indices(names) == -1).all()
        assert len(set(summed.gene_indices(names))) == 1
        assert summed.gene_indices(names)[0] >= drop.n_genes


@pytest.mark.parametrize("name", ["human_mouse", "human_mouse_sum", "human_mouse_symbols"])
def test_no_name_brings_the_counts_of_another_gene(name):
    """Every name that finds a token belongs, in both species, to genes of that token and to no other."""
    vocab = GeneVocab.named(name)
    members = defaultdict(set)
    for name, gene in [*zip(vocab.genes, vocab.genes, strict=True), *vocab.aliases.items()]:
        if name.startswith(("ENSG0", "ENSMUSG0")):
            members[gene].add(name)
    human, mouse = gene_table("human"), gene_table("mouse")
    names = [*human.symbols, *mouse.symbols, *human.ids, *mouse.ids]
    for found, index in zip(names, vocab.gene_indices(names), strict=True):
        if index >= 0:
            is_id = found in human.symbols or found in mouse.symbols
            bearers = {found} if is_id else {*human.ids.get(found, ()), *mouse.ids.get(found, ())}
            assert bearers <= members[vocab.genes[index]], found


def test_what_is_no_vocabulary(tmp_path):
    vocab = GeneVocab.from_genes(["A"])
    vocab.save(tmp_path / "vocab.json")
    assert open_vocab(vocab) is vocab
    assert open_vocab(tmp_path / "vocab.json") == open_vocab(str(tmp_path / "vocab.json")) == vocab
    assert open_vocab("human_mouse") is GeneVocab.named("human_mouse")
    for call, message in [
        (lambda: open_vocab(tmp_path / "none.json"), "^vocab='.*none.json' is neither a shipped vocabulary nor a"),
        (lambda: open_vocab(["A"]), "vocab is a list; pass a name, a file"),
        (lambda: GeneVocab.named("human_mose"), "did you mean 'human_mouse'.*shipped: 'human_mouse', "),
        (lambda: convert_gene_ids(["CD3D"], to="symbols"), "to='symbols' is not known; did you mean 'symbol'"),
        (lambda: convert_gene_ids("CD3D", to="ensembl"), "names='CD3D' is not a list of names"),
        (lambda: gene_table("humans"), "species='humans' is not known; did you mean 'human'"),
        (lambda: gene_table("rat"), "species='rat' is not known .known: 'human', 'mouse'"),
    ]:
        with pytest.raises(OptionError, match=message):
            call()


def test_both_ways():
    ids = ["ENSG00000167286", "ENSG00000090382"]
    for given in (["CD3D", "LYZ"], ids, [f"{name}.12" for name in ids], [name.lower() for name in ids]):
        assert list(convert_gene_ids(given, to="ensembl")) == ids
        assert list(convert_gene_ids(given, to="symbol")) == ["CD3D", "LYZ"]
    assert list(convert_gene_ids(["Cd3d", "ENSMUSG00000069516.4"], to="symbol", species="mouse")) == ["Cd3d", "Lyz2"]
    assert list(convert_gene_ids(["Cd3d", "Lyz2"], to="ensembl", species="mouse"))[1] == "ENSMUSG00000069516"
    # A gene of a symbol that others have, too; one without a symbol; one that codes for no protein.
    assert list(convert_gene_ids(["MATR3", "ENSG00000280987"], to="symbol")) == ["MATR3", "MATR3"]
    assert list(convert_gene_ids(["ENSG00000228463"], to="symbol", keep_unknown=True)) == ["ENSG00000228463"]
    assert list(convert_gene_ids(["MALAT1"], to="ensembl")) == ["ENSG00000251562"]


@pytest.mark.parametrize("species", ["human", "mouse"])
def test_every_gene_there_and_back(species):
    table = gene_table(species)
    alone = [gene for gene, symbol in table.symbols.items() if len(table.ids[symbol]) == 1]
    assert len(alone) > 0.97 * len(table.symbols)
    symbols = convert_gene_ids(alone, to="symbol", species=species)
    assert list(convert_gene_ids(symbols, to="ensembl", species=species)) == alone


def test_what_cannot_be_converted_is_reported_and_not_guessed():
    names = ["CD3D", "no gene", "MATR3", "Cd3d", "no gene", "ENSG00000000000.1"]
    with pytest.warns(ScforgeWarning) as caught:
        found = convert_gene_ids(names, to="ensembl")
    (warning,) = caught
    assert str(warning.message).startswith(
        "1 of 6 names converted; 3 unknown: 'no gene', 'Cd3d', 'ENSG00000000000.1'; 1"
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


HUMAN, MOUSE = GeneVocab.named("human_protein_coding"), GeneVocab.named("mouse_protein_coding")


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (HUMAN.genes, "human Ensembl ids"),
        (MOUSE.genes, "mouse Ensembl ids"),
        (["ENSDARG00000000001", "ENSDARG00000000002"], "Ensembl ids of another species"),
        (HUMAN.symbols, "human gene symbols"),
        (MOUSE.symbols, "mouse gene symbols"),
        ([*HUMAN.symbols[:40], *[f"clone {i}" for i in range(60)]], "human gene symbols"),
        (["7157", "672", "1956"], "numbers (Entrez ids?)"),
        ([f"gene{i}" for i in range(50)], OTHER_NAMES),
        ([], OTHER_NAMES),
    ],
)
def test_kinds(names, kind):
    assert recognize_ids(list(names)) == kind
    assert recognize_ids(np.array(names, dtype=str)) == kind
    assert recognize_ids(pd.Index(names, dtype=str)) == kind
