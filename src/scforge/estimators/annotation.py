"""Label the cells of one AnnData by the labels of another, or by a model with saved reference cells, in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from anndata import AnnData

from scforge._checks import check_key, check_seed, check_share
from scforge._columns import labels_of
from scforge._constants import UNS_KEY
from scforge._progress import announce
from scforge._text import markdown
from scforge.data.checks import check_adata, check_obs_column, inherited_batch_key
from scforge.data.sources import read_h5ad
from scforge.errors import DataError, OptionError, listing, warn
from scforge.estimators.encoder import Encoder
from scforge.estimators.setup import setup_of
from scforge.estimators.transfer import labels_key_of
from scforge.finetuning.labels import broader_labels

_DEFAULT_KEY = "cell_type"
_UNSURE, _FEW_GENES = 0.5, 0.5
"""Probability of a label below which a cell is unsure, and fraction of found genes below which the report warns."""


@dataclass(frozen=True, eq=False)
class AnnotationReport:
    """Result of :func:`annotate`.

    Attributes
    ----------
    labels
        The predictions, one row per cell, see :meth:`scforge.models.Encoder.transfer_labels`.
    summary
        One row per label: ``n_cells``, the mean ``probability``, the mean ``agreement`` of the three classifiers, and
        ``n_unsure``, the number of cells with a probability below 0.5.
    facts
        Facts about reference and query as text, by name.
    notes
        What to check, as sentences.
    key
        Name of the label column in ``obs``.
    model
        The model, which can label further cells.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.datasets.pbmc3k()
    >>> report = scforge.annotate(cells[300:400, :300].copy(), cells[:300, :300].copy())
    >>> report.facts["reference"]
    '291 labeled cells in 1 batch'
    >>> report.model.save("blood", overwrite=True)
    """

    labels: pd.DataFrame
    summary: pd.DataFrame
    facts: dict[str, str]
    notes: list[str]
    key: str
    model: Encoder

    def to_markdown(self) -> str:
        """Return the report as Markdown, as notebooks show it."""
        lines = [f"- {markdown(name)}: {markdown(fact)}" for name, fact in self.facts.items()]
        lines += ["", f"| label | {' | '.join(self.summary.columns)} |", "|---|" + "---|" * self.summary.shape[1]]
        for name, row in self.summary.iterrows():
            figures = (f"{value:,.0f}" if column.startswith("n_") else f"{value:.2f}" for column, value in row.items())
            lines.append(f"| {markdown(name)} | {' | '.join(figures)} |")
        return "\n".join([*lines, "", *(f"- {note}" for note in map(markdown, self.notes))]).rstrip() + "\n"

    _repr_markdown_ = __repr__ = to_markdown


def annotate(
    query: AnnData,
    reference: AnnData | Encoder | str | os.PathLike[str],
    labels_key: str | None = None,
    batch_key: str | None = None,
    *,
    query_batch_key: str | None = None,
    layer: str | None = None,
    gene_key: str | None = None,
    unknown: float | None = None,
    min_probability: float | None = None,
    broader: str | Mapping[str, str] | None = None,
    key_added: str | None = None,
    seed: int = 0,
    progress_bar: bool = False,
) -> AnnotationReport:
    """Label query cells by the labels of reference cells.

    If `reference` is an AnnData, the light encoder is trained on it, which takes one to three minutes for 10,000 cells
    on two CPU cores. The cells are then labeled by :meth:`scforge.models.Encoder.transfer_labels`, whose results are
    written to `query`: the label to ``obs["scforge_<labels_key>_transferred"]``, and with the endings
    ``_probability``, ``_agreement`` and ``_p_value`` how sure it is, and the embedding to ``obsm["X_scforge"]``.
    :func:`scforge.pl.annotation` plots them.

    Parameters
    ----------
    query
        Cells to label, with raw counts. Genes are matched by name. Existing labels are ignored.
    reference
        Labeled cells with raw counts; a model that was trained on them; the folder of such a model, or its name, e.g.
        ``"scforge://human-blood"``; or an h5ad file.
    labels_key
        Column of the reference's ``obs`` with the labels. If None, uses the labels of the model, or ``"cell_type"``.
    batch_key
        Column of the reference's ``obs`` with batches, e.g. donors. Labels are more reliable with batches: what differs
        between them is then not learned.
    query_batch_key
        Column of the query's ``obs`` with batches. If None, uses the column of the reference, if the query has it.
    layer, gene_key
        Key in ``layers`` with raw counts, and column of ``var`` with the gene names, of the query and of an AnnData
        that is the reference. If None, uses the places of the model, or ``X`` and ``var_names``. With one of these
        arguments or `query_batch_key`, the query is set up with :meth:`~scforge.models.Encoder.setup_anndata`.
    unknown, min_probability, broader, key_added
        See :meth:`scforge.models.Encoder.transfer_labels`.
    seed
        Random seed for training.
    progress_bar
        Whether to show a progress bar while training.

    Returns
    -------
    The report, which notebooks show: genes that were found, batches, cells per label, and unsure cells.

    Raises
    ------
    DataError
        If counts, genes or labels are invalid. Query and reference are checked before training.
    OptionError
        If an argument is invalid, or a model has no reference cells.

    Examples
    --------
    >>> import scforge
    >>> cells = scforge.datasets.pbmc3k()
    >>> reference, query = cells[:300, :300].copy(), cells[300:400, :300].copy()
    >>> report = scforge.annotate(query, reference)
    >>> query.obs["scforge_cell_type_transferred"].notna().all()
    np.True_
    >>> list(report.summary)
    ['n_cells', 'probability', 'agreement', 'n_unsure']
    """
    check_adata(query)
    check_seed(seed)
    for argument, name in {"key_added": key_added, "labels_key": labels_key}.items():
        check_key(argument, name)
    for argument, rate in {"unknown": unknown, "min_probability": min_probability}.items():
        if rate is not None:
            check_share(argument, rate)
    if isinstance(reference, str | os.PathLike):
        name = os.fspath(reference)
        reference = read_h5ad([name]) if name.endswith(".h5ad") and "://" not in name else Encoder.load(name)
    if reference is query:
        raise OptionError(
            "and reference are the same AnnData; pass the cells without labels as query.", argument="query"
        )
    if isinstance(reference, AnnData):
        labels_key = labels_key or _DEFAULT_KEY
        model = _model_of(reference, labels_key, batch_key, layer, gene_key, seed)
        if broader is not None:
            column = model.open_cells().column
            broader_labels(broader, labels_of(column(labels_key), key=labels_key), column)
    elif isinstance(reference, Encoder):
        if batch_key is not None:
            raise OptionError("has no effect if reference is a model; omit batch_key.", batch_key=batch_key)
        if reference.spec.tuning is not None:
            call = "transfer_labels()" if reference.fitted.is_query else "predict(query)"
            raise OptionError(
                f"is a query model or fine-tuned; call its {call}, or pass its base model.", argument="reference"
            )
        if not reference.is_trained_:
            raise OptionError(
                "is not trained; call reference.train() first, or pass labeled cells.", argument="reference"
            )
        model = reference
    else:
        raise OptionError(
            f"is of type {type(reference).__name__!r}; pass an AnnData, a model or its folder.", argument="reference"
        )
    if any(key is not None for key in (query_batch_key, layer, gene_key)):
        setup = setup_of(Encoder, query) or model.fitted.setup
        Encoder.setup_anndata(
            query,
            layer=layer or setup.get("layer"),
            gene_key=gene_key or setup.get("gene_key"),
            batch_key=query_batch_key or inherited_batch_key(query.obs, setup.get("batch_key")),
        )
    model.open_cells(query)  # checks counts and genes
    if not model.is_trained_:
        announce(f"Training on {model.adata.n_obs:,} reference cells ...")
        model.train(progress_bar=progress_bar)
    labels_key = labels_key or labels_key_of(model)
    key = f"scforge_{labels_key}_transferred" if key_added is None else key_added
    table = model.transfer_labels(
        query,
        labels_key=labels_key,
        key_added=key_added,
        unknown=unknown,
        min_probability=min_probability,
        broader=broader,
    )
    return _report(table, query.uns[UNS_KEY][key], model, key)


def _model_of(
    reference: AnnData, labels_key: str, batch_key: str | None, layer: str | None, gene_key: str | None, seed: int
) -> Encoder:
    """Return an untrained model of a reference with labels, whose ``uns`` and setup do not change."""
    check_adata(reference)
    check_obs_column(reference, labels_key, argument="labels_key")
    labels = labels_of(reference.obs[labels_key], key=labels_key, warns=True)
    sizes = pd.Series(labels).value_counts()
    if (n_labels := int((sizes > 0).sum())) < 2:
        raise DataError(f"has {n_labels} label(s) in the reference; at least 2 are needed.", labels_key=labels_key)
    if single := list(sizes.index[sizes == 1]):
        warn(f"Labels of a single reference cell can hardly be learned: {listing(map(str, single))}.")
    counts = {} if layer is None or layer not in reference.layers else {layer: reference.layers[layer]}
    own = AnnData(reference.X, obs=reference.obs.copy(), var=reference.var.copy(), layers=counts)
    Encoder.setup_anndata(own, layer=layer, gene_key=gene_key, batch_key=batch_key, labels_key=labels_key)
    return Encoder(own, seed=seed)


def _report(table: pd.DataFrame, made: Mapping[str, Any], model: Encoder, key: str) -> AnnotationReport:
    """Summarize a label transfer."""
    by_label = table.groupby("label", observed=True)
    summary = pd.DataFrame(
        {
            "n_cells": by_label.size(),
            "probability": by_label["probability"].mean(),
            "agreement": by_label["agreement"].mean(),
            "n_unsure": (table["probability"] < _UNSURE).groupby(table["label"], observed=True).sum(),
        }
    ).sort_values("n_cells", ascending=False, kind="stable")
    n_unsure, n_split = int(summary["n_unsure"].sum()), int((table["agreement"] < 1).sum())
    overlap = float(made["gene_overlap"])
    facts = {
        "query": f"{len(table):,} cells; {overlap:.0%} of the {model.vocab.n_genes:,} genes of the model were found",
        "reference": f"{made['n_reference']:,} labeled cells in {made['n_batches']:,} batch"
        + ("" if made["n_batches"] == 1 else "es"),
        "unsure": f"{n_unsure:,} cells have a probability below {_UNSURE}; the classifiers disagree on {n_split:,}",
    }
    notes = []
    if overlap < _FEW_GENES:
        notes.append("Less than half of the genes were found; labels are less reliable. Check the gene names.")
    if made["n_in_reference"]:
        notes.append(
            f"{made['n_in_reference']:,} query cells are also labeled reference cells: their labels were known."
        )
    without = sorted(set(made["reference_labels"]) - set(summary.index))
    if without:
        notes.append(f"No query cell got: {', '.join(without)}.")
    notes.append(
        "Cells of a type that the reference lacks get a label of the reference. Check labels with marker genes."
    )
    return AnnotationReport(table, summary, facts, notes, key, model)
