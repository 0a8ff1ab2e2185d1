"""The check for models finds what is wrong: each model below breaks one rule, and is told which."""

from __future__ import annotations

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


class Values(Small):
    """Predicts the value of each token: logits of shape (B, S). Correct."""

    def __init__(self, vocab_size, hidden_dim=8):
        super().__init__(vocab_size, hidden_dim)
        self.head = nn.Linear(hidden_dim, 1)

    def forward(self, input_ids, attention_mask, values=None, labels=None, value_labels=None, **kwargs):
        logits = self.head(self.states(input_ids, values)).squeeze(-1)
        loss = None if labels is None else ((logits - value_labels)[labels != -100] ** 2).sum()
        return ModelOutput(loss=loss, logits=logits, embeddings=self.encode(input_ids, attention_mask, values))


class Gated(Small):
    """Starts with a gate of zero, as deep networks do; nothing passes through it then. Correct."""

    def __init__(self, vocab_size, hidden_dim=8):
        super().__init__(vocab_size, hidden_dim)
        self.gate, self.more = nn.Parameter(torch.zeros(())), nn.Linear(hidden_dim, hidden_dim)

    def states(self, input_ids, values):
        hidden = super().states(input_ids, values)
        return hidden + self.gate * torch.tanh(self.more(hidden))


class Conditioned(Small):
    """Adds a class of the cell. Correct."""

    n_conditions = 3

    def __init__(self, vocab_size, hidden_dim=8):
        super().__init__(vocab_size, hidden_dim)
        self.classes = nn.Embedding(1 + self.n_conditions, hidden_dim)

    def forward(self, input_ids, attention_mask, values=None, labels=None, condition=None, **kwargs):
        hidden = self.states(input_ids, values)
        logits = self.head(hidden + self.classes(condition)[:, None])
        loss = None if labels is None else self.loss(logits, labels)
        return ModelOutput(loss=loss, logits=logits, embeddings=self.pool(hidden, attention_mask))


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Small, Values, Gated, Conditioned])
def test_correct_ones_pass(cls):
    check_model(cls)
    check_model(cls(vocab_size=50, hidden_dim=4))


BROKEN = []


def breaks(sentence):
    def decorator(cls):
        BROKEN.append(pytest.param(cls, sentence, id=cls.__name__))
        return cls

    return decorator


BROKEN.append(pytest.param(type("Lacks", (Small,), {"encode": None}), "it has no 'encode'", id="encode"))
BROKEN.append(pytest.param(type("Lacks", (Small,), {"from_config": None}), "it has no 'from_config', which", id="make"))


@breaks(r"encode takes \('input_ids', 'values', 'kwargs'\) first instead of")
class NoMask(Small):
    def encode(self, input_ids, values=None, **kwargs):
        raise NotImplementedError


@breaks(r"encode takes no \*\*kwargs; a batch may hold keys that are not for it")
class NoOtherKeys(Small):
    def encode(self, input_ids, attention_mask, values=None):
        raise NotImplementedError


@breaks("forward takes no 'labels'")
class NoLabels(Small):
    def forward(self, input_ids, attention_mask, values=None, **kwargs):
        raise NotImplementedError


def changed(sentence, change):
    """A small model with another output: `change` gets the parts of the output and returns those that it changes."""

    class Other(Small):
        def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
            output = super().forward(input_ids, attention_mask, values, labels, **kwargs)
            return replace(output, **change(vars(output)))

    BROKEN.append(pytest.param(Other, sentence, id=sentence))


changed("forward returns no logits", lambda parts: {"logits": None})
changed(r"the logits of 5 cells and 12 tokens are \(5, 11, 60\)", lambda parts: {"logits": parts["logits"][:, 1:]})
changed(r"the embeddings of 5 cells are \(5, 1, 16\)", lambda parts: {"embeddings": parts["embeddings"][:, None]})
changed("the logits hold a number that is not finite", lambda parts: {"logits": parts["logits"] * float("inf")})
changed("there is a loss without labels", lambda parts: {"loss": parts["logits"].sum()})
changed("there is no loss though labels are given", lambda parts: {"loss": None})
changed(r"the loss is \(1,\), not a scalar", lambda parts: {"loss": parts["loss"] and parts["loss"][None]})
changed("the loss is nan with labels", lambda parts: {"loss": parts["loss"] and parts["loss"] * float("nan")})
changed("forward and encode embed cells differently", lambda parts: {"embeddings": 2 * parts["embeddings"]})


@breaks("forward returns Tensor, not ModelOutput")
class Bare(Small):
    def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
        return super().forward(input_ids, attention_mask, values, labels).logits


