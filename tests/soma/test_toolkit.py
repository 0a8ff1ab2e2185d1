import gzip
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from scforge.cli import main
from scforge.data import GeneVocab
from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError
from scforge.soma import embed, gene_table, read_documents, train
from scforge.soma.byte_data import hold_out
from scforge.soma.documents import Document, read_fasta, read_groups
from scforge.soma.model_folder import read_model
from scforge.soma.v1.tokenizer import tokenize_arrays
from scforge.testing import raises
from scforge.tokenizers import GeneEmbeddingTokenizer

TINY = {"embedding_dim": 16, "num_layers": 1, "num_heads": 2, "seq_len": 16, "device": "cpu", "progress_bar": False}
WORDS = ["the gene", "guards", "binds dna", "in the nucleus", "of t cells", "a kinase"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name: str, content: str | bytes) -> str:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


@pytest.fixture
def texts() -> list[str]:
    rng = np.random.default_rng(0)
    return [write(f"{i}.txt", " ".join(rng.choice(WORDS, 40))) for i in range(8)]


def test_fasta_is_read():
    write("a.fa", "\n>ENSP1 gene:ENSG1.2 gene_symbol:TP53\r\nMEEP\r\nQS\r\n\r\n>ENSP2 gene:ENSG2\nMA\n")
    assert read_fasta("a.fa") == [("ENSP1", b"MEEPQS"), ("ENSP2", b"MA")]
    assert [record.name for record in read_fasta("a.fa", field="gene")] == ["ENSG1.2", "ENSG2"]
    for name, kind in (("b.fa.gz", "auto"), ("C.FA.GZ", "auto"), ("d.gz", "fasta")):
        assert read_documents(write(name, gzip.compress(b">x\nACGT")), kind=kind) == [("x", b"ACGT")]
    assert read_documents(write("E.TXT.GZ", gzip.compress(b"words"))) == [("E", b"words")]
    assert read_fasta(write("f.fa", b"\xef\xbb\xbf>a\rAC\rGT\r>b\rGG\r")) == [("a", b"ACGT"), ("b", b"GG")]
    # A field of UniProt has several words.
    write("g.fa", ">P1 Cellular tumor antigen OS=Homo sapiens GN=TP53 PE=1\nMEEP\n>P2 GN=H2-K1 OS=Mus\nMA\n")
    for field, expected in {"OS": ["Homo sapiens", "Mus"], "GN": ["TP53", "H2-K1"]}.items():
        assert [record.name for record in read_fasta("g.fa", field=field)] == expected


def test_tables_are_read():
    write("a.csv", '\ufeffid,gene,text\n1,TP53,"guards, the genome"\n\n2,NA,unknown\n')
    assert read_documents("a.csv") == [("TP53", b"guards, the genome"), ("NA", b"unknown")]
    assert read_documents("a.csv", kind="bytes") == [("a", Path("a.csv").read_bytes())]
    assert read_documents("a.csv", gene_column="id")[0].name == "1"
    write("b.tsv", 'gene\ttext\nA\t"open\nB\t5" long\nC\tclosed"\n')
    assert read_documents("b.tsv") == [("A", b'"open'), ("B", b'5" long'), ("C", b'closed"')]
    long = "ACGT" * 50_000
    assert read_documents(write("c.csv", f"gene,text\nA,{long}\n")) == [("A", long.encode())]


