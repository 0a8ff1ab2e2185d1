"""Shared helpers for plots: colors for color-blind readers, axes, and table checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scforge._checks import check_known
from scforge.errors import DataError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


# Okabe and Ito (2008), "Color Universal Design", without the yellow, which is too light for thin lines.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Colors of models."""

KINDS = {
    "model": "#0072B2",
    "supervised": "#D55E00",
    "baseline": "#7F7F7F",
    "untrained": "#B0B0B0",
    "ceiling": "#009E73",
}
"""A mapping from kind of report row to color."""


def new_axes(ax: Axes | None, width: float, height: float, *, layout: str = "constrained") -> Axes:
    """Return `ax`, or create new axes with a size in inches."""
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), layout=layout)[1] if ax is None else ax


def name_rows(
    ax: Axes, names: Sequence[str], kinds: Mapping[str, str] | None = None, *, from_top: bool = False
) -> None:
    """Label each row of the axes, with models in bold, and keep only the bottom spine."""
    ax.set_yticks(range(len(names)), names)
    for label, name in zip(ax.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if kinds and kinds.get(name) == "model" else "normal")
    ends = (-0.6, len(names) - 0.4)
    ax.set_ylim(ends[::-1] if from_top else ends)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def say_undefined(ax: Axes, row: int) -> None:
    """Mark a row with an undefined score."""
    coordinates = ("axes fraction", "data")
    ax.annotate("not defined", (0.02, row), xycoords=coordinates, va="center", color="0.5", fontsize="x-small")


def legend_name(name: str) -> str:
    """Return a name as an entry of a legend; matplotlib hides entries that begin with an underscore."""
    return f"\u200b{name}" if name.startswith("_") else name


def legend_beside(ax: Axes, **options: Any) -> None:
    """Add a legend to the right of the axes."""
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", **options)


def check_columns(argument: str, given: Any, needed: Iterable[str]) -> pd.DataFrame:
    """Return a table, or the table of a report. Raises an error if it is empty or lacks a column."""
    frame = given.to_frame() if hasattr(given, "to_frame") else given
    if not hasattr(frame, "columns"):
        raise DataError(
            f"is of type {type(frame).__name__!r}; pass a report or a table (pandas DataFrame).",
            argument=argument,
        )
    for name in needed:
        check_known("column", name, frame, argument)
    if not len(frame):
        raise DataError("has no rows, so there is nothing to plot.", argument=argument)
    return frame
