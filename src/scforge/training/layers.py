"""Layers of a module: their parameters, freezing, and learning rates by depth."""

from __future__ import annotations

from torch import nn

from scforge._checks import check_count, check_share
from scforge.errors import OptionError
from scforge.models.components.transformer import TransformerStack


def layer_groups(module: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters of each layer, from the input to the output.

    With transformer layers, the groups are the embeddings and all other parts before the first layer, each layer of the
    first stack, and all parts after it. Otherwise each group is a part with a weight matrix and the norms before it.
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
            outside = len(groups) - 1 if seen else 0
            groups[outside if number is None else number + 1].append(parameter)
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
            f", but there are only {len(groups) - 2} layers; freeze fewer layers, or all layers with freeze=True.",
            freeze=n_layers,
        )
    for group in groups[: n_layers + 1]:
        for parameter in group:
            parameter.requires_grad_(False)


def learning_rate_factors(module: nn.Module, decay: float | None) -> dict[int, float]:
    """Return the learning-rate factor of each parameter by its ``id``: `decay` for each layer below the top.

    These are discriminative learning rates, as in Howard and Ruder (2018).
    """
    if decay is None:
        return {}
    check_share("layer_lr_decay", decay)
    if not decay:
        raise OptionError("would train only the top layer; freeze the encoder instead.", layer_lr_decay=0)
    groups = layer_groups(module)
    top = len(groups) - 1
    return {id(p): decay ** (top - number) for number, group in enumerate(groups) for p in group}
