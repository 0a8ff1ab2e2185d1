"""Benchmark reports: differences with intervals, verdicts, and tables as text and HTML."""

from __future__ import annotations

import base64
import contextlib
import html
import io
import json
import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from scforge._constants import REPORT_FILES, UNS_KEY
from scforge._io import atomic_folder, atomic_path, check_files
from scforge._text import literal, markdown, without_formulas
from scforge._version import __version__
from scforge.errors import OptionError

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.eval.base import Benchmark


_ENOUGH = 100
"""Minimum number of draws for percentile intervals instead of a t distribution."""

KINDS: tuple[Kind, ...] = ("model", "supervised", "untrained", "baseline", "ceiling")
"""Kinds of rows, in table order."""

_ALPHA = 0.05

_WIDTH = 100
"""Number of characters per line in a terminal."""

# Colors that a light and a dark notebook can show.
_STYLE = """
.scforge-report { font: 0.95em/1.45 system-ui, sans-serif; }
.scforge-report h2 { font-size: 1.1em; margin: 1em 0 0.3em; }
.scforge-report table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 0.9em; }
.scforge-report th, .scforge-report td { padding: 0.2em 0.6em; text-align: right; white-space: nowrap; }
.scforge-report th:nth-child(-n+2), .scforge-report td:nth-child(-n+2) { text-align: left; }
.scforge-report table tr { background: none; border-bottom: 1px solid rgba(128, 128, 128, 0.3); }
.scforge-report table tr.model td { background: rgba(0, 114, 178, 0.12); }
.scforge-report .best { font-weight: bold; } .scforge-report img { max-width: 100%; }
"""


@dataclass(frozen=True)
class Comparison:
    """Comparison of one method with another.

    Attributes
    ----------
    baseline
        The other method.
    difference
        Score of the method minus the score of the other method.
    low, high
        95% interval of the difference; NaN without draws.
    p_value
        Two-sided p-value of no difference; NaN without draws.
    error
        Standard error of the difference; NaN if only the interval is known.
    degrees
        Degrees of freedom of the test.
    """

    baseline: str
    difference: float
    low: float = math.nan
    high: float = math.nan
    p_value: float = math.nan
    error: float = math.nan
    degrees: float = math.inf

    def interval(self, alpha: float = 0.05) -> tuple[float, float]:
        """Return the interval that excludes 0 if and only if the p-value is below `alpha`."""
        from scipy.stats import t

        error = (self.high - self.low) / 2 / t.isf(0.025, math.inf) if math.isnan(self.error) else self.error
        half = float(t.isf(alpha / 2, self.degrees)) * error
        return self.difference - half, self.difference + half


def interval(value: float, draws: np.ndarray, *, n_units: int | None = None) -> tuple[float, float]:
    """Return the 95% confidence interval of a score from its variation over resampled data.

    Draws are centered at their mean, because scores on resampled data may all be somewhat too low. With at least 100
    draws and 100 units, the interval uses percentiles of the deviations (percentile bootstrap, Efron and Tibshirani
    1993); with fewer, it uses Student's t distribution. Bootstraps of few units vary too little, which is corrected
    (Hesterberg 2015).

    Returns
    -------
    Lower and upper end, or NaN if fewer than two draws, or fewer than half of them, are finite.

    Examples
    --------
    >>> [round(end, 3) for end in interval(0.5, np.linspace(0.3, 0.5, 1001))]
    [0.405, 0.595]
    """
    finite = draws[np.isfinite(draws)]
    degrees = _degrees(finite, n_units)
    if not np.isfinite(value) or degrees < 1 or 2 * len(finite) < len(draws):
        return math.nan, math.nan
    if degrees >= _ENOUGH - 1:
        low, high = np.quantile(finite - finite.mean(), [0.025, 0.975])
    else:
        from scipy.stats import t

        high = float(t.ppf(0.975, degrees)) * _spread(finite, n_units)
        low = -high
    return float(value + low), float(value + high)


