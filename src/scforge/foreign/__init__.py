"""Published checkpoints of other packages, read into our architectures by name maps."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "Family": "scforge.foreign.base",
    "Foreign": "scforge.foreign.base",
    "LeftOut": "scforge.foreign.base",
    "NameMap": "scforge.foreign.base",
    "Rule": "scforge.foreign.base",
    "read_checkpoint": "scforge.foreign.base",
    "register_family": "scforge.foreign.base",
    "stacked": "scforge.foreign.base",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "read_checkpoint",
    "register_family",
    "Family",
    "Foreign",
    "NameMap",
    "Rule",
    "LeftOut",
    "stacked",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
