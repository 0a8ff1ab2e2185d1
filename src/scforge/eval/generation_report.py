"""Generated cells beside what is soon made without a model.

Shapes: N cells, G genes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import sparse

from scforge._checks import check_count, check_seed
from scforge._constants import TARGET_SUM, UNS_KEY
from scforge.data.checks import counts_of, value_problem
from scforge.errors import DataError, OptionError, listing, warn
from scforge.eval.base import check_column
from scforge.eval.generation import FEWEST_CELLS, Generation
from scforge.eval.leaks import check_disjoint, check_no_copies, check_same_rows
from scforge.eval.log_scale import log_normalised, totals_of

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.eval.report import Kind, Report

__all__ = ["evaluate_generation", "generation_baselines"]

CEILING = "training cells"
_FEWEST_GENES = 10

_MISSING = 0.01
"""Share of the counts that genes may hold which are not there, so that the total is still about right."""

_OFF = 0.2
"""How far totals of log-normalised cells may be from those of the real cells, as a share."""


def generation_baselines(
    train: AnnData,
    n_cells: int | None = None,
    *,
    labels: Sequence[str] | pd.Series | None = None,
    labels_key: str | None = None,
    layer: str | None = None,
    seed: int = 0,
) -> dict[str, AnnData]:
    """Make cells from training cells without a model.

    ``"training cells"``
        Training cells themselves, as far as there are enough each once: a ceiling, not a baseline, since it is real
        data of another split. Where they are better than real cells can be told from each other, nothing is left to
        gain; a model that repeats its training cells reaches it, too.
    ``"independent genes"``
        Each gene takes its log1p CP10K from a training cell of its own: every gene is right, no two go together.
    ``"mean and Poisson"``
        Counts drawn about the mean share of each gene, times the library size of a training cell: every cell is of the
        same kind.

    Parameters
    ----------
    train
        Training cells with raw counts.
    n_cells
        Number of cells; not needed with `labels`.
    labels
        Draw each cell among the training cells of this label.
    labels_key
        Column of ``train.obs`` with the labels.
    layer
        Key in ``train.layers`` with raw counts; None reads ``train.X``.
    seed
        Seed.

    Returns
    -------
    Name to cells, `n_cells` each, with log1p CP10K in ``X`` (CSR, float32) and the labels in ``obs[labels_key]``.

    Raises
    ------
    DataError
        If there are no raw counts, or a label has no training cell.
    OptionError
        If neither `n_cells` nor `labels` with `labels_key` are given.

    Examples
    --------
    >>> import anndata, numpy as np
    >>> def cells(seed):
    ...     counts = np.random.default_rng(seed).poisson(np.arange(1, 31), size=(80, 30)).astype("float32")
    ...     adata = anndata.AnnData(counts)
    ...     adata.obs_names = [f"{seed}-{i}" for i in range(80)]
    ...     return adata
    >>> made = generation_baselines(cells(0), n_cells=20)
    >>> {name: part.shape for name, part in made.items()}
    {'training cells': (20, 30), 'independent genes': (20, 30), 'mean and Poisson': (20, 30)}
    """
    import anndata

    if (labels is None) == (n_cells is None) or (labels is None) != (labels_key is None):
        raise OptionError(
            f"n_cells={n_cells!r} and labels_key={labels_key!r} do not fit; give n_cells, or labels with labels_key."
        )
    rng = np.random.default_rng(check_seed(seed))
    counts = counts_of(train, layer).astype(np.float64)
    if labels is None:
        check_count("n_cells", n_cells, "cells")
        wanted, known = np.zeros(int(n_cells or 0), dtype=object), np.zeros(train.n_obs, dtype=object)
        obs = pd.DataFrame(index=[f"cell{row}" for row in range(len(wanted))])
    else:
        check_column("labels_key", str(labels_key), train.obs)
        wanted, known = np.asarray(labels).astype(str), train.obs[labels_key].astype(str).to_numpy()
        obs = pd.DataFrame({labels_key: wanted}, index=[f"cell{row}" for row in range(len(wanted))])
    if missing := sorted(set(wanted) - set(known)):
        raise DataError(
            f"no training cell has the label {listing(missing, most=3)} of obs[{labels_key!r}]; leave those cells out."
        )
    totals = np.asarray(counts.sum(axis=1)).ravel()
    logs = log_normalised(train, layer, argument="train")
    parts: dict[str, list[sparse.csr_matrix]] = {CEILING: [], "independent genes": [], "mean and Poisson": []}
    places = []
    for label in dict.fromkeys(wanted):
        rows, n = np.flatnonzero(known == label), int((wanted == label).sum())
        places.append(np.flatnonzero(wanted == label))
        parts[CEILING].append(logs[rng.choice(rows, n, replace=n > len(rows))])
        parts["independent genes"].append(_independent(logs[rows].tocsc(), n, rng))
        share = np.asarray(counts[rows].sum(axis=0)).ravel() / totals[rows].sum()
        parts["mean and Poisson"].append(_poisson(share, totals[rng.choice(rows, n)], rng))
    back = np.argsort(np.concatenate(places), kind="stable")
    return {
        name: anndata.AnnData(sparse.vstack(blocks, format="csr")[back].astype(np.float32), obs.copy(), train.var[[]])
        for name, blocks in parts.items()
    }


def evaluate_generation(
    generated: AnnData | Mapping[str, AnnData],
    real: AnnData,
    train: AnnData,
    *,
    labels_key: str | None = None,
    layer: str | None = None,
    kinds: Mapping[str, Kind] | None = None,
    n_comps: int = 50,
    max_cells: int = 1_000,
    seeds: Sequence[int] = (0,),
    intervals: bool = True,
    title: str = "Generated cells compared",
) -> Report:
    """Score generated cells against real ones, beside :func:`generation_baselines` of the training cells.

    Library sizes are those over all genes of each data set; then only genes count that all of them have. So counts have
    to be over all genes. ``mmd`` and ``c2st`` look at the same number of cells of each method and of the real ones, the
    fewest that one of them has.

    Parameters
    ----------
    generated
        Cells of one method, or of several by name; counts or log1p CP10K in ``X``, as of
        :meth:`scforge.models.Encoder.generate`.
    real
        Real cells that no method has seen, raw counts.
    train
        Real cells that the methods have learned from, raw counts.
    labels_key
        Column of obs of all of them, for figures of each label.
    layer
        Key in ``layers`` of `real` and `train` with raw counts; None reads ``X``.
    kinds
        Name to what it is (:class:`~scforge.eval.Row`), e.g. ``"untrained"``; a model, if not told.
    n_comps, max_cells
        As in :class:`Generation`.
    seeds
        Seeds of what is drawn for ``mmd`` and ``c2st``; the first is that of the baselines, too.
    intervals
        Add 95 % intervals, and tests against the best baseline.
    title
        Heading of the report.

    Returns
    -------
    The report: figures of :class:`Generation` of each method and baseline.

    Raises
    ------
    DataError
        If real cells are training cells, under other names, too; generated cells are copies of the real ones; counts
        are over part of the genes; or data are on another scale.
    OptionError
        If an option makes no sense, or a kind names no method.

    Examples
    --------
    >>> import anndata, numpy as np
    >>> def cells(seed):
    ...     counts = np.random.default_rng(seed).poisson(np.arange(1, 31), size=(80, 30)).astype("float32")
    ...     adata = anndata.AnnData(counts)
    ...     adata.obs_names = [f"{seed}-{i}" for i in range(80)]
    ...     return adata
    >>> report = evaluate_generation({"mine": cells(0)}, cells(1), cells(2), n_comps=5, intervals=False)
    >>> [row.name for row in report.rows]
    ['mine', 'training cells', 'independent genes', 'mean and Poisson']
    """
    from scforge.eval.harness import compare

    made = dict(generated) if isinstance(generated, Mapping) else {"generated": generated}
    if not len(seeds):
        raise OptionError("seeds=() leaves nothing to run; give at least one seed.")
    if unknown := [name for name in kinds or {} if name not in made]:
        raise OptionError(f"kinds names {listing(unknown)}, not among the generated cells ({listing(made)}).")
    check_disjoint(train.obs_names, real.obs_names)
    names = real.var_names
    for some in (train, *made.values()):
        names = names[names.isin(some.var_names)]
    if len(names) < _FEWEST_GENES:
        raise DataError(
            f"{len(names)} genes are in real, train and all generated cells, fewer than {_FEWEST_GENES}; give all of "
            "them the same var_names."
        )
    if labels_key is None:
        baselines = generation_baselines(train, real.n_obs, layer=layer, seed=seeds[0])
    else:
        check_column("labels_key", labels_key, real.obs)
        kept = ~real.obs[labels_key].isna().to_numpy()
        if not kept.all():
            warn(f"{int((~kept).sum())} real cells without obs[{labels_key!r}] are left out.")
            real = real[kept]
        wanted = real.obs[labels_key].astype(str)
        baselines = generation_baselines(train, labels=wanted, labels_key=labels_key, layer=layer, seed=seeds[0])
    if both := set(made) & set(baselines):
        raise OptionError(f"generated names {listing(sorted(both))}, which is a baseline; choose another name.")
    reference = _on_genes(real, "the real cells", names, layer)
    cells = {name: _on_genes(some, f"the cells of {name!r}", names, made=True) for name, some in made.items()}
    learned = _on_genes(train, "train", names, layer)
    check_same_rows(learned.X, reference.X)
    _check_complete(train, "train", real, layer, layer)
    _check_complete(real, "the real cells", train, layer, layer)
    notes = []
    for name, some in cells.items():
        _check_complete(made[name], f"the cells of {name!r}", real, None, layer)
        notes += _scale_notes(name, made[name], some.X, reference.X)
        check_no_copies(some.X, reference.X, what="generated cells", argument=f"generated[{name!r}]")
    cells |= {name: some[:, names].copy() for name, some in baselines.items()}
    told = dict.fromkeys(made, "model") | dict(kinds or {})
    told |= {name: "ceiling" if name == CEILING else "baseline" for name in baselines}
    check_count("max_cells", max_cells, "cells")
    n_cells = min(max_cells, reference.n_obs, *(some.n_obs for some in cells.values()))
    if n_cells < FEWEST_CELLS:
        fewest = min(cells, key=lambda name: cells[name].n_obs)
        raise DataError(
            f"mmd and c2st would look at {n_cells} cells of each (max_cells={max_cells}, {reference.n_obs} real cells, "
            f"{cells[fewest].n_obs} of {fewest!r}); give at least {FEWEST_CELLS}."
        )
    report = compare(
        Generation(labels_key, n_comps, n_cells, int(seeds[0])),
        cells,
        reference,
        kinds=told,  # type: ignore[arg-type]
        seeds=seeds,
        intervals=intervals,
        title=title,
    )
    report.facts |= {"real cells": real.n_obs, "training cells": train.n_obs, "genes": len(names)}
    report.facts |= {"cells of each in mmd and c2st": n_cells}
    report.notes += notes
    report.notes.append(
        f"Figures are over {len(names)} of {real.n_vars} genes of the real cells, those that all cells have, on log1p "
        f"CP{TARGET_SUM:,.0f}."
    )
    return report


def _on_genes(adata: AnnData, what: str, names: pd.Index, layer: str | None = None, *, made: bool = False) -> AnnData:
    """Return log1p CP10K of some genes, in their order; library sizes are over all genes."""
    import anndata

    if not adata.var_names.is_unique:
        raise DataError(f"{what} have genes twice; make var_names unique.")
    logs = log_normalised(adata, layer, argument=what, made=made)[:, adata.var_names.get_indexer(names)]
    return anndata.AnnData(logs, obs=adata.obs.copy(), var=pd.DataFrame(index=names))


def _check_complete(adata: AnnData, what: str, whole: AnnData, layer: str | None, layer_of_whole: str | None) -> None:
    """Raise where counts are over part of the genes of others, so that their totals are no library sizes."""
    lacking = ~whole.var_names.isin(adata.var_names)
    if not lacking.any() or value_problem(_values(adata, layer)) is not None:
        return
    logs = log_normalised(whole, layer_of_whole, argument="the others")
    share = float(totals_of(logs[:, np.flatnonzero(lacking)]).sum() / totals_of(logs).sum())
    if share > _MISSING:
        raise DataError(
            f"{what} are counts without {int(lacking.sum())} genes that hold {share:.0%} of the counts of others, so "
            "that their totals are no library sizes; give all genes, or log1p of counts per 10,000 of all genes."
        )


def _scale_notes(name: str, adata: AnnData, logs: sparse.csr_matrix, real: sparse.csr_matrix) -> list[str]:
    """Raise where logarithms are far from the totals of the real cells; say so where their scale is known."""
    if value_problem(_values(adata, None)) is None:
        return []
    usual, expected = (float(np.median(totals_of(some))) for some in (logs, real))
    if abs(usual - expected) <= _OFF * expected:
        return []
    found = f"expm1 of the cells of {name!r} has a median total of {usual:,.0f}, that of real cells {expected:,.0f}"
    # What scforge generates is on this scale, however wrong it is.
    if "generated" in adata.uns.get(UNS_KEY, {}):
        return [f"{found}: they have too much or too little of all genes together."]
    raise DataError(
        f"{found} over the same genes, so that they are not both log1p CP10K; give raw counts, or "
        "sc.pp.normalize_total(adata, target_sum=1e4) and sc.pp.log1p(adata) over all genes."
    )


def _values(adata: AnnData, layer: str | None) -> np.ndarray:
    return sparse.csr_matrix(adata.X if layer is None else adata.layers[layer]).data


def _independent(logs: sparse.csc_matrix, n_cells: int, rng: np.random.Generator) -> sparse.csr_matrix:
    """Draw each gene of each cell from any cell: the number of cells with it, which of them, and its values."""
    n_train, n_genes = logs.shape
    sizes = np.diff(logs.indptr)
    drawn = rng.binomial(n_cells, sizes / n_train)
    rows = [rng.choice(n_cells, n, replace=False) for n in drawn]
    values = [
        logs.data[start + rng.integers(0, size, n)] if n else np.empty(0, logs.dtype)
        for start, size, n in zip(logs.indptr[:-1], sizes, drawn, strict=True)
    ]
    columns = np.repeat(np.arange(n_genes), drawn)
    return sparse.csr_matrix((np.concatenate(values), (np.concatenate(rows), columns)), shape=(n_cells, n_genes))


def _poisson(share: np.ndarray, totals: np.ndarray, rng: np.random.Generator) -> sparse.csr_matrix:
    """Draw counts about the same shares, and return their log1p CP10K."""
    blocks = []
    for start in range(0, len(totals), 1_000):
        counts = rng.poisson(totals[start : start + 1_000, None] * share).astype(np.float64)
        library = np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
        blocks.append(sparse.csr_matrix(np.log1p(counts * (TARGET_SUM / library))))
    return sparse.vstack(blocks, format="csr")
