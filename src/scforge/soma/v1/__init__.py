"""Version 1 of the architecture: a causal transformer over bytes with rotary positions."""

from __future__ import annotations

__all__ = ["ARCHITECTURE_VERSION"]

ARCHITECTURE_VERSION = 1
"""Version that must equal the ``model_architecture_version`` of the network that the weights come from."""
