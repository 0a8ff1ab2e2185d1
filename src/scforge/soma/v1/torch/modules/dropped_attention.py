"""Causal attention whose weights are dropped out, on a CPU, where the fused kernels have no dropout.

Shapes: B sequences, S tokens, N heads, D width of a head, Q queries of a block, T keys that they may see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from scforge.soma.v1.torch.modules.dropout import keep_mask, keep_scale

__all__ = ["dropped_attention"]

_QUERIES = 64
"""Queries at a time; what is kept of a block stays within the cache."""


def dropped_attention(
    query_bnsd: torch.Tensor,
    key_bnsd: torch.Tensor,
    value_bnsd: torch.Tensor,
    mask: torch.Tensor | None,
    p: float,
) -> torch.Tensor:
    """Return causal attention (B, N, S, D) in which a share `p` of the weights is set to zero.

    Weights and what is dropped are not kept for the gradient, but made again from a seed that comes from torch's
    generator, a block of queries at a time.

    Parameters
    ----------
    query_bnsd, key_bnsd, value_bnsd
        Shape (B, N, S, D), of one dtype.
    mask
        True where attention is allowed, bool, (B, 1 or N, S, S), none of it above the diagonal, as
        :class:`~scforge.soma.v1.torch.modules.attention.MultiHeadAttention` makes it; None for all that is causal.
    p
        Share, a multiple of 2^-16 after rounding, below 1.
    """
    seed = int(torch.empty((), dtype=torch.int64).random_())
    return _DroppedAttention.apply(query_bnsd, key_bnsd, value_bnsd, mask, p, seed)


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        p: float,
        seed: int,
    ) -> torch.Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        with torch.autocast("cpu", enabled=False):
            for b, rows, weights, keep in _blocks(query, key, mask, p, seed):
                of_values = value[b, :, : rows.stop].to(weights.dtype)
                out[b, :, rows] = torch.bmm(weights.mul_(keep), of_values).mul_(keep_scale(p))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        query, key, value, mask, ctx.p, ctx.seed = inputs
        ctx.save_for_backward(query, key, value, mask, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, out = ctx.saved_tensors
        wide = torch.promote_types(query.dtype, torch.float32)
        scale = query.shape[-1] ** -0.5
        of_query, of_key, of_value = (torch.zeros(x.shape, dtype=wide) for x in (query, key, value))
        with torch.autocast("cpu", enabled=False):
            for b, rows, weights, keep in _blocks(query, key, mask, ctx.p, ctx.seed):
                stop = rows.stop
                slope = grad[b, :, rows].to(wide)
                # With w the weights, k what is kept over its share: out = (w k) v, and the slope by a score is
                # w (k (slope v) - mean), where the mean of k (slope v) under w is slope . out.
                of_value[b, :, :stop].baddbmm_((weights * keep).transpose(1, 2), slope, alpha=keep_scale(ctx.p))
                by_weights = torch.bmm(slope, value[b, :, :stop].to(wide).transpose(1, 2)).mul_(keep)
                mean = (slope * out[b, :, rows]).sum(dim=-1, keepdim=True)
                by_scores = by_weights.mul_(keep_scale(ctx.p)).sub_(mean).mul_(weights)
                of_query[b, :, rows] = torch.bmm(by_scores, key[b, :, :stop].to(wide)).mul_(scale)
                of_key[b, :, :stop].baddbmm_(by_scores.transpose(1, 2), query[b, :, rows].to(wide), alpha=scale)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


def _blocks(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, p: float, seed: int
) -> Iterator[tuple[int, slice, torch.Tensor, torch.Tensor]]:
    """Yield sequence, queries, their weights before dropout and what of them is kept, both (N, Q, T)."""
    wide = torch.promote_types(query.dtype, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    n_tokens, scale = query.shape[2], query.shape[-1] ** -0.5
    for b in range(len(query)):
        for start in range(0, n_tokens, _QUERIES):
            stop = min(start + _QUERIES, n_tokens)
            keys_nt = key[b, :, :stop].to(wide).transpose(1, 2)
            scores = torch.bmm(query[b, :, start:stop].to(wide) * scale, keys_nt)
            if mask is None:
                above = torch.ones((stop - start, stop - start), dtype=torch.bool).triu(diagonal=1)
                scores[:, :, start:].masked_fill_(above, float("-inf"))
            else:
                scores.masked_fill_(~mask[b, :, start:stop, :stop], float("-inf"))
            weights = scores.softmax(dim=-1)
            yield b, slice(start, stop), weights, keep_mask(weights.shape, p, generator)