def compare_paired(
    baseline: str,
    value: float,
    other: float,
    draws: np.ndarray | pd.Series | None,
    other_draws: np.ndarray | pd.Series | None,
    *,
    n_units: int | None = None,
) -> Comparison:
    """Compare two methods on the same draws of the data.

    The test is Student's t-test of the difference, divided by its standard deviation between draws. The latter
    estimates the standard error of the difference on all data, both for the bootstrap and for halves sampled without
    replacement. The interval is derived from the same test, so it excludes 0 if p is below 0.05.

    Examples
    --------
    >>> same = np.random.default_rng(0).normal(size=200)
    >>> compare_paired("PCA", 0.9, 0.8, same, same + np.random.default_rng(1).normal(0, 0.02, 200)).p_value < 0.001
    True
    """
    difference = value - other
    if draws is None or other_draws is None or not np.isfinite(difference):
        return Comparison(baseline, difference)
    both = np.asarray(draws) - np.asarray(other_draws)
    if np.isnan(interval(difference, both, n_units=n_units)[0]):
        return Comparison(baseline, difference)
    both = both[np.isfinite(both)]
    spread, degrees = _spread(both, n_units), _degrees(both, n_units)
    if spread == 0.0:
        return Comparison(baseline, difference, difference, difference, 1.0 if difference == 0.0 else math.nan)
    from scipy.stats import t

    p_value = float(2 * t.sf(abs(difference) / spread, degrees))
    comparison = Comparison(baseline, difference, p_value=p_value, error=spread, degrees=degrees)
    low, high = comparison.interval()
    return replace(comparison, low=low, high=high)


def _degrees(draws: np.ndarray, n_units: int | None) -> int:
    return len(draws) - 1 if n_units is None else min(len(draws), n_units) - 1


def _spread(draws: np.ndarray, n_units: int | None) -> float:
    """Return the standard deviation of draws, corrected for few units (a bootstrap divides by n, not n - 1)."""
    factor = 1.0 if n_units is None else np.sqrt(n_units / (n_units - 1))
    return float(draws.std(ddof=1) * factor)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Return p-values corrected for multiple testing (Holm 1979), float64; NaN means no test and is kept.

    Examples
    --------
    >>> holm([0.01, 0.04, float("nan"), 0.03]).tolist()
    [0.03, 0.06, nan, 0.06]
    """
    values = np.asarray(p_values, dtype=np.float64)
    corrected = np.full(len(values), np.nan)
    tests = np.flatnonzero(np.isfinite(values))
    order = tests[np.argsort(values[tests], kind="stable")]
    factors = len(order) - np.arange(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(values[order] * factors), 1.0)
    return corrected


def bootstrap_weights(n_rows: int, n: int, *, seed: int, groups: np.ndarray | None = None) -> np.ndarray:
    """Return how often each row is sampled, with replacement, int64, shape (R, n_rows).

    Rows of one group are sampled together; groups are integers starting at 0.

    Examples
    --------
    >>> bootstrap_weights(4, 2, seed=0).sum(axis=1).tolist()
    [4, 4]
    """
    n_units = n_rows if groups is None else int(groups.max()) + 1
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(n_units, np.full(n_units, 1 / n_units), size=n)
    return counts if groups is None else counts[:, groups]


Kind = Literal["model", "supervised", "untrained", "baseline", "ceiling"]


@dataclass(frozen=True)
class Row:
    """The scores of one method in one benchmark.

    Attributes
    ----------
    name
        Name of the method.
    kind
        ``"model"``; ``"supervised"``, a model trained on labels of other cells, which makes comparisons with baselines
        unfair; ``"baseline"``; ``"untrained"``, the same network with random weights; or ``"ceiling"``, the best score
        that the data allow, e.g. from a technical duplicate.
    scores
        A mapping from metric to score.
    n_dims
        Number of dimensions of an embedding; None for other results.
    seconds
        Wall time to compute the result, if measured.
    benchmark
        Name of the benchmark; may be empty if there is only one benchmark.
    intervals
        A mapping from metric to 95% interval.
    spreads
        A mapping from metric to standard deviation over seeds.
    comparisons
        A mapping from metric to the comparison with the best baseline; for models.
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
    """Description of the scores of a benchmark.

    Attributes
    ----------
    metrics
        Names of the metrics, in order.
    main
        The main metric.
    lower_is_better
        Metrics for which lower is better.
    ranks
        Whether the scores rank methods.
    """

    metrics: tuple[str, ...]
    main: str
    lower_is_better: frozenset[str] = frozenset()
    ranks: bool = True

    @classmethod
    def by(cls, benchmark: Benchmark) -> Measured:
        """Create the description of a benchmark's scores."""
        return cls(tuple(benchmark.metrics), benchmark.main, frozenset(benchmark.lower_is_better), benchmark.ranks)

    def sign(self, metric: str) -> float:
        """Return 1 if higher is better, else -1."""
        return -1.0 if metric in self.lower_is_better else 1.0


