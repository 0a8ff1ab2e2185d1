"""What must hold for every vocabulary and every data set (Hypothesis)."""

from __future__ import annotations

import pickle
import string

import anndata as ad
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import sparse

from scforge.data import GeneMap, GeneVocab, StreamingMedians, convert_gene_ids
from scforge.data.cells import CellBlock
from scforge.data.gene_tables import gene_table

# Files and numba take their time, which is no failure.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SYMBOLS = st.text(string.ascii_letters + string.digits + ".-_µé ", min_size=1, max_size=12)
IDS = st.integers(0, 10**11 - 1).map(lambda number: f"ENSG{number:011d}")


@st.composite
def vocabs(draw, genes=SYMBOLS | IDS) -> GeneVocab:
    """Vocabularies of any names, with or without symbols, medians, aliases and further special tokens."""
    names = draw(st.lists(genes, min_size=1, max_size=12, unique=True))
    n = len(names)
    symbols = draw(st.none() | st.tuples(*[SYMBOLS] * n))
    medians = draw(st.none() | st.lists(st.floats(1e-6, 1e6), min_size=n, max_size=n).map(np.array))
    aliases = draw(st.none() | st.dictionaries(SYMBOLS, st.sampled_from(names), max_size=5))
    vocab = GeneVocab(tuple(names), symbols=symbols, medians=medians, release=draw(SYMBOLS), aliases=aliases)
    return vocab.with_special_tokens(*draw(st.lists(st.sampled_from(["<eos>", "<sep>"]), unique=True)))


@PATIENT
@given(vocab=vocabs())
def test_saved_and_read_is_the_same(vocab, tmp_path):
    vocab.save(tmp_path / "vocab.json")
    for again in (GeneVocab.from_file(tmp_path / "vocab.json"), pickle.loads(pickle.dumps(vocab))):
        assert again == vocab
        assert hash(again) == hash(vocab)
        assert (again.tokens, again.symbols, again.release) == (vocab.tokens, vocab.symbols, vocab.release)
        assert dict(again.aliases or {}) == dict(vocab.aliases or {})
        if vocab.medians is not None:
            np.testing.assert_array_equal(again.medians, vocab.medians)


@PATIENT
@given(vocab=vocabs())
def test_decode_undoes_encode(vocab):
    assert vocab.decode(vocab.encode(vocab.tokens)) == list(vocab.tokens)
    assert vocab.encode(vocab.tokens).tolist() == list(range(len(vocab)))
    assert vocab.gene_indices(vocab.genes).tolist() == list(range(vocab.n_genes))
    assert (vocab.gene_indices(vocab.special_tokens) == -1).all()


@PATIENT
@given(vocab=vocabs(), names=st.lists(SYMBOLS | IDS, max_size=10))
def test_a_name_is_a_gene_or_unknown(vocab, names):
    ids, indices = vocab.encode(names), vocab.gene_indices(names)
    assert ((indices >= -1) & (indices < vocab.n_genes)).all()
    np.testing.assert_array_equal(np.where(indices >= 0, indices + vocab.n_special, vocab.unk_id), ids)
    assert [name in vocab for name in names] == (indices >= 0).tolist()


@st.composite
def data(draw) -> tuple[list[str], sparse.csr_matrix]:
    """Columns of some names, repeated ones among them, with counts."""
    names = draw(st.lists(st.sampled_from([f"ENSG{i:011d}" for i in range(8)]) | SYMBOLS, min_size=1, max_size=12))
    seed, density = draw(st.integers(0, 2**32 - 1)), draw(st.floats(0, 1))
    generator = np.random.default_rng(seed)
    counts = generator.poisson(3, (5, len(names))) * (generator.random((5, len(names))) < density)
    return names, sparse.csr_matrix(counts.astype(np.float32))


VOCAB = GeneVocab(tuple(f"ENSG{i:011d}" for i in range(2, 8)), symbols=("A", "B", "C", "D", "E", "F"))


def mapped(names, counts) -> np.ndarray:
    return GeneMap.of(names, VOCAB).apply(counts).toarray()


@PATIENT
@given(cells=data())
def test_mapping_is_the_sum_of_the_columns_of_a_gene(cells):
    names, counts = cells
    expected = np.zeros((5, VOCAB.n_genes))
    for column, index in enumerate(VOCAB.gene_indices(names)):
        if index >= 0:
            expected[:, index] += counts.toarray()[:, column]
    np.testing.assert_array_equal(mapped(names, counts), expected)


@PATIENT
@given(cells=data(), random=st.randoms(use_true_random=False))
def test_permuted_columns_are_the_same_cells(cells, random):
    names, counts = cells
    order = random.sample(range(len(names)), len(names))
    np.testing.assert_array_equal(mapped([names[i] for i in order], counts[:, order]), mapped(names, counts))


@PATIENT
@given(cells=data(), version=st.integers(0, 99), other=st.sampled_from(["version", "symbol", "lower case"]))
def test_versions_and_symbols_are_the_same_genes(cells, version, other):
    names, counts = cells
    symbol_of = dict(zip(VOCAB.genes, VOCAB.symbols, strict=True))
    renamed = []
    for name in names:
        versioned = f"{name}.{version}" if name.startswith("ENSG") else name
        lower = name.lower() if name.startswith("ENSG") else name
        renamed.append({"version": versioned, "symbol": symbol_of.get(name, name), "lower case": lower}[other])
    np.testing.assert_array_equal(mapped(renamed, counts), mapped(names, counts))


@PATIENT
@given(vocab=vocabs(), cells=data())
def test_from_adata_knows_every_column(vocab, cells):
    names, counts = cells
    adata = ad.AnnData(counts)
    adata.var["name"] = names
    made = GeneVocab.from_adata(adata, gene_key="name")
    assert (made.gene_indices(names) >= 0).all()
    assert GeneMap.of(names, made).apply(counts).sum() == counts.sum()


@PATIENT
@given(
    species=st.sampled_from(["human", "mouse"]),
    picks=st.lists(st.integers(0, 70_000), min_size=1, max_size=20),
    version=st.integers(1, 30),
)
def test_symbol_of_an_id_names_that_gene(species, picks, version):
    table = gene_table(species)
    every = list(table.symbols)
    ids = [every[pick] for pick in picks]
    versioned = [f"{gene}.{version}" for gene in ids]
    symbols = list(convert_gene_ids(versioned, to="symbol", species=species))
    assert all(gene in table.ids[symbol] for gene, symbol in zip(ids, symbols, strict=True))
    assert list(convert_gene_ids(versioned, to="ensembl", species=species)) == ids


@PATIENT
@given(
    values=st.lists(st.integers(1, 10**6), min_size=1, max_size=60),
    cut=st.integers(0, 60),
    total=st.integers(10**6, 10**8),
)
def test_medians_are_right_to_one_percent_in_any_parts(values, cut, total):
    counts = sparse.csr_matrix(np.array(values)[:, None])
    whole, first, second = (StreamingMedians(1) for _ in range(3))
    whole.update(CellBlock.from_csr(counts, np.full(len(values), total)))
    for medians, part in ((first, counts[:cut]), (second, counts[cut:])):
        medians.update(CellBlock.from_csr(part, np.full(part.shape[0], total)))
    first.merge(second)
    assert first.medians()[0] == whole.medians()[0]
    np.testing.assert_allclose(whole.medians()[0], np.median(values) / total * 1e4, rtol=0.01)
