import pytest
import torch

from scforge.models.components.transformer import Dropout


@pytest.mark.parametrize("p", [0.1, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_share_and_scale(p, dtype):
    torch.manual_seed(0)
    x = torch.ones(1001, 1003, dtype=dtype, requires_grad=True)
    y = Dropout(p)(x)
    assert y.dtype == dtype
    dropped = y == 0
    assert abs(dropped.float().mean().item() - p) < 3e-3
    assert y[~dropped].unique().numel() == 1
    assert float(y.detach().max()) == pytest.approx(1 / (1 - p), rel=1e-2)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    # Neighbors are drawn from the same 64 bits.
    rate = dropped.float()
    both = (rate[:, :-1] * rate[:, 1:]).mean()
    assert float(both) == pytest.approx(p * p, abs=4e-3)


def test_evaluation_extremes_and_shapes():
    x = torch.randn(20)
    before = x.clone()
    assert not torch.equal(Dropout(0.5)(x), x)
    assert torch.equal(x, before)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert not Dropout(1.0)(x).any()
    for shape in ((), (1,), (0, 4), (2, 3, 5)):
        assert Dropout(0.5)(torch.ones(shape)).shape == shape
