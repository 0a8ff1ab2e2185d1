"""What all front classes share: set-up, embedding, saving and loading."""

from __future__ import annotations

import html
import inspect
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from anndata import AnnData
from scvi import REGISTRY_KEYS
from scvi.data import AnnDataManager
from scvi.data._constants import _MANAGER_UUID_KEY, _SCVI_UUID_KEY
from scvi.model.base import BaseModelClass
from scvi.model.base._base_model import BaseModelMetaClass

from scforge._checks import check_count
from scforge._constants import AUTO_KEY, OBSM_KEY, QUERY_KEY, UNS_KEY
from scforge._registry import check_options
from scforge.data.cells import Cells
from scforge.data.checks import check_adata, check_obs_column, warn_if_transposed
from scforge.data.readers import is_collection
from scforge.data.sources import open_cells
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, NotTrainedWarning, OptionError, warn
from scforge.estimators.card import described, provenance
from scforge.estimators.fields import GeneField, ObsField, check_places
from scforge.estimators.folder_methods import FolderMethods
from scforge.estimators.mudata import MuDataModel
from scforge.estimators.registries import datamodule_registry
from scforge.estimators.spec import ModelSpec
from scforge.finetuning.heads import FineTunedModule
from scforge.finetuning.held_out import SeenCells
from scforge.models.components.gene_vectors import check_filled
from scforge.tokenizers.base import Tokenizer
from scforge.training.datamodule import CellDataModule
from scforge.training.predict import embed

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FROM_DATA", "CellModel", "positions"]

FROM_DATA = "from_data"

_OF_SCVI = {
    **dict.fromkeys(
        ("categorical_covariate_keys", "continuous_covariate_keys"), "scforge has no covariates, use batch_key"
    ),
    "size_factor_key": "the size of a cell is the sum of its counts, leave it out",
    "unlabeled_category": "cells without a label have NaN in the column of labels_key, leave it out",
}
"""Arguments of scvi-tools' ``setup_anndata``, and what to do here."""


def positions(indices: Sequence[int] | np.ndarray, n_cells: int) -> np.ndarray:
    """Return positions of cells, int64, of positions or of a bool for each of `n_cells`, or raise OptionError."""
    found = np.asarray(indices)
    wrong = found.ndim != 1 or found.dtype.kind not in "biu"
    if found.dtype == bool and not wrong:
        wrong, found = len(found) != n_cells, np.flatnonzero(found)
    if wrong or not len(found) or found.min() < 0 or found.max() >= n_cells:
        raise OptionError(f"indices are no positions of the {n_cells} cells; give whole numbers from 0, or a mask.")
    return found.astype(np.int64)


