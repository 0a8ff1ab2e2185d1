"""How much of what a device can compute a training uses.

The operations of a step are those of its matrix products, as counted by torch for one forward pass, times three, since
a backward pass takes twice as many. The limit is what one large matrix product reaches on the same device in the same
precision, measured for a moment before training, so that the share says what better code could still gain.
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from scforge.training.modes import unchanged
from scforge.training.objectives.base import Objective

__all__ = ["flops_per_token", "peak_flops"]

_SIZE = {"cpu": 1024, "cuda": 8192}
_SECONDS = 0.1


def flops_per_token(module: nn.Module, objective: Objective, batch: dict[str, torch.Tensor]) -> float:
    """Return the floating-point operations of a training step on `batch`, per token that is no padding.

    Random numbers of the training stay as they were.
    """
    with unchanged(module), torch.no_grad(), FlopCounterMode(display=False) as counter:
        objective.loss(module, batch)
    return 3.0 * counter.get_total_flops() / max(1, int(batch["attention_mask"].sum()))


def peak_flops(device: torch.device, precision: str) -> float:
    """Return the operations a second of a large matrix product on a device."""
    size = _SIZE.get(device.type, 2048)
    kinds = {"bf16": torch.bfloat16, "16-": torch.float16}
    dtype = next((kind for name, kind in kinds.items() if str(precision).startswith(name)), torch.float32)
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    out = left @ right
    best = 0.0
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or not best:
        _wait(device)
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        _wait(device)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
