"""Optimizers, including Muon, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from scforge._checks import check_choice
from scforge.errors import OptionError
from scforge.models.components.transformer import TransformerBlock

_WARMUP_SHARE = 0.1

_PLAIN: Mapping[int, float] = MappingProxyType({})

_NO_DECAY = (nn.LayerNorm, nn.Embedding, nn.EmbeddingBag)

_OF_TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}

_WARMUPS = {"constant": 0.0, "cosine": 0.0, "linear": 0.0, "one_cycle": 0.3}
"""Fraction of steps until the peak, if it differs from ``_WARMUP_SHARE``."""


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the weight matrices inside transformer layers, or between hidden layers, and AdamW for the rest.

    Parameters
    ----------
    module
        Module to optimize, except for its frozen parameters. AdamW optimizes embeddings, heads (matrices outside the
        transformer's layers), norms and biases. In a module without transformer layers, Muon optimizes all weights of
        :class:`torch.nn.Linear`.
    lr, weight_decay
        Learning rate, and weight decay of all parameters except norms, embeddings and biases.
    fused
        Whether to use the fused AdamW kernels.

    Raises
    ------
    OptionError
        If there is no matrix for Muon to optimize, or all matrices are frozen.
    """

    def __init__(self, module: nn.Module, *, lr: float, weight_decay: float, fused: bool) -> None:
        layers: list[nn.Module] = [part for part in module.modules() if isinstance(part, TransformerBlock)]
        linear = [part for layer in layers or [module] for part in layer.modules() if isinstance(part, nn.Linear)]
        matrices = list({id(part.weight): part.weight for part in linear}.values())
        if not matrices:
            raise OptionError(
                f"requires weight matrices in hidden layers, but {type(module).__name__} has none; "
                "use optimizer='adamw'.",
                optimizer="muon",
            )
        hidden = [matrix for matrix in matrices if matrix.requires_grad]
        if not hidden:
            raise OptionError(
                "trains the weight matrices of hidden layers, but all of them are frozen; freeze fewer layers.",
                optimizer="muon",
            )
        ids = {id(parameter) for parameter in hidden}
        rest = [
            {**group, "params": [p for p in group["params"] if id(p) not in ids]}
            for group in parameter_groups(module, weight_decay)
        ]
        self._muon = torch.optim.Muon(hidden, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW([group for group in rest if group["params"]], lr=lr, fused=fused)
        super().__init__([{"params": hidden}], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a step with both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._muon.step()
        self._adamw.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both optimizers."""
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of both optimizers."""
        self._muon.load_state_dict(state_dict["muon"])
        self._adamw.load_state_dict(state_dict["adamw"])
        self._share()

    def _share(self) -> None:
        # A schedule that sets the learning rate of a group here sets it where it is used.
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]
        self.state = _Both(self._muon.state, self._adamw.state)


class _Both(dict[Any, Any]):
    """The combined states of two optimizers, for callers that read them."""

    def __init__(self, *states: Any) -> None:
        super().__init__()
        self._states = states

    def items(self) -> Any:
        return [item for state in self._states for item in state.items()]

    def values(self) -> Any:
        return [value for _, value in self.items()]


def parameter_groups(
    module: nn.Module, weight_decay: float, *, lr: float | None = None, factors: Mapping[int, float] = _PLAIN
) -> list[dict[str, Any]]:
    """Split parameters into groups with and without weight decay (norms, embeddings and biases have no decay).

    With `factors`, a mapping from the ``id`` of a parameter to a factor, parameters are also split by learning rate,
    `lr` times the factor.
    """
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.requires_grad:
                no_decay = isinstance(part, _NO_DECAY) or name.endswith("bias") or parameter.ndim < 2
                (plain if no_decay else decay).append(parameter)
    unique = {id(p): p for p in plain}
    decay = [p for p in {id(p): p for p in decay}.values() if id(p) not in unique]
    groups: list[dict[str, Any]] = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": list(unique.values()), "weight_decay": 0.0},
    ]
    if not factors or lr is None:
        return groups
    split = []
    for group in groups:
        of_factor: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            of_factor.setdefault(factors[id(parameter)], []).append(parameter)
        split += [{**group, "params": of_factor[factor], "lr": lr * factor} for factor in sorted(of_factor)]
    return split