class _Absent:
    """A name of scvi-tools that a front class does not have: asking for it says what to do."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, model: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} has no {self._name}; {self._instead}.")


class _Front(BaseModelMetaClass):
    """Lists what a front class has, without what only scvi-tools has."""

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if not cls._lacks(name)]

    def _lacks(cls, name: str) -> bool:
        return isinstance(inspect.getattr_static(cls, name, None), _Absent)


class CellModel(FolderMethods, MuDataModel, BaseModelClass, metaclass=_Front):
    """Base of the front classes, on scvi-tools' ``BaseModelClass`` and ``AnnDataManager``.

    A subclass makes ``_spec``, ``_tokenizer`` and ``module`` in its constructor, which takes what :meth:`load` hands
    over, and implements ``train``.
    """

    module: nn.Module
    seed: int
    _spec: ModelSpec
    _tokenizer: Tokenizer
    is_trained_: bool
    _data: CellDataModule | None = None
    _seen: SeenCells | None = None
    trainer = _Absent("the scores of a training are in model.history, and callbacks=[...] see Lightning's Trainer")
    prepare_query_anndata = _Absent("genes are matched by name, call load_query_data(query, reference) right away")
    get_normalized_expression = _Absent("make a scforge.models.ScDiVa, which decodes expression")
    differential_abundance = _Absent("embed with scforge, and compute it with another package")
    posterior_predictive_sample = _Absent("no model here has a likelihood of counts, which scvi.criticism needs")

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not type(self)._lacks(name)]

    def __init__(
        self,
        adata: AnnData | None = None,
        *args: Any,
        registry: dict[str, Any] | None = None,
        datamodule: CellDataModule | None = None,
        **options: Any,
    ) -> None:
        if datamodule is not None:
            registry = datamodule_registry(type(self).__name__, adata, datamodule, registry)
        adata = self._adata_of(adata)
        self._require_setup(adata, registry)
        super().__init__(adata, registry=registry)
        self._data = datamodule
        self.n_epochs_ = 0
        self._trained_in: set[str] = set()
        self._stopped = False
        """Whether Ctrl-C ended the last training."""
        self.history_: dict[str, pd.DataFrame] = {}

    @classmethod
    def setup_anndata(
        cls,
        adata: AnnData,
        layer: str | None = None,
        gene_key: str | None = None,
        batch_key: str | None = None,
        labels_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Tell the model where things are in `adata`, and check them.

        Parameters
        ----------
        adata
            Annotated data with raw counts. Only ``_scvi_...`` entries are added to it.
        layer
            Key in ``adata.layers`` with raw counts; None reads ``adata.X``.
        gene_key
            Column of ``adata.var`` with the gene names; None reads ``adata.var_names``.
        batch_key
            Column of ``adata.obs`` with the batch of a cell. Highly variable genes are chosen within batches.
        labels_key
            Column of ``adata.obs`` with the label of a cell; cells may have none. Pretraining does not use it.
        **kwargs
            ``source_registry`` and the transfer options of :class:`scvi.data.AnnDataManager`.

        Raises
        ------
        DataError
            If counts, gene names or columns cannot be used.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="celltype")
        Traceback (most recent call last):
        ...
        scforge.errors.DataError: labels_key='celltype' ...
        """
        setup_method_args = cls._get_setup_method_args(**locals())
        if kwargs.get("source_registry") is None:
            known = [*inspect.signature(CellModel.setup_anndata).parameters][1:-1]
            check_options("argument", "setup_anndata", kwargs.keys() - {"source_registry"}, known, _OF_SCVI)
        check_adata(adata)
        if adata.is_view:
            raise DataError("adata is a view of another AnnData; copy it first with adata = adata.copy().")
        check_obs_column(adata, batch_key, argument="batch_key")
        check_obs_column(adata, labels_key, argument="labels_key")
        warn_if_transposed(adata)
        fields: list[Any] = [GeneField(REGISTRY_KEYS.X_KEY, layer, gene_key)]
        if batch_key is not None:
            fields.append(ObsField(REGISTRY_KEYS.BATCH_KEY, batch_key, allow_missing=False))
        if labels_key is not None:
            fields.append(ObsField(REGISTRY_KEYS.LABELS_KEY, labels_key, allow_missing=True))
        managers = (one._setup_adata_manager_store.get(adata.uns.get(_SCVI_UUID_KEY)) for one in _family(CellModel))
        known = [manager.adata for manager in managers if manager is not None]
        if known and all(one is not adata for one in known):
            # A copy, or read from a file of it: under the same id it would take the place of the other.
            for key in (_SCVI_UUID_KEY, _MANAGER_UUID_KEY):
                adata.uns.pop(key, None)
        manager = AnnDataManager(fields=fields, setup_method_args=setup_method_args)
        manager.register_fields(adata, **kwargs)
        cls.register_manager(manager)

    def get_latent_representation(
        self,
        adata: AnnData | Cells | str | os.PathLike[str] | None = None,
        *,
        key_added: str | None = AUTO_KEY,
        batch_size: int = 256,
        indices: Sequence[int] | np.ndarray | None = None,
    ) -> np.ndarray:
        """Embed cells, and write the embedding into ``adata.obsm``.

        Parameters
        ----------
        adata
            Cells to embed; None for those of the training. Without a set-up of their own, counts and gene names are
            read from where they were in the training data; call :meth:`setup_anndata` first where they are elsewhere.
            Genes are matched by name. Cells from :func:`scforge.data.open_cells`, or a path or URL that it takes, are
            read as they are needed, and nothing is written.
        key_added
            Key in ``adata.obsm``, and in ``adata.uns["scforge"]`` for what the embedding was made with. ``"auto"`` is
            ``"X_scforge"``, or ``"X_scforge_query"`` of a query model (:meth:`Encoder.load_query_data`) whose training
            changed its encoder. None writes nothing.
        batch_size
            Cells a batch.
        indices
            Positions of the cells to embed, or a bool for each cell; then nothing is written. None embeds all.

        Returns
        -------
        Embedding in the order of ``adata.obs_names`` (of a store, in its order), float32, shape (n_obs, n_latent).

        Raises
        ------
        GeneMismatchError
            If `adata` has too few genes of the model.
        OptionError
            If the model waits for gene vectors that it was never given.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> model.get_latent_representation().shape
        (60, 32)
        >>> adata.obsm["X_scforge"].shape
        (60, 32)
        >>> adata.uns["scforge"]["X_scforge"]["architecture"]
        'gene_pooling'
        """
        source = self._source(adata)
        check_filled(self.module)
        if not self.is_trained_:
            warn("The model is not trained; its embedding is random.", NotTrainedWarning)
        check_count("batch_size", batch_size, "cells")
        if key_added is not None and not (isinstance(key_added, str) and key_added):
            raise OptionError(f"key_added={key_added!r} is not a name; give text, or None to write nothing.")
        cells = self._open(source)
        objective = self._spec.build_objective()
        rows = None if indices is None else positions(indices, len(cells))
        embedding = embed(self.module, cells, self._tokenizer, objective=objective, batch_size=batch_size, rows=rows)
        if key_added is not None and rows is None and isinstance(source, AnnData):
            self._keep(source, key_added, embedding, cells)
        return embedding

    def _keep(self, adata: AnnData, key: str, embedding: np.ndarray, cells: Cells) -> None:
        """Write an embedding of cells, and what it was made with, into their AnnData."""
        key = self._obsm_key if key == AUTO_KEY else key
        made_with = self._provenance(cells, embedding.shape[1])
        adata.obsm[key] = embedding
        adata.uns[UNS_KEY] = {**adata.uns.get(UNS_KEY, {}), key: made_with}

    @property
    def _obsm_key(self) -> str:
        """Key of the embedding in obsm: one of its own where a query model has left the space of its reference."""
        tuning = self._spec.tuning
        adapted = tuning is not None and tuning.base.get("reference") and tuning.freeze is not True
        return QUERY_KEY if adapted and self.n_epochs_ else OBSM_KEY

    @property
    def objective(self) -> str:
        """Name of the objective of the pretraining."""
        return self._spec.objective

    @property
    def backbone(self) -> nn.Module:
        """The architecture, without the head of a fine-tuned model."""
        return self.module.encoder if isinstance(self.module, FineTunedModule) else self.module

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.module.parameters()).device

    @property
    def vocab(self) -> GeneVocab:
        """The genes that the model knows."""
        return self._spec.vocab

    @property
    def spec(self) -> ModelSpec:
        """Names and options of architecture, tokenizer and objective."""
        return self._spec

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self._tokenizer

    def __repr__(self) -> str:
        heading, facts = self._described()
        return "\n".join([heading, *(f"    {name}: {text}" for name, text in facts.items())])

    def _repr_html_(self) -> str:
        """Return what the model is, for a notebook."""
        heading, facts = self._described()
        facts["set up with"] = ", ".join(
            f"{name}={self._setup[name]!r}"
            for name in ("layer", "gene_key", "batch_key", "labels_key")
            if self._setup.get(name)
        )
        left = "style='text-align: left; vertical-align: top'"
        lines = (
            f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(text)}</td></tr>"
            for name, text in facts.items()
            if text
        )
        return f"<b>{html.escape(heading)}</b><table>{''.join(lines)}</table>"

    def _described(self) -> tuple[str, dict[str, str]]:
        data = self.adata if self._data is None else self._data.cells
        n_epochs = self.n_epochs_ if self.is_trained_ else None
        cells = "without adata" if data is None else f"{len(data)} cells"
        origin = self._facts.checkpoint
        return described(
            type(self).__name__, self._spec, self.module, n_epochs=n_epochs, cells=cells, checkpoint=origin
        )

    @classmethod
    def _require_setup(cls, adata: AnnData | None, registry: dict[str, Any] | None) -> None:
        """Raise unless there is a registry, or an AnnData that was set up."""
        name = cls.__name__
        if adata is None:
            if registry is None:
                raise OptionError(f"adata=None; pass an AnnData that {name}.setup_anndata(adata) was called on.")
            return
        check_adata(adata)
        try:
            cls._get_most_recent_anndata_manager(adata, required=True)
        except ValueError as error:
            copied = ", because it is a copy of the one that was set up" if "copy" in str(error) else ""
            raise OptionError(f"adata is not set up{copied}; call {name}.setup_anndata(adata) first.") from error

    def _source(self, adata: AnnData | Cells | str | os.PathLike[str] | None) -> Any:
        """Return `adata`, or what the model was trained on if None."""
        if adata is None:
            adata = self.adata if self._data is None else self._data.cells
        if adata is None:
            raise OptionError("adata=None but the model was loaded without adata; pass the cells.")
        return self._adata_of(adata, self._setup.get("modality"))

    @property
    def _setup(self) -> dict[str, Any]:
        return self.registry_["setup_args"]

    def cells(self, adata: AnnData | Cells | str | os.PathLike[str] | None = None) -> Cells:
        """Return cells (those of the training if None) over the genes of the model.

        Parameters
        ----------
        adata
            Annotated data with raw counts, cells, or the path of a store.

        Returns
        -------
        The cells, of which counts are read as they are needed.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> cells = model.cells()
        >>> len(cells), cells.vocab is model.vocab
        (60, True)
        """
        return self._open(self._source(adata))

    def _open(self, source: AnnData | Cells | str | os.PathLike[str], **options: Any) -> Cells:
        """Open cells over the genes of the model; `options` of :func:`open_cells` may name another vocabulary."""
        options = {"vocab": self._spec.vocab, **options}
        if isinstance(source, str | os.PathLike):
            # In a store counts and names are where they belong.
            setup = {} if is_collection(os.fspath(source)) else self._setup
            return open_cells(source, layer=setup.get("layer"), gene_key=setup.get("gene_key"), **options)
        if not isinstance(source, AnnData) and hasattr(source, "with_vocab"):
            return source.with_vocab(**options)
        check_adata(source)
        own = self._setup_of(source)
        setup = own or self._setup
        if not own:
            check_places(source, setup, type(self).__name__)
        return open_cells(source, layer=setup["layer"], gene_key=setup["gene_key"], **options)

    @classmethod
    def _setup_of(cls, adata: AnnData) -> dict[str, Any] | None:
        """Return where things are in `adata` by its own set-up, or None if it has none."""
        try:
            manager = cls._get_most_recent_anndata_manager(adata)
        except ValueError:  # a copy of an AnnData that was set up
            return None
        return None if manager is None else manager.registry["setup_args"]

    def _provenance(self, cells: Cells, n_latent: int) -> dict[str, Any]:
        """Return what an embedding was made with, as scalars that h5ad can hold."""
        kept = cells.counts_kept
        return {**self.made_with(), "n_latent": n_latent, "gene_overlap": cells.overlap, "counts_kept": kept}

    def made_with(self) -> dict[str, Any]:
        """Return what describes the model beside what it made, as scalars that h5ad can hold.

        Returns
        -------
        Name of a fact to its value.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> facts = model.made_with()
        >>> facts["architecture"], facts["n_epochs"]
        ('gene_pooling', 0)
        """
        return provenance(self._spec, n_epochs=self.n_epochs_, is_trained=bool(self.is_trained_))

    def _extend_history(self, figures: dict[str, list[float]]) -> None:
        """Append figures of epochs, one data frame a name, as in scvi-tools."""
        for name, values in figures.items():
            before = self.history_[name][name].tolist() if name in self.history_ else []
            index = pd.RangeIndex(len(before) + len(values), name="epoch")
            self.history_[name] = pd.DataFrame({name: [*before, *values]}, index=index)


def _family(cls: type[CellModel]) -> Iterator[type[CellModel]]:
    """Return a front class and all that are made from it; each keeps a record of its own of what was set up."""
    yield cls
    for other in cls.__subclasses__():
        yield from _family(other)
