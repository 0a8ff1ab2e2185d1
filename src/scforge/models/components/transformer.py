"""Transformer blocks, attention without padding, and dropout that is fast on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as cached
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scforge.errors import OptionError
from scforge.models.components.attention import (
    KeyValueCache,
    SelfAttention,
    attention_mask_of,
    check_shapes,
    rotation_of,
    token_positions,
)
from scforge.models.components.config import ACTIVATIONS, GATED, NORMS, TransformerConfig

_WORTH = 0.95
"""Fraction of positions that are tokens above which padding is kept."""
_SHORTEST = 0.875
"""Minimum length of cells in a group, as a fraction of the length of its longest cell."""

_STEPS = 2**16
"""Number of steps into which probabilities are divided."""

_CPU_NUMBERS = 2**21
"""Number of values in the widest layer that a CPU processes at a time. Inputs of the next layer are then still in its
cache, and memory is reused instead of being requested from the system (which clears it first) for each layer."""

_WIDE = 512
"""Layer width above which a CPU trades time for memory."""


@dataclass(frozen=True)
class Group:
    """Cells that are computed together, at `longest` positions each; `tokens`, (b, s), is None if all are tokens."""

    n_cells: int
    longest: int
    tokens: torch.Tensor | None


@dataclass(frozen=True)
class Packing:
    """Positions of the tokens of a batch of `shape` (B, S) in a packed layout of groups of cells.

    `index` contains the index in the flattened batch of each packed position, int64, (P,), and is None if the groups
    contain the cells in their original order. If all padding is removed, `ends` contains the boundaries of the cells,
    int32, (B + 1,), starting at 0, and the maximum number of tokens per cell.
    """

    shape: tuple[int, int]
    groups: tuple[Group, ...]
    index: torch.Tensor | None = None
    ends: tuple[torch.Tensor, int] | None = None

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """Select the entries at tokens: from shape (B, S, ...) to (P, ...)."""
        flat = padded.flatten(0, 1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Restore entries to their positions: from shape (P, ...) to (B, S, ...), with zeros elsewhere."""
        if self.index is not None:
            padded = packed.new_zeros((self.shape[0] * self.shape[1], *packed.shape[1:]))
            packed = padded.index_copy(0, self.index, packed)
        return packed.unflatten(0, self.shape)

    def split(self, padded: torch.Tensor) -> list[torch.Tensor]:
        """Split entries by group: from shape (B, S, ...) to (b, s, ...) for each group."""
        sizes = [group.n_cells * group.longest for group in self.groups]
        parts = self.pack(padded).split(sizes)
        return [part.unflatten(0, (g.n_cells, g.longest)) for part, g in zip(parts, self.groups, strict=True)]


