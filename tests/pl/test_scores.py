from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, OptionError
from scforge.pl import metrics, scib_table
from scforge.pl._style import KINDS

KIND = {"scforge": "model", "pca": "baseline", "random": "baseline", "untrained": "untrained", "best": "ceiling"}


@pytest.fixture(autouse=True)
def _close() -> None:
    yield
    plt.close("all")


def table(benchmark: str = "probe") -> pd.DataFrame:
    """Two metrics of five methods; of "random" the error is not known."""
    values = {"f1": [0.7, 0.8, 0.1, 0.3, 0.9], "error": [0.2, 0.1, np.nan, 0.5, 0.01]}
    lines = [
        (benchmark, method, kind, metric, value, value - 0.05, value + 0.05)
        for metric, column in values.items()
        for (method, kind), value in zip(KIND.items(), column, strict=True)
    ]
    return pd.DataFrame(lines, columns=["benchmark", "method", "kind", "metric", "value", "low", "high"])


class Report:
    """What a plot sees of a report."""

    def to_frame(self) -> pd.DataFrame:
        return table()

    def about(self, benchmark: str) -> object:
        assert benchmark == "probe"
        return type("Measured", (), {"lower_is_better": frozenset({"error"})})()


def dots(ax) -> dict[str, tuple[float, float, str]]:
    return {
        line.get_label(): (line.get_xdata()[0], line.get_ydata()[0], line.get_color())
        for line in ax.lines
        if line.get_label() in KIND
    }


def test_a_dot_for_each_figure_with_its_interval_and_the_best_on_top() -> None:
    axes = metrics(Report())
    assert [ax.get_xlabel() for ax in axes] == ["f1", "error\n(less is better)"]
    order = [text.get_text() for text in axes[0].get_yticklabels()]
    assert order == ["random", "untrained", "scforge", "pca", "best"]
    for ax, metric in zip(axes, ("f1", "error"), strict=True):
        expected = table()[table()["metric"] == metric].dropna(subset="value").set_index("method")
        drawn = dots(ax)
        assert set(drawn) == set(expected.index)
        ends = {tuple(np.round(line.get_xdata(), 6)) for line in ax.lines if len(line.get_xdata()) == 2}
        for method, (value, place, colour) in drawn.items():
            assert value == expected["value"][method]
            assert order[int(place)] == method
            assert colour == KINDS[KIND[method]]
            assert (round(value - 0.05, 6), round(value + 0.05, 6)) in ends
    assert [text.get_text() for text in axes[1].texts] == ["not defined"]
    assert not axes[0].texts
    assert [text.get_text() for text in axes[1].get_legend().get_texts()] == [
        kind for kind in KINDS if kind in KIND.values()
    ]
    assert {text.get_text() for text in axes[0].get_yticklabels() if text.get_fontweight() == "bold"} == {"scforge"}


def test_one_metric_on_given_axes_where_less_is_better() -> None:
    _, own = plt.subplots()
    axes = metrics(table(), "error", lower_is_better=["error"], ax=own)
    assert list(axes) == [own]
    assert [text.get_text() for text in own.get_yticklabels()] == ["random", "untrained", "scforge", "pca", "best"]


def test_a_table_says_where_less_is_better() -> None:
    frame = table()
    (ax,) = metrics(frame.assign(lower_is_better=frame["metric"] == "error"), "error")
    assert [text.get_text() for text in ax.get_yticklabels()] == ["random", "untrained", "scforge", "pca", "best"]
    assert ax.get_xlabel() == "error\n(less is better)"


def test_a_table_without_kinds_and_intervals() -> None:
    (ax,) = metrics(table()[["method", "metric", "value"]], ["f1"])
    assert len(dots(ax)) == 5
    assert ax.get_legend() is None
    assert len(ax.lines) == 5


def test_choices_that_are_missing() -> None:
    both = pd.concat([table(), table("other")])
    with pytest.raises(OptionError, match="benchmark=None: the report has several; name one of 'probe', 'other'"):
        metrics(both)
    with pytest.raises(OptionError, match="benchmark='othr' is not in the report; did you mean 'other'"):
        metrics(both, benchmark="othr")
    assert len(metrics(both, benchmark="other")) == 2
    with pytest.raises(OptionError, match="metrics='f' is not in the report"):
        metrics(table(), "f")
    with pytest.raises(OptionError, match="ax holds 1 axes for 2 metrics"):
        metrics(table(), ax=plt.subplots()[1])
    with pytest.raises(DataError, match="report has no column 'value'"):
        metrics(table().drop(columns="value"))
    with pytest.raises(DataError, match="report has no rows"):
        metrics(table()[:0])
    with pytest.raises(DataError, match="report is of type 'list'; pass a report or a table"):
        metrics([1])


def scib() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "total": [0.5, 0.7, 0.6],
            "kmeans_nmi": [0.9, 0.8, 0.4],
            "ilisi_knn": [0.1, 0.6, np.nan],
            "bio": [0.9, 0.8, 0.4],
            "batch": [0.1, 0.6, np.nan],
        },
        index=["pca", "harmony", "scforge"],
    )


def test_a_table_is_sorted_by_its_total_and_in_groups() -> None:
    ax = scib_table(scib())
    assert [text.get_text() for text in ax.get_yticklabels()] == ["harmony", "scforge", "pca"]
    columns = [text.get_text() for text in ax.get_xticklabels()]
    assert columns == ["kmeans nmi", "ilisi knn", "bio", "batch", "total"]
    shown = {text.get_text(): text for text in ax.texts}
    assert {"bio", "batch", "totals", "0.90", "–"} <= set(shown)
    assert len(ax.collections) == 5, "a circle for each figure that is known"
    widths = sorted(patch.get_width() for patch in ax.patches)
    assert widths == pytest.approx(sorted(0.9 * v for v in scib()[["bio", "batch", "total"]].stack().dropna()))
    bold = [text.get_text() for text in ax.texts if text.get_fontweight() == "bold"]
    assert sorted(bold) == ["0.60", "0.60", "0.70", "0.90", "0.90"]


def test_a_table_of_a_report_is_the_same() -> None:
    long = scib().rename_axis("method").reset_index().melt("method", var_name="metric").assign(benchmark="scib")
    long["kind"] = ["model" if method == "scforge" else "baseline" for method in long["method"]]
    ax, other = scib_table(long), scib_table(scib())
    assert [text.get_text() for text in ax.texts] == [text.get_text() for text in other.texts]
    assert [text.get_fontweight() for text in ax.get_yticklabels()] == ["normal", "bold", "normal"]


def test_without_batches_there_are_no_groups() -> None:
    ax = scib_table(scib()[["kmeans_nmi"]])
    assert [text.get_text() for text in ax.texts] == ["0.90", "0.80", "0.40"]


def test_a_table_with_text_is_refused() -> None:
    with pytest.raises(DataError, match="report has the columns 'name', which are no numbers"):
        scib_table(scib().assign(name="x"))
