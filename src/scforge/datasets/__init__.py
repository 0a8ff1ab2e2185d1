"""Data sets by their names: real data that ship with the package, cards of others, and versioned splits."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "check_independent": "scforge.datasets.loading",
    "get_card": "scforge.datasets.cards",
    "get_split": "scforge.datasets.splits",
    "list_cards": "scforge.datasets.cards",
    "load": "scforge.datasets.loading",
    "make_split": "scforge.datasets.splits",
    "pbmc3k": "scforge.datasets._pbmc3k",
    "read_split": "scforge.datasets.splits",
    "write_split": "scforge.datasets.splits",
}

__all__ = [
    "check_independent",
    "get_card",
    "get_split",
    "list_cards",
    "load",
    "make_split",
    "pbmc3k",
    "read_split",
    "write_split",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
