"""What all front classes share: set-up, embedding, saving and loading."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
import torch
from anndata import AnnData
from scvi import REGISTRY_KEYS
from scvi.data import AnnDataManager
from scvi.model.base import BaseModelClass

from scforge._checks import check_count
from scforge._constants import OBSM_KEY, UNS_KEY
from scforge.data.cells import Cells
from scforge.data.checks import check_adata, check_obs_column
from scforge.data.sources import open_cells
from scforge.data.stream_remote import is_collection
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, ModelFileError, NotTrainedWarning, OptionError, first_line
from scforge.estimators.card import described, model_card, provenance
from scforge.estimators.fields import GeneField, ObsField
from scforge.estimators.mudata import MuDataModel
from scforge.estimators.registries import bare_registry, datamodule_registry
from scforge.estimators.saving import load_weights, read_folder, write_folder
from scforge.estimators.spec import ModelSpec
from scforge.estimators.tuning import Tuning
from scforge.finetuning.module import FineTunedModule
from scforge.finetuning.seen import SeenCells
from scforge.models._utils import count_parameters
from scforge.models.components.gene_vectors import check_filled
from scforge.tokenizers.base import Tokenizer
from scforge.training.datamodule import CellDataModule
from scforge.training.predict import embed

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FROM_DATA", "CellModel"]

FROM_DATA = "from_data"


class CellModel(MuDataModel, BaseModelClass):
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
        """
        setup_method_args = cls._get_setup_method_args(**locals())
        check_adata(adata)
        if adata.is_view:
            raise DataError("adata is a view of another AnnData; copy it first with adata = adata.copy().")
        check_obs_column(adata, batch_key, argument="batch_key")
        check_obs_column(adata, labels_key, argument="labels_key")
        fields: list[Any] = [GeneField(REGISTRY_KEYS.X_KEY, layer, gene_key)]
        if batch_key is not None:
            fields.append(ObsField(REGISTRY_KEYS.BATCH_KEY, batch_key, allow_missing=False))
        if labels_key is not None:
            fields.append(ObsField(REGISTRY_KEYS.LABELS_KEY, labels_key, allow_missing=True))
        manager = AnnDataManager(fields=fields, setup_method_args=setup_method_args)
        manager.register_fields(adata, **kwargs)
        cls.register_manager(manager)

    def get_latent_representation(
        self,
        adata: AnnData | Cells | str | os.PathLike[str] | None = None,
        *,
        key_added: str | None = OBSM_KEY,
        batch_size: int = 256,
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
            Key in ``adata.obsm``, and in ``adata.uns["scforge"]`` for what the embedding was made with. None writes
            nothing.
        batch_size
            Cells a batch.

        Returns
        -------
        Embedding in the order of ``adata.obs_names`` (of a store, in its order), float32, shape (n_obs, n_latent).

        Raises
        ------
        GeneMismatchError
            If `adata` has too few genes of the model.
        OptionError
            If the model waits for gene vectors that it was never given.
        """
        source = self._source(adata)
        check_filled(self.module)
        if not self.is_trained_:
            warnings.warn("The model is not trained; its embedding is random.", NotTrainedWarning, stacklevel=2)
        check_count("batch_size", batch_size, "cells")
        if key_added is not None and not (isinstance(key_added, str) and key_added):
            raise OptionError(f"key_added={key_added!r} is not a name; give text, or None to write nothing.")
        cells = self._open(source)
        objective = self._spec.build_objective()
        embedding = embed(self.module, cells, self._tokenizer, objective=objective, batch_size=batch_size)
        if key_added is not None and isinstance(source, AnnData):
            self._keep(source, key_added, embedding, cells)
        return embedding

    def _keep(self, adata: AnnData, key: str, embedding: np.ndarray, cells: Cells) -> None:
        """Write an embedding of cells, and what it was made with, into their AnnData."""
        made_with = self._provenance(cells, embedding.shape[1])
        adata.obsm[key] = embedding
        adata.uns[UNS_KEY] = {**adata.uns.get(UNS_KEY, {}), key: made_with}

    def save(self, dir_path: str | os.PathLike[str], *, overwrite: bool = False, save_anndata: bool = False) -> None:
        """Save the model to a folder: weights (safetensors), description (JSON), vocabulary (JSON), model card.

        Parameters
        ----------
        dir_path
            Folder to make. It appears whole or not at all.
        overwrite
            Replace a folder that exists.
        save_anndata
            Also write the training data, as ``adata.h5ad``.
        """
        if save_anndata and self.adata is None:
            raise OptionError("save_anndata=True but the model was loaded without adata.")
        extra = (lambda folder: self.adata.write_h5ad(folder / "adata.h5ad")) if save_anndata else None
        self._write(dir_path, overwrite=overwrite, extra=extra)

    def _write(
        self,
        dir_path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        extra: Any = None,
        weights: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Write a model folder with these weights, or those of the module."""
        content = {
            "class": type(self).__name__,
            **self._spec.to_json(),
            "setup": dict(self.registry_["setup_args"]),
            "seed": self.seed,
            "is_trained": self.is_trained_,
            "n_epochs": self.n_epochs_,
            "history": {name: frame[name].tolist() for name, frame in self.history_.items()},
        }
        write_folder(
            dir_path,
            module=self.module,
            vocab=self._spec.vocab,
            content=content,
            seen=self._seen,
            card=model_card(self._spec, self.n_epochs_, count_parameters(self.module)),
            overwrite=overwrite,
            extra=extra,
            weights=weights,
        )

    @classmethod
    def load(
        cls, dir_path: str | os.PathLike[str], adata: AnnData | None = None, *, device: str | torch.device = "cpu"
    ) -> Self:
        """Load a model that :meth:`save` wrote.

        Parameters
        ----------
        dir_path
            The folder.
        adata
            Data to go on with; unless it is set up already, it is set up as the training data were, without the columns
            of obs that it lacks. None: pass the cells to :meth:`get_latent_representation`.
        device
            Where to put the module.

        Raises
        ------
        MissingFileError, ModelFileError
            If the folder, or what is in it, cannot be used.
        GeneMismatchError
            If `adata` has too few genes of the model.
        """
        config, vocab, weights = read_folder(dir_path)
        if (made_by := config["class"]) != cls.__name__:
            raise ModelFileError(
                f"dir_path={str(dir_path)!r} holds a model of the class {made_by!r}; "
                f"load it with scforge.models.{made_by}.load."
            )
        setup = config["setup"]
        registry = bare_registry(cls.__name__, setup) if adata is None else None
        if adata is not None:
            adata = cls._set_up_as(adata, setup)
            check_adata(adata)
            if cls._setup_of(adata) is None:
                present = {key: setup[key] if setup[key] in adata.obs else None for key in ("batch_key", "labels_key")}
                own = {key: value for key, value in setup.items() if key != "modality"}
                cls.setup_anndata(adata, **(own | present))
        tuning = Tuning.from_json(config.get("tuning"), source=str(dir_path))
        model = cls._of_parts(
            config,
            vocab,
            adata=adata,
            registry=registry,
            seed=config["seed"],
            tuning=tuning,
        )
        load_weights(model.module, weights, source=str(dir_path))
        try:
            model.to_device(device)
        except (AssertionError, RuntimeError) as error:
            raise OptionError(f"device={str(device)!r} cannot be used: {first_line(error)}") from error
        model._seen = None if tuning is None else SeenCells.load(dir_path, tuning.split.get("cells"))
        model.is_trained_ = config["is_trained"]
        model._extend_history(config["history"])
        model.n_epochs_ = config["n_epochs"]
        return model

    @classmethod
    def _of_parts(cls, parts: Mapping[str, Any], vocab: GeneVocab, **options: Any) -> Self:
        """Make a model of what :meth:`ModelSpec.to_json` says, with random weights."""
        architecture = dict(parts["architecture"])
        names = architecture.pop("name"), parts["tokenizer"], parts["objective"]
        adata = options.pop("adata", None)
        return cls(adata, *names, vocab=vocab, n_top_genes=0, **options, **architecture)

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
        data = self.adata if self._data is None else self._data.cells
        n_epochs = self.n_epochs_ if self.is_trained_ else None
        cells = "without adata" if data is None else f"{len(data)} cells"
        return described(type(self).__name__, self._spec, self.module, n_epochs=n_epochs, cells=cells)

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
        """Return cells (those of the training if None) over the genes of the model."""
        return self._open(self._source(adata))

    def _open(self, source: AnnData | Cells | str | os.PathLike[str]) -> Cells:
        vocab = self._spec.vocab
        if isinstance(source, str | os.PathLike):
            # In a store counts and names are where they belong.
            setup = {} if is_collection(os.fspath(source)) else self._setup
            return open_cells(source, vocab, layer=setup.get("layer"), gene_key=setup.get("gene_key"))
        if not isinstance(source, AnnData) and hasattr(source, "with_vocab"):
            return source.with_vocab(vocab)
        check_adata(source)
        setup = self._setup_of(source) or self._setup
        return open_cells(source, vocab, layer=setup["layer"], gene_key=setup["gene_key"])

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
        """Return what describes the model beside what it made, as scalars that h5ad can hold."""
        return provenance(self._spec, n_epochs=self.n_epochs_, is_trained=bool(self.is_trained_))

    def _extend_history(self, figures: dict[str, list[float]]) -> None:
        """Append figures of epochs, one data frame a name, as in scvi-tools."""
        for name, values in figures.items():
            before = self.history_[name][name].tolist() if name in self.history_ else []
            index = pd.RangeIndex(len(before) + len(values), name="epoch")
            self.history_[name] = pd.DataFrame({name: [*before, *values]}, index=index)
