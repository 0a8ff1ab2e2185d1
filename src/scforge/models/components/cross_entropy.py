"""Cross entropy over a large vocabulary, at the tokens that have a target.

Shapes: B cells, S tokens, M tokens with a target, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from scforge._constants import IGNORE_LABEL

_NUMBERS = {"cpu": 2**22}
"""Number of logits computed at a time. On a CPU, they fit into the cache."""
_NUMBERS_ELSEWHERE = 2**28


def token_loss(
    head: nn.Module,
    hidden_bsh: torch.Tensor,
    labels_bs: torch.Tensor | None,
    *,
    return_logits: bool,
    weight_vh: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the mean cross entropy at labeled positions, and the logits.

    Without `return_logits`, the logits are None, and the vocabulary head, which dominates the cost of a small model,
    runs only at labeled positions.

    A head with a true attribute ``takes_labels`` also returns the loss for states (M, H) and labels (M,), like
    MaskedGenePredictionHead. Labels are -100 at positions without a target. `weight_vh` is for a head without its own
    weight.
    """
    weight = () if weight_vh is None else (weight_vh,)
    if return_logits:
        logits = head(hidden_bsh, *weight)
        if labels_bs is None:
            return None, logits
        return mean_token_loss(logits.flatten(0, 1), labels_bs.flatten()), logits
    if labels_bs is None:
        return None, None
    chosen = labels_bs != IGNORE_LABEL
    hidden_mh, labels_m = hidden_bsh[chosen], labels_bs[chosen]
    if getattr(head, "takes_labels", False):
        return head(hidden_mh, *weight, labels=labels_m), None
    return mean_token_loss(head(hidden_mh, *weight), labels_m), None


def mean_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of logits (M, V) at labels other than -100; 0 without any, e.g. of empty cells."""
    total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE_LABEL, reduction="sum")
    return total / (labels != IGNORE_LABEL).sum().clamp(min=1)


def linear_cross_entropy(
    hidden_mh: torch.Tensor, weight_vh: torch.Tensor, bias_v: torch.Tensor | None, labels_m: torch.Tensor
) -> torch.Tensor:
    """Return the mean cross entropy of ``softmax(hidden @ weight.T + bias)``, a scalar.

    The gradient is computed together with the loss, for some tokens at a time, so the logits are neither stored nor
    read again. Under autocast, products use the autocast dtype. Softmax and loss are float32 (float64 if `hidden_mh` is
    float64).
    """
    kind = hidden_mh.device.type
    if torch.is_autocast_enabled(kind):
        hidden_mh = hidden_mh.to(torch.get_autocast_dtype(kind))
    return _Chunked.apply(hidden_mh, weight_vh, bias_v, labels_m, torch.is_grad_enabled())


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        learning: bool,
    ) -> torch.Tensor:
        # Grad mode is always off in here, and tensors require gradients in validation as well.
        n_tokens, n_classes = len(hidden), len(weight)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        of_hidden, of_weight, of_bias = (learning and needed for needed in ctx.needs_input_grad[:3])
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if of_weight else None
        grad_bias = torch.zeros(n_classes, dtype=wide, device=hidden.device) if of_bias else None
        step = max(1, _NUMBERS.get(hidden.device.type, _NUMBERS_ELSEWHERE) // n_classes)
        with torch.autocast(hidden.device.type, enabled=False):
            table = weight.to(hidden.dtype)
            shift = None if bias is None else bias.to(hidden.dtype)
            for start in range(0, n_tokens, step):
                part, wanted = hidden[start : start + step], labels[start : start + step].unsqueeze(1)
                logits = F.linear(part, table, shift).to(wide)
                largest = logits.amax(dim=1, keepdim=True)
                aim = logits.gather(1, wanted) - largest
                softmax = logits.sub_(largest).exp_()
                norm = softmax.sum(dim=1, keepdim=True)
                total += (norm.log() - aim).sum()
                if grad_hidden is None and grad_weight is None and grad_bias is None:
                    continue
                # Softmax minus the target is the gradient by the logits.
                slope = softmax.div_(norm).scatter_add_(1, wanted, torch.full_like(aim, -1.0))
                if grad_bias is not None:
                    grad_bias += slope.sum(dim=0)
                slope = slope.to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[start : start + step] = slope @ table
                if grad_weight is None:
                    continue
                if hidden.dtype == wide:
                    grad_weight.addmm_(slope.t(), part)
                else:
                    grad_weight += slope.t() @ part
        ctx.n_tokens, ctx.dtype = max(1, n_tokens), weight.dtype
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total / ctx.n_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        scale = grad / ctx.n_tokens
        return (
            None if hidden is None else hidden * scale.to(hidden.dtype),
            None if weight is None else (weight * scale).to(ctx.dtype),
            None if bias is None else (bias * scale).to(ctx.dtype),
            None,
            None,
        )
