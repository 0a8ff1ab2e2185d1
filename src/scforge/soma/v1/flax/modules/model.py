"""The published import path of :class:`~scforge.soma.v1.flax.model.Model`."""

from __future__ import annotations

from scforge.soma.v1.flax.model import Model

__all__ = ["Model"]
