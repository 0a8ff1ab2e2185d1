"""Figures for the card of a model: those of the model, with those of the baselines of the same table."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scforge.errors import OptionError, listing

if TYPE_CHECKING:
    import pandas as pd

    from scforge.eval.report import Report


_MODEL = "scforge"
_TITLE = re.compile(r"^(#+) ", re.MULTILINE)
_LONG = frozenset({"benchmark", "method", "kind", "metric", "value", "lower_is_better"})
"""Columns of :meth:`Report.to_frame` that a table of one line a figure cannot do without."""
_OF_DATA = "data"


@dataclass(frozen=True)
class Score:
    """A figure of the model, and those of what stands in the same table.

    Attributes
    ----------
    benchmark, metric
        What was measured.
    value
        The figure of the model.
    beside
        Name of a baseline to its figure.
    data
        What it was measured on; None if the table does not say it.
    """

    benchmark: str
    metric: str
    value: float
    beside: dict[str, float] = field(default_factory=dict)
    data: str | None = None


def is_long(table: pd.DataFrame) -> bool:
    """Return whether a table has one line a figure, as ``scforge evaluate -o out.csv`` writes it for embeddings."""
    return {"method", "metric", "value"} <= set(table.columns)


def scores_of(metrics: Report | pd.DataFrame, *, said: str = "metrics") -> tuple[str, tuple[Score, ...]]:
    """Return figures as Markdown, and those of the model with those beside them.

    Parameters
    ----------
    metrics
        A report, its :meth:`Report.to_frame`, or a table as :meth:`Encoder.evaluate` returns it: one row a method, of
        which ``"scforge"`` is the model.
    said
        How the user named it, the beginning of a message.

    Raises
    ------
    OptionError
        If there are no baselines beside the model, or it is not clear which row is of the model.
    """
    import pandas as pd

    from scforge.eval.report import Report

    if isinstance(metrics, Report):
        return _of_report(metrics, said)
    if not isinstance(metrics, pd.DataFrame):
        what = type(metrics).__name__
        raise OptionError(f"{said} is a {what} that is no table of evaluate(); give what evaluate() returned.")
    if is_long(metrics):
        return _of_report(_report(metrics, said), said)
    names = [str(name) for name in metrics.index]
    if names.count(_MODEL) != 1:
        raise OptionError(
            f"{said} has {names.count(_MODEL)} rows called {_MODEL!r}, which is how evaluate() calls the model "
            f"(rows: {listing(names)}); name that of the model so."
        )
    if len(metrics) < 2:
        raise OptionError(
            f"{said} has no baselines beside the model, and figures of a model alone say little; give what "
            "evaluate(baselines=True) returned."
        )
    numeric = metrics.select_dtypes("floating")  # whole numbers count cells
    lines = [f"| method | {' | '.join(map(str, metrics.columns))} |", f"|{'---|' * (metrics.shape[1] + 1)}"]
    rows = zip(names, metrics.itertuples(index=False), strict=True)
    lines += [f"| {name} | {' | '.join(map(_shown, row))} |" for name, row in rows]
    scores = []
    for metric in numeric:
        figures = dict(zip(names, map(float, numeric[metric]), strict=True))
        value = figures.pop(_MODEL)
        if math.isfinite(value):
            scores.append(Score("", str(metric), value, _finite(figures)))
    return "\n".join(lines), tuple(scores)


def _report(table: pd.DataFrame, said: str) -> Report:
    """Return the report whose lines a table has, as far as they say it."""
    from scforge.eval.base import BENCHMARKS
    from scforge.eval.report import KINDS, Comparison, Measured, Report, Row

    if missing := sorted(_LONG - set(table.columns)):
        raise OptionError(
            f"{said} lacks the column {missing[0]!r}; give the table that scforge evaluate -o out.csv wrote."
        )
    texts = ["benchmark", "method", "kind", "metric"]
    table = table.assign(**{name: table[name].fillna("").astype(str) for name in texts})
    if wrong := sorted(set(table["kind"]) - set(KINDS)):
        raise OptionError(f"{said} has a row of the kind {wrong[0]!r}, which is none of {listing(KINDS)}.")
    report = Report("Figures")
    less: dict[str, set[str]] = {}
    for line in table.to_dict("records"):
        name, benchmark, metric = line["method"], line["benchmark"], line["metric"]
        row = next((row for row in report.of(benchmark) if row.name == name), None)
        if row is None:
            row = Row(name, line["kind"], {}, benchmark=benchmark)
            report.add(row)
        try:
            row.scores[metric] = float(line["value"])
            row.intervals[metric] = (float(line.get("low", math.nan)), float(line.get("high", math.nan)))
            row.spreads[metric] = float(line.get("sd_seeds", math.nan))
            compared = ("difference", "difference_low", "difference_high", "p_value")
            gain, low, high, p_value = (float(line.get(column, math.nan)) for column in compared)
            if isinstance(beside := line.get("best_baseline"), str) and beside:
                row.comparisons[metric] = Comparison(beside, gain, low, high, p_value)
        except (TypeError, ValueError) as error:
            raise OptionError(f"{said} has a figure of {name!r} in {metric!r} that is no number; mend it.") from error
        if str(line["lower_is_better"]) == "True":
            less.setdefault(benchmark, set()).add(metric)
    for benchmark in report.benchmarks:
        about, lower = report.about(benchmark), frozenset(less.get(benchmark, ()))
        known = BENCHMARKS.get(benchmark) if benchmark in BENCHMARKS.names() else None
        main = known.main if known is not None and known.main in about.metrics else about.main
        ranks = True if known is None else known.ranks
        report.measured[benchmark] = Measured(about.metrics, main, lower, ranks)
    return report


def _of_report(report: Report, said: str) -> tuple[str, tuple[Score, ...]]:
    try:
        report.check()
    except OptionError as error:
        raise OptionError(f"{said}: {error}") from error
    scores: list[Score] = []
    for benchmark in report.benchmarks:
        rows = report.of(benchmark)
        models = [row for row in rows if row.kind in ("model", "supervised")]
        mine = [row for row in models if row.name == _MODEL] or models
        if len(mine) != 1:
            raise OptionError(
                f"{said} has {len(mine)} models in {benchmark or report.title!r}; give the report of this model alone."
            )
        main = report.about(benchmark).main
        value = mine[0].scores.get(main, math.nan)
        beside = {row.name: row.scores.get(main, math.nan) for row in rows if row is not mine[0]}
        data = report.facts.get(_OF_DATA, report.facts.get(f"{benchmark}: {_OF_DATA}"))
        if math.isfinite(value):
            scores.append(Score(benchmark, main, float(value), _finite(beside), None if data is None else str(data)))
    if not scores:
        raise OptionError(f"{said} has no figure of the model; give what evaluate() returned.")
    return _TITLE.sub(r"##\1 ", report.to_markdown()).strip(), tuple(scores)


def _finite(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
