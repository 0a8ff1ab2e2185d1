"""Plot perturbation effects: predicted, measured and in silico."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scforge._checks import check_count
from scforge._text import literal
from scforge.errors import DataError, OptionError
from scforge.pl._style import COLORS, KINDS, check_columns, name_rows, new_axes, say_undefined

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


_LOWER_IS_BETTER = ("rank", "mse", "mae", "wmse", "energy_distance")
_KINDS = {"scforge": "model", "prediction": "model", "technical_duplicate": "ceiling"}
"""A mapping from method to kind, for tables without the column ``kind``."""


def perturbation_scatter(
    effects: pd.DataFrame,
    *,
    predicted: str = "predicted",
    measured: str = "measured",
    n_labels: int = 10,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the predicted effect of a perturbation on each gene against the measured effect.

    Parameters
    ----------
    effects
        Changes relative to the controls, e.g. of mean log1p CP10K, with one row per gene, named by the index. Genes
        without one of the two effects are not plotted, which is logged.
    predicted, measured
        Columns of `effects`.
    n_labels
        Number of genes with the largest measured effect to label.
    title
        Title of the axes, e.g. the perturbation.
    ax
        Axes to draw on. If None, creates new axes.

    Returns
    -------
    The axes.

    Raises
    ------
    DataError
        If a column is missing, or fewer than two genes have both effects.

    Examples
    --------
    >>> import pandas as pd, scforge
    >>> effects = {"predicted": [0.1, -0.8, 0.3], "measured": [0.0, -1.1, 0.5]}
    >>> effects = pd.DataFrame(effects, index=["ACTB", "MYC", "CDKN1A"])
    >>> ax = scforge.pl.perturbation_scatter(effects, n_labels=1, title="MYC knock-down")
    >>> [text.get_text() for text in ax.texts]
    ['MYC']
    """
    check_columns("effects", effects, (predicted, measured))
    check_count("n_labels", n_labels, "genes", least=0)
    complete = effects[[measured, predicted]].astype(float).replace([np.inf, -np.inf], np.nan).dropna()
    if len(complete) < 2:
        raise DataError(
            f"contains {len(complete)} genes with both {predicted!r} and {measured!r}; pass at least two such genes.",
            argument="effects",
        )
    x, y = complete[measured].to_numpy(), complete[predicted].to_numpy()
    ax = new_axes(ax, 5.2, 4.2)
    ax.axhline(0, color="0.88", linewidth=0.8, zorder=0)
    ax.axvline(0, color="0.88", linewidth=0.8, zorder=0)
    ends = float(np.min([x, y])), float(np.max([x, y]))
    ax.plot(ends, ends, color="0.4", linestyle="--", linewidth=1, label="as measured", zorder=1)
    top = np.argsort(-np.abs(x), kind="stable")[:n_labels]
    rest = np.setdiff1d(np.arange(len(x)), top)
    ax.scatter(x[rest], y[rest], s=10, color="0.6", linewidths=0, label="genes", zorder=2)
    ax.scatter(x[top], y[top], s=22, color=COLORS[0], linewidths=0, label="largest effects", zorder=3)
    _name(ax, x[top], y[top], [str(name) for name in complete.index[top]])
    note = f"\n(genes left out, without both: {len(effects) - len(complete):,})" if len(complete) < len(effects) else ""
    ax.set(xlabel=f"measured change{note}", ylabel="predicted change")
    varies = np.ptp(x) > 0 and np.ptp(y) > 0
    figure = f"r = {np.corrcoef(x, y)[0, 1]:.2f}" if varies else "r is not defined: one value for all genes"
    ax.set_title(f"{title}: {figure}" if title else figure, fontsize="medium")
    ax.spines[["top", "right"]].set_visible(False)
    literal(ax)
    return ax


def _name(ax: Axes, x: np.ndarray, y: np.ndarray, names: list[str]) -> None:
    """Label points in columns on both sides, from bottom to top, with a line from each name to its point."""
    (low, high), (bottom, above) = ax.get_xlim(), ax.get_ylim()
    width, limits = high - low, [low, high]
    for side, edge, away, align in ((x >= 0, high, 1, "left"), (x < 0, low, -1, "right")):
        order = np.flatnonzero(side)[np.argsort(y[side], kind="stable")]
        if len(order):
            # Space for the names next to the points.
            limits[away > 0] = edge + away * 0.26 * width
        # As near to their points as names that are evenly apart can be.
        gap = min(0.07, 1 / max(len(order), 1)) * (above - bottom)
        start = (
            np.clip(y[order].mean() - gap * (len(order) - 1) / 2, bottom, above - gap * len(order)) if len(order) else 0
        )
        for index, height in zip(order, start + gap * np.arange(len(order)), strict=True):
            ends = [x[index], edge + away * 0.02 * width], [y[index], height]
            ax.plot(*ends, color="0.75", linewidth=0.6, zorder=1)
            ax.text(edge + away * 0.03 * width, height, names[index], ha=align, va="center", fontsize=8)
    ax.set(xlim=limits, ylim=(bottom, above))


