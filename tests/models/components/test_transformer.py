"""The stack of layers: whatever way it takes, the numbers are those of the plain one."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from scforge.errors import OptionError
from scforge.models._utils import init_weights
from scforge.models.components import TransformerConfig, TransformerStack
from scforge.models.components import transformer as module
from scforge.models.components.attention import KeyValueCache, generate_causal_mask
from scforge.testing import raises

BATCH, SEQ, HIDDEN = 9, 20, 16
LENGTHS = torch.tensor([20, 19, 18, 11, 10, 3, 1, 0, 20])
RIGHT = torch.arange(SEQ) < LENGTHS[:, None]
MASKS = {"right": RIGHT, "left": RIGHT.flip(1), "all": torch.ones(BATCH, SEQ).bool()}
MASKS["scattered"] = torch.rand(BATCH, SEQ, generator=torch.Generator().manual_seed(4)) < 0.6
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
either = pytest.mark.parametrize("causal", [False, True])
options_of_stacks = pytest.mark.parametrize("options", [{}, {"rotary": True, "norm_first": False}], ids=str)


def make(**options) -> TransformerStack:
    torch.manual_seed(0)
    return TransformerStack(TransformerConfig(HIDDEN, 3, 4, **options)).apply(init_weights).eval()


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(BATCH, SEQ, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[2**40, 1_000], ids=["at once", "in slices"])
def cpu_numbers(request, monkeypatch) -> None:
    monkeypatch.setattr(module, "_CPU_NUMBERS", request.param)


def reference(stack: TransformerStack, hidden: torch.Tensor, mask: torch.Tensor, causal: bool, bias) -> torch.Tensor:
    """Run cell by cell, token by token of it alone, with attention written out."""
    out = torch.zeros_like(hidden)
    for cell in range(len(hidden)):
        x = hidden[cell][mask[cell]]
        if not len(x):
            continue
        added = torch.zeros(len(x), len(x)) if bias is None else bias[cell][mask[cell]].expand(len(x), -1)
        if causal:
            added = added + generate_causal_mask(len(x))
        for layer in stack.layers:

            def attend(states, layer=layer, added=added):
                q, k, v = layer.attention.qkv(states).unflatten(-1, (3, 4, -1)).permute(1, 2, 0, 3)
                weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + added).softmax(-1)
                return layer.attention.out((weights @ v).transpose(0, 1).flatten(1))

            def feed(states, layer=layer):
                return layer.ffn_out(layer.activation(layer.ffn_in(states)))

            if layer.norm_first:
                x = x + attend(layer.norm_attention(x))
                x = x + feed(layer.norm_ffn(x))
            else:
                x = layer.norm_attention(x + attend(x))
                x = layer.norm_ffn(x + feed(x))
        out[cell, mask[cell]] = stack.final_norm(x)
    return out


@every_mask
@either
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("unpad", [None, True, False])
def test_each_cell_is_computed_as_if_alone(hidden, cpu_numbers, mask, causal, biased, norm_first, unpad):
    stack = make(unpad=unpad, norm_first=norm_first)
    bias = torch.rand(BATCH, SEQ) if biased else None
    out = stack(hidden, mask, causal=causal, attention_bias=bias).hidden
    expected = reference(stack, hidden, mask, causal, bias)
    assert out.isfinite().all()
    torch.testing.assert_close(out[mask], expected[mask], atol=1e-5, rtol=1e-5)


@either
@options_of_stacks
def test_one_row_of_tokens(hidden, monkeypatch, causal, options):
    """The way of CUDA, with its kernel replaced by one that is written out."""
    calls = []

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        assert cu_seq_q.dtype == torch.int32
        assert cu_seq_q is cu_seq_k
        assert (max_q, max_k) == (20, 20)
        calls.append(query.shape)
        cells = zip(*(x.split(cu_seq_q.diff().tolist()) for x in (query, key, value)), strict=True)
        attend, causal = nn.functional.scaled_dot_product_attention, window_size == (-1, 0)
        parts = [attend(*(x.transpose(0, 1) for x in cell), is_causal=causal) for cell in cells]
        return torch.cat([part.transpose(0, 1) for part in parts])

    expected = make(unpad=False, **options)(hidden, RIGHT, causal=causal).hidden
    from torch.nn.attention import varlen

    signature = inspect.signature(varlen.varlen_attn).parameters
    assert list(signature)[:7] == list(inspect.signature(varlen_attn).parameters)[:7]
    assert signature["window_size"].default == (-1, -1)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(module, "_has_varlen_kernel", lambda hidden, head_dim: True)
    out = make(**options)(hidden, RIGHT, causal=causal, output_hidden_states=True)
    assert calls == [(int(RIGHT.sum()), 4, 4)] * 3
    torch.testing.assert_close(out.hidden[RIGHT], expected[RIGHT], atol=1e-5, rtol=1e-5)
    assert [state.shape for state in out.hidden_states] == [hidden.shape] * 3


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "capability", "has"),
    [
        ("cuda", "bfloat16", 64, (8, 0), True),
        ("cuda", "float16", 32, (9, 0), True),
        ("cpu", "bfloat16", 64, (8, 0), False),
        ("cuda", "float32", 64, (8, 0), False),
        ("cuda", "bfloat16", 12, (8, 0), False),
        ("cuda", "float16", 64, (7, 5), False),
    ],
)
def test_which_kernel(monkeypatch, device, dtype, head_dim, capability, has):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    fake = SimpleNamespace(device=torch.device(device), dtype=getattr(torch, dtype))
    assert module._has_varlen_kernel(fake, head_dim) is has


@options_of_stacks
def test_cached_tokens_are_those_of_one_pass(hidden, options):
    stack = make(**options)
    whole = stack(hidden, RIGHT, causal=True).hidden
    for sizes in ([5] + [1] * 15, [1] * 20, [7, 6, 7]):
        cache, parts = KeyValueCache(), []
        for x, mask in zip(hidden.split(sizes, dim=1), RIGHT.split(sizes, dim=1), strict=True):
            parts.append(stack(x, mask, cache=cache).hidden)
        assert cache.length == SEQ
        torch.testing.assert_close(torch.cat(parts, dim=1)[RIGHT], whole[RIGHT], atol=1e-5, rtol=1e-5)


@either
@every_mask
def test_attention_weights_are_those_that_mix(hidden, mask, causal):
    stack = make()
    out = stack(hidden, mask, causal=causal, output_attentions=True)
    assert [weights.shape for weights in out.attentions] == [(BATCH, 4, SEQ, SEQ)] * 3
    torch.testing.assert_close(out.hidden[mask], stack(hidden, mask, causal=causal).hidden[mask], atol=1e-5, rtol=1e-5)
    weights, layer = out.attentions[0], stack.layers[0]
    normed = layer.norm_attention(hidden)
    value = layer.attention.qkv(normed).unflatten(-1, (3, 4, -1))[:, :, 2].transpose(1, 2)
    mixed = layer.attention.out((weights @ value).transpose(1, 2).flatten(2))
    allowed = mask[:, None, None, :] & (torch.ones(SEQ, SEQ).tril().bool() if causal else torch.ones(SEQ, SEQ).bool())
    torch.testing.assert_close(mixed[mask], layer.attention(normed, allowed)[mask], atol=1e-5, rtol=1e-5)
    rows = weights.sum(dim=-1).movedim(1, 2)[mask]
    torch.testing.assert_close(rows, torch.ones_like(rows))
    assert not weights.movedim(3, 1).movedim(3, 2)[~mask].any()


def test_rotary_positions_are_relative(hidden):
    stack = make(rotary=True)
    shifted = nn.functional.pad(hidden, (0, 0, 3, 0))
    mask = nn.functional.pad(torch.ones(BATCH, SEQ), (3, 0))
    torch.testing.assert_close(stack(shifted, mask).hidden[:, 3:], stack(hidden).hidden, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(stack(hidden.flip(1)).hidden.flip(1), stack(hidden).hidden, atol=1e-3)
    plain = make()
    torch.testing.assert_close(plain(hidden.flip(1)).hidden.flip(1), plain(hidden).hidden, atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_changes_no_number(hidden):
    gradients, n_calls = [], []
    for checkpointing in (False, True):
        stack = make(gradient_checkpointing=checkpointing, dropout=0.3).train()
        calls = []
        stack.layers[0].ffn_in.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(3)
        stack(hidden, RIGHT).hidden[RIGHT].square().sum().backward()
        gradients.append([p.grad for p in stack.parameters()])
        n_calls.append(len(calls))
    assert n_calls[1] == 2 * n_calls[0]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two)


def test_bad_arguments(hidden):
    for given in (torch.ones(BATCH, SEQ - 1), torch.ones(1, SEQ)):
        with pytest.raises(OptionError, match=r"attention_mask has shape \(.*but input_ids has shape \(9, 20\)"):
            make()(hidden, given)
        with pytest.raises(OptionError, match="attention_bias has shape"):
            make()(hidden, attention_bias=given)
    with raises(OptionError, "cache"):
        make()(hidden, cache=KeyValueCache(), output_attentions=True)
    sizes = {"num_layers": 0, "num_heads": 0, "hidden_dim": -8, "ffn_dim": 0, "layer_norm_eps": -1.0}
    switches = dict.fromkeys(("unpad", "norm_first", "gradient_checkpointing", "rotary"), "yes")
    for name, value in {**sizes, **switches}.items():
        with pytest.raises(OptionError, match=f"{name}={value!r}"):
            TransformerConfig(**{"hidden_dim": 8, "num_layers": 1, "num_heads": 2, name: value})
    with raises(OptionError, "position_embedding"):
        TransformerConfig(6, 1, 2, rotary=True)
