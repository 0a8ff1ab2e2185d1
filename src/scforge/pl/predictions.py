"""Plot predicted against true classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scforge._checks import check_known
from scforge._columns import labels_of, texts_of
from scforge._constants import UNS_KEY
from scforge._text import literal
from scforge.errors import DataError
from scforge.pl._style import COLORS, check_columns, legend_beside, new_axes

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from matplotlib.axes import Axes


_MAX_NUMBERS = 20


def confusion_matrix(
    data: AnnData | pd.DataFrame,
    truth: str | None = None,
    predicted: str | None = None,
    *,
    table: str = "metrics_confusion",
    ax: Axes | None = None,
) -> Axes:
    """Plot a confusion matrix as fractions of the cells of each true class.

    Parameters
    ----------
    data
        Annotated data, or a table. Without `truth`, uses the table that ``annotator.evaluate(adata)`` wrote into
        ``adata.uns["scforge"]["metrics_confusion"]``, or such a table with the columns ``label``, ``predicted`` and
        ``n_cells``.
    truth, predicted
        Columns with the true and the predicted class of each cell, in obs or in the table. If `predicted` is None, uses
        ``scforge_<truth>``.
    table
        Key in ``adata.uns["scforge"]``.
    ax
        Axes to draw on. If None, creates new axes.

    Returns
    -------
    The axes.

    Raises
    ------
    DataError
        If a column or the table is missing, or no cell has both classes.

    Examples
    --------
    >>> import pandas as pd, scforge
    >>> cells = pd.DataFrame({"label": ["B", "B", "NK", "T"], "scforge_label": ["B", "NK", "NK", "T"]})
    >>> ax = scforge.pl.confusion_matrix(cells, "label")
    >>> [tick.get_text().split()[0] for tick in ax.get_yticklabels()]
    ['B', 'NK', 'T']
    """
    from sklearn.metrics import ConfusionMatrixDisplay

    counts, left_out = _counts(data, truth, predicted, table)
    n_classes, totals = len(counts), counts.sum(axis=1)
    shares = counts.div(totals.where(totals > 0, 1), axis=0).to_numpy()
    ax = new_axes(ax, 2.6 + 0.42 * n_classes, 1.8 + 0.42 * n_classes)
    few = n_classes <= _MAX_NUMBERS
    display = ConfusionMatrixDisplay(shares, display_labels=list(counts.columns)).plot(
        ax=ax, include_values=few, cmap="Blues", values_format=".2f", colorbar=False, text_kw={"fontsize": 8},
        im_kw={"vmin": 0, "vmax": 1, "aspect": "auto"},
    )  # fmt: skip
    for text, share in zip(display.text_.ravel() if few else (), shares.ravel(), strict=few):
        text.set_text("" if share < 0.005 else "1" if share == 1 else f"{share:.2f}".lstrip("0"))
    ax.set_xticklabels(list(counts.columns), rotation=45, ha="right", rotation_mode="anchor")
    ax.set_yticklabels([f"{name} ({total:,.0f})" for name, total in totals.items()])
    ax.set(xlabel=f"predicted{_left_out(left_out)}", ylabel="true (cells)")
    ax.tick_params(length=0)
    ax.figure.colorbar(display.im_, ax=ax, label="share of the true class", fraction=0.05, pad=0.03)
    literal(ax)
    return ax


def _left_out(n_cells: int) -> str:
    return f"\n(cells left out, without a class: {n_cells:,})" if n_cells else ""


def _counts(
    data: AnnData | pd.DataFrame, truth: str | None, predicted: str | None, table: str
) -> tuple[pd.DataFrame, int]:
    """Return the confusion matrix, and the number of cells without true or predicted class."""
    if truth is not None:
        columns = _columns(data, truth, f"scforge_{truth}" if predicted is None else predicted)
        columns.columns = ["label", "predicted"]
        columns = columns.assign(
            label=labels_of(columns["label"], key=truth, argument="truth", fractional=True),
            predicted=texts_of(columns["predicted"], key=predicted or f"scforge_{truth}", argument="predicted"),
        )
        complete = columns.dropna()
        if not len(complete):
            raise DataError(f"no cell has both a true class ({truth!r}) and a predicted class to plot.")
        counts = complete.assign(n_cells=1)
        left_out = len(columns) - len(complete)
    elif not hasattr(data, "uns"):
        counts, left_out = data, 0
    else:
        written = data.uns.get(UNS_KEY, {})
        fix = "call annotator.evaluate(adata) first, or pass the columns of obs as truth=... and predicted=..."
        check_known("table", table, written, f"adata.uns[{UNS_KEY!r}]", fix=fix)
        counts, left_out = written[table], 0
    check_columns("data", counts, ("label", "predicted", "n_cells"))
    wide = counts.assign(label=counts["label"].astype(str), predicted=counts["predicted"].astype(str))
    wide = wide.pivot_table(index="label", columns="predicted", values="n_cells", aggfunc="sum", fill_value=0)
    # What is right stands on the diagonal, classes of one side only behind.
    both = [name for name in wide.index if name in wide.columns]
    names = [*both, *(name for name in [*wide.index, *wide.columns] if name not in both)]
    return wide.reindex(index=names, columns=names, fill_value=0), left_out


def _columns(data: Any, *names: str) -> pd.DataFrame:
    """Return columns of obs, or of a table."""
    frame = getattr(data, "obs", data)
    check_columns("data" if frame is data else "adata.obs", frame, names)
    return frame[list(names)]


def calibration(
    data: AnnData | pd.DataFrame,
    truth: str,
    predicted: str | None = None,
    confidence: str | None = None,
    *,
    n_bins: int = 15,
    ax: Axes | None = None,
) -> Axes:
    """Plot accuracy by confidence (a reliability diagram, Guo et al. 2017, figure 1).

    Points are confidence bins, lines are 95% intervals of the accuracy (Wilson 1927), and bars are fractions of the
    cells. The title shows the expected calibration error, as in ``annotator.evaluate``.

    Parameters
    ----------
    data
        Annotated data, or a table with one row per cell.
    truth, predicted, confidence
        Columns of ``obs`` with the true class, the predicted class (``scforge_<truth>`` if None), and its probability
        (``<predicted>_confidence`` if None, as ``annotator.predict`` writes it). Cells without one of them, and
        unassigned cells, are left out; their number is shown.
    n_bins
        Number of bins of equal width.
    ax
        Axes to draw on. If None, creates new axes.

    Returns
    -------
    The axes.

    Raises
    ------
    DataError
        If a column is missing, no cell has all three values, or a confidence is not between 0 and 1.

    Examples
    --------
    >>> import pandas as pd, scforge
    >>> cells = pd.DataFrame({"label": list("ABABABAB"), "scforge_label": list("ABABABBA")})
    >>> cells["scforge_label_confidence"] = 0.75
    >>> ax = scforge.pl.calibration(cells, "label", n_bins=10)
    >>> ax.get_title()
    'calibration error 0.000, 8 cells'
    """
    predicted = f"scforge_{truth}" if predicted is None else predicted
    confidence = f"{predicted}_confidence" if confidence is None else confidence
    columns = _columns(data, truth, predicted, confidence)
    columns.columns = ["truth", "predicted", "confidence"]
    for name, key in (("truth", truth), ("predicted", predicted)):
        columns = columns.assign(**{name: labels_of(columns[name], key=key, argument=name, fractional=True)})
    complete = columns.dropna()
    if not len(complete):
        raise DataError(f"no cell has a true class ({truth!r}), a predicted class and a confidence to plot.")
    sure = complete["confidence"].to_numpy(dtype=np.float64)
    if sure.min() < 0 or sure.max() > 1 + 1e-6:
        raise DataError("contains values outside [0, 1]; pass a column with probabilities.", confidence=confidence)
    right = complete["truth"].astype(str) == complete["predicted"].astype(str)
    bins = np.searchsorted(np.linspace(0, 1, n_bins + 1)[1:-1], sure)
    grouped = complete.assign(right=right, sure=sure).groupby(bins)[["right", "sure"]]
    n_cells = grouped.size().to_numpy()
    accuracy, mean = grouped.mean().to_numpy(dtype=np.float64).T
    error = float(np.abs(accuracy - mean) @ n_cells / len(complete))
    ax = new_axes(ax, 4.2, 4.2)
    centers = (np.array(list(grouped.indices)) + 0.5) / n_bins
    ax.bar(centers, n_cells / len(complete), width=0.9 / n_bins, color="0.85", label="fraction of cells")
    ax.plot([0, 1], [0, 1], color="0.4", linestyle="--", linewidth=1, label="as often right as sure")
    z = 1.96
    middle = (accuracy + z**2 / (2 * n_cells)) / (1 + z**2 / n_cells)
    half = z * np.sqrt(accuracy * (1 - accuracy) / n_cells + z**2 / (4 * n_cells**2)) / (1 + z**2 / n_cells)
    ax.vlines(mean, middle - half, middle + half, color=COLORS[0], alpha=0.5, linewidth=2)
    ax.plot(mean, accuracy, "o-", color=COLORS[0], markersize=5, linewidth=1, label="accuracy")
    ax.set(xlabel=f"confidence{_left_out(len(columns) - len(complete))}", ylabel="accuracy")
    ax.set(xlim=(0, 1), ylim=(0, 1.02), aspect="equal")
    ax.set_title(f"calibration error {error:.3f}, {len(complete):,} cells", fontsize="medium")
    ax.spines[["top", "right"]].set_visible(False)
    legend_beside(ax)
    literal(ax)
    return ax