@pytest.mark.parametrize(
    ("name", "content", "options", "error", "words"),
    [
        ("a.fa", "ACGT\n>a\nAC\n", {}, DataError, "does not begin with a FASTA record"),
        ("a.fa", ">\nAC\n", {}, DataError, "record 1 has no name"),
        ("a.fa", ">a\n>b\nAC\n", {}, DataError, "no sequence for the record 'a'"),
        ("a.fa", ">a x:1\nAC\n>b\nAC\n", {"field": "x"}, DataError, "record 2.*no field 'x'"),
        ("a.tsv", "gene\ttext\n\n\n", {}, DataError, "no rows"),
        ("a.tsv", "gene\ttext\nA\tb\tc\n", {}, DataError, "Expected 2 fields in line 2, saw 3"),
        ("a.tsv", "gene\ttext\nA\t\n", {}, DataError, "no text in row 2"),
        ("a.tsv", "gene\tgene\nA\tb\n", {}, DataError, "'gene' is more than once in 'a.tsv'"),
        ("a.tsv", b"gene\ttext\nA\t\xff\n", {}, DataError, "UTF-8"),
        (
            "a.csv",
            "gene,text\nA,b\n",
            {"text_column": "txt"},
            DataError,
            "'txt' is not in 'a.csv'; did you mean 'text'.? .columns: 'gene'",
        ),
        ("a.bin", b"", {}, DataError, "'a.bin', which is empty"),
        ("a.gz", b"no gzip", {}, DataError, "decompressed"),
        ("a", "x", {"kind": "fast"}, OptionError, "kind='fast'.*did you mean 'fasta'"),
        ("gone.txt", None, {}, MissingFileError, "gone.txt.*does not exist"),
        (".", None, {}, MissingFileError, "is a folder"),
    ],
)
def test_files_that_cannot_be_read_are_refused(name, content, options, error, words):
    if content is not None:
        write(name, content)
    with pytest.raises(error, match=words):
        read_documents(name, **options)


def test_options_without_use_are_refused():
    for name, content in {"a.txt": "words", "a.fa": ">x GN=A\nACGT\n", "b.fa": ">x GN=A\nTTTT\n"}.items():
        write(name, content)
    for files, options, words in [
        ("a.txt", {"field": "GN"}, "field='GN' has no effect"),
        ("a.txt", {"gene_column": "gene"}, "gene_column='gene' has no effect"),
        ("a.fa", {"kind": "bytes", "field": "GN"}, "field='GN' has no effect"),
        (None, {}, "must be a file name or a list"),
        ([3], {}, "must be a file name or a list"),
    ]:
        with pytest.raises(OptionError, match=words):
            read_documents(files, **options)
    assert [one.name for one in read_documents(["a.txt", "a.fa"], field="GN")] == ["a", "A"]
    groups = read_groups(["a.txt", "b.fa"], field="GN")
    assert [[one.name for one in group] for group in groups] == [["a"], ["A"]]


def test_what_is_held_out_is_not_learnt():
    documents = [Document(f"{i}", f"text {i % 7}".encode()) for i in range(20)]
    learnt, held_out = hold_out(documents, 0.3, seed=1)
    assert not {one.data for one in learnt} & {one.data for one in held_out}
    assert 3 <= len(held_out) <= 9
    assert len(learnt) + len(held_out) == 20
    one = hold_out([Document("a", bytes(range(100)))], 0.2, seed=0)
    assert one == ([("a", bytes(range(80)))], [("a", bytes(range(80, 100)))])
    assert hold_out(documents, 0, seed=0) == (documents, [])
    with raises(OptionError, "validation_size"):
        hold_out([Document("a", b"x")], 0.5, seed=0)
    # Equal documents are cut alike.
    twice = [Document("a", b"0123456789"), Document("b", b"0123456789"), Document("c", b"x")]
    learnt, held_out = hold_out(twice, 0.2, seed=0)
    assert {("a", b"01234567"), ("b", b"01234567")} <= set(learnt)
    assert {("a", b"89"), ("b", b"89")} <= set(held_out)


@pytest.mark.parametrize("sizes", [[9_000, 100, 100, 100], [1_000, 1], [3, 4], [5_000, *range(1, 60)]])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_the_share_is_kept_with_documents_of_unequal_sizes(sizes, share):
    rng = np.random.default_rng(0)
    documents = [Document(f"{number}", rng.bytes(size)) for number, size in enumerate(sizes)]
    for seed in range(10):
        learnt, held_out = hold_out(documents, share, seed=seed)
        n_bytes = sum(len(one.data) for one in held_out)
        assert share / 2 <= (n_bytes + 0.5) / sum(sizes)
        assert (n_bytes - 0.5) / sum(sizes) <= share * 2
        # Nothing is lost, and what is cut is cut once.
        assert n_bytes + sum(len(one.data) for one in learnt) == sum(sizes)
        together = {one.name: one.data for one in learnt}
        for one in held_out:
            together[one.name] = together.get(one.name, b"") + one.data
        assert together == {one.name: one.data for one in documents}


