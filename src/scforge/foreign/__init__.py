"""Published checkpoints of other packages, converted to scforge architectures with name maps."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "register_family": "scforge.foreign.base",
    "Family": "scforge.foreign.base",
    "Foreign": "scforge.foreign.base",
    "NameMap": "scforge.foreign.base",
    "Rule": "scforge.foreign.base",
    "LeftOut": "scforge.foreign.base",
    "stacked": "scforge.foreign.base",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
