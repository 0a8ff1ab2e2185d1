"""Scores of predicted cells by cell-eval and pertpy."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import anndata
import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_known
from scforge.errors import DataError, MissingFileError, OptionError, first_line, listing
from scforge.perturbation.effects import PerturbedCells
from scforge.perturbation.keys import Effect, PerturbationKeys

if TYPE_CHECKING:
    from anndata import AnnData


def cell_eval_scores(
    predicted: AnnData,
    real: AnnData,
    *,
    perturbation_key: str,
    control: str,
    context_key: str | None = None,
    separator: str | None = "+",
    layer: str | None = None,
    profile: str = "full",
    skip_metrics: Sequence[str] = (),
    n_threads: int = 1,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Score predicted cells with cell-eval.

    Both data sets are passed as log1p CP10K (cell-eval would scale counts to the median of their totals). Requires
    ``pip install 'scforge[eval]'``.

    Parameters
    ----------
    predicted
        Predicted cells of all measured perturbations. Effects are relative to the predicted controls, or to the
        controls of `real` if there are no predicted controls.
    real
        Measured cells with controls, over the same genes in any order.
    perturbation_key, control, context_key, separator, layer
        See :class:`PerturbationPrediction`. Contexts are scored one by one, because cell-eval has no contexts.
    profile
        ``"full"``, ``"minimal"``, ``"vcc"`` (the Virtual Cell Challenge), ``"de"``, ``"anndata"`` or ``"pds"``.
    skip_metrics
        Names of cell-eval metrics to leave out.
    n_threads
        Number of threads for differential expression tests.

    Returns
    -------
    The two cell-eval tables: one with one row per perturbation (with contexts, the first column is ``context``), and a
    summary of each metric (count, mean, spread and quantiles in the column ``statistic``).

    Raises
    ------
    MissingFileError
        If cell-eval is not installed.
    DataError
        If a perturbation, control or gene is missing in `predicted`, or a metric cannot be computed.

    See Also
    --------
    PerturbationPrediction : scforge's benchmark: ``pearson_delta``, ``mse`` (cell-eval's ``mse_delta``), ``mae``
        (``mae_delta``) and ``discrimination_*`` are the same metrics, unless controls have several contexts.

    Examples
    --------
    >>> import anndata, numpy as np
    >>> def experiment(seed, genes):
    ...     names = np.repeat(["control", *(f"gene{gene}" for gene in genes)], 30)
    ...     counts = np.random.default_rng(seed).poisson(5.0, size=(len(names), 20)).astype("float32")
    ...     for number, gene in enumerate(genes, start=1):
    ...         counts[30 * number : 30 * (number + 1), gene] *= 3
    ...     obs = pd.DataFrame({"target": names}, index=[f"{seed}-{i}" for i in range(len(names))])
    ...     return anndata.AnnData(counts, obs, pd.DataFrame(index=[f"gene{i}" for i in range(20)]))
    >>> keys = {"perturbation_key": "target", "control": "control"}
    >>> predicted, real = experiment(0, [3, 4]), experiment(1, [3, 4])
    >>> table, summary = cell_eval_scores(predicted, real, **keys, profile="minimal")
    >>> bool(summary.set_index("statistic").loc["mean", "pearson_delta"] > 0.5)
    True
    """
    with warnings.catch_warnings():
        # Its dependencies warn about each other.
        warnings.simplefilter("ignore")
        try:
            package = import_module("cell_eval")
        except ModuleNotFoundError as error:
            raise MissingFileError(f"{first_line(error)}; run pip install 'scforge[eval]'.") from error
    keys = PerturbationKeys(perturbation_key, control, separator, context_key, layer)
    measured = PerturbedCells.read(real, keys, argument="real")
    ours = PerturbedCells.read(predicted, keys, argument="predicted", made=True)
    ours = ours.over(measured.genes, argument="predicted")
    tables: list[list[pd.DataFrame]] = []
    for context in sorted({effect.context for effect in measured.effects}):
        effects = [effect for effect in measured.effects if effect.context == context]
        pair = [_for_cell_eval(cells, effects, keys, measured) for cells in (ours, measured)]
        # Its progress bars stay its own, and the warnings of its dependencies.
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            evaluator = package.MetricsEvaluator(
                *pair,
                control_pert=control,
                pert_col="target",
                num_threads=n_threads,
                outdir=folder,
                skip_de=profile in ("anndata", "pds"),
            )
            results = evaluator.compute(
                profile=profile, skip_metrics=list(skip_metrics) or None, write_csv=False, break_on_error=True
            )
        tables.append([table.to_pandas() for table in results])
        if context_key is not None:
            for table in tables[-1]:
                table.insert(0, "context", context)
    whole, summary = (pd.concat(parts, ignore_index=True) for parts in zip(*tables, strict=True))
    return whole, summary


