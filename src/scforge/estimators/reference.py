"""Mapping query cells onto a reference: what a front class does with models of other people's cells.

Shapes: N query cells, M reference cells, K neighbours, C classes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from anndata import AnnData

from scforge.data.cells import Cells
from scforge.errors import OptionError, listing
from scforge.finetuning.adapters import merged
from scforge.finetuning.labels import check_key, text_labels
from scforge.models.scdiva_parts import batch_vectors

if TYPE_CHECKING:
    from scforge.estimators.base import CellModel


logger = logging.getLogger("scforge")

type Source = AnnData | Cells | str | os.PathLike[str]

UNASSIGNED = "unassigned"


def own_cells(owner: CellModel | None) -> Any:
    """Return the cells of the reference model."""
    if owner is None:
        raise OptionError(
            "the reference is not at hand, because the query model was loaded; pass reference=, its labelled cells or "
            "the reference model."
        )
    if owner.adata is None and owner._data is None:
        raise OptionError("the reference model was loaded without its cells; pass them as reference=.")
    return owner._source(None)


def with_batches_of(cells: Cells, key: str, known: list[str]) -> dict[str, Any]:
    """Return the options of a decoder that knows the batches of a query, too."""
    batches = text_labels(cells.column(check_key("batch_key", key)), key=key, argument="batch_key").categories
    if shared := [str(name) for name in batches if name in known]:
        logger.info(
            "Batches of the query in obs[%r] that the reference knows, and that are taken for its own: %s. Rename "
            "those that are others.",
            key,
            listing(shared),
        )
    return {"batch_key": key, "batches": [*known, *(str(name) for name in batches if name not in known)]}


def with_room(reference: CellModel, found: dict[str, Any]) -> CellModel:
    """Return a copy of a model whose decoder knows further batches, which begin at the mean of its own."""
    spec, own = reference.spec, merged(reference.backbone)
    sizes = {**spec.model_options, "n_batches": len(found["batches"])}
    objective = {**spec.objective_options, **found}
    parts = replace(spec, tuning=None, model_options=sizes, objective_options=objective).to_json()
    model: CellModel = type(reference)._of_parts(
        parts, reference.vocab, seed=reference.seed, registry=reference.registry_
    )
    vectors = batch_vectors(own)
    assert vectors is not None
    name = next(name for name, parameter in own.named_parameters() if parameter is vectors)
    new = vectors.detach().mean(dim=0).expand(len(found["batches"]) - len(vectors), -1)
    model.module.load_state_dict({**own.state_dict(), name: torch.cat([vectors.detach(), new])})
    model.module.to(reference.device)
    model.is_trained_, model.n_epochs_, model._seen = True, reference.n_epochs_, reference._seen
    return model


def weighted_vote(
    landmarks: np.ndarray, codes: np.ndarray, cells: np.ndarray, n_classes: int, n_neighbors: int
) -> np.ndarray:
    """Return the share of each class in the votes of the nearest landmarks.

    A vote weighs ``exp(-d^2 / (2 s^2))``, with d the distance and s its mean over the neighbours of the cell.

    Parameters
    ----------
    landmarks
        Embedding of the reference cells, shape (M, D).
    codes
        Their classes, integer, shape (M,).
    cells
        Embedding of the query cells, shape (N, D).
    n_classes
        Number of classes C.
    n_neighbors
        Neighbours K that vote.

    Returns
    -------
    Float64, shape (N, C); rows sum to 1.

    Examples
    --------
    >>> landmarks = np.array([[0.0], [1.0], [10.0]])
    >>> weighted_vote(landmarks, np.array([0, 0, 1]), np.array([[0.5]]), 2, 2)
    array([[1., 0.]])
    """
    from sklearn.neighbors import NearestNeighbors

    search = NearestNeighbors(n_neighbors=min(n_neighbors, len(landmarks))).fit(landmarks)
    distances, neighbours = search.kneighbors(cells)
    # Cells that lie on all their neighbours count each the same.
    scale = np.maximum(distances.mean(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    weights = np.exp(-0.5 * np.square(distances / scale))
    places = np.arange(len(cells))[:, None] * n_classes + codes[neighbours]
    votes = np.bincount(places.ravel(), weights.ravel(), minlength=len(cells) * n_classes)
    votes = votes.reshape(len(cells), n_classes)
    return votes / votes.sum(axis=1, keepdims=True)
