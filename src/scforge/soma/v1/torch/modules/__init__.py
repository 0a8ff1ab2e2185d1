"""Parts of the model: encoder, layer, attention, feed-forward block.

``Model`` and ``SIGReg`` stand here too, as published; they are made of the parts, and imported when asked for.
"""

from __future__ import annotations

from scforge._lazy import lazy_names

__all__ = ["Model", "SIGReg"]

__getattr__, __dir__ = lazy_names(
    __name__, {"Model": "scforge.soma.v1.torch.model", "SIGReg": "scforge.soma.v1.torch.sigreg"}
)
