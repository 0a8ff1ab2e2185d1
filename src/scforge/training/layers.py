"""The layers of a module from its input to its output: learning rates that fall towards the input, and thawing."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from scforge._checks import check_count, check_share
from scforge.errors import OptionError
from scforge.models.components.transformer import TransformerStack

__all__ = ["GradualUnfreezing", "freeze_layers", "layer_groups", "learning_rate_factors"]


def layer_groups(module: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters of each layer, from the input to the output.

    With transformer layers: the embeddings and whatever else stands before the first layer, each layer of the first
    stack, and what stands behind. Without: each part with a weight matrix and the norms before it.
    """
    stack = next((part for part in module.modules() if isinstance(part, TransformerStack)), None)
    groups: list[list[nn.Parameter]] = [[]]
    if stack is not None:
        of_layer = {id(p): number for number, layer in enumerate(stack.layers) for p in layer.parameters()}
        groups = [[] for _ in range(len(stack.layers) + 2)]
        seen = False
        for parameter in module.parameters():
            number = of_layer.get(id(parameter))
            seen = seen or number is not None
            beside = len(groups) - 1 if seen else 0
            groups[beside if number is None else number + 1].append(parameter)
        return groups
    complete = False
    for part in module.modules():
        own = list(part.parameters(recurse=False))
        if own and complete:
            groups.append([])
            complete = False
        groups[-1] += own
        complete = complete or any(parameter.ndim > 1 for parameter in own)
    return groups


def freeze_layers(module: nn.Module, n_layers: int) -> None:
    """Freeze the embeddings and the first `n_layers` layers.

    Raises
    ------
    OptionError
        If there are fewer layers.
    """
    groups = layer_groups(module)
    check_count("freeze", n_layers, "layers")
    if n_layers > len(groups) - 2:
        raise OptionError(
            f"freeze={n_layers} but there are {len(groups) - 2} layers; freeze fewer, or all of the encoder with "
            "freeze=True."
        )
    for group in groups[: n_layers + 1]:
        for parameter in group:
            parameter.requires_grad_(False)


def learning_rate_factors(module: nn.Module, decay: float | None) -> dict[int, float]:
    """Return the factor of the learning rate of each parameter, by its ``id``: `decay` for each layer below the top.

    Discriminative learning rates, as in Howard and Ruder (2018).
    """
    if decay is None:
        return {}
    check_share("layer_lr_decay", decay)
    if not decay:
        raise OptionError("layer_lr_decay=0 would train the top layer alone; freeze the encoder for that.")
    groups = layer_groups(module)
    top = len(groups) - 1
    return {id(p): decay ** (top - number) for number, group in enumerate(groups) for p in group}


class GradualUnfreezing(Callback):
    """Trains the top layer first, and one more layer below it every few epochs (Howard and Ruder, 2018).

    A layer whose turn has not come loses its gradient right before a step, so that processes that share a training need
    not agree on anything, and a training that goes on needs no memory of this.

    Parameters
    ----------
    every_n_epochs
        Epochs between two layers.
    """

    def __init__(self, every_n_epochs: int) -> None:
        check_count("gradual_unfreezing", every_n_epochs, "epochs")
        self.every_n_epochs = every_n_epochs

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Drop the gradients of layers whose turn has not come."""
        groups = layer_groups(pl_module.module)
        n_trained = 1 + trainer.current_epoch // self.every_n_epochs
        for group in groups[: max(0, len(groups) - n_trained)]:
            for parameter in group:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: what is trained depends on the epoch alone."""
        return {}
