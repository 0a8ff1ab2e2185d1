"""Gene vectors: every format gives the same matrix, every bad table one sentence, and tokens are those of the base."""

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
from scforge.testing import raises
from scforge.tokenizers import GeneEmbeddingTokenizer, Tokenizer, get_tokenizer
from scforge.training.objectives import get_objective

D = 5
GENES = [f"gene{i}" for i in range(80)]
VECTORS = np.random.default_rng(0).normal(size=(80, D)).astype(np.float32)
FRAME = pd.DataFrame(VECTORS, index=GENES, columns=[f"d{i}" for i in range(D)])
PART = FRAME.iloc[::-1][::2]  # gene79, gene77, ...


def make(vocab: GeneVocab, table=FRAME, **options) -> Tokenizer:
    return get_tokenizer("gene_embedding", vocab, table=table, **options)


def write(folder: Path, kind: str) -> Path:
    """Write PART in one of the ways that are understood."""
    names, vectors = PART.index.tolist(), np.ascontiguousarray(PART.to_numpy())
    path = folder / f"table.{kind.split(' ')[0]}"
    rows = pd.DataFrame({"gene": names, "vector": list(vectors)})
    frames = {"index": PART, "column": PART.reset_index(names="symbol"), "list": rows, "lists": rows.set_index("gene")}
    if kind.startswith("npz"):
        text = np.array(names, dtype="S" if "bytes" in kind else str)
        np.savez(path, genes=text, vectors=vectors.astype(np.float64) if "bytes" in kind else vectors)
    elif kind.startswith("parquet"):
        frames[kind.split(" ")[1]].to_parquet(path)
    elif kind == "safetensors genes":
        save_file({name: np.ascontiguousarray(vector) for name, vector in zip(names, vectors, strict=True)}, path)
    else:
        save_file({"esm": vectors}, path, metadata={"genes": json.dumps(names)})
    return path


