"""The figures of Arc Institute's cell-eval on predicted cells, by that package itself."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pandas as pd

from scforge._checks import check_count
from scforge.errors import DataError, MissingFileError, OptionError, listing
from scforge.eval.perturbation_cells import Effect, EffectKeys, PerturbedCells

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["cell_eval_scores"]

_PROFILES = ("full", "minimal", "vcc", "de", "anndata", "pds")


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

    Both are handed over as log1p CP10K (cell-eval itself would scale counts to the median of their totals). Needs
    ``pip install 'scforge[eval]'``.

    Parameters
    ----------
    predicted
        Predicted cells of all perturbations that were measured; its controls are those that effects are seen from.
        Without controls, those of `real` are taken.
    real
        Measured cells with controls, over the same genes in any order.
    perturbation_key, control, context_key, separator, layer
        As for :class:`PerturbationPrediction`. Contexts are scored one by one, because cell-eval knows none.
    profile
        ``"full"``, ``"minimal"``, ``"vcc"`` (the Virtual Cell Challenge), ``"de"``, ``"anndata"`` or ``"pds"``.
    skip_metrics
        Names of metrics of cell-eval that are left out.
    n_threads
        Threads of its tests of differential expression.

    Returns
    -------
    cell-eval's two tables: one row a perturbation (with a context: the column ``context`` first), and its summary
    (count, mean, spread and quantiles in the column ``statistic``) of each metric.

    Raises
    ------
    MissingFileError
        If cell-eval is not installed.
    DataError
        If a perturbation, control or gene is missing in `predicted`, or a figure cannot be computed.
    OptionError
        If the profile is unknown.

    See Also
    --------
    PerturbationPrediction : ours: ``pearson_delta``, ``mse`` (cell-eval's ``mse_delta``), ``mae`` (``mae_delta``) and
        ``discrimination_*`` are the same figures, unless controls are of several contexts.

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
    if profile not in _PROFILES:
        raise OptionError(f"profile={profile!r} is none of {listing(_PROFILES)}.")
    check_count("n_threads", n_threads, "threads")
    with warnings.catch_warnings():
        # Its dependencies warn about each other.
        warnings.simplefilter("ignore")
        package = _package()
    keys = EffectKeys(perturbation_key, control, context_key, separator, layer)
    measured = PerturbedCells.read(real, keys, argument="real")
    made = PerturbedCells.read(predicted, keys, argument="predicted", made=True).over(
        measured.genes, argument="predicted"
    )
    tables: list[pd.DataFrame] = []
    summaries: list[pd.DataFrame] = []
    for context in sorted({effect.context for effect in measured.effects}):
        one = _adata(measured, context, keys, [e for e in measured.effects if e.context == context])
        other = _adata(made, context, keys, [e for e in measured.effects if e.context == context], measured)
        table, summary = _run(package, other, one, profile, list(skip_metrics), n_threads)
        for frame, found in ((table, tables), (summary, summaries)):
            if context_key is not None:
                frame.insert(0, "context", context)
            found.append(frame)
    return pd.concat(tables, ignore_index=True), pd.concat(summaries, ignore_index=True)


def _package() -> Any:
    try:
        return import_module("cell_eval")
    except ModuleNotFoundError as error:
        if error.name != "cell_eval":
            raise
        raise MissingFileError("cell-eval is not installed; pip install 'scforge[eval]'.") from error


def _adata(
    cells: PerturbedCells, context: str, keys: EffectKeys, effects: list[Effect], fallback: PerturbedCells | None = None
) -> AnnData:
    """Return the cells of a context as cell-eval reads them."""
    import anndata
    import numpy as np
    from scipy import sparse

    groups = [np.flatnonzero(cells.groups == _group(cells, effect)) for effect in effects]
    without = [keys.name_of(effect.targets) for effect, rows in zip(effects, groups, strict=True) if not len(rows)]
    if without:
        raise DataError(f"predicted has no cells of {listing(without)} (context {context!r}); predict all of real.")
    source = cells
    plain = np.flatnonzero(cells.groups == _group(cells, Effect((), context)))
    if not len(plain) and fallback is not None:
        source, plain = fallback, np.flatnonzero(fallback.groups == _group(fallback, Effect((), context)))
    if not len(plain):
        raise DataError(f"real has no control cell in the context {context!r}; add controls of its own there.")
    parts = [cells.expression[rows] for rows in groups] + [source.expression[plain]]
    labels = np.repeat(
        [keys.name_of(effect.targets) for effect in effects] + [keys.control], [part.shape[0] for part in parts]
    )
    obs = pd.DataFrame({"target": labels.astype(object)}, index=[f"cell {i}" for i in range(len(labels))])
    matrix = sparse.vstack(parts, format="csr")
    return anndata.AnnData(
        matrix, obs=obs, var=pd.DataFrame(index=cells.genes.astype(str)), uns={"control": keys.control}
    )


def _group(cells: PerturbedCells, effect: Effect) -> int:
    if effect.targets:
        return cells.effects.index(effect) if effect in cells.effects else -1
    return len(cells.effects) + cells.contexts.index(effect.context) if effect.context in cells.contexts else -1


def _run(
    package: Any, predicted: AnnData, real: AnnData, profile: str, skip: list[str], n_threads: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    with tempfile.TemporaryDirectory() as folder, _quiet():
        evaluator = package.MetricsEvaluator(
            predicted,
            real,
            control_pert=real.uns["control"],
            pert_col="target",
            num_threads=n_threads,
            outdir=folder,
            skip_de=profile in ("anndata", "pds"),
        )
        table, summary = evaluator.compute(
            profile=profile, skip_metrics=skip or None, write_csv=False, break_on_error=True
        )
    return table.to_pandas(), summary.to_pandas()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep its progress bars to itself, and the warnings of its dependencies."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
