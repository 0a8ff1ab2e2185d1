"""The code of the tutorial on custom models: whole files run as they are written, fragments with what they stand in."""

import dataclasses
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import scforge
from scforge.models import CellModule, ModelOutput, get_model
from scforge.models.registry import MODELS
from scforge.testing import check_model

EXAMPLES = Path(__file__).with_name("examples_custom_model")


def run_fragment(name: str, **names) -> dict:
    text = (EXAMPLES / f"{name}.txt").read_text(encoding="utf-8")
    names |= {"torch": torch, "nn": nn}
    exec(text.replace("hidden = #", "hidden = None  #"), names)
    return names


def test_model_output_has_the_fields_of_the_tutorial():
    theirs = run_fragment("model_output", dataclass=dataclasses.dataclass)["ModelOutput"]
    ours = dataclasses.fields(ModelOutput)
    assert ModelOutput.__dataclass_params__.frozen
    for one, two in zip(dataclasses.fields(theirs), ours, strict=False):
        assert (one.name, one.default) == (two.name, two.default)
    assert len(ours) >= len(dataclasses.fields(theirs))


def test_the_model_in_one_file(monkeypatch, tiny_config):
    with pytest.raises(ValueError, match="architecture 'gene_pooling' is already registered"):
        runpy.run_path(str(EXAMPLES / "gene_pooling.py"))
    # Until the package's architecture of this name makes room.
    MODELS.get("gene_pooling")
    monkeypatch.delitem(MODELS._builtin, "gene_pooling")
    monkeypatch.delitem(MODELS._entries, "gene_pooling")
    cls = runpy.run_path(str(EXAMPLES / "gene_pooling.py"))["GenePoolingModel"]
    model = get_model("gene_pooling", tiny_config)
    assert isinstance(model, cls)
    assert isinstance(model, CellModule)
    check_model("gene_pooling", hidden_dim=8, num_layers=1)


def test_the_modules_of_all_architectures():
    names = runpy.run_path(str(EXAMPLES / "models_init.py"))
    for name in names["__all__"]:
        assert names[name] is getattr(scforge.models, name)


def test_two_heads():
    self = SimpleNamespace(
        embedding=nn.Embedding(20, 8), vocab_size=20, n_bins=5, gene_loss_weight=1.0, bin_loss_weight=0.5
    )
    ids, bins = torch.randint(0, 20, (2, 4)), torch.randint(0, 5, (2, 4))
    names = run_fragment(
        "multi_head", self=self, hidden_dim=8, vocab_size=20, n_bins=5, embeddings=None, ModelOutput=ModelOutput
    )
    output = names["forward"](self, ids, torch.ones(2, 4), labels=ids, bin_labels=bins)
    assert output.logits.shape == (2, 4, 20)
    losses = [
        nn.functional.cross_entropy(head(self.embedding(ids)).flatten(0, 1), labels.flatten())
        for head, labels in ((self.gene_head, ids), (self.bin_head, bins))
    ]
    torch.testing.assert_close(output.loss, losses[0] + 0.5 * losses[1])
    assert names["forward"](self, ids, torch.ones(2, 4)).loss is None


def test_masks_and_a_head_of_values():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    self = SimpleNamespace(encoder=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    tokens = {"emb": torch.randn(2, 6, 8), "seq_len": 6, "input_ids": torch.zeros(2, 6)}
    window = run_fragment("attention_masks", self=self, **tokens)["generate_window_mask"](6, 1, None)
    assert (window == 0).sum(dim=1).tolist() == [2, 3, 3, 3, 3, 2]
    given = {"hidden_dim": 8, "embeddings": None, "ModelOutput": ModelOutput}
    assert "forward" in run_fragment("expression_prediction", self=self, **given)
    assert self.expr_head(torch.randn(2, 4, 8)).shape == (2, 4)
