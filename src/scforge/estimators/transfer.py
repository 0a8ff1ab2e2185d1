"""Choose the labeled cells of a model, save them, and transfer their labels to other cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from anndata import AnnData

from scforge._checks import check_count, check_key, check_known, check_share
from scforge._columns import labels_of, texts_of
from scforge._constants import AUTO_KEY, OBSM_KEY, QUERY_KEY, UNS_KEY
from scforge.data.cells import Cells, CellSource, cell_names
from scforge.errors import DataError, OptionError, ScforgeError, warn
from scforge.estimators.setup import Model, Source, setup_of, source_of, training_source, write_embedding
from scforge.finetuning.adapters import digest_of
from scforge.finetuning.consensus import VIEWS, Labeled, consensus
from scforge.finetuning.held_out import fingerprints
from scforge.finetuning.labels import broader_labels, decide_labels
from scforge.finetuning.mapping import FineTunedModule
from scforge.finetuning.new_cells import choose_labeled, neighbor_votes
from scforge.finetuning.reference import MOST_CELLS, choose_reference


def labels_key_of(model: Model) -> str | None:
    """Return the column of the saved reference cells with the labels, or that of the setup."""
    saved: Any = model.reference_cells
    return model.fitted.setup.get("labels_key") if saved is None else str(saved.obs.columns[0])


def reference_to_save(model: Model, most: int = MOST_CELLS) -> CellSource | None:
    """Return labeled training cells, or None if the model has none."""
    fitted = model.fitted
    key, batch_key = (fitted.setup.get(name) for name in ("labels_key", "batch_key"))
    if fitted.spec.tuning is not None:
        return None
    if model.reference_cells is not None:  # of a loaded model, to which other cells may be attached
        saved: Any = model.reference_cells
        columns = [*saved.obs.columns, None]
        return choose_reference(saved, columns[0], columns[1], most=most, seed=fitted.seed)
    if key is None or training_source(model) is None:
        return None
    try:
        cells: Any = model.open_cells()
        return choose_reference(cells, key, batch_key, most=most, seed=fitted.seed)
    except ScforgeError as error:  # the cells were changed after training
        warn(f"No reference cells are saved with the model: {error}")
        return None


class _Reference(NamedTuple):
    """Labeled cells, of which those in `rows` have the label `codes` in the `labels`."""

    source: Any
    cells: Any
    owner: Model
    """The model that was trained on the cells, or opened them."""
    rows: np.ndarray
    codes: np.ndarray
    labels: pd.Categorical


def transfer_labels(
    model: Model,
    query: Source | None,
    *,
    labels_key: str | None,
    method: str,
    n_neighbors: int,
    key_added: str | None,
    unknown: float | None,
    min_probability: float | None,
    broader: str | Mapping[str, str] | None,
    reference: Any,
    batch_size: int,
) -> pd.DataFrame:
    """Transfer labels, see :meth:`scforge.models.Encoder.transfer_labels`."""
    check_key("key_added", key_added)
    if key_added in (OBSM_KEY, QUERY_KEY):
        raise OptionError("is the name of an embedding; choose another name.", key_added=key_added)
    check_count("n_neighbors", n_neighbors, "cells")
    check_known("method", method, ("consensus", "linear", "knn"), "the methods", error=OptionError)
    if unknown is not None:
        check_share("unknown", unknown)
        if method == "knn":
            raise OptionError("has no effect for method='knn'; use another method.", unknown=unknown)
    if min_probability is None and broader is not None:
        min_probability = 0.5
    if min_probability is not None:
        check_share("min_probability", min_probability)
    fitted = model.fitted
    if query is None and not fitted.is_query:
        raise OptionError("requires a model from load_query_data; pass the cells to label as query.", query=None)
    source = source_of(model, query)
    owner = reference if isinstance(reference, type(model)) else model.base_model if fitted.is_query else model
    labels_key = labels_key or labels_key_of(owner or model)
    if key_added is None:
        check_key("labels_key", labels_key)
    if labels_key is None:
        raise OptionError(
            ", but the reference was set up without labels; pass an obs column of the reference.", labels_key=None
        )
    most = None if method == "knn" else MOST_CELLS
    labeled = _labeled_cells(model, owner, reference, labels_key, most)
    # Query cells are moved onto the fixed reference.
    on_reference = replace(fitted.predictor(labeled.cells, batch_size), module=fitted.backbone)
    landmarks = on_reference.embedding(labeled.rows)
    predictor = fitted.predictor(model.open_cells(source), batch_size)
    if query is not None:
        module = fitted.backbone
        if fitted.landmarks is not None:
            module = FineTunedModule(module, fitted.mapping_of(predictor.cells))
        predictor = replace(predictor, module=module)
    embedding = predictor.embedding()
    parents = None if broader is None else broader_labels(broader, labeled.labels, labeled.cells.column)
    columns: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    if method == "knn":
        sizes = {"n_neighbors": n_neighbors, "n_classes": len(labeled.labels.categories), "seed": fitted.seed}
        probabilities = neighbor_votes(landmarks, labeled.codes, embedding, **sizes)
    else:
        probabilities, columns, facts = _voted(model, labeled, landmarks, source, predictor.cells, embedding, method)
    is_unknown = None if unknown is None else columns["p_value"] <= unknown
    if unknown is not None and np.isnan(columns["p_value"]).all():
        warn(
            f"unknown={unknown} has no effect, because the reference has too few cells for p-values: "
            f"{len(labeled.rows)}, and at least 50 are needed."
        )
    categories = list(labeled.labels.categories)
    label, probability = decide_labels(
        probabilities, categories, min_probability=min_probability, broader=parents, is_unknown=is_unknown
    )
    table = pd.DataFrame({"label": label, "probability": probability, **columns}, index=cell_names(predictor.cells))
    if isinstance(source, AnnData):
        sampled = choose_labeled(labeled.codes, seed=fitted.seed)
        names = np.array(categories, dtype=object)[labeled.codes[sampled]]
        facts |= {"method": method, "labels_key": labels_key, "n_reference": len(labeled.rows)}
        facts |= {"gene_overlap": predictor.cells.overlap, "counts_kept": predictor.cells.counts_kept}
        facts |= {"reference_embedding": landmarks[sampled], "reference_labels": names}
        facts |= {"embedding_key": fitted.obsm_key, "model": digest_of(fitted.backbone)}
        key = f"scforge_{labels_key}_transferred" if key_added is None else key_added
        _write(source, key, table, {**fitted.provenance(), **facts})
        if source is not labeled.source and (fitted.is_query or source is not model.adata):
            write_embedding(fitted, source, AUTO_KEY, embedding, predictor.cells)
            made = source.uns[UNS_KEY][fitted.obsm_key]
            made["model"] = facts["model"]
            if fitted.landmarks is not None:
                made["task"] = "adaptation"  # as from load_query_data
    return table


def _labeled_cells(model: Model, owner: Model | None, reference: Any, labels_key: str, most: int | None) -> _Reference:
    """Return at most `most` labeled cells to learn from: those of `owner` if `reference` is None or this model."""
    opener = model if owner is reference else owner or model
    if reference is None or owner is reference:
        saved: Any = None if owner is None else owner.reference_cells
        has_cells = owner is not None and training_source(owner) is not None
        is_saved = saved is not None and (labels_key in saved.obs or not has_cells)
        if owner is None or not (has_cells or is_saved):
            raise OptionError(
                "the model has neither its training cells nor saved reference cells (save(reference=False), or set up "
                "without labels); pass labeled cells or a model as reference."
            )
        # Other cells may be attached to a loaded model than those it was trained on.
        source = saved if is_saved else source_of(owner, None)
    else:
        source = source_of(opener, reference)
    cells: Any = opener.open_cells(source)
    labels = labels_of(cells.column(labels_key), key=labels_key, warns=True)
    rows = np.flatnonzero(labels.codes >= 0)
    if len(np.unique(labels.codes[rows])) < 2:
        raise DataError("has fewer than 2 labels in the reference; use another column.", labels_key=labels_key)
    codes = np.asarray(labels.codes)
    if most is not None:
        rows = rows[choose_labeled(codes[rows], seed=model.fitted.seed, most=most)]
    return _Reference(source, cells, owner or opener, rows, codes.astype(np.int64)[rows], labels)


def _voted(
    model: Model, labeled: _Reference, landmarks: Any, source: Any, query: Cells, embedding: np.ndarray, method: str
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, Any]]:
    """Return the class probabilities of query cells by a consensus, further columns of the table, and facts."""
    sampled = labeled.cells.sample(len(labeled.rows), rows=labeled.rows)
    batches = _batches_of(labeled.owner, labeled.source, labeled.cells)[labeled.rows]
    reference, of_query = Labeled(landmarks, sampled, batches, labeled.codes), _batches_of(model, source, query)
    views, n_classes = VIEWS if method == "consensus" else VIEWS[:1], len(labeled.labels.categories)
    voted = consensus(reference, embedding, query, of_query, n_classes, views=views, seed=model.fitted.seed)
    columns = {"agreement": voted.agreement} if method == "consensus" else {}
    facts = {"temperature": voted.temperature, "weights": voted.weights, "n_batches": len(np.unique(batches))}
    if isinstance(source, AnnData):
        facts["n_in_reference"] = int(np.isin(fingerprints(query), fingerprints(sampled)).sum())
    return voted.probabilities, {**columns, "p_value": voted.p_values}, facts


def _batches_of(model: Model, source: Any, cells: Any) -> np.ndarray:
    """Return the batch of each cell by the setup of an AnnData or of this model; one batch without a key."""
    key = (setup_of(type(model), source) or model.fitted.setup).get("batch_key")
    if model.reference_cells is not None and source is model.reference_cells:
        key = next(iter(cells.obs.columns[1:]), None)
    if key is None or cells.obs is None or key not in cells.obs:
        return np.full(len(cells), "batch")
    found = texts_of(cells.column(key), key=key, argument="batch_key")
    return np.where(found.codes >= 0, np.asarray(found, dtype=object), "").astype(str)


def _write(adata: AnnData, key: str, table: pd.DataFrame, facts: Mapping[str, Any]) -> None:
    """Write labels into obs, and facts about the transfer into uns."""
    for column in table:
        adata.obs[key if column == "label" else f"{key}_{column}"] = table[column]
    for name in {"agreement", "p_value"} - set(table):  # of an earlier transfer by another method
        if f"{key}_{name}" in adata.obs:
            del adata.obs[f"{key}_{name}"]
    adata.uns[UNS_KEY] = {**adata.uns.get(UNS_KEY, {}), key: dict(facts)}
