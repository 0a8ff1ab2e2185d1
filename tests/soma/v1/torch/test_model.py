"""The model, beside the published one with the same weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from scforge.errors import DataError, OptionError
from scforge.soma.v1.configs import EncoderConfig, LayerConfig, PositionWiseFeedForwardConfig
from scforge.soma.v1.torch import Model, ModelConfig, SIGReg, SIGRegConfig, compute_loss
from scforge.soma.v1.torch.modules.encoder import Encoder
from scforge.soma.v1.torch.modules.layer import Layer
from scforge.soma.v1.torch.modules.pwff import PositionWiseFeedForward

PLACES = torch.arange(70)[None]


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
    for model in (ours, theirs):
        model(x, p).square().mean().backward()
    torch.testing.assert_close(grads(ours), grads(theirs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("part", "path"),
    [
        (Encoder(EncoderConfig(0.0, 16, 32, 2, 2)), "encoder"),
        (Layer(LayerConfig(0.0, 16, 32, 2)), "encoder.layers.0"),
        (PositionWiseFeedForward(PositionWiseFeedForwardConfig(0.0, 16, 32)), "encoder.layers.0.pwff"),
    ],
)
def test_parts_equal_the_published(pair, batch, part, path):
    source, x = pair()[1].get_submodule(path), torch.randn(3, 70, 16)
    part.load_state_dict(source.state_dict())
    places = () if path.endswith("pwff") else (batch.positions,)
    torch.testing.assert_close(part(x, *places), source(x, *places), atol=1e-5, rtol=0)


def test_same_weights_of_the_same_seed(published, tiny):
    torch.manual_seed(3)
    ours = Model(tiny)
    torch.manual_seed(3)
    theirs = published.Model(published.ModelConfig(**dataclasses.asdict(tiny)))
    assert ours.save_bytes() == theirs.save_bytes()
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_parameters_of_version_1():
    with torch.device("meta"):
        model = Model(ModelConfig(dropout_rate=0.1))
    assert sum(value.numel() for value in model.parameters()) == 1_209_684_232


def test_no_token_sees_later_ones(tiny):
    model, tokens = Model(tiny).eval(), torch.randint(0, 256, (1, 40))
    changed = tokens.clone()
    changed[:, 25:] = (changed[:, 25:] + 7) % 256
    one, other = model(tokens, PLACES[:, :40]), model(changed, PLACES[:, :40])
    torch.testing.assert_close(one[:, :25], other[:, :25], atol=1e-6, rtol=0)
    assert (one[:, 25:] - other[:, 25:]).abs().amax(dim=-1).min() > 1e-3


def test_one_row_of_places_for_all(tiny, batch):
    model = Model(tiny).eval()
    expected = model(batch.tokens, PLACES.repeat(3, 1))
    for tokens, places in [(batch.tokens, PLACES), (batch.tokens.to(torch.int16), PLACES.int().expand(3, -1))]:
        torch.testing.assert_close(model(tokens, places), expected)


def test_dropout_in_training_only(tiny, batch):
    model = Model(dataclasses.replace(tiny, dropout_rate=0.5))
    x, p = batch.tokens, batch.positions
    assert not torch.equal(model(x, p), model(x, p))
    torch.manual_seed(5)
    one = model(x, p)
    torch.manual_seed(5)
    assert torch.equal(model(x, p), one)
    plain = Model(tiny)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.eval()(x, p), plain(x, p))


def test_dropout_is_as_strong_as_the_published(pair, batch):
    # By the scatter of the outputs: each of the four places of dropout adds to it.
    x, p = batch.tokens, batch.positions
    with torch.no_grad():
        scatter = [
            torch.stack([model.encode(x, p) for _ in range(60)]).std(dim=0).mean()
            for model in pair(dropout_rate=0.3, num_layers=1)
        ]
    torch.testing.assert_close(scatter[0], scatter[1], rtol=0.02, atol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_changes_no_number(tiny, batch, dropout):
    config = dataclasses.replace(tiny, dropout_rate=dropout)
    plain, again = Model(config), Model(config, gradient_checkpointing=True)
    again.load_state_dict(plain.state_dict())
    for model in (plain, again):
        torch.manual_seed(0)
        compute_loss(model, SIGReg(SIGRegConfig()), batch.tokens, batch.targets)[0].backward()
    torch.testing.assert_close(grads(again), grads(plain))


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

        with saved_tensors_hooks(pack, lambda x: x):
            model(torch.zeros(2, 256, dtype=torch.int64), torch.arange(256).expand(2, -1))
        return sum(size for place, size in sizes.items() if place not in own)

    ours, theirs = pair(dropout_rate=dropout)
    assert kept(ours) < kept(theirs) / (3 if dropout == 0 else 5)
    assert kept(Model(ours.config, gradient_checkpointing=True)) < kept(ours) / 2


def test_feed_forward_blocks_keep_one_copy_of_their_hidden_units(tiny):
    block, sizes = PositionWiseFeedForward(PositionWiseFeedForwardConfig(0.1, 16, 32)), []
    with saved_tensors_hooks(lambda x: sizes.append(tuple(x.shape)) or x, lambda x: x):
        block(torch.randn(5, 16))
    assert sizes.count((5, 32)) == 1


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_gradients_of_feed_forward_blocks(dropout):
    block = PositionWiseFeedForward(PositionWiseFeedForwardConfig(dropout, 6, 10)).double()
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in block.named_parameters()]

    def fixed(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return torch.func.functional_call(block, dict(zip(names, weights, strict=True)), x)

    assert torch.autograd.gradcheck(fixed, (x, *block.parameters()))
    # A hook asks for the layer itself, which keeps more and computes the same.
    calls, one = [], fixed(x, *block.parameters())
    block.linear_outer.register_forward_hook(lambda *_: calls.append(1))
    other = fixed(x, *block.parameters())
    assert calls
    if dropout == 0:
        torch.testing.assert_close(other, one)


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
    one, other = (model(tokens, PLACES[:, :5]) for model in (plain, masked))
    torch.testing.assert_close(other[1], one[1])
    torch.testing.assert_close(other[0, :3], one[0, :3])
    assert (other[0, 4] - one[0, 4]).abs().max() > 1e-3
    # A pad in front hides nothing else, and a row of pads alone has numbers.
    front = torch.tensor([[256, 97, 98], [256, 256, 256]])
    states = masked(front, PLACES[:, :3])
    torch.testing.assert_close(states[0, 1:], masked(front[:1, 1:], PLACES[:, 1:3])[0])
    assert states.isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "places", "message"),
    [
        (torch.rand(1, 4), PLACES[:, :4], "input has dtype torch.float32"),
        ([[97, 98]], PLACES[:, :2], "input is of type list"),
        (torch.tensor([[97, 264]]), PLACES[:, :2], "input holds 264; pass tokens from 0 to 263"),
        (torch.tensor([[-1, 97]]), PLACES[:, :2], "input holds -1"),
        (torch.tensor([1, 2, 3, 4]), PLACES[:, :4], r"input has shape \(4,\)"),
        (torch.tensor([[1, 2]]), torch.rand(1, 2), "positions has dtype"),
        (torch.tensor([[1, 2]]), PLACES[:, :5], r"positions has shape \(1, 5\)"),
        (torch.tensor([[1], [2], [3]]), torch.tensor([[0], [1]]), r"positions has shape \(2, 1\)"),
    ],
)
def test_what_is_no_tokens(tiny, tokens, places, message):
    with pytest.raises(DataError, match=message):
        Model(tiny).encode(tokens, places)


@pytest.mark.parametrize("config", [{"dropout_rate": 0.0}, ModelConfig, None, SIGRegConfig()])
def test_what_is_no_configuration(config, tiny):
    with pytest.raises(OptionError, match=r"config=.* cannot be used; pass an instance of ModelConfig"):
        Model(config)
    with pytest.raises(OptionError, match="not divisible by num_heads=3"):
        Model(dataclasses.replace(tiny, num_heads=3))
    with pytest.raises(OptionError, match="pad_mask='no'"):
        Model(tiny, pad_mask="no")