def perturbation_ranks(table: pd.DataFrame, *, metric: str = "rank", ax: Axes | None = None) -> Axes:
    """Plot a metric of each perturbation with one row per method, and the best mean on top.

    Parameters
    ----------
    table
        Table with one row per perturbation and method, and the columns ``method`` and `metric`, as in
        ``adata.uns["scforge"]["metrics_per_perturbation"]``. ``kind``, if present, is the kind of each method.
    metric
        Column to plot. For ``rank``, the fraction of measured effects that are more similar to the prediction than the
        true effect, a dashed line marks chance.
    ax
        Axes to draw on. If None, creates new axes.

    Returns
    -------
    The axes.

    Raises
    ------
    DataError
        If a column is missing.

    Examples
    --------
    >>> import pandas as pd, scforge
    >>> table = {"method": ["scforge"] * 3 + ["train_mean"] * 3, "rank": [0.0, 0.1, 0.2, 0.5, 0.5, 0.4]}
    >>> ax = scforge.pl.perturbation_ranks(pd.DataFrame(table))
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['train_mean', 'scforge']
    """
    check_columns("table", table, ("method", metric))
    means = table.groupby("method", sort=False)[metric].mean()
    means = means.sort_values(ascending=metric not in _LOWER_IS_BETTER, na_position="first")
    order = [str(name) for name in means.index]
    given_kinds = dict(zip(table["method"], table["kind"], strict=True)) if "kind" in table else _KINDS
    kinds = {name: given_kinds.get(name, "baseline") for name in order}
    ax = new_axes(ax, 5.4, 1.1 + 0.36 * len(order))
    if metric == "rank":
        ax.axvline(0.5, color="0.4", linestyle="--", linewidth=1, zorder=0)
        above = ("data", "axes fraction")
        ax.annotate("chance", (0.5, 1), (0, 3), above, "offset points", ha="center", color="0.4", fontsize="small")
    counts = []
    for row, method in enumerate(order):
        values = table.loc[table["method"] == method, metric].dropna().to_numpy(dtype=float)
        counts.append(len(values))
        color = KINDS.get(kinds[method], KINDS["model"])
        if not len(values):
            say_undefined(ax, row)
            continue
        ax.scatter(values, np.full(len(values), row), marker="|", s=120, color=color, alpha=0.6, label=method)
        ax.vlines(values.mean(), row - 0.34, row + 0.34, color=color, linewidth=2.5)
    name_rows(ax, order, kinds)
    same = len(set(counts)) == 1
    if not same:
        ax.set_yticks(range(len(order)), [f"{name} ({count})" for name, count in zip(order, counts, strict=True)])
    number = f"{counts[0]} effects" if same else "number of effects in brackets"
    ax.set_xlabel(f"{metric.replace('_', ' ')} of the measured effect ({number}; bar: mean)")
    literal(ax)
    return ax


def in_silico_ranking(
    table: pd.DataFrame, *, metric: str = "shift_z", n_genes: int = 20, title: str | None = None, ax: Axes | None = None
) -> Axes:
    """Plot the genes that shift the embedding most, in decreasing order, with the shifts of an untrained network.

    Parameters
    ----------
    table
        Result of :meth:`scforge.models.Encoder.perturb_in_silico`. With several groups, pass the rows of one group.
        Genes without `metric` are left out.
    metric
        Column to rank by, ``"shift_z"`` or ``"goal_z"``. If the table contains ``<metric>_untrained``, it is plotted as
        a second marker.
    n_genes
        Maximum number of genes, or pairs of genes, to plot.
    title
        Title of the axes.
    ax
        Axes to draw on. If None, creates new axes.

    Returns
    -------
    The axes.

    Raises
    ------
    DataError
        If a column is missing, no gene has a value, or the table contains several groups.
    OptionError
        If the metric is unknown.

    Examples
    --------
    >>> import pandas as pd, scforge
    >>> table = {"gene": ["ACTB", "LYZ"], "shift_z": [0.3, 4.1], "shift_z_untrained": [0.2, 1.5]}
    >>> ax = scforge.pl.in_silico_ranking(pd.DataFrame(table))
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['LYZ', 'ACTB']
    """
    if metric not in ("shift_z", "goal_z"):
        raise OptionError("is not known; choose 'shift_z' or 'goal_z'.", metric=metric)
    check_columns("table", table, ("gene", metric))
    check_count("n_genes", n_genes, "genes")
    if "group" in table and table["group"].nunique() > 1:
        group = table["group"].iloc[0]
        raise DataError(
            f"contains several groups; plot one of them, e.g. table[table['group'] == {group!r}].",
            argument="table",
        )
    top = table.dropna(subset=[metric]).sort_values(metric, ascending=False, kind="stable").head(n_genes)
    if not len(top):
        raise DataError(
            f"has no values in the column {metric!r}; perturb more cells, or set n_permutations.",
            argument="table",
        )
    names = top["gene"].astype(str)
    if "gene_2" in top:
        names = names + " + " + top["gene_2"].astype(str)
    places = np.arange(len(top))
    ax = new_axes(ax, 5.0, 1.1 + 0.22 * len(top))
    ax.axvline(0, color="0.88", linewidth=0.8, zorder=0)
    ax.scatter(top[metric], places, s=26, color=COLORS[0], linewidths=0, label="trained", zorder=3)
    if (untrained := f"{metric}_untrained") in top:
        ax.hlines(places, top[metric], top[untrained], color="0.8", linewidth=1, zorder=1)
        ax.scatter(top[untrained], places, s=26, facecolors="none", edgecolors="0.4", label="untrained", zorder=2)
        ax.legend(frameon=False, loc="lower right", fontsize="small")
    name_rows(ax, list(names), from_top=True)
    ax.set(xlabel=f"{metric.replace('_', ' ')} (standard deviations of genes of similar expression)", title=title or "")
    literal(ax)
    return ax