def test_training_learns_and_writes_what_the_published_package_reads(texts):
    trained = train(texts, "run", max_epochs=3, batch_size=4, lr=0.02, **TINY)
    assert trained.history["train_bits_per_byte"][0] > 3
    assert trained.bits_per_byte == min(trained.history["validation_bits_per_byte"]) < 2.6
    config = json.loads(Path("run/final/config.json").read_text())
    assert config["training"]["bits_per_byte"] == trained.bits_per_byte
    assert f"{trained.bits_per_byte:.4g}" in Path("run/final/README.md").read_text()
    published = pytest.importorskip("soma_models.v1.torch", reason="soma-models comes with the group test")
    theirs = published.Model.load("run/final/weights.safetensors", published.ModelConfig(**config["model"])).eval()
    # Bits per byte by hand, with their tokenizer and their model.
    from soma_models.v1.tokenizer import tokenize as published_tokenize

    _, held_out = hold_out(read_documents(texts), 0.1, seed=0)
    bits = n_bytes = 0.0
    for one in held_out:
        n_bytes += len(one.data)
        for chunk in published_tokenize(one.data, 16):
            ids, targets = torch.tensor([chunk.token_ids]), torch.tensor(chunk.targets)
            with torch.no_grad():
                logits = theirs(ids, torch.arange(16)[None])[0]
            nats = torch.nn.functional.cross_entropy(logits, targets, ignore_index=256, reduction="sum")
            bits += 8 + float(nats) / np.log(2)
    assert bits / n_bytes == pytest.approx(trained.bits_per_byte, rel=1e-4)


def test_a_training_that_goes_on_is_the_same(texts):
    options = {"max_steps": 12, "batch_size": 4, "dropout_rate": 0.1, "sig_reg": 0.02, "checkpoint_every_n_steps": 5}
    whole = train(texts, "whole", **options, **TINY)
    states = sorted(path.name for path in Path("whole").glob("step=*"))
    assert states[-1] == "step=00000012"
    assert len(states) == 2
    # From the middle of an epoch, in another folder.
    middle = Path("whole") / states[0]
    assert json.loads((middle / "training" / "state.json").read_text())["state"]
    again = train(texts, "again", resume=middle, **options, **TINY)
    assert again.model.save_bytes() == whole.model.save_bytes()
    assert again.history["validation_bits_per_byte"] == whole.history["validation_bits_per_byte"]
    done = train(texts, "whole", resume="auto", **options, **TINY)
    assert done.model.save_bytes() == whole.model.save_bytes()
    with raises(OptionError, "resume"):
        train(texts, "whole", resume="auto", lr=0.1, **options, **TINY)
    with raises(OptionError, "checkpoint_dir"):
        train(texts, "whole", **options, **TINY)
    assert train(texts, "whole", overwrite=True, max_steps=1, **TINY).history


def test_options_of_training_that_cannot_be_are_refused(texts):
    for options, words in [
        ({"num_heads": 3}, "num_heads=3"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "meta"}, "device='meta' cannot be used"),
        ({"device": None}, "device=None cannot be used"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"validation_size": 1.0}, "validation_size=1.0"),
        ({"validation": "0.txt", "validation_size": 0.5}, "validation_size=0.5 has no effect if validation is passed"),
        ({"resume": "auto", "overwrite": True}, "contradict"),
        ({"optimizer": "rmsprop"}, "optimizer='rmsprop'"),
    ]:
        with pytest.raises(OptionError, match=words):
            train(texts, "run", **{**TINY, "max_steps": 1, **options})
    with raises(DataError, "validation"):
        train(texts, "run", validation=texts[3], max_steps=1, **TINY)


@pytest.fixture
def trained(texts):
    return train(texts, "run", max_steps=2, **TINY)


@pytest.fixture
def model(trained) -> Path:
    return trained.path


def test_vectors_are_means_of_states(model, trained):
    data = {"A": b"guards the genome", "B": "x" * 40, "C": "kin\u00e4se"}
    options = {"device": "cpu", "progress_bar": False}
    table = gene_table(data, model, batch_size=2, **options)
    assert table.index.tolist() == ["A", "B", "C"]
    module, seq_len = read_model(model)
    for name, text in data.items():
        content = text if isinstance(text, bytes) else text.encode()
        ids, _, _ = tokenize_arrays(content, seq_len)
        with torch.no_grad():
            states = module.encode(torch.tensor(ids), torch.arange(seq_len)[None])
        expected = states[torch.tensor(ids) < 256].mean(dim=0)
        np.testing.assert_allclose(table.loc[name], expected, atol=1e-5)
    # What a training returns stands for its folder.
    pd.testing.assert_frame_equal(gene_table(data, trained, batch_size=2, **options), table)


