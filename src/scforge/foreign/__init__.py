"""Published checkpoints of other packages, read into our architectures by name maps."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "Family": "scforge.foreign.base",
    "Foreign": "scforge.foreign.base",
    "LeftOut": "scforge.foreign.base",
    "NameMap": "scforge.foreign.base",
    "Rule": "scforge.foreign.base",
    "list_families": "scforge.foreign.base",
    "read_checkpoint": "scforge.foreign.base",
    "register_family": "scforge.foreign.base",
    "stacked": "scforge.foreign.base",
    "to_geneformer": "scforge.foreign.geneformer",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "read_checkpoint",
    "to_geneformer",
    "list_families",
    "register_family",
    "Family",
    "Foreign",
    "NameMap",
    "Rule",
    "LeftOut",
    "stacked",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
