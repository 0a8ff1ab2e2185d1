"""Mapping query cells onto a reference: what a front class does with models of other people's cells.

Shapes: N query cells, M reference cells, K neighbours, C classes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from anndata import AnnData

from scforge._checks import check_count, check_share
from scforge.data.cells import Cells
from scforge.errors import DataError, OptionError, listing
from scforge.estimators.finetuning_run import finetune
from scforge.finetuning.adapters import digest_of, merged
from scforge.finetuning.labels import check_key, text_labels
from scforge.models.scdiva_parts import batch_vectors

if TYPE_CHECKING:
    from scforge.estimators.encoder import Encoder

__all__ = ["ReferenceMethods", "weighted_vote"]

logger = logging.getLogger("scforge")

type Source = AnnData | Cells | str | os.PathLike[str]

UNASSIGNED = "unassigned"


class ReferenceMethods:
    """Methods around reference and query."""

    @classmethod
    def load_query_data(
        cls: Any,
        query: Source,
        reference_model: Encoder | str | os.PathLike[str],
        *,
        batch_key: str | None = None,
        lora: bool | Mapping[str, Any] = True,
        validation_size: float = 0.1,
        seed: int | None = None,
    ) -> Encoder:
        """Return a model of query cells that has the weights of a reference model and embeds them as it does.

        No training is needed. With a reference of ``neighbor_denoising``, the default, ``train()`` leaves the encoder
        as it is, so the embedding stays comparable with the one that the reference model wrote. It learns nothing but
        vectors of the query's new batches in the decoder, as in scArches (Lotfollahi et al. 2022, Nature Biotechnology
        40, 121-130).

        Other objectives, and references that were fine-tuned for ``"integration"``, have to adapt the encoder:
        ``train()`` fits adapters to the query, and the embedding leaves the space of the reference. It is then written
        to ``obsm["X_scforge_query"]``, a warning says so, and the reference has to be embedded again by the query
        model.

        A batch of the query that is called as one of the reference is taken for that one, which is logged.

        Parameters
        ----------
        query
            Cells, as for :meth:`get_latent_representation`. Genes are matched by name, and the share of the model's
            genes that were found is logged; labels are not needed.
        reference_model
            A trained model, or one that was fine-tuned for ``"integration"``, or its folder. It is never changed.
        batch_key
            Column of obs with the batches of the query; None for that of its set-up, or else of the reference. For
            references whose decoder is told batches.
        lora
            Options of the adapters, see :meth:`finetune`; of no use where the encoder stays as it is.
        validation_size
            Share of the query that chooses the best epoch.
        seed
            Seed of that choice and of the adapters; None for that of the reference.

        Returns
        -------
        The query model. It saves, loads and goes on training as others do.

        Raises
        ------
        GeneMismatchError
            If the query has too few genes of the reference.
        DataError
            If the query has no column `batch_key`.
        OptionError
            If the reference was fine-tuned for a task that needs labels, or an argument cannot be used.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:200, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> query = scforge.datasets.pbmc3k()[200:260, :300].copy()
        >>> query_model = scforge.models.Encoder.load_query_data(query, model)
        >>> query_model.get_latent_representation().shape
        (60, 32)
        """
        reference = cls.load(reference_model) if isinstance(reference_model, str | os.PathLike) else reference_model
        if not isinstance(reference, cls):
            raise OptionError(
                f"reference_model is of type {type(reference_model).__name__!r}; pass an {cls.__name__} or its folder."
            )
        if not reference.is_trained_:
            raise OptionError("reference_model is not trained; train it, or load one that is.")
        tuning = reference.spec.tuning
        if tuning is not None and tuning.task not in ("adaptation", "integration"):
            raise OptionError(
                f"reference_model was fine-tuned for {tuning.task!r}, which needs labels to train; call its predict "
                "with the query, or pass the model before that fine-tuning."
            )
        integrated = tuning is not None and tuning.task == "integration"
        aim: Any = reference.spec.build_pretraining()
        stays = aim.maps_queries and not integrated
        if isinstance(lora, Mapping) if stays else not lora:
            why = f"{reference.spec.objective!r} leaves the encoder as it is" if stays else "nothing is left to train"
            raise OptionError(f"lora={lora!r} is of no use, as {why}; leave it out.")
        known = tuning.task_options if integrated else aim.config() if stays else {}
        if batch_key is not None and not known.get("batches"):
            raise OptionError(
                f"batch_key={batch_key!r} is of no use for a reference whose decoder is told no batches; leave it out, "
                "or integrate the reference first: setup_anndata(batch_key=...) before it is made, or "
                'reference.finetune("integration", batch_key=...).'
            )
        source = reference._source(query)
        cells = reference._open(source)
        found: dict[str, Any] = {}
        if known.get("batches"):
            setup = reference._setup_of(source) if isinstance(source, AnnData) else None
            key = batch_key or (setup or {}).get("batch_key") or known["batch_key"]
            # Cells can be mapped without a batch; they are decoded in the mean of all.
            if batch_key is not None or integrated or (cells.obs is not None and key in cells.obs):
                found = _with_batches_of(cells, key, known["batches"])
        base, task = reference, dict[str, Any](name="adaptation")
        if integrated:
            task = {"name": "integration", **known, **found, "n_reference": len(known["batches"])}
        elif stays:
            base = _with_room(reference, found) if found else reference
            task["n_reference"] = len(known["batches"] or [])
        model: Encoder = finetune(
            base,
            task,
            source,
            labels_key=None,
            batch_key=None,
            validation_size=validation_size,
            test_size=0.0,
            split_by=None,
            split_key=None,
            freeze=stays,
            lora=False if stays else lora,
            head=None,
            seed=seed,
            options={},
        )
        if integrated:
            head: Any = model.module.head
            head.take_over(reference.module.head, known["batches"])
        made = model.spec.tuning
        assert made is not None
        digest = digest_of(merged(reference.backbone))  # not that of the copy with room for batches
        model._spec = replace(model.spec, tuning=replace(made, base={**made.base, "sha256": digest, "reference": True}))
        model.is_trained_, model._base = True, reference
        logger.info(
            "The query has %.1f %% of the genes of the reference model, and %.1f %% of its counts lie in them.",
            100 * cells.overlap,
            100 * cells.counts_kept,
        )
        return model

    def transfer_labels(
        self: Any,
        query: Source | None = None,
        *,
        labels_key: str | None = None,
        n_neighbors: int = 50,
        key_added: str | None = None,
        threshold: float | None = None,
        reference: Encoder | Source | None = None,
        batch_size: int = 256,
    ) -> pd.DataFrame:
        """Give each query cell the label of the reference cells around it.

        Each of the `n_neighbors` nearest reference cells votes with the weight ``exp(-d^2 / (2 s^2))``, with d its
        distance and s the mean distance of the neighbours. The uncertainty is one minus the share of the winning label,
        as in scArches (Lotfollahi et al. 2022, Nature Biotechnology 40, 121-130). Its kernel is another one:
        ``exp(-d (std / 2)^2)``, with the standard deviation of the distances, hardly tells neighbours apart where an
        embedding has small numbers; the one here does not depend on their unit. This model embeds both, reference and
        query, so that distances are within one space. Writes ``obs["scforge_<labels_key>_transferred"]`` (categories)
        and ``obs["scforge_<labels_key>_transferred_uncertainty"]`` (float32), apart from what :meth:`predict` writes.

        Parameters
        ----------
        query
            Cells to label, as for :meth:`get_latent_representation`; None for those of a model that
            :meth:`load_query_data` made. Labels that they have are not looked at.
        labels_key
            Column of obs of the reference with the labels; None for that of ``setup_anndata``. Reference cells without
            label do not vote.
        n_neighbors
            Reference cells that vote; fewer where there are fewer.
        key_added
            Name of the column, in place of ``"scforge_<labels_key>_transferred"``; the other is called
            ``"<key_added>_uncertainty"``.
        threshold
            Cells of higher uncertainty are called ``"unassigned"``. Cells of a class that the reference does not have
            are more uncertain only where they lie between its classes.
        reference
            The labelled cells, or a model that has them. None: those that this model was trained on, or of a query
            model those of its reference.
        batch_size
            Cells a batch.

        Returns
        -------
        Columns ``label`` and ``uncertainty``, one row a cell.

        Raises
        ------
        DataError
            If the reference has no such column, or fewer than two labels.
        OptionError
            If reference or query are not at hand, or an argument cannot be used.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:200, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> query = scforge.datasets.pbmc3k()[200:260, :300].copy()
        >>> list(model.transfer_labels(query))
        ['label', 'uncertainty']
        >>> "scforge_cell_type_transferred_uncertainty" in query.obs
        True
        """
        check_count("n_neighbors", n_neighbors, "cells")
        check_count("batch_size", batch_size, "cells")
        if threshold is not None:
            check_share("threshold", threshold)
        if key_added is not None:
            check_key("key_added", key_added)
        is_query = self.spec.tuning is not None and self.spec.tuning.base.get("reference", False)
        if query is None and not is_query:
            raise OptionError("query=None, but the model was not made by load_query_data; pass the cells to label.")
        source = self._source(query)
        owner = reference if isinstance(reference, type(self)) else self._base if is_query else self
        labels_key = labels_key or (owner or self)._setup.get("labels_key")
        if labels_key is None:
            raise OptionError("labels_key=None, but the reference was set up without labels; name a column of its obs.")
        given = owner is not reference and reference is not None
        opener = self if owner is reference else owner or self
        reference_cells = opener._open(opener._source(reference) if given else _own_cells(owner))
        labels = text_labels(reference_cells.column(labels_key), key=labels_key)
        rows = np.flatnonzero(labels.codes >= 0)
        if len(np.unique(labels.codes[rows])) < 2:
            raise DataError(
                f"labels_key={labels_key!r} has fewer than two labels among the reference cells, so there is nothing "
                "to tell apart; choose another column."
            )
        landmarks = self._predictor(reference_cells, batch_size).embedding(rows)
        cells = self._open(source)
        embedding = self._predictor(cells, batch_size).embedding()
        votes = weighted_vote(landmarks, np.asarray(labels.codes)[rows], embedding, len(labels.categories), n_neighbors)
        winner = votes.argmax(axis=1)
        uncertainty = (1.0 - votes[np.arange(len(votes)), winner]).clip(0.0, 1.0).astype(np.float32)
        names = np.array(labels.categories, dtype=object)
        found = names[winner]
        categories = list(names)
        if threshold is not None:
            found = np.where(uncertainty > threshold, UNASSIGNED, found)
            categories += [UNASSIGNED] if UNASSIGNED not in categories else []
        adata = source if isinstance(source, AnnData) else None
        index = pd.RangeIndex(len(found)) if adata is None else adata.obs_names
        table = pd.DataFrame(
            {"label": pd.Categorical(found, categories=categories), "uncertainty": uncertainty}, index=index
        )
        if adata is not None:
            key = f"scforge_{labels_key}_transferred" if key_added is None else key_added
            adata.obs[key] = table["label"]
            adata.obs[f"{key}_uncertainty"] = table["uncertainty"]
        return table


def _own_cells(owner: Encoder | None) -> Any:
    """Return the cells of the reference model."""
    if owner is None:
        raise OptionError(
            "the reference is not at hand, because the query model was loaded; pass reference=, its labelled cells or "
            "the reference model."
        )
    if owner.adata is None and owner._data is None:
        raise OptionError("the reference model was loaded without its cells; pass them as reference=.")
    return owner._source(None)


def _with_batches_of(cells: Cells, key: str, known: list[str]) -> dict[str, Any]:
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


def _with_room(reference: Encoder, found: dict[str, Any]) -> Encoder:
    """Return a copy of a model whose decoder knows further batches, which begin at the mean of its own."""
    spec, own = reference.spec, merged(reference.backbone)
    sizes = {**spec.model_options, "n_batches": len(found["batches"])}
    objective = {**spec.objective_options, **found}
    parts = replace(spec, tuning=None, model_options=sizes, objective_options=objective).to_json()
    model: Encoder = type(reference)._of_parts(
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
