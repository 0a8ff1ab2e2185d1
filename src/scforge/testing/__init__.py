"""Contract tests for plugin packages, and simulated data with known ground truth."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "SimulatedScreen": "scforge.testing.screens",
    "check_model": "scforge.testing.models",
    "check_objective": "scforge.testing.objectives",
    "check_tokenizer": "scforge.testing.tokenizers",
    "raises": "scforge.testing.errors",
    "simulate_screen": "scforge.testing.screens",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
