"""Real data that ships with the package, so that examples and tests run without a network."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {"pbmc3k": "scforge.datasets._pbmc3k"}

__all__ = ["pbmc3k"]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
