import pytest
import torch

from scforge.models import TransformerEncoder
from scforge.models.components import SelfAttention, TransformerConfig
from scforge.models.components.attention import attention_mask_of

LENGTHS = torch.tensor([7, 5, 2])
MASK = torch.arange(7) < LENGTHS[:, None]
IDS = torch.randint(4, 50, (3, 7), generator=torch.Generator().manual_seed(0)) * MASK
VALUES = torch.rand(3, 7, generator=torch.Generator().manual_seed(1)) * MASK
BIAS = torch.randn(3, 7, generator=torch.Generator().manual_seed(2)) * MASK


def make(**options) -> TransformerEncoder:
    torch.manual_seed(0)
    return TransformerEncoder(50, 16, 2, 4, pooling="mean", **options).eval()


def test_scores_by_the_formula():
    attention = SelfAttention(TransformerConfig(16, 1, 4))
    hidden = torch.randn(3, 7, 16)
    q, k, v = attention.qkv(hidden).view(3, 7, 3, 4, 4).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT / 2 + BIAS[:, None, None, :]
    weights = scores.masked_fill(~MASK[:, None, None, :], -torch.inf).softmax(dim=-1)
    expected = attention.out((weights @ v).transpose(1, 2).reshape(3, 7, 16))
    torch.testing.assert_close(attention(hidden, attention_mask_of(MASK, bias_bt=BIAS)), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_constant_bias_is_none(dtype):
    model = make()
    with torch.no_grad():
        for mask in (MASK, MASK.long(), torch.ones(3, 7)):
            plain = model(IDS, mask, VALUES)
            for bias in (torch.zeros(3, 7, dtype=dtype), torch.full((3, 7), 5, dtype=dtype)):
                other = model(IDS, mask, VALUES, attention_bias=bias)
                torch.testing.assert_close(other.logits[mask > 0], plain.logits[mask > 0], atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(other.embeddings, plain.embeddings)
            biased = model.encode(IDS, mask, VALUES, attention_bias=3 * BIAS)
            assert (biased - plain.embeddings).abs().max() > 1e-3
    assert attention_mask_of(None) is None
    assert torch.equal(attention_mask_of(MASK), MASK[:, None, None, :])
    torch.testing.assert_close(attention_mask_of(None, bias_bt=BIAS), BIAS[:, None, None, :])


@pytest.mark.parametrize("at_padding", [1e4, -1e4, float("nan")])
def test_padding_stays_excluded(at_padding):
    model = make()
    bias = BIAS.masked_fill(~MASK, at_padding)
    with torch.no_grad():
        expected = model.encode(IDS, MASK, VALUES, attention_bias=BIAS)
        torch.testing.assert_close(model.encode(IDS, MASK, VALUES, attention_bias=bias), expected)
        for i, length in enumerate(LENGTHS.tolist()):
            cut = [tensor[i : i + 1, :length] for tensor in (IDS, MASK, VALUES)]
            alone = model.encode(*cut, attention_bias=bias[i : i + 1, :length])
            torch.testing.assert_close(alone, expected[i : i + 1], atol=1e-6, rtol=1e-4)
