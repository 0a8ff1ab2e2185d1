"""Benchmarks from the cz-benchmarks package."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

import anndata
import numpy as np
import pandas as pd

from scforge._checks import check_known, check_seed
from scforge._columns import check_column, labels_of, texts_of
from scforge._registry import check_options
from scforge.data.checks import counts_of
from scforge.data.expression import log_normalized
from scforge.errors import DataError, OptionError, ScforgeError, first_line, listing
from scforge.eval.base import Benchmark, as_array, register_benchmark
from scforge.eval.baselines import pca_embedding, quiet
from scforge.eval.report import Kind, Measured, Report, Row

if TYPE_CHECKING:
    from anndata import AnnData


EXPRESSION_TASK = "perturbation_expression_prediction"
TWO_ORGANISMS = ("cross-species_integration", "cross-species_label_prediction")
KEYS = {
    "batch_integration": ("labels_key", "batch_key"),
    "clustering": ("labels_key",),
    "cross-species_integration": ("labels_key", "organism_key"),
    "cross-species_label_prediction": ("labels_key", "organism_key"),
    "embedding": ("labels_key",),
    "label_prediction": ("labels_key",),
    EXPRESSION_TASK: ("perturbation_key", "control"),
    "sequential_organization": ("labels_key",),
}

_COLUMNS = ("labels_key", "batch_key", "organism_key", "groups_key", "perturbation_key", "control")

_MAX_P, _MIN_CHANGE = 1e-4, 1.0
"""Thresholds for changed genes in SingleCellPerturbationDataset of cz-benchmarks."""

_SEED = 42
"""Default random seed of cz-benchmarks."""

_TOP_GENES, _COMPONENTS = 3_000, 50
"""Numbers of genes and components of the cz-benchmarks baseline."""


def _input(
    name: str,
    adata: AnnData,
    model: Any,
    keys: Mapping[str, str | None],
    *,
    layer: str | None,
    seed: int,
    options: Mapping[str, Any],
) -> Any:
    """Return the input of a task as an instance of its pydantic `model`."""
    from pydantic import ValidationError

    if missing := [argument for argument in KEYS[name] if keys[argument] is None]:
        raise OptionError(f"the task {name!r} requires {missing[0]}; pass this argument.")
    with _told(name, seed):
        fields = _made(name, adata, keys, layer=layer, seed=seed)
    # The package would ignore options that it does not know.
    choices = [option for option in model.model_fields if option not in fields or option == "pred_effect_operation"]
    check_options("option", name, options, choices)
    try:
        return model(**{**fields, **options})
    except ValidationError as error:
        problem = error.errors()[0]
        message = first_line(ValueError(problem["msg"]))
        raise OptionError(f"{name} does not accept {problem['loc'][0]}={problem['input']!r}: {message}.") from None


def _made(name: str, adata: AnnData, keys: Mapping[str, str | None], *, layer: str | None, seed: int) -> dict[str, Any]:
    """Create the input of a task from the data."""
    if name == EXPRESSION_TASK:
        cells = _with_effects(adata, str(keys["perturbation_key"]), str(keys["control"]), layer=layer, seed=seed)
        # The layer holds logs, whose differences are the log ratios that the true effects are.
        return {"adata": cells, "pred_effect_operation": "difference"}
    labels = _column(adata, "labels_key", str(keys["labels_key"]))
    if name in TWO_ORGANISMS:
        return _organism_fields(name, adata, labels, keys)
    if name == "batch_integration":
        return {"labels": labels, "batch_labels": _column(adata, "batch_key", str(keys["batch_key"]))}
    if name == "label_prediction":
        return {"labels": labels}
    if name == "sequential_organization":
        return {"obs": adata.obs[[]], "input_labels": pd.to_numeric(labels).to_numpy(dtype=float)}
    return {"obs": adata.obs[[]], "input_labels": labels} if name == "clustering" else {"input_labels": labels}


def _column(adata: AnnData, argument: str, key: str) -> pd.Series:
    """Return a column without missing values as text, with rows numbered from 0."""
    check_column(argument, key, adata.obs)
    read = partial(labels_of, fractional=True) if argument == "labels_key" else texts_of
    texts = read(adata.obs[key], key=key, argument=argument)
    if n_missing := int(texts.isna().sum()):
        raise DataError(
            f"is missing for {n_missing} cells; fill in the values or drop these cells.", argument=argument, value=key
        )
    return pd.Series(np.asarray(texts, dtype=object))


def by_organism(organisms: pd.Series) -> dict[str, np.ndarray]:
    """Return the rows of each organism, in order of first appearance."""
    names = np.asarray(texts_of(organisms, key=str(organisms.name), argument="organism_key"), dtype=object).astype(str)
    return {name: np.flatnonzero(names == name) for name in dict.fromkeys(names)}


def _organism_fields(name: str, adata: AnnData, labels: pd.Series, keys: Mapping[str, str | None]) -> dict[str, Any]:
    from czbenchmarks.datasets.types import Organism

    rows = by_organism(_column(adata, "organism_key", str(keys["organism_key"])))
    by_name = {str(organism): organism for organism in Organism}
    for organism in rows:
        check_known("organism", organism, by_name, "the organisms of cz-benchmarks")
    parts = [labels.iloc[positions].reset_index(drop=True) for positions in rows.values()]
    organisms = [by_name[organism] for organism in rows]
    if name == "cross-species_integration":
        return {"labels": parts, "organism_list": organisms}
    fields = {"labels": parts, "organisms": organisms, "aggregation_method": "none"}
    groups = None if keys["groups_key"] is None else _column(adata, "groups_key", keys["groups_key"])
    alone = set.union(*map(set, parts)) - set.intersection(*map(set, parts))
    if alone or (groups is not None and (labels.groupby(groups.to_numpy()).nunique() > 1).any()):
        raise DataError(
            f"has labels that some organisms lack ({listing(sorted(alone), most=3)}) "
            f"or groups_key={keys['groups_key']!r} has groups with several labels; remove these cells.",
            labels_key=keys["labels_key"],
        )
    if groups is not None:
        fields["sample_ids"] = [groups.iloc[positions].reset_index(drop=True) for positions in rows.values()]
        fields["aggregation_method"] = "mean"
    return fields


def _with_effects(adata: AnnData, perturbation_key: str, control: str, *, layer: str | None, seed: int) -> AnnData:
    """Return cells with the fields that the task requires: changed genes per perturbation, and a control for each cell.

    Changed genes are selected by a Wilcoxon test against the controls, with the cz-benchmarks thresholds; all of these
    genes are targets. Controls are sampled at random, without replacement if there are enough.
    """
    import scanpy as sc

    conditions = _column(adata, "perturbation_key", perturbation_key)
    names = [str(name) for name in np.unique(conditions) if name != control]
    check_known("control", control, set(conditions), f"obs[{perturbation_key!r}]")
    cells = anndata.AnnData(log_normalized(adata, layer), obs=adata.obs[[]].copy(), var=adata.var[[]].copy())
    cells.obs["condition"] = pd.Categorical(conditions)
    sc.tl.rank_genes_groups(cells, "condition", reference=control, method="wilcoxon")
    tested = pd.concat(
        {name: sc.get.rank_genes_groups_df(cells, name) for name in names}, names=["group"]
    ).reset_index()
    changed = tested[(tested["pvals_adj"] < _MAX_P) & (tested["logfoldchanges"].abs() >= _MIN_CHANGE)]
    if changed.empty:
        raise DataError(f"no gene is differentially expressed in obs[{perturbation_key!r}]; use more cells.")
    rng, ids = np.random.default_rng(seed), adata.obs_names.astype(str)
    controls = ids[conditions == control]
    pairs = {}
    for name in names:
        treated = ids[conditions == name]
        drawn = rng.choice(controls, size=len(treated), replace=len(treated) > len(controls))
        pairs[name] = dict(zip(treated, (str(cell) for cell in drawn), strict=True))
    columns = {"group": "condition", "names": "gene_id", "logfoldchanges": "logfoldchange"}
    effects = changed[list(columns)].rename(columns=columns).astype({"condition": str, "gene_id": str})
    effects = effects.reset_index(drop=True)
    cells.uns = {
        "config": {"condition_key": "condition", "control_name": control},
        "de_results": effects,
        "metric_column": "logfoldchange",
        "control_cells_map": pairs,
        "target_conditions_dict": {name: genes.tolist() for name, genes in effects.groupby("condition")["gene_id"]},
    }
    return cells


def run_cz_task(
    name: str,
    adata: AnnData,
    keys: str | Sequence[str] | Mapping[str, Kind],
    *,
    layer: str | None = None,
    baseline: bool = True,
    seed: int = _SEED,
    **options: Any,
) -> pd.DataFrame:
    """Run one cz-benchmarks task on embeddings, and on the baseline that the package defines for it.

    ===================================  ===================================================================
    task                                 what it needs
    ===================================  ===================================================================
    clustering, embedding,               `labels_key`
    label_prediction
    batch_integration                    `labels_key`, `batch_key`
    sequential_organization              `labels_key`: numbers, e.g. time points
    cross-species_integration            `labels_key`, `organism_key`: e.g. ``"homo_sapiens"``
    cross-species_label_prediction       the same; `groups_key`: samples of one label each, to average cells
    perturbation_expression_prediction   `perturbation_key`, `control`; `keys` name ``adata.layers``
    ===================================  ===================================================================

    The package provides the baselines: principal components, or raw expression for label_prediction. For tasks without
    a baseline, scforge adds one. Between organisms, it is the principal components of the cells of all organisms, which
    share the columns. For perturbations, it is the mean of the cells of the other perturbations.

    Parameters
    ----------
    name
        Task name from the first column above.
    adata
        Annotated data with raw counts, the input of the baselines.
    keys
        Key or keys of embeddings in ``adata.obsm``, shape (N, D); or a mapping from key to ``"model"``, ``"baseline"``
        or ``"untrained"``. For perturbations, keys of ``adata.layers`` with the predicted log1p CP10K of each cell,
        control cells included, shape (N, G).
    layer
        Key in ``adata.layers`` with raw counts. If None, reads ``adata.X``.
    baseline
        Whether to run the baseline as well.
    seed
        Random seed for the task.
    **options
        Columns of ``adata.obs`` as above (`control`: the value of ``obs[perturbation_key]`` of control cells), and
        options of the task, e.g. ``n_folds=3``.

    Returns
    -------
    One row per score, with the columns ``task``, ``method``, ``kind``, ``metric``, ``value``, ``params`` (a dict, e.g.
    the classifier), ``n_dims`` and ``seconds`` (run time of the task). Higher is better for all metrics.

    Raises
    ------
    DataError
        If a column is missing or incomplete, or there are no raw counts.
    OptionError
        If cz-benchmarks is not installed, or the task or an option is unknown or cannot be used.

    Examples
    --------
    >>> table = run_cz_task("clustering", adata, "X_scforge", labels_key="cell_type")  # doctest: +SKIP
    >>> table.pivot_table(index="method", columns="metric", values="value")  # doctest: +SKIP
    """
    registry = _registry()
    check_known("name", name, registry.list_tasks(), "the tasks of cz-benchmarks", error=OptionError)
    columns = {argument: options.pop(argument, None) for argument in _COLUMNS}
    keys = [keys] if isinstance(keys, str) else keys
    kinds: dict[str, Kind] = dict(keys) if isinstance(keys, Mapping) else dict.fromkeys(keys, "model")
    where, arrays = ("layers", adata.layers) if name == EXPRESSION_TASK else ("obsm", adata.obsm)
    for key in kinds:
        check_known("keys", key, arrays, f"adata.{where}")
    outputs = {key: as_array(arrays[key]) for key in kinds}
    task = registry.get_task_class(name)(random_seed=check_seed(seed))
    inputs = _input(name, adata, task.input_model, columns, layer=layer, seed=seed, options=options)
    if baseline:
        title, values = _baseline(name, task, adata, inputs, layer=layer, seed=seed)
        outputs[title], kinds[title] = values, "baseline"
    lines = []
    for method, values in outputs.items():
        given: Any = values
        if name in TWO_ORGANISMS:
            given = [values[rows] for rows in by_organism(adata.obs[columns["organism_key"]]).values()]
        start = time.perf_counter()
        with _told(name, seed):
            results = task.run(given, inputs)
        facts = {"task": name, "method": method, "kind": kinds[method]}
        rest = {"n_dims": values.shape[1], "seconds": time.perf_counter() - start}
        for result in results:
            figure = {
                "metric": result.metric_type.value,
                "value": float(result.value),
                "params": dict(result.params or {}),
            }
            lines.append({**facts, **figure, **rest})
    return pd.DataFrame(lines)


def evaluate_cz(
    adata: AnnData,
    tasks: Sequence[str] | Mapping[str, Mapping[str, Any]],
    keys: str | Sequence[str] | Mapping[str, Kind],
    *,
    title: str = "Tasks of cz-benchmarks",
    **options: Any,
) -> Report:
    """Run several cz-benchmarks tasks, each with its baseline, and return a report.

    Scores of several classifiers or perturbations are averaged; :func:`~scforge.eval.cz_benchmarks.run_cz_task` returns
    each of them.

    Parameters
    ----------
    adata
        Annotated data with raw counts.
    tasks
        Task names, or a mapping from task name to options for :func:`~scforge.eval.cz_benchmarks.run_cz_task`.
    keys
        Keys of embeddings, or of layers, as in :func:`~scforge.eval.cz_benchmarks.run_cz_task`.
    title
        Heading.
    **options
        Options for :func:`~scforge.eval.cz_benchmarks.run_cz_task` that apply to all tasks, e.g. ``labels_key``.

    Returns
    -------
    The report, with a benchmark for each task.

    Raises
    ------
    DataError, OptionError
        As in :func:`~scforge.eval.cz_benchmarks.run_cz_task`.

    Examples
    --------
    >>> tasks = ["clustering", "embedding"]
    >>> report = evaluate_cz(adata, tasks, "X_scforge", labels_key="cell_type")  # doctest: +SKIP
    >>> report.to_table("clustering")  # doctest: +SKIP
    """
    asked = dict(tasks) if isinstance(tasks, Mapping) else {name: {} for name in tasks}
    report = Report(title)
    for name, own in asked.items():
        frame = run_cz_task(name, adata, keys, **{**options, **own})
        figures = tuple(_scores(frame))
        main = next((figure for figure in figures if figure.startswith(("mean_fold_f1", "f1"))), figures[0])
        report.measured[name] = Measured(figures, main)
        for method, rows in frame.groupby("method", sort=False):
            first = rows.iloc[0]
            n_dims, seconds = int(first["n_dims"]), float(first["seconds"])
            report.add(Row(str(method), first["kind"], _scores(rows), n_dims, seconds, name))
    return report


class CzTask(Benchmark):
    """A cz-benchmarks task on an embedding, registered as ``"cz_clustering"``, ``"cz_embedding"`` etc.

    The metrics are the same as in :func:`evaluate_cz`, and the baselines are the same as in
    :func:`scforge.eval.evaluate`.

    Parameters
    ----------
    labels_key
        Column of ``obs`` with the cell types; for ``"cz_sequential_organization"``, with numbers such as time points.
    options
        Task options, e.g. ``{"n_folds": 3}``.
    seed
        Random seed for the task.
    """

    task: ClassVar[str]
    n_draws = 5

    def __init__(self, labels_key: str, options: Mapping[str, Any] | None = None, seed: int = _SEED) -> None:
        self.labels_key = labels_key
        self.options = dict(options or {})
        self.seed = check_seed(seed)

    def _keys(self) -> dict[str, str | None]:
        return {argument: getattr(self, argument) for argument in KEYS[self.task]}

    def check(self, obs: pd.DataFrame) -> None:
        """Raise an error if cz-benchmarks is not installed, a column is incomplete, or the task lacks an option."""
        model = _registry().get_task_class(self.task).input_model
        _input(self.task, _cells(obs), model, self._keys(), layer=None, seed=self.seed, options=self.options)

    def describe(self, obs: pd.DataFrame) -> dict[str, str]:
        """Return the cz-benchmarks version, and the units that are resampled for the intervals."""
        return {"version": f"cz-benchmarks {metadata.version('cz-benchmarks')}", "resampled": "cells"}

    def run(self, embedding: np.ndarray, obs: pd.DataFrame) -> dict[str, float]:
        """Return the metrics of the task, averaged over classifiers if there are several."""
        cells = _cells(obs)
        cells.obsm["made"] = as_array(embedding)
        options: dict[str, Any] = {**self.options, **self._keys(), "seed": self.seed, "baseline": False}
        return _scores(run_cz_task(self.task, cells, "made", **options))


@register_benchmark("cz_clustering")
class CzClustering(CzTask):
    """Compare Leiden clusters of the embedding with labels."""

    task = "clustering"
    metrics = ("adjusted_rand_index", "normalized_mutual_info")


@register_benchmark("cz_embedding")
class CzEmbedding(CzTask):
    """Compute the silhouette score of labels in the embedding."""

    task = "embedding"
    metrics = ("silhouette_score",)


@register_benchmark("cz_label_prediction")
class CzLabelPrediction(CzTask):
    """Predict labels from the embedding with three classifiers, in cross-validation."""

    task = "label_prediction"
    metrics = ("mean_fold_accuracy", "mean_fold_f1", "mean_fold_precision", "mean_fold_recall", "mean_fold_auroc")
    main = "mean_fold_f1"


@register_benchmark("cz_sequential_organization")
class CzSequentialOrganization(CzTask):
    """Score how well the embedding preserves the order of numbers, e.g. time points."""

    task = "sequential_organization"
    metrics = ("silhouette_score", "sequential_alignment")


@register_benchmark("cz_batch_integration")
class CzBatchIntegration(CzTask):
    """Score how well batches are mixed in the embedding, among all cells and within labels.

    Parameters
    ----------
    labels_key
        Column of ``obs`` with the cell types.
    batch_key
        Column of ``obs`` with the batches.
    options
        Task options.
    seed
        Random seed for the task.
    """

    task = "batch_integration"
    metrics = ("entropy_per_cell", "batch_silhouette")

    def __init__(
        self, labels_key: str, batch_key: str, options: Mapping[str, Any] | None = None, seed: int = _SEED
    ) -> None:
        super().__init__(labels_key, options, seed)
        self.batch_key = batch_key


def _cells(obs: pd.DataFrame) -> AnnData:
    """Return cells without expression values, with new names, because names in `obs` may be duplicated."""
    return anndata.AnnData(obs=obs.set_axis([str(row) for row in range(len(obs))]))


def _scores(frame: pd.DataFrame) -> dict[str, float]:
    """Return report columns with their values, averaged over the rows of :func:`run_cz_task`."""
    figures = [_figure(*pair) for pair in zip(frame["metric"], frame["params"], strict=True)]
    means = frame["value"].groupby(figures, sort=False).mean()
    return {str(figure): float(value) for figure, value in means.items() if figure}


def _figure(metric: str, params: Mapping[str, Any]) -> str:
    """Return the report column of a score, or an empty string for one of several classifiers."""
    if not str(params.get("classifier", "MEAN")).startswith("MEAN"):
        return ""
    if "train_species" not in params or params["train_species"] == params["test_species"]:
        return " ".join([metric, *([params["train_species"]] if "train_species" in params else [])])
    return f"{metric} {params['train_species']} to {params['test_species']}"


def _registry() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=ImportWarning, message="Tensorflow not installed")  # umap's
            from czbenchmarks.tasks import TASK_REGISTRY
    except ModuleNotFoundError as error:
        raise OptionError(f"cz-benchmarks cannot be imported ({first_line(error)}); install 'scforge[cz]'.") from None
    return TASK_REGISTRY


def _baseline(
    name: str, task: Any, adata: AnnData, inputs: Any, *, layer: str | None, seed: int
) -> tuple[str, np.ndarray]:
    """Return the name of the baseline, and its output for the cells."""
    if name == EXPRESSION_TASK:
        # Each perturbation is predicted as the mean cell of the other perturbations; controls are unchanged.
        expression, conditions = inputs.adata.X.toarray(), inputs.adata.obs["condition"].astype(str).to_numpy()
        control, predicted = inputs.adata.uns["config"]["control_name"], expression.copy()
        for condition in set(conditions) - {control}:
            others = (conditions != condition) & (conditions != control)
            predicted[conditions == condition] = expression[others].mean(axis=0)
        return "mean of the other perturbations", predicted
    smaller = min(adata.shape) - 1
    if name in TWO_ORGANISMS:
        return "PCA of all organisms", pca_embedding(adata, n_comps=min(_COMPONENTS, smaller), layer=layer, seed=seed)
    accepted = task.baseline_model.model_fields
    sizes = {"n_top_genes": min(_TOP_GENES, adata.n_vars), "n_pcs": min(_COMPONENTS, smaller)}
    wanted = task.baseline_model(**{key: value for key, value in sizes.items() if key in accepted})
    # Sparse integers would go through log1p of scanpy as they are.
    counts = counts_of(adata, layer).astype(np.float32)
    title = "PCA (cz-benchmarks)" if "n_pcs" in accepted else "raw counts (cz-benchmarks)"
    return title, np.asarray(task.compute_baseline(counts, wanted))


@contextmanager
def _told(name: str, seed: int) -> Iterator[None]:
    """Silence the package, seed NumPy's global generator for it, and convert its errors into one sentence."""
    from sklearn.exceptions import ConvergenceWarning

    state = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        with quiet("czbenchmarks"), warnings.catch_warnings():
            # Its logistic regression stops after 100 steps, by its definition of the task.
            warnings.filterwarnings("ignore", category=ConvergenceWarning)
            yield
    except ScforgeError:
        raise
    except (AssertionError, ValueError) as error:
        raise DataError(f"cz-benchmarks cannot run {name!r} on these cells: {first_line(error)}.") from error
    finally:
        np.random.set_state(state)
