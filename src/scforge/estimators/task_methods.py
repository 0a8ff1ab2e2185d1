"""Fine-tuning, predicting and evaluating: what a front class adds to :class:`~scforge.estimators.base.CellModel`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


NAME = "scforge"
_LEFT_OUT = ("self", "predictor", "adata", "key_added", "context")


def options_of(method: Any) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name not in _LEFT_OUT]
