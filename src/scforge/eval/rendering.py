"""Reports as pages."""

from __future__ import annotations

import base64
import html
import io
import math
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from scforge.eval.report import Measured, Report, Row

__all__ = ["to_html", "to_markdown"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: 0.85rem; display: block; overflow-x: auto; }
th, td { padding: 0.3rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
th { background: #f5f5f5; vertical-align: bottom; } tr.model td { background: #eef4fb; }
.best { font-weight: bold; } img { max-width: 100%; } .verdicts li { margin: 0.3rem 0; }
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


def to_html(report: Report) -> str:
    """Return a report as one page of HTML that needs no other file."""
    parts = [f"<h1>{html.escape(report.title)}</h1>", "<ul>"]
    parts += [f"<li>{html.escape(str(name))}: {html.escape(str(value))}</li>" for name, value in report.facts.items()]
    parts.append("</ul>")
    if verdicts := report.verdicts():
        parts.append(f"<ul class='verdicts'>{''.join(f'<li>{html.escape(one)}</li>' for one in verdicts)}</ul>")
    frame = report.to_frame()
    for benchmark in report.benchmarks:
        if benchmark:
            parts.append(f"<h2>{html.escape(benchmark)}</h2>")
        header, body = _cells(report, benchmark)
        parts.append(f"<table><tr>{''.join(f'<th>{html.escape(name)}</th>' for name in header)}</tr>")
        for kind, row in body:
            cells = (f"<td{' class=best' if best else ''}>{html.escape(text)}</td>" for text, best in row)
            parts.append(f"<tr class='{kind}'>{''.join(cells)}</tr>")
        parts.append("</table>")
        parts.append(_picture(frame[frame["benchmark"] == benchmark], report.about(benchmark)))
    parts += [f"<p>{html.escape(note)}</p>" for note in report.notes]
    title = html.escape(report.title)
    return (
        f"<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


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
    return f"{value:.3f}" if abs(value) < 1_000 and (abs(value) >= 0.0005 or value == 0.0) else f"{value:.3g}"


def _picture(frame: pd.DataFrame, about: Measured) -> str:
    """Draw the figures of a benchmark, those of the main metric first, and return them as an image tag."""
    import matplotlib.pyplot as plt

    from scforge.pl.scores import metrics as draw

    figure, ax = plt.subplots(figsize=(7, 1.2 + 0.32 * frame["method"].nunique()), layout="constrained")
    try:
        draw(frame, metrics=about.main, lower_is_better=about.lower_is_better, ax=ax)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
    finally:
        plt.close(figure)
    picture = base64.b64encode(buffer.getvalue()).decode()
    return f"<img alt='{html.escape(about.main)}' src='data:image/png;base64,{picture}'>"
