"""Mapping query cells onto a reference: what a front class does with models of other people's cells.

Shapes: N query cells, M reference cells, K neighbours, C classes.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from anndata import AnnData

from scforge._checks import check_count, check_share
from scforge.data.cells import Cells
from scforge.errors import DataError, OptionError, listing
from scforge.estimators.finetuning_run import finetune
from scforge.finetuning.adapters import adapters_disabled, has_lora
from scforge.finetuning.labels import check_key, text_labels

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
        """Return a model of query cells that has the weights of a reference model, frozen, and adapters to train.

        ``train()`` then learns the adapters from the query alone, by what the reference model was trained for, its
        pretraining or the integration of batches. Of an integrated reference the query's new batches get parameters of
        their own in the decoder, as in scArches (Lotfollahi et al. 2022, Nature Biotechnology 40, 121-130); a batch of
        the query that is called as one of the reference is taken for that one, which is logged. Before that call the
        model embeds the query as the reference does, which often is enough.

        Parameters
        ----------
        query
            Cells, as for :meth:`get_latent_representation`. Genes are matched by name, and the share of the model's
            genes that were found is logged; labels are not needed.
        reference_model
            A trained model, or one that was fine-tuned for ``"integration"``, or its folder. It is never changed.
        batch_key
            Column of obs with the batches of the query; None for that of the reference. Only for an integrated
            reference.
        lora
            Options of the adapters, see :meth:`finetune`.
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
        >>> query_model.train(1, progress_bar=False)
        >>> query_model.get_latent_representation().shape
        (60, 32)
        """
        reference = cls.load(reference_model) if isinstance(reference_model, str | os.PathLike) else reference_model
        if not isinstance(reference, cls):
            raise OptionError(
                f"reference_model is of type {type(reference_model).__name__!r}; pass an {cls.__name__} or its folder."
            )
        if lora is False or lora is None:
            raise OptionError(
                f"lora={lora!r} leaves nothing to train on the query; leave it out, or call the reference."
            )
        if not reference.is_trained_:
            raise OptionError("reference_model is not trained; train it, or load one that is.")
        tuning = reference.spec.tuning
        source = reference._source(query)
        cells = reference._open(source)
        if tuning is None or tuning.task == "adaptation":
            if batch_key is not None:
                raise OptionError(
                    f"batch_key={batch_key!r} has no use for a reference that was not integrated; leave it out, or "
                    'integrate the reference first: reference.finetune("integration", batch_key=...).'
                )
            task: dict[str, Any] = {"name": "adaptation"}
        elif tuning.task == "integration":
            task = {"name": "integration", **_extended(tuning.task_options, cells, batch_key)}
        else:
            raise OptionError(
                f"reference_model was fine-tuned for {tuning.task!r}, which needs labels to train; call its predict "
                "with the query, or pass the model before that fine-tuning."
            )
        model: Encoder = finetune(
            reference,
            task,
            source,
            labels_key=None,
            batch_key=None,
            validation_size=validation_size,
            test_size=0.0,
            split_by=None,
            split_key=None,
            freeze=False,
            lora=lora,
            head=None,
            seed=seed,
            options={},
        )
        if task["name"] == "integration":
            head: Any = model.module.head
            head.take_over(reference.module.head, tuning.task_options["batches"])
        made = model.spec.tuning
        assert made is not None
        model._spec = replace(model.spec, tuning=replace(made, base={**made.base, "reference": True}))
        model.is_trained_ = True
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
        embedding has small numbers; the one here does not depend on their unit. Writes ``obs["scforge_<labels_key>"]``
        (categories) and ``obs["scforge_<labels_key>_uncertainty"]`` (float32).

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
            Name of the column, in place of ``"scforge_<labels_key>"``; the other is called
            ``"<key_added>_uncertainty"``.
        threshold
            Cells of higher uncertainty are called ``"unassigned"``. Cells of a class that the reference does not have
            are more uncertain only where they lie between its classes.
        reference
            The labelled cells, embedded as the reference model does it, or a model that has them. None: those that this
            model was trained on, or of a query model those of its reference.
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
        >>> "scforge_cell_type_uncertainty" in query.obs
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
        model, whole = self._reference_of(reference, is_query)
        labels_key = labels_key or model._setup.get("labels_key")
        if labels_key is None:
            raise OptionError("labels_key=None, but the reference was set up without labels; name a column of its obs.")
        reference_cells = model._open(model._source(whole))
        labels = text_labels(reference_cells.column(labels_key), key=labels_key)
        rows = np.flatnonzero(labels.codes >= 0)
        if len(np.unique(labels.codes[rows])) < 2:
            raise DataError(
                f"labels_key={labels_key!r} has fewer than two labels among the reference cells, so there is nothing "
                "to tell apart; choose another column."
            )
        # The adapters of a query model are for the query: without them it is the reference model.
        own = model is self and is_query and has_lora(self.backbone)
        with adapters_disabled(self.backbone) if own else contextlib.nullcontext():
            landmarks = model._predictor(reference_cells, batch_size).embedding(rows)
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
            key = f"scforge_{labels_key}" if key_added is None else key_added
            adata.obs[key] = table["label"]
            adata.obs[f"{key}_uncertainty"] = table["uncertainty"]
        return table

    def _reference_of(self: Any, given: Any, is_query: bool) -> tuple[Encoder, Any]:
        """Return the model that embeds the reference cells, and these; None for those of that model."""
        if isinstance(given, type(self)):
            model, cells = given, None
        elif given is not None:
            model, cells = (self._base if is_query and self._base is not None else self), given
            if is_query and self._base is None and not has_lora(self.backbone):
                raise OptionError("the adapters of the model were merged; pass reference=, the reference model itself.")
        else:
            model, cells = (self._base if is_query else self), None
        if model is None:
            raise OptionError(
                "the reference is not at hand, because the query model was loaded; pass reference=, its labelled cells "
                "or the reference model."
            )
        if cells is None and model.adata is None and model._data is None:
            raise OptionError("the reference model was loaded without its cells; pass them as reference=.")
        return model, cells


def _extended(options: Mapping[str, Any], cells: Cells, batch_key: str | None) -> dict[str, Any]:
    """Return options of the integration of a reference, with the batches of the query."""
    key = options["batch_key"] if batch_key is None else check_key("batch_key", batch_key)
    known = list(options["batches"])
    batches = text_labels(cells.column(key), key=key, argument="batch_key")
    new = [str(name) for name in batches.categories if name not in known]
    if shared := [str(name) for name in batches.categories if name in known]:
        logger.info(
            "Batches of the query in obs[%r] that the reference knows, and that are taken for its own: %s. Rename "
            "those that are others.",
            key,
            listing(shared),
        )
    return {**options, "batch_key": key, "batches": [*known, *new], "n_reference": len(known)}


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
