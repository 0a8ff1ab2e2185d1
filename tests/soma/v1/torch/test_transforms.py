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

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_grad_is_that_of_backward(tiny, batch, dropout):
    model = Model(dataclasses.replace(tiny, dropout_rate=dropout))
    parameters = dict(model.named_parameters())

    def loss(parameters, tokens, targets):
        logits = functional_call(model, parameters, (tokens, torch.arange(70)[None]))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    found = grad(loss)(parameters, batch.tokens, batch.targets)
    torch.manual_seed(0)
    loss(parameters, batch.tokens, batch.targets).backward()
    torch.testing.assert_close(found, {name: value.grad for name, value in parameters.items()})
    if dropout == 0:  # the gradients of each sequence
        one = grad(lambda parameters, x, y: loss(parameters, x[None], y[None]))
        each = vmap(one, in_dims=(None, 0, 0))(parameters, batch.tokens, batch.targets)
        for b in range(3):
            expected = grad(loss)(parameters, batch.tokens[b : b + 1], batch.targets[b : b + 1])
            torch.testing.assert_close({name: value[b] for name, value in each.items()}, expected)


def test_the_regulariser():
    regulariser, noise = SIGReg(SIGRegConfig(slices=8)), torch.randn(16, 8)
    states = torch.randn(4, 5, 16, requires_grad=True)
    regulariser.compute(states, noise).backward()
    slope = grad(lambda x: regulariser.compute(x, noise))
    torch.testing.assert_close(slope(states.detach()), states.grad)
    torch.testing.assert_close(vmap(slope)(states.detach()) / 4, states.grad)


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6)])
def test_feed_forward_blocks_of_any_shape(shape):
    block = PositionWiseFeedForward(PositionWiseFeedForwardConfig(0.0, 6, 10)).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    plain = block.linear_outer(F.gelu(block.linear_inner(x)))
    found, expected = (
        torch.autograd.grad(result.square().sum(), (x, *block.parameters())) for result in (block(x), plain)
    )
    torch.testing.assert_close(found, expected)
