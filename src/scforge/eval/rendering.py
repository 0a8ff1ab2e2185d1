"""Reports as pages."""

from __future__ import annotations

import base64
import html
import io
import math
import textwrap
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from scforge.eval.report import Measured, Report, Row

__all__ = ["to_fragment", "to_html", "to_markdown", "to_text"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: 0.85rem; display: block; overflow-x: auto; }
th, td { padding: 0.3rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
th { background: #f5f5f5; vertical-align: bottom; } tr.model td { background: #eef4fb; }
.best { font-weight: bold; } img { max-width: 100%; } .verdicts li { margin: 0.3rem 0; }
"""

# Colours that a light and a dark notebook can show.
_STYLE_OF_FRAGMENT = """
.scforge-report { font-size: 0.95em; line-height: 1.45; }
.scforge-report h2 { font-size: 1.05em; margin: 1em 0 0.3em; }
.scforge-report table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 0.9em; }
.scforge-report th, .scforge-report td { padding: 0.2em 0.6em; text-align: right; white-space: nowrap; }
.scforge-report th:nth-child(-n+2), .scforge-report td:nth-child(-n+2) { text-align: left; }
.scforge-report table tr { background: none; border-bottom: 1px solid rgba(128, 128, 128, 0.3); }
.scforge-report table tr.model td { background: rgba(0, 114, 178, 0.12); }
.scforge-report .best { font-weight: bold; }
"""


def to_markdown(report: Report) -> str:
    """Return a report as Markdown."""
    lines = [f"# {report.title}", ""]
    lines += [f"- {name}: {value}" for name, value in report.facts.items()]
    if verdicts := report.verdicts():
        lines += ["", *(f"- **{sentence}**" for sentence in verdicts)]
    for benchmark in report.benchmarks:
        if len(report.benchmarks) > 1:
            lines += ["", f"## {benchmark}"]
        header, body = _cells(report, benchmark)
        lines += ["", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
        for _, row in body:
            lines.append(f"| {' | '.join(f'**{text}**' if best else text for text, best in row)} |")
    lines += ["", *report.notes]
    return "\n".join(lines).rstrip() + "\n"


def to_text(report: Report, width: int = 100) -> str:
    """Return the verdicts of a report, and of each benchmark the columns that fit into `width` characters."""
    lines = [report.title]
    lines += [
        textwrap.fill(one, width, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        for one in report.verdicts()
    ]
    n_left_out = 0
    for benchmark in report.benchmarks:
        header, body = _cells(report, benchmark)
        columns = [[name, *(row[i][0] for _, row in body)] for i, name in enumerate(header)]
        columns = [one for one in columns if any(one[1:]) and one[0] not in ("dimensions", "seconds")]
        sizes = [max(map(len, column)) for column in columns]
        n_shown = next((i for i in range(len(sizes), 3, -1) if sum(sizes[:i]) + 2 * i <= width), 3)
        n_left_out += len(columns) - n_shown
        lines += ["", benchmark] if benchmark else [""]
        for row in zip(*columns[:n_shown], strict=True):
            texts = [text.ljust(sizes[i]) if i < 2 else text.rjust(sizes[i]) for i, text in enumerate(row)]
            lines.append("  ".join(texts).rstrip())
    if n_left_out:
        lines += ["", f"Columns not shown: {n_left_out}; see to_frame(), to_markdown(), or write(folder)."]
    return "\n".join(lines)


def to_fragment(report: Report) -> str:
    """Return a report as the HTML of a notebook's cell: facts and notes are folded."""
    facts = "".join(f"<p>{html.escape(note)}</p>" for note in report.notes)
    return (
        f"<div class='scforge-report'><style>{_STYLE_OF_FRAGMENT}</style>"
        f"<b>{html.escape(report.title)}</b>\n" + "\n".join([*_verdicts(report), *_tables(report)]) + "\n"
        f"<details><summary>Facts and notes</summary>{_facts(report)}{facts}</details></div>"
    )


def to_html(report: Report) -> str:
    """Return a report as one page of HTML that needs no other file."""
    parts = [f"<h1>{html.escape(report.title)}</h1>", _facts(report), *_verdicts(report)]
    parts += _tables(report, pictures=True)
    parts += [f"<p>{html.escape(note)}</p>" for note in report.notes]
    title = html.escape(report.title)
    return (
        f"<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _facts(report: Report) -> str:
    facts = (f"<li>{html.escape(str(name))}: {html.escape(str(value))}</li>" for name, value in report.facts.items())
    return f"<ul>{''.join(facts)}</ul>"


def _verdicts(report: Report) -> list[str]:
    verdicts = report.verdicts()
    return [f"<ul class='verdicts'>{''.join(f'<li>{html.escape(one)}</li>' for one in verdicts)}</ul>"] * bool(verdicts)


def _tables(report: Report, *, pictures: bool = False) -> list[str]:
    """Return heading and table of each benchmark; with a picture of the main score where one method can be better."""
    parts, frame = [], report.to_frame()
    for benchmark in report.benchmarks:
        if benchmark:
            parts.append(f"<h2>{html.escape(benchmark)}</h2>")
        header, body = _cells(report, benchmark)
        parts.append(f"<table><tr>{''.join(f'<th>{html.escape(name)}</th>' for name in header)}</tr>")
        for kind, row in body:
            cells = (f"<td{' class=best' if best else ''}>{html.escape(text)}</td>" for text, best in row)
            parts.append(f"<tr class='{kind}'>{''.join(cells)}</tr>")
        parts.append("</table>")
        about = report.about(benchmark)
        if pictures and about.ranks:
            parts.append(_picture(frame[frame["benchmark"] == benchmark], about))
    return parts


def _cells(report: Report, benchmark: str) -> tuple[list[str], list[tuple[str, list[tuple[str, bool]]]]]:
    """Return the header, and of each row its kind and its texts, each with whether it is the best of its column."""
    rows, about = report.of(benchmark), report.about(benchmark)
    has_dims = any(row.n_dims is not None for row in rows)
    has_interval = any(not math.isnan(row.intervals.get(about.main, (math.nan,))[0]) for row in rows)
    has_spread = any(not math.isnan(row.spreads.get(about.main, math.nan)) for row in rows)
    has_seconds = any(row.seconds is not None for row in rows)
    shown = [name for name in about.metrics if any(name in row.scores for row in rows)]
    shown.sort(key=lambda name: name != about.main)
    header = ["method", "kind", *(["dimensions"] if has_dims else [])]
    for metric in shown:
        header.append(f"{metric} ↓" if metric in about.lower_is_better else metric)
        if metric == about.main and has_interval:
            header.append("95 % interval")
        if metric == about.main and has_spread:
            header.append("sd of seeds")
    if has_seconds:
        header.append("seconds")
    best = {metric: _best(rows, metric, about) for metric in shown}
    body: list[tuple[str, list[tuple[str, bool]]]] = []
    for row in rows:
        texts = [(row.name, False), (row.kind, False)]
        if has_dims:
            texts.append(("" if row.n_dims is None else str(row.n_dims), False))
        for metric in shown:
            value = row.scores.get(metric, math.nan)
            texts.append((_number(value), about.ranks and value == best[metric] and row.kind != "ceiling"))
            if metric == about.main and has_interval:
                low, high = row.intervals.get(metric, (math.nan, math.nan))
                texts.append(("" if math.isnan(low) else f"{_number(low)} to {_number(high)}", False))
            if metric == about.main and has_spread:
                texts.append((_number(row.spreads.get(metric, math.nan)), False))
        if has_seconds:
            texts.append(("" if row.seconds is None else f"{row.seconds:.0f}", False))
        body.append((row.kind, texts))
    return header, body


def _best(rows: list[Row], metric: str, about: Measured) -> float:
    """Return the best figure of a metric; a ceiling does not compete."""
    values = [row.scores.get(metric, math.nan) for row in rows if row.kind != "ceiling"]
    return max((value for value in values if not math.isnan(value)), key=lambda v: about.sign(metric) * v, default=0.0)


def _number(value: float) -> str:
    if math.isnan(value):
        return ""
    if abs(value) >= 1_000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 0.0005 or value == 0.0 else f"{value:.3g}"


def _picture(frame: pd.DataFrame, about: Measured) -> str:
    """Draw the figures of a benchmark, those of the main metric first, and return them as an image tag."""
    import matplotlib.pyplot as plt

    from scforge.pl.scores import metrics as draw

    figure, ax = plt.subplots(figsize=(7, 1.2 + 0.32 * frame["method"].nunique()), layout="constrained")
    try:
        draw(frame, metrics=about.main, lower_is_better=about.lower_is_better, ax=ax)
        if benchmark := frame["benchmark"].iloc[0]:
            ax.set_xlabel(f"{ax.get_xlabel()}, of {benchmark}")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
    finally:
        plt.close(figure)
    picture = base64.b64encode(buffer.getvalue()).decode()
    return f"<img alt='{html.escape(about.main)}' src='data:image/png;base64,{picture}'>"