KINDS = ["npz", "npz bytes", "parquet index", "parquet column", "parquet list", "parquet lists"]
KINDS += ["safetensors matrix", "safetensors genes"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_vectors(tiny_vocab, tmp_path, kind):
    path = write(tmp_path, kind)
    for given in (path, str(path)):
        vectors = make(tiny_vocab, given).gene_vectors()
        assert vectors.dtype == np.float32
        assert vectors.shape == (84, D)
        np.testing.assert_array_equal(vectors[5::2], VECTORS[1::2])
        assert np.isnan(vectors[4::2]).all()
        assert np.isnan(vectors[:4]).all()


def test_tables_in_memory(tiny_vocab, tmp_path):
    names, rows = PART.index, PART.to_numpy()
    for table in (
        PART,
        PART.reset_index(names="gene"),
        PART.astype("Float64"),
        PART.astype(np.float64),
        dict(zip(names, rows, strict=True)),
        dict(zip(names, rows.tolist(), strict=True)),
        dict(zip(names, torch.from_numpy(rows.copy()), strict=True)),
        pd.DataFrame({"vector": list(rows)}, index=names),
    ):
        np.testing.assert_array_equal(make(tiny_vocab, table).gene_vectors()[5::2], VECTORS[1::2])
    for dtype in (np.int8, np.float16, np.bool_):
        values = (VECTORS > 0).astype(dtype)
        vectors = make(tiny_vocab, pd.DataFrame(values, index=GENES)).gene_vectors()
        np.testing.assert_array_equal(vectors[4:], values.astype(np.float32))
    half = torch.from_numpy(VECTORS).bfloat16()
    save_torch({"x": half}, tmp_path / "t.safetensors", metadata={"genes": json.dumps(GENES)})
    np.testing.assert_array_equal(make(tiny_vocab, tmp_path / "t.safetensors").gene_vectors()[4:], half.float().numpy())


def test_names_are_matched_as_the_vocabulary_knows_them():
    ids = tuple(f"ENSG{i:011d}" for i in range(4))
    vocab = GeneVocab(ids, symbols=("A", "B", "C", "D"), aliases={"OLD": ids[3]})
    table = {"ENSG00000000000.7": [1.0], "ensg00000000001": [2.0], "C": [3.0], "OLD": [4.0], "other": [9.0]}
    table["A"] = [1.0]
    assert make(vocab, table).gene_vectors()[4:, 0].tolist() == [1, 2, 3, 4]
    with raises(DataError, "table"):
        make(vocab, table | {"A": [2.5]})


def test_few_vectors_are_told(tiny_vocab, caplog):
    caplog.set_level("INFO", logger="scforge")
    with pytest.warns(ScforgeWarning, match="vectors for 30 of the 80 genes of the vocabulary .38%."):
        make(tiny_vocab, FRAME[:30])
    make(tiny_vocab, FRAME[:40])
    assert "table contains vectors for 40 of the 80 genes" in caplog.text


def bad_tables(folder: Path):
    """Yield tables that cannot be used, with the class of the error and what its message says."""

    def saved(name: str, **arrays) -> Path:
        np.savez(folder / f"{name}.npz", **arrays)
        return folder / f"{name}.npz"

    def written(name: str, content: bytes) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    def tensors(name: str, genes: str | None, **arrays) -> Path:
        save_file(arrays, folder / f"{name}.safetensors", metadata=None if genes is None else {"genes": genes})
        return folder / f"{name}.safetensors"

    text, holes = np.array(GENES), FRAME.copy()
    holes.iloc[7, 2], holes.iloc[9, 0] = np.nan, np.inf
    whole = saved("f", genes=text, vectors=VECTORS).read_bytes()
    place = whole.index(VECTORS.tobytes())
    np.save(folder / "i.npy", VECTORS)
    foreign = FRAME.rename(lambda name: f"ENSG{int(name[4:]):011d}")
    yield folder / "none.npz", MissingFileError, "none.npz' does not exist; pass the file"
    yield folder / "vectors.pt", OptionError, "vectors.pt' has an unknown format; save the vectors as .npz or .parquet"
    yield foreign, GeneMismatchError, "none of the 80 genes of the voc"
    yield holes, DataError, "missing or infinite values in the vectors of 2 genes .first: 'gene7'"
    yield FRAME.astype("Float32").replace(FRAME.iloc[3, 1], pd.NA), DataError, "the vectors of 1 genes .first: 'gene3'"
    yield FRAME.astype(str), DataError, "a table needs gene names .as the index .*its columns are"
    yield FRAME.reset_index(drop=True), DataError, "a table needs gene names .as the index .*its columns are"
    yield FRAME.reset_index(names="a").assign(b="x"), DataError, "gene names .as the index .*its columns are 'a', "
    yield FRAME.assign(b=list(VECTORS)), DataError, "a table needs gene names .as the index .*its columns are"
    yield FRAME.set_axis([None, *GENES[1:]], axis=0), DataError, "1 rows have no gene name"
    yield FRAME.iloc[:, :0], DataError, "shape .80, 0.; pass numeric vectors of shape"
    yield {}, DataError, "pass numeric vectors of shape .genes, dimensions."
    yield {"gene0": [1.0, 2.0], "gene1": [1.0]}, DataError, "must have the same shape"
    yield {"gene0": [1.0, 2.0], "gene1": 1.0}, DataError, "must have the same shape"
    yield {"gene0": [[1.0], [2.0, 3.0]]}, DataError, "inhomogeneous shape"
    yield {"gene0": ["a"], "gene1": ["b"]}, DataError, "vectors of dtype <U1"
    yield {"gene0": [[1.0]]}, DataError, r"shape \(1, 1, 1\)"
    yield saved("a", vectors=VECTORS), DataError, "a.npz' cannot be read as genes with vectors"
    yield saved("b", genes=text[:70], vectors=VECTORS), DataError, "70 gene names and vectors"
    yield saved("c", genes=text.astype(object), vectors=VECTORS), DataError, "Object arrays cannot be loaded"
    yield saved("d", genes=np.arange(80), vectors=VECTORS), GeneMismatchError, "none of the 80 genes"
    yield saved("e", genes=text, vectors=VECTORS[0]), DataError, "vectors of dtype float32 and shape .5,."
    yield written("g.npz", whole[:400]), DataError, "g.npz' cannot be read"
    damaged = whole[:place] + b"\xff" * 8 + whole[place + 8 :]
    yield written("h.npz", damaged), DataError, "Bad CRC-32"
    yield written("i.npz", (folder / "i.npy").read_bytes()), DataError, "i.npz' cannot be read"
    yield written("a.parquet", b"PAR1 and no more"), DataError, "a.parquet' cannot be read"
    yield written("a.safetensors", b"no tensors"), DataError, "a.safetensors' cannot be read"
    yield (
        tensors("b", None, x=VECTORS),
        DataError,
        r"1 gene names and vectors of dtype float32 and shape \(1, 80, 5\)",
    )
    yield tensors("c", "gene0, gene1", x=VECTORS), DataError, "c.safetensors' cannot be read"
    yield tensors("d", json.dumps(GENES), x=VECTORS, y=VECTORS), DataError, "d.safetensors' cannot be read"
    yield tensors("e", json.dumps(GENES[:3]), x=VECTORS), DataError, "3 gene names and vectors"


def test_bad_tables(tiny_vocab, tmp_path):
    for table, error, message in bad_tables(tmp_path):
        with pytest.raises(ScforgeError, match=message) as caught:
            make(tiny_vocab, table)
        assert type(caught.value) is error, caught.value
        assert "\n" not in str(caught.value)


def test_nothing_is_unpickled(tiny_vocab, tmp_path):
    class Trap:
        def __reduce__(self):
            return (tmp_path / "opened").mkdir, ()

    bad = np.array([Trap()] * 80, dtype=object)
    np.savez(tmp_path / "genes.npz", genes=bad, vectors=VECTORS)
    np.savez(tmp_path / "vectors.npz", genes=np.array(GENES), vectors=bad)
    with zipfile.ZipFile(tmp_path / "raw.npz", "w") as file:
        for name in ("genes.npy", "vectors.npy"):
            file.writestr(name, pickle.dumps(Trap()))
    for name in ("genes", "vectors", "raw"):
        with pytest.raises(DataError):
            make(tiny_vocab, tmp_path / f"{name}.npz")
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("options", [{"append_cls": False}, {"max_len": 9, "order": "expression"}])
def test_tokens_are_those_of_continuous_projection(tiny_adata, tiny_vocab, options):
    block = open_cells(tiny_adata, tiny_vocab).block(np.arange(60))
    one = make(tiny_vocab, PART, **options)(block)
    two = get_tokenizer("continuous_projection", tiny_vocab, **options)(block)
    assert set(one) == set(two)
    assert all(torch.equal(one[key], two[key]) for key in two)


@pytest.mark.parametrize("options", [{}, {"include_zero_genes": True}, {"order": "expression"}])
def test_dropped_genes_are_no_tokens_but_count(tiny_adata, tiny_vocab, options):
    block = open_cells(tiny_adata, tiny_vocab).block(np.arange(60))
    dropping, whole = make(tiny_vocab, PART, missing="drop", **options), make(tiny_vocab, PART, **options)
    assert dropping.dropped == GENES[::2]
    one, two = dropping.ragged(block), whole.ragged(block)
    kept = (two.ids < 4) | (two.ids % 2 == 1)
    np.testing.assert_array_equal(one.ids, two.ids[kept])
    np.testing.assert_array_equal(one.values, two.values[kept])
    lengths, told = np.diff(one.indptr), dropping.lengths(np.diff(block.indptr))
    assert (lengths == told).all() if "include_zero_genes" in options else (lengths <= told).all()
    assert (dropping.max_tokens(), whole.max_tokens()) == (41, 81)
    # The most expressed of the genes with vectors are kept, and the library is that of all genes.
    counts = np.zeros((1, 80))
    counts[0, :6] = [90, 5, 80, 6, 70, 7]
    batch = make(tiny_vocab, PART, missing="drop", max_len=3)(sparse.csr_matrix(counts))
    assert batch["input_ids"].tolist() == [[3, 7, 9]]
    np.testing.assert_allclose(batch["values"][0, 1:], np.log1p(np.array([6, 7]) / 258 * 1e4), rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"missing": "drop"}, {"freeze": False, "max_len": 12}])
