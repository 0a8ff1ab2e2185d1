"""Attention of queries to keys with padding, causal and prefix masks; positions and rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from scforge.errors import OptionError
from scforge.models.components.config import TransformerConfig

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_LONGEST_WAVE = 10_000.0


def _without_cudnn(query: torch.Tensor) -> AbstractContextManager[None]:
    """Exclude the cuDNN kernels on CUDA: they are planned for each new shape, and the shapes of batches differ."""
    return sdpa_kernel(_KERNELS) if query.device.type == "cuda" else nullcontext()


def check_shapes(shape: Sequence[int], **tensors: torch.Tensor | None) -> None:
    """Raise :class:`~scforge.errors.OptionError` if a tensor does not have the shape (B, S), one value per token."""
    if len(shape) != 2:
        raise OptionError(f"has shape {tuple(shape)}; pass a batch of cells of shape (B, S).", argument="input_ids")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != shape:
            raise OptionError(
                f"{name} has shape {tuple(tensor.shape)}, but input_ids has shape {tuple(shape)}; pass one number per "
                "token."
            )


def token_positions(tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return the position of each token among the tokens of its cell, int64, (B, S); tokens may be in any order.

    Examples
    --------
    >>> token_positions(torch.tensor([[False, True, True]]))
    tensor([[0, 0, 1]])
    """
    return (tokens_bs.long().cumsum(dim=1) - 1).clamp(min=0)


