"""What a benchmark is, and the registry of benchmarks."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from scforge._registry import Registry, check_options

__all__ = ["BENCHMARKS", "Benchmark", "get_benchmark", "list_benchmarks", "register_benchmark"]


class Benchmark(ABC):
    """Scores an embedding of cells, whatever made it, against columns of obs.

    Attributes
    ----------
    metrics
        Names of the figures that :meth:`run` returns.
    """

    metrics: tuple[str, ...]

    @abstractmethod
    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        """Return one figure for each metric.

        Parameters
        ----------
        embedding
            Shape (N, D).
        obs
            Annotation of the same cells, N rows.
        """


BENCHMARKS: Registry[type[Benchmark]] = Registry(
    "benchmark", group="scforge.benchmarks", builtin={"label_prediction": "scforge.eval.label_prediction"}
)


def register_benchmark(name: str) -> Callable[[Any], Any]:
    """Register a :class:`Benchmark` class as `name` (class decorator)."""
    return BENCHMARKS.register(name)


def list_benchmarks() -> list[str]:
    """Return the names of all benchmarks.

    Examples
    --------
    >>> list_benchmarks()
    ['label_prediction']
    """
    return BENCHMARKS.names()


def get_benchmark(name: str, **options: Any) -> Benchmark:
    """Make the benchmark registered as `name`.

    Parameters
    ----------
    name
        Registry key, e.g. ``"label_prediction"``.
    **options
        Options of its constructor.

    Raises
    ------
    OptionError
        If the name, or an option, is unknown.
    """
    cls = BENCHMARKS.get(name)
    check_options("benchmark option", name, options, list(inspect.signature(cls).parameters))
    return cls(**options)