@breaks("raises KeyError.* where forward returns a loss, logits and embeddings")
class NeedsAnOddKey(Small):
    def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
        return super().forward(input_ids + kwargs["batch_ids"], attention_mask, values, labels)


@breaks("return_logits=False changes the loss")
class OtherLoss(Small):
    def forward(self, input_ids, attention_mask, values=None, labels=None, return_logits=True, **kwargs):
        output = super().forward(input_ids, attention_mask, values, labels)
        return output if return_logits else ModelOutput(loss=output.loss / 2)


@breaks(r"forward changes the batch that it is given \('values'\)")
class InPlace(Small):
    def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
        return super().forward(input_ids, attention_mask, values.log1p_(), labels)


@breaks("the embeddings are random in evaluation mode")
class AlwaysDropsOut(Small):
    def states(self, input_ids, values):
        return F.dropout(super().states(input_ids, values), 0.1)


@breaks("cells of other genes have the same embedding")
class Constant(Small):
    def encode(self, input_ids, attention_mask, values=None, **kwargs):
        return self.genes(input_ids[:, 0])


@breaks("labels leak into the logits")
class Leaks(Small):
    def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
        seen = input_ids if labels is None else input_ids.where(labels == -100, labels)
        output = super().forward(seen, attention_mask, values, labels)
        return replace(output, embeddings=self.encode(input_ids, attention_mask, values))


@breaks("labels leak into the embeddings")
class LeaksValues(Small):
    def forward(self, input_ids, attention_mask, values=None, labels=None, value_labels=None, **kwargs):
        output = super().forward(input_ids, attention_mask, values, labels)
        seen = values if value_labels is None else values + value_labels
        return replace(output, embeddings=self.encode(input_ids, attention_mask, seen))


@breaks("labels leak into the expression")
class LeaksExpression(Small):
    def forward(self, input_ids, attention_mask, values=None, labels=None, value_labels=None, **kwargs):
        expression = values if value_labels is None else values + value_labels
        return replace(super().forward(input_ids, attention_mask, values, labels), expression=expression)


@breaks("the parameter 'unused.weight' takes no part in the loss")
class Unused(Small):
    def __init__(self, vocab_size, hidden_dim=8):
        super().__init__(vocab_size, hidden_dim)
        self.unused = nn.Linear(3, 3)


@breaks("the parameter 'genes.weight' takes no part in the loss")
class Detached(Small):
    def states(self, input_ids, values):
        return super().states(input_ids, values).detach()


@breaks("the gradient of 'genes.weight' is not finite")
class InfiniteGradient(Small):
    def states(self, input_ids, values):
        return super().states(input_ids, values) + (self.genes(input_ids) * 0).abs().sqrt()


@breaks("more padding changes the embeddings")
class MeanOverPadding(Small):
    def pool(self, hidden, attention_mask):
        return hidden.mean(dim=1)


@breaks("cell 0 alone has another embedding than among others")
class MixesCells(Small):
    def pool(self, hidden, attention_mask):
        cells = super().pool(hidden, attention_mask)
        return cells - cells.mean(dim=0)


@breaks("'values' at padding change the embeddings")
class SumsValues(Small):
    def encode(self, input_ids, attention_mask, values=None, **kwargs):
        return super().encode(input_ids, attention_mask, values) + values.sum(dim=1, keepdim=True)


@breaks("more padding changes the loss")
class LossOfWidth(Small):
    def loss(self, logits, labels):
        return super().loss(logits, labels) / logits.shape[1]


@breaks("more padding changes the logits of tokens")
class LogitsOfWidth(Small):
    def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
        output = super().forward(input_ids, attention_mask, values, labels)
        return replace(output, logits=output.logits / input_ids.shape[1])


@breaks("a mask of torch.int64 means something else than one of torch.bool")
class BoolMaskOnly(Small):
    def pool(self, hidden, attention_mask):
        return super().pool(hidden, attention_mask if attention_mask.dtype == torch.bool else ~attention_mask.bool())


@breaks("uses_order is False but genes in another order change the embeddings")
class FirstGene(Small):
    def pool(self, hidden, attention_mask):
        return super().pool(hidden, attention_mask) + hidden[:, 1] * attention_mask[:, 1:2]


@breaks("the embedding of a cell without tokens is not finite")
class DividesByZero(Small):
    def pool(self, hidden, attention_mask):
        return super().pool(hidden, attention_mask) / (attention_mask != 0).any(dim=1, keepdim=True)