def pack_cells(
    shape: tuple[int, int],
    tokens_bs: torch.Tensor | None,
    unpad: bool | None = None,
    *,
    exact: bool = False,
    most: int | None = None,
) -> Packing | None:
    """Plan the packing of a batch of shape (B, S), or return None if the padded batch is faster.

    Padding is removed if it exceeds a twentieth of the positions; if `unpad` is True, always, and if False, never.
    Cells are then in groups of similar length, or, if `exact`, in one row, for kernels that take the boundaries of
    cells. `most` is the maximum number of positions per group, which contains at least one cell.
    """
    batch, seq = shape
    lengths = [seq] * batch if tokens_bs is None else tokens_bs.sum(dim=1).tolist()
    share = sum(lengths) / max(1, batch * seq)
    if tokens_bs is not None and unpad is not False and 0 < share <= (1.0 - 1e-12 if unpad else _WORTH):
        if not exact:
            return _by_length(tokens_bs, lengths, most)
        index = tokens_bs.flatten().nonzero().squeeze(1)
        ends = F.pad(tokens_bs.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)
        return Packing(shape, (Group(1, len(index), None),), index, (ends, max(lengths)))
    if most is None or batch * seq <= most:
        return None
    step, groups = max(1, most // max(1, seq)), []
    for start in range(0, batch, step):
        chunk = lengths[start : start + step]
        whole = tokens_bs is None or min(chunk) == seq
        groups.append(Group(len(chunk), seq, None if whole or tokens_bs is None else tokens_bs[start : start + step]))
    return Packing(shape, tuple(groups))


def _by_length(tokens_bs: torch.Tensor, lengths: list[int], most: int | None) -> Packing:
    """Group cells of similar length."""
    batch, seq = tokens_bs.shape
    device = tokens_bs.device
    # The tokens of each cell in their order, then its padding.
    place_bs = torch.argsort((~tokens_bs).to(torch.uint8), dim=1, stable=True)
    place_bs = place_bs + seq * torch.arange(batch, device=device).unsqueeze(1)
    order = sorted((cell for cell in range(batch) if lengths[cell]), key=lambda cell: -lengths[cell])
    places, groups, start = [], [], 0
    while start < len(order):
        longest = lengths[order[start]]
        limit = len(order) if most is None else start + max(1, most // longest)
        stop = start + 1
        while stop < min(limit, len(order)) and lengths[order[stop]] >= _SHORTEST * longest:
            stop += 1
        cells = order[start:stop]
        places.append(place_bs[torch.tensor(cells, device=device), :longest].flatten())
        tokens = None
        if lengths[cells[-1]] < longest:
            ends = torch.tensor([lengths[cell] for cell in cells], device=device)
            tokens = torch.arange(longest, device=device) < ends.unsqueeze(1)
        groups.append(Group(len(cells), longest, tokens))
        start = stop
    return Packing((batch, seq), tuple(groups), torch.cat(places))


class _CpuDropout(torch.autograd.Function):
    """Dropout that samples 16 bits per number; torch samples a double in one thread, which is much slower."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float) -> torch.Tensor:
        bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        keep = (bits.view(torch.int16)[: x.numel()] >= round(p * _STEPS) - _STEPS // 2).view(x.shape)
        ctx.save_for_backward(keep)
        ctx.scale = 1.0 / (1.0 - round(p * _STEPS) / _STEPS)
        return (x * keep).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (keep,) = ctx.saved_tensors
        return (grad * keep).mul_(ctx.scale), None


class Dropout(nn.Dropout):
    """A version of ``nn.Dropout`` that is several times faster on a CPU.

    On a CPU, the probability is rounded to a multiple of 2^-16.

    Parameters
    ----------
    p
        Probability that a number is set to zero; the other numbers are divided by ``1 - p``.
    inplace
        Whether to overwrite the input, in which case ``nn.Dropout`` itself is used.

    Examples
    --------
    >>> import torch
    >>> dropout = Dropout(0.5)
    >>> sorted(set(dropout(torch.ones(1000)).tolist()))
    [0.0, 2.0]
    >>> dropout.eval()(torch.ones(3)).tolist()
    [1.0, 1.0, 1.0]
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`; in training, a fraction `p` of its values is set to zero and the other values are scaled up."""
        fast = x.device.type == "cpu" and round(self.p * _STEPS) not in (0, _STEPS) and not self.inplace
        fast = fast and not torch.compiler.is_compiling()
        if self.training and fast:
            return _CpuDropout.apply(x, self.p)
        return super().forward(x)


class StackOutput(NamedTuple):
    """Output of a stack of layers.

    ``hidden`` contains the states of the tokens after the final norm, (B, S, H), finite but meaningless at padding.
    ``hidden_states`` contains the states after each layer, the last of which equal `hidden`. ``attentions`` contains
    the attention weights of each layer, float32, (B, N, S, S), with queries first. The last two are None unless
    requested.
    """

    hidden: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class TransformerBlock(nn.Module):
    """Transformer layer: attention and feed-forward layer, each with a norm and a residual connection.

    Parameters
    ----------
    config
        Options, see :class:`TransformerConfig`.

    Examples
    --------
    >>> import torch
    >>> block = TransformerBlock(TransformerConfig(8, num_layers=1, num_heads=2, activation="swiglu", bias=False))
    >>> block(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden_dim, inner_dim, norm = config.hidden_dim, config.inner_dim, NORMS[config.norm]
        gated = config.activation == GATED
        self.activation = _gate if gated else ACTIVATIONS[config.activation]
        self.norm_first = config.norm_first
        self.norm_attention = norm(hidden_dim, eps=config.layer_norm_eps)
        self.attention = SelfAttention(config)
        self.norm_ffn = norm(hidden_dim, eps=config.layer_norm_eps)
        self.ffn_in = nn.Linear(hidden_dim, 2 * inner_dim if gated else inner_dim, bias=config.bias)
        self.ffn_out = nn.Linear(inner_dim, hidden_dim, bias=config.bias)
        self.dropout = Dropout(config.dropout)
        # The wider the layers, the smaller its relative cost, and the more it saves.
        self.saves_memory = hidden_dim >= _WIDE

    def forward(
        self,
        hidden_bsh: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
        rotation: torch.Tensor | None = None,
        cache: tuple[KeyValueCache, int] | None = None,
        cells: tuple[torch.Tensor, int] | None = None,
    ) -> torch.Tensor:
        """Return the states of the next layer, shape (B, S, H).

        For `hidden_bsh`, `mask`, `causal`, `rotation` and `cache`, see :meth:`SelfAttention.forward`. With `cells`,
        which contains `ends` and `longest` of :meth:`SelfAttention.packed`, the states are packed, (P, H).
        """

        def attend(states: torch.Tensor) -> torch.Tensor:
            if cells is not None:
                return self.attention.packed(states, *cells, causal=causal, rotation=rotation)
            return self.attention(states, mask, causal=causal, rotation=rotation, cache=cache)

        if self.norm_first:
            hidden_bsh = hidden_bsh + self.dropout(attend(self.norm_attention(hidden_bsh)))
            return hidden_bsh + self.dropout(self._feed_forward(self.norm_ffn(hidden_bsh)))
        hidden_bsh = self.norm_attention(hidden_bsh + self.dropout(attend(hidden_bsh)))
        return self.norm_ffn(hidden_bsh + self.dropout(self._feed_forward(hidden_bsh)))

    def _feed_forward(self, hidden_bsh: torch.Tensor) -> torch.Tensor:
        inner = self.ffn_in(hidden_bsh)
        if self.saves_memory and self.training and torch.is_grad_enabled() and inner.device.type == "cpu":
            # A quarter of what a layer would keep for the backward pass is cheap to compute again.
            return checkpoint(self._from_inner, inner, use_reentrant=False)
        return self._from_inner(inner)

    def _from_inner(self, inner_bsf: torch.Tensor) -> torch.Tensor:
        return self.ffn_out(self.dropout(self.activation(inner_bsf)))

    def attention_weights(
        self,
        hidden_bsh: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
        rotation: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention weights for input states, float32, shape (B, N, S, S).

        For `hidden_bsh`, `mask`, `causal` and `rotation`, see :meth:`forward`.
        """
        states = self.norm_attention(hidden_bsh) if self.norm_first else hidden_bsh
        return self.attention.weights(states, mask, causal=causal, rotation=rotation)


def _gate(inner: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * inner``, shape (..., F), from a tensor that contains both, shape (..., 2 F)."""
    gate, inner = inner.chunk(2, dim=-1)
    return F.silu(gate) * inner


class TransformerStack(nn.Module):
    """A stack of transformer layers, with a final norm after pre-norm layers.

    The cost of padding is low. Cells are sorted into groups of similar length, which run one after the other, each
    padded to its longest cell. On CUDA, in half precision and without an attention bias, all tokens are in one row
    without padding. The output at tokens is the same except for rounding.

    Parameters
    ----------
    config
        Options, see :class:`TransformerConfig`.

    Examples
    --------
    >>> stack = TransformerStack(TransformerConfig(hidden_dim=8, num_layers=2, num_heads=2))
    >>> stack(torch.randn(3, 5, 8), torch.ones(3, 5)).hidden.shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        has_final_norm = config.norm_first if config.final_norm is None else config.final_norm
        norm = NORMS[config.norm]
        self.final_norm = norm(config.hidden_dim, eps=config.layer_norm_eps) if has_final_norm else nn.Identity()
        self.head_dim = config.head_dim
        self.rotary = config.rotary
        # Training may set these two.
        self.gradient_checkpointing = config.gradient_checkpointing
        self.unpad = config.unpad
        self._widest = max(config.inner_dim, 3 * config.hidden_dim)

    def forward(
        self,
        hidden_bsh: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
        attention_bias: torch.Tensor | None = None,
        cache: KeyValueCache | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> StackOutput:
        """Run all layers.

        Parameters
        ----------
        hidden_bsh
            Embedded tokens, shape (B, S, H).
        attention_mask
            Nonzero for tokens, in any order, bool, int or float, shape (B, S). If None, all positions are tokens.
        causal
            Whether each token attends only to tokens up to itself.
        attention_bias
            Values to add to the attention scores of each token as a key, shape (B, S).
        cache
            Keys and values of earlier tokens. The new tokens attend to them, and causally to each other.
        output_hidden_states, output_attentions
            Whether to return the states after each layer, and the attention weights, whose memory grows quadratically
            with S.
        """
        check_shapes(hidden_bsh.shape[:2], attention_mask=attention_mask, attention_bias=attention_bias)
        batch, seq = hidden_bsh.shape[:2]
        tokens_bs = None if attention_mask is None else attention_mask != 0
        if cache is not None:
            if attention_bias is not None or output_hidden_states or output_attentions:
                raise OptionError(
                    "does not work with attention_bias, output_hidden_states or output_attentions; omit these "
                    "arguments.",
                    argument="cache",
                )
            if tokens_bs is None:
                tokens_bs = torch.ones((batch, seq), dtype=torch.bool, device=hidden_bsh.device)
            tokens_bt = cache.add_tokens(tokens_bs)
            positions_bs = token_positions(tokens_bt)[:, -seq:] if self.rotary else None
            return StackOutput(self._run(hidden_bsh, tokens_bt, positions_bs, causal=seq > 1, cache=cache)[-1])
        positions_bs = packing = None
        if self.rotary:
            everywhere = torch.ones((batch, seq), dtype=torch.bool, device=hidden_bsh.device)
            positions_bs = token_positions(everywhere if tokens_bs is None else tokens_bs)
        if not output_attentions and not torch.compiler.is_compiling():
            most = max(1, _CPU_NUMBERS // self._widest) if hidden_bsh.device.type == "cpu" else None
            exact = attention_bias is None and _has_varlen_kernel(hidden_bsh, self.head_dim)
            packing = pack_cells((batch, seq), tokens_bs, self.unpad, exact=exact, most=most)
        attentions: list[torch.Tensor] | None = [] if output_attentions else None
        keep = output_hidden_states
        if packing is None:
            whole = (hidden_bsh, tokens_bs, positions_bs, attention_bias)
            states = self._run(*whole, causal=causal, keep=keep, attentions=attentions)
        elif packing.ends is None:
            nothing = [None] * len(packing.groups)
            positions = nothing if positions_bs is None else packing.split(positions_bs)
            biases = nothing if attention_bias is None else packing.split(attention_bias)
            parts = []
            for group, part, places, bias in zip(
                packing.groups, packing.split(hidden_bsh), positions, biases, strict=True
            ):
                # Where tokens were concatenated, padding follows them, and a causal mask hides it.
                tokens = None if causal and packing.index is not None else group.tokens
                parts.append(self._run(part, tokens, places, bias, causal=causal, keep=keep))
            layers = zip(*parts, strict=True)
            states = tuple(packing.unpack(torch.cat([part.flatten(0, 1) for part in layer])) for layer in layers)
        else:
            positions_p = None if positions_bs is None else packing.pack(positions_bs)
            row = self._run(packing.pack(hidden_bsh), None, positions_p, causal=causal, keep=keep, cells=packing.ends)
            states = tuple(packing.unpack(state) for state in row)
        return StackOutput(states[-1], states if keep else None, None if attentions is None else tuple(attentions))

    def _run(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor | None,
        positions: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        *,
        causal: bool,
        keep: bool = False,
        attentions: list[torch.Tensor] | None = None,
        cache: KeyValueCache | None = None,
        cells: tuple[torch.Tensor, int] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run all layers; return the states after each layer, or only the last states without `keep`."""
        rotation = None if positions is None else rotation_of(positions, self.head_dim)
        mask = attention_mask_of(tokens, causal=causal, n_queries=hidden.shape[1], bias_bt=bias)
        where: dict[str, Any] = {"mask": mask, "causal": causal and mask is None, "rotation": rotation}
        states = []
        for number, layer in enumerate(self.layers):
            if attentions is not None:
                attentions.append(layer.attention_weights(hidden, **where))
            if cache is not None:
                hidden = layer(hidden, cache=(cache, number), **where)
            elif self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, use_reentrant=False, cells=cells, **where)
            else:
                hidden = layer(hidden, cells=cells, **where)
            if keep:
                states.append(hidden)
        return (*states[:-1], self.final_norm(hidden))


def _has_varlen_kernel(hidden_bsh: torch.Tensor, head_dim: int) -> bool:
    """Return whether torch's kernel for attention in packed cells can run: CUDA, half precision, Ampere or later."""
    if hidden_bsh.device.type != "cuda" or head_dim % 8 or head_dim > 256:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else hidden_bsh.dtype
    if dtype not in (torch.float16, torch.bfloat16) or not _torch_has_varlen():
        return False
    return torch.cuda.get_device_capability(hidden_bsh.device) >= (8, 0)


@cached
def _torch_has_varlen() -> bool:
    """Return whether torch has the newer form of the kernel, in which a window sets causal attention."""
    if find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in signature(varlen_attn).parameters
