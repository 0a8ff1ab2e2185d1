"""The model class for every registered architecture, which reads and writes AnnData."""

from __future__ import annotations

import copy
import html
import inspect
import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pprint import pprint
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, cast

import numpy as np
import pandas as pd
import torch
from anndata import AnnData
from mudata import MuData
from scipy import sparse
from scvi import REGISTRY_KEYS
from scvi.data import AnnDataManager
from scvi.data._constants import _MANAGER_UUID_KEY, _SCVI_UUID_KEY
from scvi.model.base import BaseModelClass
from scvi.model.base._base_model import BaseModelMetaClass
from torch import nn

from scforge._checks import check_choice, check_count, check_key, check_known, check_seed
from scforge._constants import AUTO_KEY, QUERY_KEY, UNS_KEY
from scforge._io import read_settled
from scforge._progress import announce
from scforge._registry import check_options
from scforge._text import printable
from scforge.data.cells import Cells, CellSource, column_of, named_column
from scforge.data.checks import check_adata, check_obs_column, content_mark, gene_names, warn_if_transposed
from scforge.data.genes import map_names
from scforge.data.readers import check_modality
from scforge.data.remote import is_collection
from scforge.data.sources import open_cells
from scforge.data.store import StoreCells
from scforge.data.vocab import FROM_DATA, GeneVocab, listed_names
from scforge.errors import DataError, NotTrainedWarning, OptionError, first_line, warn
from scforge.estimators.finetune import finetune, query_model, save_adapter
from scforge.estimators.fitted import FittedModel, changed_options
from scforge.estimators.generate import generate_with
from scforge.estimators.genes import (
    column_genes,
    expression_table,
    gene_numbers,
    over_columns,
    predicting,
    untrained_embedder,
)
from scforge.estimators.hub import load_foreign, load_found, push_model
from scforge.estimators.serialize import read_folder
from scforge.estimators.setup import (
    LAST,
    GeneField,
    ObsField,
    Source,
    adata_of,
    adopted,
    bare_registry,
    ready_cells,
    setup_of,
    source_of,
    training_source,
    write_embedding,
)
from scforge.estimators.spec import (
    ModelSpec,
    defaults_for,
    n_top_genes_of,
    named_options,
    vocab_of_adata,
    vocab_of_cells,
)
from scforge.estimators.tasks import options_of, parts_for_baselines, rows_to_score, task_of, verdict
from scforge.estimators.training import train
from scforge.estimators.transfer import reference_to_save, transfer_labels
from scforge.eval.report import write_scores
from scforge.finetuning.adapters import adapters_disabled, has_lora, merge_lora
from scforge.finetuning.base import EvaluationContext, Task
from scforge.finetuning.held_out import CellFingerprints
from scforge.finetuning.reference import MOST_CELLS
from scforge.finetuning.supervised import SupervisedTask
from scforge.foreign.base import read_checkpoint
from scforge.hub.finding import find_model
from scforge.insilico.attention import attention_between_genes
from scforge.insilico.gene_embeddings import contextual_gene_embeddings, input_gene_embeddings
from scforge.insilico.imputation import knows_zeros, predict_counted, predict_uncounted
from scforge.insilico.perturb import perturbation_table
from scforge.insilico.screening import Perturbation
from scforge.tokenizers.base import TOKENIZERS, Tokenizer
from scforge.training.datamodule import CellDataModule
from scforge.training.objectives.base import OBJECTIVES, Objective, get_objective

if TYPE_CHECKING:
    from scforge.eval.report import Report

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
        return [name for name in super().__dir__() if not cls.lacks(name)]

    def lacks(cls, name: str) -> bool:
        """Return whether only scvi-tools supports an attribute."""
        return isinstance(inspect.getattr_static(cls, name, None), _Absent)


