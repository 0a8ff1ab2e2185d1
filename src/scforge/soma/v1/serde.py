"""Weights as safetensors, in the layout shared by the torch and flax versions of soma.

A matrix has the shape (inputs, outputs); the scale and bias of a layer norm are called ``gamma`` and ``beta``; keys are
sorted. Both versions write identical files.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors import SafetensorError

from scforge._io import atomic_path
from scforge.errors import MissingFileError, ModelFileError, first_line, listing


class Serde[M](abc.ABC):
    """Write and read the weights of a module.

    Parameters
    ----------
    module
        Any module, whose dtype and device do not change.
    """

    _format: ClassVar[Any]
    """The safetensors module for the framework."""

    def __init__(self, module: M) -> None:
        self.module = module

    @abc.abstractmethod
    def _tensors(self) -> dict[str, Any]:
        """Return a mapping from file key to module weight, in the shapes used in the file."""

    def _for_file(self) -> dict[str, Any]:
        """Return the weights in safetensors format."""
        return self._tensors()

    @abc.abstractmethod
    def _set(self, tensors: Mapping[str, Any]) -> None:
        """Set the weights of the module to the weights from a file, after checks."""

    def serialize(self) -> bytes:
        """Return the weights as the bytes of a safetensors file."""
        return self._format.save(self._for_file())

    def serialize_to_file(self, filename: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the weights to a file, which must not exist unless `overwrite`; an interrupted write leaves no file."""
        with atomic_path(filename, overwrite=overwrite, argument="filename") as temporary:
            self._format.save_file(self._for_file(), temporary)

    def deserialize(self, data: bytes) -> M:
        """Set the weights to the output of :meth:`serialize`; return the module.

        Raises
        ------
        ModelFileError
            If `data` is not safetensors, or a tensor is missing, is unknown, has a different shape, or does not contain
            finite real numbers. The module does not change in this case.
        """
        return self._read("data", lambda: self._format.load(bytes(data)))

    def deserialize_from_file(self, filename: str | os.PathLike[str]) -> M:
        """Set the weights to the weights in a file; return the module.

        Raises
        ------
        MissingFileError
            If there is no such file.
        ModelFileError
            As in :meth:`deserialize`.
        """
        if not Path(filename).is_file():
            raise MissingFileError("is not a file; pass the name of a file with weights.", filename=str(filename))
        return self._read(repr(str(filename)), lambda: self._format.load_file(filename))

    def _read(self, where: str, load: Callable[[], dict[str, Any]]) -> M:
        try:
            tensors = load()
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            raise ModelFileError(f"{where} cannot be read as safetensors: {first_line(error)}.") from error
        wanted = self._tensors()
        if missing := wanted.keys() - tensors.keys():
            raise ModelFileError(
                f"{where} lacks the weights {listing(sorted(missing), most=3)}; check the sizes of the model."
            )
        if unknown := tensors.keys() - wanted.keys():
            raise ModelFileError(
                f"{where} contains the unknown weights {listing(sorted(unknown))}; check the sizes of the model."
            )
        for name, values in sorted(tensors.items()):
            shape, own = tuple(values.shape), tuple(wanted[name].shape)
            if shape != own:
                raise ModelFileError(
                    f"{where} contains {name!r} with shape {shape}, but the model requires shape {own}; check the "
                    "sizes of the model."
                )
            # The difference is not a number for what is not finite.
            if "float" not in str(values.dtype) or not (values - values == 0).all():
                raise ModelFileError(
                    f"{where} contains {name!r} ({values.dtype}) with values that are not real and finite; copy the "
                    "weights again."
                )
        self._set(tensors)
        return self.module


class Serializable:
    """Add ``save`` and ``load`` to a module class; list it before the base module class."""

    _serde: ClassVar[type[Serde[Any]]]

    def save(self, filename: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the weights to a safetensors file, which must not exist unless `overwrite`."""
        self._serde(self).serialize_to_file(filename, overwrite=overwrite)

    def save_bytes(self) -> bytes:
        """Return the weights as the bytes of a safetensors file."""
        return self._serde(self).serialize()

    @classmethod
    def load(cls, filename: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Self:
        """Return ``cls(*args, **kwargs)`` with the weights from a file; see :class:`Serde` for errors."""
        return cls._serde(cls(*args, **kwargs)).deserialize_from_file(filename)

    @classmethod
    def load_bytes(cls, data: bytes, *args: Any, **kwargs: Any) -> Self:
        """Return ``cls(*args, **kwargs)`` with weights from :meth:`save_bytes`; see :class:`Serde` for errors."""
        return cls._serde(cls(*args, **kwargs)).deserialize(data)
