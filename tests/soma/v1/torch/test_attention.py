"""Attention and rotary positions: the published ones, the formula written out, and dropout in blocks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from scforge.errors import DataError, OptionError
from scforge.soma.v1.torch.modules import dropped_attention as blocks
from scforge.soma.v1.torch.modules.attention import MultiHeadAttention, apply_rope
from scforge.soma.v1.torch.modules.dropout import Dropout, keep_scale


@pytest.mark.parametrize("scale_factor", [1.0, 4.0])
@pytest.mark.parametrize("max_wavelength", [10_000, 50.0])
def test_rope_equals_the_published(published, scale_factor, max_wavelength):
    x, places = torch.randn(2, 9, 3, 8), torch.randint(0, 3000, (2, 9))
    options = {"head_dim": 8, "max_wavelength": max_wavelength, "scale_factor": scale_factor}
    torch.testing.assert_close(
        apply_rope(x, places, **options), published.apply_rope(x, places, **options), atol=1e-6, rtol=1e-6
    )


def test_rope_turns_pairs():
    x, places = torch.randn(1, 5, 2, 6, dtype=torch.float64), torch.tensor([[0, 1, 7, 100, 2000]])
    complex_x = torch.complex(x[..., :3], x[..., 3:])
    speed = 100.0 ** (-2 * torch.arange(3, dtype=torch.float64) / 6) / 2
    turned = complex_x * torch.exp(1j * places[..., None, None] * speed)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(apply_rope(x, places, 6, 100.0, 2.0), expected)
    assert torch.equal(apply_rope(x, torch.zeros_like(places), 6), x)


def test_rope_gradient():
    x = torch.randn(1, 3, 1, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, torch.tensor([[0, 3, 50]]), 4), (x,))


def test_rope_of_16_bits_tells_far_places_apart():
    x = torch.randn(1, 1, 1, 64).bfloat16().expand(1, 2, 1, 64)
    turned = apply_rope(x, torch.tensor([[1000, 1001]]), 64)
    assert turned.dtype == torch.bfloat16
    assert not torch.equal(turned[:, 0], turned[:, 1])


def test_rope_refuses_small_scales(published):
    x, places = torch.randn(1, 2, 1, 4), torch.zeros(1, 2, dtype=torch.int64)
    for function in (apply_rope, published.apply_rope):
        with pytest.raises(ValueError, match="scale_factor"):
            function(x, places, 4, scale_factor=0.99)
    with pytest.raises(OptionError, match=r"scale_factor=0\.99 is below 1"):
        apply_rope(x, places, 4, scale_factor=0.99)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("placed", [True, False])
def test_attention_equals_the_published(published, use_bias, placed):
    options = {"use_bias": use_bias, "max_wavelength": 300.0, "scale_factor": 1.5}
    ours, theirs = MultiHeadAttention(4, 16, **options), published.MultiHeadAttention(4, 16, **options)
    ours.load_state_dict(theirs.state_dict())
    x, places = torch.randn(2, 33, 16), torch.randint(0, 999, (2, 33)) if placed else None
    torch.testing.assert_close(ours(x, positions=places), theirs(x, positions=places), atol=1e-5, rtol=0)


def whole(query, key, value, mask, p, seed):
    """Attention in one piece, of what the blocks keep."""
    n = query.shape[2]
    keep = query.new_zeros(*query.shape[:2], n, n)
    for b, rows, _, kept in blocks._blocks(query.detach(), key.detach(), mask, p, seed):
        keep[b, :, rows, : rows.stop] = kept.to(keep.dtype)
    allowed = torch.ones(n, n, dtype=torch.bool).tril() if mask is None else mask
    scores = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(dim=-1) * keep * keep_scale(p)) @ value, keep


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n", [1, 64, 150])
def test_dropout_in_blocks_equals_attention_in_one_piece(masked, n):
    torch.manual_seed(0)
    parts = [torch.randn(2, 3, n, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = None
    if masked:
        mask = torch.rand(2, 1, n, n) < 0.5
        mask = (mask & torch.ones(n, n, dtype=torch.bool).tril()) | torch.eye(n, dtype=torch.bool)
    ours = blocks._DroppedAttention.apply(*parts, mask, 0.25, 7)
    expected, _ = whole(*parts, mask, 0.25, 7)
    torch.testing.assert_close(ours, expected)
    slope = torch.randn_like(ours)
    for one, other in zip(
        torch.autograd.grad(ours, parts, slope), torch.autograd.grad(expected, parts, slope), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_share_that_is_dropped():
    x = torch.randn(1, 4, 200, 8)
    _, keep = whole(x, x, x, None, 0.3, 1)
    below = keep[..., torch.ones(200, 200, dtype=torch.bool).tril()]
    assert float(below.mean()) == pytest.approx(0.7, abs=0.01)
    assert keep_scale(0.3) == pytest.approx(1 / 0.7, rel=1e-4)


def test_attention_with_dropout_has_the_mean_of_attention_without():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
    mean = torch.stack([blocks.dropped_attention(q, k, v, None, 0.2) for _ in range(400)]).mean(dim=0)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert float((mean - expected).abs().mean()) < 0.02
    assert float((mean - expected).mean()) == pytest.approx(0, abs=3e-3)


def test_attention_drops_weights_in_training_only():
    attention = MultiHeadAttention(2, 8, dropout_rate=0.5)
    x = torch.randn(1, 30, 8)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout(p):
    x = torch.ones(700, 701, requires_grad=True)
    y = Dropout(p)(x)
    assert float((y == 0).float().mean()) == pytest.approx(p, abs=3e-3)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert torch.equal(Dropout(p).eval()(x), x)
    assert not Dropout(1.0)(x).any()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3, 16), {}, "num_features=16 is not divisible by num_heads=3"),
        ((2, 16), {"scale_factor": 0.5}, "scale_factor=0.5"),
        ((2, 16), {"dropout_rate": -0.1}, "dropout_rate=-0.1"),
        ((0, 16), {}, "num_heads=0"),
    ],
)
def test_numbers_that_cannot_be_used(arguments, options, message):
    with pytest.raises(OptionError, match=message):
        MultiHeadAttention(*arguments, **options)


def test_states_of_another_width():
    with pytest.raises(DataError, match=r"inputs has shape \(1, 3, 8\)"):
        MultiHeadAttention(2, 16)(torch.randn(1, 3, 8))


@pytest.mark.parametrize("dropout", [0.0, 1e-4])
@pytest.mark.parametrize("shape", [(2, 1, 70, 70), (1, 1, 70, 70), (70, 70), (2, 2, 70, 70), (2, 1, 1, 70)])
def test_masks_allow_nothing_beyond_the_causal_one(dropout, shape, monkeypatch):
    monkeypatch.setattr(blocks, "keep_mask", lambda shape, *_: torch.ones(shape, dtype=torch.bool))
    attention = MultiHeadAttention(2, 8, dropout_rate=dropout)
    x, mask = torch.randn(2, 70, 8), torch.rand(shape) < 0.5
    mask[..., 0] = True  # the first token is seen by all
    before = torch.ones(70, 70, dtype=torch.bool).tril()
    found = attention(x, mask=mask)
    heads = [
        part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (attention.query, attention.key, attention.value)
    ]
    allowed = (mask & before).expand(2, 2, 70, 70)
    expected = F.scaled_dot_product_attention(*heads, attn_mask=allowed).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found, attention.output(expected), atol=1e-3 if dropout else 1e-6, rtol=0)
    everything = torch.ones(shape, dtype=torch.bool)
    torch.testing.assert_close(attention(x, mask=everything), attention(x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("mask", [torch.ones(5, 5), torch.ones(3, 1, 5, 5, dtype=torch.bool), torch.ones(4) > 0])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_is_no_mask(mask, dropout):
    with pytest.raises(DataError, match=r"mask has dtype .* broadcasts to \(2, 2, 5, 5\)"):
        MultiHeadAttention(2, 8, dropout_rate=dropout)(torch.randn(2, 5, 8), mask=mask)