class _Held[T]:
    """An attribute of the fitted model; what scvi-tools assigns before there is one is dropped."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name.rstrip("_")

    def __get__(self, model: Any, owner: type) -> T:
        value: T = self if model is None else getattr(model.fitted, self._name)  # type: ignore[assignment]
        return value

    def __set__(self, model: Any, value: T) -> None:
        if "fitted" in vars(model):
            setattr(model.fitted, self._name, value)


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


class Encoder(BaseModelClass, metaclass=_Front):
    """Train an architecture on single cells and embed cells with it.

    Parameters
    ----------
    adata
        AnnData that :meth:`setup_anndata` was called on.
    architecture
        Name of a registered architecture (``scforge.models.list_models()``). If None, uses the light encoder:
        ``gene_pooling`` over 2,000 highly variable genes with the ``neighbor_denoising`` objective. On small data, it
        is better and much faster than a transformer trained from scratch. It also integrates the batches of
        ``setup_anndata(batch_key=...)``.
    tokenizer
        Name of a registered tokenizer, or a dict with ``name`` and its options. If None, uses the default of the
        architecture (``rank_value`` for a transformer). Its special tokens are added to the vocabulary, and its gene
        vectors (``gene_embedding``) become the gene embedding of the module.
    objective
        Name of a registered objective, or a dict with ``name`` and its options. If None, uses the default of the
        architecture (``masked_gene_prediction`` for a transformer).
    vocab
        Genes of the model: ``"from_data"`` (genes detected in at least 3 cells), the name of a shipped vocabulary
        such as ``"human_protein_coding"``, or a :class:`scforge.data.GeneVocab`.
    n_top_genes
        Number of highly variable genes to keep from `vocab`; 0 keeps all. If None, uses the default of the
        architecture, or keeps all genes if `vocab` was created from a list (``GeneVocab.from_genes``).
    keep_genes
        Names of genes that are always kept, e.g. ``["GCG", "INS"]``. They count toward `n_top_genes`.
    seed
        Random seed for the initial weights, splits, cell orders, masks and views.
    registry
        Registry of a saved model, used instead of `adata`.
    datamodule
        A :class:`scforge.training.CellDataModule`, used instead of `adata` to train on cells on disk. Its vocabulary is
        the default, and genes are chosen from a sample of 100,000 training cells.
    **options
        Options of the architecture, e.g. ``hidden_dim``.

    Examples
    --------
    >>> import scforge
    >>> adata = scforge.datasets.pbmc3k()
    >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
    >>> model = scforge.models.Encoder(adata)
    >>> model.train(max_epochs=1, progress_bar=False)
    >>> model.get_latent_representation().shape
    (2700, 32)
    >>> adata.obsm["X_scforge"].shape
    (2700, 32)

    Notes
    -----
    Genes are always matched by name, so new data may contain different genes in a different order. Vocabulary,
    tokenizer, highly variable genes, medians and entropies are computed once, when the model is created.
    """

    fitted: FittedModel
    module = _Held[nn.Module]()
    seed = _Held[int]()
    n_epochs_ = _Held[int]()
    is_trained_ = _Held[bool]()
    history_ = _Held[dict[str, pd.DataFrame]]()
    datamodule: CellDataModule | None = None
    query_cells: Any = None  # of a query model that is also trained on reference cells
    reference_cells: CellSource | None = None  # labeled training cells that were saved with the model
    _base_model: Encoder | None = None

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
        return [name for name in super().__dir__() if not type(self).lacks(name)]

    def __init__(
        self,
        adata: AnnData | None = None,
        architecture: str | None = None,
        tokenizer: str | dict[str, Any] | None = None,
        objective: str | dict[str, Any] | None = None,
        *,
        vocab: str | GeneVocab = FROM_DATA,
        n_top_genes: int | None = None,
        keep_genes: Sequence[str] = (),
        seed: int = 0,
        registry: dict[str, Any] | None = None,
        datamodule: CellDataModule | None = None,
        **options: Any,
    ) -> None:
        self._attach(adata, registry, datamodule)
        seed = check_seed(seed)
        defaults = defaults_for(architecture, options)
        names = named_options("tokenizer", tokenizer, defaults.tokenizer)
        leaves_out, is_chosen = False, n_top_genes is None
        if n_top_genes is None:
            n_top_genes = n_top_genes_of(vocab, defaults.n_top_genes)
        wanted: dict[str, Any] = {
            "n_top_genes": n_top_genes or None,
            "tokenizer": names,
            "keep_genes": listed_names("keep_genes", keep_genes),
            "reports": is_chosen,
        }
        if datamodule is not None:
            vocab, leaves_out = vocab_of_cells(datamodule, vocab, **wanted)
        elif self.adata is not None:
            vocab, leaves_out = vocab_of_adata(self.adata, self.registry_["setup_args"], vocab, **wanted)
        elif not isinstance(vocab, GeneVocab):
            raise OptionError("requires adata; pass adata, or a GeneVocab as vocab.", vocab=vocab)
        takes_sum = leaves_out and "library_size" in TOKENIZERS.get(names[0]).option_names()
        if takes_sum and names[1].get("missing", "learned") == "learned":
            names = names[0], {"library_size": "vocabulary", **names[1]}
        spec, vectors = ModelSpec.resolve(
            defaults,
            vocab,
            tokenizer=names,
            objective=self._with_found_options(*named_options("objective", objective, defaults.objective)),
            options=options,
        )
        self.fitted = FittedModel(spec, seed, setup=self.registry_["setup_args"], gene_vectors=vectors)
        self.fitted.front = type(self).__name__

    def _attach(self, adata: Any, registry: dict[str, Any] | None, datamodule: CellDataModule | None) -> None:
        """Attach the cells of a data module or a registered AnnData."""
        cls = type(self)
        if datamodule is not None:
            if adata is not None:
                raise OptionError("and datamodule both contain cells; pass only one of the two.", argument="adata")
            if not isinstance(datamodule, CellDataModule):
                what = type(datamodule).__name__
                raise OptionError(
                    f"is of type {what!r}; pass a scforge.training.CellDataModule.", argument="datamodule"
                )
            if registry is None:
                keys = {"batch_key": datamodule.batch_key, "labels_key": datamodule.labels_key}
                registry = bare_registry(cls.__name__, {"layer": None, "gene_key": None, **keys})
        adata = adata_of(cls, adata)
        if adata is not None or registry is None:
            check_adata(adata)
            try:
                cls._get_most_recent_anndata_manager(adata, required=True)
            except ValueError as error:
                is_copy = adata.uns.get(_SCVI_UUID_KEY) in cls._setup_adata_manager_store
                why = ", because it is a copy of an AnnData that was set up" if is_copy else ""
                problem = f"is not set up{why}; call {cls.__name__}.setup_anndata(adata) first."
                raise OptionError(problem, argument="adata") from error
        super().__init__(adata, registry=registry)
        self.datamodule = datamodule
        # AnnData objects, with fingerprints to detect changes and their cells over the genes of the model.
        self.opened: list[tuple[weakref.ref[AnnData], tuple[Any, ...], CellSource]] = []

    @classmethod
    def of_fitted(
        cls, fitted: FittedModel, adata: AnnData | None = None, *, datamodule: CellDataModule | None = None
    ) -> Self:
        """Return a model of this class that holds a fitted model.

        Parameters
        ----------
        fitted
            The fitted model of another model. Both models share the module.
        adata
            AnnData that :meth:`setup_anndata` was called on. If None, the model has no cells.
        datamodule
            A :class:`scforge.training.CellDataModule`, used instead of `adata`.

        Returns
        -------
        The model.

        Raises
        ------
        GeneMismatchError
            If `adata` contains too few genes of the model.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> scforge.models.Encoder.of_fitted(model.fitted).module is model.module
        True
        """
        model = cls.__new__(cls)
        has_cells = adata is not None or datamodule is not None
        model._attach(adata, None if has_cells else bare_registry(cls.__name__, fitted.setup), datamodule)
        if model.adata is not None:  # raises an error if it has too few genes of the model
            key = model.registry_["setup_args"]["gene_key"]
            map_names(gene_names(model.adata, key), fitted.spec.vocab, var=model.adata.var, gene_key=key)
        model.fitted = copy.copy(fitted)
        model.fitted.front, model.fitted.setup = cls.__name__, model.registry_["setup_args"]
        if fitted.base is not None:
            base = cls.of_fitted(fitted.base)
            model.base_model, base.opened = base, model.opened
        return model

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
            known = [*inspect.signature(Encoder.setup_anndata).parameters][1:-1]
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
        # A copy, also one read from a file, has the ids of its original, which it would replace.
        kinds: list[Any] = [Encoder]
        for kind in kinds:  # each class keeps a separate record of its AnnData objects
            kinds += kind.__subclasses__()
        managers = [kind._setup_adata_manager_store.get(adata.uns.get(_SCVI_UUID_KEY)) for kind in kinds]
        originals = [manager.adata for manager in managers if manager is not None]
        if originals and all(original is not adata for original in originals):
            for key in (_SCVI_UUID_KEY, _MANAGER_UUID_KEY):
                adata.uns.pop(key, None)
        manager = AnnDataManager(fields=fields, setup_method_args=setup_method_args)
        manager.register_fields(adata, **kwargs)
        cls.register_manager(manager)

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
            error.located(f"modality={modality!r}: ")
            raise
        manager = cls._get_most_recent_anndata_manager(adata)
        manager.update_setup_method_args({"modality": modality})
        mdata.uns[LAST] = modality

    @property
    def base_model(self) -> Encoder | None:
        """The model before fine-tuning, or the reference of a query model."""
        return self._base_model

    @base_model.setter
    def base_model(self, base: Encoder) -> None:
        self._base_model, self.fitted.base = base, base.fitted

    @property
    def vocab(self) -> GeneVocab:
        """The genes of the model."""
        return self.fitted.spec.vocab

    @property
    def spec(self) -> ModelSpec:
        """Names and options of the architecture, tokenizer and objective."""
        return self.fitted.spec

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self.fitted.tokenizer

    @property
    def objective(self) -> Objective:
        """The objective of the model, or the task of a fine-tuned model."""
        return self.fitted.objective

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.fitted.device

    @property
    def own_task(self) -> Task | None:
        """The task that the heads of the architecture support without fine-tuning, or None."""
        return None

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

    def __repr__(self) -> str:
        """Return a summary with the options that differ from their defaults; :attr:`spec` contains all options."""
        heading, facts = self._described(changed_options)
        return "\n".join([heading, *(f"    {name}: {text}" for name, text in facts.items() if text)])

    def _repr_html_(self) -> str:
        """Return an HTML summary of the model for notebooks."""
        heading, facts = self._described(lambda options, *_: options)
        keys, setup = ("layer", "gene_key", "batch_key", "labels_key"), self.fitted.setup
        facts["set up with"] = ", ".join(f"{key}={setup[key]!r}" for key in keys if setup.get(key))
        left = "style='text-align: left; vertical-align: top'"
        cells = ([html.escape(part) for part in fact] for fact in facts.items() if fact[1])
        lines = (f"<tr><th {left}>{name}</th><td {left}>{text}</td></tr>" for name, text in cells)
        return f"<b>{html.escape(heading)}</b><table>{''.join(lines)}</table>"

    def _described(self, chosen: Callable[..., Mapping[str, Any]]) -> tuple[str, dict[str, str]]:
        cells = training_source(self)
        return self.fitted.described(None if cells is None else len(cells), chosen)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled."""
        raise OptionError(
            f"a model cannot be pickled; call model.save(folder), and {type(self).__name__}.load(folder) elsewhere."
        )

    def __copy__(self) -> Self:
        """Return a model that shares everything with this one."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__, fitted=copy.copy(self.fitted))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent model."""
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def open_cells(self, source: Source | None = None, **options: Any) -> Cells:
        """Open cells over the genes of the model.

        Parameters
        ----------
        source
            Cells, see :meth:`get_latent_representation`. If None, uses the training cells.
        **options
            Options of :func:`scforge.data.open_cells`, e.g. another `vocab`.

        Returns
        -------
        The cells.

        Raises
        ------
        GeneMismatchError
            If `source` contains too few genes of the model.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> len(model.open_cells()), model.open_cells().vocab is model.vocab
        (60, True)
        """
        source, is_own = source_of(self, source), not options
        options = {"vocab": self.vocab, **options}
        cells: Any
        if isinstance(source, str | os.PathLike):
            # A store always has counts and names in the same places.
            setup = {} if is_collection(os.fspath(source)) else self.fitted.setup
            cells = open_cells(source, layer=setup.get("layer"), gene_key=setup.get("gene_key"), **options)
        elif not isinstance(source, AnnData) and hasattr(source, "with_vocab"):
            cells = source if source.vocab is options["vocab"] else source.with_vocab(**options)
        else:
            check_adata(source)
            setup = setup_of(type(self), source)
            if not setup:
                setup = self.fitted.setup
                call = f"{type(self).__name__}.setup_anndata(adata, ...)"
                fix = f"the training data contain it; if adata stores it under another name, call {call}"
                for argument, table in {"layer": "layers", "gene_key": "var"}.items():
                    if setup[argument] is not None:
                        check_known(argument, setup[argument], getattr(source, table), f"adata.{table}", fix=fix)
            keys = {"layer": setup["layer"], "gene_key": setup["gene_key"]}
            cells = self._opened_once(source, **keys) if is_own else open_cells(source, **keys, **options)
        uses_vocabulary = is_own and getattr(self.tokenizer, "library_size", None) == "vocabulary"
        return cells.over_vocabulary() if uses_vocabulary and isinstance(cells, CellSource | StoreCells) else cells

    def _opened_once(self, adata: AnnData, layer: str | None, gene_key: str | None) -> Cells:
        """Return the cached cells of an AnnData, and reopen them if counts or genes have changed."""
        matrix = None if adata.is_view else adata.X if layer is None else adata.layers.get(layer)
        counts = None if matrix is None else content_mark(matrix)
        if counts is None:  # on disk, or not there
            return open_cells(adata, self.vocab, layer=layer, gene_key=gene_key)
        mark = (layer, gene_key, counts, zlib.crc32(gene_names(adata, gene_key).view(np.uint8)))
        obs = adata.obs.copy(deep=False)
        for owner, its_mark, known in self.opened:
            if owner() is adata and its_mark == mark and known.vocab is self.vocab:
                return replace(known, obs=obs)
        cells: Any = open_cells(adata, self.vocab, layer=layer, gene_key=gene_key)
        kept = [entry for entry in self.opened if entry[0]() is not None and entry[0]() is not adata]
        self.opened[:] = [*kept, (weakref.ref(adata), mark, cells)][-_MAX_OPENED:]
        return cells

    def train(
        self,
        max_epochs: int | None = None,
        *,
        batch_size: int | str | None = None,
        lr: float | None = None,
        validation_size: float | None = None,
        early_stopping: bool = True,
        accelerator: str = "auto",
        devices: int | str | list[int] = 1,
        precision: str | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        datamodule: CellDataModule | None = None,
        callbacks: Sequence[Any] = (),
        progress_bar: bool = True,
        plan_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Train the model; a second call continues training.

        Afterwards, the module contains the weights from the epoch of this call with the lowest validation loss. Ctrl-C
        stops training after the current step and keeps the best weights so far. A second Ctrl-C also interrupts the
        caller.

        Parameters
        ----------
        max_epochs
            Maximum number of epochs. If None, it depends on the objective and the number of cells.
        batch_size
            Number of cells per step and process; ``"auto"`` uses the largest batch that fits into memory. If None, uses
            the objective's default.
        lr
            Peak learning rate. If None, uses the objective's default. A fine-tuned model with labels that is trained
            again continues at a constant tenth of it, unless `lr` or `schedule` is given.
        validation_size
            Fraction of cells in the validation set. The cells are sampled with the model's seed, so every call holds
            out the same cells. If None, holds out 0.1.
        early_stopping
            Whether to stop when the validation loss has not improved for ten epochs (``early_stopping_patience``).
        accelerator, devices
            As in :class:`lightning.Trainer`.
        precision
            As in :class:`lightning.Trainer`, or ``"auto"``: bfloat16 mixed precision if it is faster in a short
            benchmark. If None, computes in 32 bits.
        checkpoint_dir
            Folder for checkpoints to resume from and for the best epochs, all of which are model folders.
        resume
            ``"auto"`` resumes from the last checkpoint in `checkpoint_dir`, if any; a path resumes from the checkpoint
            in that folder. If the model is created as before, the result is identical to the result of an uninterrupted
            run.
        overwrite
            Whether to replace the outputs of another training run in `checkpoint_dir`.
        datamodule
            Cells to train on instead of the cells that the model was created with.
        callbacks
            Additional Lightning callbacks, e.g. :class:`scforge.eval.BenchmarkCallback`.
        progress_bar
            Whether to show a progress bar (in a log file, one line per epoch).
        plan_kwargs
            Dictionary of options, as in scvi-tools; equivalent to passing them as arguments.
        **options
            The other options of :class:`scforge.training.TrainOptions`, e.g. `optimizer`, `schedule`, `ema_decay`,
            `strategy`, `compile`, `logger`, and the options of :class:`lightning.Trainer`.

        Raises
        ------
        OptionError
            If an argument is invalid, or a checkpoint belongs to another training run.
        TrainingError
            If the loss is NaN, a checkpoint cannot be saved, or memory runs out. In the first two cases, the model
            contains the best weights so far.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, batch_size=16, progress_bar=False)
        >>> model.n_epochs_, len(model.history_["validation_loss"])
        (1, 1)
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "plan_kwargs", "options")}
        # Initializes the weights, fits with Lightning, and stores the best weights, the history and the epochs.
        train(self, given, options, plan_kwargs)
        if self.fitted.setup.get("labels_key") is not None:
            self.reference_cells = None  # the cells of this training take their place
        if self.fitted.obsm_key == QUERY_KEY:
            warn(
                f"The encoder was trained on the query, so obsm[{QUERY_KEY!r}] is not comparable with the embedding of "
                "the reference model; embed the reference again with query_model.get_latent_representation(reference)."
            )

    def _with_found_options(self, objective: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Add the options of an objective that are derived from the cells of the model."""

        def column(key: str) -> pd.Series:
            if self.datamodule is not None:
                return self.datamodule.cells.column(key)
            if self.adata is None:
                raise OptionError(
                    f"the objective learns from obs[{key!r}]; pass adata, or pass the classes as an option of the "
                    "objective."
                )
            return column_of(self.adata.obs, key)

        key = self.registry_["setup_args"].get("batch_key") if self.datamodule is None else self.datamodule.batch_key
        if key is not None and OBJECTIVES.get(objective).takes_batch_key:
            options = {"batch_key": key, **options}
        return objective, options | get_objective(objective, **options).options_from(column)

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
        source, cells = ready_cells(self, adata, "its embedding is")
        fitted = self.fitted
        rows = None if indices is None else positions(indices, len(cells))
        batch_key = setup_of(type(self), source).get("batch_key")
        codes = fitted.codes_to_correct(cells, correction, batch_key=batch_key, rows=rows)
        embedding = fitted.corrected(fitted.embed(cells, batch_size=batch_size, rows=rows), codes, correction)
        if key_added is not None and rows is None and isinstance(source, AnnData):
            write_embedding(fitted, source, key_added, embedding, cells, correction=correction)
        return embedding

    def finetune(
        self,
        task: str | Mapping[str, Any],
        adata: AnnData | str | os.PathLike[str] | None = None,
        *,
        labels_key: str | None = None,
        batch_key: str | None = None,
        validation_size: float = 0.1,
        test_size: float = 0.1,
        split_by: str | None = None,
        split_key: str | None = None,
        freeze: bool | int = False,
        lora: bool | Mapping[str, Any] = False,
        head: Mapping[str, Any] | None = None,
        max_epochs: int | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> Encoder:
        """Train a copy of the model with a head for a task.

        Parameters
        ----------
        task
            Name of a registered task (``scforge.finetuning.list_tasks()``), or a dict with ``name`` and its options.
        adata
            Cells to learn from, see :meth:`get_latent_representation`. If None, uses the training cells.
        labels_key, batch_key
            Columns of ``adata.obs``. If None, uses the columns of ``setup_anndata``.
        validation_size, test_size
            Fractions of the cells in the validation set, which is used to select the best epoch, and in the test set
            for :meth:`evaluate`.
        split_by
            Column of ``adata.obs`` with groups, such as donors, that are held out as a whole. If None, splits by cell,
            stratified by class.
        split_key
            Column of ``adata.obs`` with the values ``"train"``, ``"validation"`` or ``"test"``, instead of a random
            split.
        freeze
            If True, trains only the head; a number freezes the embeddings and this many layers.
        lora
            Whether to train low-rank adapters instead of the weights: True, or a dict with any of ``r``, ``alpha``,
            ``dropout``, ``targets`` and ``use_dora``, see ``peft.LoraConfig``.
        head
            Options of the head: ``hidden_dim`` and ``dropout``.
        max_epochs
            Maximum number of epochs. If None, it depends on the task and the number of cells.
        seed
            Random seed for the split, the head and the order of cells. If None, uses the model's seed.
        **options
            Options of the task and of :meth:`train`, e.g. ``lr``, ``layer_lr_decay``, ``gradual_unfreezing``,
            ``precision``, ``checkpoint_dir``.

        Returns
        -------
        The fine-tuned model, with the rows of the split in ``train_indices``, ``validation_indices`` and
        ``test_indices``. The base model and the setup of `adata` do not change.

        Raises
        ------
        OptionError
            If an argument is invalid.
        DataError
            If a column is invalid.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:800, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> annotator = model.finetune("annotation", lora=True, max_epochs=1, progress_bar=False)
        >>> annotator.spec.tuning.task, model.spec.tuning is None
        ('annotation', True)
        """
        arguments = {name: value for name, value in locals().items() if name not in ("self", "max_epochs")}
        if not self.is_trained_:
            warn("The model is not trained; fine-tuning starts from random weights.", NotTrainedWarning)
        tuned: Encoder = finetune(self, **arguments)
        tuned.train(max_epochs, **options)
        return tuned

    def predict(
        self,
        adata: AnnData | Cells | str | os.PathLike[str] | None = None,
        *,
        key_added: str | None = None,
        map_query: bool = True,
        batch_size: int = 256,
        **options: Any,
    ) -> pd.DataFrame | AnnData:
        """Predict with a fine-tuned model, and write the predictions into `adata`.

        For the task ``"annotation"``, cells that were not part of the fine-tuning data are compared with up to 2,000
        training cells first. If the base model was trained with ``neighbor_denoising``, the default, they are mapped
        onto its training cells as in :meth:`load_query_data`. Their class probabilities are the mean of three
        classifiers: the fine-tuned head, and a logistic regression and votes of the nearest training cells on the
        embedding of the base model (of the fine-tuned model if the base model does not map queries). A temperature
        that was fitted on held-out batches, or on random folds without batches, is applied to them. It is reported how
        many genes were found, by which factor the expression of a gene typically differs (if cells are mapped), and how
        many cells are far from all training cells. A warning is issued if these differences are large.

        Parameters
        ----------
        adata
            Cells, see :meth:`get_latent_representation`. If None, uses the cells used for fine-tuning.
        key_added
            Key of the predictions, instead of the default key.
        map_query
            Whether to map new cells, as described above. If False, the fine-tuned head predicts all cells as is.
            Predictions of mapped cells depend on which cells are mapped together. No effect on other tasks.
        batch_size
            Number of cells per batch.
        **options
            Options of the task, e.g. ``threshold`` and ``majority_voting`` of ``"annotation"``.

        Returns
        -------
        A data frame with one row per cell; for ``"perturbation"``, the predicted cells.

        Notes
        -----
        Tasks that learn labels also write ``obs["scforge_split"]`` (``"<key_added>_split"``): ``"train"``,
        ``"validation"``, ``"test"``, ``"unused"`` (part of the fine-tuning data, e.g. without a label) or ``"new"``.
        The labels of training and validation cells are known to the model, so their predictions do not show how
        accurate it is.

        Raises
        ------
        OptionError
            If the model was not fine-tuned, or an argument is invalid.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:800, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> annotator = model.finetune("annotation", lora=True, max_epochs=1, progress_bar=False)
        >>> list(annotator.predict(threshold=0.2))
        ['label', 'confidence', 'entropy']
        >>> bool(adata.obs["scforge_cell_type"].notna().all())
        True
        """
        check_key("key_added", key_added)
        task = task_of(self.fitted, "predict")
        if key_added is None and self.fitted.obsm_key == QUERY_KEY:
            key_added = QUERY_KEY
        tuning: Any = self.spec.tuning  # of a model with a task
        check_options("option of predict", tuning.task, options, options_of(task.predict))
        source = source_of(self, adata)
        cells = self.open_cells(source)
        parts = self.fitted.parts_of(cells)
        predictor = self.fitted.predictor_of_query(cells, batch_size, parts if map_query else None)
        into = source if isinstance(source, AnnData) else None
        predicted = task.predict(predictor, into, key_added=key_added, **options)
        if parts is not None and task.learns_labels and not task.makes_cells:
            column = f"{key_added or 'scforge'}_split"
            if into is not None:
                into.obs[column] = pd.Categorical(parts)
            if n_learned := int(np.isin(parts, ("train", "validation")).sum()):
                where = "" if into is None else f" (obs[{column!r}])"
                announce(
                    f"The model knows the labels of {n_learned:,} of the {len(parts):,} cells from fine-tuning{where}; "
                    "the predictions of these cells do not show how accurate it is."
                )
        if predictor.new is not None:
            predictor.new.report()
        if into is not None and task.maps_new_cells:
            key, written = key_added or f"scforge_{cast('Any', task).labels_key}", dict(into.uns.get(UNS_KEY, {}))
            written.pop(key, None)  # of an earlier prediction
            if predictor.new is not None:
                written[key] = {**self.fitted.provenance(), **predictor.new.shift}
            into.uns[UNS_KEY] = written
        return predicted

    def evaluate(
        self,
        adata: AnnData | Cells | str | os.PathLike[str] | None = None,
        *,
        baselines: bool = True,
        base: Encoder | None = None,
        intervals: bool = True,
        groups_key: str | None = None,
        key_added: str | None = "metrics",
        map_query: bool = True,
        batch_size: int = 256,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Score the predictions of a fine-tuned model against baselines trained on the same cells.

        :func:`scforge.workflows.evaluate_models` scores the embeddings of any model.

        Parameters
        ----------
        adata
            Labeled cells. If None, uses the test cells of the fine-tuning (``test_size``). Training and validation
            cells of the fine-tuning are never scored, even if they are passed.
        baselines
            Whether to compute baselines, which require the cells used for fine-tuning.
        base
            The model before fine-tuning, used for the baseline on its frozen embedding. If None, uses the model that
            :meth:`finetune` was called on, if it is in memory.
        intervals
            Whether to add the table ``<key_added>_differences`` for annotation, multi-label and regression tasks: each
            score minus that of each baseline, its 95% interval from 100 bootstrap samples, and a verdict, which is
            "tie" if the interval includes zero.
        groups_key
            Column whose groups, e.g. donors, are resampled as a whole for the intervals; requires four groups. If None,
            single cells are resampled, and the intervals only apply to the donors in the test set.
        key_added
            Key in ``adata.uns["scforge"]`` for the table; additional tables are stored as ``<key_added>_<table>``, and
            replace all tables of an earlier evaluation with this key. None writes nothing.
        map_query
            Whether to map new cells before prediction, see :meth:`predict`.
        batch_size
            Number of cells per batch.
        seed
            Random seed for the baselines and for resampling.

        Returns
        -------
        A data frame with one row per method, starting with ``"scforge"``, and one column per score.

        Raises
        ------
        OptionError
            If the model was not fine-tuned, or there are no test cells.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:800, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> annotator = model.finetune("annotation", lora=True, max_epochs=1, progress_bar=False)
        >>> table = annotator.evaluate()
        >>> table.index[0], "accuracy" in table
        ('scforge', True)
        """
        check_key("key_added", key_added)
        if self.spec.tuning is None:
            raise OptionError(
                "the model has no task to evaluate; call model.finetune first, or score the embedding with "
                "scforge.workflows.evaluate_models."
            )
        fitted, task = self.fitted, task_of(self.fitted, "evaluate")
        task.check_evaluate()
        check_seed(seed)
        source = source_of(self, adata)
        supervised = isinstance(task, SupervisedTask) and isinstance(source, AnnData)
        compares = supervised and baselines and intervals and key_added is not None
        cells = self.open_cells(source)
        marks = None if fitted.seen is None else CellFingerprints.of(cells)
        rows, split = rows_to_score(fitted, cells, marks, within=source is training_source(self))
        if groups_key is not None:
            if not compares:
                raise OptionError(
                    "has no effect here; omit groups_key, or evaluate annotation, "
                    "multi_label or regression on an AnnData, with baselines, intervals and key_added.",
                    groups_key=groups_key,
                )
            if n_missing := int(named_column(cells, groups_key, argument="groups_key").iloc[rows].isna().sum()):
                raise DataError(
                    f"has no value for {n_missing} of {len(rows)} scored cells; fill in the "
                    "values, or drop these cells.",
                    groups_key=groups_key,
                )
        base = self.base_model if base is None else base
        compared = parts_for_baselines(self, base, source, cells, split, batch_size, needed=baselines)
        parts = None
        if map_query and task.maps_new_cells and fitted.seen is not None and marks is not None:
            parts = fitted.seen.parts_of(marks)
        predictor = fitted.predictor_of_query(cells, batch_size, parts)
        how: dict[str, Any] = {"seed": seed, "intervals": compares, "groups_key": groups_key}
        evaluated = task.evaluate(EvaluationContext(predictor=predictor, rows=rows, **compared, **how))
        if key_added is not None and isinstance(source, AnnData):
            write_scores(source, key_added, evaluated.metrics, evaluated.tables)
            if "differences" in evaluated.tables:
                announce(verdict(evaluated, f'adata.uns["{UNS_KEY}"]["{key_added}_differences"]'))
        return evaluated.metrics

    def merge_adapter(self) -> None:
        """Merge the adapters into the weights; predictions stay the same and are as fast as without adapters.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:800, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> annotator = model.finetune("annotation", lora=True, max_epochs=1, progress_bar=False)
        >>> before = annotator.predict()["label"]
        >>> annotator.merge_adapter()
        >>> annotator.predict()["label"].equals(before)
        True
        """
        task_of(self.fitted, "merge_adapter")
        fitted, backbone = self.fitted, self.fitted.backbone
        if not has_lora(backbone):
            raise OptionError("the model has no adapters to merge; fine-tune with lora=True.")
        merge_lora(backbone)
        backbone.requires_grad_(True)
        assert fitted.spec.tuning is not None  # it has adapters
        fitted.spec = replace(fitted.spec, tuning=replace(fitted.spec.tuning, lora=None))
        fitted.objective = fitted.spec.build_objective()

    @contextmanager
    def adapter_disabled(self) -> Iterator[None]:
        """Temporarily disable the adapters, e.g. ``with annotator.adapter_disabled(): ...``.

        Yields
        ------
        None; the adapters are active again after the block.

        Raises
        ------
        OptionError
            If the model has no adapters.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:800, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> annotator = model.finetune("annotation", lora=True, max_epochs=1, progress_bar=False)
        >>> with annotator.adapter_disabled():
        ...     before = annotator.get_latent_representation()
        >>> bool((before == model.get_latent_representation()).all())
        True
        """
        if not has_lora(self.fitted.backbone):
            raise OptionError("the model has no adapters to disable; fine-tune with lora=True.")
        with adapters_disabled(self.fitted.backbone):
            yield

    @classmethod
    def load_query_data(
        cls,
        query: Source,
        reference_model: Encoder | str | os.PathLike[str],
        *,
        batch_key: str | None = None,
        reference_cells: Source | None = None,
        lora: bool | Mapping[str, Any] = True,
        validation_size: float = 0.1,
        seed: int | None = None,
    ) -> Encoder:
        """Return a model for query cells with the weights of a reference model.

        If the reference was trained with ``neighbor_denoising``, the default, no training is needed. The encoder of the
        reference embeds the query, and each query cluster is shifted by the mean difference to its mutual nearest
        neighbors in the reference (:func:`scforge.data.neighbors.query_shifts`). If the tokenizer computes log1p CP10K,
        the expression of each gene is first multiplied by a factor between 1/5 and 5. The factor is the ratio of the
        expression that the reference decoder predicts for these cells to the measured expression (median over
        clusters). It corrects differences in gene detection between studies or protocols. All query batches share
        factors and shifts, and the embedding is comparable with the embedding of the reference model. Embed reference
        cells with the reference model, because a query model shifts all cells that it embeds. ``train()`` only learns
        decoder vectors for the new query batches, as in scArches (Lotfollahi et al. 2022, Nature Biotechnology 40,
        121-130).

        With `reference_cells`, ``train()`` continues training all weights on query and reference together, with
        neighbors across both. This takes longer, and is better for queries that differ strongly from the reference
        (``benchmarks/transfer.py``). The embedding is then no longer in the reference space, see below.

        If the reference has a different objective, or was fine-tuned for ``"integration"``, its encoder must be
        adapted. ``train()`` then fits adapters to the query, and the embedding leaves the reference space. It is
        written to ``obsm["X_scforge_query"]`` with a warning. Embed the reference again with the query model to compare
        both.

        A query batch with the same name as a reference batch is treated as that batch, and this is logged.

        Parameters
        ----------
        query
            Cells, see :meth:`get_latent_representation`. Genes are matched by name, and the fraction of the model's
            genes that were found is logged. Labels are not needed.
        reference_model
            A trained model, possibly fine-tuned for ``"integration"``, or its folder. It is not changed. The query of a
            model fine-tuned for ``"annotation"`` is mapped onto its base model, as in :meth:`predict`.
        batch_key
            Column of ``obs`` with the query batches. If None, uses the batch column of the query's setup, or else the
            batch column of the reference. Only for references with a decoder that is conditioned on batches.
        reference_cells
            Reference cells to train on together with the query, see :meth:`get_latent_representation`. At most 20,000
            cells of each are sampled into memory. If None, trains on the query only.
        lora
            Adapter options, see :meth:`finetune`. They have no effect if the encoder is not trained.
        validation_size
            Fraction of query cells in the validation set.
        seed
            Random seed for the split and the adapters. If None, uses the seed of the reference model.

        Returns
        -------
        The query model. It can be saved, loaded and trained further like any model.

        Raises
        ------
        GeneMismatchError
            If the query contains too few genes of the reference model.
        DataError
            If the query does not contain the column `batch_key`.
        OptionError
            If the reference was fine-tuned for a task that needs labels, or an argument is invalid.

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
        arguments = {name: value for name, value in locals().items() if name not in ("cls", "reference_model")}
        reference = cls.load(reference_model) if isinstance(reference_model, str | os.PathLike) else reference_model
        if not isinstance(reference, Encoder):
            raise OptionError(
                f"is of type {type(reference).__name__}; pass a model or its folder.", argument="reference_model"
            )
        if not reference.is_trained_:
            raise OptionError(
                "is not trained; train this model first, or pass a trained model.", argument="reference_model"
            )
        model: Encoder = query_model(reference, **arguments)
        return model

    def transfer_labels(
        self,
        query: Source | None = None,
        *,
        labels_key: str | None = None,
        method: str = "consensus",
        n_neighbors: int = 50,
        key_added: str | None = None,
        unknown: float | None = None,
        min_probability: float | None = None,
        broader: str | Mapping[str, str] | None = None,
        reference: Encoder | Source | None = None,
        batch_size: int = 256,
    ) -> pd.DataFrame:
        """Transfer labels from reference cells to query cells.

        This model embeds both reference and query. By default, three logistic regressions then vote on the label: on
        the embedding, on principal components of reference and query after batch correction with Harmony, and on the
        expression of variable genes. Their errors differ, so the consensus is more accurate than each of them
        (``benchmarks/label_transfer.py``). Each label has the same weight in training, so small types are not lost.
        Regularization, weights and the temperature of the probabilities are chosen on reference batches that are held
        out, or on random folds if there is a single batch. At most 20,000 reference cells are used.

        The results are written to ``obs["scforge_<labels_key>_transferred"]`` (categories) and, with the endings
        ``_probability``, ``_agreement`` and ``_p_value``, as float32. They are separate from the columns of
        :meth:`predict`. Facts about the transfer, and the embedding of at most 2,000 reference cells for
        :func:`scforge.pl.annotation`, are written to ``uns["scforge"]`` under the name of the label column. The
        embedding of the query is written to ``obsm["X_scforge"]``, as by ``load_query_data(query, model)`` and
        :meth:`get_latent_representation`. If the query is the AnnData of the reference, its own embedding is kept.

        Parameters
        ----------
        query
            Cells to label, see :meth:`get_latent_representation`. If None, uses the cells of a model from
            :meth:`load_query_data`. Existing labels of these cells are ignored.
        labels_key
            Column of the reference's ``obs`` with the labels. If None, uses the labels of ``setup_anndata``. Reference
            cells without a label are not used.
        method
            ``"consensus"``, see above; ``"linear"`` for a logistic regression on the embedding only; or ``"knn"``, in
            which each of the `n_neighbors` nearest reference cells votes with the weight ``exp(-d^2 / (2 s^2))``, where
            d is its distance and s the mean distance of the neighbors. The probability is then the weighted fraction of
            votes, as in scArches (Lotfollahi et al. 2022, Nature Biotechnology 40, 121-130). If more than a billion
            distances would be computed, neighbors are found by an approximate search.
        n_neighbors
            Number of reference cells that vote with ``method="knn"``.
        key_added
            Name of the label column, instead of ``"scforge_<labels_key>_transferred"``.
        unknown
            Cells whose p-value is at most this error rate are labeled ``"unknown"``, e.g. 0.05. The p-value is
            conformal: the fraction of held-out reference cells of the same label that are at least as unlike the other
            reference cells. If query and reference differ only by random sampling, about this fraction of the cells of
            known types is called unknown. Between studies the fraction is usually different (:doc:`/reference_mapping`
            shows measured values). Rates below 0.05 have no effect on labels with few reference cells, because the
            smallest p-value is one in the number of held-out cells plus one. P-values are NaN for a reference with
            fewer than 50 cells. Not for ``method="knn"``.
        min_probability
            Cells whose label has a lower probability are labeled ``"unassigned"``, or get a broader label. Cells of a
            type that is not in the reference often have a high probability nevertheless. If None, uses 0.5 with
            `broader`, and labels all cells without.
        broader
            Column of the reference's ``obs`` with broader labels, or a mapping from each label to a broader one. A cell
            with a probability below `min_probability` gets the broader label whose labels have the highest total
            probability, if the total reaches `min_probability`; its probability is this total, while agreement and
            p-value are those of its most probable label. Reference cells saved with a model have no other column, so
            pass a mapping.
        reference
            The labeled cells, or a model that was trained on them. If None, uses the training cells of this model or,
            for a query model, of its reference model; if they are not available, the reference cells that were saved
            with it.
        batch_size
            Number of cells per batch.

        Returns
        -------
        A data frame with one row per cell, and the columns ``label`` and ``probability``; unless the method is "knn",
        ``p_value``; and with the default method ``agreement``, the fraction of the three classifiers that predict this
        label.

        Raises
        ------
        DataError
            If the reference does not contain the column, or contains fewer than two labels.
        OptionError
            If reference or query are not available, or an argument is invalid.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:200, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> query = scforge.datasets.pbmc3k()[200:260, :300].copy()
        >>> list(model.transfer_labels(query))
        ['label', 'probability', 'agreement', 'p_value']
        >>> "scforge_cell_type_transferred_probability" in query.obs
        True
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        return transfer_labels(self, **arguments)

    def get_gene_embeddings(
        self,
        adata: Source | None = None,
        *,
        contextual: bool = False,
        layer: int = -1,
        max_cells: int = 10_000,
        seed: int = 0,
        batch_size: int = 256,
        key_added: str | None = "X_scforge_genes",
    ) -> pd.DataFrame:
        """Return a vector for each gene of the model.

        Parameters
        ----------
        adata
            Cells with the genes to embed. With `contextual`, vectors are averaged over the tokens of these cells. If
            None, uses the training cells, if they are available.
        contextual
            If False, returns the input embedding of the gene's token. If True, returns the hidden state of this token,
            averaged over the cells that contain it.
        layer
            Layer of the hidden states with `contextual`; -1 for the last layer.
        max_cells
            Maximum number of cells to sample with `contextual`.
        seed
            Random seed for sampling the cells.
        batch_size
            Number of cells per batch.
        key_added
            Key in ``adata.varm``; genes outside the model's vocabulary are NaN. If None, nothing is written.

        Returns
        -------
        A data frame of vectors, float32, shape (G, H), indexed by the genes of the model. With `contextual`, genes that
        no cell expresses are NaN.

        Raises
        ------
        OptionError
            If the architecture has no token states, or an argument is invalid.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> vectors = model.get_gene_embeddings()
        >>> vectors.shape == (model.vocab.n_genes, 8)
        True
        >>> adata.varm["X_scforge_genes"].shape
        (300, 8)
        """
        check_key("key_added", key_added)
        check_count("max_cells", max_cells, "cells")
        has_cells = contextual or adata is not None or training_source(self) is not None
        source = source_of(self, adata) if has_cells else None
        self.fitted.check_ready("gene embeddings are")
        if contextual:
            vectors, _ = contextual_gene_embeddings(
                self.fitted.backbone,
                self.open_cells(source).sample(max_cells, seed=check_seed(seed)),
                self.tokenizer,
                objective=self.objective,
                batch_size=batch_size,
                layer=layer,
            )
        else:
            vectors = input_gene_embeddings(self.fitted.backbone, self.tokenizer)
        if key_added is not None and isinstance(source, AnnData):
            columns = column_genes(self, source)
            source.varm[key_added] = np.where((columns >= 0)[:, None], vectors[columns], np.float32(np.nan))
        return pd.DataFrame(vectors, index=pd.Index(self.vocab.genes, dtype=str))

    def get_attention(
        self,
        adata: Source | None = None,
        *,
        layer: int = -1,
        heads: str | int = "mean",
        top_k: int = 20,
        min_cells: int = 3,
        max_cells: int = 1000,
        max_genes: int = 5000,
        seed: int = 0,
        batch_size: int = 32,
        key_added: str | None = "scforge_attention",
    ) -> sparse.csr_matrix:
        """Return the attention between genes, averaged over cells, as a sparse graph.

        Attention is not a causal network. It shows which genes contribute to the hidden state of a gene.

        Parameters
        ----------
        adata
            Cells. If None, uses the training cells.
        layer
            Layer of the attention; -1 for the last layer.
        heads
            ``"mean"`` or ``"max"`` over the heads, or the index of one head.
        top_k
            Number of genes with the highest attention to keep for each gene.
        min_cells
            Minimum number of cells in which both genes are tokens.
        max_cells
            Maximum number of cells to sample.
        max_genes
            Maximum number of genes; the most widely expressed genes are used. Memory grows quadratically with this
            number.
        seed
            Random seed for sampling the cells.
        batch_size
            Number of cells per batch. It is reduced for cells with many tokens, because memory grows quadratically with
            the number of tokens.
        key_added
            Key in ``adata.varp`` under which to store the graph, aligned to ``adata.var_names``. If None, nothing is
            written.

        Returns
        -------
        A sparse matrix, float32, shape (G, G), in the order of ``model.vocab.genes``. The entry in row i and column j
        is the attention of gene i to gene j, averaged over the cells in which both are tokens. Self-attention is
        excluded.

        Raises
        ------
        OptionError
            If the architecture has no attention, or an argument is invalid.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2}
        >>> model = scforge.models.Encoder(adata, "transformer_encoder", **sizes)
        >>> model.train(1, progress_bar=False)
        >>> graph = model.get_attention(top_k=3)
        >>> graph.shape == (model.vocab.n_genes, model.vocab.n_genes)
        True
        >>> adata.varp["scforge_attention"].shape
        (300, 300)
        """
        check_key("key_added", key_added)
        check_count("max_cells", max_cells, "cells")
        check_count("min_cells", min_cells, "cells")
        check_count("top_k", top_k, "genes")
        check_count("max_genes", max_genes, "genes")
        source, cells = ready_cells(self, adata, "attention is")
        graph = attention_between_genes(
            self.fitted.backbone,
            cells.sample(max_cells, seed=check_seed(seed)),
            self.tokenizer,
            objective=self.objective,
            layer=layer,
            heads=heads,
            top_k=top_k,
            min_cells=min_cells,
            max_genes=max_genes,
            batch_size=batch_size,
        )
        if key_added is not None and isinstance(source, AnnData):
            source.varp[key_added] = over_columns(self, source, graph, both=True)
        return graph

    def impute(
        self,
        adata: Source | None = None,
        *,
        genes: Sequence[str] | None = None,
        seed: int = 0,
        batch_size: int = 256,
        key_added: str | None = "imputed",
    ) -> pd.DataFrame:
        """Impute the expression of genes without counts in a cell, whether they were measured or not.

        This requires a model trained with ``masked_value_prediction`` or ``masked_diffusion``. The input contains all
        genes with counts. Values have the unit of the tokenizer: log1p CP10K for ``continuous_projection`` and
        ``rank_value``, counts with ``transform="counts"``, and bin indices for ``binned_expression``.

        Parameters
        ----------
        adata
            Cells. If None, uses the training cells.
        genes
            Genes to predict. If None, predicts all genes of the model.
        seed
            Random seed for the groups in which genes are predicted.
        batch_size
            Number of cells per batch.
        key_added
            Key in ``adata.layers`` under which to store the values, aligned to ``adata.var_names``, as a dense array
            with NaN for genes that are not in `genes` or not in the model. If None, nothing is written.

        Returns
        -------
        A data frame of values, float32, shape (N, number of genes). Genes with counts keep their value. The data frame
        requires four bytes per value.

        Raises
        ------
        OptionError
            If the model does not predict expression.
        GeneMismatchError
            If a gene is not in the vocabulary of the model.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "expression_head": "value"}
        >>> objective = {"name": "masked_value_prediction", "zero_targets": 1.0}
        >>> model = scforge.models.Encoder(adata, "transformer_encoder", objective=objective, **sizes)
        >>> model.train(1, progress_bar=False)
        >>> model.impute(genes=["ISG15", "TNFRSF4"]).shape
        (60, 2)
        """
        check_key("key_added", key_added)
        source, objective = predicting(self, adata, seed)
        if not knows_zeros(objective, self.tokenizer):
            has_option = "zero_targets" in objective.option_names()
            advice = "train with zero_targets=1.0" if has_option else "call get_normalized_expression"
            warn(
                "the model was trained on expressed genes only, so it predicts values as if every gene were expressed; "
                f"{advice} instead."
            )
        wanted = self.vocab.genes if genes is None else genes
        numbers = gene_numbers(self, wanted, source=source)
        cells = self.open_cells(source)
        values = predict_uncounted(
            self.fitted.backbone, cells, self.tokenizer, objective, numbers, seed=seed, batch_size=batch_size
        )
        return expression_table(self, source, cells, values, numbers, key_added)

    def denoise(
        self,
        adata: Source | None = None,
        *,
        n_folds: int = 5,
        seed: int = 0,
        batch_size: int = 256,
        key_added: str | None = "denoised",
    ) -> sparse.csr_matrix:
        """Denoise the expression of genes with counts by predicting it from the other genes of the cell.

        This requires a model trained with ``masked_value_prediction`` or ``masked_diffusion``. The genes are split into
        folds. Each fold is masked in turn and predicted from the rest, so no value is predicted from itself. Values
        have the same units as in :meth:`impute`. If values are binned by the quantiles of each cell, the quantiles are
        computed from its unmasked genes.

        Parameters
        ----------
        adata
            Cells. If None, uses the training cells.
        n_folds
            Number of folds.
        seed
            Random seed for the folds.
        batch_size
            Number of cells per batch.
        key_added
            Key in ``adata.layers`` under which to store the values, aligned to ``adata.var_names``. If None, nothing is
            written.

        Returns
        -------
        A sparse matrix, float32, shape (N, G), in the order of ``model.vocab.genes``, with an entry for each nonzero
        count.

        Raises
        ------
        OptionError
            If the model does not predict expression, or an argument is invalid.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "expression_head": "value"}
        >>> model = scforge.models.Encoder(adata, "transformer_encoder", objective="masked_value_prediction", **sizes)
        >>> model.train(1, progress_bar=False)
        >>> denoised = model.denoise()
        >>> denoised.shape == (60, model.vocab.n_genes)
        True
        """
        check_key("key_added", key_added)
        check_count("n_folds", n_folds, "folds", least=2)
        source, objective = predicting(self, adata, seed)
        values = predict_counted(
            self.fitted.backbone,
            self.open_cells(source),
            self.tokenizer,
            objective,
            n_folds=n_folds,
            seed=seed,
            batch_size=batch_size,
        )
        if key_added is not None and isinstance(source, AnnData):
            source.layers[key_added] = over_columns(self, source, values)
        return values

    def perturb_in_silico(
        self,
        adata: Source | None = None,
        genes: Sequence[str] | str | None = None,
        mode: str = "delete",
        *,
        groups: str | None = None,
        goal: Mapping[str, Any] | tuple[str, Any] | None = None,
        start: Mapping[str, Any] | tuple[str, Any] | None = None,
        combinations: bool | int = False,
        max_cells: int = 1000,
        n_permutations: int | None = None,
        untrained: bool = True,
        seed: int = 0,
        batch_size: int = 256,
        key_added: str | None = "in_silico",
    ) -> pd.DataFrame:
        """Change the counts of genes in cells, and measure the shift of the cell embeddings.

        The method follows Geneformer (Theodoris et al. 2023). Counts are changed before tokenization, so it works with
        every tokenizer and architecture. ``"delete"`` sets the count of a gene to 0 in the cells that express it.
        ``"overexpress"`` raises the count in every cell above all other genes, or to the first rank if the tokenizer
        ranks genes. With ``"entropy_ranked"``, it is raised at most to the sum of the other counts of the cell.
        ``"activate"`` changes cells without counts of the gene, and sets them to the usual count in cells that express
        it. The library size of a cell changes by the same number of counts, as if the data had been changed. A deletion
        therefore yields the embedding of the same AnnData with this count set to 0.

        **What the p-values mean.** Cells are not replicates here: a perturbation moves all cells in a similar way, and
        every perturbation moves them somewhat. The null hypothesis is therefore that a gene has no larger effect than
        other genes of similar expression. Each gene is compared with `n_permutations` control genes, matched within the
        group on the fraction of cells that express them and on their level in these cells. The controls are perturbed
        in the same way, each in up to 100 cells. Their means are standardized to the types (clusters of the embedding)
        and depths of the cells of the tested gene, and a regression removes the remaining difference in expression.
        ``p_value`` is the fraction of controls that shift the cells at least as far. ``goal_p_value`` is twice the
        fraction of controls that move the cells at least as far to the same side. The gene itself counts as one
        control, so no p-value is below ``1 / (n_permutations + 1)``.

        If only one gene stands out, its ``fdr`` cannot be below the number of tests divided by ``n_permutations + 1``
        (with a goal, twice that). The default of `n_permutations` is high enough for an ``fdr`` of 0.1 if half of the
        model's genes are enough controls. The lowest possible rate is in ``attrs["lowest_fdr"]`` of the table, and a
        warning is issued if it is above 0.1. With ``genes=None``, p-values are only ranks, so sort by ``shift_z``.

        **What the p-values do not mean.** A gene may also stand out in a model with random weights, because of its
        expression. ``shift_z_untrained`` is the z-score of the gene in such a model, with the same controls and cells.
        An effect was learned only if its z-score is larger than this value. Tokenizers with random choices
        (``side="both"``, truncation by sampling) add noise to all shifts.

        Parameters
        ----------
        adata
            Cells, see :meth:`get_latent_representation`. If None, uses the training cells.
        genes
            Names of genes in the vocabulary of the model. If None, uses the genes that at least 1% of the cells
            express, at most the 2,000 most widely expressed genes.
        mode
            ``"delete"``, ``"overexpress"`` or ``"activate"``.
        groups
            Column of ``adata.obs``; genes are perturbed and compared within each group. Cells without a group are left
            out.
        goal
            An obs column and a value, e.g. ``{"cell_type": "B"}``. If given, also measures whether cells move toward
            the mean direction of the cells with this value.
        start
            An obs column and a value that select the cells to perturb. If None, uses all cells or, with a goal, all
            cells outside the goal.
        combinations
            If 2, perturbs all pairs of `genes`. A deletion uses cells that express both genes, and an activation uses
            cells that express neither.
        max_cells
            Maximum number of cells to perturb, sampled at random, in total or per group. It also limits the number of
            cells over which the goal is averaged.
        n_permutations
            Number of control genes for each gene; 0 for no p-values. If None, uses 100, or as many as are needed for an
            ``fdr`` of 0.1 if these are no more than half of the genes of the model.
        untrained
            Whether to compute ``shift_z_untrained`` (and ``goal_z_untrained``), the z-scores of the same genes in the
            same architecture with random weights. This doubles the run time.
        seed
            Random seed.
        batch_size
            Number of cells per batch.
        key_added
            Key in ``adata.uns["scforge"]`` for the table (``"results"``) and its settings. If None, nothing is written.

        Returns
        -------
        A data frame with one row per gene (or pair: ``gene``, ``gene_2``) and group, sorted by decreasing shift (with a
        goal, by decreasing goal shift). ``n_cells``: number of cells in which the gene was perturbed. ``n_controls``:
        number of control genes. ``shift``, ``shift_sd``: mean and standard deviation over these cells of one minus the
        cosine between the embeddings before and after; NaN without cells. ``shift_z``: the shift in standard deviations
        of the control genes, NaN with fewer than 3 cells. ``shift_z_untrained``: see above. ``p_value``: see above.
        ``fdr``: Benjamini-Hochberg correction over all rows. With a goal, also ``goal_shift`` (change of the cosine to
        the goal; above 0 is closer), ``goal_shift_sd``, ``goal_z``, ``goal_z_untrained``, ``goal_p_value`` and
        ``goal_fdr``.

        Raises
        ------
        GeneMismatchError
            If a gene is not in the vocabulary of the model.
        DataError
            If cells, groups or states cannot be found, or no cell expresses a gene to activate.
        OptionError
            If an argument is invalid.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> table = model.perturb_in_silico(genes=["ISG15"], n_permutations=0)
        >>> len(table)
        1
        """
        check_key("key_added", key_added)
        check_count("max_cells", max_cells, "cells")
        if n_permutations is not None:
            check_count("n_permutations", n_permutations, "genes", least=0)
        check_seed(seed)
        source = source_of(self, adata)
        self.fitted.check_ready("its perturbation effects are")
        Perturbation(mode)  # raises an error for an unknown mode
        numbers = None if genes is None else gene_numbers(self, genes, source=source)
        if numbers is None and combinations is not False:
            raise OptionError(
                "requires genes, because there are too many pairs of all genes; pass a list of genes.", combinations=2
            )
        cells = self.open_cells(source)
        embedders: dict[str, Callable[[Cells], np.ndarray]] = {"": partial(self.fitted.embed, batch_size=batch_size)}
        if untrained and n_permutations != 0:
            try:
                embedders["_untrained"] = untrained_embedder(self.fitted, batch_size)
            except OptionError as error:
                warn(f"untrained=True is ignored: {error}")
        results, settings = perturbation_table(
            cells,
            embedders,
            self.tokenizer,
            numbers,
            mode,
            groups=groups,
            goal=goal,
            start=start,
            combinations=combinations,
            max_cells=max_cells,
            n_permutations=n_permutations,
            seed=seed,
        )
        if key_added is not None and isinstance(source, AnnData):
            # h5ad cannot store None.
            facts = {
                name: value for name, value in {**self.fitted.provenance(), **settings}.items() if value is not None
            }
            source.uns[UNS_KEY] = {**source.uns.get(UNS_KEY, {}), key_added: {**facts, "results": results}}
        return results

    def generate(
        self,
        n_cells: int | None = None,
        *,
        prompt: Sequence[str] | Mapping[str, float] | AnnData | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        condition: str | Sequence[str | None] | None = None,
        max_len: int | None = None,
        n_steps: int | None = None,
        batch_size: int = 256,
    ) -> AnnData:
        """Generate cells gene by gene (``"autoregressive_transformer"``), or by unmasking (``"scdiva"``).

        Parameters
        ----------
        n_cells
            Number of cells. If None, uses the number of cells in `prompt`, which must then be an AnnData.
        prompt
            Start of the cells: a list of genes, a mapping from genes to values (log1p CP10K, converted to the nearest
            bin if the model uses bins), or cells to complete. If None, uses no prompt.
        temperature
            Sampling temperature; values below 1 make likely genes even more likely.
        top_k
            Number of most likely genes to sample from. If None, samples from all genes.
        seed
            Random seed. Apart from rounding, a cell depends only on the seed and its index, not on `n_cells` or
            `batch_size`.
        condition
            One class for all cells, or one per cell, for an objective with ``condition_key``. None means any class.
        max_len
            Maximum number of tokens per cell, including CLS and EOS. If None, uses as many as the model allows. With
            unmasking, this is the exact number of tokens of each cell; if None, it is sampled from the training cells,
            up to ``max_tokens`` genes.
        n_steps
            Number of unmasking steps. If None, uses 16.
        batch_size
            Number of cells per batch.

        Returns
        -------
        The generated cells, with the genes of the model as variables. ``X`` contains log1p CP10K values (for models
        with bins, the bin means) as a float32 CSR matrix, and ``layers["bins"]`` contains the bins, if any. ``obs``
        contains the column ``n_genes`` and, with a `condition`, the classes. ``uns["scforge"]["generated"]`` contains
        the settings.

        Raises
        ------
        OptionError
            If the architecture cannot generate cells, or an argument is invalid.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, "autoregressive_transformer", hidden_dim=8, num_layers=1)
        >>> model.train(1, progress_bar=False)
        >>> model.generate(5).n_obs
        5
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        return generate_with(self, **arguments)

    def save(
        self,
        dir_path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        save_anndata: bool = False,
        adapter_only: bool = False,
        reference: bool | int = True,
    ) -> None:
        """Save the model to a folder: weights (safetensors), description (JSON), vocabulary (JSON) and model card.

        Parameters
        ----------
        dir_path
            Folder to create. It is written completely or not at all.
        overwrite
            Whether to replace the model in an existing folder; other files are kept.
        save_anndata
            Whether to also write the training data as ``adata.h5ad``, which :meth:`load` reads.
        adapter_only
            Whether to save only the adapters and the head of a model fine-tuned with ``lora``, which take 0.5 to 0.7 MB
            for a light encoder. Loading them requires the base model.
        reference
            Whether to also write labeled training cells as ``reference.safetensors``, or the maximum number of them
            (True for 20,000), so that :meth:`transfer_labels` works without the training data. The file contains their
            raw counts in the genes of the model, labels and batches, without names. Cells of small types are preferred.
            It takes about 1 kB per cell. No effect for a fine-tuned model, or a model that was set up without labels.

        Raises
        ------
        OptionError
            If the folder exists, or there are no adapters to save.

        Examples
        --------
        >>> import os, scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> model.save("light", overwrite=True)
        >>> sorted(os.listdir("light"))
        ['README.md', 'config.json', 'model.safetensors', 'vocab.json']
        """
        if adapter_only:
            if save_anndata:
                raise OptionError("has no effect with adapter_only=True; remove one of the two.", save_anndata=True)
            save_adapter(self.fitted, dir_path, overwrite=overwrite)
            return
        if save_anndata and self.adata is None:
            raise OptionError(
                ", but the model was loaded without adata; load the model with adata, or omit save_anndata.",
                save_anndata=True,
            )
        if not isinstance(reference, bool):
            check_count("reference", reference, "cells", least=2)
        most = MOST_CELLS if reference is True else int(reference)
        cells = reference_to_save(self, most) if reference else None
        if cells is None and not isinstance(reference, bool):
            warn(
                f"reference={reference} has no effect, because the model is fine-tuned, or has no training cells with "
                "at least two labels."
            )
        adata = self.adata if save_anndata else None
        self.fitted.write(dir_path, overwrite=overwrite, adata=adata, reference=cells)
        self.fitted.origin = self.fitted.origin_at(dir_path)

    @classmethod
    def load(
        cls,
        dir_path: str | os.PathLike[str],
        adata: AnnData | Literal[False] | None = None,
        *,
        base: Encoder | str | os.PathLike[str] | None = None,
        device: str | torch.device = "cpu",
        accelerator: str | None = None,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """Load a model, or adapters with their base model, saved by this or an earlier version of scforge.

        No code in the folder is executed, and pickle files are neither opened nor downloaded.

        Parameters
        ----------
        dir_path
            A folder, a hub repository (``"hf://org/name"``), or a registry model (``"scforge://name"``). See
            :func:`scforge.hub.resolve`.
        adata
            Data to continue with. Without setup, the data are set up like the training data, except for missing obs
            columns. If None, uses the training data if they were saved with the model. If False, no data are loaded,
            and cells must be passed to :meth:`get_latent_representation`.
        base
            The base model of the adapters, or its name. The adapters share its weights. If None, uses the name stored
            with the adapters.
        device
            Device for the module.
        accelerator
            Device in scvi-tools notation: ``"cpu"``, ``"gpu"``, ``"mps"`` or ``"auto"``. With `accelerator`, `device`
            is the index of the GPU or is omitted.
        revision, cache_dir, token, local_files_only
            See :func:`scforge.hub.resolve`. For adapters, these options also apply to the base model, except
            `revision`.

        Returns
        -------
        The model.

        Raises
        ------
        MissingFileError, ModelFileError
            If the folder, repository or revision does not exist, or its content is invalid.
        GeneMismatchError
            If `adata` contains too few genes of the model.
        OptionError
            If a name is unknown, a token is refused, or the base model of adapters is unknown.
        HubError
            If the hub cannot be reached or returns an error.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> model.save("light", overwrite=True)
        >>> again = scforge.models.Encoder.load("light", adata)
        >>> bool((again.get_latent_representation() == model.get_latent_representation()).all())
        True
        >>> annotator = scforge.models.Encoder.load("hf://org/blood", adata, revision="v1")  # doctest: +SKIP
        """
        if accelerator is not None:
            if accelerator == "auto":
                accelerator = "gpu" if torch.cuda.is_available() else "cpu"
            kinds = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps"}
            kind = kinds[check_choice("accelerator", accelerator, kinds)]
            device = f"{kind}:{device}" if isinstance(device, int) and kind != "cpu" else kind
        access: dict[str, Any] = {"cache_dir": cache_dir, "token": token, "local_files_only": local_files_only}
        message = f"dir_path={os.fspath(dir_path)!r}"
        found = read_settled(dir_path, lambda _: find_model(dir_path, prefix=message, revision=revision, **access))
        return cast("Self", load_found(cls, found, message, adata, base=base, device=device, access=access))

    @staticmethod
    def load_registry(dir_path: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the registry of a saved model, as in scvi-tools, i.e. its class and its setup arguments.

        Parameters
        ----------
        dir_path
            Folder of the model.

        Returns
        -------
        The registry, without the fields of an AnnData.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> scforge.models.Encoder(adata, hidden_dim=8).save("light", overwrite=True)
        >>> registry = scforge.models.Encoder.load_registry("light")
        >>> registry["model_name"], registry["setup_args"]["labels_key"]
        ('Encoder', 'cell_type')
        """
        content = read_folder(dir_path).content
        return bare_registry(content["class"], content["setup"])

    @staticmethod
    def view_setup_args(dir_path: str | os.PathLike[str]) -> None:
        """Print the arguments of ``setup_anndata`` of a saved model, as in scvi-tools.

        Parameters
        ----------
        dir_path
            Folder of the model. No pickle in it is opened.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata, labels_key="cell_type")
        >>> scforge.models.Encoder(adata, hidden_dim=8).save("light", overwrite=True)
        >>> scforge.models.Encoder.view_setup_args("light")
        Setup via Encoder.setup_anndata with arguments:
        {'batch_key': None, 'gene_key': None, 'labels_key': 'cell_type', 'layer': None}
        """
        registry = Encoder.load_registry(dir_path)
        print(printable(f"Setup via {registry['model_name']}.setup_anndata with arguments:"))
        pprint(registry["setup_args"])

    def export(
        self,
        path: str | os.PathLike[str],
        format: str = "onnx",
        *,
        max_len: int | None = None,
        correction: float = 0.0,
        overwrite: bool = False,
    ) -> None:
        """Export the cell embedding for use without scforge and, with ONNX, also without PyTorch.

        The folder contains ``model.onnx`` (or ``model.pt2``), ``vocab.json``, and ``export.json`` with the tokenizer,
        the inputs, the batches and the hash of the vocabulary. The exported model accepts any number of cells and
        tokens. Its results are compared with :meth:`get_latent_representation` before the folder is written.

        Parameters
        ----------
        path
            Folder to create. It is written completely or not at all.
        format
            ``"onnx"``; ``"torch"`` for :func:`torch.export.load`; or ``"transformers"`` for a folder that
            ``transformers.BertForMaskedLM.from_pretrained`` loads.
        max_len
            Maximum number of tokens per cell. If None, uses the maximum of the model. Not for ``"transformers"``.
        correction
            How strongly the embedding is corrected for batches, from 0 to 1, see :meth:`get_latent_representation`.
            Above 0, the exported model has one more input, ``batch``: the code of the batch of each cell, int64, shape
            (cells,), i.e. its position in ``batches`` of ``export.json``, or -1 for any other batch. Not for
            ``"transformers"``.
        overwrite
            Whether to replace the model in an existing folder; files that scforge did not write are kept.

        Raises
        ------
        OptionError
            If an argument is invalid, a package is missing, the architecture cannot be exported, or `correction` is
            above 0 but the model has no correction or is a query model.
        ModelFileError
            If the exported model computes different embeddings, in which case nothing is written.

        Examples
        --------
        >>> import os, scforge
        >>> adata = scforge.datasets.pbmc3k()[:60, :300].copy()
        >>> scforge.models.Encoder.setup_anndata(adata)
        >>> model = scforge.models.Encoder(adata, hidden_dim=8)
        >>> model.train(1, progress_bar=False)
        >>> model.export("exported", "torch", overwrite=True)
        >>> sorted(os.listdir("exported"))
        ['export.json', 'model.pt2', 'vocab.json']
        """
        if format == "transformers":
            if max_len is not None:
                raise OptionError("has no effect with format='transformers'; omit max_len.", max_len=max_len)
            if correction:
                raise OptionError(
                    "cannot be exported with format='transformers'; pass format='onnx'.", correction=correction
                )
            from scforge.foreign.geneformer import to_geneformer

            to_geneformer(self, path, overwrite=overwrite)
            return
        from scforge.estimators.export import export_model

        export_model(self.fitted, path, format, max_len=max_len, correction=correction, overwrite=overwrite)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        license: str | None = None,
        data: str | Sequence[str] | None = None,
        metrics: Report | pd.DataFrame | None = None,
        citation: str | None = None,
        adapter_only: bool = False,
        base: str | None = None,
        reference: bool = False,
        **options: Any,
    ) -> str:
        """Push the model to the Hugging Face Hub in one commit: weights, description, vocabulary and model card.

        Parameters
        ----------
        repo_id
            Repository, ``"org/name"``. It is created if necessary.
        license
            License identifier, e.g. ``"apache-2.0"``, or license name. If None, the card reports that no license is
            given.
        data
            Name of the training data, or a list of names. Data sets on the hub become links.
        metrics
            The result of :meth:`evaluate`, i.e. scores of the model and the baselines.
        citation
            Citation of the model.
        adapter_only
            Whether to push only the adapters and the head of a model fine-tuned with ``lora``, and the name of the base
            model.
        base
            Name of the base model: a repository or ``"scforge://name"``. It is not checked, and is used for this push
            only. If None, uses the location from which the base model was loaded or to which it was pushed.
        reference
            Whether to also push the counts of labeled training cells, see :meth:`save`.
        **options
            ``private``, ``token``, ``revision``, ``commit_message`` and ``create_pr``, see :func:`scforge.hub.upload`.

        Returns
        -------
        URL of the repository, or of the pull request.

        Raises
        ------
        OptionError
            If an argument is invalid, or the token has no write permission.
        HubError
            If the hub cannot be reached or returns an error.
        NotTrainedWarning
            If the model is not trained.

        Notes
        -----
        Cells are uploaded with ``reference=True`` only. For a fine-tuned model, ``split.safetensors`` is uploaded; it
        contains fingerprints (hashes of counts) of the training cells. The weights file of an annotator contains the
        embeddings of up to 2,000 training cells with their labels. License, data, scores and citation are kept with the
        model, and :meth:`save` also writes them.

        Examples
        --------
        >>> model.push_to_hub("org/light", license="apache-2.0", data="PBMC 3k")  # doctest: +SKIP
        >>> annotator.push_to_hub("org/blood", metrics=annotator.evaluate(), adapter_only=True)  # doctest: +SKIP
        """
        facts = {"license": license, "data": data, "citation": citation, "metrics": metrics}
        return push_model(
            self, repo_id, told=facts, adapter_only=adapter_only, base=base, reference=reference, **options
        )

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        adata: AnnData | None = None,
        *,
        family: str | None = None,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> Self:
        """Create a model from a published checkpoint, e.g. Geneformer, scGPT or scFoundation.

        Every checkpoint weight is either used or listed by its family as unused, with the reason. No weight of the
        model is initialized at random. The model can embed cells, and it can be trained, fine-tuned and saved like any
        other model.

        Parameters
        ----------
        path
            Folder or file of the checkpoint. For ``"geneformer"``, the folder with ``config.json`` and
            ``model.safetensors`` or ``pytorch_model.bin``. For ``"scgpt"``, the folder with ``best_model.pt``,
            ``vocab.json`` and ``args.json``, or the weights file. For ``"scfoundation"``, ``models.ckpt`` or its
            folder.
        adata
            Cells of the model, which are set up with :meth:`setup_anndata` if necessary. If None, pass cells to
            :meth:`get_latent_representation`.
        family
            Name of a family, see :func:`scforge.foreign.list_families`. If None, it is detected.
        device
            Device for the module.
        **options
            Additional arguments of the family.

            ``"geneformer"``: `tokens_medians` are the published dictionaries: the folder of their pickle files, from
            which only text and numbers are unpickled; a tuple of two files or dictionaries (gene to token, and gene to
            median); or a table as in :meth:`scforge.tokenizers.RankValueTokenizer.from_geneformer`. If None, they are
            read from `path`. `version` is ``"V1"`` (2,048 genes) or ``"V2"`` (4,096 tokens with CLS and EOS). If None,
            it is detected from the number of positions and tokens. `ensembl_map` maps former to current Ensembl ids,
            and `gene_names` maps symbols to Ensembl ids; each is a dictionary, its file, or a table. `pooling` is
            ``"genes"`` (mean over genes, as in Geneformer's own code for V1), ``"cls"`` (as for V2) or ``"mean"`` (mean
            over all tokens). `embedding_layer` counts layers back from the last layer. If None, uses 1, i.e. the
            second-to-last layer, as in Geneformer's own code. For fine-tuning, pass 0 to use the last layer.

            ``"scgpt"``, which embeds a cell by the hidden state of CLS: `vocab` and `args` are JSON files or
            dictionaries. If None, uses the files next to the weights. The weights may use the parameter names of flash
            attention. `cls_value` is the value of the CLS token. If None, uses ``pad_value`` of `args`, as scGPT does
            to embed cells; its fine-tuning scripts use 0. With `normalize`, each embedding is divided by its length, as
            in scGPT's ``embed_data``.

            ``"scfoundation"``, without the decoder, so the model does not predict expression: `vocab` is the gene
            panel, as the published table with ``gene_name`` and ``index``, or as names in order. If None, uses the
            table next to the weights. `part` is ``"cell"``, ``"gene"`` or ``"rde"``. `pooling` is ``"depths"``, which
            concatenates the hidden states of the two depth tokens, and the maximum and the mean over genes, as
            scFoundation does to embed cells; or another pooling of ``transformer_encoder``.

            ``"scdiva"``: `vocab` contains the genes in the order of the columns.

        Returns
        -------
        The model with the weights of the checkpoint.

        Raises
        ------
        MissingFileError, ModelFileError
            If the checkpoint or one of its files is missing or invalid.
        OptionError
            If the checkpoint does not belong to a known family, or an option is invalid.
        GeneMismatchError
            If `adata` contains too few genes of the model.

        Examples
        --------
        >>> import scforge
        >>> adata = scforge.datasets.pbmc3k()
        >>> model = scforge.models.Encoder.from_checkpoint("Geneformer-V2-104M", adata)  # doctest: +SKIP
        >>> model = scforge.models.Encoder.from_checkpoint("scGPT_human", adata, normalize=True)  # doctest: +SKIP
        >>> model = scforge.models.Encoder.from_checkpoint("models.ckpt", family="scfoundation")  # doctest: +SKIP
        >>> model.get_latent_representation(adata)  # doctest: +SKIP
        """
        return cast("Self", load_foreign(cls, read_checkpoint(path, family, **options), adata, device))
