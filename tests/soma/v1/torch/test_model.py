"""The model, beside the published one with the same weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from scforge.errors import DataError, OptionError
from scforge.soma.v1.configs import EncoderConfig, LayerConfig, PositionWiseFeedForwardConfig
from scforge.soma.v1.torch import Model, ModelConfig, SIGReg, SIGRegConfig, compute_loss
from scforge.soma.v1.torch.modules.encoder import Encoder
from scforge.soma.v1.torch.modules.layer import Layer
from scforge.soma.v1.torch.modules.pwff import PositionWiseFeedForward
from scforge.soma.v1.torch.serde import Serde


def grads(model):
    return {name: value.grad for name, value in model.named_parameters()}


@pytest.mark.parametrize("changes", [{}, {"scale_factor": 2.5, "max_wavelength": 500.0}, {"num_heads": 8}])
def test_equals_the_published(pair, batch, changes):
    ours, theirs = pair(**changes)
    x, p = batch.tokens, batch.positions
    torch.testing.assert_close(ours.encode(x, p), theirs.encode(x, p), atol=1e-5, rtol=0)
    torch.testing.assert_close(ours(x, p), theirs(x, p), atol=1e-5, rtol=0)
    states = torch.randn(4, 16)
    torch.testing.assert_close(ours.predict(states), theirs.predict(states))
    ours(x, p).square().mean().backward()
    theirs(x, p).square().mean().backward()
    for name, grad in grads(theirs).items():
        torch.testing.assert_close(grads(ours)[name], grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("part", ["encoder", "layer", "pwff"])
def test_parts_equal_the_published(pair, batch, part):
    ours, theirs = pair()
    x = torch.randn(3, 70, 16)
    alone = {
        "encoder": Encoder(EncoderConfig(0.0, 16, 32, 2, 2)),
        "layer": Layer(LayerConfig(0.0, 16, 32, 2)),
        "pwff": PositionWiseFeedForward(PositionWiseFeedForwardConfig(0.0, 16, 32)),
    }[part]
    source = {
        "encoder": theirs.encoder,
        "layer": theirs.encoder.layers[0],
        "pwff": theirs.encoder.layers[0].pwff,
    }[part]
    alone.load_state_dict(source.state_dict())
    places = () if part == "pwff" else (batch.positions,)
    torch.testing.assert_close(alone(x, *places), source(x, *places), atol=1e-5, rtol=0)


def test_same_weights_of_the_same_seed(published, tiny):
    torch.manual_seed(3)
    ours = Model(tiny)
    torch.manual_seed(3)
    theirs = published.Model(published.ModelConfig(**dataclasses.asdict(tiny)))
    assert ours.save_bytes() == theirs.save_bytes()


def test_parameters_of_version_1():
    with torch.device("meta"):
        model = Model(ModelConfig(dropout_rate=0.1))
    assert sum(value.numel() for value in model.parameters()) == 1_209_684_232


def test_no_token_sees_later_ones(tiny):
    model = Model(tiny).eval()
    tokens = torch.randint(0, 256, (1, 40))
    places = torch.arange(40)[None]
    changed = tokens.clone()
    changed[:, 25:] = (changed[:, 25:] + 7) % 256
    one, other = model(tokens, places), model(changed, places)
    torch.testing.assert_close(one[:, :25], other[:, :25], atol=1e-6, rtol=0)
    assert (one[:, 25:] - other[:, 25:]).abs().amax(dim=-1).min() > 1e-3


def test_a_shift_of_all_places_changes_nothing(tiny, batch):
    model = Model(tiny).eval()
    torch.testing.assert_close(
        model(batch.tokens, batch.positions), model(batch.tokens, batch.positions + 300), atol=1e-4, rtol=0
    )


def test_one_row_of_places_for_all(tiny, batch):
    model = Model(tiny).eval()
    row = torch.arange(70)[None]
    expected = model(batch.tokens, row.repeat(3, 1))
    torch.testing.assert_close(model(batch.tokens, row), expected)
    torch.testing.assert_close(model(batch.tokens, row.expand(3, -1)), expected)
    torch.testing.assert_close(model(batch.tokens.to(torch.int16), row.int()), expected)


def test_dropout_in_training_only(tiny, batch):
    model = Model(dataclasses.replace(tiny, dropout_rate=0.5))
    x, p = batch.tokens, batch.positions
    assert not torch.equal(model(x, p), model(x, p))
    torch.manual_seed(5)
    one = model(x, p)
    torch.manual_seed(5)
    assert torch.equal(model(x, p), one)
    model.eval()
    assert torch.equal(model(x, p), model(x, p))
    plain = Model(tiny)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x, p), plain(x, p))


def test_dropout_is_as_strong_as_the_published(pair, batch):
    # By the scatter of the outputs: each of the four places of dropout adds to it.
    ours, theirs = pair(dropout_rate=0.3, num_layers=1)
    x, p = batch.tokens, batch.positions
    with torch.no_grad():
        scatter = [torch.stack([m.encode(x, p) for _ in range(60)]).std(dim=0).mean() for m in (ours, theirs)]
    torch.testing.assert_close(scatter[0], scatter[1], rtol=0.02, atol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_changes_no_number(tiny, batch, dropout):
    config = dataclasses.replace(tiny, dropout_rate=dropout)
    plain, again = Model(config), Model(config, gradient_checkpointing=True)
    again.load_state_dict(plain.state_dict())
    for model in (plain, again):
        torch.manual_seed(0)
        compute_loss(model, SIGReg(SIGRegConfig()), batch.tokens, batch.targets)[0].backward()
    for name, grad in grads(plain).items():
        torch.testing.assert_close(grads(again)[name], grad)


def test_checkpointing_keeps_less(tiny, batch):
    def kept(model: Model) -> int:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            model(batch.tokens, batch.positions)
        return sum(sizes)

    assert kept(Model(tiny, gradient_checkpointing=True)) < kept(Model(tiny)) / 2


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_keeps_less_than_the_published(pair, dropout):
    def kept(model: torch.nn.Module) -> int:
        # By storage, since views share one.
        own = {value.untyped_storage().data_ptr() for value in model.parameters()}
        sizes, alive = {}, []

        def pack(x: torch.Tensor) -> torch.Tensor:
            alive.append(x)
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(tokens, torch.arange(256).expand(2, -1))
        return sum(size for place, size in sizes.items() if place not in own)

    tokens = torch.randint(0, 256, (2, 256))
    ours, theirs = pair(dropout_rate=dropout)
    assert kept(ours) < kept(theirs) / (3 if dropout == 0 else 5)


def test_feed_forward_blocks_keep_one_copy_of_their_hidden_units(tiny):
    block, sizes = PositionWiseFeedForward(PositionWiseFeedForwardConfig(0.1, 16, 32)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(tuple(x.shape)) or x, lambda x: x):
        block(torch.randn(5, 16))
    assert sizes.count((5, 32)) == 1


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_feed_forward_blocks_equal_their_formula(dropout):
    block = PositionWiseFeedForward(PositionWiseFeedForwardConfig(dropout, 6, 10)).double()
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)

    def fixed(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return torch.func.functional_call(block, dict(zip(names, weights, strict=True)), x)

    names = [name for name, _ in block.named_parameters()]
    assert torch.autograd.gradcheck(fixed, (x, *block.parameters()))
    # A hook asks for the layer itself, which keeps more and computes the same.
    calls = []
    one = fixed(x, *block.parameters())
    block.linear_outer.register_forward_hook(lambda *_: calls.append(1))
    if dropout == 0:
        torch.testing.assert_close(fixed(x, *block.parameters()), one)
    assert fixed(x, *block.parameters()).shape == one.shape
    assert calls


def test_frozen_weights(tiny, batch):
    model = Model(tiny)
    model.encoder.layers.requires_grad_(False)
    model(batch.tokens, batch.positions).mean().backward()
    assert model.embedding.weight.grad.abs().sum() > 0
    assert model.encoder.layers[0].pwff.linear_outer.weight.grad is None


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16(tiny, batch, autocast):
    model = Model(dataclasses.replace(tiny, dropout_rate=0.1)).eval()
    expected = model.encode(batch.tokens, batch.positions)
    if not autocast:
        model = model.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        # Places beyond 256 are whole numbers that 16 bits cannot tell apart.
        states = model.encode(batch.tokens, batch.positions)
        torch.testing.assert_close(states.float(), expected, atol=0.06, rtol=0.05)
        model.train()
        loss, _ = compute_loss(model, SIGReg(SIGRegConfig()), batch.tokens, batch.targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(grad.isfinite().all() for grad in grads(model).values())


def test_pads_are_hidden_if_asked_for(tiny):
    plain, masked = Model(tiny).eval(), Model(tiny, pad_mask=True).eval()
    masked.load_state_dict(plain.state_dict())
    tokens = torch.tensor([[97, 98, 257, 256, 256], [97, 98, 99, 100, 257]])
    places = torch.arange(5)[None]
    one, other = plain(tokens, places), masked(tokens, places)
    torch.testing.assert_close(other[1], one[1])
    torch.testing.assert_close(other[0, :3], one[0, :3])
    assert (other[0, 4] - one[0, 4]).abs().max() > 1e-3
    # A pad in front hides nothing else, and a row of pads alone has numbers.
    front = torch.tensor([[256, 97, 98], [256, 256, 256]])
    states = masked(front, places[:, :3])
    torch.testing.assert_close(states[0, 1:], masked(front[:1, 1:], places[:, 1:3])[0])
    assert states.isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "places", "message"),
    [
        (torch.rand(1, 4), torch.arange(4)[None], "input has dtype torch.float32"),
        ([[97, 98]], torch.arange(2)[None], "input is of type list"),
        (torch.tensor([[97, 264]]), torch.arange(2)[None], "input holds 264; pass tokens from 0 to 263"),
        (torch.tensor([[-1, 97]]), torch.arange(2)[None], "input holds -1"),
        (torch.zeros(4, dtype=torch.int64), torch.arange(4)[None], r"input has shape \(4,\)"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.arange(4.0)[None], "positions has dtype"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.arange(5)[None], r"positions has shape \(1, 5\)"),
        (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64), r"positions has shape \(2, 4\)"),
    ],
)
def test_what_is_no_tokens(tiny, tokens, places, message):
    with pytest.raises(DataError, match=message):
        Model(tiny).encode(tokens, places)


def test_sizes_that_do_not_fit(tiny):
    with pytest.raises(OptionError, match="not divisible by num_heads=3"):
        Model(dataclasses.replace(tiny, num_heads=3))
    with pytest.raises(OptionError, match="scale_factor=0.9"):
        Model(dataclasses.replace(tiny, scale_factor=0.9))
    with pytest.raises(OptionError, match="pad_mask='no'"):
        Model(tiny, pad_mask="no")


def test_state_is_weights_alone(tiny, published):
    theirs = published.Model(published.ModelConfig(**dataclasses.asdict(tiny)))
    assert {k: v.shape for k, v in Model(tiny).state_dict().items()} == {
        k: v.shape for k, v in theirs.state_dict().items()
    }
    assert Serde(Model(tiny)).serialize()


@pytest.mark.parametrize("config", [{"dropout_rate": 0.0}, ModelConfig, None, SIGRegConfig()])
def test_what_is_no_configuration(config):
    with pytest.raises(OptionError, match=r"config=.* cannot be used; pass an instance of ModelConfig"):
        Model(config)
