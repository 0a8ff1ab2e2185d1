"""Running benchmarks on embeddings, with baselines."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from scforge._checks import check_choice, check_key, check_known, check_seed
from scforge._progress import announce, duration
from scforge._registry import check_defines
from scforge.errors import OptionError, listing
from scforge.eval.base import (
    Benchmark,
    Entry,
    Evaluation,
    check_scores_embeddings,
    has_enough_groups,
    resolve,
    title_of,
    to_evaluation,
)
from scforge.eval.baselines import check_baselines, embedding_baselines
from scforge.eval.label_prediction import check_embedding
from scforge.eval.report import KINDS, Kind, Measured, Report, Row, compare_paired, interval, write_scores

if TYPE_CHECKING:
    from anndata import AnnData

_BASELINES = (15, 50)

_PACKAGES = ("scforge", "scanpy", "scikit-learn", "scib-metrics", "scvi-tools")

_TITLES = {
    "hvg": "variable genes",
    "pca": "PCA",
    "pca_scaled": "PCA of scaled genes",
    "harmony": "Harmony",
    "scvi": "scVI",
    "random": "random numbers",
}


class Replicates(tuple[Any, ...]):
    """Results of several runs of a method, e.g. with different seeds, averaged in one row."""


def runs_of(one: Any) -> tuple[Any, ...]:
    """Return the results of a method in each of its training runs."""
    return one if isinstance(one, Replicates) else (one,)


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
    report.facts |= {f"{name}: {fact}": value for fact, value in benchmark.describe(reference).items()}
    versions = _versions(benchmark, seeds)
    scores: dict[str, pd.DataFrame] = {}
    draws: dict[str, pd.DataFrame] = {}
    # Diagnostics are fast, and their values are not comparable scores.
    speaks, start = progress_bar and benchmark.ranks, time.perf_counter()
    if speaks:
        announce(f"{name}: scoring {len(made)} methods ...")
    for n_done, (method, output) in enumerate(made.items(), 1):
        runs = runs_of(output)
        of_runs = [pd.DataFrame([version.run(run, reference) for version in versions]) for run in runs]
        # Seeds of folds and training runs are not equal sources of variation: where there are training runs, theirs
        # counts.
        scores[method] = of_runs[0] if len(runs) == 1 else pd.DataFrame([table.mean() for table in of_runs])
        drawn = [
            versions[0].resampled(run, reference, n=benchmark.n_draws, seed=int(seeds[0])) if intervals else None
            for run in runs
        ]
        tables = [table for table in drawn if table is not None]
        draws[method] = sum(tables[1:], start=tables[0]) / len(tables) if tables else pd.DataFrame()
        if tables and len(runs) > 1:
            draws[method] += _resampled_runs(of_runs, draws[method], seed=int(seeds[0]))
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
    groups_key = getattr(benchmark, "groups_key", None)
    if groups_key is not None and n_units is not None:
        has_enough_groups(groups_key, n_units)
    best = {metric: _best(metric, means, kinds, measured) for metric in measured.metrics}
    for method, output in made.items():
        table = draws[method]
        comparisons = {}
        if benchmark.ranks and kinds[method] in ("model", "untrained"):
            comparisons = {
                metric: compare_paired(
                    other,
                    means[method][metric],
                    means[other][metric],
                    table.get(metric),
                    draws[other].get(metric),
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
                int(runs_of(output)[0].shape[1]) if benchmark.subject == "embedding" else None,
                seconds.get(method),
                name,
                intervals={
                    str(metric): interval(means[method][metric], drawn.to_numpy(), n_units=n_units)
                    for metric, drawn in table.items()
                },
                spreads={str(metric): float(column.std(ddof=1)) for metric, column in scores[method].items()}
                if len(scores[method]) > 1
                else {},
                comparisons=comparisons,
            )
        )


def _resampled_runs(of_runs: list[pd.DataFrame], draws: pd.DataFrame, *, seed: int) -> pd.DataFrame:
    """Bootstrap training runs, and return the deviation of their mean for each draw of the cells."""
    means = pd.DataFrame([table.mean() for table in of_runs])[list(draws.columns)].to_numpy()
    n_runs = len(means)
    chosen = np.random.default_rng([seed, n_runs]).integers(n_runs, size=(len(draws), n_runs))
    # A bootstrap of few runs varies too little, by (n - 1) / n.
    deviations = (means[chosen].mean(axis=1) - means.mean(axis=0)) * np.sqrt(n_runs / (n_runs - 1))
    return pd.DataFrame(deviations, index=draws.index, columns=draws.columns)


def _versions(benchmark: Benchmark, seeds: Sequence[int]) -> list[Benchmark]:
    """Return the benchmark with each seed, or the benchmark itself if it has no seed."""
    if not hasattr(benchmark, "seed"):
        return [benchmark]
    versions: list[Any] = [copy.copy(benchmark) for _ in seeds]
    for version, seed in zip(versions, seeds, strict=True):
        version.seed = int(seed)
    return versions


def _best(
    metric: str, means: Mapping[str, Mapping[str, float]], kinds: Mapping[str, Kind], measured: Measured
) -> str | None:
    """Return the baseline with the best score."""
    values = {method: scores.get(metric, np.nan) for method, scores in means.items() if kinds[method] == "baseline"}
    values = {method: value for method, value in values.items() if np.isfinite(value)}
    return max(values, key=lambda method: measured.sign(metric) * values[method], default=None)


def evaluate(
    adata: AnnData,
    benchmarks: Entry | Sequence[Entry],
    obsm_keys: str | Sequence[str] | Mapping[str, Kind],
    *,
    layer: str | None = None,
    baselines: int | str | Sequence[int | str] = _BASELINES,
    labels_key: str | None = None,
    batch_key: str | None = None,
    groups_key: str | None = None,
    seeds: Sequence[int] = (0,),
    intervals: bool = True,
    replicates: Mapping[str, Sequence[str]] | None = None,
    rows: np.ndarray | None = None,
    seconds: Mapping[str, float] | None = None,
    title: str = "Embeddings compared",
    key_added: str | None = "report",
    progress_bar: bool = True,
) -> Report:
    """Score embeddings in ``adata.obsm`` with baselines on the same cells.

    Parameters
    ----------
    adata
        Annotated data with raw counts.
    benchmarks
        Benchmarks to run: registered names, ``{name: {option: value}}``, or benchmark objects, e.g.
        :class:`scforge.eval.LabelPrediction`; one or a list.
    obsm_keys
        Key or keys in ``adata.obsm``, or a mapping from key to ``"model"``, ``"baseline"`` or ``"untrained"``.
        Embeddings from any model can be compared, e.g. ``X_scVI``.
    layer
        Key in ``adata.layers`` with raw counts, for the baselines. If None, reads ``adata.X``.
    baselines
        Baselines, at least one: names of :func:`~scforge.eval.embedding_baselines`, and numbers of principal
        components. Components are computed with and without scaling genes to unit variance, because either may be the
        stronger baseline.
    labels_key, batch_key, groups_key
        Columns of ``adata.obs`` for benchmarks that are given by name without them.
    seeds
        Seeds for benchmarks that have a seed; scores are averaged over them.
    intervals
        Whether to add 95% intervals and tests against the best baseline, from resampled cells.
    replicates
        A mapping from row name to the keys in `obsm_keys` of one method run with several seeds. These are merged into
        one row, whose interval includes the variation over seeds.
    rows
        Positions in `adata` of the cells to score; baselines use all cells. If None, scores all cells.
    seconds
        A mapping from embedding key to wall time.
    title
        Heading of the report.
    key_added
        Key in ``adata.uns["scforge"]`` for the scores. If None, nothing is written.
    progress_bar
        Whether to print a line for each baseline and score, with its time.

    Returns
    -------
    The report. Its scores (:meth:`Report.to_frame`) are also written to ``adata.uns["scforge"][key_added]``.

    Raises
    ------
    DataError
        If an embedding is missing, or a benchmark cannot score these cells.
    OptionError
        If an option or a combination of options is invalid.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()[:200].copy()
    >>> adata.obsm["X_mine"] = scforge.eval.pca_embedding(adata, n_comps=5)
    >>> probe = scforge.eval.LabelPrediction("cell_type", n_folds=3)
    >>> report = scforge.eval.evaluate(adata, probe, "X_mine", baselines=[5], intervals=False)
    >>> [row.name for row in report.rows]
    ['X_mine', 'PCA, 5 components', 'PCA of scaled genes, 5 components']
    """
    check_key("key_added", key_added)
    check_seeds(seeds)
    baselines = [baselines] if isinstance(baselines, int | str) else list(baselines)
    if not len(baselines):
        raise OptionError("is empty; pass at least one baseline name or number of components.", baselines=[])
    obsm_keys = [obsm_keys] if isinstance(obsm_keys, str) else obsm_keys
    kinds: dict[str, Kind] = dict(obsm_keys) if isinstance(obsm_keys, Mapping) else dict.fromkeys(obsm_keys, "model")
    for key, kind in kinds.items():
        check_choice(f"kinds[{key!r}]", kind, KINDS)
        check_known("obsm_keys", key, adata.obsm, "adata.obsm")
    keys = {"labels_key": labels_key, "batch_key": batch_key, "groups_key": groups_key}
    created = made_of(benchmarks, keys)
    obs = adata.obs if rows is None else adata.obs.iloc[rows]
    for benchmark in created.values():
        check_scores_embeddings(title_of(benchmark), benchmark.subject)
        benchmark.check(obs)
    check_baselines(adata, baselines, batch_key=batch_key)
    embeddings: dict[str, Any] = {
        key: check_embedding(adata.obsm[key], adata.n_obs, f"adata.obsm[{key!r}]") for key in kinds
    }
    _join_replicates(embeddings, kinds, replicates or {})
    genes: dict[str, Any] = {"batch_key": batch_key, "layer": layer}
    fitted = embedding_baselines(adata, baselines, **genes, seed=int(seeds[0]), progress_bar=progress_bar)
    of_baselines = {_TITLES.get(name, name): embedding for name, embedding in fitted.items()}
    if taken := [name for name in of_baselines if name in embeddings]:
        raise OptionError(f"{taken[0]!r} is the name of a baseline; rename the embedding.")
    kinds |= dict.fromkeys(of_baselines, "baseline")
    embeddings = dict(sorted(embeddings.items(), key=lambda item: KINDS.index(kinds[item[0]])))
    methods = embeddings | of_baselines
    if rows is not None:
        methods = {
            name: Replicates(run[rows] for run in method) if isinstance(method, Replicates) else method[rows]
            for name, method in methods.items()
        }
    report = Report(title)
    for name, benchmark in created.items():
        if hasattr(benchmark, "before_integration"):
            of_pca = fitted if "pca" in fitted else embedding_baselines(adata, ["pca"], **genes)
            before = of_pca["pca"]
            benchmark = benchmark.before_integration(pd.DataFrame(before, index=adata.obs_names))
        score(
            report,
            name,
            benchmark,
            methods,
            obs,
            kinds=kinds,
            seeds=seeds,
            intervals=intervals,
            seconds=seconds or {},
            progress_bar=progress_bar,
        )
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    report.facts |= {"seeds": ", ".join(str(seed) for seed in seeds), "versions": versions}
    if key_added is not None:
        write_scores(adata, key_added, report.to_frame())
    return report


def compare(
    benchmark: Benchmark,
    made: Mapping[str, Any],
    reference: Any,
    *,
    kinds: Mapping[str, Kind],
    seeds: Sequence[int] = (0,),
    intervals: bool = True,
    title: str = "Methods compared",
) -> Report:
    """Score the results of several methods with a benchmark of any subject.

    Parameters
    ----------
    benchmark
        The benchmark.
    made
        A mapping from method name to result, of the type that :attr:`Benchmark.subject` describes.
    reference
        Reference that the results are scored against.
    kinds
        A mapping from method name to ``"model"``, ``"baseline"``, ``"untrained"`` or ``"ceiling"``.
    seeds
        Seeds for a benchmark that has a seed; scores are averaged over them.
    intervals
        Whether to add 95% intervals, and tests of the models against the best baseline.
    title
        Heading of the report.

    Returns
    -------
    The report, with one row for each method.

    Raises
    ------
    DataError
        If the benchmark cannot score the results.
    OptionError
        If a method has no kind, or there is a model but no baseline.

    Examples
    --------
    >>> import pandas as pd, scforge
    >>> truth = pd.DataFrame({"source": ["A", "B"], "target": ["x", "y"]})
    >>> edges = pd.DataFrame({"source": ["A", "A", "B"], "target": ["x", "y", "x"], "weight": [3.0, 1.0, 2.0]})
    >>> made = {"mine": edges, "same weight": edges.assign(weight=1.0)}
    >>> kinds = {"mine": "model", "same weight": "baseline"}
    >>> report = scforge.eval.compare(scforge.eval.GeneNetwork(), made, truth, kinds=kinds, intervals=False)
    >>> report.to_table()["auroc"].round(2).to_dict()
    {'mine': 0.5, 'same weight': 0.25}
    """
    for method, kind in kinds.items():
        check_choice(f"kinds[{method!r}]", kind, KINDS)
    if unknown := [method for method in made if method not in kinds]:
        raise OptionError(f"has no entry for {listing(unknown)}; set each to 'model' or 'baseline'.", argument="kinds")
    check_seeds(seeds)
    check_defines(f"the benchmark {title_of(benchmark)!r}", benchmark, ("metrics",))
    benchmark.check(reference)
    report = Report(title)
    score(
        report,
        title_of(benchmark),
        benchmark,
        made,
        reference,
        kinds=kinds,
        seeds=seeds,
        intervals=intervals,
        seconds={},
    )
    report.check()
    return report


def entries_of(benchmarks: Entry | Sequence[Entry]) -> list[Entry]:
    """Return one or several benchmarks as a list. Raises :class:`~scforge.errors.OptionError` if the list is empty."""
    several = isinstance(benchmarks, Sequence) and not isinstance(benchmarks, str)
    entries: list[Any] = list(cast("Sequence[Entry]", benchmarks)) if several else [benchmarks]
    if not entries:
        raise OptionError("is empty; pass at least one benchmark.", benchmarks=[])
    return entries


def embedding_evaluations(benchmarks: Entry | Sequence[Entry], datasets: Mapping[str, Any]) -> list[Evaluation]:
    """Return the evaluations of one or several benchmarks that score embeddings, with their data sets.

    Raises
    ------
    OptionError
        If a benchmark, an option or a data set is unknown, or a benchmark does not score embeddings.
    MissingFileError
        If the file of a data set does not exist.
    """
    evaluations = resolve([to_evaluation(entry) for entry in entries_of(benchmarks)], datasets)
    for evaluation in evaluations:
        check_scores_embeddings(evaluation.title, evaluation.subject)
    return evaluations


def made_of(benchmarks: Entry | Sequence[Entry], keys: Mapping[str, str | None]) -> dict[str, Benchmark]:
    """Create the benchmarks in a list, with unique names; `keys` contains default columns from the data."""
    created: dict[str, Benchmark] = {}
    for entry in entries_of(benchmarks):
        evaluation = to_evaluation(entry)
        if not evaluation.held_out or evaluation.max_cells not in (None, 10_000):
            raise OptionError(
                f"and max_cells of {evaluation.title!r} have no effect here; omit them, and pass the cells to "
                "score directly.",
                argument="dataset",
            )
        if evaluation.title in created:
            raise OptionError(f"two benchmarks are named {evaluation.title!r}; set a different name for one of them.")
        created[evaluation.title] = evaluation.made(keys)
    return created


def check_seeds(seeds: Sequence[int]) -> None:
    """Raise :class:`~scforge.errors.OptionError` if there are no seeds, or a seed is invalid."""
    if not isinstance(seeds, Sequence) or isinstance(seeds, str) or not len(seeds):
        raise OptionError("is not a list of seeds; pass e.g. seeds=(0, 1, 2).", seeds=seeds)
    for seed in seeds:
        check_seed(seed)


def _join_replicates(
    embeddings: dict[str, Any], kinds: dict[str, Kind], replicates: Mapping[str, Sequence[str]]
) -> None:
    """Merge the embeddings of each method into one entry, in `kinds` as well."""
    for name, keys in replicates.items():
        missing = [key for key in keys if key not in embeddings]
        if missing or not keys:
            raise OptionError(
                f"[{name!r}] must contain names from obsm_keys (not found: {listing(missing)}); add these "
                "names to obsm_keys.",
                argument="replicates",
            )
        if len({kinds[key] for key in keys}) > 1:
            raise OptionError(
                f"of {name!r} have different kinds ({listing(keys)}); set one kind for all.", argument="replicates"
            )
        merged = Replicates(embeddings.pop(key) for key in keys)
        kinds[name] = [kinds.pop(key) for key in keys][0]
        embeddings[name] = merged