def make_optimizer(
    module: nn.Module,
    *,
    name: str,
    lr: float,
    weight_decay: float,
    fused: bool = True,
    factors: Mapping[int, float] = _PLAIN,
) -> torch.optim.Optimizer:
    """Create an optimizer.

    Parameters
    ----------
    module
        Module to optimize, except for its frozen parameters.
    name
        ``"adamw"``; ``"adam"``, whose weight decay is a penalty in the loss; ``"sgd"`` with a momentum of 0.9; or
        ``"muon"`` for the matrices of hidden layers, with AdamW for embeddings, heads and the rest (see
        :class:`scforge.training.optimizers.MuonWithAdamW`).
    lr, weight_decay
        Learning rate, and weight decay of all parameters except norms, embeddings and biases.
    fused
        Whether to use fused kernels.
    factors
        A mapping from the ``id`` of a parameter to the factor of its learning rate. If empty, all parameters have the
        same learning rate.

    Raises
    ------
    OptionError
        If `name` is unknown, or there is nothing to optimize.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise OptionError("all parameters are frozen, so there is nothing to train; set freeze=False, or train a head.")
    if name in _OF_TORCH:
        return _OF_TORCH[name](parameter_groups(module, weight_decay, lr=lr, factors=factors), lr=lr, fused=fused)
    check_choice("optimizer", name, (*_OF_TORCH, "muon"))
    if factors:
        raise OptionError(
            "does not work with optimizer='muon'; use 'adamw', or omit layer_lr_decay.",
            argument="layer_lr_decay",
        )
    return MuonWithAdamW(module, lr=lr, weight_decay=weight_decay, fused=fused)


def _one_cycle(optimizer: torch.optim.Optimizer, total: int, warmup: int) -> lr_scheduler.LRScheduler:
    peaks = [group["lr"] for group in optimizer.param_groups]
    # OneCycleLR divides by the steps on either side of its peak, so there must be one on each.
    total = max(total, 3)
    share = min(max(warmup, 2), total - 1) / total
    # Muon and AdamW together have no one momentum.
    cycles = not {"betas", "momentum"}.isdisjoint(optimizer.defaults)
    return _OneCycle(optimizer, max_lr=peaks, total_steps=total, pct_start=share, cycle_momentum=cycles)


class _OneCycle(lr_scheduler.OneCycleLR):
    """The torch schedule, except that it keeps its last learning rate if there are more steps than were counted."""

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch + 1 < self.total_steps:
            super().step(epoch)


def _factor(shape: Callable[[float], float]) -> Callable[[torch.optim.Optimizer, int, int], lr_scheduler.LRScheduler]:
    def make(optimizer: torch.optim.Optimizer, total: int, warmup: int) -> lr_scheduler.LRScheduler:
        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            return shape(min(1.0, (step - warmup) / max(1, total - warmup)))

        return lr_scheduler.LambdaLR(optimizer, factor)

    return make


_cosine = _factor(lambda done: 0.5 * (1.0 + math.cos(math.pi * done)))
_linear = _factor(lambda done: 1.0 - done)

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int, int], lr_scheduler.LRScheduler]] = {
    "constant": _factor(lambda done: 1.0),
    "cosine": _cosine,
    "cosine_warmup": _cosine,
    "linear": _linear,
    "linear_warmup": _linear,
    "one_cycle": _one_cycle,
}
"""Mapping from name to learning-rate schedule. All except ``one_cycle`` warm up linearly, then follow their shape."""


def make_schedule(
    optimizer: torch.optim.Optimizer, *, name: str, total_steps: int, warmup_steps: int | None = None
) -> lr_scheduler.LRScheduler:
    """Create a learning-rate schedule that advances once per optimizer step.

    Parameters
    ----------
    optimizer
        Optimizer, whose learning rate is the peak of the schedule.
    name
        A key of ``SCHEDULES``.
    total_steps
        Number of optimizer steps in the whole training run.
    warmup_steps
        Number of steps until the peak, at most half of all steps, so that even a short run completes the warm-up. If
        None, uses 10% of all steps (30% for ``one_cycle``; 0 for ``constant``, ``cosine`` and ``linear``).

    Raises
    ------
    OptionError
        If `name` is unknown.
    """
    check_choice("schedule", name, sorted(SCHEDULES))
    return SCHEDULES[name](optimizer, total_steps, warmup_length(name, total_steps, warmup_steps))


def warmup_length(name: str, total_steps: int, warmup_steps: int | None) -> int:
    """Return the number of steps until the peak of a schedule; for the arguments, see :func:`make_schedule`."""
    if warmup_steps is None:
        warmup_steps = round(_WARMUPS.get(name, _WARMUP_SHARE) * total_steps)
    return min(warmup_steps, total_steps // 2)
