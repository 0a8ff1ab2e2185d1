"""Base of all model classes: setup, embedding, saving and loading."""

from __future__ import annotations

import copy
import html
import inspect
import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import pandas as pd
import torch
from anndata import AnnData
from mudata import MuData
from scvi import REGISTRY_KEYS
from scvi.data import AnnDataManager
from scvi.data._constants import _MANAGER_UUID_KEY, _SCVI_UUID_KEY
from scvi.model.base import BaseModelClass
from scvi.model.base._base_model import BaseModelMetaClass

from scforge._checks import check_key, check_share
from scforge._columns import texts_of
from scforge._constants import AUTO_KEY, OBSM_KEY, QUERY_KEY, UNS_KEY
from scforge._registry import check_options
from scforge._version import __version__
from scforge.data.cells import Cells, CellSource, choose_chunks
from scforge.data.checks import (
    check_adata,
    check_obs_column,
    content_mark,
    gene_names,
    inherited_batch_key,
    warn_if_transposed,
)
from scforge.data.genes import map_names
from scforge.data.readers import check_modality
from scforge.data.remote import is_collection
from scforge.data.sources import open_cells
from scforge.data.store import StoreCells
from scforge.data.vocab import GeneVocab
from scforge.errors import (
    DataError,
    ModelFileError,
    NotTrainedWarning,
    OptionError,
    TrainingError,
    first_line,
    suggest,
    warn,
)
from scforge.estimators.card import CardFacts, Origin, in_epochs, model_card, shown
from scforge.estimators.serialize import (
    BASE,
    CORRECTION,
    LABELED,
    LANDMARKS,
    StoredModel,
    load_weights,
    part_of,
    write_folder,
)
from scforge.estimators.setup import (
    LAST,
    GeneField,
    ObsField,
    adopted,
    bare_registry,
    check_setup_keys,
    class_in_place_of,
    datamodule_registry,
    shared,
)
from scforge.estimators.spec import ModelSpec, defaults_for
from scforge.finetuning.base import TASKS, Task
from scforge.finetuning.held_out import HeldOutRegistry
from scforge.finetuning.mapping import FineTunedModule
from scforge.finetuning.new_cells import LabeledCells
from scforge.hub.finding import origin_of
from scforge.models._utils import count_parameters, undrawn
from scforge.models.components.gene_vectors import check_filled
from scforge.models.registry import MODELS
from scforge.tokenizers.base import TOKENIZERS, Tokenizer
from scforge.training.correction import N_CELLS, BatchCorrection
from scforge.training.datamodule import CellDataModule
from scforge.training.objectives.base import OBJECTIVES, Objective
from scforge.training.predict import embed

if TYPE_CHECKING:
    from torch import nn


_N_LANDMARKS = 2_000
"""Maximum number of training cells whose embeddings are saved with a model."""
_MAX_OPENED = 2
"""Maximum number of AnnData objects whose cells a model keeps open, including the training data."""

_OF_SCVI = {
    **dict.fromkeys(
        ("categorical_covariate_keys", "continuous_covariate_keys"),
        "scforge does not support covariates, so use batch_key",
    ),
    "size_factor_key": "scforge uses the sum of the counts of a cell as its size factor, so omit size_factor_key",
    "unlabeled_category": "mark cells without a label by NaN in the labels_key column, and omit unlabeled_category",
    "use_raw": "pass the layer with raw counts as layer, or adata.raw.to_adata() as adata",
}
"""A mapping from arguments of scvi-tools' and scanpy's functions to advice for ``setup_anndata``."""

_OF_POSTERIOR = {
    "return_dist": "an embedding of this class has no variances, so omit return_dist, or use scforge.models.ScDiVa",
    **dict.fromkeys(("give_mean", "mc_samples"), "the embedding is always a mean, so omit it"),
    "use_raw": "counts are read from the place that setup_anndata registered, so pass adata.raw.to_adata() as adata",
}
"""A mapping from arguments of scvi-tools' and scanpy's functions to advice for ``get_latent_representation``."""

_FOLLOWS = frozenset(("max_seq_len", "n_batches", "n_special"))
"""Options of an architecture that follow from tokenizer, batches and vocabulary."""


class _History(dict[str, pd.DataFrame]):
    """The scores of the epochs by name; for a name of scvi-tools, the error lists the names."""

    def __missing__(self, name: str) -> pd.DataFrame:
        advice = suggest(name, self) if self else "; train the model first"
        raise OptionError(f"history has no {name!r}{advice}.")


def positions(indices: Sequence[int] | np.ndarray, n_cells: int) -> np.ndarray:
    """Convert positions or a mask of `n_cells` cells to positions, int64. Raises an OptionError if they are invalid."""
    found = np.asarray(indices)
    wrong = found.ndim != 1 or found.dtype.kind not in "biu"
    if found.dtype == bool and not wrong:
        wrong, found = len(found) != n_cells, np.flatnonzero(found)
    if wrong or not len(found) or found.min() < 0 or found.max() >= n_cells:
        raise OptionError(
            f"are not valid positions of {n_cells} cells; pass integers from 0 to {n_cells - 1}, or a boolean mask.",
            argument="indices",
        )
    return found.astype(np.int64)