def test_config_makes_it_again_without_the_table(tiny_adata, tiny_vocab, options):
    block = open_cells(tiny_adata, tiny_vocab).block(np.arange(60))
    tokenizer = make(tiny_vocab, PART, **options)
    config = json.loads(json.dumps(tokenizer.config()))
    assert config["table"] is None
    assert options.items() <= config.items()
    again = get_tokenizer("gene_embedding", tiny_vocab, **config)
    assert again.config() == tokenizer.config()
    assert repr(again) == repr(tokenizer)
    assert len(repr(tokenizer)) < 500
    one, two = tokenizer(block), again(block)
    assert all(torch.equal(one[key], two[key]) for key in one)
    with raises(OptionError, "table"):
        again.gene_vectors()


def test_as_transcriptformer(tiny_adata, tiny_vocab):
    tokenizer = GeneEmbeddingTokenizer.transcriptformer(tiny_vocab, table=PART, max_len=16)
    batch = tokenizer(open_cells(tiny_adata, tiny_vocab).block(np.arange(60)))
    genes = batch["input_ids"] >= 4
    assert (batch["input_ids"][genes] % 2 == 1).all()
    assert batch["values"].max() <= 30
    torch.testing.assert_close(batch["attention_bias"][genes], batch["values"][genes].log())
    assert GeneEmbeddingTokenizer.transcriptformer(tiny_vocab).missing == "learned"


def test_hidden_genes_do_not_keep_their_place(tiny_adata, tiny_vocab):
    """Tokens in the order of the vocabulary, or of equal counts, would tell which gene is hidden between two others."""
    block = open_cells(tiny_adata, tiny_vocab).block(np.arange(60))
    for order in ("vocabulary", "expression"):
        tokenizer = make(tiny_vocab, PART, order=order)
        assert tokenizer.ordered_by_gene
        batch = get_objective("masked_gene_prediction").prepare(block, tokenizer, epoch=0, seed=0)
        for chosen, mask in zip(batch["masked_positions"], batch["attention_mask"], strict=True):
            n = int(chosen.sum())
            assert chosen[mask][-n:].all()


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"missing": "zero"}, "missing"),
        ({"missing": "drop", "table": None}, "missing"),
        ({"missing": "drop", "dropped": []}, "dropped"),
        ({"dropped": ["gene1"], "table": None}, "dropped"),
        (
            {"missing": "drop", "dropped": ["gene1", "geneX"], "table": None},
            "dropped",
        ),
        ({"missing": "drop", "library_size": "vocabulary"}, "missing"),
        ({"tabel": 3}, "tabel"),
    ],
)
def test_bad_options(tiny_vocab, options, argument):
    with raises(OptionError, argument):
        get_tokenizer("gene_embedding", tiny_vocab, **{"table": PART} | options)
