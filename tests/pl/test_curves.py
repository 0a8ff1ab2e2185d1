from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from scforge.errors import OptionError
from scforge.pl import training_curves


@pytest.fixture(autouse=True)
def _close() -> None:
    yield
    plt.close("all")


def history() -> dict[str, pd.DataFrame]:
    index = pd.RangeIndex(3, name="epoch")
    values = {"train_loss": [3.0, 2.0, 1.0], "validation_loss": [3.5, 2.5, 2.0], "train_spread": [0.1, 0.2, 0.3]}
    return {name: pd.DataFrame({name: column}, index=index) for name, column in values.items()}


def lines(ax) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in ax.lines}


def test_both_curves_over_epochs_from_one() -> None:
    ax = training_curves(history(), title="a title", reference=2.2, reference_label="chance")
    assert lines(ax) == {"train": [3.0, 2.0, 1.0], "validation": [3.5, 2.5, 2.0], "chance": [2.2, 2.2]}
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [1, 2, 3])
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("epoch", "loss", "a title")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["train", "validation", "chance"]


def test_another_metric_on_given_axes() -> None:
    _, own = plt.subplots()
    ax = training_curves(history(), metric="spread", ax=own)
    assert ax is own
    assert lines(ax) == {"train": [0.1, 0.2, 0.3]}


@pytest.mark.parametrize(("given", "metric"), [({}, "loss"), (history(), "los")])
def test_nothing_to_draw(given, metric: str) -> None:
    with pytest.raises(OptionError, match=f"history has no 'train_{metric}'; train the model first"):
        training_curves(given, metric=metric)
    assert not plt.get_fignums()


def test_a_single_epoch_and_epochs_without_a_figure_are_seen() -> None:
    one = {name: frame[:1] for name, frame in history().items()}
    ax = training_curves(one)
    assert [line.get_marker() for line in ax.lines] == ["o", "o"]
    ax.figure.canvas.draw()
    assert [tick for tick in ax.get_xticks() if np.prod(np.subtract(ax.get_xlim(), tick)) < 0] == [1]
    gaps = history()
    gaps["validation_loss"].loc[1, "validation_loss"] = np.nan
    ax = training_curves(gaps)
    assert [line.get_marker() for line in ax.lines] == ["None", "None"]
    np.testing.assert_array_equal(ax.lines[1].get_xdata(), [1, 3])


def test_a_model_has_its_history() -> None:
    model = type("Model", (), {"history_": history()})()
    assert set(lines(training_curves(model))) == {"train", "validation"}
    with pytest.raises(OptionError, match="history is of type 'int'; pass model.history, or the model."):
        training_curves(3)


def test_the_legend_says_where_losses_cannot_be_compared() -> None:
    same = {name: frame for name, frame in history().items() if name.endswith("loss")}
    assert training_curves(same).get_legend().get_title().get_text() == ""
    with_terms = {**same, "train_translated_error": same["train_loss"]}
    assert training_curves(with_terms).get_legend().get_title().get_text() == "sums of different terms"
