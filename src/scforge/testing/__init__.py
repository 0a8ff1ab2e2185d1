"""Checks that packages with plugins run in their own tests."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {"check_model": "scforge.testing.models", "check_tokenizer": "scforge.testing.tokenizers"}

__all__ = ["check_model", "check_tokenizer"]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