class _Absent:
    """A scvi-tools attribute that a model class does not have; accessing it raises an error with advice."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, model: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} has no {self._name}; {self._instead}.")


class _Front(BaseModelMetaClass):
    """Metaclass whose ``dir`` omits attributes that only scvi-tools supports."""

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if not cls._lacks(name)]

    def _lacks(cls, name: str) -> bool:
        return isinstance(inspect.getattr_static(cls, name, None), _Absent)


def _changed(options: Mapping[str, Any], owner: type, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the options that differ from `defaults` and the defaults of the constructor of `owner`."""
    known = {name: parameter.default for name, parameter in inspect.signature(owner).parameters.items()}
    known |= defaults or {}
    return {name: value for name, value in options.items() if name not in _FOLLOWS and known.get(name, ...) != value}


def _with_options(name: str, options: Mapping[str, Any]) -> str:
    return f"{name} ({shown(options)})" if options else name


class CellModel(BaseModelClass, metaclass=_Front):
    """Base class for the model classes, built on scvi-tools' ``BaseModelClass`` and ``AnnDataManager``.

    The constructor of a subclass resolves a specification, and passes it to :meth:`_assemble`; a subclass also
    implements ``train``. Models that are loaded or fine-tuned come from :meth:`_of_spec`, without this constructor.
    """

    module: nn.Module
    seed: int
    _spec: ModelSpec
    _tokenizer: Tokenizer
    _objective: Objective
    is_trained_: bool
    _data: CellDataModule | None = None
    _query: Any = None
    """Query cells of the model, if it is also trained on other cells."""
    _seen: HeldOutRegistry | None = None
    _landmarks: torch.Tensor | None = None
    """Embeddings of sampled training cells, shape (S, D), onto which queries are mapped."""
    _correction: BatchCorrection | None = None
    """Correction of the embedding for the batches of the training cells."""
    _reference: CellSource | None = None
    """Labeled training cells that were saved with the model."""
    _labeled: LabeledCells | None = None
    """Training cells of a fine-tuned classifier, in the embedding of its base model if that maps queries."""
    trainer = _Absent("use model.history for the training metrics, and callbacks=[...] to access Lightning's Trainer")
    prepare_query_anndata = _Absent("genes are matched by name, so call load_query_data(query, reference) directly")
    get_normalized_expression = _Absent("use scforge.models.ScDiVa, which decodes expression")
    differential_abundance = _Absent(
        "embed the cells with scforge, and compute differential abundance with another package"
    )
    differential_expression = _Absent(
        "label the cells with scforge, and compare their counts with scanpy.tl.rank_genes_groups, or per donor with a "
        "package for pseudobulks"
    )
    posterior_predictive_sample = _Absent(
        "scforge models do not define the count likelihood that scvi.criticism requires"
    )
    get_elbo, get_marginal_ll, get_reconstruction_error = (
        _Absent("scforge models do not define the count likelihood that it requires; use model.history for the losses")
        for _ in range(3)
    )
    convert_legacy_save = _Absent(
        "scvi-tools stores such folders as pickles, which can run code and are never opened; save the model with "
        "model.save"
    )
    setup_annbatch = _Absent(
        "convert the files with scforge.data.convert, and pass scforge.training.CellDataModule(store) as datamodule"
    )
    minify_adata = _Absent(
        "call scforge.workflows.embed_to(model, adata, output, counts=False) for a file without genes and counts"
    )

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
        """Whether Ctrl-C stopped the last training run."""
        self.history_: dict[str, pd.DataFrame] = _History()
        self._opened: list[tuple[weakref.ref[AnnData], tuple[Any, ...], CellSource]] = []
        """AnnData objects, with fingerprints to detect changes and their cells over the genes of the model."""

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
        """Register and validate the fields of `adata` that the model uses.

        Parameters
        ----------
        adata
            Annotated data with raw counts. Only ``_scvi_...`` entries are added to it.
        layer
            Key in ``adata.layers`` with raw counts. If None, reads ``adata.X``.
        gene_key
            Column of ``adata.var`` with the gene names. If None, reads ``adata.var_names``.
        batch_key
            Column of ``adata.obs`` with the batch of each cell. Highly variable genes are chosen within batches.
        labels_key
            Column of ``adata.obs`` with the label of each cell; values may be missing. Pretraining does not use it.
        **kwargs
            ``source_registry`` and the transfer options of :class:`scvi.data.AnnDataManager`.

        Raises
        ------
        DataError
            If counts, gene names or columns are invalid.

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
            raise DataError("is a view of another AnnData; copy it first with adata = adata.copy().", argument="adata")
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
            # A copy, or read from a file of one: with the same id it would replace the other.
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
        correction: float = 0.0,
        **of_others: Any,
    ) -> np.ndarray:
        """Embed cells, and write the embedding into ``adata.obsm``.

        Parameters
        ----------
        adata
            Cells to embed. If None, uses the training cells. Without :meth:`setup_anndata`, counts and gene names are
            read from the same locations as in the training data. Genes are matched by name. Cells from
            :func:`scforge.data.open_cells`, or from a path or URL that it accepts, are read on demand, and nothing is
            written.
        key_added
            Key in ``adata.obsm`` for the embedding, and in ``adata.uns["scforge"]`` for its settings. ``"auto"`` means
            ``"X_scforge"``, or ``"X_scforge_query"`` for a query model (:meth:`Encoder.load_query_data`) whose encoder
            was changed by training. If None, nothing is written.
        batch_size
            Number of cells per batch.
        indices
            Positions of the cells to embed, or a boolean mask. If given, nothing is written. If None, embeds all cells.
        correction
            How strongly the embedding is corrected for the batches that the model was trained on, from 0 (not at all)
            to 1. More correction mixes batches better and conserves less biology. The correction scales principal
            components of the embedding and applies Harmony [1]_, as fitted after training. Query models only scale,
            because their cells are mapped already.
        **of_others
            Raises an error with advice for arguments of other packages, e.g. `return_dist` of scvi-tools.

        Returns
        -------
        The embedding in the order of ``adata.obs_names`` (or of the store), float32, shape (n_obs, n_latent).

        Raises
        ------
        GeneMismatchError
            If `adata` contains too few genes of the model.
        OptionError
            If the gene vectors of the model are missing, an argument is unknown, or `correction` is above 0 but the
            model was trained on a single batch or the cells have no batches.

        References
        ----------
        .. [1] Korsunsky et al. (2019), Nature Methods 16, 1289-1296.

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
        check_key("key_added", key_added)
        known = ("adata", "key_added", "batch_size", "indices", "correction")
        check_options("argument", "get_latent_representation", of_others, known, _OF_POSTERIOR)
        source = self._ready(adata, "its embedding is")
        cells = self._open(source)
        rows = None if indices is None else positions(indices, len(cells))
        codes = self._codes_to_correct(source, cells, correction, rows)
        embedding = embed(
            self.module, cells, self._tokenizer, objective=self._objective, batch_size=batch_size, rows=rows
        )
        embedding = self._corrected(embedding, codes if codes is None or rows is None else codes[rows], correction)
        if key_added is not None and rows is None and isinstance(source, AnnData):
            self._keep(source, key_added, embedding, cells, correction=correction)
        return embedding

    def _codes_to_correct(
        self, source: Any, cells: Cells, correction: float, rows: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Return codes of the batches of all cells, int64, shape (N,), or None if `correction` is 0."""
        fitted = self._correction_for(correction)
        if fitted is None:
            return None
        if self._is_query:
            return np.full(len(cells), -1, dtype=np.int64)  # the mapping has moved them
        # Other cells may have their batches in another column, but a task has its own.
        setup = self._setup_of(source) if self._spec.tuning is None else None
        return fitted.codes(cells, (setup or {}).get("batch_key") or self._corrected_key, rows)

    def _correction_for(self, correction: float) -> BatchCorrection | None:
        """Return the correction, or None if `correction` is 0. Raises an OptionError if the model has no correction."""
        if not check_share("correction", correction):
            return None
        if self._correction is None:
            reason = (
                "models that were trained on at least two batches (batch_key in setup_anndata) have one"
                if self._spec.tuning is None
                else "fine-tuning changes the embedding that its base model corrects"
            )
            raise OptionError(f", but the model has no correction: {reason}; pass correction=0.", correction=correction)
        return self._correction

    @property
    def _corrected_key(self) -> str | None:
        """The column of the batches that the embedding is corrected for; that of the setup, or of the task."""
        tuning = self._spec.tuning
        if tuning is None:
            return self._setup.get("batch_key")
        is_reference = tuning.task == "integration" and tuning.task_options.get("n_reference") is None
        return tuning.task_options["batch_key"] if is_reference else None

    def _corrected(self, embeddings: np.ndarray, codes: np.ndarray | None, correction: float) -> np.ndarray:
        """Return corrected embeddings of cells with the batches `codes`, or the same without codes."""
        if codes is None or self._correction is None:
            return embeddings
        return self._correction.apply(embeddings, codes, correction)

    def _keep(self, adata: AnnData, key: str, embedding: np.ndarray, cells: Cells, *, correction: float = 0.0) -> None:
        """Write an embedding and its settings into the AnnData of the cells."""
        key = self._obsm_key if key == AUTO_KEY else key
        made_with = self._provenance(cells, embedding.shape[1], correction=correction)
        adata.obsm[key] = embedding
        adata.uns[UNS_KEY] = {**adata.uns.get(UNS_KEY, {}), key: made_with}

    @property
    def _obsm_key(self) -> str:
        """Key of the embedding in obsm, which differs if training moved a query model out of its reference space."""
        tuning = self._spec.tuning
        adapted = tuning is not None and self._is_query and tuning.freeze is not True
        return QUERY_KEY if adapted and self.n_epochs_ else OBSM_KEY

    @property
    def _is_query(self) -> bool:
        """Whether the model was created by ``load_query_data``."""
        return self._spec.tuning is not None and bool(self._spec.tuning.base.get("reference"))

    @property
    def objective(self) -> Objective:
        """The objective of the model, or the task of a fine-tuned model."""
        return self._objective

    @property
    def _pretraining(self) -> Objective:
        """The pretraining objective."""
        pretraining = self._objective.pretraining if isinstance(self._objective, Task) else None
        return self._objective if pretraining is None else pretraining

    @property
    def _backbone(self) -> nn.Module:
        """The architecture module, without the head of a fine-tuned model."""
        return self.module.encoder if isinstance(self.module, FineTunedModule) else self.module

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.module.parameters()).device

    def to_device(self, device: str | torch.device | int) -> None:
        """Move the model to a device.

        Parameters
        ----------
        device
            Name of the device, e.g. ``"cuda:0"`` or ``"cpu"``.

        Raises
        ------
        OptionError
            If the device is not available.

        Examples
        --------
        >>> import scforge
        >>> model = scforge.models.Encoder.load("scforge://pbmc3k-light")
        >>> model.to_device("cpu")
        >>> model.device
        device(type='cpu')
        """
        try:
            super().to_device(device)
        except (AssertionError, RuntimeError, TypeError) as error:
            raise OptionError(f"cannot be used: {first_line(error).rstrip('.')}.", device=str(device)) from error

    @property
    def vocab(self) -> GeneVocab:
        """The genes of the model."""
        return self._spec.vocab

    @property
    def spec(self) -> ModelSpec:
        """Names and options of the architecture, tokenizer and objective."""
        return self._spec

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self._tokenizer

    def __repr__(self) -> str:
        """Return a summary with the options that differ from their defaults; :attr:`spec` contains all options."""
        heading, facts = self._described(_changed)
        return "\n".join([heading, *(f"    {name}: {text}" for name, text in facts.items() if text)])

    def _repr_html_(self) -> str:
        """Return an HTML summary of the model for notebooks."""
        heading, facts = self._described(lambda options, *_: options)
        keys = ("layer", "gene_key", "batch_key", "labels_key")
        facts["set up with"] = ", ".join(f"{key}={self._setup[key]!r}" for key in keys if self._setup.get(key))
        left = "style='text-align: left; vertical-align: top'"
        cells = ([html.escape(part) for part in fact] for fact in facts.items() if fact[1])
        lines = (f"<tr><th {left}>{name}</th><td {left}>{text}</td></tr>" for name, text in cells)
        return f"<b>{html.escape(heading)}</b><table>{''.join(lines)}</table>"

    def _described(self, chosen: Callable[..., Mapping[str, Any]]) -> tuple[str, dict[str, str]]:
        """Return a summary of the model: a heading, and a mapping from name to property.

        `chosen` returns the options to show, given all options, their class, and defaults in addition to its own.
        """
        spec, tuning, checkpoint = self._spec, self._spec.tuning, self._facts.checkpoint
        data = self.adata if self._data is None else self._data.cells
        trained = f"trained for {in_epochs(self.n_epochs_)}" if self.is_trained_ else "not trained"
        n_all, n_trained = count_parameters(self.module, trainable_only=False), count_parameters(self.module)
        frozen = "" if n_all == n_trained else f", {n_trained:,} of them trained"
        origin = None if checkpoint is None else f"weights of {checkpoint.replace('`', '')}"
        if tuning is not None and self._is_query:
            what = "mapped onto a" if tuning.freeze is True else "query model of a"
            origin = f"{what} reference trained for {in_epochs(tuning.base['n_epochs'])}"
            frozen = frozen if self.n_epochs_ else ""
        if origin is not None:
            trained = f"{origin}, then {trained}" if self.n_epochs_ else origin
        defaults = defaults_for(spec.architecture, spec.model_options)
        tokenizer = chosen(spec.tokenizer_options, TOKENIZERS.get(spec.tokenizer), defaults.tokenizer_options)
        facts = {
            "data": f"{'without adata' if data is None else f'{len(data)} cells'}, {spec.vocab}",
            "tokenizer": _with_options(spec.tokenizer, tokenizer),
            "objective": _with_options(spec.objective, chosen(spec.objective_options, OBJECTIVES.get(spec.objective))),
            "options": shown(chosen(spec.model_options, MODELS.get(spec.architecture), defaults.options)),
        }
        if tuning is not None:
            facts["task"] = _with_options(tuning.task, chosen(tuning.task_options, TASKS.get(tuning.task)))
            facts["lora"] = shown(tuning.lora or {})
        return f"{type(self).__name__}({spec.architecture}, {n_all:,} parameters{frozen}, {trained})", facts

    @classmethod
    def _require_setup(cls, adata: AnnData | None, registry: dict[str, Any] | None) -> None:
        """Raise an error if neither a registry nor an AnnData with setup is given."""
        if adata is None and registry is not None:
            return
        check_adata(adata)
        assert adata is not None
        try:
            cls._get_most_recent_anndata_manager(adata, required=True)
        except ValueError as error:
            why = ", because it is a copy of an AnnData that was set up" if _SCVI_UUID_KEY in adata.uns else ""
            raise OptionError(
                f"is not set up{why}; call {cls.__name__}.setup_anndata(adata) first.", argument="adata"
            ) from error

    def _source(self, adata: AnnData | Cells | str | os.PathLike[str] | None) -> Any:
        """Return `adata`, or the training data if None."""
        if adata is None:
            adata = self._query
        if adata is None:
            adata = self.adata if self._data is None else self._data.cells
        if adata is None:
            raise OptionError(", but the model was loaded without adata; pass the cells.", adata=None)
        return self._adata_of(adata, self._setup.get("modality"))

    def _ready(
        self, adata: AnnData | Cells | str | os.PathLike[str] | None, what: str, *, needs_cells: bool = True
    ) -> Any:
        """Return the source of the cells (None if not needed), and warn if `what` is random without training."""
        source = self._source(adata) if needs_cells else None
        check_filled(self.module)
        if not self.is_trained_:
            warn(f"The model is not trained; {what} random.", NotTrainedWarning)
        return source

    @property
    def _setup(self) -> dict[str, Any]:
        return self.registry_["setup_args"]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled."""
        raise OptionError(
            f"a model cannot be pickled; call model.save(folder), and {type(self).__name__}.load(folder) elsewhere."
        )

    def __copy__(self) -> Self:
        """Return a model that shares everything with this one."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent model."""
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def _cells(self, adata: AnnData | Cells | str | os.PathLike[str] | None = None) -> Cells:
        """Open cells over the genes of the model. If None, uses the training cells."""
        return self._open(self._source(adata))

    def _open(self, source: AnnData | Cells | str | os.PathLike[str], **options: Any) -> Cells:
        """Open cells over the genes of the model, or over another vocabulary in `options` of :func:`open_cells`."""
        is_own = not options
        options = {"vocab": self._spec.vocab, **options}
        cells: Any
        if isinstance(source, str | os.PathLike):
            # A store always has counts and names in the same places.
            setup = {} if is_collection(os.fspath(source)) else self._setup
            cells = open_cells(source, layer=setup.get("layer"), gene_key=setup.get("gene_key"), **options)
        elif not isinstance(source, AnnData) and hasattr(source, "with_vocab"):
            cells = source if source.vocab is options["vocab"] else source.with_vocab(**options)
        else:
            check_adata(source)
            setup = self._setup_of(source) or {}
            if not setup:
                setup = self._setup
                check_setup_keys(source, setup, type(self).__name__)
            keys = {"layer": setup["layer"], "gene_key": setup["gene_key"]}
            cells = self._opened_once(source, **keys) if is_own else open_cells(source, **keys, **options)
        uses_vocabulary = is_own and getattr(self._tokenizer, "library_size", None) == "vocabulary"
        return cells.over_vocabulary() if uses_vocabulary and isinstance(cells, CellSource | StoreCells) else cells

    def _opened_once(self, adata: AnnData, layer: str | None, gene_key: str | None) -> Cells:
        """Return the cached cells of an AnnData, and reopen them if counts or genes have changed."""
        matrix = None if adata.is_view else adata.X if layer is None else adata.layers.get(layer)
        counts = None if matrix is None else content_mark(matrix)
        if counts is None:  # on disk, or not there
            return open_cells(adata, self._spec.vocab, layer=layer, gene_key=gene_key)
        mark = (layer, gene_key, counts, zlib.crc32(gene_names(adata, gene_key).view(np.uint8)))
        obs = adata.obs.copy(deep=False)
        for owner, its_mark, known in self._opened:
            if owner() is adata and its_mark == mark and known.vocab is self._spec.vocab:
                return replace(known, obs=obs)
        cells: Any = open_cells(adata, self._spec.vocab, layer=layer, gene_key=gene_key)
        kept = [one for one in self._opened if one[0]() is not None and one[0]() is not adata]
        self._opened[:] = [*kept, (weakref.ref(adata), mark, cells)][-_MAX_OPENED:]
        return cells

    @classmethod
    def _setup_of(cls, source: Any) -> dict[str, Any] | None:
        """Return the fields that an AnnData was set up with, or None if it is not set up, or for other sources."""
        if not isinstance(source, AnnData):
            return None
        try:
            manager = cls._get_most_recent_anndata_manager(source)
        except ValueError:  # a copy of an AnnData that was set up
            return None
        return None if manager is None else manager.registry["setup_args"]

    def _provenance(self, cells: Cells, n_latent: int, *, correction: float = 0.0) -> dict[str, Any]:
        """Return the settings of an embedding as scalars that h5ad files can store."""
        kept = {"gene_overlap": cells.overlap, "counts_kept": cells.counts_kept}
        return {**self._made_with(), "n_latent": n_latent, **kept, "correction": float(correction)}

    def _made_with(self) -> dict[str, Any]:
        """Return a description of the model to store with its results, as scalars that h5ad files can store."""
        spec = self._spec
        return {
            "scforge_version": __version__,
            "architecture": spec.architecture,
            "tokenizer": spec.tokenizer,
            "objective": spec.objective,
            **({} if spec.tuning is None else {"task": spec.tuning.task}),
            "n_epochs": self.n_epochs_,
            "is_trained": bool(self.is_trained_),
            "vocab_hash": spec.vocab.hash,
        }

    def _embed_training_cells(self, cells: Cells, rows: np.ndarray, batch_size: int) -> None:
        """Embed samples of the training cells: those onto which queries are mapped, and those of several batches."""
        embed_sample = partial(
            embed, self.module, tokenizer=self._tokenizer, objective=self._objective, batch_size=batch_size
        )
        tuning = self._spec.tuning
        is_changed = tuning is None or (tuning.task == "adaptation" and tuning.freeze is not True)
        if is_changed and self._pretraining.maps_queries:
            self._landmarks = torch.from_numpy(embed_sample(cells.sample(_N_LANDMARKS, rows=rows, seed=self.seed)))
        if (key := self._corrected_key) is None:
            return
        try:
            batches = texts_of(cells.column(key), key=key, argument="batch_key")
        except DataError:  # a store without the column
            return
        chosen = choose_chunks(len(cells), N_CELLS, cells.chunk_size, rows=rows, groups=np.asarray(batches.codes)[rows])
        sampled = cells.sample(N_CELLS, rows=chosen)
        sampled = sampled.take(sampled.content_order())  # clusters depend on the order
        self._correction = BatchCorrection.fit(embed_sample(sampled), sampled, key, seed=self.seed)

    def _extend_history(self, figures: dict[str, list[float]]) -> None:
        """Append the scores of epochs to the history, with one data frame per name, as in scvi-tools."""
        for name, values in figures.items():
            both = [*(self.history_[name][name] if name in self.history_ else ()), *values]
            self.history_[name] = pd.DataFrame({name: both}).rename_axis("epoch")

    _facts: CardFacts = CardFacts()
    _origin: Origin | None = None
    _base: CellModel | None = None

    def _write(
        self,
        dir_path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        adata: AnnData | None = None,
        reference: CellSource | None = None,
        extra: Any = None,
        weights: dict[str, torch.Tensor] | None = None,
        card: str | None = None,
    ) -> None:
        """Write a model folder. If None, uses the weights of the module and a generated card."""
        weights = self._tensors() if weights is None else weights
        for name, _ in self.module.named_parameters():
            if name in weights and not weights[name].isfinite().all():  # loading would refuse it
                raise TrainingError(
                    f"the model has NaN or infinite weights in {name!r} and is not saved; train it again with a lower "
                    "lr, or load an earlier checkpoint."
                )
        write_folder(
            dir_path,
            weights,
            vocab=self._spec.vocab,
            content=self._content(),
            seen=self._seen,
            card=self._card(reference=reference) if card is None else card,
            overwrite=overwrite,
            adata=adata,
            reference=reference,
            extra=extra,
        )

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights and the other tensors to save."""
        found = dict(self.module.state_dict())
        if self._landmarks is not None:
            found[LANDMARKS] = self._landmarks
        if self._correction is not None:
            found |= {f"{CORRECTION}{name}": value for name, value in self._correction.tensors().items()}
        if self._labeled is not None:
            found |= {f"{LABELED}{name}": value for name, value in self._labeled.tensors().items()}
            if self._labeled.in_base and (base := self._mapping_base) is not None:
                found |= {f"{BASE}{name}": value for name, value in base._tensors().items()}
        return found

    @property
    def _mapping_base(self) -> CellModel | None:
        """The model before fine-tuning, if new cells can be mapped onto its training cells."""
        base, tuning = self._base, self._spec.tuning
        if base is None or tuning is None or base.spec.tuning is not None or base._landmarks is None:
            return None
        return base if base.n_epochs_ == tuning.base.get("n_epochs") else None  # it may have been trained further

    def _current_origin(self) -> Origin | None:
        """Return the location of the model, or None if it has no location or was trained since."""
        origin = self._origin
        return origin if origin is not None and origin.n_epochs == self.n_epochs_ else None

    def _origin_at(self, folder: str | os.PathLike[str]) -> Origin:
        """Return the location of the model with `folder` as its folder."""
        return replace(self._current_origin() or Origin(), folder=Path(folder).resolve(), n_epochs=self.n_epochs_)

    def _card_facts(self) -> CardFacts:
        """Return the facts for the card of the current model, including facts about its base model."""
        facts = self._facts
        if facts.n_epochs != self.n_epochs_:
            facts = replace(facts, table="", scores=())
        below = self._base
        if below is None:
            return facts
        base = below._current_origin()
        if base is not None and base.name is not None and not (facts.base is not None and facts.base.is_given):
            facts = replace(facts, base=Origin(base.name, base.revision))
        return replace(facts, checkpoint=facts.checkpoint or below._card_facts().checkpoint)

    def _base_origin(self, folder: Path) -> dict[str, Any] | None:
        """Return the location of the base model for adapters in `folder`, or None if it has no location.

        If the base model has no name on a hub, its location is a relative path, so both folders can be moved together.
        """
        named, base = self._card_facts().base, None if self._base is None else self._base._current_origin()
        if named is not None:
            return named.to_json()
        if base is None or base.folder is None:
            return None
        way = os.path.relpath(base.folder, folder.resolve())
        return Origin(f"./{Path(way).as_posix()}").to_json()

    def _content(self) -> dict[str, Any]:
        """Return a JSON-safe description of the model."""
        facts = self._card_facts().to_json()
        base = self._mapping_base if self._labeled is not None and self._labeled.in_base else None
        correction = self._correction if base is None else base._correction
        return {
            "class": type(self).__name__,
            **self._spec.to_json(),
            "setup": dict(self.registry_["setup_args"]),
            "seed": self.seed,
            "is_trained": self.is_trained_,
            "n_epochs": self.n_epochs_,
            "history": self._history_lists(),
            **({} if correction is None else {"corrected_batches": correction.batches}),
            **({"card": facts} if facts else {}),
        }

    def _card(self, *, name: str | None = None, is_adapter: bool = False, reference: CellSource | None = None) -> str:
        """Return the text of ``README.md``.

        Parameters
        ----------
        name
            Name to load the model by. If None, the card refers to its own folder.
        is_adapter
            Whether the folder contains only adapters.
        reference
            Labeled cells in the folder.
        """
        last = {key: frame[key].iloc[-1] for key, frame in self.history_.items() if len(frame)}
        return model_card(
            self._spec,
            n_epochs=self.n_epochs_,
            is_trained=bool(self.is_trained_),
            parameters=count_parameters(self.module, trainable_only=is_adapter),
            last_figures=last,
            facts=self._card_facts(),
            name=name,
            is_adapter=is_adapter,
            reference=reference,
        )

    @classmethod
    def _of_folder(
        cls,
        dir_path: str | os.PathLike[str],
        stored: StoredModel,
        *,
        adata: AnnData | None,
        device: str | torch.device,
    ) -> Any:
        """Create a model from the content of a folder."""
        config, spec, weights, is_checked = stored
        made_by = config["class"]
        found = class_in_place_of(cls, made_by, spec.architecture)
        if found is None:
            what = f"dir_path={str(dir_path)!r} contains a model of the class {made_by!r}"
            raise ModelFileError(f"{what}; load it with scforge.models.{made_by}.load.")
        cls = found
        setup = config["setup"]
        registry = bare_registry(cls.__name__, setup) if adata is None else None
        if adata is not None:
            adata = cls._set_up_as(adata, setup)
            check_adata(adata)
            if cls._setup_of(adata) is None:
                own = {key: value for key, value in setup.items() if key != "modality"}
                own["batch_key"] = inherited_batch_key(adata.obs, setup["batch_key"])
                own["labels_key"] = setup["labels_key"] if setup["labels_key"] in adata.obs else None
                cls.setup_anndata(adata, **own)
        # A constructor that computes with its weights has to draw them.
        how: dict[str, Any] = {"seed": config["seed"], "draws": not is_checked}
        model = cls._of_spec(spec, adata=adata, registry=registry, **how)
        load_weights(model.module, weights, source=str(dir_path), known_finite=is_checked)
        model._landmarks = weights.get(LANDMARKS)
        model._restore(config, dir_path, weights)
        if spec.tuning is not None and (of_base := part_of(weights, BASE)):
            registry = bare_registry(cls.__name__, setup)
            base = cls._of_spec(replace(spec, tuning=None), registry=registry, **how)
            load_weights(base.module, of_base, source=str(dir_path))
            base._landmarks, base.is_trained_ = of_base.get(LANDMARKS), True
            base.n_epochs_ = spec.tuning.base["n_epochs"]
            batches = config.get("corrected_batches")
            base._correction = BatchCorrection.of_tensors(part_of(of_base, CORRECTION), batches, source=str(dir_path))
            base._opened = model._opened
            model._base = base
        model.to_device(device)
        model.is_trained_ = config["is_trained"]
        name, revision = origin_of(Path(dir_path))
        model._origin = replace(model._origin_at(dir_path), name=name, revision=revision)
        return model

    def _restore(
        self, content: Mapping[str, Any], folder: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Restore the correction and the training record from the content of a folder of a model or an adapter."""
        batches = content.get("corrected_batches")
        self._correction = BatchCorrection.of_tensors(part_of(tensors, CORRECTION), batches, source=str(folder))
        if labeled := part_of(tensors, LABELED):
            n_classes = len(getattr(self._objective, "classes", None) or ())
            self._labeled = LabeledCells.of_tensors(labeled, n_classes=n_classes, source=str(folder))
        if self._spec.tuning is not None:
            self._seen = HeldOutRegistry.load(folder, self._spec.tuning.split.get("cells"))
        self._extend_history(content["history"])
        self.n_epochs_ = content["n_epochs"]
        self._facts = CardFacts.from_json(content.get("card"), source=str(folder))

    def _history_lists(self) -> dict[str, list[float]]:
        return {name: frame[name].tolist() for name, frame in self.history_.items()}

    @classmethod
    def _of_spec(
        cls,
        spec: ModelSpec,
        *,
        seed: int,
        adata: AnnData | None = None,
        registry: dict[str, Any] | None = None,
        datamodule: CellDataModule | None = None,
        draws: bool = True,
    ) -> Self:
        """Create a model from a complete specification; without `draws`, its weights have to be loaded."""
        model = cls.__new__(cls)
        CellModel.__init__(model, adata, registry=registry, datamodule=datamodule)
        if model.adata is not None:  # raises an error if it has too few genes of the model
            key = model._setup["gene_key"]
            map_names(gene_names(model.adata, key), spec.vocab, var=model.adata.var, gene_key=key)
        with nullcontext() if draws else undrawn():
            model._assemble(spec, seed)
        return model

    def _assemble(self, spec: ModelSpec, seed: int, gene_vectors: np.ndarray | None = None) -> None:
        """Create the tokenizer, the objective and the module."""
        self.seed, self._spec = seed, spec
        self._tokenizer, self._objective = spec.build_tokenizer(), spec.build_objective()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed CUDA devices too
            self.module = spec.build_module(gene_vectors).eval()

    @classmethod
    def setup_mudata(
        cls,
        mdata: MuData,
        modality: str = "rna",
        layer: str | None = None,
        gene_key: str | None = None,
        batch_key: str | None = None,
        labels_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Register and validate the fields of one modality of `mdata` that the model uses.

        The model then accepts `mdata` instead of an AnnData everywhere, and uses ``mdata.mod[modality]`` as its
        ``adata``. The embedding is written into ``mdata.mod[modality].obsm["X_scforge"]``.

        Parameters
        ----------
        mdata
            Multimodal data with raw gene counts in one modality.
        modality
            Name of the modality with the counts.
        layer
            Key in ``layers`` of the modality with raw counts. If None, reads ``X``.
        gene_key
            Column of ``var`` of the modality with the gene names. If None, reads ``var_names``.
        batch_key, labels_key
            Columns of ``obs`` of the modality, see :meth:`setup_anndata`. A column that is only in ``mdata.obs`` is
            copied into the ``obs`` of the modality. ``"rna:donor"`` and ``"donor"`` are equivalent.
        **kwargs
            See :meth:`setup_anndata`.

        Raises
        ------
        OptionError
            If `mdata` is not a MuData, or does not contain the modality.
        DataError
            If counts, gene names or columns of the modality are invalid.

        Notes
        -----
        scvi-tools models register fields of several modalities on the MuData. scforge requires only one modality and
        registers the fields on it, so a model that was trained on a MuData can also embed an AnnData.

        Examples
        --------
        >>> import mudata, scforge
        >>> adata = scforge.datasets.pbmc3k()
        >>> mdata = mudata.MuData({"rna": adata})
        >>> scforge.models.Encoder.setup_mudata(mdata, modality="rna", labels_key="cell_type")
        >>> model = scforge.models.Encoder(mdata)
        >>> model.adata is adata
        True
        """
        if not isinstance(mdata, MuData):
            raise OptionError(
                f"is of type {type(mdata).__name__!r}; call setup_anndata for an AnnData.", argument="mdata"
            )
        check_modality(modality, list(mdata.mod), "mdata")
        if mdata.is_view:
            raise DataError("is a view of another MuData; copy it first with mdata = mdata.copy().", argument="mdata")
        adata = mdata.mod[modality]
        batch_key = adopted(mdata, modality, "batch_key", batch_key)
        labels_key = adopted(mdata, modality, "labels_key", labels_key)
        try:
            cls.setup_anndata(adata, layer, gene_key, batch_key, labels_key, **kwargs)
        except DataError as error:
            raise type(error)(f"modality={modality!r}: {error}") from error
        manager = cls._get_most_recent_anndata_manager(adata)
        manager.update_setup_method_args({"modality": modality})
        mdata.uns[LAST] = modality

    @classmethod
    def _adata_of(cls, data: Any, modality: str | None = None) -> Any:
        """Return the modality of a MuData that the model uses; other data are returned unchanged.

        `modality` is the modality of the training data. It is used unless only another modality is set up.
        """
        if not isinstance(data, MuData):
            return data
        ready = [name for name, adata in data.mod.items() if cls._setup_of(adata)]
        last = data.uns.get(LAST)
        for name in (modality, last, ready[0] if len(ready) == 1 else None):
            if name in ready:
                return data.mod[name]
        if modality is None:
            call = f"{cls.__name__}.setup_mudata(mdata, modality={(last or 'rna')!r})"
            raise OptionError(
                f"is not set up, or is a copy of a MuData that was set up; call {call} first.", argument="mdata"
            )
        check_modality(modality, list(data.mod), "mdata")
        return data.mod[modality]

    @classmethod
    def _set_up_as(cls, data: Any, setup: dict[str, Any]) -> Any:
        """Set up a MuData like the training data if necessary, and return its modality; return other data unchanged."""
        if not isinstance(data, MuData):
            return data
        adata: AnnData = cls._adata_of(data, setup.get("modality"))
        if cls._setup_of(adata) is None:
            known = {*adata.obs, *shared(data, setup["modality"])}
            present = {key: setup[key] if setup[key] in known else None for key in ("batch_key", "labels_key")}
            cls.setup_mudata(data, **(setup | present))
        return adata


def _family(cls: type[CellModel]) -> Iterator[type[CellModel]]:
    """Return a model class and its subclasses; each keeps a separate record of its AnnData objects."""
    yield cls
    for other in cls.__subclasses__():
        yield from _family(other)