def rotation_of(positions: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the cosines and sines of positions, float32, shape (2, ..., 1, D / 2), with an axis for the heads."""
    half = torch.arange(head_dim // 2, device=positions.device, dtype=torch.float32)
    angles = positions.float().unsqueeze(-1) * _LONGEST_WAVE ** (-2.0 * half / head_dim)
    return torch.stack([angles.cos(), angles.sin()]).unsqueeze(-2)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys of shape (..., N, D) in float32; they keep their dtype."""
    cos, sin = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def generate_causal_mask(seq_len: int, device: torch.device | None = None) -> torch.Tensor:
    """Return a float mask of shape (seq_len, seq_len): 0 up to the diagonal, ``-inf`` above it.

    Parameters
    ----------
    seq_len
        Number of tokens S.
    device
        Device of the mask. If None, uses the default device.

    Returns
    -------
    The mask, float32, shape (S, S), to be added to attention scores; rows are queries.

    Examples
    --------
    >>> generate_causal_mask(3)
    tensor([[0., -inf, -inf],
            [0., 0., -inf],
            [0., 0., 0.]])
    """
    return torch.full((seq_len, seq_len), float("-inf"), device=device).triu(diagonal=1)


def attention_mask_of(
    tokens_bt: torch.Tensor | None,
    *,
    causal: bool = False,
    n_queries: int | None = None,
    bias_bt: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return the mask for scaled-dot-product attention, (B, 1, 1 or S, T): bool, or float with a bias of each key.

    If `causal`, each query attends only to the keys up to its position; the queries are the last `n_queries` keys. None
    if all keys are tokens and there is no bias: a purely causal mask is handled better by the kernel.
    """
    allowed = None if tokens_bt is None else tokens_bt[:, None, None, :]
    given = tokens_bt if tokens_bt is not None else bias_bt
    if causal and given is not None and n_queries is not None:
        n_keys = given.shape[1]
        before = torch.ones((n_queries, n_keys), dtype=torch.bool, device=given.device).tril(n_keys - n_queries)
        allowed = before[None, None] if allowed is None else allowed & before
    if bias_bt is None:
        return allowed
    bias = bias_bt.float()[:, None, None, :]
    return bias if allowed is None else torch.where(allowed, bias, float("-inf"))


class KeyValueCache:
    """Keys and values of the tokens of cells that are being generated, for each layer of a stack.

    The memory doubles whenever it is full, so the cost of a token does not depend on the number of tokens. The cache is
    written in place and is not differentiable, so generate under ``torch.no_grad()``.

    Examples
    --------
    >>> import torch
    >>> attention, cache = SelfAttention(TransformerConfig(8, num_layers=1, num_heads=2)), KeyValueCache()
    >>> with torch.no_grad():
    ...     for _ in range(3):  # one token after the other
    ...         tokens = cache.add_tokens(torch.ones(4, 1, dtype=torch.bool))
    ...         states = attention(torch.randn(4, 1, 8), cache=(cache, 0))
    >>> cache.length, states.shape
    (3, torch.Size([4, 1, 8]))
    """

    def __init__(self) -> None:
        self.tokens: torch.Tensor | None = None
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def length(self) -> int:
        """Number of positions so far."""
        return 0 if self.tokens is None else self.tokens.shape[1]

    def add_tokens(self, tokens_bs: torch.Tensor) -> torch.Tensor:
        """Record which of the next S positions are tokens, and return this for all positions so far, bool, (B, T)."""
        self.tokens = tokens_bs if self.tokens is None else torch.cat([self.tokens, tokens_bs], dim=1)
        return self.tokens

    def extend(self, layer: int, key_bnsd: torch.Tensor, value_bnsd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values of the positions that :meth:`add_tokens` added; return all of this layer, (B, N, T, D).

        Layers are numbered from 0 and called in this order.
        """
        assert self.tokens is not None
        start, stop = self.tokens.shape[1] - key_bnsd.shape[2], self.tokens.shape[1]
        if layer == len(self._layers):
            self._layers.append((key_bnsd[:, :, :0], value_bnsd[:, :, :0]))
        grown = []
        for kept, new in zip(self._layers[layer], (key_bnsd, value_bnsd), strict=True):
            if stop > kept.shape[2]:
                room = max(stop, 2 * kept.shape[2])
                more = new.new_empty((*new.shape[:2], room, new.shape[3]))
                more[:, :, :start] = kept[:, :, :start]
                kept = more
            kept[:, :, start:stop] = new
            grown.append(kept)
        self._layers[layer] = (grown[0], grown[1])
        return grown[0][:, :, :stop], grown[1][:, :, :stop]


class SelfAttention(nn.Module):
    """Multi-head self-attention based on ``F.scaled_dot_product_attention``.

    No dropout is applied to attention weights, so that the fused kernels can also be used in training.

    Parameters
    ----------
    config
        Options, of which `hidden_dim`, `num_heads` and `bias` apply here.

    Examples
    --------
    >>> import torch
    >>> attention = SelfAttention(TransformerConfig(hidden_dim=8, num_layers=1, num_heads=2))
    >>> states = torch.randn(3, 5, 8)
    >>> attention(states).shape, attention.weights(states).shape
    (torch.Size([3, 5, 8]), torch.Size([3, 2, 5, 5]))
    >>> attention.weights(states, causal=True)[0, 0, 0].tolist()  # the first token sees itself alone
    [1.0, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_dim, 3 * config.hidden_dim, bias=config.bias)
        self.out = nn.Linear(config.hidden_dim, config.hidden_dim, bias=config.bias)

    def forward(
        self,
        hidden_bsh: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
        rotation: torch.Tensor | None = None,
        cache: tuple[KeyValueCache, int] | None = None,
    ) -> torch.Tensor:
        """Compute self-attention.

        Parameters
        ----------
        hidden_bsh
            States, shape (B, S, H).
        mask
            Mask, broadcast to (B, N, S, T): bool, true if attention is allowed, or float, added to the scores.
        causal
            Whether each token attends only to tokens up to itself. Not supported with a mask.
        rotation
            Output of :func:`scforge.models.components.attention.rotation_of`.
        cache
            Earlier keys and values to which these tokens are added, and the index of the layer.

        Returns
        -------
        The new states, shape (B, S, H).
        """
        alone = hidden_bsh.shape[1] == 1 and mask is None and cache is None
        if alone and not torch.compiler.is_compiling():
            # The softmax over one key is 1. (An exported graph has to do for cells of all lengths.)
            return self.out(self.qkv(hidden_bsh).chunk(3, dim=-1)[2])
        q_bnsd, k_bntd, v_bntd = self._project(hidden_bsh, rotation, cache)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q_bnsd.dtype)  # of lower precision under autocast
        with _without_cudnn(q_bnsd):
            mixed_bnsd = F.scaled_dot_product_attention(q_bnsd, k_bntd, v_bntd, attn_mask=mask, is_causal=causal)
        return self.out(mixed_bnsd.transpose(1, 2).flatten(2))

    def packed(
        self, hidden_ph: torch.Tensor, ends: torch.Tensor, longest: int, *, causal: bool, rotation: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the new states of packed cells, (P, H), on CUDA in half precision.

        States `hidden_ph` are of shape (P, H). Cell i is at positions ``ends[i]`` to ``ends[i + 1]``, int32, (B + 1,),
        and `longest` is the largest number of tokens of a cell. For `causal` and `rotation`, see :meth:`forward`.
        """
        from torch.nn.attention.varlen import varlen_attn

        q_pnd, k_pnd, v_pnd = self.qkv(hidden_ph).unflatten(-1, (3, self.num_heads, -1)).unbind(dim=1)
        if rotation is not None:
            q_pnd, k_pnd = rotate(q_pnd, rotation), rotate(k_pnd, rotation)
        window = (-1, 0) if causal else (-1, -1)
        with _without_cudnn(q_pnd):
            mixed_pnd = varlen_attn(q_pnd, k_pnd, v_pnd, ends, ends, longest, longest, window_size=window)
        return self.out(mixed_pnd.flatten(1))

    def weights(
        self,
        hidden_bsh: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
        rotation: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of each token (rows) to each token (columns), float32, shape (B, N, S, S).

        For the arguments, see :meth:`forward`. Rows sum to 1, except those of queries that cannot attend to any token,
        which are zeros.
        """
        q_bnsd, k_bnsd, _ = self._project(hidden_bsh, rotation, None)
        scores = (q_bnsd @ k_bnsd.transpose(-1, -2)).float() / q_bnsd.shape[-1] ** 0.5
        if causal:
            scores = scores + generate_causal_mask(scores.shape[-1], device=scores.device)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        weights = scores.softmax(dim=-1)
        if mask is None:
            return weights
        nothing = ~mask if mask.dtype == torch.bool else mask == float("-inf")
        return weights.masked_fill(nothing.all(dim=-1, keepdim=True), 0.0)  # a query that may look at nothing

    def _project(
        self, hidden_bsh: torch.Tensor, rotation: torch.Tensor | None, cache: tuple[KeyValueCache, int] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, (B, N, S or T, D)."""
        qkv = self.qkv(hidden_bsh).unflatten(-1, (3, self.num_heads, -1))
        qkv = qkv.permute(2, 0, 3, 1, 4)
        # The kernels for a CPU are a fifth faster on rows that stand together.
        q_bnsd, k_bnsd, v_bnsd = qkv.contiguous() if qkv.device.type == "cpu" else qkv
        if rotation is not None:
            q_bnsd = rotate(q_bnsd.transpose(1, 2), rotation).transpose(1, 2)
            k_bnsd = rotate(k_bnsd.transpose(1, 2), rotation).transpose(1, 2)
        if cache is not None:
            k_bnsd, v_bnsd = cache[0].extend(cache[1], k_bnsd, v_bnsd)
        return q_bnsd, k_bnsd, v_bnsd


def put_back_weights(weights_bnkk: torch.Tensor, put_back: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Scatter attention weights of K selected tokens to their positions among S: (B, N, K, K) to (B, N, S, S).

    `put_back` performs the same operation for states: (B, K, X) to (B, S, X), with zeros elsewhere.
    """
    heads, width = weights_bnkk.shape[1:3]
    rows_bsnk = put_back(weights_bnkk.transpose(1, 2).flatten(2)).unflatten(2, (heads, width))
    columns_bsx = put_back(rows_bsnk.permute(0, 3, 1, 2).flatten(2))
    return columns_bsx.unflatten(2, rows_bsnk.shape[1:3]).permute(0, 3, 2, 1)
