"""Parts of the model: encoder, layer, attention, feed-forward block.

``Model`` and ``SIGReg`` are also available here, as in the published package; they are imported on first use.
"""

from __future__ import annotations

from scforge._lazy import lazy_names

__all__ = ["Model", "SIGReg"]

__getattr__, __dir__ = lazy_names(
    __name__, {"Model": "scforge.soma.v1.torch.model", "SIGReg": "scforge.soma.v1.torch.sigreg"}
)
