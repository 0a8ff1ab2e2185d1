"""GeneVocab: ids, second names, hash, files."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from scforge.data import GeneVocab
from scforge.data.named import NAMED_VOCABS
from scforge.data.naming import id_kind, strip_version
from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError


@pytest.fixture
def vocab() -> GeneVocab:
    return GeneVocab(
        genes=("ENSG00000000001", "ENSG00000000002", "ENSG00000000003"),
        symbols=("A1", "SHARED", "SHARED"),
        medians=np.array([0.1, 1 / 3, 7.0]),
        release="test",
    )


def test_special_tokens_stand_before_genes(vocab):
    assert vocab.tokens[:4] == ("<pad>", "<unk>", "<mask>", "<cls>")
    assert len(vocab) == 7
    assert vocab.n_genes == 3
    assert vocab.decode([0, 3, 4, 6]) == ["<pad>", "<cls>", "ENSG00000000001", "ENSG00000000003"]


def test_encode_knows_versions_symbols_and_unknown(vocab):
    names = ["ENSG00000000002.17", "A1", "SHARED", "nothing", "ENSG00000000009"]
    ids = vocab.encode(names)
    assert ids.tolist() == [5, 4, 5, 1, 1]
    assert ids.dtype == np.int32
    assert "ENSG00000000002.3" in vocab
    assert "nothing" not in vocab


def test_a_gene_name_wins_over_a_symbol_of_another_gene():
    assert GeneVocab(("A", "B"), symbols=("B", "C")).encode(["B", "C"]).tolist() == [5, 5]


def test_round_trip(vocab, tmp_path):
    vocab.save(tmp_path / "vocab.json")
    again = GeneVocab.from_file(tmp_path / "vocab.json")
    assert again == vocab
    assert hash(again) == hash(vocab)
    assert (again.genes, again.symbols, again.release) == (vocab.genes, vocab.symbols, vocab.release)
    np.testing.assert_array_equal(again.medians, vocab.medians)  # to the last bit


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("genes", ["ENSG00000000002", "ENSG00000000001", "ENSG00000000003"]),
        ("genes", ["x", "y"]),
        ("genes", [1, 2, 3]),
        ("genes", None),
        ("genes", ["x", "x", "y"]),
        ("symbols", ["A1", "SHARED", "OTHER"]),
        ("medians", [0.1, 0.3, 7.0]),
        ("medians", [0.1, -1.0, 7.0]),
        ("hash", "0"),
        ("hash", None),
        ("release", "other, from_data"),
        ("release", [1]),
        ("genes", "ABC"),
        ("genes", {"x": 1, "y": 2, "z": 3}),
        ("symbols", "ABC"),
        ("symbols", [1, 2, 3]),
        ("medians", ["0.1", "1", "7"]),
        ("medians", 1.0),
        ("medians", [10**400, 1, 2]),
        ("special_tokens", "<pad>"),
        ("special_tokens", []),
        ("aliases", ["x"]),
        ("aliases", {"x": 1}),
        ("aliases", {"x": "nothing"}),
        ("format", "1"),
        ("format", True),
        ("format", 3),
        ("checksum", "0"),
        ("checksum", 3),
        ("more", 1),
    ],
)
def test_changed_file_is_refused(vocab, tmp_path, key, value):
    path = tmp_path / "vocab.json"
    vocab.save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {key: value}))
    with pytest.raises(ModelFileError, match=r"vocab\.json.*[^.]\.$"):
        GeneVocab.from_file(path)


def test_a_file_without_a_checksum_is_read(vocab, tmp_path):
    path = tmp_path / "vocab.json"
    vocab.save(path)
    content = json.loads(path.read_text())
    del content["checksum"], content["aliases"]
    path.write_text(json.dumps(content))
    assert GeneVocab.from_file(path) == vocab
    assert GeneVocab.from_file(path).release == "test"


def test_the_layout_of_a_file_is_of_no_matter(vocab, tmp_path):
    path = tmp_path / "vocab.json"
    vocab.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2, ensure_ascii=False))
    assert GeneVocab.from_file(path) == vocab


@pytest.mark.parametrize("path", [None, 3, ["vocab.json"]])
def test_paths_that_are_none(path):
    with pytest.raises(OptionError, match="^path=.* is not the path of a file"):
        GeneVocab.from_file(path)


@pytest.mark.parametrize("text", ["", "not json", "[]", "{}", "\x00", '"genes"'])
def test_foreign_file_is_refused(tmp_path, text):
    path = tmp_path / "vocab.json"
    path.write_text(text)
    with pytest.raises(ModelFileError, match="not an scforge vocabulary"):
        GeneVocab.from_file(path)


def test_truncated_file_is_refused(vocab, tmp_path):
    path = tmp_path / "vocab.json"
    vocab.save(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ModelFileError):
        GeneVocab.from_file(path)


def test_missing_file(tmp_path):
    with pytest.raises(MissingFileError, match="does not exist"):
        GeneVocab.from_file(tmp_path / "vocab.json")


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
    assert base != "A"


def test_hash_separates_genes_from_symbols():
    assert GeneVocab(("A",), symbols=("BC",)) != GeneVocab(("AB",), symbols=("C",))


def test_immutable(vocab):
    with pytest.raises(AttributeError):
        vocab.genes = ("A",)
    with pytest.raises(ValueError, match="read-only"):
        vocab.medians[0] = 1.0


def test_medians_are_copied():
    medians = np.array([1.0, 2.0])
    vocab = GeneVocab(("A", "B"), medians=medians)
    medians[0] = 5.0
    assert vocab.medians[0] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"genes": ()}, "no gene"),
        ({"genes": ("A", "B", "A")}, "'A' twice"),
        ({"genes": ("A", "<mask>")}, "'<mask>'"),
        ({"genes": ("A", "B"), "symbols": ("x",)}, "symbols has 1 entries"),
        ({"genes": ("A", "B"), "medians": np.ones(3)}, "medians has 3 entries"),
        ({"genes": ("A",), "medians": np.array([0.0])}, "not a positive number"),
        ({"genes": ("A",), "medians": np.array([np.nan])}, "not a positive number"),
        ({"genes": ("A",), "medians": np.array([np.inf])}, "not a positive number"),
    ],
)
def test_bad_vocabularies(options, message):
    with pytest.raises(DataError, match=message):
        GeneVocab(**options)


def test_from_adata(tiny_adata):
    assert GeneVocab.from_adata(tiny_adata).genes == tuple(tiny_adata.var_names)
    tiny_adata.var["versioned"] = tiny_adata.var["ensembl"] + ".4"
    assert GeneVocab.from_adata(tiny_adata, gene_key="versioned").genes == tuple(tiny_adata.var["ensembl"])


def test_human_protein_coding():
    vocab = GeneVocab.named("human_protein_coding")
    assert 19_000 < vocab.n_genes < 21_000
    assert vocab.kind == "Ensembl ids"
    assert all(strip_version(gene) == gene for gene in vocab.genes)
    ids = vocab.encode(["CD3D", "ENSG00000167286", "ENSG00000167286.9", "MS4A1", "ENSG00000156738"])
    assert ids[0] == ids[1] == ids[2] > 3
    assert ids[3] == ids[4] > 3
    assert NAMED_VOCABS["human_protein_coding"] in vocab.release


def test_unknown_named_vocabulary_suggests():
    with pytest.raises(OptionError, match="did you mean 'human_protein_coding'"):
        GeneVocab.named("human_protein_codin")


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["ENSG00000141510", "ENSG00000141510.18"], "Ensembl ids"),
        (["ENSMUSG00000059552", "ENSMUSG00000000001"], "Ensembl ids"),
        (["TP53", "CD3D", "ENSG00000141510"], "gene symbols"),
        ([], "gene symbols"),
    ],
)
def test_id_kind(names, kind):
    assert id_kind(names) == kind


def test_strip_version():
    assert strip_version("ENSG00000141510.18") == "ENSG00000141510"
    assert strip_version("RP11-34P13.7") == "RP11-34P13.7"


@pytest.mark.parametrize("names", ["ABC", None, 3])
def test_names_that_are_no_list(vocab, names):
    for use, argument in [(GeneVocab.from_genes, "genes"), (vocab.encode, "names"), (vocab.gene_indices, "names")]:
        with pytest.raises(OptionError, match=f"^{argument}={names!r} is not a list of names; pass a list"):
            use(names)


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA, pd.NaT])
def test_missing_names(missing):
    with pytest.raises(DataError, match="genes has 1 missing names; fill them"):
        GeneVocab.from_genes([missing, "a"])


def test_from_what_is_no_adata():
    with pytest.raises(OptionError, match="adata is of type 'str'; read it with anndata.read_h5ad"):
        GeneVocab.from_adata("cells.h5ad")


@pytest.mark.parametrize("wrong", [-1, 7, 99])
def test_decode_of_no_token(vocab, wrong):
    with pytest.raises(OptionError, match=f"ids holds {wrong}, which is no token id; ids are from 0 to 6"):
        vocab.decode([4, wrong])


def test_intersection(vocab):
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
    with pytest.raises(DataError, match="other has no gene of this vocabulary: it holds gene symbols such as 'B2'"):
        vocab.intersection(GeneVocab.from_genes(["B2"]))
    with pytest.raises(OptionError, match="other is of type 'list'; pass a GeneVocab"):
        vocab.intersection(["A1"])
    with pytest.raises(TypeError, match="unsupported operand"):
        vocab & ["A1"]


def test_subset(vocab):
    assert vocab.subset([2, 0]).genes == ("ENSG00000000003", "ENSG00000000001")
    for mask in ([True, False, True], np.array([True, False, True])):
        assert vocab.subset(mask).genes == ("ENSG00000000001", "ENSG00000000003")
        assert vocab.subset(mask).medians.tolist() == [0.1, 7.0]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([9], "indices holds 9, which is no gene; indices are from 0 to 2"),
        ([0, -1], "indices holds -1, which is no gene"),
        ([True, False], r"indices is a mask of shape \(2,\); give one of shape \(3,\)"),
        ([0.5], "is neither a list of indices nor a mask"),
        ("A", "is neither a list of indices nor a mask"),
        (1, "is neither a list of indices nor a mask"),
    ],
)
def test_subsets_that_are_none(vocab, indices, message):
    with pytest.raises(OptionError, match=message):
        vocab.subset(indices)
