"""What a benchmark is, and the registry of benchmarks."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from scforge._registry import Registry, check_options
from scforge.errors import DataError, OptionError, did_you_mean, listing

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "check_column",
    "get_benchmark",
    "list_benchmarks",
    "options_of",
    "register_benchmark",
]

KEYS = ("labels_key", "batch_key")
"""Options that name a column of obs; a callback fills them in from the data where they are left out."""


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

    def check(self, obs: pd.DataFrame) -> None:
        """Raise where cells with this annotation cannot be scored; called before training starts.

        Here: where ``labels_key`` or ``batch_key``, if the benchmark has them, is not a column. A benchmark that needs
        more than that overrides it.

        Parameters
        ----------
        obs
            Annotation of the cells that :meth:`run` is going to see, N rows.

        Raises
        ------
        DataError
            If a column is missing.
        """
        for argument in KEYS:
            key = getattr(self, argument, None)
            if key is not None:
                check_column(argument, key, obs)


def check_column(argument: str, key: str, obs: pd.DataFrame) -> None:
    """Raise :class:`~scforge.errors.DataError` unless obs has the column `key`."""
    if key not in obs:
        columns = [column for column in obs.columns if not str(column).startswith("_scvi_")]
        raise DataError(
            f"{argument}={key!r} is not a column of obs{did_you_mean(key, columns) or ';'} "
            f"(obs has: {listing(columns)})"
        )


BENCHMARKS: Registry[type[Benchmark]] = Registry(
    "benchmark",
    group="scforge.benchmarks",
    builtin={
        "batch_integration": "scforge.eval.batch_integration",
        "cell_type_annotation": "scforge.eval.cell_type_annotation",
        "label_prediction": "scforge.eval.label_prediction",
    },
)


def register_benchmark(name: str) -> Callable[[Any], Any]:
    """Register a :class:`Benchmark` class as `name` (class decorator)."""
    return BENCHMARKS.register(name)


def list_benchmarks() -> list[str]:
    """Return the names of all benchmarks.

    Examples
    --------
    >>> list_benchmarks()
    ['batch_integration', 'cell_type_annotation', 'label_prediction']
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
        If the name, or an option, is unknown, or an option is missing.
    """
    known = options_of(name)
    check_options("benchmark option", name, options, list(known))
    for option, needed in known.items():
        if needed and option not in options:
            raise OptionError(f"the benchmark {name!r} needs the option {option}; give it.")
    return BENCHMARKS.get(name)(**options)


def options_of(name: str) -> dict[str, bool]:
    """Return the options of a benchmark, and of each whether it has to be given."""
    parameters = inspect.signature(BENCHMARKS.get(name)).parameters
    return {option: parameter.default is parameter.empty for option, parameter in parameters.items()}
