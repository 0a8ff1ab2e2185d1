import pytest
import torch
from torch.nn import functional as F

from scforge.errors import DataError, OptionError
from scforge.soma.v1.torch.modules.attention import MultiHeadAttention, apply_rope


@pytest.mark.parametrize(("scale_factor", "max_wavelength"), [(1.0, 10_000), (4.0, 50.0)])
def test_rope_equals_the_published(published, scale_factor, max_wavelength):
    x, places = torch.randn(2, 9, 3, 8, requires_grad=True), torch.randint(0, 3000, (2, 9))
    options = {"head_dim": 8, "max_wavelength": max_wavelength, "scale_factor": scale_factor}
    ours, theirs = (function(x, places, **options) for function in (apply_rope, published.apply_rope))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    slope = torch.randn_like(x)
    found, wanted = (torch.autograd.grad(result, x, slope) for result in (ours, theirs))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def test_rope_of_16_bits_tells_far_places_apart():
    x = torch.randn(1, 1, 1, 64).bfloat16().expand(1, 2, 1, 64)
    turned = apply_rope(x, torch.tensor([[1000, 1001]]), 64)
    assert turned.dtype == torch.bfloat16
    assert not torch.equal(turned[:, 0], turned[:, 1])


@pytest.mark.parametrize(("use_bias", "placed"), [(True, True), (False, False)])
def test_attention_equals_the_published(published, use_bias, placed):
    options = {"use_bias": use_bias, "max_wavelength": 300.0, "scale_factor": 1.5}
    ours, theirs = MultiHeadAttention(4, 16, **options), published.MultiHeadAttention(4, 16, **options)
    ours.load_state_dict(theirs.state_dict())
    x, places = torch.randn(2, 33, 16), torch.randint(0, 999, (2, 33)) if placed else None
    torch.testing.assert_close(ours(x, positions=places), theirs(x, positions=places), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(2, 1, 70, 70), (70, 70), (2, 1, 1, 70)])
def test_masks_allow_nothing_beyond_the_causal_one(shape):
    attention = MultiHeadAttention(2, 8)
    x, mask = torch.randn(2, 70, 8), torch.rand(shape) < 0.5
    mask[..., 0] = True  # the first token is seen by all
    heads = [
        part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (attention.query, attention.key, attention.value)
    ]
    allowed = (mask & torch.ones(70, 70, dtype=torch.bool).tril()).expand(2, 2, 70, 70)
    expected = F.scaled_dot_product_attention(*heads, attn_mask=allowed).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(x, mask=mask), attention.output(expected), atol=1e-6, rtol=0)
    torch.testing.assert_close(attention(x, mask=torch.ones_like(mask)), attention(x), atol=1e-6, rtol=0)


X = torch.randn(2, 5, 16)
NO_MASK = r"mask has dtype .* broadcasts to \(2, 2, 5, 5\)"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MultiHeadAttention(3, 16), OptionError, "num_features=16 cannot be split into num_heads=3"),
        (lambda: MultiHeadAttention(2, 16, dropout_rate=-0.1), OptionError, "dropout_rate=-0.1"),
        (lambda: apply_rope(X[..., None, :], X[..., 0].long(), 16, scale_factor=0.9), OptionError, "0.9 is below 1"),
        (lambda: MultiHeadAttention(2, 16)(X[..., :8]), DataError, r"inputs has shape \(2, 5, 8\)"),
        (lambda: MultiHeadAttention(2, 16)(X, mask=torch.ones(5, 5)), DataError, NO_MASK),
        (lambda: MultiHeadAttention(2, 16, dropout_rate=0.5)(X, mask=torch.ones(4) > 0), DataError, NO_MASK),
    ],
)
def test_what_cannot_be_used(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, ValueError), "as the published one raises"
