"""Geneformer: ``BertForMaskedLM`` of transformers with random weights, here and back, computes the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from scforge.cli import main
from scforge.errors import DataError, MissingFileError, ModelFileError, OptionError, ScforgeError
from scforge.estimators import Encoder
from scforge.testing import raises


def batch_of(model: Encoder, adata: ad.AnnData, n_cells: int) -> dict[str, torch.Tensor]:
    block = model.open_cells(adata).block(np.arange(n_cells))
    batch = dict(model.tokenizer(block))
    assert not batch["attention_mask"].all(), "the test is about padding, too"
    return batch


def compare(bert: Any, model: Encoder, batch: dict[str, torch.Tensor], version: str | None = None) -> None:
    """Geneformer's ``EmbExtractor`` takes the layer below the last: in V1 the mean of tokens, in V2 that of CLS."""
    mask = batch["attention_mask"]
    with torch.no_grad():
        theirs = bert(batch["input_ids"], attention_mask=mask.long(), output_hidden_states=True)
        ours = model.module(**batch, output_hidden_states=True)
        encoded = model.module.encode(**batch)
    pairs = [*zip(ours.hidden_states, theirs.hidden_states[1:], strict=True), (ours.logits, theirs.logits)]
    weights = mask[:, :, None].float()
    states = theirs.hidden_states[-1 if version is None else -2]
    expected = states[:, 0] if version == "V2" else (states * weights).sum(dim=1) / weights.sum(dim=1)
    for one, two in pairs:
        torch.testing.assert_close(one[mask], two[mask], atol=1e-5, rtol=0)
    for one in (encoded, ours.embeddings):
        torch.testing.assert_close(one, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("version", "file", "options"),
    [
        ("V1", "safetensors", {}),
        ("V2", "bin", {"hidden_act": "gelu", "tie_word_embeddings": False}),
        ("V2", "safetensors", {"hidden_act": "silu", "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    ],
)
def test_generated_dictionaries(version, options, file, write_bert, dictionaries, ensembl_adata, tmp_path) -> None:
    known = dictionaries(version)
    bert = write_bert(known, vocab_size=len(known[0]), file=file, **options)
    model = Encoder.from_checkpoint(tmp_path / "bert", family="geneformer", version=version)
    compare(bert, model, batch_of(model, ensembl_adata, 20), version)
    assert model.is_trained_
    assert model.vocab.medians.tolist() == list(known[1].values())


def test_other_embeddings(write_bert, dictionaries, ensembl_adata, tmp_path) -> None:
    """As Geneformer's ``emb_mode="cell"`` with V2: over genes without CLS and EOS; and from the last layer."""
    known = dictionaries("V2")
    bert = write_bert(known, vocab_size=len(known[0]))
    model = Encoder.from_checkpoint(tmp_path / "bert", family="geneformer", version="V2", pooling="genes")
    batch = batch_of(model, ensembl_adata, 20)
    genes = batch["attention_mask"] & (batch["input_ids"] > 3)
    assert ((~genes & batch["attention_mask"]).sum(dim=1) == 2).all()
    with torch.no_grad():
        output = bert(batch["input_ids"], attention_mask=batch["attention_mask"].long(), output_hidden_states=True)
        states = output.hidden_states[-2]
    mean = torch.stack([state[gene].mean(dim=0) for state, gene in zip(states, genes, strict=True)])
    np.testing.assert_allclose(model.get_latent_representation(ensembl_adata)[:20], mean.numpy(), atol=1e-5)
    last = Encoder.from_checkpoint(
        tmp_path / "bert", family="geneformer", version="V2", pooling="mean", embedding_layer=0
    )
    compare(bert, last, batch)


def test_version_by_positions_and_tokens(write_bert, dictionaries, ensembl_adata, tmp_path) -> None:
    v1, v2 = (dictionaries(version) for version in ("V1", "V2"))
    more = {f"ENSG9{i:010d}": number for i, number in enumerate(range(len(v2[0]), 20_275))}
    medians = v2[1] | dict.fromkeys(more, 1.0)
    for known, options, version in (
        (v1, {}, "V1"),
        (v2, {"max_position_embeddings": 4096}, "V2"),
        ((v2[0] | more, medians), {}, "V2"),  # as a copy with fewer positions
    ):
        write_bert(known, vocab_size=len(known[0]), num_hidden_layers=1, **options)
        model = Encoder.from_checkpoint(tmp_path / "bert", family="geneformer")
        found = model.spec.model_options["pooling"], model.spec.model_options["embedding_layer"]
        assert found == ("cls" if version == "V2" else "genes", 0)  # of one layer


@pytest.mark.parametrize("tied", [True, False])
def test_there_and_back_bit_for_bit(tied: bool, write_bert, dictionaries, tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    known = dictionaries("V2")
    bert = write_bert(known, vocab_size=len(known[0]), tie_word_embeddings=tied)
    model = Encoder.from_checkpoint(tmp_path / "bert", family="geneformer", version="V2")
    model.export(tmp_path / "back", "transformers")
    back = BertForMaskedLM.from_pretrained(tmp_path / "back").eval()
    theirs, ours = bert.state_dict(), back.state_dict()
    assert list(ours) == list(theirs)
    embeddings = "bert.embeddings.{}_embeddings.weight"
    positions, types = embeddings.format("position"), embeddings.format("token_type")
    # The one token type that cells have is part of the positions.
    theirs[positions] = theirs[positions] + theirs[types][:1]
    theirs[types] = torch.zeros_like(theirs[types])
    if not tied:  # unused there
        theirs["cls.predictions.bias"] = theirs["cls.predictions.decoder.bias"]
    for name, weight in theirs.items():
        assert torch.equal(weight, ours[name]), name
    again = Encoder.from_checkpoint(tmp_path / "back", family="geneformer", version="V2")
    assert again.vocab == model.vocab
    assert again.spec.to_json() == model.spec.to_json()
    for name, weight in model.module.state_dict().items():
        assert torch.equal(weight, again.module.state_dict()[name]), name


BERT = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "norm_first": False, "max_seq_len": 64}
BERT["use_expression_values"] = False


def test_a_model_trained_here_loads_there(tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    Encoder.setup_anndata(tiny_adata)
    model = Encoder(tiny_adata, "transformer_encoder", pooling="mean", **BERT)
    model.train(max_epochs=1, batch_size=16, progress_bar=False, accelerator="cpu")
    model.export(tmp_path / "bert", "transformers")
    bert, info = BertForMaskedLM.from_pretrained(tmp_path / "bert", output_loading_info=True)
    assert not any(info.values())
    compare(bert.eval(), model, batch_of(model, tiny_adata, 20))
    with pytest.raises(OptionError, match="exists and is not empty"):
        model.export(tmp_path / "bert", "transformers")
    (tmp_path / "bert" / "notes.txt").write_text("mine")
    model.export(tmp_path / "bert", "transformers", overwrite=True)
    assert (tmp_path / "bert" / "notes.txt").read_text() == "mine"
    with raises(DataError, "tokens_medians"):
        Encoder.from_checkpoint(tmp_path / "bert", family="geneformer")


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        (BERT | {"norm_first": True}, "norm_first"),
        (BERT | {"position_embedding": "rotary"}, "position_embedding"),
        (
            BERT | {"activation": "relu"},
            "head_activation",
        ),
        ({}, "architecture"),
    ],
)
def test_what_bert_has_not_is_refused(options: dict, argument: str, tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    Encoder.setup_anndata(tiny_adata)
    model = Encoder(tiny_adata, "transformer_encoder" if options else "gene_pooling", **options)
    with raises(OptionError, argument):
        model.export(tmp_path / "bert", "transformers")
    assert not (tmp_path / "bert").exists()


@pytest.fixture
def bert_folder(write_bert, dictionaries, tmp_path: Path) -> Path:
    known = dictionaries("V1")
    write_bert(known, vocab_size=len(known[0]))
    return tmp_path / "bert"


def test_an_ordinary_model(bert_folder: Path, ensembl_adata: ad.AnnData, tmp_path: Path, capsys) -> None:
    Encoder.setup_anndata(ensembl_adata, labels_key="group")
    model = Encoder.from_checkpoint(bert_folder, family="geneformer", adata=ensembl_adata, pooling="genes")
    before = model.get_latent_representation()
    argv = ["convert-checkpoint", str(bert_folder), "-o", str(tmp_path / "model")]
    assert main([*argv, "--pooling", "genes"]) == 0
    again = Encoder.load(tmp_path / "model", ensembl_adata)
    np.testing.assert_array_equal(again.get_latent_representation(), before)
    quick = {"max_epochs": 1, "batch_size": 16, "progress_bar": False, "accelerator": "cpu"}
    again.train(**quick)
    assert np.abs(again.get_latent_representation() - before).max() > 1e-4
    assert main([*argv[:-1], str(tmp_path / "x"), "--vocab", "genes.json"]) == 2
    assert "option 'vocab' is unknown to 'geneformer'" in capsys.readouterr().err


def test_genes_by_other_names(bert_folder: Path, ensembl_adata: ad.AnnData) -> None:
    expected = Encoder.from_checkpoint(bert_folder, family="geneformer").get_latent_representation(ensembl_adata.copy())
    symbols = {f"gene{i}": f"ENSG{i:011d}" for i in range(80)} | {"unknown": "ENSG99999999999", "none": None}
    table = bert_folder / "symbols.parquet"
    pd.DataFrame(symbols.items(), columns=["symbol", "gene_id"]).to_parquet(table)
    model = Encoder.from_checkpoint(
        bert_folder, family="geneformer", gene_names=table, ensembl_map={"ENSG00000099999": "ENSG00000000000"}
    )
    ensembl_adata.var_names = ["ENSG00000099999", *[f"gene{i}" for i in range(1, 80)]]
    np.testing.assert_array_equal(model.get_latent_representation(ensembl_adata), expected)


def test_a_bert_without_its_head(bert_folder: Path, ensembl_adata: ad.AnnData, tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    expected = Encoder.from_checkpoint(bert_folder, family="geneformer").get_latent_representation(ensembl_adata)
    bert = BertForSequenceClassification.from_pretrained(bert_folder)
    for path in bert_folder.glob("*.safetensors"):
        path.unlink()
    bert.save_pretrained(bert_folder)
    model = Encoder.from_checkpoint(bert_folder, family="geneformer")
    assert not any(name.startswith("head.") for name in model.module.state_dict())
    np.testing.assert_allclose(model.get_latent_representation(ensembl_adata), expected, atol=1e-6)
    model.save(tmp_path / "saved")
    again = Encoder.load(tmp_path / "saved")
    np.testing.assert_allclose(again.get_latent_representation(ensembl_adata), expected, atol=1e-6)


def test_weights_in_several_files_and_of_half_precision(bert_folder: Path, ensembl_adata: ad.AnnData) -> None:
    weights = {name: weight.half().float() for name, weight in load_file(bert_folder / "model.safetensors").items()}
    save_file({name: weight.half() for name, weight in weights.items()}, bert_folder / "model.safetensors")
    expected = Encoder.from_checkpoint(bert_folder, family="geneformer").get_latent_representation(ensembl_adata)
    (bert_folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(files.values()):
        save_file({name: weights[name] for name, place in files.items() if place == file}, bert_folder / file)
    index = bert_folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    found = Encoder.from_checkpoint(bert_folder, family="geneformer").get_latent_representation(ensembl_adata)
    np.testing.assert_array_equal(found, expected)
    index.write_text(json.dumps({"weight_map": {"a": "model-00003-of-00003.safetensors"}}))
    with pytest.raises(MissingFileError):
        Encoder.from_checkpoint(bert_folder, family="geneformer")


def without(name: str) -> Callable[[dict], dict]:
    return lambda weights: {key: value for key, value in weights.items() if name not in key}


def with_bias(bias: torch.Tensor, name: str = "cls.predictions.bias") -> Callable[[dict], dict]:
    return lambda weights: weights | {name: bias}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without("query.bias"),
            "cannot be converted to 'encoder.layers.0.attention.qkv.bias' .*key.bias.*: .*query.bias",
        ),
        (without("cls."), "lacks the weights 'cls.predictions.*, which would be randomly initialized"),
        (
            with_bias(torch.ones(16), "bert.encoder.layer.2.output.dense.bias"),
            "a Geneformer model with this config does not have: .*layer.2",
        ),
        (with_bias(torch.ones(3)), r"has shape \(3,\), but its config and .* \(92,\)"),
        (with_bias(torch.full((92,), torch.nan)), "NaN or infinite values in 'head.bias'"),
        (with_bias(torch.ones(92, dtype=torch.int64)), "weights of dtype torch.int64 are not supported"),
        (
            with_bias(torch.ones(92, 16), "cls.predictions.decoder.weight"),
            "has different values for .* set both to the same value",
        ),
    ],
)
def test_weights_that_do_not_fit(change, message: str, bert_folder: Path) -> None:
    save_file(change(load_file(bert_folder / "model.safetensors")), bert_folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=message):
        Encoder.from_checkpoint(bert_folder, family="geneformer")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            "is not the configuration of a supported BERT model .*model_type: Input should be 'bert', got 'gpt2'",
        ),
        ({"hidden_act": "tanh"}, "hidden_act: Input should be 'relu', 'gelu', 'silu' or 'swish', got 'tanh'"),
        ({"is_decoder": True}, "is_decoder: Input should be False, got True"),
        ({"hidden_size": "16"}, "hidden_size: Input should be a valid integer, got '16'"),
        ({"vocab_size": 93}, "vocab_size=93, but tokens_medians has 92 tokens; pass the files of this"),
        ({"hidden_size": 2**20}, r"has shape \(92, 16\), but its config and .* \(92, 1048576\)"),
        ({"max_position_embeddings": 4096}, "Geneformer V2 has the special tokens"),
    ],
)
def test_configurations_that_do_not_fit(changes: dict, message: str, bert_folder: Path) -> None:
    config = json.loads((bert_folder / "config.json").read_text()) | changes
    (bert_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ScforgeError, match=message):
        Encoder.from_checkpoint(bert_folder, family="geneformer")


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("nowhere", {}, MissingFileError, "the checkpoint '.*nowhere' does not exist"),
        ("bert/config.json", {}, MissingFileError, "is not a folder; pass the folder with config.json"),
        ("bert", {"version": "V3"}, OptionError, "version='V3' is not known .known: 'V1', 'V2'"),
        ("bert", {"pooling": "middle"}, OptionError, "pooling='middle' is not known"),
        ("bert", {"pooling": "cls"}, OptionError, "pooling='cls' needs a CLS token"),
        ("bert", {"embedding_layer": 2}, OptionError, "embedding_layer=2, but there are only 2 layers"),
        (
            "bert",
            {"tokens_medians": "."},
            MissingFileError,
            "must contain exactly one token_dictionary.* as tokens_medians",
        ),
        ("bert", {"gene_names": "names.parquet"}, MissingFileError, "gene_names='names.parquet' does not exist"),
        ("empty", {}, MissingFileError, "contains no weights; add one of 'model.safetensors', .*'pytorch_model.bin'"),
    ],
)
def test_arguments_that_cannot_be_used(name, options, error, message, bert_folder: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "empty":
        bert_folder.rename("empty")
        Path("empty/model.safetensors").unlink()
    with pytest.raises(error, match=message) as caught:
        Encoder.from_checkpoint(tmp_path / name, family="geneformer", **options)
    assert "\n" not in str(caught.value)