@dataclass(repr=False)
class Report:
    """A table of scores with the facts needed to interpret them.

    Parameters
    ----------
    title
        Heading.
    facts
        A mapping from name to value, e.g. data set, folds or losses.
    notes
        Sentences below the table.
    rows
        The scores.
    measured
        A mapping from benchmark to the description of its scores. For benchmarks that are not listed, higher is better
        and the first score is the main one.

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
            If there are already rows for a benchmark with this name.
        """
        if benchmark in self.benchmarks:
            raise OptionError(f"there are two reports on {benchmark!r}; rename one of them.")
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
        """Return the description of the scores of a benchmark."""
        if benchmark in self.measured:
            return self.measured[benchmark]
        metrics = tuple(dict.fromkeys(name for row in self.of(benchmark) for name in row.scores))
        return Measured(metrics, metrics[0])

    def check(self) -> None:
        """Raise an error if there is a model but no baseline.

        Raises
        ------
        OptionError
            If a benchmark has a model but no baseline.
        """
        if (problem := self._problem()) is not None:
            raise OptionError(problem)

    def _problem(self) -> str | None:
        for benchmark in self.benchmarks:
            kinds = {row.kind for row in self.of(benchmark)}
            if kinds & {"model", "supervised"} and "baseline" not in kinds:
                where = f" of {benchmark}" if benchmark else ""
                return f"the report{where} has no baseline for the model; add e.g. scforge.eval.pca_embedding."
        return None

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row per score.

        Returns
        -------
        The columns ``benchmark``, ``method``, ``kind``, ``metric``, ``value``, ``low`` and ``high`` (95% interval),
        ``sd_seeds`` (over training runs if there are several, else over seeds of the benchmark), ``lower_is_better``,
        and for models ``best_baseline``, ``difference``, ``difference_low``, ``difference_high`` and ``p_value`` (not
        corrected) of the comparison with the best baseline; NaN and empty text if there is no value.

        Raises
        ------
        OptionError
            If there is a model but no baseline.
        """
        self.check()
        lines = []
        for row in self.rows:
            for metric, value in row.scores.items():
                low, high = row.intervals.get(metric, (math.nan, math.nan))
                compared = row.comparisons.get(metric, Comparison("", math.nan))
                lines.append(
                    {
                        "benchmark": row.benchmark,
                        "method": row.name,
                        "kind": row.kind,
                        "metric": metric,
                        "value": float(value),
                        "low": low,
                        "high": high,
                        "sd_seeds": row.spreads.get(metric, math.nan),
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
        """Return one row per method and one column per score for a benchmark (by default, the first)."""
        self.check()
        rows = self.of(self.benchmarks[0] if benchmark is None else benchmark)
        return pd.DataFrame({row.name: row.scores for row in rows}).T

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report as JSON-safe values; NaN becomes None.

        Raises
        ------
        OptionError
            If there is a model but no baseline.
        """
        self.check()
        return _plain(
            {
                "scforge_version": __version__,
                "title": self.title,
                "facts": self.facts,
                "rows": [asdict(row) for row in self.rows],
                "verdicts": self.verdicts(),
                "notes": self.notes,
            }
        )

    def verdicts(self) -> list[str]:
        """Return a sentence for each model and benchmark that states whether it is better than the best baseline.

        A difference is significant if its p-value, corrected for the number of sentences (Holm 1979), is below 0.05.
        The best of several baselines may be best by chance. So "worse" is also corrected for their number (Bonferroni),
        while "better" than the best is conservative. The interval in the sentence has the same correction, so it
        excludes 0 if the p-value is below 0.05.
        """
        tests = [
            (row, benchmark, row.comparisons[self.about(benchmark).main])
            for benchmark in self.benchmarks
            for row in self.of(benchmark)
            if self.about(benchmark).main in row.comparisons and row.kind == "model"
        ]
        p_values = holm([self._p_value(benchmark, compared) for _, benchmark, compared in tests])
        return [
            _sentence(row, self.about(benchmark), compared, float(p))
            for (row, benchmark, compared), p in zip(tests, p_values, strict=True)
        ]

    def _p_value(self, benchmark: str, compared: Comparison) -> float:
        about = self.about(benchmark)
        # Without draws there is no p-value, and min() would make a 1 of it.
        if math.isnan(compared.p_value) or about.sign(about.main) * compared.difference >= 0:
            return compared.p_value
        return min(1.0, compared.p_value * sum(row.kind == "baseline" for row in self.of(benchmark)))

    def __repr__(self) -> str:
        """Return the verdicts and a table that fits a terminal; :meth:`to_markdown` returns everything."""
        if (problem := self._problem()) is not None:
            return f"{self.title}: {problem}"
        lines = [self.title]
        lines += [
            textwrap.fill(verdict, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
            for verdict in self.verdicts()
        ]
        n_left_out = 0
        for benchmark in self.benchmarks:
            columns = [[title, *(text for text, _ in cells)] for title, cells in _columns(self, benchmark)]
            columns = [column for column in columns if any(column[1:]) and column[0] not in ("dimensions", "seconds")]
            sizes = [max(map(len, column)) for column in columns]
            n_shown = next((i for i in range(len(sizes), 3, -1) if sum(sizes[:i]) + 2 * i <= _WIDTH), 3)
            n_left_out += len(columns) - n_shown
            lines += ["", benchmark] if benchmark else [""]
            for row in zip(*columns[:n_shown], strict=True):
                texts = [text.ljust(sizes[i]) if i < 2 else text.rjust(sizes[i]) for i, text in enumerate(row)]
                lines.append("  ".join(texts).rstrip())
        if n_left_out:
            lines += ["", f"Columns not shown: {n_left_out}; see to_frame(), to_markdown(), or write(folder)."]
        return "\n".join(lines)

    def _repr_html_(self) -> str | None:
        """Return the verdicts and tables for a notebook."""
        return to_html(self, pictures=False) if self._problem() is None and self.rows else None

    def _repr_markdown_(self) -> str | None:
        return self.to_markdown() if self._problem() is None and self.rows else None

    def to_markdown(self) -> str:
        """Return the report as Markdown; the best score of each metric is bold."""
        self.check()
        lines = [f"# {markdown(self.title)}", ""]
        lines += [f"- {markdown(f'{name}: {value}')}" for name, value in self.facts.items()]
        if verdicts := self.verdicts():
            lines += ["", *(f"- **{markdown(sentence)}**" for sentence in verdicts)]
        for benchmark in self.benchmarks:
            if len(self.benchmarks) > 1:
                lines += ["", f"## {markdown(benchmark)}"]
            columns = _columns(self, benchmark)
            header = " | ".join(markdown(column.title) for column in columns)
            lines += ["", f"| {header} |", f"|{'---|' * len(columns)}"]
            for row in zip(*(column.cells for column in columns), strict=True):
                texts = (f"**{markdown(text)}**" if best else markdown(text) for text, best in row)
                lines.append(f"| {' | '.join(texts)} |")
        lines += ["", *map(markdown, self.notes)]
        return "\n".join(lines).rstrip() + "\n"

    def to_html(self) -> str:
        """Return the report as one HTML page with embedded plots."""
        self.check()
        title = html.escape(self.title)
        return (
            f"<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title></head>\n"
            f"<body style='max-width: 72rem; margin: 2rem auto; padding: 0 1rem'>\n{to_html(self)}\n</body></html>\n"
        )

    def write(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write ``report.md``, ``report.html``, ``report.json`` and ``report.csv`` into `folder`.

        A new folder appears only with all files in it. In an existing folder, each file is replaced as a whole.

        Parameters
        ----------
        folder
            The folder.
        overwrite
            Whether to replace a report by scforge.

        Raises
        ------
        OptionError
            If one of the files exists and `overwrite` is False, or scforge did not write it.
        """
        self.check()
        check_files("folder", Path(folder), REPORT_FILES, described_by="report.json", overwrite=overwrite)
        texts = {
            "json": json.dumps(self.to_dict(), indent=2) + "\n",
            "csv": without_formulas(self.to_frame()).to_csv(index=False),
            "html": self.to_html(),
            "md": self.to_markdown(),
        }
        with contextlib.ExitStack() as written:  # where one cannot be written, none is replaced
            target = Path(folder)
            if not target.exists():
                target = written.enter_context(atomic_folder(target, argument="folder"))
            for suffix, text in texts.items():
                file = atomic_path(target / f"report.{suffix}", overwrite=overwrite, argument="folder")
                written.enter_context(file).write_bytes(text.encode())


def write_scores(
    adata: AnnData, key: str, scores: pd.DataFrame, tables: Mapping[str, pd.DataFrame] | None = None
) -> None:
    """Write the scores and tables of an evaluation into uns, and remove the tables of an earlier one with this key."""
    written = dict(adata.uns.get(UNS_KEY, {}))
    for name in written.pop(f"{key}_tables", ("differences",)):
        written.pop(f"{key}_{name}", None)
    written[key] = scores
    if tables:
        written[f"{key}_tables"] = np.array([*tables], dtype=object)
        written |= {f"{key}_{name}": table for name, table in tables.items()}
    adata.uns[UNS_KEY] = written


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
            word = "below (lower is better)" if gain > 0 else "not below (lower is better)"
        return f"{row.name} is {word} {compared.baseline} in {figures}, without a test."
    word = "tied with"
    if p_value < _ALPHA:
        word = "better than" if gain > 0 else "worse than"
    # The interval is corrected as the p-value is, so that the two say the same.
    factor = p_value / compared.p_value if compared.p_value > 0 else 1.0
    low, high = (compared.low, compared.high) if factor == 1.0 else compared.interval(_ALPHA / factor)
    return (
        f"{row.name} is {word} {compared.baseline} in {figures} (difference {compared.difference:+.3f}, "
        f"95% interval {low:+.3f} to {high:+.3f}, p = {p_value:.2g})."
    )


def _plain(value: Any) -> Any:
    """Return a JSON-safe value."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_html(report: Report, *, pictures: bool = True) -> str:
    """Return a report as self-contained HTML; facts and notes are collapsed unless there are plots."""
    verdicts = "".join(f"<li>{html.escape(verdict)}</li>" for verdict in report.verdicts())
    facts = "".join(f"<li>{html.escape(f'{name}: {value}')}</li>" for name, value in report.facts.items())
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in report.notes)
    parts = [f"<div class='scforge-report'><style>{_STYLE}</style>", f"<h1>{html.escape(report.title)}</h1>"]
    parts += [f"<ul>{verdicts}</ul>"] * bool(verdicts)
    frame = report.to_frame()
    for benchmark in report.benchmarks:
        columns, about = _columns(report, benchmark), report.about(benchmark)
        parts += [f"<h2>{html.escape(benchmark)}</h2>"] * bool(benchmark)
        parts.append(f"<table><tr>{''.join(f'<th>{html.escape(column.title)}</th>' for column in columns)}</tr>")
        for row, cells in zip(
            report.of(benchmark), zip(*(column.cells for column in columns), strict=True), strict=True
        ):
            texts = (f"<td{' class=best' if best else ''}>{html.escape(text)}</td>" for text, best in cells)
            parts.append(f"<tr class='{row.kind}'>{''.join(texts)}</tr>")
        parts.append("</table>")
        if pictures and about.ranks:
            parts.append(_picture(frame[frame["benchmark"] == benchmark], about))
    parts.append(
        f"<details{' open' * pictures}><summary>Facts and notes</summary><ul>{facts}</ul>{notes}</details></div>"
    )
    return "\n".join(parts)


class _Column(NamedTuple):
    """A report column: its title, and its texts with a flag for the best value in the column."""

    title: str
    cells: list[tuple[str, bool]]


def _columns(report: Report, benchmark: str) -> list[_Column]:
    """Return the table columns of a benchmark, without empty columns."""
    rows, about = report.of(benchmark), report.about(benchmark)

    def plain(title: str, texts: Iterable[str]) -> list[_Column]:
        cells = [(text, False) for text in texts]
        return [_Column(title, cells)] if any(text for text, _ in cells) else []

    columns = plain("method", (row.name for row in rows)) + plain("kind", (row.kind for row in rows))
    columns += plain("dimensions", ("" if row.n_dims is None else str(row.n_dims) for row in rows))
    shown = [name for name in about.metrics if any(name in row.scores for row in rows)]
    for metric in sorted(shown, key=lambda name: name != about.main):
        values, best = [row.scores.get(metric, math.nan) for row in rows], _best(rows, metric, about)
        is_best = [
            about.ranks and value == best and row.kind != "ceiling" for value, row in zip(values, rows, strict=True)
        ]
        title = f"{metric} ↓" if metric in about.lower_is_better else metric
        columns.append(_Column(title, list(zip(map(_number, values), is_best, strict=True))))
        if metric == about.main:
            ends = [map(_number, row.intervals.get(metric, (math.nan, math.nan))) for row in rows]
            columns += plain("95% interval", (" to ".join(filter(None, pair)) for pair in ends))
            columns += plain("sd of seeds", (_number(row.spreads.get(metric, math.nan)) for row in rows))
    return columns + plain("seconds", ("" if row.seconds is None else f"{row.seconds:.0f}" for row in rows))


def _best(rows: list[Row], metric: str, about: Measured) -> float:
    """Return the best score of a metric; ceilings are ignored."""
    values = [row.scores.get(metric, math.nan) for row in rows if row.kind != "ceiling"]
    return max((value for value in values if not math.isnan(value)), key=lambda v: about.sign(metric) * v, default=0.0)


def _number(value: float) -> str:
    if math.isnan(value):
        return ""
    if abs(value) >= 1_000:
        return f"{value:,.0f}"
    if abs(value) < 1e-9:  # rounding errors
        return "0.000"
    return f"{value:.3f}" if abs(value) >= 0.0005 else f"{value:.3g}"


def _picture(frame: pd.DataFrame, about: Measured) -> str:
    """Plot the scores of a benchmark, the main metric first, and return an image tag."""
    import matplotlib.pyplot as plt

    from scforge.pl.scores import metrics as draw

    figure, ax = plt.subplots(figsize=(7, 1.2 + 0.32 * frame["method"].nunique()), layout="constrained")
    try:
        draw(frame, metrics=about.main, lower_is_better=about.lower_is_better, ax=ax)
        if benchmark := frame["benchmark"].iloc[0]:
            ax.set_xlabel(f"{ax.get_xlabel()}, of {benchmark}")
            literal(ax)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
    finally:
        plt.close(figure)
    picture = base64.b64encode(buffer.getvalue()).decode()
    return f"<img alt='{html.escape(about.main)}' src='data:image/png;base64,{picture}'>"
