"""Weights as safetensors, in the layout that all halves of soma share.

Matrices are (inputs, outputs), as flax keeps them; the scale and bias of a LayerNorm are ``gamma`` and ``beta``; keys
are sorted. A file is the same, byte for byte, whoever wrote it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
from flax import nnx
from jax import Array
from safetensors import SafetensorError
from safetensors.flax import load, save

from scforge._io import atomic_write_bytes
from scforge.errors import MissingFileError, ModelFileError, first_line, listing

type _Path = tuple[Any, ...]

_NAMES = {"embedding": "weight", "kernel": "weight", "scale": "gamma"}


class Serde[M: nnx.Module]:
    """Writes the weights of a module as bytes, and reads them into it.

    Parameters
    ----------
    module
        The module.
    """

    def __init__(self, module: M) -> None:
        self.module = module

    def serialize(self) -> bytes:
        """Return the weights as a safetensors file."""
        return save({key: variable[...] for key, (_, variable) in sorted(self._variables().items())})

    def serialize_to_file(self, filename: str | os.PathLike[str]) -> None:
        """Write the weights to a file, which is there as a whole or not at all."""
        atomic_write_bytes(filename, self.serialize())

    def deserialize(self, data: bytes) -> M:
        """Put the weights of a file into the module, in the dtype of the module, and return it.

        Raises
        ------
        ModelFileError
            If the bytes are no safetensors file, hold other keys or shapes than the module, or
            numbers that are not real and finite; nothing is changed then.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ModelFileError(f"the weights are no safetensors file: data is of type {type(data).__name__}.")
        try:
            found: dict[str, Array] = load(bytes(data))
        except SafetensorError as error:
            raise ModelFileError(f"the weights are no safetensors file: {first_line(error)}.") from error
        variables = self._variables()
        _check(found, {key: tuple(variable.shape) for key, (_, variable) in variables.items()})
        new = {path: variable.replace(found[key].astype(variable.dtype)) for key, (path, variable) in variables.items()}
        nnx.update(self.module, nnx.from_flat_state(new))
        return self.module

    def deserialize_from_file(self, filename: str | os.PathLike[str]) -> M:
        """Put the weights of a file into the module, and return it.

        Raises
        ------
        MissingFileError
            If there is no such file.
        ModelFileError
            As :meth:`deserialize`.
        """
        path = Path(filename)
        if not path.is_file():
            raise MissingFileError(f"filename={str(filename)!r} does not exist; give a file of weights.")
        return self.deserialize(path.read_bytes())

    def _variables(self) -> dict[str, tuple[_Path, Any]]:
        """Return key in the file to path and variable; states of random generators are no weights."""
        flat: list[tuple[_Path, Any]] = list(nnx.to_flat_state(nnx.state(self.module, nnx.Param)))
        norms = {path[:-1] for path, _ in flat if path[-1] == "scale"}
        named = {}
        for path, variable in flat:
            *above, last = path
            name = "beta" if last == "bias" and tuple(above) in norms else _NAMES.get(last, last)
            named[".".join(map(str, (*above, name)))] = (path, variable)
        return named


def _check(found: dict[str, Array], wanted: dict[str, tuple[int, ...]]) -> None:
    """Raise if keys or shapes differ."""
    if missing := sorted(set(wanted) - set(found)):
        raise ModelFileError(
            f"the weights lack {listing(missing, most=3)}; give the configuration they were made with."
        )
    if unknown := sorted(set(found) - set(wanted)):
        raise ModelFileError(
            f"the weights hold {listing(unknown, most=3)}, which the model has not; give the configuration they were "
            "made with."
        )
    for key, shape in wanted.items():
        if found[key].shape != shape:
            raise ModelFileError(
                f"the weights hold {key!r} of shape {found[key].shape}, but the model has it of shape {shape}; give "
                "the configuration they were made with."
            )
        if not jnp.issubdtype(found[key].dtype, jnp.floating):
            raise ModelFileError(f"the weights hold {key!r} as {found[key].dtype}; real numbers are needed.")
        if not jnp.isfinite(found[key]).all():
            raise ModelFileError(f"the weights hold numbers in {key!r} that are not finite; train or copy them again.")


class Serializable:
    """Gives a module ``save``, ``save_bytes``, ``load`` and ``load_bytes``."""

    def save(self, filename: str | os.PathLike[str]) -> None:
        """Write the weights to a safetensors file."""
        Serde(self).serialize_to_file(filename)

    def save_bytes(self) -> bytes:
        """Return the weights as the bytes of a safetensors file."""
        return Serde(self).serialize()

    @classmethod
    def load(cls, filename: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Self:
        """Make a module with the arguments behind `filename`, and read its weights from the file.

        Raises
        ------
        MissingFileError
            If there is no such file.
        ModelFileError
            If it holds other keys or shapes than the module.
        """
        return Serde(cls(*args, **kwargs)).deserialize_from_file(filename)

    @classmethod
    def load_bytes(cls, data: bytes, *args: Any, **kwargs: Any) -> Self:
        """Make a module with the arguments behind `data`, and read its weights from the bytes; errors as in `load`."""
        return Serde(cls(*args, **kwargs)).deserialize(data)
