import json
import pickle
import string

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import sparse

from scforge.data import GeneVocab
from scforge.data.genes import GeneMap
from scforge.data.vocab import id_kind, strip_version
from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError
from scforge.testing import raises


@pytest.fixture
def vocab() -> GeneVocab:
    return GeneVocab(
        genes=("ENSG00000000001", "ENSG00000000002", "ENSG00000000003"),
        symbols=("A1", "SHARED", "SHARED"),
        medians=np.array([0.1, 1 / 3, 7.0]),
        release="test",
    )


def test_encode_knows_versions_symbols_and_unknown(vocab):
    assert vocab.tokens[:4] == ("<pad>", "<unk>", "<mask>", "<cls>")
    assert (len(vocab), vocab.n_genes) == (7, 3)
    assert vocab.decode([0, 3, 4, 6]) == ["<pad>", "<cls>", "ENSG00000000001", "ENSG00000000003"]
    names = ["ENSG00000000002.17", "A1", "SHARED", "nothing", "ENSG00000000009"]
    ids = vocab.encode(names)
    assert ids.tolist() == [5, 4, 5, 1, 1]
    assert ids.dtype == np.int32
    assert "ENSG00000000002.3" in vocab
    assert "nothing" not in vocab
    # A gene's own name wins over a symbol of another gene.
    assert GeneVocab(("A", "B"), symbols=("B", "C")).encode(["B", "C"]).tolist() == [5, 5]
    assert [strip_version(name) for name in ("ENSG00000141510.18", "RP11-34P13.7")] == [
        "ENSG00000141510",
        "RP11-34P13.7",
    ]
    assert id_kind(["ENSMUSG00000059552", "ENSG00000141510.18"]) == "Ensembl ids"
    assert id_kind(["TP53", "CD3D", "ENSG00000141510"]) == id_kind([]) == "gene symbols"


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("genes", [["ENSG00000000002", "ENSG00000000001", "ENSG00000000003"], ["x", "y"], [1, 2, 3], None]),
        ("symbols", [["A1", "SHARED", "OTHER"], "ABC", [1, 2, 3]]),
        ("medians", [[0.1, 0.3, 7.0], [0.1, -1.0, 7.0], ["0.1", "1", "7"], 1.0, [10**400, 1, 2]]),
        ("hash", ["0", None]),
        ("release", ["other, from_data", [1]]),
        ("special_tokens", ["<pad>", []]),
        ("aliases", [["x"], {"x": 1}, {"x": "nothing"}]),
        ("format", ["1", True, 3]),
        ("checksum", ["0", 3]),
        ("more", [1]),
    ],
)
def test_changed_file_is_refused(vocab, tmp_path, key, values):
    path = tmp_path / "vocab.json"
    vocab.save(path)
    content = json.loads(path.read_text())
    for value in values:
        path.write_text(json.dumps(content | {key: value}))
        with pytest.raises(ModelFileError):
            GeneVocab.from_file(path)


def test_files_of_another_layout(vocab, tmp_path):
    path = tmp_path / "vocab.json"
    vocab.save(path)
    whole = path.read_text()
    content = json.loads(whole)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False))
    assert GeneVocab.from_file(path) == vocab
    del content["checksum"], content["aliases"]
    path.write_text(json.dumps(content))
    assert GeneVocab.from_file(path) == vocab
    assert GeneVocab.from_file(path).release == "test"
    for text in ("", "not json", "[]", "{}", "\x00", '"genes"'):
        path.write_text(text)
        with pytest.raises(ModelFileError, match="not an scforge vocabulary") as told:
            GeneVocab.from_file(path)
        assert str(told.value).count("vocab.json") == 1
    with pytest.raises(MissingFileError):
        GeneVocab.from_file(tmp_path / "none.json")


def test_hash_depends_on_order_symbols_and_medians_but_not_on_release():
    base = GeneVocab(("A", "B"))
    others = [
        GeneVocab(("B", "A")),
        GeneVocab(("A", "C")),
        GeneVocab(("A", "B"), symbols=("x", "y")),
        GeneVocab(("A", "B"), medians=np.array([1.0, 2.0])),
        GeneVocab(("A", "B"), medians=np.array([1.0, 2.0 + 1e-12])),
    ]
    assert len({vocab.hash for vocab in [base, *others]}) == 6
    assert len({base, *others}) == 6
    assert base == GeneVocab(("A", "B"), release="other")
    medians = np.ones(2)
    copied = GeneVocab(("A", "B"), medians=medians)
    medians[0] = 5.0
    assert copied.medians[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        copied.medians[0] = 1.0
    with pytest.raises(AttributeError):
        base.genes = ("A",)
    assert GeneVocab(("A",), symbols=("BC",)) != GeneVocab(("AB",), symbols=("C",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"genes": ()}, "no gene"),
        ({"genes": ("A", "B", "A")}, "'A' twice"),
        ({"genes": ("A", "<mask>")}, "'<mask>'"),
        ({"genes": ("A", "B"), "symbols": ("x",)}, "symbols has 1 entries"),
        ({"genes": ("A", "B"), "medians": np.ones(3)}, "medians has 3 entries"),
        ({"genes": ("A",), "medians": np.array([0.0])}, "a value that is not positive"),
        ({"genes": ("A",), "medians": np.array([np.nan])}, "a value that is not positive"),
        *(({"genes": (name, "a")}, "genes has 1 missing names; fill in") for name in (None, np.nan, pd.NA, pd.NaT)),
    ],
)
def test_bad_vocabularies(options, message):
    with pytest.raises(DataError, match=message):
        GeneVocab(**options) if "missing" not in message else GeneVocab.from_genes(**options)


