"""Results of benchmarks and the tables of the documentation that are made from them."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

LOWER_IS_BETTER = ("calibration_error", "cpu_seconds", "wrong_confident")


def task_parser(
    description: str | None, tasks: Iterable[str], *, default: list[str], runs: int, option: str = "--tasks"
) -> argparse.ArgumentParser:
    """Return a parser with the options of the benchmarks that measure some runs of each task (or data set)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("SCFORGE_DATA"), help="folder of the data sets")
    parser.add_argument(option, nargs="+", default=default, choices=list(tasks))
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--first-run", type=int, default=0)
    parser.add_argument("--docs", nargs="+", type=Path, help="pages to write tables into; nothing is measured")
    return parser


def rewrite(page: Path, name: str, table: Callable[[str], str]) -> int:
    """Write `table` of the argument behind each comment '% NAME ARGUMENT' or '<!-- NAME ARGUMENT -->' of a page.

    It takes the place of the table that is there. Returns the number of comments.
    """
    text, n = re.subn(
        rf"(?m)^(?P<comment>(?:% |<!-- ){name}(?: (?P<argument>\w+))?(?: -->)?)\n+(?:\|.*\n)*\n*",
        lambda found: f"{found['comment']}\n\n{table(found['argument'] or '')}\n\n",
        page.read_text(),
    )
    page.write_text(text.rstrip("\n") + "\n")
    return n


def difference(values: pd.Series) -> str:
    """Return the mean of paired differences with its 95 % interval, and whether this includes 0."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std() / np.sqrt(len(values))
    verdict = "tie" if not abs(values.mean()) > half else "better" if values.mean() > 0 else "worse"
    return f"{values.mean():+.3f} ± {half:.3f}, {verdict}"


def best_other(wide: pd.DataFrame) -> str:
    """Return the method with the highest mean, among those of others with three runs, and half of all (the rows)."""
    others = wide.loc[:, ~wide.columns.str.startswith("scforge")]
    return str(others.loc[:, others.count() >= max(3, len(wide) / 2)].mean().idxmax())


def read(path: Path, keys: list[str]) -> pd.DataFrame:
    """Return the results in a CSV file, with one column `value`; none without a file."""
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=[*keys, "value"])


def keep(lines: Iterable[Mapping[str, object]], path: Path, keys: list[str]) -> pd.DataFrame:
    """Add lines to the results in a CSV file, each at once, in place of those with the same keys; return all."""
    kept = read(path, keys)
    path.parent.mkdir(exist_ok=True)
    for line in lines:
        kept = pd.concat([kept, pd.DataFrame([line])]).drop_duplicates(keys, keep="last")
        whole = path.with_suffix(".partial")
        kept.to_csv(whole, index=False, float_format="%.5f")
        whole.replace(path)
    return kept


def means(results: pd.DataFrame, metric: str, column: str, names: Iterable[str], methods: Iterable[str]) -> str:
    """Return means over runs as Markdown, one row per method and one column per value of `column`; the best is bold.

    The best is the highest mean over all runs, or the lowest time or error. The number of runs follows the head of a
    column, and the mean of a method with fewer.
    """
    results = results[results["metric"] == metric]
    by_method = {"index": "method", "columns": column, "values": "value"}
    wide = results.pivot_table(**by_method).reindex([name for name in methods if name in set(results["method"])])
    wide = wide[[name for name in names if name in wide]]
    runs, counts = results.groupby(column)["run"].nunique(), results.pivot_table(**by_method, aggfunc="count")
    full = wide.where(counts.reindex_like(wide) == runs.reindex(wide.columns))
    best_of = full.min() if metric in LOWER_IS_BETTER else full.max()
    lines = [f"| | {' | '.join(f'{name} ({runs[name]})' for name in wide)} |", f"|{'---|' * (wide.shape[1] + 1)}"]
    for method, row in wide.iterrows():
        cells = ["" if np.isnan(value) else f"{value:.3f}" for value in row]
        best = (round(value, 3) == round(best_of[name], 3) for name, value in row.items())
        marked = [f"**{cell}**" if is_best else cell for cell, is_best in zip(cells, best, strict=True)]
        few = [f" ({n:.0f})" if 0 < n < runs[name] else "" for name, n in counts.loc[method, wide.columns].items()]
        lines.append(f"| {method} | {' | '.join(cell + n for cell, n in zip(marked, few, strict=True))} |")
    return "\n".join(lines)
