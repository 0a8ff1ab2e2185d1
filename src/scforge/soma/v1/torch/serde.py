"""Weights of torch modules as safetensors; torch matrices are transposed (see :mod:`scforge.soma.v1.serde`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import safetensors.torch
import torch
from torch import nn

from scforge.soma.v1 import serde


class Serde[M: nn.Module](serde.Serde[M]):
    """Write and read the weights of a module.

    Parameters
    ----------
    module
        Any module, whose dtype and device do not change.

    Examples
    --------
    >>> norm = nn.LayerNorm(2)
    >>> data = Serde(norm).serialize()
    >>> sorted(safetensors.torch.load(data))
    ['beta', 'gamma']
    >>> Serde(norm).deserialize(data) is norm
    True
    """

    _format: ClassVar[Any] = safetensors.torch

    def __init__(self, module: M) -> None:
        super().__init__(module)
        self._names: dict[str, str] = {}
        """Mapping from torch names to file names, where they differ."""
        self._transposed: set[str] = set()
        """Torch names of the weights of linear layers."""
        for name, child in module.named_modules():
            prefix = f"{name}." if name else ""
            if isinstance(child, nn.LayerNorm):
                self._names |= {f"{prefix}weight": f"{prefix}gamma", f"{prefix}bias": f"{prefix}beta"}
            elif isinstance(child, nn.Linear):
                self._transposed.add(f"{prefix}weight")

    def _turned(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t() if name in self._transposed else tensor

    def _tensors(self) -> dict[str, torch.Tensor]:
        own = self.module.state_dict().items()
        return {self._names.get(name, name): self._turned(name, tensor) for name, tensor in own}

    def _for_file(self) -> dict[str, torch.Tensor]:
        return {name: tensor.contiguous() for name, tensor in self._tensors().items()}

    def _set(self, tensors: Mapping[str, torch.Tensor]) -> None:
        names = {name: self._names.get(name, name) for name in self.module.state_dict()}
        self.module.load_state_dict({name: self._turned(name, tensors[key]) for name, key in names.items()})


def load_safetensor_into(module: nn.Module, data: bytes) -> None:
    """Set the weights of a module to the output of :meth:`Serde.serialize`."""
    Serde(module).deserialize(data)


class Serializable(serde.Serializable):
    """Add ``save`` and ``load`` to a module class; list it before ``nn.Module``.

    Examples
    --------
    >>> class Doubled(Serializable, nn.Linear):
    ...     pass
    >>> data = Doubled(2, 4).save_bytes()
    >>> Doubled.load_bytes(data, 2, 4).weight.shape
    torch.Size([4, 2])
    """

    _serde = Serde