@pytest.mark.parametrize("suffix", ["parquet", "npz", "csv"])
def test_tables_of_genes_are_read_by_the_tokenizer(model, suffix):
    write("genes.csv", "gene,text\nENSG2,binds dna\nENSG1,a kinase\n")
    table = embed("genes.csv", model.parent, f"table.{suffix}", device="cpu", progress_bar=False)
    given = pd.read_csv("table.csv", index_col=0) if suffix == "csv" else f"table.{suffix}"
    tokenizer = GeneEmbeddingTokenizer(GeneVocab.from_genes(["ENSG1", "ENSG2"]), table=given)
    np.testing.assert_allclose(tokenizer.gene_vectors()[-2:], table.loc[["ENSG1", "ENSG2"]], rtol=1e-6)
    with pytest.raises(OptionError, match="exists; choose another name, or pass overwrite"):
        embed("genes.csv", model, f"table.{suffix}", progress_bar=False)


def test_names_that_stand_twice(model):
    write("iso.fa", ">P1 GN=A\nMKV\n>P2 GN=B\nMA\n>P3 GN=A\nMKL\n")
    options = {"device": "cpu", "progress_bar": False}
    with raises(DataError, "files"):
        embed("iso.fa", model, field="GN", **options)
    apart = embed("iso.fa", model, **options)
    means = embed("iso.fa", model, field="GN", duplicates="mean", **options)
    assert means.index.tolist() == ["A", "B"]
    np.testing.assert_allclose(means.loc["A"], apart.loc[["P1", "P3"]].mean(), rtol=1e-5)
    with raises(OptionError, "duplicates"):
        embed("iso.fa", model, duplicates="first", **options)


@pytest.mark.parametrize(
    ("genes", "options", "error", "argument"),
    [
        ({}, {}, DataError, "genes"),
        (["A"], {}, DataError, "genes"),
        ({"A": ""}, {}, DataError, "genes"),
        ({"A": 3}, {}, DataError, "genes"),
        ({"A": "x"}, {"model": "."}, MissingFileError, "model"),
        ({"A": "x"}, {"model": 3}, OptionError, "model"),
        ({"A": "x"}, {"output": "table.txt"}, OptionError, "output"),
    ],
)
def test_embedding_what_cannot_be_is_refused(model, genes, options, error, argument):
    with raises(error, argument):
        gene_table(genes, **{"model": model, **options})


@pytest.mark.parametrize("name", ["config.json", "weights.safetensors"])
def test_a_flipped_bit_is_refused(model, name):
    data = (model / name).read_bytes()
    for place in range(0, len(data), len(data) // 20):
        (model / name).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ModelFileError):
            read_model(model)


@pytest.mark.parametrize(("change", "words"), [({"embedding_dim": 32}, "corrupted"), ({"num_heads": 3}, "num_heads=3")])
def test_damaged_models_are_refused(model, change, words):
    config = json.loads((model / "config.json").read_text())
    config["model"].update(change)
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=words):
        read_model(model)


def test_models_of_a_later_version_or_without_a_file_are_refused(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"format": 9}))
    with pytest.raises(ModelFileError):
        read_model(model)
    (model / "config.json").write_text(json.dumps(config))
    (model / "weights.safetensors").unlink()
    with raises(MissingFileError, "model"):
        read_model(model)


def test_the_commands(texts, capsys):
    sizes = ["--embedding-dim=16", "--num-layers=1", "--num-heads=2", "--seq-len=16", "--device=cpu"]
    assert main(["soma", "train", *texts, "-o", "run", "--epochs", "2", "--batch-size", "4", *sizes]) == 0
    out = capsys.readouterr().out
    assert re.search(r"Wrote run/final: \d\.\d{3} bits per byte on held-out bytes", out)
    assert main(["soma", "embed", *texts, "-m", "run", "-o", "t.parquet", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "Wrote t.parquet: 8 vectors of 16 numbers\n"
    assert pd.read_parquet("t.parquet").index.tolist() == [str(i) for i in range(8)]
    assert main(["soma", "train", "gone.txt", "-o", "run", "--resume", "auto"]) == 2
    assert "gone.txt" in capsys.readouterr().err
