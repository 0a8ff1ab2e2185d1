"""Helper functions for all architectures."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from scforge._registry import check_kinds, check_options
from scforge.errors import OptionError
from scforge.models.registry import own_names

if TYPE_CHECKING:
    from scforge.config.schema import ModelConfig


_INIT_STD = 0.02

_DRAWN = frozenset(("normal_", "uniform_", "kaiming_uniform_"))
"""Functions that draw the weights of layers of torch."""

_MAX_PARTS = 20_000
"""Maximum number of parts of a module; an encoder of 1,000 layers has about 10,000."""


def init_weights(module: nn.Module) -> None:
    """Initialize one module; intended for ``model.apply(init_weights)``.

    Linear layers are initialized with Xavier uniform weights and zero biases. Embeddings are normal with standard
    deviation 0.02, and zero at the padding index. Layer norms are initialized with ones and zeros. Modules whose
    attribute ``initializes_itself`` is true use their own ``reset_parameters``.

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


class undrawn(TorchFunctionMode):
    """Create modules whose parameters are not drawn, but loaded afterwards; on ``meta``, no tensor is drawn."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func.__name__ in _DRAWN:
            tensor = given["tensor"] if "tensor" in given else args[0]
            if isinstance(tensor, nn.Parameter) or tensor.is_meta:
                return tensor
        return func(*args, **given)


@contextmanager
def without_weights() -> Iterator[None]:
    """Create modules that have the shapes of their weights only, on the device ``meta``."""
    # Random numbers on this device would import the compiler of torch.
    with torch.device("meta"), undrawn():
        yield


class _Bounded(TorchFunctionMode):
    """Refuses a weight before it is created if the weights would take more than a number of bytes."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__()
        self._most, self._n_bytes = n_bytes, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in (torch.empty, torch.zeros, torch.ones, torch.randn, torch.rand):
            shape = given.get("size", args)
            shape = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
            self._n_bytes += 4 * math.prod(shape)
            if self._n_bytes > self._most:
                raise OptionError(
                    f"the model needs more than the {self._most / 1e9:,.1f} GB of available memory; choose smaller "
                    "sizes, such as hidden_dim."
                )
        return func(*args, **given)


@contextmanager
def bounded(n_bytes: int | None = None) -> Iterator[None]:
    """Raise an OptionError while a module is created that has too many parts, or weights of more than `n_bytes`.

    This holds for every architecture and head, whatever its options are called.
    """
    n_parts = 0

    def count(*_: Any) -> None:
        nonlocal n_parts
        n_parts += 1
        if n_parts > _MAX_PARTS:
            raise OptionError(f"the model has more than {_MAX_PARTS:,} parts; choose fewer layers.")

    handle = register_module_module_registration_hook(count)
    try:
        with nullcontext() if n_bytes is None else _Bounded(n_bytes):
            yield
    finally:
        handle.remove()


def count_parameters(model: nn.Module, *, trainable_only: bool = True) -> int:
    """Return the number of parameters of `model`.

    Parameters
    ----------
    model
        Any module.
    trainable_only
        Whether to count only parameters that require a gradient.

    Returns
    -------
    Number of scalar parameters, without buffers.

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
    """Switch to evaluation mode, then restore the mode of each part of the model (frozen parts may differ)."""
    in_training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in in_training:
            part.training = True


def number_of_each(argument: str, given: Any, n_cells: int, device: torch.device | None = None) -> torch.Tensor:
    """Return an integer for each cell, int64, shape (B,), from one integer per cell or one integer for all cells."""
    numbers = torch.as_tensor(given, device=device)
    whole = not (numbers.is_floating_point() or numbers.dtype == torch.bool)
    if not whole or numbers.ndim > 1 or (numbers.ndim == 1 and len(numbers) != n_cells):
        raise OptionError(
            f"has dtype {numbers.dtype} and shape {tuple(numbers.shape)}; pass an integer, or one integer "
            f"for each of the {n_cells} cells.",
            argument=argument,
        )
    return numbers.long().expand(n_cells)


class Architecture(nn.Module):
    """Base class for the scforge architectures: creation from a configuration, and number of parameters."""

    config_names: ClassVar[Mapping[str, str]] = {}
    """Mapping from shared configuration names to constructor names, e.g. ``{"hidden_dim": "encoder_dim"}``."""

    @classmethod
    def from_config(cls, config: ModelConfig) -> Self:
        """Create the model from the fields set in `config`; other arguments keep their defaults.

        Raises
        ------
        ValueError
            If ``config.vocab_size`` is None.
        OptionError
            If `config` sets an option that exists neither in the constructor nor in other architectures.
        """
        if config.vocab_size is None:
            raise OptionError("ModelConfig.vocab_size must be set before constructing a model.")
        parameters = {p.name: p for p in inspect.signature(cls).parameters.values() if p.name != "vocab_size"}
        # One configuration may serve several architectures; of the common fields each takes those it has.
        given = own_names(cls, config.user_options())
        common = set(type(config).model_fields)
        options = {name: value for name, value in given.items() if name in parameters or name not in common}
        check_options("option", cls.__name__, options, list(parameters))
        check_kinds(cls, options)
        needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
        shared = {name: getattr(config, name) for name in needed - set(options)}
        return cls(vocab_size=config.vocab_size, **shared, **options)

    def num_parameters(self, *, trainable_only: bool = True) -> int:
        """Return the number of parameters; with `trainable_only`, without frozen parameters."""
        return count_parameters(self, trainable_only=trainable_only)
