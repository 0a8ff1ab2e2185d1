"""Published checkpoints of other packages, read into our architectures by name maps."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "AsIs": "scforge.foreign.name_map",
    "Family": "scforge.foreign.base",
    "FoldedRow": "scforge.foreign.name_map",
    "Foreign": "scforge.foreign.base",
    "LeftOut": "scforge.foreign.name_map",
    "NameMap": "scforge.foreign.name_map",
    "RowsInOrder": "scforge.foreign.name_map",
    "Rule": "scforge.foreign.name_map",
    "Stacked": "scforge.foreign.name_map",
    "Transform": "scforge.foreign.name_map",
    "Transposed": "scforge.foreign.name_map",
    "list_families": "scforge.foreign.base",
    "read_checkpoint": "scforge.foreign.base",
    "register_family": "scforge.foreign.base",
    "to_geneformer": "scforge.foreign.geneformer_export",
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
    "Transform",
    "AsIs",
    "Stacked",
    "Transposed",
    "FoldedRow",
    "RowsInOrder",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
