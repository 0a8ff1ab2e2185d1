"""Scoring what methods made, seed by seed and draw by draw.

Shapes: R draws.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from scforge._checks import check_bool
from scforge._progress import announce, duration
from scforge.eval.base import Benchmark
from scforge.eval.report import Kind, Measured, Report, Row
from scforge.eval.statistics import compare_paired, interval

__all__ = ["Replicates", "score"]


class Replicates(tuple[Any, ...]):
    """What one method made several times, e.g. trained with several seeds: one row, whose figures are means."""


def score(
    report: Report,
    name: str,
    benchmark: Benchmark,
    made: Mapping[str, Any],
    reference: Any,
    *,
    kinds: Mapping[str, Kind],
    seeds: Sequence[int],
    intervals: bool,
    seconds: Mapping[str, float],
    progress_bar: bool = False,
) -> None:
    """Add the rows of a benchmark to a report."""
    check_bool("intervals", intervals)
    report.facts |= {f"{name}: {fact}": value for fact, value in benchmark.describe(reference).items()}
    versions = _versions(benchmark, seeds)
    scores: dict[str, pd.DataFrame] = {}
    draws: dict[str, pd.DataFrame | None] = {}
    # What is no contest is quick, and its scores mean nothing by themselves.
    speaks, start = progress_bar and benchmark.ranks, time.perf_counter()
    if speaks:
        announce(f"{name}: scoring {len(made)} methods ...")
    for n_done, (method, one) in enumerate(made.items(), 1):
        runs = one if isinstance(one, Replicates) else (one,)
        of_runs = [pd.DataFrame([version.run(run, reference) for version in versions]) for run in runs]
        # Seeds of folds and trainings are no equal sources of variation: where there are trainings, theirs counts.
        scores[method] = of_runs[0] if len(runs) == 1 else pd.DataFrame([table.mean() for table in of_runs])
        drawn = [
            versions[0].resampled(run, reference, n=benchmark.n_draws, seed=int(seeds[0])) if intervals else None
            for run in runs
        ]
        tables = [table for table in drawn if table is not None]
        draws[method] = sum(tables[1:], start=tables[0]) / len(tables) if tables else None
        if speaks:
            took = time.perf_counter() - start
            left = took / n_done * (len(made) - n_done)
            tail = f", about {duration(left)} left" if left >= 5 else ""
            value = float(scores[method][benchmark.main].mean()) if benchmark.main in scores[method] else float("nan")
            announce(f"{name}: {method}, {benchmark.main} {value:.3f} (after {duration(took)}{tail})")
    measured = Measured.by(benchmark)
    report.measured[name] = measured
    means = {method: {metric: float(table[metric].mean()) for metric in table} for method, table in scores.items()}
    n_units = benchmark.n_units(reference) if intervals else None
    best = {metric: _best(metric, means, kinds, measured) for metric in measured.metrics}
    for method, one in made.items():
        table = draws[method]
        comparisons = {}
        if benchmark.ranks and kinds[method] in ("model", "untrained"):
            comparisons = {
                metric: compare_paired(
                    other,
                    means[method][metric],
                    means[other][metric],
                    *_columns(metric, table, draws[other]),
                    n_units=n_units,
                )
                for metric, other in best.items()
                if other is not None and metric in means[method]
            }
        report.add(
            Row(
                method,
                kinds[method],
                means[method],
                _n_dims(one) if benchmark.subject == "embedding" else None,
                seconds.get(method),
                name,
                intervals={}
                if table is None
                else {
                    metric: interval(means[method][metric], table[metric].to_numpy(), n_units=n_units)
                    for metric in table
                },
                spreads={str(metric): float(found.std(ddof=1)) for metric, found in scores[method].items()}
                if len(scores[method]) > 1
                else {},
                comparisons=comparisons,
            )
        )


def _n_dims(one: Any) -> int:
    return int((one[0] if isinstance(one, Replicates) else one).shape[1])


def _versions(benchmark: Benchmark, seeds: Sequence[int]) -> list[Benchmark]:
    """Return the benchmark with each seed; itself, where it has none."""
    if not hasattr(benchmark, "seed"):
        return [benchmark]
    versions = []
    for seed in seeds:
        version = copy.copy(benchmark)
        version.seed = int(seed)
        versions.append(version)
    return versions


def _best(
    metric: str, means: Mapping[str, Mapping[str, float]], kinds: Mapping[str, Kind], measured: Measured
) -> str | None:
    """Return the baseline with the best figure."""
    values = {method: found.get(metric, np.nan) for method, found in means.items() if kinds[method] == "baseline"}
    values = {method: value for method, value in values.items() if np.isfinite(value)}
    return max(values, key=lambda method: measured.sign(metric) * values[method], default=None)


def _columns(metric: str, *tables: pd.DataFrame | None) -> list[np.ndarray | None]:
    return [None if table is None or metric not in table else table[metric].to_numpy() for table in tables]
