"""Vocabularies that ship with the package."""

from __future__ import annotations

import time
from collections import defaultdict

import anndata as ad
import numpy as np
import pytest
from scipy import sparse

from scforge.data import GeneVocab, list_vocabs, open_cells
from scforge.data.gene_tables import gene_table
from scforge.data.named import NAMED_VOCABS, open_vocab
from scforge.data.naming import strip_version
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


def test_all_are_tested():
    both = ["human_mouse", "human_mouse_sum", "human_mouse_symbols"]
    assert list_vocabs() == [*both, "human_protein_coding", "mouse_protein_coding"]


@pytest.mark.parametrize("name", list_vocabs())
def test_loading_is_quick_and_done_once(name):
    start = time.perf_counter()
    vocab = GeneVocab.named(name)
    assert time.perf_counter() - start < 1  # 0.04 s on an idle machine
    assert GeneVocab.named(name) is vocab


def test_mouse_genes():
    vocab = GeneVocab.named("mouse_protein_coding")
    ids = vocab.encode(["Cd3d", "ENSMUSG00000032094", "ENSMUSG00000032094.8", "CD3D"])
    assert ids[0] == ids[1] == ids[2] > 3
    assert ids[3] == vocab.unk_id


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
    assert GeneVocab.named("human_mouse", one_to_many="drop") is drop
    assert GeneVocab.named("human_mouse", one_to_many="sum") is summed
    assert summed.genes[: drop.n_genes] == drop.genes
    assert summed.aliases is not None
    # CCL4 and CCL4L2 are Ccl4 of the mouse; FTL is Ftl1 and a copy of it.
    for names in (["CCL4", "CCL4L2", "Ccl4", "ENSMUSG00000018930"], ["FTL", "Ftl1", "ENSMUSG00000050708"]):
        assert (drop.gene_indices(names) == -1).all()
        assert len(set(summed.gene_indices(names))) == 1
        assert summed.gene_indices(names)[0] >= drop.n_genes


def test_pairs_with_the_same_symbol_are_added():
    pairs, more = GeneVocab.named("human_mouse"), GeneVocab.named("human_mouse_symbols")
    assert more.genes[: pairs.n_genes] == pairs.genes
    gapdh = ["GAPDH", "Gapdh", "ENSG00000111640", "ENSMUSG00000057666"]
    assert (pairs.gene_indices(gapdh) == -1).all()
    assert len(set(more.gene_indices(gapdh))) == 1
    assert more.gene_indices(gapdh)[0] >= pairs.n_genes
    for names in (["ACTB", "Actb"], ["FTH1", "Fth1"], ["EEF1A1", "Eef1a1"], ["RPLP0", "Rplp0"]):
        first, second = more.gene_indices(names)
        assert first == second >= 0


def test_members_of_a_family_are_summed():
    summed = GeneVocab.named("human_mouse_sum")
    names = ["CCL4", "CCL4L2", *summed.symbols[:4]]
    counts = sparse.csr_matrix(np.array([[1, 2, 3, 4, 5, 6], [7, 0, 0, 0, 0, 1]], dtype=np.float32))
    adata = ad.AnnData(counts)
    adata.var_names = names
    with pytest.warns(ScforgeWarning, match=r"1 columns .first: 'CCL4L2'."):
        cells = open_cells(adata, summed, whole_annotation=True)
    assert cells.counts[:, summed.gene_indices(["Ccl4"])[0]].toarray().ravel().tolist() == [3, 7]


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


def test_a_symbol_of_several_genes_is_no_alias():
    vocab = GeneVocab.named("human_mouse")
    assert len(gene_table("mouse").ids["Ddit3"]) > 1
    assert "Ddit3" not in vocab
    assert vocab.decode(vocab.encode(["ENSMUSG00000025408"])) == ["ENSG00000175197"]
    assert len(gene_table("human").ids["MATR3"]) > 1
    assert "MATR3" not in vocab
    assert "ENSG00000015479" in vocab


def test_genes_of_both_species_give_the_same_cells():
    vocab = GeneVocab.named("human_mouse")
    some = range(0, 8000, 40)
    mouse_of = {gene: alias for alias, gene in vocab.aliases.items() if alias.startswith("ENSMUSG")}
    counts = sparse.random(30, len(some), density=0.5, format="csr", random_state=0)
    counts.data = np.ceil(counts.data * 9)
    human, mouse = ad.AnnData(counts), ad.AnnData(counts[:, ::-1])
    human.var_names = [vocab.genes[i] for i in some]
    mouse.var_names = [mouse_of[vocab.genes[i]] + ".1" for i in some][::-1]
    first, second = (open_cells(adata, vocab, whole_annotation=True).counts for adata in (human, mouse))
    np.testing.assert_array_equal(first.toarray(), second.toarray())


def test_errors():
    with pytest.raises(OptionError, match="did you mean 'human_mouse'.*shipped: 'human_mouse', 'human_mouse_sum'"):
        GeneVocab.named("human_mose")
    with pytest.raises(OptionError, match="one_to_many='max' is not known .known: 'drop', 'sum'"):
        GeneVocab.named("human_mouse", one_to_many="max")
    with pytest.raises(OptionError, match="one_to_many='sum' is a choice for 'human_mouse' only"):
        GeneVocab.named("mouse_protein_coding", one_to_many="sum")
    with pytest.raises(OptionError, match="species='rat' has no gene table .known: 'human', 'mouse'"):
        gene_table("rat")


def test_names_that_are_none(tmp_path):
    for name in (["human_mouse"], None, 3, tmp_path):
        with pytest.raises(OptionError, match=r"^name=.* is not the name of a vocabulary; pass one of 'human_mouse'"):
            GeneVocab.named(name)


def test_copies_on_y_match_nothing():
    for name in list_vocabs():
        vocab = GeneVocab.named(name)
        assert not any(gene.endswith("_PAR_Y") for gene in vocab.genes)
        assert vocab.gene_indices(["ENSG00000002586.20_PAR_Y", "ENSG00000002586_PAR_Y"]).tolist() == [-1, -1]
    assert "ENSG00000002586" in GeneVocab.named("human_protein_coding")
    assert not any(gene.endswith("_PAR_Y") for gene in gene_table("human").symbols)


def test_open_vocab(tmp_path):
    vocab = GeneVocab.from_genes(["A"])
    vocab.save(tmp_path / "vocab.json")
    assert open_vocab(vocab) is vocab
    assert open_vocab(tmp_path / "vocab.json") == open_vocab(str(tmp_path / "vocab.json")) == vocab
    assert open_vocab("human_mouse") is GeneVocab.named("human_mouse")
    with pytest.raises(OptionError, match="^vocab='.*none.json' is neither a shipped vocabulary nor a file"):
        open_vocab(tmp_path / "none.json")
    with pytest.raises(OptionError, match="vocab is a list; pass a name, a file"):
        open_vocab(["A"])
