"""Attention: one scaled-dot-product block for all architectures.

Shapes: B cells, S tokens, H hidden, N heads, D = H / N.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from scforge.errors import OptionError
from scforge.models._utils import check_choice

__all__ = ["SelfAttention", "TransformerBlock", "generate_causal_mask", "key_mask"]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


def generate_causal_mask(seq_len: int, device: torch.device | None = None) -> torch.Tensor:
    """Return a float mask of shape (seq_len, seq_len): 0 up to the diagonal, ``-inf`` above it.

    Examples
    --------
    >>> generate_causal_mask(3)
    tensor([[0., -inf, -inf],
            [0., 0., -inf],
            [0., 0., 0.]])
    """
    return torch.full((seq_len, seq_len), float("-inf"), device=device).triu(diagonal=1)


def key_mask(
    attention_mask_bs: torch.Tensor | None, attention_bias_bs: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Return a padding mask (bool, int or float; nonzero for tokens) as a bool mask of shape (B, 1, 1, S).

    With a bias of the keys the mask is a float one: the bias, and ``-inf`` at padding.
    """
    mask = attention_mask_bs
    if mask is not None and mask.dtype != torch.bool:
        mask = mask != 0
    if attention_bias_bs is not None:
        bias = attention_bias_bs.float()
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    return None if mask is None else mask[:, None, None, :]


class SelfAttention(nn.Module):
    """Multi-head self-attention on ``F.scaled_dot_product_attention``.

    Attention weights are not dropped out, so that the fused kernels apply in training too.

    Parameters
    ----------
    hidden_dim
        Width H; a multiple of `num_heads`.
    num_heads
        Number of heads N.
    """

    def __init__(self, hidden_dim: int, num_heads: int) -> None:
        super().__init__()
        if hidden_dim % num_heads:
            raise OptionError(f"hidden_dim={hidden_dim} is not divisible by num_heads={num_heads}; change one of them.")
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_dim, 3 * hidden_dim)
        self.out = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, hidden_bsh: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attend; `mask` is broadcast to (B, N, S, S): true where attention is allowed, or added to the scores."""
        batch, seq, width = hidden_bsh.shape
        qkv = self.qkv(hidden_bsh).view(batch, seq, 3, self.num_heads, width // self.num_heads)
        q_bnsd, k_bnsd, v_bnsd = qkv.permute(2, 0, 3, 1, 4)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q_bnsd.dtype)  # of lower precision under autocast
        mixed_bnsd = F.scaled_dot_product_attention(q_bnsd, k_bnsd, v_bnsd, attn_mask=mask)
        return self.out(mixed_bnsd.transpose(1, 2).reshape(batch, seq, width))


class TransformerBlock(nn.Module):
    """Pre-norm transformer layer: norm, attention, residual; norm, feed-forward, residual.

    Parameters
    ----------
    hidden_dim, num_heads
        Width and heads of the attention.
    ffn_dim
        Width of the feed-forward layer; ``4 * hidden_dim`` if None.
    dropout
        Dropout on each residual branch and inside the feed-forward layer.
    activation
        ``"gelu"``, ``"relu"`` or ``"silu"``.
    layer_norm_eps
        Epsilon of the layer norms.
    """

    def __init__(
        self,
        hidden_dim: int,
        num_heads: int,
        ffn_dim: int | None = None,
        dropout: float = 0.1,
        activation: str = "gelu",
        layer_norm_eps: float = 1e-12,
    ) -> None:
        super().__init__()
        check_choice("activation", activation, sorted(ACTIVATIONS))
        ffn_dim = 4 * hidden_dim if ffn_dim is None else ffn_dim
        self.activation = ACTIVATIONS[activation]
        self.norm_attention = nn.LayerNorm(hidden_dim, eps=layer_norm_eps)
        self.attention = SelfAttention(hidden_dim, num_heads)
        self.norm_ffn = nn.LayerNorm(hidden_dim, eps=layer_norm_eps)
        self.ffn_in = nn.Linear(hidden_dim, ffn_dim)
        self.ffn_out = nn.Linear(ffn_dim, hidden_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_bsh: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the hidden states of the next layer, shape (B, S, H)."""
        hidden_bsh = hidden_bsh + self.dropout(self.attention(self.norm_attention(hidden_bsh), mask))
        inner = self.dropout(self.activation(self.ffn_in(self.norm_ffn(hidden_bsh))))
        return hidden_bsh + self.dropout(self.ffn_out(inner))
