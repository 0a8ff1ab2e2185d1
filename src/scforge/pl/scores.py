"""Plot the scores of methods and baselines."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scforge._checks import check_known
from scforge._text import literal
from scforge.errors import OptionError
from scforge.pl._style import KINDS, check_columns, legend_beside, name_rows, new_axes, say_undefined

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


_MARKERS = {"model": "o", "supervised": "s", "baseline": "o", "untrained": "X", "ceiling": "D"}
TOTALS = ("bio", "batch", "total")
_LIGHT = (0.299, 0.587, 0.114)  # how light red, green and blue are (ITU-R BT.601)
_OF_BATCHES = ("bras", "silhouette_batch", "ilisi", "kbet", "graph_connectivity", "pcr")


def metrics(
    report: Any,
    metrics: str | Sequence[str] | None = None,
    *,
    benchmark: str | None = None,
    lower_is_better: Collection[str] | None = None,
    ax: Axes | Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """Plot scores as dots with confidence intervals, with one panel per metric and the best method on top.

    Parameters
    ----------
    report
        A :class:`~scforge.eval.Report`, or its table with the columns ``method``, ``metric`` and ``value``. Optional
        columns are ``kind`` (baselines are gray), ``low`` and ``high`` (ends of the interval), ``benchmark`` and
        ``lower_is_better`` (bool).
    metrics
        Metrics to plot. If None, plots all metrics. The first metric determines the order of the methods.
    benchmark
        Benchmark to plot, if there are several.
    lower_is_better
        Metrics for which lower values are better. If None, reads them from the report, or from the column
        ``lower_is_better`` of its table.
    ax
        Axes to draw on, one per metric. If None, creates new axes.

    Returns
    -------
    The axes, one per metric.

    Raises
    ------
    DataError
        If the table lacks a column or is empty.
    OptionError
        If a metric or benchmark is not in the table, or must be chosen.

    Examples
    --------
    >>> import pandas as pd, scforge
    >>> table = pd.DataFrame({"method": ["PCA", "scforge"], "metric": "knn_macro_f1", "value": [0.81, 0.86]})
    >>> table["kind"] = ["baseline", "model"]
    >>> axes = scforge.pl.metrics(table)
    >>> len(axes)
    1
    """
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    frame = _select_benchmark(report, benchmark)
    choices = list(dict.fromkeys(frame["metric"]))
    chosen = choices if metrics is None else [metrics] if isinstance(metrics, str) else list(metrics)
    for name in chosen:
        check_known("metrics", name, choices, "the report", error=OptionError)
    if lower_is_better is None:
        is_lower = frame["lower_is_better"].astype(bool) if "lower_is_better" in frame else [False] * len(frame)
        lower_is_better = set(frame.loc[is_lower, "metric"])
    kinds = dict(zip(frame["method"], frame["kind"] if "kind" in frame else ["model"] * len(frame), strict=True))
    first = frame[frame["metric"] == chosen[0]].set_index("method")["value"].reindex(list(kinds))
    order = list(first.sort_values(ascending=chosen[0] not in lower_is_better, na_position="first").index)
    if ax is None:
        size = (1.6 + 2.4 * len(chosen), 0.9 + 0.28 * len(order))
        axes = list(plt.subplots(1, len(chosen), figsize=size, sharey=True, squeeze=False, layout="constrained")[1][0])
    else:
        axes = list(ax) if isinstance(ax, Sequence | np.ndarray) else [ax]
    if len(axes) != len(chosen):
        raise OptionError(
            f"contains {len(axes)} axes for {len(chosen)} metrics; pass one axes per metric.", argument="ax"
        )
    for name, panel in zip(chosen, axes, strict=True):
        _panel(panel, frame[frame["metric"] == name].set_index("method"), order, kinds)
        panel.set_xlabel(name.replace("_", " ") + ("\n(lower is better)" if name in lower_is_better else ""))
    for panel in axes[:1] if ax is None else axes:
        name_rows(panel, order, kinds)
    shown = [kind for kind in KINDS if kind in kinds.values()]
    handles = [Line2D([], [], color=KINDS[kind], marker=_MARKERS[kind], linestyle="", label=kind) for kind in shown]
    if len(shown) > 1:
        legend_beside(axes[-1], handles=handles)
    for panel in axes:
        literal(panel)
    return axes


def _select_benchmark(report: Any, benchmark: str | None) -> pd.DataFrame:
    """Return the scores of a benchmark. If None, uses the only benchmark."""
    frame = check_columns("report", report, ("method", "metric", "value"))
    if "benchmark" not in frame:
        return frame
    choices = list(dict.fromkeys(frame["benchmark"]))
    benchmark = choices[0] if benchmark is None and len(choices) == 1 else benchmark
    check_known("benchmark", benchmark, choices, "the report", fix="choose one of them", error=OptionError)
    return frame[frame["benchmark"] == benchmark]


def _panel(ax: Axes, lines: pd.DataFrame, order: list[str], kinds: dict[str, str]) -> None:
    """Plot one metric as dots with interval lines for each method, and a vertical line for a ceiling."""
    ax.grid(axis="x", color="0.92", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    for row, method in enumerate(order):
        kind = kinds[method] if kinds[method] in KINDS else "model"
        line = lines.loc[method] if method in lines.index else {}
        value = line.get("value", np.nan)
        if np.isnan(value):
            say_undefined(ax, row)
            continue
        ends = [line.get("low", np.nan), line.get("high", np.nan)]
        if np.isfinite(ends).all():
            ax.plot(ends, [row, row], color=KINDS[kind], linewidth=2, alpha=0.5)
        if kind == "ceiling":
            ax.axvline(value, color=KINDS[kind], linestyle=":", linewidth=1)
        ax.plot(value, row, _MARKERS[kind], color=KINDS[kind], markersize=6, label=method)


def scib_table(report: Any, *, benchmark: str | None = None, ax: Axes | None = None) -> Axes:
    """Plot scores between 0 and 1 as a table of colored circles, with totals as bars and the best method on top.

    The plot follows figure 3 of scIB (Luecken et al. 2022), like the plot in scib-metrics.

    Parameters
    ----------
    report
        A :class:`~scforge.eval.Report` with an integration benchmark, its table (columns ``method``, ``metric`` and
        ``value``), or a table with one row per method and one column per metric. ``bio``, ``batch`` and ``total`` are
        totals. Methods are sorted by the last of these totals that is present, or by their mean.
    benchmark
        Benchmark to plot, if there are several.
    ax
        Axes to draw on. If None, creates new axes.

    Returns
    -------
    The axes.

    Raises
    ------
    DataError
        If the table lacks a column or is empty.
    OptionError
        If the benchmark is not in the table, or must be chosen.

    Examples
    --------
    >>> import pandas as pd, scforge
    >>> scores = {"clisi": [0.99, 0.97], "ilisi": [0.20, 0.45], "total": [0.55, 0.61]}
    >>> ax = scforge.pl.scib_table(pd.DataFrame(scores, index=["PCA", "scforge"]))
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['scforge', 'PCA']
    """
    import matplotlib as mpl

    table, kinds = scores_by_method(report, benchmark)
    totals = [name for name in TOTALS if name in table]
    batch = [name for name in table if name not in totals and name.startswith(_OF_BATCHES)]
    bio = [name for name in table if name not in (*totals, *batch)]
    by = table[totals[-1]] if totals else table.mean(axis=1)
    table = table.loc[by.sort_values(ascending=False, na_position="last").index, [*bio, *batch, *totals]]
    n_rows, n_columns = table.shape
    ax = new_axes(ax, 2.2 + 0.72 * n_columns, 1.5 + 0.42 * n_rows)
    maps = {**dict.fromkeys(bio, "Blues"), **dict.fromkeys(batch, "Greens"), **dict.fromkeys(totals, "Oranges")}
    for column, name in enumerate(table):
        rows = np.flatnonzero(table[name].notna())
        sizes = table[name].to_numpy()[rows].clip(0, 1)
        shades = mpl.colormaps[maps[name]](0.1 + 0.75 * sizes)
        dark = np.full(len(rows), False)
        if name in totals:
            ax.barh(rows, 0.9 * sizes, left=column - 0.45, height=0.72, color=shades)
        else:
            ax.scatter(np.full(len(rows), column), rows, s=620, color=shades, linewidths=0)
            dark = shades[:, :3] @ _LIGHT < 0.55
        for row, value in enumerate(table[name]):
            style: Any = {"color": "white" if row in rows[dark] else "black", "fontsize": 8, "va": "center"}
            style["fontweight"] = "bold" if value == table[name].max() else "normal"
            x, align = (column - 0.41, "left") if name in totals else (column, "center")
            ax.text(x, row, "–" if np.isnan(value) else f"{value:.2f}", ha=align, **style)
    names = [name.replace("_", " ") for name in table]
    ax.set_xticks(range(n_columns), names, rotation=40, ha="left", rotation_mode="anchor", fontsize=9)
    name_rows(ax, list(table.index), kinds, from_top=True)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlim(-0.6, n_columns - 0.4)
    ax.hlines(np.arange(n_rows - 1) + 0.5, -0.6, n_columns - 0.4, color="0.92", linewidth=0.8, zorder=0)
    start = 0
    for title, members in (("bio", bio), ("batch", batch), ("totals", totals)) if batch or totals else ():
        end = start + len(members) - 1
        if members:
            ax.text((start + end) / 2, n_rows - 0.35, title, ha="center", va="top", color="0.35", fontsize=9)
            ax.plot([start - 0.4, end + 0.4], [n_rows - 0.42] * 2, color="0.6", linewidth=1, clip_on=False)
        start = end + 1
    literal(ax)
    return ax


def scores_by_method(report: Any, benchmark: str | None) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return a table with one row per method and one column per metric, and the kind of each method."""
    frame = check_columns("report", report, ())
    if "metric" in frame or "value" in frame:
        frame = _select_benchmark(frame, benchmark)
        kinds = dict(zip(frame["method"], frame["kind"], strict=True)) if "kind" in frame else {}
        wide = frame.pivot_table(index="method", columns="metric", values="value", sort=False, dropna=False)
        return wide[list(dict.fromkeys(frame["metric"]))], kinds
    return frame.astype(float).rename(columns=str), {}
