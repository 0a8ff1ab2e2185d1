"""The check for models finds what is wrong: each model below breaks one rule, and is told which."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scforge.errors import OptionError
from scforge.models import GenePoolingModel, ModelOutput, TransformerEncoder
from scforge.models.registry import MODELS
from scforge.testing import check_model


class Small(nn.Module):
    """The mean of projected genes and values, and a linear head. Correct."""

    uses_order = False

    def __init__(self, vocab_size, hidden_dim=8, width=None):
        super().__init__()
        width = hidden_dim if width is None else width
        self.vocab_size = vocab_size
        self.genes = nn.Embedding(vocab_size, hidden_dim)
        self.value = nn.Linear(1, hidden_dim)
        self.project = nn.Linear(hidden_dim, width)
        self.head = nn.Linear(width, vocab_size)

    @classmethod
    def from_config(cls, config):
        return cls(config.vocab_size, config.hidden_dim)

    def states(self, input_ids, values):
        return torch.tanh(self.project(self.genes(input_ids) + self.value(values[..., None])))

    def pool(self, hidden, attention_mask):
        weights = (attention_mask != 0).float()[..., None]
        return (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)

    def loss(self, logits, labels):
        chosen = labels != -100
        return F.cross_entropy(logits[chosen], labels[chosen], reduction="sum") / chosen.sum().clamp(min=1)

    def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
        hidden = self.states(input_ids, values)
        logits = self.head(hidden)
        loss = None if labels is None else self.loss(logits, labels)
        return ModelOutput(loss=loss, logits=logits, embeddings=self.encode(input_ids, attention_mask, values))

    def encode(self, input_ids, attention_mask, values=None, **kwargs):
        return self.pool(self.states(input_ids, values), attention_mask)


@pytest.mark.slow
def test_a_correct_one_passes():
    check_model(Small)
    check_model(Small(vocab_size=50, hidden_dim=4))


def output_with(change):
    """The method forward with another output: `change` gets the output and returns the parts that it changes."""

    def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
        output = Small.forward(self, input_ids, attention_mask, values, labels, **kwargs)
        return replace(output, **change(output))

    return forward


def part_of(add):
    """The constructor with a further part."""

    def __init__(self, vocab_size, hidden_dim=8):
        Small.__init__(self, vocab_size, hidden_dim)
        add(self)

    return __init__


def another_loss(self, input_ids, attention_mask, values=None, labels=None, return_logits=True, **kwargs):
    output = Small.forward(self, input_ids, attention_mask, values, labels)
    return output if return_logits else ModelOutput(loss=output.loss / 2)


def changes_the_batch(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
    return Small.forward(self, input_ids, attention_mask, values.log1p_(), labels)


def leaks_labels(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
    seen = input_ids if labels is None else input_ids.where(labels == -100, labels)
    output = Small.forward(self, seen, attention_mask, values, labels)
    return replace(output, embeddings=self.encode(input_ids, attention_mask, values))


def leaks_values(part):
    def forward(self, input_ids, attention_mask, values=None, labels=None, value_labels=None, **kwargs):
        output = Small.forward(self, input_ids, attention_mask, values, labels)
        seen = values if value_labels is None else values + value_labels
        return replace(output, **{part: self.encode(input_ids, attention_mask, seen) if part == "embeddings" else seen})

    return forward


def sums_values(self, input_ids, attention_mask, values=None, **kwargs):
    return Small.encode(self, input_ids, attention_mask, values) + values.sum(dim=1, keepdim=True)


def projected(self, hidden):
    """Project without calling the layer, so that no LoRA adapter takes part."""
    return torch.tanh(F.linear(hidden, self.project.weight, self.project.bias))


def hidden_state(self, ids, values):
    return states(self, ids, values) + vars(self).setdefault("table", torch.randn(self.vocab_size, 16))[ids]


def depends_on_numbers(self, hidden, mask):
    return pool(self, hidden, mask) * (2.0 if float(hidden.detach()[0, 0, 0]) > 0 else 1.0) ** 0


def any_token(mask):
    return (mask != 0).any(dim=1, keepdim=True)


states, pool, loss = Small.states, Small.pool, Small.loss
OTHER_ORDER = "uses_order is False, but the order of the genes changes the embeddings"
# What each method does otherwise, and how it is told.
BROKEN = {
    "from_config": {"it has no method 'from_config' that": None},
    "encode": {
        r"encode does not accept \*\*kwargs, but .*additional keys": (
            lambda self, input_ids, attention_mask, values=None: None
        ),
        "cells with different genes have the same embedding": (
            lambda self, input_ids, attention_mask, values=None, **kwargs: self.genes(input_ids[:, 0])
        ),
        "'values' at padding positions change the embeddings": sums_values,
    },
    "forward": {
        "forward returns Tensor, not ModelOutput": (
            lambda self, input_ids, attention_mask, values=None, labels=None, **kwargs: values
        ),
        "return_logits=False changes the loss": another_loss,
        r"forward modifies its input batch \('values'\)": changes_the_batch,
        "labels leak into the logits": leaks_labels,
        "labels leak into the embeddings": leaks_values("embeddings"),
        "labels leak into the expression": leaks_values("expression"),
    },
    "output": {
        r"the logits of 5 cells and 12 tokens have shape \(5, 11, 60\)": lambda out: {"logits": out.logits[:, 1:]},
        "forward returns a loss without labels": lambda out: {"loss": out.logits.sum()},
        "the loss is nan with labels": lambda out: {"loss": out.loss and out.loss * float("nan")},
        "forward and encode return different embeddings": lambda out: {"embeddings": 2 * out.embeddings},
    },
    "loss": {
        "more padding changes the loss": lambda self, logits, labels: loss(self, logits, labels) / logits.shape[1]
    },
    "part": {
        "the parameter 'unused.weight' does not contribute to the loss": lambda model: model.register_module(
            "unused", nn.Linear(3, 3)
        )
    },
    "states": {
        "the output 'embeddings' is random in evaluation mode": lambda *given: F.dropout(states(*given), 0.1),
        "a model with the same weights embeds cells differently": hidden_state,
        "LoRA adapters do not change the embeddings": (
            lambda self, ids, values: projected(
                self, self.genes(ids) + F.linear(values[..., None], self.value.weight, self.value.bias)
            )
        ),
        "disabling the LoRA adapters does not restore the original embeddings": (
            lambda self, *given: states(self, *given) * (1 if type(self.project) is nn.Linear else 2)
        ),
    },
    "pool": {
        "more padding changes the embeddings": lambda self, hidden, mask: hidden.mean(dim=1),
        "the embedding of cell 0 alone differs from its embedding in a batch": (
            lambda *given: pool(*given) - pool(*given).mean(dim=0)
        ),
        "a mask of dtype torch.int64 gives different results than a mask of dtype torch.bool": (
            lambda self, hidden, mask: pool(self, hidden, mask if mask.dtype == torch.bool else ~mask.bool())
        ),
        OTHER_ORDER: lambda self, hidden, mask: pool(self, hidden, mask) + hidden[:, 1] * mask[:, 1:2],
        "the embedding of a cell without tokens is not finite": (
            lambda self, hidden, mask: pool(self, hidden, mask) / any_token(mask)
        ),
        "checking that encode can be exported for any number of cells raised ": depends_on_numbers,
    },
}


@pytest.mark.parametrize(("method", "sentence"), [(name, told) for name, cases in BROKEN.items() for told in cases])
def test_each_broken_rule_is_named(method, sentence):
    change = BROKEN[method][sentence]
    made = {"output": ("forward", output_with), "part": ("__init__", part_of)}
    if method in made:
        method, make = made[method]
        change = make(change)
    with pytest.raises(AssertionError, match=rf"^Broken: .*{sentence}"):
        check_model(type("Broken", (Small,), {method: change}))


def test_order_may_matter_where_the_model_says_so():
    check_model(type("SaysSo", (Small,), {"pool": BROKEN["pool"][OTHER_ORDER], "uses_order": True}))


@pytest.mark.slow
def test_names_classes_and_instances_are_taken(monkeypatch):
    check_model("gene_pooling", hidden_dim=8, num_layers=1)
    check_model(MODELS.get("masked_autoencoder"), hidden_dim=8, num_layers=1, num_heads=2, decoder_layers=1)
    check_model(TransformerEncoder(50, 8, 1, 2, pooling="mean"))
    monkeypatch.setitem(MODELS._entries, "small", Small)
    check_model("small", hidden_dim=4)
    with pytest.raises(OptionError, match="have no effect with an instance"):
        check_model(Small(60), hidden_dim=4)
    with pytest.raises(OptionError, match="cannot be checked; pass a registered name, a class or an instance"):
        check_model(42)
    with pytest.raises(OptionError, match="did you mean 'gene_pooling'"):
        check_model("gene_poolings")
    for model in ("small", Small):
        with pytest.raises(OptionError, match="'hidden_dims' is unknown to"):
            check_model(model, hidden_dims=4)
    with pytest.raises(OptionError, match="vocab_size=15 is too small for the checks; use vocab_size=60"):
        check_model(Small(15))


def test_an_instance_and_the_random_numbers_stay_as_they_were():
    model = GenePoolingModel(50, 8, 1).train()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = torch.rand(3, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(3)
    check_model(model)
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