@breaks("a cell without tokens has another embedding alone than among others")
class LooksAtPadding(Small):
    def pool(self, hidden, attention_mask):
        return super().pool(hidden, attention_mask) + hidden.sum(dim=1) * (attention_mask == 0).all(dim=1, keepdim=True)


@breaks("a model with the same weights embeds cells differently")
class HiddenState(Small):
    def __init__(self, vocab_size, hidden_dim=8):
        super().__init__(vocab_size, hidden_dim)
        self.table = torch.randn(vocab_size, hidden_dim)

    def states(self, input_ids, values):
        return super().states(input_ids, values) + self.table[input_ids]


@breaks("raises RuntimeError.*Some tensors share memory.* where weights are saved and loaded")
class Tied(Small):
    def __init__(self, vocab_size, hidden_dim=8):
        super().__init__(vocab_size, hidden_dim)
        self.head.weight = self.genes.weight


@breaks("LoRA adapters do not change the embeddings")
class ReadsAllWeights(Small):
    def states(self, input_ids, values):
        hidden = self.genes(input_ids) + F.linear(values[..., None], self.value.weight, self.value.bias)
        return torch.tanh(F.linear(hidden, self.project.weight, self.project.bias))


@breaks("a LoRA adapter of 'project' does nothing; call the layer instead of reading its weight")
class ReadsOneWeight(Small):
    def states(self, input_ids, values):
        hidden = self.genes(input_ids) + self.value(values[..., None])
        return torch.tanh(F.linear(hidden, self.project.weight, self.project.bias))


@breaks("with disabled LoRA adapters the embeddings are not those of before")
class LooksAtItsLayers(Small):
    def states(self, input_ids, values):
        return super().states(input_ids, values) * (1 if type(self.project) is nn.Linear else 2)


@breaks("raises .* where encode can be exported for any number of cells")
class DependsOnNumbers(Small):
    def pool(self, hidden, attention_mask):
        return super().pool(hidden, attention_mask) * (2.0 if float(hidden.detach()[0, 0, 0]) > 0 else 1.0) ** 0


@breaks("exported for any number of cells, encode gives other numbers")
class OtherWhenExported(Small):
    def pool(self, hidden, attention_mask):
        return super().pool(hidden, attention_mask) * (2 if torch.compiler.is_exporting() else 1)


@pytest.mark.parametrize(("cls", "sentence"), BROKEN)
def test_each_broken_rule_is_named(cls, sentence):
    with pytest.raises(AssertionError, match=rf"^{cls.__name__}: .*{sentence}"):
        check_model(cls)


def test_order_may_matter_where_the_model_says_so():
    check_model(type("SaysSo", (FirstGene,), {"uses_order": True}))


def test_attention_of_torch_drops_an_adapter():
    class Attention(Small):
        def __init__(self, vocab_size, hidden_dim=8):
            super().__init__(vocab_size, hidden_dim)
            self.attention = nn.MultiheadAttention(hidden_dim, 2, batch_first=True)

        def pool(self, hidden, attention_mask):
            padding = (attention_mask == 0).index_fill(1, torch.tensor(0), value=False)
            return super().pool(self.attention(hidden, hidden, hidden, key_padding_mask=padding)[0], attention_mask)

        def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
            cells = self.encode(input_ids, attention_mask, values)
            logits = self.head(self.states(input_ids, values) + cells[:, None])
            return ModelOutput(None if labels is None else self.loss(logits, labels), logits, cells)

    with pytest.raises(AssertionError, match="a LoRA adapter of 'attention.out_proj' does nothing"):
        check_model(Attention)


@pytest.mark.slow
def test_names_classes_and_instances_are_taken(monkeypatch):
    check_model("gene_pooling", hidden_dim=8, num_layers=1)
    check_model(MODELS.get("masked_autoencoder"), hidden_dim=8, num_layers=1, num_heads=2, decoder_layers=1)
    check_model(TransformerEncoder(50, 8, 1, 2, pooling="mean"))
    monkeypatch.setattr(MODELS, "_entries", {**MODELS._entries, "small": Small})
    check_model("small", hidden_dim=4)
    with pytest.raises(OptionError, match="come with an instance"):
        check_model(Small(60), hidden_dim=4)
    with pytest.raises(OptionError, match="is no architecture; pass a registered name, a class or an instance"):
        check_model(42)
    with pytest.raises(OptionError, match="did you mean 'gene_pooling'"):
        check_model("gene_poolings")
    for model in ("small", Small):
        with pytest.raises(OptionError, match="'hidden_dims' is unknown to"):
            check_model(model, hidden_dims=4)
    with pytest.raises(OptionError, match="vocab_size=15 is too small to be checked; make the model with 60"):
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
