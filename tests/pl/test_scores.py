import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection

from scforge.errors import DataError, OptionError
from scforge.pl import metrics, scib_table
from scforge.pl._style import KINDS

KIND = {"scforge": "model", "pca": "baseline", "random": "baseline", "untrained": "untrained", "best": "ceiling"}
ORDER = ["random", "untrained", "scforge", "pca", "best"]


def table(benchmark: str = "probe") -> pd.DataFrame:
    """Two metrics of five methods; of "random" the error is not known."""
    values = {"f1": [0.7, 0.8, 0.1, 0.3, 0.9], "error": [0.2, 0.1, np.nan, 0.5, 0.01]}
    frame = pd.DataFrame({**values, "method": list(KIND), "kind": list(KIND.values())})
    frame = frame.melt(["method", "kind"], var_name="metric").assign(benchmark=benchmark)
    return frame.assign(low=frame["value"] - 0.05, high=frame["value"] + 0.05)


class Report:
    """What a plot sees of a report."""

    def to_frame(self) -> pd.DataFrame:
        return table().assign(lower_is_better=lambda frame: frame["metric"] == "error")


def dots(ax) -> dict[str, tuple[float, float, str]]:
    return {
        line.get_label(): (line.get_xdata()[0], line.get_ydata()[0], line.get_color())
        for line in ax.lines
        if line.get_label() in KIND
    }


def test_a_dot_for_each_figure_with_its_interval_and_the_best_on_top(texts) -> None:
    axes = metrics(Report())
    assert [ax.get_xlabel() for ax in axes] == ["f1", "error\n(lower is better)"]
    assert texts(axes[0].get_yticklabels()) == ORDER
    for ax, metric in zip(axes, ("f1", "error"), strict=True):
        expected = table()[table()["metric"] == metric].dropna(subset="value").set_index("method")
        drawn = dots(ax)
        assert set(drawn) == set(expected.index)
        ends = {tuple(np.round(line.get_xdata(), 6)) for line in ax.lines if len(line.get_xdata()) == 2}
        for method, (value, place, color) in drawn.items():
            assert value == expected["value"][method]
            assert ORDER[int(place)] == method
            assert color == KINDS[KIND[method]]
            assert (round(value - 0.05, 6), round(value + 0.05, 6)) in ends
    assert (texts(axes[0].texts), texts(axes[1].texts)) == ([], ["not defined"])
    assert texts(axes[1].get_legend().get_texts()) == [kind for kind in KINDS if kind in KIND.values()]


def test_tables_with_and_without_kinds_intervals_and_what_is_better(texts) -> None:
    _, own = plt.subplots()
    assert list(metrics(table(), "error", lower_is_better=["error"], ax=own)) == [own]
    (told,) = metrics(Report().to_frame(), "error")
    for ax in (own, told):
        assert texts(ax.get_yticklabels()) == ORDER
        assert ax.get_xlabel() == "error\n(lower is better)"
    (bare,) = metrics(table()[["method", "metric", "value"]], ["f1"])
    assert len(dots(bare)) == len(bare.lines) == 5
    assert bare.get_legend() is None
    assert len(metrics(pd.concat([table(), table("other")]), benchmark="other")) == 2


def test_choices_that_are_missing() -> None:
    both = pd.concat([table(), table("other")])
    for given, options, error, message in [
        (both, {}, OptionError, "benchmark=None is not in the report .*'probe', 'other'.; choose one of them"),
        (both, {"benchmark": "othr"}, OptionError, "benchmark='othr' is not in the report; did you mean 'other'"),
        (table(), {"metrics": "f"}, OptionError, "metrics='f' is not in the report"),
        (table(), {"ax": plt.subplots()[1]}, OptionError, "ax contains 1 axes for 2 metrics"),
        (table().drop(columns="value"), {}, DataError, "column='value' is not in report"),
        (table()[:0], {}, DataError, "report has no rows"),
        ([1], {}, DataError, "report is of type 'list'; pass a report or a table"),
    ]:
        with pytest.raises(error, match=message):
            metrics(given, **options)


def scib() -> pd.DataFrame:
    values = {"total": [0.5, 0.7, 0.6], "kmeans_nmi": [0.9, 0.8, 0.4], "ilisi_knn": [0.1, 0.6, np.nan]}
    frame = pd.DataFrame(values, index=["pca", "harmony", "scforge"])
    return frame.assign(bio=frame["kmeans_nmi"], batch=frame["ilisi_knn"])


def test_a_table_is_sorted_by_its_total_and_in_groups(texts) -> None:
    ax = scib_table(scib())
    assert texts(ax.get_yticklabels()) == ["harmony", "scforge", "pca"]
    assert texts(ax.get_xticklabels()) == ["kmeans nmi", "ilisi knn", "bio", "batch", "total"]
    assert {"bio", "batch", "totals", "0.90", "–"} <= set(texts(ax.texts))
    circles = [one for one in ax.collections if isinstance(one, PathCollection)]
    assert sum(len(one.get_offsets()) for one in circles) == 5, "a circle for each figure that is known"
    # The table of a report is the same.
    long = scib().rename_axis("method").reset_index().melt("method", var_name="metric").assign(benchmark="scib")
    long["kind"] = ["model" if method == "scforge" else "baseline" for method in long["method"]]
    other = scib_table(long)
    assert texts(other.texts) == texts(ax.texts)
    # Without batches there are no groups.
    assert texts(scib_table(scib()[["kmeans_nmi"]]).texts) == ["0.90", "0.80", "0.40"]
