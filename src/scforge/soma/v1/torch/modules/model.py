"""The published import path of :class:`~scforge.soma.v1.torch.model.Model`."""

from __future__ import annotations

from scforge.soma.v1.torch.model import Model

__all__ = ["Model"]
