"""Create models of query cells from a reference model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from anndata import AnnData
from scipy import sparse
from torch import nn

from scforge._columns import texts_of
from scforge.data.cells import Cells
from scforge.data.neighbors import n_query_clusters
from scforge.errors import OptionError, listing, warn
from scforge.estimators.finetune import finetune
from scforge.estimators.fitted import FittedModel
from scforge.estimators.setup import setup_of
from scforge.estimators.sources import Model, Source, source_of
from scforge.finetuning.adapters import digest_of, merged
from scforge.models.components.latent import batch_vectors

logger = logging.getLogger("scforge")

_QUERY, _REFERENCE, _SIDE = "query", "reference", "scforge_side"

_MOST = 20_000
"""Maximum number of query cells, and of reference cells, for joint training in memory."""


def query_model(
    reference: Model,
    query: Source,
    *,
    batch_key: str | None,
    reference_cells: Source | None,
    lora: bool | Mapping[str, Any],
    validation_size: float,
    seed: int | None,
) -> Any:
    """Return a model of query cells, see :meth:`scforge.models.Encoder.load_query_data`."""
    fitted = reference.fitted
    if fitted.labeled is not None and fitted.labeled.in_base and fitted.mapping_base is not None:
        reference = reference.base_model  # of an annotator
        fitted = reference.fitted
    given = {"batch_key": batch_key, "reference_cells": reference_cells, "lora": lora}
    known, integrated, stays = _checked(fitted, given)
    cls, source = type(reference), source_of(reference, query)
    cells: Any = reference.open_cells(source)
    key: Any = batch_key or setup_of(cls, source).get("batch_key") or known.get("batch_key")
    if batch_key is not None:
        cells.column(batch_key)  # raises if there is none
    # Cells can be mapped without a batch; they are decoded with the mean of all batch vectors.
    has_column = batch_key is not None or integrated or (cells.obs is not None and key in cells.obs)
    found: dict[str, Any] = {}
    if known.get("batches") and has_column and reference_cells is None:
        found = with_batches_of(cells, key, known["batches"])
    base, task = reference, dict[str, Any](name="adaptation")
    trained_on = source if isinstance(source, AnnData) else cells  # opened once
    if reference_cells is not None:
        learned = reference.open_cells(reference_cells)
        trained_on, found = of_both(cells, learned, fitted.pretraining, key, fitted.seed)
        base = with_room(reference, found)
    elif integrated:
        task = {"name": "integration", **known, **found, "n_reference": len(known["batches"])}
    elif stays:
        base = with_room(reference, found) if found else reference
        task["n_reference"] = len(known["batches"] or [])
        if fitted.landmarks is None:
            warn(
                "The reference model contains no embeddings of its training cells, so the query is not mapped onto "
                "the reference; complete the training of the reference model."
            )
        else:
            task |= {"n_clusters": n_query_clusters(len(cells)), "n_tokens": len(fitted.spec.vocab)}
    frozen = stays and reference_cells is None
    split: dict[str, Any] = {"validation_size": validation_size, "test_size": 0.0, "seed": seed}
    model = finetune(base, task, trained_on, {}, freeze=frozen, lora=not stays and lora, **split)
    mapped = model.fitted
    if integrated:
        mapped.module.head.take_over(fitted.module.head)
    if stays:
        mapped.landmarks = fitted.landmarks
    if frozen:
        mapped.correction = fitted.correction
    if reference_cells is not None:
        model.query_cells = source
    elif stays and fitted.landmarks is not None:
        mapped.module.head = fitted.mapping_of(cells).to(mapped.device)
    digest = digest_of(merged(fitted.backbone))  # not that of the copy with vectors for new batches
    tuning = replace(mapped.spec.tuning, base={**mapped.spec.tuning.base, "sha256": digest, "reference": True})
    mapped.spec, mapped.is_trained, model.base_model = replace(mapped.spec, tuning=tuning), True, reference
    logger.info(
        "The query contains %.1f%% of the genes of the reference model, and these genes account for %.1f%% of the "
        "query counts.",
        100 * cells.overlap,
        100 * cells.counts_kept,
    )
    return model


def _checked(reference: FittedModel, given: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool, bool]:
    """Return the options about batches, whether a reference was integrated, and whether its encoder stays as it is.

    Raises an OptionError if it cannot be a reference, or an argument in `given` has no effect for it.
    """
    tuning, pretraining = reference.spec.tuning, reference.pretraining
    if tuning is not None and tuning.task not in ("adaptation", "integration"):
        raise OptionError(f"was fine-tuned for {tuning.task!r}; pass its base model.", argument="reference_model")
    integrated = tuning is not None and tuning.task == "integration"
    stays = pretraining.maps_queries and not integrated
    known = tuning.task_options if tuning is not None and integrated else pretraining.config() if stays else {}
    origin = "fine-tuned for integration" if integrated else f"trained with {reference.spec.objective!r}"
    of = f"a reference model {origin}"
    lora, batch_key = given["lora"], given["batch_key"]
    if isinstance(lora, Mapping) if stays else not lora:
        raise OptionError(f"has no effect for {of}; omit lora.", lora=lora)
    if given["reference_cells"] is not None and not stays:
        raise OptionError(f"has no effect for {of}; omit reference_cells.", argument="reference_cells")
    if batch_key is not None and not known.get("batches") and given["reference_cells"] is None:
        of_batches = "that learns nothing about the batches of a query"
        why = of_batches if pretraining.config().get("batches") else "without batches"
        raise OptionError(f"has no effect for {of} {why}; omit batch_key.", batch_key=batch_key)
    return known, integrated, stays


def with_batches_of(cells: Cells, key: str, known: list[str]) -> dict[str, Any]:
    """Return the options of a decoder that also contains the query batches."""
    batches = texts_of(cells.column(key), key=key, argument="batch_key").categories
    if shared := [str(name) for name in batches if name in known]:
        logger.info(
            "Query batches in obs[%r] that have the name of a reference batch are treated as the same batch (%s); "
            "rename them if they are different batches.",
            key,
            listing(shared),
        )
    return {"batch_key": key, "batches": [*known, *(str(name) for name in batches if name not in known)]}


def with_room(reference: Model, found: dict[str, Any]) -> Any:
    """Return a copy of a model with decoder vectors for new batches, initialized to the mean of its batch vectors."""
    fitted = reference.fitted
    spec, own = fitted.spec, merged(fitted.backbone)
    sizes = {**spec.model_options, "n_batches": len(found["batches"])}
    objective = {**spec.objective_options, **found}
    roomy = replace(spec, tuning=None, model_options=sizes, objective_options=objective)
    model = FittedModel(roomy, fitted.seed, setup=fitted.setup)
    vectors = batch_vectors(own)
    if vectors is None:
        nn.init.zeros_(batch_vectors(model.module))  # as if there were none
    state = {**model.module.state_dict(), **own.state_dict()}
    if vectors is not None:
        name = next(name for name, parameter in own.named_parameters() if parameter is vectors)
        new = vectors.detach().mean(dim=0).expand(len(found["batches"]) - len(vectors), -1)
        state[name] = torch.cat([vectors.detach(), new])
    model.module.load_state_dict(state)
    model.module.to(fitted.device)
    model.is_trained, model.n_epochs, model.seen = True, fitted.n_epochs, fitted.seen
    made = type(reference).of_fitted(model)
    made.opened = reference.opened  # so that warnings about genes are issued once
    return made


def of_both(query: Cells, reference: Cells, pretraining: Any, key: str | None, seed: int) -> tuple[Any, Any]:
    """Return the concatenated query and reference cells, and the options of a decoder with all batches.

    Cells without a batch, or a query or reference without the column, form a separate batch. `key` is the query column.
    The concatenated column has the name of the reference column, so the model can serve as the reference in another
    joint training.
    """
    known = list(pretraining.batches or [])
    query, reference = (cells.sample(_MOST, seed=seed) for cells in (query, reference))
    parts = []
    for cells, column, name in ((query, key, _QUERY), (reference, pretraining.batch_key, _REFERENCE)):
        found = [name] * len(cells)
        if column is not None and cells.obs is not None and column in cells.obs:
            labels = texts_of(cells.column(column), key=column, argument="batch_key")
            found = [str(labels.categories[code]) if code >= 0 else name for code in labels.codes]
        parts.append(found)
    if shared := sorted(set(parts[0]) & {*known, *parts[1]}):
        warn(
            f"Some batches of the query and the reference have the same name ({listing(shared)}); rename them if they "
            "are different batches."
        )
    counts = sum(cells.totals.sum() for cells in (query, reference))
    kept = sum(cells.totals.sum() * cells.counts_kept for cells in (query, reference))
    batch_key = pretraining.batch_key or key or _SIDE
    both = replace(
        query,
        counts=sparse.vstack([query.counts, reference.counts], format="csr"),
        totals=np.concatenate([query.totals, reference.totals]),
        counts_kept=float(kept / max(counts, 1.0)),
        measured=None if query.measured is None or reference.measured is None else query.measured | reference.measured,
        obs=pd.DataFrame({batch_key: np.array([*parts[0], *parts[1]], dtype=object)}),
    )
    return both, {"batch_key": batch_key, "batches": [*known, *sorted({*parts[0], *parts[1]} - {*known})]}
