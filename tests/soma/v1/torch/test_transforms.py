"""torch.func over the model, whose functions have gradients of their own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from scforge.soma.v1.configs import PositionWiseFeedForwardConfig
from scforge.soma.v1.torch import Model, SIGReg, SIGRegConfig
from scforge.soma.v1.torch.modules.pwff import PositionWiseFeedForward

PLACES = torch.arange(70)[None]


def loss_of(model):
    def loss(parameters, tokens, targets):
        logits = functional_call(model, parameters, (tokens, PLACES))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return loss


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_grad_is_that_of_backward(tiny, batch, dropout):
    model = Model(dataclasses.replace(tiny, dropout_rate=dropout))
    loss, parameters = loss_of(model), dict(model.named_parameters())
    torch.manual_seed(0)
    found = grad(loss)(parameters, batch.tokens, batch.targets)
    torch.manual_seed(0)
    loss(parameters, batch.tokens, batch.targets).backward()
    for name, value in parameters.items():
        torch.testing.assert_close(found[name], value.grad)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_sequence(tiny, batch):
    model = Model(tiny)
    loss, parameters = loss_of(model), dict(model.named_parameters())
    one = grad(lambda parameters, x, y: loss(parameters, x[None], y[None]))
    each = vmap(one, in_dims=(None, 0, 0))(parameters, batch.tokens, batch.targets)
    for b in range(3):
        expected = grad(loss)(parameters, batch.tokens[b : b + 1], batch.targets[b : b + 1])
        for name, value in expected.items():
            torch.testing.assert_close(each[name][b], value)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_regulariser():
    regulariser, noise = SIGReg(SIGRegConfig(slices=8)), torch.randn(16, 8)
    states = torch.randn(4, 5, 16, requires_grad=True)
    regulariser.compute(states, noise).backward()
    found = grad(lambda x: regulariser.compute(x, noise))(states.detach())
    torch.testing.assert_close(found, states.grad)
    each = vmap(grad(lambda x: regulariser.compute(x, noise)))(states.detach())
    torch.testing.assert_close(each / 4, states.grad)


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)])
def test_feed_forward_blocks_of_any_shape(shape):
    block = PositionWiseFeedForward(PositionWiseFeedForwardConfig(0.0, 6, 10)).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    found = torch.autograd.grad(block(x).square().sum(), (x, *block.parameters()))
    plain = block.linear_outer(F.gelu(block.linear_inner(x)))
    expected = torch.autograd.grad(plain.square().sum(), (x, *block.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
