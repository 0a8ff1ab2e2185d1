import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from scforge.errors import OptionError
from scforge.pl import training_curves


def history() -> dict[str, pd.DataFrame]:
    index = pd.RangeIndex(3, name="epoch")
    values = {"train_loss": [3.0, 2.0, 1.0], "validation_loss": [3.5, 2.5, 2.0], "train_spread": [0.1, 0.2, 0.3]}
    return {name: pd.DataFrame({name: column}, index=index) for name, column in values.items()}


def lines(ax) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in ax.lines}


def test_a_model_has_both_curves_over_epochs_from_one(texts) -> None:
    model = type("Model", (), {"history_": history()})()
    ax = training_curves(model, title="a title", reference=2.2, reference_label="chance")
    assert lines(ax) == {"train": [3.0, 2.0, 1.0], "validation": [3.5, 2.5, 2.0], "chance": [2.2, 2.2]}
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [1, 2, 3])
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("epoch", "loss", "a title")
    assert texts(ax.get_legend().get_texts()) == ["train", "validation", "chance"]
    own = training_curves(history(), metric="spread", ax=ax.figure.add_subplot())
    assert own is ax.figure.axes[-1]
    assert lines(own) == {"train": [0.1, 0.2, 0.3]}


@pytest.mark.parametrize(
    ("given", "metric", "message"),
    [
        ({}, "loss", "history has no 'train_loss'; train the model first"),
        (history(), "los", "history has no 'train_los'; train the model first"),
    ],
)
def test_nothing_to_draw(given, metric: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        training_curves(given, metric=metric)
    assert not plt.get_fignums()


def test_a_single_epoch_and_epochs_without_a_figure_are_seen() -> None:
    ax = training_curves({name: frame[:1] for name, frame in history().items()})
    assert [line.get_marker() for line in ax.lines] == ["o", "o"]
    gaps = history()
    gaps["validation_loss"].loc[1, "validation_loss"] = np.nan
    ax = training_curves(gaps)
    assert [line.get_marker() for line in ax.lines] == ["None", "None"]
    np.testing.assert_array_equal(ax.lines[1].get_xdata(), [1, 3])
