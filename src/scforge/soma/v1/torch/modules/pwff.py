"""The feed-forward block of a layer.

Shapes: ... tokens, H width, F hidden units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from scforge.soma.v1.configs import PositionWiseFeedForwardConfig, check_config
from scforge.soma.v1.torch.modules.dropout import Dropout, draws_bits, keep_mask, keep_scale


class PositionWiseFeedForward(nn.Module):
    """Linear, GELU, dropout, linear, at each token by itself.

    Parameters
    ----------
    config
        Sizes.

    Examples
    --------
    >>> from scforge.soma.v1.configs import PositionWiseFeedForwardConfig
    >>> PositionWiseFeedForward(PositionWiseFeedForwardConfig(0.0, 8, 16))(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, config: PositionWiseFeedForwardConfig) -> None:
        super().__init__()
        check_config(config, PositionWiseFeedForwardConfig)
        self.linear_inner = nn.Linear(config.embedding_dim, config.pwff_hidden_dim)
        self.linear_outer = nn.Linear(config.pwff_hidden_dim, config.embedding_dim)
        self.dropout = Dropout(config.dropout_rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block of `x`, both of shape (..., H)."""
        inner = self.linear_inner(x)
        dropout = self.dropout.p if self.training else 0.0
        if self._keeps_less(inner, dropout):
            seed = int(torch.empty((), dtype=torch.int64).random_()) if dropout else 0
            return _Outer.apply(inner, self.linear_outer.weight, self.linear_outer.bias, dropout, seed)
        return self.linear_outer(self.dropout(F.gelu(inner)))

    def _keeps_less(self, inner: torch.Tensor, dropout: float) -> bool:
        """Whether the second half is a plain one, that can be computed again for its gradient."""
        outer = self.linear_outer
        plain = type(outer) is nn.Linear and not (outer._forward_hooks or outer._forward_pre_hooks)
        plain = plain and outer.weight.dtype == inner.dtype and not torch.is_autocast_enabled(inner.device.type)
        plain = plain and not torch.compiler.is_compiling()
        return torch.is_grad_enabled() and plain and (dropout == 0 or draws_bits(inner, dropout))


class _Outer(torch.autograd.Function):
    """GELU, dropout and linear, of which only the input is kept: GELU costs a hundredth of the products around it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        inner: torch.Tensor, weight_hf: torch.Tensor, bias_h: torch.Tensor, p: float, seed: int
    ) -> torch.Tensor:
        return F.linear(_activated(inner, p, seed)[0], weight_hf, bias_h)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        inner, weight_hf, _, ctx.p, ctx.seed = inputs
        ctx.save_for_backward(inner, weight_hf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inner, weight_hf = ctx.saved_tensors
        of_inner = of_weight = None
        activated, keep = _activated(inner, ctx.p, ctx.seed)
        if ctx.needs_input_grad[1]:
            of_weight = _rows(grad).t() @ _rows(activated)
        del activated
        if ctx.needs_input_grad[0]:
            of_inner = grad @ weight_hf
            if keep is not None:
                of_inner.mul_(keep).mul_(keep_scale(ctx.p))
            of_inner = torch.ops.aten.gelu_backward(of_inner, inner)
        of_bias = _rows(grad).sum(dim=0) if ctx.needs_input_grad[2] else None
        return of_inner, of_weight, of_bias, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return tokens (..., H) as rows; one token, too, is a row."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def _activated(inner: torch.Tensor, p: float, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what goes into the second linear layer, and what dropout kept of it."""
    activated = F.gelu(inner)
    if p == 0:
        return activated, None
    keep = keep_mask(inner.shape, p, torch.Generator().manual_seed(seed))
    return activated.mul_(keep).mul_(keep_scale(p)), keep