def test_intersection_and_subset(vocab):
    assert vocab.subset([2, 0]).genes == ("ENSG00000000003", "ENSG00000000001")
    for mask in ([True, False, True], np.array([True, False, True])):
        assert vocab.subset(mask).genes == ("ENSG00000000001", "ENSG00000000003")
        assert vocab.subset(mask).medians.tolist() == [0.1, 7.0]
    listed = GeneVocab.from_genes(["ENSG00000000003.4", "ENSG00000000001", "other"])
    shared = vocab & GeneVocab.from_genes(["ENSG00000000003", "ENSG00000000001", "other"])
    assert shared.genes == ("ENSG00000000001", "ENSG00000000003")
    assert (shared.symbols, shared.medians.tolist()) == (("A1", "SHARED"), [0.1, 7.0])
    assert (listed & vocab).genes == ("ENSG00000000003.4", "ENSG00000000001")
    assert vocab.intersection(GeneVocab.from_genes(["A1", "B2"])).genes == ("ENSG00000000001",)
    assert vocab & vocab == vocab
    whole = GeneVocab.named("human_mouse")
    assert (whole & GeneVocab.from_genes(["CD3D"])).chosen_from_data
    assert not (whole & GeneVocab.named("human_protein_coding")).chosen_from_data
    with raises(DataError, "other"):
        vocab.intersection(GeneVocab.from_genes(["B2"]))
    with pytest.raises(TypeError, match="unsupported operand"):
        vocab & ["A1"]


@pytest.mark.parametrize(
    ("method", "argument", "about"),
    [
        ("decode", [4, -1], "ids"),
        ("from_genes", "ABC", "genes"),
        ("encode", None, "names"),
        ("gene_indices", 3, "names"),
        ("from_adata", "cells.h5ad", "adata"),
    ],
)
def test_arguments_that_do_not_fit(vocab, method, argument, about):
    with raises(OptionError, about):
        getattr(vocab, method)(argument)
    for indices in ([9], [True, False], [0.5]):
        with raises(OptionError, "indices"):
            vocab.subset(indices)


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
    vocab.save(tmp_path / "vocab.json", overwrite=True)
    for again in (GeneVocab.from_file(tmp_path / "vocab.json"), pickle.loads(pickle.dumps(vocab))):
        assert again == vocab
        assert hash(again) == hash(vocab)
        assert (again.tokens, again.symbols, again.release) == (vocab.tokens, vocab.symbols, vocab.release)
        assert dict(again.aliases or {}) == dict(vocab.aliases or {})
        if vocab.medians is not None:
            np.testing.assert_array_equal(again.medians, vocab.medians)


@PATIENT
@given(vocab=vocabs(), names=st.lists(SYMBOLS | IDS, max_size=10))
def test_decode_undoes_encode(vocab, names):
    assert vocab.decode(vocab.encode(vocab.tokens)) == list(vocab.tokens)
    assert vocab.encode(vocab.tokens).tolist() == list(range(len(vocab)))
    assert vocab.gene_indices(vocab.genes).tolist() == list(range(vocab.n_genes))
    assert (vocab.gene_indices(vocab.special_tokens) == -1).all()
    # A name is a gene or unknown.
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


@PATIENT
@given(cells=data(), version=st.integers(0, 99), other=st.sampled_from(["as it is", "version", "symbol", "lower case"]))
def test_mapping_is_the_sum_of_the_columns_of_a_gene(cells, version, other):
    names, counts = cells
    expected = np.zeros((5, VOCAB.n_genes))
    for column, index in enumerate(VOCAB.gene_indices(names)):
        if index >= 0:
            expected[:, index] += counts.toarray()[:, column]
    symbol_of = dict(zip(VOCAB.genes, VOCAB.symbols, strict=True))
    renamed = []
    for name in names:
        forms = {"version": f"{name}.{version}", "symbol": symbol_of.get(name, name), "lower case": name.lower()}
        renamed.append(forms.get(other, name) if name.startswith("ENSG") else name)
    np.testing.assert_array_equal(GeneMap.of(renamed, VOCAB).apply(counts).toarray(), expected)
    adata = ad.AnnData(counts)
    adata.var["name"] = names
    adata.var_names = [f"{gene}.{version}" for gene in [*VOCAB.genes, *"abcdef"][: len(names)]]
    assert GeneVocab.from_adata(adata).genes[:6] == VOCAB.genes[: len(names)]
    made = GeneVocab.from_adata(adata, gene_key="name")
    names = [name.strip() for name in names]
    assert (made.gene_indices(names) >= 0).all()
    assert GeneMap.of(names, made).apply(counts).sum() == counts.sum()
