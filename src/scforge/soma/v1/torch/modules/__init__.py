"""Parts of the model: encoder, layer, attention, feed-forward block.

``Model`` and ``SIGReg`` stand here too, as published; they are made of the parts, and imported when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scforge.soma.v1.torch.model import Model
    from scforge.soma.v1.torch.sigreg import SIGReg

__all__ = ["Model", "SIGReg"]


def __getattr__(name: str) -> Any:
    if name == "Model":
        from scforge.soma.v1.torch.model import Model

        return Model
    if name == "SIGReg":
        from scforge.soma.v1.torch.sigreg import SIGReg

        return SIGReg
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
