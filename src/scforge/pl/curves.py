"""Plot loss curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scforge._text import literal
from scforge.errors import OptionError
from scforge.pl._style import new_axes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


def training_curves(
    history: Mapping[str, pd.DataFrame] | Any,
    *,
    metric: str = "loss",
    reference: float | None = None,
    reference_label: str = "reference",
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot a metric for training and held-out cells over epochs.

    Parameters
    ----------
    history
        ``model.history``, or the model.
    metric
        Metric to plot, i.e. ``train_<metric>`` and ``validation_<metric>``.
    reference, reference_label
        Value and label of a dashed line, e.g. the loss at chance.
    title
        Title of the axes.
    ax
        Axes to draw on. If None, creates new axes.

    Returns
    -------
    The axes. The legend indicates losses that are sums of different terms and cannot be compared.

    Raises
    ------
    OptionError
        If `history` has another type, or does not contain the metric.

    Examples
    --------
    >>> import pandas as pd, scforge
    >>> losses = {"train_loss": [3.0, 2.0, 1.5], "validation_loss": [3.2, 2.4, 2.1]}
    >>> history = {name: pd.DataFrame({name: values}) for name, values in losses.items()}  # as model.history
    >>> ax = scforge.pl.training_curves(history, reference=2.9, reference_label="token frequencies")
    >>> [line.get_label() for line in ax.lines]
    ['train', 'validation', 'token frequencies']
    """
    from matplotlib.ticker import MaxNLocator

    history = getattr(history, "history_", history)
    names = {"train": f"train_{metric}", "validation": f"validation_{metric}"}
    if not any(name in history for name in names.values()):
        raise OptionError(
            f"has no 'train_{metric}'; train the model first, or choose another metric.", argument="history"
        )
    ax = new_axes(ax, 4, 3)
    n_epochs = max(len(history[name]) for name in names.values() if name in history)
    for (label, name), color in zip(names.items(), ("tab:blue", "tab:orange"), strict=True):
        if name in history:
            # Not every epoch has a figure, and a single one makes no line.
            values = history[name][name].dropna()
            ax.plot(values.index + 1, values, label=label, color=color, marker="o" if len(values) == 1 else None)
    if reference is not None:
        ax.axhline(reference, color="gray", linestyle="--", linewidth=1, label=reference_label)
    ax.set(xlabel="epoch", ylabel=metric.replace("_", " "), title=title)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if n_epochs == 1:
        ax.set_xlim(0.5, 1.5)
    # What lies beneath it is covered, so that a line does not cross the words.
    of_training, held_out = ({name.partition("_")[2] for name in history if name.startswith(side)} for side in names)
    different = metric == "loss" and "loss" in held_out and not of_training <= held_out
    title = "sums of different terms" if different else None
    ax.legend(fontsize="small", framealpha=0.85, edgecolor="none", title=title, title_fontsize="x-small")
    literal(ax)
    return ax
