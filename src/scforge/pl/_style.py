"""What the plots share: colours that colour-blind readers tell apart, axes, and checks of tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge.errors import DataError, did_you_mean, listing

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


# Okabe and Ito (2008), "Color Universal Design", without the yellow, which is too light for thin lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""For models."""

KINDS = {
    "model": "#0072B2",
    "supervised": "#D55E00",
    "baseline": "#7F7F7F",
    "untrained": "#B0B0B0",
    "ceiling": "#009E73",
}
"""For the kinds of rows of a report."""


def new_axes(ax: Axes | None, width: float, height: float, *, layout: str = "constrained") -> Axes:
    """Return `ax`, or new axes of a size in inches."""
    import matplotlib.pyplot as plt

    if ax is None:
        _, ax = plt.subplots(figsize=(width, height), layout=layout)
    return ax


def frame_of(argument: str, given: Any) -> pd.DataFrame:
    """Return a table, or that of a report."""
    import pandas as pd

    frame = given.to_frame() if hasattr(given, "to_frame") else given
    if not isinstance(frame, pd.DataFrame):
        kind = type(given).__name__
        raise DataError(f"{argument} is of type {kind!r}; pass a report or a table (pandas DataFrame).")
    return frame


def check_columns(argument: str, frame: pd.DataFrame, needed: Iterable[str]) -> None:
    """Raise :class:`~scforge.errors.DataError` unless a table has rows and the columns that a plot reads."""
    if not hasattr(frame, "columns"):
        raise DataError(f"{argument} is of type {type(frame).__name__!r}; pass a table (pandas DataFrame).")
    for name in needed:
        if name not in frame:
            known = list(frame.columns)
            raise DataError(f"{argument} has no column {name!r}{did_you_mean(name, known)} (it has: {listing(known)}).")
    if not len(frame):
        raise DataError(f"{argument} has no rows, so that there is nothing to draw.")


def spread(places: Sequence[float] | np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """Move places apart until none is nearer than `gap` to the next, each as little as possible, within limits.

    Parameters
    ----------
    places
        Where labels would stand, in any order.
    gap
        Least distance; smaller where there is no room.
    low, high
        Limits.

    Returns
    -------
    Where they stand, in the same order.

    Examples
    --------
    >>> spread([0.5, 0.5, 0.0], 0.2, 0.0, 1.0).round(2).tolist()
    [0.4, 0.6, 0.0]
    """
    from scipy.optimize import isotonic_regression

    wanted = np.asarray(places, dtype=np.float64)
    if not len(wanted):
        return wanted
    order = np.argsort(wanted, kind="stable")
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    steps = gap * np.arange(len(wanted))
    # With the gaps taken away, labels that are apart enough are those that rise.
    risen = isotonic_regression(wanted[order] - steps).x
    risen = np.clip(risen, low, high - steps[-1])
    placed = np.empty_like(wanted)
    placed[order] = risen + steps
    return placed
