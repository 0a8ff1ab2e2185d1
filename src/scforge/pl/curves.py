"""Loss curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scforge.errors import OptionError

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
    """Draw a figure of the training and of the held-out cells over epochs.

    Parameters
    ----------
    history
        ``model.history``, or the model.
    metric
        Draws ``train_<metric>`` and ``validation_<metric>``.
    reference, reference_label
        Value of a dashed line, e.g. the loss of a model that knows nothing, and what it is.
    title
        Title of the axes.
    ax
        Axes to draw on; new ones if None.

    Returns
    -------
    The axes. The legend says so where the losses are sums of different terms, and so cannot be compared.

    Raises
    ------
    OptionError
        If `history` is neither, or has no such figure.

    Examples
    --------
    >>> import pandas as pd, scforge
    >>> losses = {"train_loss": [3.0, 2.0, 1.5], "validation_loss": [3.2, 2.4, 2.1]}
    >>> history = {name: pd.DataFrame({name: values}) for name, values in losses.items()}  # as model.history
    >>> ax = scforge.pl.training_curves(history, reference=2.9, reference_label="token frequencies")
    >>> [line.get_label() for line in ax.lines]
    ['train', 'validation', 'token frequencies']
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    history = getattr(history, "history_", history)
    if not isinstance(history, Mapping):
        raise OptionError(f"history is of type {type(history).__name__!r}; pass model.history, or the model.")
    names = {"train": f"train_{metric}", "validation": f"validation_{metric}"}
    if not any(name in history for name in names.values()):
        raise OptionError(f"history has no 'train_{metric}'; train the model first, or name another metric.")
    if ax is None:
        _, ax = plt.subplots(figsize=(4, 3), layout="constrained")
    n_epochs = max(len(history[name]) for name in names.values() if name in history)
    for (label, name), colour in zip(names.items(), ("tab:blue", "tab:orange"), strict=True):
        if name in history:
            # Not every epoch has a figure, and a single one makes no line.
            values = history[name][name].dropna()
            ax.plot(values.index + 1, values, label=label, color=colour, marker="o" if len(values) == 1 else None)
    if reference is not None:
        ax.axhline(reference, color="grey", linestyle="--", linewidth=1, label=reference_label)
    ax.set(xlabel="epoch", ylabel=metric.replace("_", " "), title=title)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if n_epochs == 1:
        ax.set_xlim(0.5, 1.5)
    # What lies beneath it is covered, so that a line does not cross the words.
    title = "sums of different terms" if metric == "loss" and _different_sums(history) else None
    ax.legend(fontsize="small", framealpha=0.85, edgecolor="none", title=title, title_fontsize="x-small")
    return ax


def _different_sums(history: Mapping[str, Any]) -> bool:
    """Return whether the loss of training cells has terms that that of held-out cells lacks."""
    of_training = {name.removeprefix("train_") for name in history if name.startswith("train_")}
    held_out = {name.removeprefix("validation_") for name in history if name.startswith("validation_")}
    return "loss" in held_out and bool(of_training - held_out)
