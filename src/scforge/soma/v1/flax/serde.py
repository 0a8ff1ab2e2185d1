"""Weights of flax modules as safetensors; matrices are stored as in flax (see :mod:`scforge.soma.v1.serde`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import safetensors.flax
from flax import nnx
from jax import Array

from scforge.soma.v1 import serde

_NAMES = {"embedding": "weight", "kernel": "weight", "scale": "gamma"}


type _Path = tuple[Any, ...]


class Serde[M: nnx.Module](serde.Serde[M]):
    """Write and read the weights of a module.

    Parameters
    ----------
    module
        The module, whose dtype does not change.
    """

    _format: ClassVar[Any] = safetensors.flax

    def _tensors(self) -> dict[str, Array]:
        return {name: variable[...] for name, (_, variable) in self._variables().items()}

    def _set(self, tensors: Mapping[str, Array]) -> None:
        new = {
            path: variable.replace(tensors[name].astype(variable.dtype))
            for name, (path, variable) in self._variables().items()
        }
        nnx.update(self.module, nnx.from_flat_state(new))

    def _variables(self) -> dict[str, tuple[_Path, Any]]:
        """Return a mapping from file key to path and variable; states of random generators are not weights."""
        flat: list[tuple[_Path, Any]] = list(nnx.to_flat_state(nnx.state(self.module, nnx.Param)))
        norms = {path[:-1] for path, _ in flat if path[-1] == "scale"}
        named = {}
        for path, variable in flat:
            *above, last = path
            name = "beta" if last == "bias" and tuple(above) in norms else _NAMES.get(last, last)
            named[".".join(map(str, (*above, name)))] = (path, variable)
        return named


class Serializable(serde.Serializable):
    """Add ``save`` and ``load`` to a module class; list it before ``nnx.Module``."""

    _serde = Serde