def _for_cell_eval(
    cells: PerturbedCells, effects: Sequence[Effect], keys: PerturbationKeys, measured: PerturbedCells
) -> AnnData:
    """Return the cells of one context and their controls (the measured controls if there are none)."""
    plain = Effect((), effects[0].context)
    source = cells if len(cells.rows(plain)) else measured
    rows = {keys.label(effect.targets): cells.rows(effect) for effect in effects} | {keys.control: source.rows(plain)}
    if without := [name for name, positions in rows.items() if not len(positions)]:
        raise DataError(
            f"has no cells of {listing(without)} in the context {plain.context!r}; it must contain all "
            "perturbations that are in real.",
            argument="predicted",
        )
    parts = [(source if name == keys.control else cells).expression[positions] for name, positions in rows.items()]
    labels = np.repeat(list(rows), [part.shape[0] for part in parts])
    obs = pd.DataFrame({"target": labels.astype(object)}, index=[f"cell {i}" for i in range(len(labels))])
    return anndata.AnnData(sparse.vstack(parts, format="csr"), obs, pd.DataFrame(index=cells.genes.astype(str)))


def distances(
    real: AnnData,
    predictions: AnnData | Mapping[str, AnnData],
    *,
    perturbation_key: str,
    control: str,
    context_key: str | None = None,
    separator: str | None = "+",
    metric: str = "edistance",
    obsm_key: str | None = None,
    layer: str | None = None,
) -> pd.DataFrame:
    """Return the distances between predicted and measured cells of each perturbation, computed by pertpy.

    Parameters
    ----------
    real
        Measured cells, with controls.
    predictions
        Predicted cells, or a mapping from method name to predicted cells.
    perturbation_key, control, context_key, separator
        Columns of ``obs``, see :func:`evaluate_perturbations`.
    metric
        Name of a :class:`pertpy.tl.Distance` metric, e.g. ``"edistance"`` or ``"mmd"``. Some, e.g. ``"wasserstein"``,
        need ``pip install "pertpy[jax]"``.
    obsm_key
        Coordinates in obsm, e.g. an embedding of all cells by the same model. If None, uses log1p CP10K over the genes
        shared by all data sets, which is slow for distances between cells.
    layer
        Key in layers with counts or log1p CP10K. If None, reads X.

    Returns
    -------
    One row for each method and effect: ``method``, ``perturbation``, ``context`` and ``distance``. The method
    ``"control"``, the distance of the controls, is the baseline: a prediction that is not closer than the controls is
    not informative.

    Raises
    ------
    OptionError
        If the metric is unknown to pertpy.
    DataError
        If coordinates are missing, or an effect is not predicted.

    Examples
    --------
    >>> import anndata
    >>> def experiment(seed, genes):
    ...     names = np.repeat(["control", *(f"gene{gene}" for gene in genes)], 30)
    ...     counts = np.random.default_rng(seed).poisson(5.0, size=(len(names), 20)).astype("float32")
    ...     for number, gene in enumerate(genes, start=1):
    ...         counts[30 * number : 30 * (number + 1), gene] *= 3
    ...     obs = pd.DataFrame({"target": names}, index=[f"{seed}-{i}" for i in range(len(names))])
    ...     return anndata.AnnData(counts, obs, pd.DataFrame(index=[f"gene{i}" for i in range(20)]))
    >>> keys = {"perturbation_key": "target", "control": "control"}
    >>> table = distances(experiment(0, [3]), experiment(1, [3]), **keys)
    >>> table.sort_values("distance")["method"].tolist()
    ['prediction', 'control']
    """
    from pertpy.tools import Distance

    keys = PerturbationKeys(perturbation_key, control, separator, context_key, layer)
    named = dict(predictions) if isinstance(predictions, Mapping) else {"prediction": predictions}
    read = {name: PerturbedCells.read(adata, keys, argument=name, made=True) for name, adata in named.items()}
    read["real"] = PerturbedCells.read(real, keys, argument="real")
    if obsm_key is None:
        genes = read["real"].genes
        for cells in read.values():
            genes = genes[genes.isin(cells.genes)]
        places = {name: cells.over(genes, argument=name).expression.toarray() for name, cells in read.items()}
    else:
        places = {}
        for name, adata in {**named, "real": real}.items():
            check_known("obsm_key", obsm_key, adata.obsm, f"{name}.obsm", fix="compute the embedding first")
            places[name] = np.asarray(adata.obsm[obsm_key])
    try:
        away: Callable[[np.ndarray, np.ndarray], float] = Distance(cast("Any", metric), obsm_key="coordinates")
    except ValueError as error:
        raise OptionError("is not a distance in pertpy; see pertpy.tl.Distance.", metric=metric) from error
    rows = []
    for effect in read["real"].effects:
        target = places["real"][read["real"].rows(effect)]
        groups = {"control": ("real", Effect((), effect.context)), **{name: (name, effect) for name in named}}
        for method, (name, group) in groups.items():
            cells = places[name][read[name].rows(group)]
            if not len(cells):
                label = keys.label(group.targets) or control
                raise DataError(
                    f"{name} has no cells of {label!r} in the context {effect.context!r}; pass cells with this "
                    "perturbation."
                )
            rows.append((method, keys.label(effect.targets), effect.context, float(away(cells, target))))
    return pd.DataFrame(rows, columns=["method", "perturbation", "context", "distance"])
