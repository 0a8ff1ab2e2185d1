import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scforge.models.components import MaskedGenePredictionHead
from scforge.models.components import cross_entropy as module
from scforge.models.components.cross_entropy import linear_cross_entropy

M, H, V = 37, 8, 50


def parts(dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(M, H), (V, H), (V,)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


LABELS = torch.randint(0, V, (M,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("numbers", [1, 7 * V, 10**6])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_loss_and_gradients_are_those_of_cross_entropy(monkeypatch, numbers, with_bias, frozen):
    monkeypatch.setitem(module._NUMBERS, "cpu", numbers)
    results = []
    for loss_of in (
        linear_cross_entropy,
        lambda hidden, *head: F.cross_entropy(F.linear(hidden, *head[:-1]), head[-1]),
    ):
        hidden, weight, bias = parts()
        bias = bias if with_bias else None
        if frozen is not None:
            (hidden, weight)[frozen].requires_grad_(False)
        loss = loss_of(hidden, weight, bias, LABELS)
        (3 * loss).backward()
        learning = [x for x in (hidden, weight, bias) if x is not None and x.requires_grad]
        results.append([loss.detach(), *(x.grad for x in learning)])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


def test_large_logits_without_gradients():
    large = [1e4 * x.detach() for x in parts()]
    loss = linear_cross_entropy(*large, LABELS)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(*large), LABELS))
    assert not loss.requires_grad


def test_precision():
    hidden, weight, bias = parts()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, bias, LABELS)
    loss.backward()
    assert loss.dtype == weight.grad.dtype == hidden.grad.dtype == torch.float32
    exact = parts()
    F.cross_entropy(F.linear(*exact), LABELS).backward()
    torch.testing.assert_close(weight.grad, exact[1].grad, atol=2e-3, rtol=0.05)
    hidden, weight, bias = parts(torch.bfloat16)
    linear_cross_entropy(hidden, weight, bias, LABELS).backward()
    assert weight.grad.dtype == bias.grad.dtype == torch.bfloat16


class TestHead:
    @pytest.mark.parametrize("own_weight", [True, False])
    def test_labels_give_the_loss_of_the_logits(self, own_weight):
        head = MaskedGenePredictionHead(H, V, own_weight=own_weight)
        weight = () if own_weight else (torch.randn(V, H),)
        hidden = torch.randn(M, H)
        expected = F.cross_entropy(head(hidden, *weight), LABELS)
        torch.testing.assert_close(head(hidden, *weight, labels=LABELS), expected)
        assert own_weight is any("decoder.weight" in name for name in head.state_dict())
        head.init_bias(torch.arange(V))
        bias = head.decoder.bias if own_weight else head.bias
        torch.testing.assert_close(bias.exp().sum(), torch.tensor(1.0))

    def test_a_wrapped_or_hooked_decoder_is_called(self):
        class Doubled(nn.Linear):
            def forward(self, x):
                return 2 * super().forward(x)

        head, hidden = MaskedGenePredictionHead(H, V), torch.randn(M, H)
        head.decoder = Doubled(H, V)
        torch.testing.assert_close(head(hidden, labels=LABELS), F.cross_entropy(head(hidden), LABELS))
        head = MaskedGenePredictionHead(H, V)
        seen = []
        head.decoder.register_forward_hook(lambda *_: seen.append(1))
        head(hidden, labels=LABELS)
        assert seen
