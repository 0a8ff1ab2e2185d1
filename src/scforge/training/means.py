"""Means of figures over the cells of an epoch, which an interruption does not lose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["EpochMeans"]


class EpochMeans:
    """Adds figures up step by step; the sums stay on their device, so that no step waits for them."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._cells = 0

    def add(self, figures: dict[str, torch.Tensor], n_cells: int) -> None:
        """Add the figures of a step, means over its `n_cells` cells, each a tensor of a shape of its own."""
        self._cells += n_cells
        for name, value in figures.items():
            value = value.detach()
            exact = torch.float32 if value.device.type == "mps" else torch.float64
            weighed = value.to(exact) * n_cells
            self._sums[name] = self._sums[name].to(value.device) + weighed if name in self._sums else weighed

    def take(self, total: Callable[[torch.Tensor], torch.Tensor] | None = None) -> dict[str, np.ndarray]:
        """Return the means, over the cells of all processes if `total` adds up over them, and begin anew."""
        if not self._sums:
            return {}
        names = sorted(self._sums)
        flat = [self._sums[name].flatten() for name in names]
        sums = torch.cat([*flat, torch.full_like(flat[0][:1], self._cells)])
        if total is not None:
            sums = total(sums)
        means = (sums[:-1] / sums[-1]).cpu().numpy()
        parts = np.split(means, np.cumsum([len(one) for one in flat])[:-1])
        shapes = [tuple(self._sums[name].shape) for name in names]
        self._sums, self._cells = {}, 0
        return {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far, JSON-safe."""
        return {"sums": {name: value.tolist() for name, value in self._sums.items()}, "cells": self._cells}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with sums."""
        self._sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in state["sums"].items()}
        self._cells = int(state["cells"])
