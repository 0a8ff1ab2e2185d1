"""The published import path of :class:`~scforge.soma.v1.flax.sigreg.SIGReg`."""

from __future__ import annotations

from scforge.soma.v1.flax.sigreg import SIGReg

__all__ = ["SIGReg"]
