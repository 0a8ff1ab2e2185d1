"""scGPT: the forward pass as published, written here, with random weights; ours computes the same.

``TransformerModel`` of scGPT 0.2 embeds a gene (embedding, layer norm) and its value (cut off at 512, linear, ReLU,
linear, layer norm), adds the two, and runs post-norm transformer layers with ReLU over all tokens but padding. A cell
is the state of <cls>, whose value is that of padding.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch
from torch import nn

from scforge.cli import main
from scforge.errors import DataError, MissingFileError, ModelFileError
from scforge.estimators import Encoder
from scforge.testing import raises

ARGS = {
    **{"embsize": 16, "nlayers": 2, "nheads": 2, "d_hid": 24, "dropout": 0.2, "n_bins": 51, "max_seq_len": 60},
    **{"pad_token": "<pad>", "pad_value": -2, "mask_value": -1, "mask_ratio": [0.25, 0.5, 0.75]},
    **{"input_emb_style": "continuous", "MVC": True},
}


class TransformerModel(nn.Module):
    def __init__(self, n_tokens: int, padding: int, args: dict[str, Any]) -> None:
        super().__init__()
        self.padding, width = padding, args["embsize"]

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(width)

        def square(**options: bool) -> nn.Linear:
            return nn.Linear(width, width, **options)

        embedding = nn.Embedding(n_tokens, width, padding_idx=padding)
        self.encoder = nn.ModuleDict({"embedding": embedding, "enc_norm": norm()})
        self.value_encoder = nn.ModuleDict({"linear1": nn.Linear(1, width), "linear2": square(), "norm": norm()})
        layer = nn.TransformerEncoderLayer(width, args["nheads"], args["d_hid"], args["dropout"], batch_first=True)
        self.transformer_encoder = nn.TransformerEncoder(layer, args["nlayers"], enable_nested_tensor=False)
        fc = nn.Sequential(square(), nn.LeakyReLU(), square(), nn.LeakyReLU(), nn.Linear(width, 1))
        self.decoder = nn.ModuleDict({"fc": fc})
        self.mvc_decoder = nn.ModuleDict({"gene2query": square(), "W": square(bias=False)})

    def states(self, tokens: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """States after each layer; the layers one by one, which is what ``nn.TransformerEncoder`` does."""
        genes, value = self.encoder, self.value_encoder
        hidden = torch.relu(value.linear1(values[..., None].clamp(max=512)))
        state = genes.enc_norm(genes.embedding(tokens)) + value.norm(value.linear2(hidden))
        states = []
        for layer in self.transformer_encoder.layers:
            state = layer(state, src_key_padding_mask=tokens == self.padding)
            states.append(state)
        return states


def flash_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("in_proj_", "Wqkv."): weight for name, weight in weights.items()}


@pytest.fixture
def write(tmp_path: Path, shake) -> Callable[..., TransformerModel]:
    def write(
        tokens: dict[str, int], *, change: Callable[[dict], dict] = dict, args: dict[str, Any] | None = None
    ) -> TransformerModel:
        args = ARGS if args is None else args
        model = shake(TransformerModel(len(tokens), tokens["<pad>"], args))
        folder = tmp_path / "scgpt"
        folder.mkdir()
        torch.save(change(model.state_dict()), folder / "best_model.pt")
        (folder / "vocab.json").write_text(json.dumps(tokens))
        (folder / "args.json").write_text(json.dumps(args))
        return model

    return write


@pytest.fixture
def tokens() -> dict[str, int]:
    """Genes in no order, special tokens behind them, as published."""
    genes = [f"gene{i}" for i in np.random.default_rng(0).permutation(85)]
    return {name: number for number, name in enumerate([*genes, "<pad>", "<cls>", "<eoc>"])}


def compare(theirs: TransformerModel, model: Encoder, tokens: dict[str, int], batch: dict[str, torch.Tensor]) -> None:
    mask = batch["attention_mask"]
    there = torch.tensor([tokens.get(name, -1) for name in model.vocab.tokens])
    ids = there[batch["input_ids"]]
    assert (ids[mask] >= 0).all()
    values = batch["values"].clone()
    values[batch["input_ids"] == model.vocab.cls_id] = ARGS["pad_value"]
    values[~mask] = ARGS["pad_value"]
    with torch.no_grad():
        expected = theirs.states(ids, values)
        predicted = theirs.decoder.fc(expected[-1]).squeeze(-1)
        ours = model.module(**batch, output_hidden_states=True)
        encoded = model.module.encode(**batch)
    for one, two in [*zip(ours.hidden_states, expected, strict=True), (ours.expression, predicted)]:
        torch.testing.assert_close(one[mask], two[mask], atol=1e-5, rtol=0)
    torch.testing.assert_close(encoded, expected[-1][:, 0], atol=1e-5, rtol=0)


def batch_of(model: Encoder, adata: ad.AnnData, n_cells: int) -> dict[str, torch.Tensor]:
    return dict(model.tokenizer(model.open_cells(adata).block(np.arange(n_cells))))


@pytest.mark.parametrize("names", [dict, flash_names], ids=["torch", "flash"])
def test_the_published_forward(names, write, tokens, tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    theirs = write(tokens, change=names)
    model = Encoder.from_checkpoint(tmp_path / "scgpt", family="scgpt")
    batch = batch_of(model, tiny_adata, 20)
    assert not batch["attention_mask"].all()
    assert batch["bin_ids"].max() == 50
    compare(theirs, model, tokens, batch)
    assert (model.is_trained_, model.spec.objective) == (True, "masked_value_prediction")
    np.testing.assert_allclose(
        model.get_latent_representation(tiny_adata)[:20], model.module.encode(**batch).detach().numpy(), atol=1e-6
    )


def test_embeddings_of_length_one(write, tokens, tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    write(tokens)
    plain = Encoder.from_checkpoint(tmp_path / "scgpt", family="scgpt").get_latent_representation(tiny_adata)
    model = Encoder.from_checkpoint(tmp_path / "scgpt", family="scgpt", normalize=True)
    expected = plain / np.linalg.norm(plain, axis=1, keepdims=True)  # as embed_data does
    np.testing.assert_allclose(model.get_latent_representation(tiny_adata), expected, atol=1e-6)
    model.save(tmp_path / "saved")
    again = Encoder.load(tmp_path / "saved").get_latent_representation(tiny_adata)
    np.testing.assert_allclose(again, expected, atol=1e-6)


def test_hidden_values_are_those_of_scgpt(write, tokens, tiny_adata: ad.AnnData, tmp_path: Path) -> None:
    theirs = write(tokens)
    model = Encoder.from_checkpoint(tmp_path / "scgpt", family="scgpt", cls_value=0.0)
    block = model.open_cells(tiny_adata).block(np.arange(8))
    batch = model.objective.prepare(block, model.tokenizer, epoch=0, seed=0)
    there = torch.tensor([tokens.get(name, -1) for name in model.vocab.tokens])
    values = batch["values"].masked_fill(batch["masked_positions"], -1.0)
    assert (values == -1).any()
    hidden = batch["masked_positions"]
    with torch.no_grad():
        states = theirs.states(there[batch["input_ids"]], values)
        predicted = theirs.decoder.fc(states[-1]).squeeze(-1)[hidden]
        output = model.module(**batch)
    torch.testing.assert_close(output.expression[hidden], predicted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.loss, (predicted - batch["value_labels"][hidden]).square().mean())
    assert output.logits is None


def test_an_ordinary_model(write, tokens, tiny_adata: ad.AnnData, tmp_path: Path, capsys) -> None:
    write(tokens)
    Encoder.setup_anndata(tiny_adata, labels_key="group")
    model = Encoder.from_checkpoint(tmp_path / "scgpt", family="scgpt", adata=tiny_adata)
    before = model.get_latent_representation()
    assert main(["convert-checkpoint", str(tmp_path / "scgpt"), "-o", str(tmp_path / "model")]) == 0
    again = Encoder.load(tmp_path / "model", tiny_adata)
    np.testing.assert_array_equal(again.get_latent_representation(), before)
    quick = {"max_epochs": 1, "batch_size": 16, "progress_bar": False, "accelerator": "cpu"}
    annotator = model.finetune("annotation", lora=True, **quick)
    assert len(annotator.predict(tiny_adata)) == tiny_adata.n_obs
    again.train(**quick)
    assert np.abs(again.get_latent_representation() - before).max() > 1e-4


def test_what_is_given_counts_more_than_what_lies_there(write, tokens, tmp_path: Path) -> None:
    write(tokens)
    folder = tmp_path / "scgpt"
    for name in ("vocab", "args"):
        (folder / f"{name}.json").rename(tmp_path / f"{name}.json")
    with raises(MissingFileError, "args"):
        Encoder.from_checkpoint(folder, family="scgpt")
    given = {"vocab": tokens, "args": tmp_path / "args.json"}
    one = Encoder.from_checkpoint(folder / "best_model.pt", family="scgpt", **given)
    two = Encoder.from_checkpoint(folder, family="scgpt", **given)
    assert one.spec.to_json() == two.spec.to_json()
    assert one.vocab == two.vocab


def with_weight(name: str, *shape: int) -> Callable[[dict], dict]:
    return lambda weights: weights | {name: torch.ones(shape)}


def lacking(name: str) -> Callable[[dict], dict]:
    return lambda weights: {key: value for key, value in weights.items() if name not in key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_weight("bn.weight", 16), "weights that a scGPT model with this config does not have: 'bn.weight'"),
        (
            with_weight("transformer_encoder.layers.0.self_attn.Wqkv.bias", 48),
            "a scGPT model with this config does not have: .*qkv.bias",
        ),
        (lacking("decoder.fc.4.bias"), "lacks the weights 'decoder.fc.4.bias', which would be randomly initialized"),
        (
            with_weight("encoder.embedding.weight", 80, 16),
            "vocabulary has 88 tokens, but the embedding table has 80",
        ),
        (lambda weights: {"epoch": 3, **weights}, "contains entries that are not tensors .'epoch'."),
        (lambda weights: list(weights), "must map names to weights"),
    ],
)
def test_weights_that_do_not_fit(change, message: str, write, tokens, tmp_path: Path) -> None:
    write(tokens, change=change)
    with pytest.raises(ModelFileError, match=message):
        Encoder.from_checkpoint(tmp_path / "scgpt", family="scgpt")


@pytest.mark.parametrize(
    "change",
    [
        with_weight("flag_encoder.weight", 2, 16),
        with_weight("cls_decoder.out_layer.bias", 3),
        lambda weights: {"model_state_dict": {f"module.{name}": weight for name, weight in weights.items()}},
    ],
)
def test_weights_that_are_left_out_or_wrapped(change, write, tokens, tmp_path: Path) -> None:
    theirs = write(tokens, change=change)
    module = Encoder.from_checkpoint(tmp_path / "scgpt", family="scgpt").module
    assert torch.equal(module.expression_head.decoder.bias, theirs.decoder.fc[4].bias)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"input_emb_style": "category"}, "input_emb_style: Input should be 'continuous', got 'category'"),
        ({"mask_value": "auto"}, "mask_value: Input should be a valid number, got 'auto'"),
        ({"max_seq_len": "x"}, "max_seq_len: Input should be a valid integer, got 'x'"),
        ({"embsize": 2**20}, r"has shape \(.*16\), but its config and vocabulary require"),
    ],
)
def test_args_that_cannot_be_used(args: dict, message: str, write, tokens, tmp_path) -> None:
    write(tokens)
    with pytest.raises(ModelFileError, match=message):
        Encoder.from_checkpoint(tmp_path / "scgpt", family="scgpt", args=ARGS | args)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"args": {"nheads": 2}},
            ModelFileError,
            "args contains options that scforge does not support .embsize: Field required",
        ),
        ({"vocab": {"a": 0, "<pad>": 2}}, DataError, "the indices of vocab must be consecutive integers from 0"),
        ({"vocab": {"a": 0, "<pad>": 1}}, DataError, "vocab lacks the special tokens '<cls>'"),
        ({"vocab": {}}, DataError, "the indices of vocab must be consecutive integers from 0"),
        ({"vocab": {"a": [0]}}, DataError, "the indices of vocab must be consecutive integers from 0"),
        ({"vocab": {"a": "0"}}, DataError, "the indices of vocab must be consecutive integers from 0"),
        ({"vocab": "nowhere.json"}, MissingFileError, "vocab='nowhere.json' does not exist"),
    ],
)
def test_arguments_that_cannot_be_used(options: dict, error: type, message: str, write, tokens, tmp_path) -> None:
    write(tokens)
    with pytest.raises(error, match=message):
        Encoder.from_checkpoint(tmp_path / "scgpt", family="scgpt", **options)
