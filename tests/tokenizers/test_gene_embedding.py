"""Gene vectors: every format gives the same matrix, every bad table one sentence, and tokens are those of the base."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from scipy import sparse

from scforge.data import GeneVocab, open_cells
from scforge.errors import DataError, GeneMismatchError, MissingFileError, OptionError, ScforgeError, ScforgeWarning
from scforge.tokenizers import GeneEmbeddingTokenizer, Tokenizer, get_tokenizer
from scforge.training.objectives import get_objective

D = 5
GENES = [f"gene{i}" for i in range(80)]
VECTORS = np.random.default_rng(0).normal(size=(80, D)).astype(np.float32)
FRAME = pd.DataFrame(VECTORS, index=GENES, columns=[f"d{i}" for i in range(D)])
PART = FRAME.iloc[::-1][::2]  # gene79, gene77, ...


def make(vocab: GeneVocab, table=FRAME, **options) -> Tokenizer:
    return get_tokenizer("gene_embedding", vocab, table=table, **options)


def write(path: Path, kind: str) -> Path:
    """Write PART in one of the ways that are understood."""
    names, vectors = PART.index.tolist(), np.ascontiguousarray(PART.to_numpy())
    rows = {"gene": names, "vector": list(vectors)}
    path = path / f"table.{kind.split(' ')[0]}"
    if kind.startswith("npz"):
        text = np.array(names, dtype="S" if "bytes" in kind else str)
        np.savez(path, genes=text, vectors=vectors.astype(np.float64) if "float64" in kind else vectors)
    elif kind == "parquet index":
        PART.to_parquet(path)
    elif kind == "parquet column":
        PART.reset_index(names="symbol").to_parquet(path)
    elif kind == "parquet list":
        pd.DataFrame(rows).to_parquet(path)
    elif kind == "parquet list index":
        pd.DataFrame(rows).set_index("gene").to_parquet(path)
    elif kind == "safetensors matrix":
        save_file({"esm": vectors}, path, metadata={"genes": json.dumps(names)})
    elif kind == "safetensors genes":
        save_file({name: np.ascontiguousarray(vector) for name, vector in zip(names, vectors, strict=True)}, path)
    return path


@pytest.fixture
def vocab(tiny_vocab) -> GeneVocab:
    return tiny_vocab


KINDS = ["npz", "npz bytes", "npz float64", "parquet index", "parquet column", "parquet list", "parquet list index"]
KINDS += ["safetensors matrix", "safetensors genes"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_text", [True, False])
def test_every_format_gives_the_same_vectors(vocab, tmp_path, kind, as_text):
    path = write(tmp_path, kind)
    vectors = make(vocab, str(path) if as_text else path).gene_vectors()
    assert vectors.dtype == np.float32
    assert vectors.shape == (84, D)
    np.testing.assert_array_equal(vectors[5::2], VECTORS[1::2])
    assert np.isnan(vectors[4::2]).all()
    assert np.isnan(vectors[:4]).all()


@pytest.mark.parametrize(
    "table",
    [
        PART,
        PART.reset_index(names="gene"),
        PART.astype("Float64"),
        PART.astype(np.float64),
        dict(zip(PART.index, PART.to_numpy(), strict=True)),
        {name: row.tolist() for name, row in zip(PART.index, PART.to_numpy(), strict=True)},
        {name: torch.tensor(row) for name, row in zip(PART.index, PART.to_numpy(), strict=True)},
        pd.DataFrame({"vector": list(PART.to_numpy())}, index=PART.index),
    ],
    ids=["index", "column", "Float64", "float64", "arrays", "lists", "tensors", "list column"],
)
def test_tables_in_memory(vocab, table):
    np.testing.assert_array_equal(make(vocab, table).gene_vectors()[5::2], VECTORS[1::2])


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.float16, np.bool_])
def test_numbers_of_any_kind(vocab, dtype):
    values = (VECTORS > 0).astype(dtype)
    vectors = make(vocab, pd.DataFrame(values, index=GENES)).gene_vectors()
    np.testing.assert_array_equal(vectors[4:], values.astype(np.float32))


def test_bfloat16(vocab, tmp_path):
    matrix = torch.from_numpy(VECTORS).bfloat16()
    save_torch({"x": matrix}, tmp_path / "t.safetensors", metadata={"genes": json.dumps(GENES)})
    np.testing.assert_array_equal(make(vocab, tmp_path / "t.safetensors").gene_vectors()[4:], matrix.float().numpy())


def test_names_are_matched_as_the_vocabulary_knows_them():
    ids = tuple(f"ENSG{i:011d}" for i in range(4))
    vocab = GeneVocab(ids, symbols=("A", "B", "C", "D"), aliases={"OLD": ids[3]})
    table = {"ENSG00000000000.7": [1.0], "ensg00000000001": [2.0], "C": [3.0], "OLD": [4.0], "other": [9.0]}
    assert make(vocab, table).gene_vectors()[4:, 0].tolist() == [1, 2, 3, 4]


def test_rows_of_one_gene_must_agree():
    vocab = GeneVocab(("ENSG00000000000", "ENSG00000000001"), symbols=("A", "B"))
    table = {"ENSG00000000000.1": [1.0, 2.0], "A": [1.0, 2.0], "B": [0.0, 2.0]}
    assert make(vocab, table).gene_vectors()[4:].tolist() == [[1, 2], [0, 2]]
    with pytest.raises(DataError, match="several vectors for the gene 'ENSG00000000000', in the rows 'ENSG.*', 'A'; k"):
        make(vocab, table | {"A": [1.0, 2.5]})


def test_few_vectors_are_told(vocab, caplog):
    caplog.set_level("INFO", logger="scforge")
    with pytest.warns(ScforgeWarning, match="vectors for 30 of the 80 genes of the vocabulary .38%."):
        make(vocab, FRAME[:30])
    make(vocab, FRAME[:40])
    assert "table has vectors for 40 of the 80 genes" in caplog.text


def saved(path: Path, **arrays) -> Path:
    np.savez(path, **arrays)
    return path


def bad_tables(folder: Path):
    """Yield tables that cannot be used, with the class of the error and what its message says."""
    text = np.array(GENES)
    holes = VECTORS.copy()
    holes[7, 2], holes[9, 0] = np.nan, np.inf
    yield 7, OptionError, "table is of type 'int'; pass a file"
    yield folder / "none.npz", MissingFileError, "none.npz' does not exist; give the file"
    yield (
        folder / "vectors.pt",
        OptionError,
        "vectors.pt' is of no known format; save the vectors as .npz or .parquet or ",
    )
    yield FRAME.rename(lambda name: f"ENSG{int(name[4:]):011d}"), GeneMismatchError, "none of the 80 genes of the voc"
    yield (
        pd.DataFrame(holes, index=GENES),
        DataError,
        "missing or infinite numbers in the vectors of 2 genes .first: 'gene7'",
    )
    yield FRAME.astype("Float32").replace(FRAME.iloc[3, 1], pd.NA), DataError, "the vectors of 1 genes .first: 'gene3'"
    yield FRAME * 1e300, DataError, "missing or infinite numbers"
    yield FRAME * 0, DataError, "table gives the same vector to all genes"
    yield FRAME[:1], DataError, "table gives the same vector to all genes"
    yield FRAME.astype(str), DataError, "gene names once, .* columns without numbers"
    yield FRAME * 1j, DataError, "gene names once"
    yield FRAME.reset_index(drop=True), DataError, "gene names once.* it has as columns of text: nothing"
    yield FRAME.reset_index(names="a").assign(b="x"), DataError, "gene names once.* as columns of text: 'a', 'b'"
    yield FRAME.assign(b=list(VECTORS)), DataError, "the column of vectors 'b' beside other columns of numbers"
    yield FRAME.set_axis([None, *GENES[1:]], axis=0), DataError, "has 1 rows without a gene name"
    yield FRAME.iloc[:, :0], DataError, "shape .80, 0.; numbers of shape"
    yield FRAME[:0], DataError, "shape .0, 5.; numbers of shape"
    yield {}, DataError, "numbers of shape .genes, dimensions. are needed"
    yield (
        {"gene0": [1.0, 2.0], "gene1": [1.0]},
        DataError,
        "shape .1,. for the gene 'gene1', but of shape .2,. for 'gene0'",
    )
    yield {"gene0": [1.0, 2.0], "gene1": 1.0}, DataError, r"has 1.0 for the gene 'gene1'"
    yield {"gene0": [[1.0], [2.0, 3.0]]}, DataError, "something else than one vector a gene"
    yield {"gene0": ["a"], "gene1": ["b"]}, DataError, "vectors of dtype <U1"
    yield saved(folder / "a.npz", vectors=VECTORS), DataError, "a.npz' lacks the array 'genes' .it has: 'vectors'."
    yield saved(folder / "b.npz", genes=text[:70], vectors=VECTORS), DataError, "70 gene names but 80 vectors"
    yield saved(folder / "c.npz", genes=text.astype(object), vectors=VECTORS), DataError, "save the names as text with"
    yield saved(folder / "d.npz", genes=np.arange(80), vectors=VECTORS), DataError, "'genes' of dtype int64"
    yield saved(folder / "e.npz", genes=text, vectors=VECTORS[0]), DataError, "vectors of dtype float32 and shape .5,."
    whole = saved(folder / "f.npz", genes=text, vectors=VECTORS).read_bytes()
    (folder / "g.npz").write_bytes(whole[:400])
    yield folder / "g.npz", DataError, "is not an npz file; write it with np.savez"
    place = whole.index(VECTORS.tobytes())
    (folder / "h.npz").write_bytes(whole[:place] + b"\xff" * 8 + whole[place + 8 :])
    yield folder / "h.npz", DataError, "cannot be read: Bad CRC-32"
    np.save(folder / "i.npy", VECTORS)
    (folder / "i.npy").rename(folder / "i.npz")
    yield folder / "i.npz", DataError, "is not an npz file"
    (folder / "a.parquet").write_bytes(b"PAR1 and no more")
    yield folder / "a.parquet", DataError, "cannot be read as parquet"
    (folder / "a.safetensors").write_bytes(b"no tensors")
    yield folder / "a.safetensors", DataError, "cannot be read as safetensors"
    save_file({"x": VECTORS}, folder / "b.safetensors")
    yield folder / "b.safetensors", DataError, "a matrix but no gene names; put them as a JSON list under 'genes'"
    save_file({"x": VECTORS}, folder / "c.safetensors", metadata={"genes": "gene0, gene1"})
    yield folder / "c.safetensors", DataError, "not a JSON list"
    save_file({"x": VECTORS, "y": VECTORS}, folder / "d.safetensors", metadata={"genes": json.dumps(GENES)})
    yield folder / "d.safetensors", DataError, "must hold one matrix"
    save_file({"x": VECTORS}, folder / "e.safetensors", metadata={"genes": json.dumps(GENES[:3])})
    yield folder / "e.safetensors", DataError, "3 gene names but 80 vectors"


def test_bad_tables(vocab, tmp_path):
    n_tables = 0
    for table, error, message in bad_tables(tmp_path):
        with pytest.raises(ScforgeError, match=message) as caught:
            make(vocab, table)
        assert type(caught.value) is error, caught.value
        assert "\n" not in str(caught.value)
        n_tables += 1
    assert n_tables == 36


def test_nothing_is_unpickled(vocab, tmp_path):
    class Trap:
        def __reduce__(self):
            return (tmp_path / "opened").mkdir, ()

    bad = np.array([Trap()] * 80, dtype=object)
    for name, arrays in {
        "genes": {"genes": bad, "vectors": VECTORS},
        "vectors": {"genes": np.array(GENES), "vectors": bad},
    }.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        with pytest.raises(DataError):
            make(vocab, tmp_path / f"{name}.npz")
    with zipfile.ZipFile(tmp_path / "raw.npz", "w") as file:
        for name in ("genes.npy", "vectors.npy"):
            file.writestr(name, pickle.dumps(Trap()))
    with pytest.raises(DataError):
        make(vocab, tmp_path / "raw.npz")
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("options", [{}, {"append_cls": False}, {"max_len": 9}, {"order": "expression"}])
def test_tokens_are_those_of_continuous_projection(tiny_adata, vocab, options):
    block = open_cells(tiny_adata, vocab).block(np.arange(60))
    one = make(vocab, PART, **options)(block)
    two = get_tokenizer("continuous_projection", vocab, **options)(block)
    assert set(one) == set(two)
    assert all(torch.equal(one[key], two[key]) for key in two)


@pytest.mark.parametrize("options", [{}, {"include_zero_genes": True}, {"order": "expression"}])
def test_dropped_genes_are_no_tokens_but_count(tiny_adata, vocab, options):
    block = open_cells(tiny_adata, vocab).block(np.arange(60))
    dropping, whole = make(vocab, PART, missing="drop", **options), make(vocab, PART, **options)
    assert dropping.dropped == GENES[::2]
    one, two = dropping.ragged(block), whole.ragged(block)
    kept = (two.ids < 4) | (two.ids % 2 == 1)
    np.testing.assert_array_equal(one.ids, two.ids[kept])
    np.testing.assert_array_equal(one.values, two.values[kept])
    lengths, n_genes = np.diff(one.indptr), np.diff(block.indptr)
    assert (lengths <= dropping.lengths(n_genes)).all()
    assert dropping.max_tokens() == 41
    assert whole.max_tokens() == 81
    if options.get("include_zero_genes"):
        np.testing.assert_array_equal(lengths, dropping.lengths(n_genes))


def test_truncation_keeps_the_most_expressed_of_the_genes_with_vectors(vocab):
    counts = np.zeros((1, 80))
    counts[0, :6] = [90, 5, 80, 6, 70, 7]
    batch = make(vocab, PART, missing="drop", max_len=3)(sparse.csr_matrix(counts))
    assert batch["input_ids"].tolist() == [[3, 7, 9]]
    np.testing.assert_allclose(batch["values"][0, 1:], np.log1p(np.array([6, 7]) / 258 * 1e4), rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"missing": "drop"}, {"freeze": False, "max_len": 12}])
def test_config_makes_it_again_without_the_table(tiny_adata, vocab, options):
    block = open_cells(tiny_adata, vocab).block(np.arange(60))
    tokenizer = make(vocab, PART, **options)
    config = json.loads(json.dumps(tokenizer.config()))
    assert config["table"] is None
    assert options.items() <= config.items()
    again = get_tokenizer("gene_embedding", vocab, **config)
    assert again.config() == tokenizer.config()
    assert repr(again) == repr(tokenizer)
    assert len(repr(tokenizer)) < 500
    one, two = tokenizer(block), again(block)
    assert all(torch.equal(one[key], two[key]) for key in one)
    with pytest.raises(OptionError, match="table=None but the tokenizer 'gene_embedding' needs gene vectors"):
        again.gene_vectors()


def test_as_transcriptformer(tiny_adata, vocab):
    tokenizer = GeneEmbeddingTokenizer.transcriptformer(vocab, table=PART, max_len=16)
    batch = tokenizer(open_cells(tiny_adata, vocab).block(np.arange(60)))
    genes = batch["input_ids"] >= 4
    assert (batch["input_ids"][genes] % 2 == 1).all()
    assert batch["values"].max() <= 30
    torch.testing.assert_close(batch["attention_bias"][genes], batch["values"][genes].log())
    assert GeneEmbeddingTokenizer.transcriptformer(vocab).missing == "learned"


def test_hidden_genes_do_not_keep_their_place(tiny_adata, vocab):
    """Tokens in the order of the vocabulary, or of equal counts, would tell which gene is hidden between two others."""
    block = open_cells(tiny_adata, vocab).block(np.arange(60))
    for order in ("vocabulary", "expression"):
        tokenizer = make(vocab, PART, order=order)
        assert tokenizer.ordered_by_gene
        batch = get_objective("masked_gene_prediction").prepare(block, tokenizer, epoch=0, seed=0)
        for chosen, mask in zip(batch["masked_positions"], batch["attention_mask"], strict=True):
            n = int(chosen.sum())
            assert chosen[mask][-n:].all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"missing": "zero"}, "missing='zero' is not known; choose 'learned' or 'drop'"),
        ({"missing": "drop", "table": None}, "missing='drop' needs a table"),
        ({"missing": "drop", "dropped": []}, "dropped is made of the table"),
        ({"dropped": ["gene1"], "table": None}, "dropped is made of the table"),
        ({"missing": "drop", "dropped": ["gene1", "geneX"], "table": None}, "dropped names 'geneX', which is no gene"),
        ({"missing": "drop", "library_size": "vocabulary"}, "pass library_size='data'"),
        ({"tabel": 3}, "'tabel' is unknown to 'gene_embedding'; did you mean 'table'"),
    ],
)
def test_bad_options(vocab, options, message):
    with pytest.raises(OptionError, match=message):
        get_tokenizer("gene_embedding", vocab, **{"table": PART} | options)
