"""Weights of torch modules as safetensors in the layout that all frameworks share.

There the weight of a linear layer has the shape (in, out), that of torch transposed, and a layer norm has ``gamma``
and ``beta``. Other names and shapes are those of the torch module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import nn

from scforge._io import atomic_path
from scforge.errors import MissingFileError, ModelFileError, first_line, listing


class Serde[M: nn.Module]:
    """Writes and reads the weights of a module.

    Parameters
    ----------
    module
        Any module; it keeps its dtype and device.

    Examples
    --------
    >>> norm = nn.LayerNorm(2)
    >>> data = Serde(norm).serialize()
    >>> sorted(load(data))
    ['beta', 'gamma']
    >>> Serde(norm).deserialize(data) is norm
    True
    """

    def __init__(self, module: M) -> None:
        self.module = module
        self._names: dict[str, str] = {}
        """Name in a file by the name in torch, where they differ."""
        self._transposed: set[str] = set()
        """Weights of linear layers, by their name in torch."""
        for name, child in module.named_modules():
            prefix = f"{name}." if name else ""
            if isinstance(child, nn.LayerNorm):
                self._names |= {f"{prefix}weight": f"{prefix}gamma", f"{prefix}bias": f"{prefix}beta"}
            elif isinstance(child, nn.Linear):
                self._transposed.add(f"{prefix}weight")

    def serialize(self) -> bytes:
        """Return the weights as the bytes of a safetensors file."""
        return save(self._to_file())

    def serialize_to_file(self, filename: str | os.PathLike[str]) -> None:
        """Write the weights to a file, which is there as a whole or not at all."""
        with atomic_path(filename) as temporary:
            save_file(self._to_file(), temporary)

    def deserialize(self, data: bytes) -> M:
        """Set the weights to those of :meth:`serialize`; return the module.

        Raises
        ------
        ModelFileError
            If `data` is no safetensors, or a tensor is missing, unknown, of another shape, or not of finite real
            numbers; nothing is changed then.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ModelFileError(f"data cannot be read as safetensors: it is of type {type(data).__name__}, not bytes.")
        try:
            tensors = load(bytes(data))
        except SafetensorError as error:
            raise ModelFileError(f"data cannot be read as safetensors: {first_line(error)}.") from error
        return self._from_file(tensors, "data")

    def deserialize_from_file(self, filename: str | os.PathLike[str]) -> M:
        """Set the weights to those of a file; return the module.

        Raises
        ------
        MissingFileError
            If there is no such file.
        ModelFileError
            As :meth:`deserialize`.
        """
        path = Path(filename)
        if not path.is_file():
            raise MissingFileError(f"filename={str(path)!r} is not a file; pass the name of a file of weights.")
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{str(path)!r} cannot be read as safetensors: {first_line(error)}.") from error
        return self._from_file(tensors, repr(str(path)))

    def _to_file(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, tensor in self.module.state_dict().items():
            values = tensor.t() if name in self._transposed else tensor
            tensors[self._names.get(name, name)] = values.contiguous()
        return dict(sorted(tensors.items()))

    def _from_file(self, tensors: Mapping[str, torch.Tensor], where: str) -> M:
        own = self.module.state_dict()
        names = {self._names.get(name, name): name for name in own}
        if missing := names.keys() - tensors.keys():
            raise ModelFileError(f"{where} lacks {listing(sorted(missing), most=3)}; is it of other sizes?")
        if unknown := tensors.keys() - names.keys():
            raise ModelFileError(
                f"{where} holds {listing(sorted(unknown), most=3)}, which the model lacks; is it of other sizes?"
            )
        state = {}
        for key in sorted(tensors):
            name, values = names[key], tensors[key]
            wanted = own[name].shape[::-1] if name in self._transposed else own[name].shape
            if values.shape != wanted:
                raise ModelFileError(
                    f"{where} has {key!r} of shape {tuple(values.shape)}, the model of {tuple(wanted)}; make the model"
                    " with the sizes of the file."
                )
            if not values.is_floating_point():
                raise ModelFileError(f"{where} has {key!r} as {values.dtype}; real numbers are needed.")
            if not values.float().isfinite().all():
                raise ModelFileError(f"{where} has numbers in {key!r} that are not finite; train or copy it again.")
            state[name] = values.t() if name in self._transposed else values
        self.module.load_state_dict(state)
        return self.module


def load_safetensor_into(module: nn.Module, data: bytes) -> None:
    """Set the weights of a module to those of :meth:`Serde.serialize`."""
    Serde(module).deserialize(data)


class Serializable:
    """Adds ``save`` and ``load`` to a class of modules; name it before ``nn.Module``.

    Examples
    --------
    >>> class Doubled(Serializable, nn.Linear):
    ...     pass
    >>> data = Doubled(2, 4).save_bytes()
    >>> Doubled.load_bytes(data, 2, 4).weight.shape
    torch.Size([4, 2])
    """

    def save(self: Any, filename: str | os.PathLike[str]) -> None:
        """Write the weights to a safetensors file."""
        Serde(self).serialize_to_file(filename)

    def save_bytes(self: Any) -> bytes:
        """Return the weights as the bytes of a safetensors file."""
        return Serde(self).serialize()

    @classmethod
    def load(cls, filename: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Self:
        """Return ``cls(*args, **kwargs)`` with the weights of a file; errors as of :class:`Serde`."""
        module: Any = cls(*args, **kwargs)
        return Serde(module).deserialize_from_file(filename)

    @classmethod
    def load_bytes(cls, data: bytes, *args: Any, **kwargs: Any) -> Self:
        """Return ``cls(*args, **kwargs)`` with weights of :meth:`save_bytes`; errors as of :class:`Serde`."""
        module: Any = cls(*args, **kwargs)
        return Serde(module).deserialize(data)
