"""Small helpers for all architectures."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scforge._registry import check_options
from scforge.errors import OptionError, TrainingError, listing

if TYPE_CHECKING:
    from scforge.config.schema import ModelConfig


_INIT_STD = 0.02


def init_weights(module: nn.Module) -> None:
    """Initialize one module; meant for ``model.apply(init_weights)``.

    Linear layers: Xavier uniform weights, zero biases. Embeddings: normal with standard deviation 0.02, zero at the
    padding index. Layer norms: ones and zeros. A module with a true attribute ``initializes_itself``: its own
    ``reset_parameters``.

    Parameters
    ----------
    module
        A single module.

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).apply(init_weights)
    >>> model[0].bias.tolist(), model[1].weight.tolist()
    ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    """
    if getattr(module, "initializes_itself", False):
        module.reset_parameters()
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        nn.init.normal_(module.weight, mean=0.0, std=_INIT_STD)
        if module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()
    elif isinstance(module, nn.LayerNorm) and module.elementwise_affine:
        nn.init.ones_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def count_parameters(model: nn.Module, *, trainable_only: bool = True) -> int:
    """Return the number of parameters of `model`, those without gradient left out if `trainable_only`.

    Parameters
    ----------
    model
        Any module.
    trainable_only
        Count only parameters that need a gradient.

    Returns
    -------
    Number of numbers in the parameters; buffers do not count.

    Examples
    --------
    >>> from torch import nn
    >>> layer = nn.Linear(4, 3)
    >>> _ = layer.bias.requires_grad_(False)
    >>> count_parameters(layer), count_parameters(layer, trainable_only=False)
    (12, 15)
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable_only)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn dropout off, and leave all parts of the model in the mode in which they were (frozen ones may differ)."""
    in_training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in in_training:
            part.training = True


def check_choice(argument: str, value: Any, known: list[str]) -> None:
    """Raise unless `value` is one of `known`."""
    if value not in known:
        raise OptionError(f"{argument}={value!r} is not known (known: {listing(known)})")


def build_from_config[M: nn.Module](
    cls: type[M], config: ModelConfig, renamed: Mapping[str, str] = MappingProxyType({})
) -> M:
    """Make a module from a configuration: what the user set is passed on, for the rest the constructor's defaults hold.

    Parameters
    ----------
    cls
        The class.
    config
        The configuration.
    renamed
        Fields of the configuration that the constructor knows by another name, e.g. ``{"hidden_dim": "encoder_dim"}``.

    Raises
    ------
    ValueError
        If ``config.vocab_size`` is None.
    OptionError
        If the user set an option that neither the constructor nor other architectures have.
    """
    if config.vocab_size is None:
        raise OptionError("ModelConfig.vocab_size must be set before constructing a model.")
    parameters = {p.name: p for p in inspect.signature(cls).parameters.values()}
    # One configuration may serve several architectures; of the common fields each takes those it has.
    common = set(type(config).model_fields)
    options: dict[str, Any] = {}
    for name, value in config.user_options().items():
        wanted = renamed.get(name, name)
        if wanted in parameters or name not in common:
            if wanted in options:
                raise OptionError(f"{name}={value!r} and {wanted}={options[wanted]!r} name the same option; give one.")
            options[wanted] = value
    check_options("option", cls.__name__, options, [name for name in parameters if name != "vocab_size"])
    for name, parameter in parameters.items():
        required = parameter.default is inspect.Parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if required and name not in options and name != "vocab_size":
            if not hasattr(config, name):
                raise OptionError(f"{cls.__name__} needs the option {name!r}; give it a value.")
            options[name] = getattr(config, name)
    return cls(vocab_size=config.vocab_size, **options)


def _softmax(
    logits_bv: torch.Tensor, allowed_bv: torch.Tensor, temperature: float, top_k: int | None = None
) -> torch.Tensor:
    """Return the probabilities of the allowed entries, float64, shape (B, V); zeros in a row without any."""
    if not bool(logits_bv.isfinite().all()):
        raise TrainingError("the model predicts numbers that are not finite; train it again with a lower lr.")
    logits_bv = logits_bv.double().masked_fill(~allowed_bv, float("-inf"))
    if top_k is not None and top_k < logits_bv.shape[1]:
        likeliest_bk = logits_bv.topk(top_k, dim=1).indices
        among_bv = torch.zeros_like(allowed_bv).scatter(1, likeliest_bk, True)
        logits_bv = logits_bv.masked_fill(~among_bv, float("-inf"))
    # Taken off before the division, which may be by next to nothing.
    logits_bv = (logits_bv - logits_bv.amax(dim=1, keepdim=True)) / temperature
    return logits_bv.softmax(dim=1).nan_to_num(0.0)


def _draw(shares_bv: torch.Tensor, random_b: torch.Tensor) -> torch.Tensor:
    """Draw an entry of each row by inverting its distribution function, int64, shape (B,)."""
    sums_bv = shares_bv.cumsum(dim=1)
    aim_b1 = (random_b * sums_bv[:, -1]).unsqueeze(1)
    return torch.searchsorted(sums_bv, aim_b1, right=True).squeeze(1).clamp(max=shares_bv.shape[1] - 1)
