"""A table of scores that does not print a model without its baselines, and says in words what it shows."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from scforge._io import atomic_folder, atomic_path
from scforge.errors import OptionError
from scforge.eval.statistics import Comparison, holm

if TYPE_CHECKING:
    from scforge.eval.base import Benchmark

__all__ = ["Kind", "Measured", "Report", "Row"]

Kind = Literal["model", "supervised", "untrained", "baseline", "ceiling"]
KINDS: tuple[Kind, ...] = ("model", "supervised", "untrained", "baseline", "ceiling")
"""Kinds of rows, in the order of a table."""

_ALPHA = 0.05


@dataclass(frozen=True)
class Row:
    """The scores of one method in one benchmark.

    Attributes
    ----------
    name
        What the method is.
    kind
        ``"model"``; ``"supervised"``, a model that learned from labels of other cells, so that there is no fair contest
        with baselines that did not; ``"baseline"``; ``"untrained"``, the same network with random weights; or
        ``"ceiling"``, as good as the data allow, e.g. a second experiment.
    scores
        Metric to figure.
    n_dims
        Dimensions of an embedding; None for what has none.
    seconds
        Wall time of making it, where it was measured.
    benchmark
        What was scored; a report on one thing may leave it empty.
    intervals
        Metric to its 95 % interval.
    spreads
        Metric to its standard deviation over seeds.
    comparisons
        Metric to the comparison with the best baseline; for models.
    """

    name: str
    kind: Kind
    scores: dict[str, float]
    n_dims: int | None = None
    seconds: float | None = None
    benchmark: str = ""
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    spreads: dict[str, float] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What a reader has to know of the figures of a benchmark.

    Attributes
    ----------
    metrics
        Their names, in order.
    main
        The one that counts most.
    lower_is_better
        Those in which less is better.
    ranks
        Whether they say which method is better.
    """

    metrics: tuple[str, ...]
    main: str
    lower_is_better: frozenset[str] = frozenset()
    ranks: bool = True

    @classmethod
    def by(cls, benchmark: Benchmark) -> Measured:
        """Describe the figures of a benchmark."""
        return cls(tuple(benchmark.metrics), benchmark.main, frozenset(benchmark.lower_is_better), benchmark.ranks)

    def sign(self, metric: str) -> float:
        """Return 1 where more is better, else -1."""
        return -1.0 if metric in self.lower_is_better else 1.0


