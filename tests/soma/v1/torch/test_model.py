import dataclasses

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from scforge.errors import DataError, OptionError
from scforge.soma.v1.torch import Model, ModelConfig, SIGReg, SIGRegConfig, compute_loss
from scforge.testing import raises

PLACES = torch.arange(70)[None]


def grads(model):
    return {name: value.grad for name, value in model.named_parameters()}


@pytest.mark.parametrize("changes", [{}, {"scale_factor": 2.5, "max_wavelength": 500.0, "num_heads": 8}])
def test_equals_the_published(pair, batch, changes):
    ours, theirs = pair(**changes)
    x, p = batch.tokens, batch.positions
    torch.testing.assert_close(ours.encode(x, p), theirs.encode(x, p), atol=1e-5, rtol=0)
    torch.testing.assert_close(ours(x, p), theirs(x, p), atol=1e-5, rtol=0)
    states = torch.randn(4, 16)
    torch.testing.assert_close(ours.predict(states), theirs.predict(states))
    torch.testing.assert_close(ours(x, PLACES.int()), theirs(x, PLACES.repeat(3, 1)), atol=1e-5, rtol=0)
    for model in (ours, theirs):
        model(x, p).square().mean().backward()
    torch.testing.assert_close(grads(ours), grads(theirs), atol=1e-5, rtol=1e-4)


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


def test_dropout_is_as_strong_as_the_published(pair, batch):
    # By the scatter of the outputs: each of the four places of dropout adds to it.
    x, p = batch.tokens, batch.positions
    with torch.no_grad():
        scatter = [
            torch.stack([model.encode(x, p) for _ in range(60)]).std(dim=0).mean()
            for model in pair(dropout_rate=0.3, num_layers=1)
        ]
    torch.testing.assert_close(scatter[0], scatter[1], rtol=0.02, atol=0)
    model, plain = pair(dropout_rate=0.3)[0], pair()[0]
    torch.testing.assert_close(model.eval()(x, p), plain(x, p))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_changes_no_number(tiny, batch, dropout):
    config = dataclasses.replace(tiny, dropout_rate=dropout)
    plain, again = Model(config), Model(config, gradient_checkpointing=True)
    again.load_state_dict(plain.state_dict())
    for model in (plain, again):
        torch.manual_seed(0)
        compute_loss(model, SIGReg(SIGRegConfig()), batch.tokens, batch.targets)[0].backward()
    torch.testing.assert_close(grads(again), grads(plain))


def test_bfloat16(tiny, batch):
    model = Model(dataclasses.replace(tiny, dropout_rate=0.1)).eval()
    expected = model.encode(batch.tokens, batch.positions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
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
    ("tokens", "places", "argument"),
    [
        (torch.rand(1, 4), PLACES[:, :4], "input"),
        ([[97, 98]], PLACES[:, :2], "input"),
        (PLACES[:, :2].numpy(), PLACES[:, :2], "input"),
        (
            torch.tensor([[97, 264]]),
            PLACES[:, :2],
            "input",
        ),
        (torch.tensor([1, 2, 3, 4]), PLACES[:, :4], "input"),
        (torch.tensor([[1, 2]]), torch.rand(1, 2), "positions"),
        (torch.tensor([[1], [2], [3]]), torch.tensor([[0], [1]]), "positions"),
    ],
)
def test_what_is_no_tokens(tiny, tokens, places, argument):
    with raises(DataError, argument):
        Model(tiny).encode(tokens, places)


def test_what_is_no_configuration(tiny):
    for config in ({"dropout_rate": 0.0}, SIGRegConfig()):
        with pytest.raises(OptionError, match=r"config=.* has no field dropout_rate; pass a ModelConfig"):
            Model(config)
    with raises(OptionError, "embedding_dim"):
        Model(dataclasses.replace(tiny, num_heads=3))
    with raises(OptionError, "pad_mask"):
        Model(tiny, pad_mask="no")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_torch_func_finds_the_gradients_of_backward_and_those_of_each_sequence(tiny, batch, dropout):
    model = Model(dataclasses.replace(tiny, dropout_rate=dropout))
    parameters = dict(model.named_parameters())

    def loss(parameters, tokens, targets):
        logits = functional_call(model, parameters, (tokens, PLACES))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    found = grad(loss)(parameters, batch.tokens, batch.targets)
    torch.manual_seed(0)
    loss(parameters, batch.tokens, batch.targets).backward()
    torch.testing.assert_close(found, grads(model))
    if dropout == 0:
        one = grad(lambda parameters, x, y: loss(parameters, x[None], y[None]))
        each = vmap(one, in_dims=(None, 0, 0))(parameters, batch.tokens, batch.targets)
        torch.testing.assert_close({name: value.mean(dim=0) for name, value in each.items()}, found)
