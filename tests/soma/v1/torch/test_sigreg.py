import pytest
import torch

from scforge.errors import DataError
from scforge.models.components import SIGReg as OverSamples
from scforge.soma.v1.torch import SIGReg, SIGRegConfig
from scforge.testing import raises


@pytest.fixture
def regularizers(published):
    def make(**options):
        return SIGReg(SIGRegConfig(**options)), published.SIGReg(published.SIGRegConfig(**options))

    return make


@pytest.mark.parametrize(
    ("x", "noise", "argument"),
    [
        (torch.zeros(3, 4, dtype=torch.int64), torch.randn(4, 5), "x"),
        (torch.zeros(3, 4), torch.randn(5, 4), "noise"),
        (torch.zeros(3, 4), torch.randn(4), "noise"),
    ],
)
def test_what_is_no_states(x, noise, argument):
    with raises(DataError, argument):
        SIGReg(SIGRegConfig(slices=4)).compute(x, noise)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (3, 4, 12)),
        ({"t_max": 5.0, "points": 9, "slices": 31, "coefficient": 0.5}, (5, 12)),
        ({"points": 2, "slices": 1}, (12,)),
    ],
)
def test_equals_the_published(regularizers, options, shape):
    ours, theirs = regularizers(**options)
    assert ours.state_dict().keys() == theirs.state_dict().keys() == {"t", "phi", "weights"}
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())
    noise, x = torch.randn(12, ours.config.slices), torch.randn(shape, requires_grad=True)
    one, other = ours.compute(x, noise), theirs.compute(x, noise)
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(one, x), torch.autograd.grad(other, x), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_same_directions_of_the_same_seed(regularizers, dtype):
    ours, theirs = regularizers()
    x = torch.randn(7, 12).to(dtype)
    torch.manual_seed(4)
    one, after = ours(x), torch.rand(1)
    torch.manual_seed(4)
    noise = torch.randn(12, 256, dtype=dtype)
    assert torch.equal(torch.rand(1), after)
    torch.testing.assert_close(one, ours.compute(x, noise))
    if dtype == torch.float32:
        torch.manual_seed(4)
        torch.testing.assert_close(one, theirs(x), atol=1e-6, rtol=1e-5)
    assert one.dtype == torch.promote_types(dtype, torch.float32)


def test_autocast_changes_no_number():
    regularizer, x, noise = SIGReg(SIGRegConfig()), torch.randn(50, 8), torch.randn(8, 256)
    expected = regularizer.compute(x, noise)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(regularizer.compute(x, noise), expected)


def test_sees_norms_and_no_collapse():
    torch.manual_seed(0)
    per_token, over_samples = SIGReg(SIGRegConfig(coefficient=1.0)), OverSamples(256)
    states = torch.nn.functional.layer_norm(torch.randn(300, 32), (32,))
    # States that are all equal score as one of them does, and that on average as states that differ.
    collapsed = torch.stack([per_token(state.expand(4, -1)) for state in states]).mean()
    assert float(collapsed / per_token(states)) == pytest.approx(1, abs=0.25)
    assert over_samples(states[:1].expand(300, -1)) > 100 * over_samples(states)
    assert per_token(2 * states) > 10 * per_token(states)