@dataclass(repr=False)
class Report:
    """Rows of scores, with what a reader needs to judge them.

    Parameters
    ----------
    title
        Heading.
    facts
        Name to value: data set, folds, losses, whatever belongs to the scores.
    notes
        Sentences below the table.
    rows
        The scores.
    measured
        Benchmark to what its figures are. For one that is not here, more is better and the first figure counts most.

    Examples
    --------
    >>> from scforge.eval.report import Report, Row
    >>> report = Report("Embeddings compared")
    >>> report.add(Row("PCA", "baseline", {"macro_f1": 0.8}, n_dims=50))
    >>> report.add(Row("scforge", "model", {"macro_f1": 0.9}, n_dims=32))
    >>> report.to_frame()[["method", "metric", "value"]].values.tolist()
    [['PCA', 'macro_f1', 0.8], ['scforge', 'macro_f1', 0.9]]
    """

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    measured: dict[str, Measured] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Add a row."""
        self.rows.append(row)

    def extend(self, other: Report, benchmark: str) -> None:
        """Add the rows, facts and notes of a report on one benchmark, under this name.

        Raises
        ------
        OptionError
            If there are rows of a benchmark of this name already.
        """
        if benchmark in self.benchmarks:
            raise OptionError(f"there are two reports on {benchmark!r}; give one of them another name.")
        self.rows += [replace(row, benchmark=benchmark) for row in other.rows]
        self.measured[benchmark] = other.about(other.benchmarks[0])
        self.facts |= {f"{benchmark}: {name}": value for name, value in other.facts.items()}
        self.notes += [note for note in other.notes if note not in self.notes]

    @property
    def benchmarks(self) -> list[str]:
        """Names of the benchmarks, in the order of their rows."""
        return list(dict.fromkeys(row.benchmark for row in self.rows))

    def of(self, benchmark: str) -> list[Row]:
        """Return the rows of a benchmark."""
        return [row for row in self.rows if row.benchmark == benchmark]

    def about(self, benchmark: str) -> Measured:
        """Return what the figures of a benchmark are."""
        if benchmark in self.measured:
            return self.measured[benchmark]
        metrics = tuple(dict.fromkeys(name for row in self.of(benchmark) for name in row.scores))
        return Measured(metrics, metrics[0])

    def check(self) -> None:
        """Raise if there is a model without a baseline beside it.

        Raises
        ------
        OptionError
            If a benchmark has a row of a model, but none of a baseline.
        """
        if (problem := self._problem()) is not None:
            raise OptionError(problem)

    def _problem(self) -> str | None:
        for benchmark in self.benchmarks:
            kinds = {row.kind for row in self.of(benchmark)}
            if kinds & {"model", "supervised"} and "baseline" not in kinds:
                where = f" of {benchmark}" if benchmark else ""
                return f"the report{where} has a model but no baseline; add one, e.g. scforge.eval.pca_embedding."
        return None

    def to_frame(self) -> pd.DataFrame:
        """Return one line a figure.

        Returns
        -------
        The columns ``benchmark``, ``method``, ``kind``, ``metric``, ``value``, ``low`` and ``high`` (95 % interval),
        ``sd_seeds`` (over trainings where there are several, else over seeds of the benchmark), ``lower_is_better``,
        and for models ``best_baseline``, ``difference``, ``difference_low``, ``difference_high`` and ``p_value`` (not
        corrected) of the comparison with it; NaN and empty texts where there is nothing.

        Raises
        ------
        OptionError
            If there is a model but no baseline.
        """
        self.check()
        nothing = float("nan")
        lines = []
        for row in self.rows:
            for metric, value in row.scores.items():
                low, high = row.intervals.get(metric, (nothing, nothing))
                compared = row.comparisons.get(metric, Comparison("", nothing, nothing, nothing, nothing))
                lines.append(
                    {
                        "benchmark": row.benchmark,
                        "method": row.name,
                        "kind": row.kind,
                        "metric": metric,
                        "value": float(value),
                        "low": low,
                        "high": high,
                        "sd_seeds": row.spreads.get(metric, nothing),
                        "lower_is_better": metric in self.about(row.benchmark).lower_is_better,
                        "best_baseline": compared.baseline,
                        "difference": compared.difference,
                        "difference_low": compared.low,
                        "difference_high": compared.high,
                        "p_value": compared.p_value,
                    }
                )
        return pd.DataFrame(lines)

    def to_table(self, benchmark: str | None = None) -> pd.DataFrame:
        """Return one row a method, and one column a figure of a benchmark; of the first, if None is named."""
        self.check()
        rows = self.of(self.benchmarks[0] if benchmark is None else benchmark)
        return pd.DataFrame({row.name: row.scores for row in rows}).T

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-safe values; what is not a number is None.

        Raises
        ------
        OptionError
            If there is a model but no baseline.
        """
        self.check()
        return _plain(
            {
                "title": self.title,
                "facts": self.facts,
                "rows": [asdict(row) for row in self.rows],
                "verdicts": self.verdicts(),
                "notes": self.notes,
            }
        )

    def verdicts(self) -> list[str]:
        """Return a sentence for each model and benchmark, on whether it is better than the best baseline.

        A difference counts where its p-value, corrected for the number of sentences (Holm 1979), is below 0.05. The
        best of several baselines is better by chance, too: so "worse" is corrected for their number as well
        (Bonferroni), while "better" than the best is stricter than it need be. The interval in the sentence has the
        same correction, so that it excludes 0 where the p-value is below 0.05.
        """
        told = [
            (row, benchmark, row.comparisons[self.about(benchmark).main])
            for benchmark in self.benchmarks
            for row in self.of(benchmark)
            if self.about(benchmark).main in row.comparisons and row.kind == "model"
        ]
        p_values = holm([self._p_value(benchmark, compared) for _, benchmark, compared in told])
        return [
            _sentence(row, self.about(benchmark), compared, float(p))
            for (row, benchmark, compared), p in zip(told, p_values, strict=True)
        ]

    def _p_value(self, benchmark: str, compared: Comparison) -> float:
        about = self.about(benchmark)
        # Without draws there is no p-value, and min() would make a 1 of it.
        if math.isnan(compared.p_value) or about.sign(about.main) * compared.difference >= 0:
            return compared.p_value
        return min(1.0, compared.p_value * sum(row.kind == "baseline" for row in self.of(benchmark)))

    def __repr__(self) -> str:
        """Return the verdicts and a table that fits a terminal; :meth:`to_markdown` returns everything."""
        from scforge.eval.rendering import to_text

        return to_text(self) if self._problem() is None else f"{self.title}: {self._problem()}"

    def _repr_html_(self) -> str | None:
        """Return the verdicts and tables for a notebook."""
        from scforge.eval.rendering import to_fragment

        return to_fragment(self) if self._problem() is None and self.rows else None

    def _repr_markdown_(self) -> str | None:
        return self.to_markdown() if self._problem() is None and self.rows else None

    def to_markdown(self) -> str:
        """Return the report as Markdown; the best figure of each metric is bold."""
        from scforge.eval.rendering import to_markdown

        self.check()
        return to_markdown(self)

    def to_html(self) -> str:
        """Return the report as one page of HTML, with plots in it."""
        from scforge.eval.rendering import to_html

        self.check()
        return to_html(self)

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write ``report.md``, ``report.html``, ``report.json`` and ``report.csv`` into `folder`.

        A new folder appears with all of them; in one that is there each file is the old one or the whole new one.
        """
        self.check()
        texts = {
            "json": json.dumps(self.to_dict(), indent=2) + "\n",
            "csv": self.to_frame().to_csv(index=False),
            "html": self.to_html(),
            "md": self.to_markdown(),
        }
        with contextlib.ExitStack() as written:  # where one cannot be written, none is replaced
            place = Path(folder)
            if not place.exists():
                place = written.enter_context(atomic_folder(place, argument="folder"))
            for suffix, text in texts.items():
                written.enter_context(atomic_path(place / f"report.{suffix}")).write_bytes(text.encode())


def _sentence(row: Row, about: Measured, compared: Comparison, p_value: float) -> str:
    gain = about.sign(about.main) * compared.difference
    value = row.scores[about.main]
    where = f" of {row.benchmark}" if row.benchmark else ""
    figures = f"{about.main}{where}: {value:.3f} against {value - compared.difference:.3f}"
    if math.isnan(compared.difference):
        return f"{row.name} has no {about.main}{where} to compare with {compared.baseline}."
    if math.isnan(p_value):
        word = "above" if gain > 0 else "not above"
        if about.main in about.lower_is_better:
            word = "below (less is better)" if gain > 0 else "not below (less is better)"
        return f"{row.name} is {word} {compared.baseline} in {figures}, without a test."
    word = "not better than"
    if p_value < _ALPHA:
        word = "better than" if gain > 0 else "worse than"
    # The interval is corrected as the p-value is, so that the two say the same.
    factor = p_value / compared.p_value if compared.p_value > 0 else 1.0
    low, high = (compared.low, compared.high) if factor == 1.0 else compared.interval(_ALPHA / factor)
    return (
        f"{row.name} is {word} {compared.baseline} in {figures} (difference {compared.difference:+.3f}, "
        f"95 % interval {low:+.3f} to {high:+.3f}, p = {p_value:.2g})."
    )


def _plain(value: Any) -> Any:
    """Return what JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
