"""Attention of soma-models in torch, with its dropout of attention weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from scforge._checks import check_count, check_positive, check_share
from scforge.errors import DataError
from scforge.soma.v1.configs import V1_MAX_WAVELENGTH, V1_SCALE_FACTOR, check_heads, check_scale_factor
from scforge.soma.v1.torch.modules.dropout import draws_bits, keep_mask, keep_scale

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


Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation_of(
    positions: torch.Tensor,
    head_dim: int,
    max_wavelength: float = V1_MAX_WAVELENGTH,
    scale_factor: float = V1_SCALE_FACTOR,
    dtype: torch.dtype = torch.float32,
) -> Rotation:
    """Return cosines and sines of the angles that positions turn the pairs of a head by, each (B, S, 1, D / 2).

    Pair i turns by ``position / max_wavelength^(2 i / D) / scale_factor`` (Su et al. 2021, arXiv:2104.09864). In a
    dtype of 16 bits, positions above 256 would run into one another.

    Parameters
    ----------
    positions
        Whole numbers, shape (B, S), or (1, S) where all sequences stand at the same places.
    head_dim
        Width D.
    max_wavelength, scale_factor
        As in :class:`~scforge.soma.v1.configs.ModelConfig`.
    dtype
        float32 or float64.

    Raises
    ------
    OptionError
        If `scale_factor` is below 1; a ``ValueError``.
    """
    check_scale_factor(scale_factor)
    if positions.dim() == 2 and positions.stride(0) == 0:
        positions = positions[:1]  # one row that was expanded
    pairs = torch.arange(head_dim // 2, dtype=dtype, device=positions.device)
    timescale = max_wavelength ** (2 * pairs / head_dim)
    angles = (positions.to(dtype).unsqueeze(-1) / timescale / scale_factor).unsqueeze(-2)
    return angles.cos(), angles.sin()


def apply_rope(
    inputs: torch.Tensor,
    positions: torch.Tensor,
    head_dim: int,
    max_wavelength: float = V1_MAX_WAVELENGTH,
    scale_factor: float = V1_SCALE_FACTOR,
) -> torch.Tensor:
    """Return queries or keys (B, S, N, D) turned to their positions (B, S); angles are of float32 at least.

    The first half of a head is turned against the second. Parameters and errors as of :func:`rotation_of`.
    """
    wide = torch.promote_types(inputs.dtype, torch.float32)
    return _Rotate.apply(inputs, *rotation_of(positions, head_dim, max_wavelength, scale_factor, wide))


class _Rotate(torch.autograd.Function):
    """Keeps the angles for the backward pass, not what is turned: the gradient is turned back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_bsnd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return _rotate(x_bsnd, cos, sin)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        _, cos, sin = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x_bsnd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x_bsnd.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_bsnd.dtype)


class MultiHeadAttention(nn.Module):
    """Self-attention in which a token sees itself and those before it.

    Parameters
    ----------
    num_heads
        Heads N.
    num_features
        Width H, a multiple of `num_heads`.
    dropout_rate
        Share of attention weights that is dropped in training.
    use_bias
        Whether the four projections have a bias.
    max_wavelength, scale_factor
        As in :class:`~scforge.soma.v1.configs.ModelConfig`.

    Raises
    ------
    OptionError
        If the heads do not divide the width, `scale_factor` is below 1, or a number cannot be used.

    Examples
    --------
    >>> attention = MultiHeadAttention(num_heads=2, num_features=8)
    >>> attention(torch.zeros(1, 3, 8), positions=torch.arange(3)[None]).shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        num_heads: int,
        num_features: int,
        *,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        max_wavelength: float = V1_MAX_WAVELENGTH,
        scale_factor: float = V1_SCALE_FACTOR,
    ) -> None:
        super().__init__()
        check_count("num_heads", num_heads, "heads")
        check_count("num_features", num_features, "dimensions")
        check_heads(num_features, num_heads, argument="num_features")
        check_share("dropout_rate", dropout_rate)
        check_positive("max_wavelength", max_wavelength)
        check_scale_factor(scale_factor)
        self.num_heads = num_heads
        self.num_features = num_features
        self.head_dim = num_features // num_heads
        self.dropout_rate = dropout_rate
        self.max_wavelength = max_wavelength
        self.scale_factor = scale_factor
        self.query = nn.Linear(num_features, num_features, bias=use_bias)
        self.key = nn.Linear(num_features, num_features, bias=use_bias)
        self.value = nn.Linear(num_features, num_features, bias=use_bias)
        self.output = nn.Linear(num_features, num_features, bias=use_bias)

    def forward(
        self,
        inputs: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        rotation: Rotation | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.

        Parameters
        ----------
        inputs
            Shape (B, S, H).
        positions
            Places of the tokens, shape (B, S); None to not turn queries and keys.
        rotation
            Of :func:`rotation_of`, instead of `positions`, for layers that share it.
        mask
            False where attention is forbidden on top of the causal mask, bool, of a shape that broadcasts to
            (B, N, S, S), e.g. (B, 1, S, S); it allows no token to see later ones. What comes out at a token that may
            see nothing, not even itself, has no meaning. None for the causal mask alone.

        Returns
        -------
        Shape (B, S, H).

        Raises
        ------
        DataError
            If `inputs` has another shape, or `mask` another shape or dtype.
        """
        if inputs.dim() != 3 or inputs.shape[-1] != self.num_features:
            raise DataError(f"inputs has shape {tuple(inputs.shape)}; pass (batch, seq, {self.num_features}).")
        if mask is not None:
            mask = self._with_causal(mask, inputs)
        heads = (self.num_heads, self.head_dim)
        query, key, value = (part(inputs).unflatten(-1, heads) for part in (self.query, self.key, self.value))
        if rotation is None and positions is not None:
            wide = torch.promote_types(inputs.dtype, torch.float32)
            rotation = rotation_of(positions, self.head_dim, self.max_wavelength, self.scale_factor, wide)
        if rotation is not None:
            query, key = _Rotate.apply(query, *rotation), _Rotate.apply(key, *rotation)
        mixed = self._attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _with_causal(self, mask: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return what is allowed by `mask` and by the causal mask, (B, 1 or N, S, S)."""
        n_sequences, n_tokens, _ = inputs.shape
        wanted = (n_sequences, self.num_heads, n_tokens, n_tokens)
        shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        fits = len(shape) == 4 and all(n in (1, m) for n, m in zip(shape, wanted, strict=True))
        if mask.dtype != torch.bool or not fits:
            raise DataError(
                f"mask has dtype {mask.dtype} and shape {tuple(mask.shape)}; pass bool of a shape that broadcasts to"
                f" {wanted}."
            )
        before = torch.ones((n_tokens, n_tokens), dtype=torch.bool, device=mask.device).tril()
        return (mask.view(shape) & before).expand(n_sequences, -1, -1, -1)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the values (B, N, S, D) that queries see, all of this shape."""
        dropout = self.dropout_rate if self.training else 0.0
        if draws_bits(query, dropout):
            return dropped_attention(query, key, value, mask, dropout)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )
