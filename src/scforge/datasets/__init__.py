"""Data sets by name: real data bundled with the package, cards of other data sets, and versioned splits."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "get_card": "scforge.datasets.cards",
    "get_split": "scforge.datasets.splits",
    "list_cards": "scforge.datasets.cards",
    "load": "scforge.datasets.loading",
    "lung_cell_lines": "scforge.datasets.bundled",
    "pbmc3k": "scforge.datasets.bundled",
    "read_split": "scforge.datasets.splits",
    "write_split": "scforge.datasets.splits",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
