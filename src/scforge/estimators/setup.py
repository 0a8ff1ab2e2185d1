"""Fields and registries for scvi-tools, setup of AnnData and MuData, and the cells that models read and write."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pandas as pd
from anndata import AnnData
from mudata import MuData
from scvi.data.fields import CategoricalObsField, LayerField

from scforge._checks import check_known
from scforge._columns import codes_among, labels_of, text_of, texts_of
from scforge._constants import AUTO_KEY, UNS_KEY
from scforge.data.cells import Cells
from scforge.data.checks import counts_of, gene_names, warn_if_transformed
from scforge.data.readers import check_modality, shared_columns
from scforge.errors import DataError, OptionError
from scforge.models.registry import MODELS
from scforge.training.datamodule import CellDataModule

if TYPE_CHECKING:
    from scforge.data.cells import CellSource
    from scforge.estimators.fitted import FittedModel

LAST = "_scvi_scforge_modality"
"""Key in ``mdata.uns`` for the modality that was set up last."""

_PLACES = {"Encoder": "scforge.estimators.encoder", "ScDiVa": "scforge.estimators.scdiva"}


type Source = AnnData | Cells | str | os.PathLike[str]
"""A source of cells."""


class GeneField(LayerField):
    """Raw counts with gene names. Genes are matched by name, so data sets may have different genes.

    Parameters
    ----------
    registry_key
        Key of the field in the registry.
    layer
        Key in ``adata.layers``. If None, uses ``adata.X``.
    gene_key
        Column of ``adata.var``. If None, uses ``adata.var_names``.
    """

    GENE_KEY = "gene_key"

    def __init__(self, registry_key: str, layer: str | None, gene_key: str | None) -> None:
        super().__init__(registry_key, layer, is_count_data=False, correct_data_format=False)
        self.gene_key = gene_key

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Register the field. Raises a DataError if values are not counts or gene names are missing."""
        warn_if_transformed(counts_of(adata, self.attr_key), self.attr_key)
        gene_names(adata, self.gene_key)
        return {self.N_OBS_KEY: adata.n_obs, self.N_VARS_KEY: adata.n_vars, self.GENE_KEY: self.gene_key}

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Register another data set, whose genes may differ; they are mapped by name when cells are read."""
        return self.register_field(adata_target)


class ObsField(CategoricalObsField):
    """A categorical obs column, in which missing values, if allowed, have the code -1.

    Parameters
    ----------
    registry_key
        Key of the field in the registry.
    obs_key
        Column of ``adata.obs``.
    allow_missing
        Whether values may be missing, as for labels but not for batches.
    """

    def __init__(self, registry_key: str, obs_key: str, *, allow_missing: bool) -> None:
        super().__init__(registry_key, obs_key)
        self.allow_missing = allow_missing

    def register_field(self, adata: AnnData, known: Sequence[Any] = ()) -> dict[str, Any]:
        """Write the codes into obs, and register the categories after the known categories."""
        self.validate_field(adata)
        key = self._original_attr_key
        column = adata.obs[key]
        read = partial(labels_of, fractional=True) if self.allow_missing else texts_of
        argument = "labels_key" if self.allow_missing else "batch_key"
        texts = read(column, key=key, argument=argument)
        missing = int(texts.isna().sum())
        if missing and not self.allow_missing:
            lacking = f"adata.obs[{key!r}] is missing for {missing} of {adata.n_obs} cells"
            raise DataError(f"{lacking}; fill in the values or drop these cells.")
        names = list(texts.categories)
        if isinstance(column.dtype, pd.CategoricalDtype):  # in the order of the user
            in_order = read(column.cat.remove_unused_categories().cat.categories.array, key=key, argument=argument)
            names = list(dict.fromkeys(in_order.dropna()))
        mapping = [*dict.fromkeys([*map(text_of, known), *names])]
        adata.obs[self.attr_key] = codes_among(texts, mapping)
        return {self.CATEGORICAL_MAPPING_KEY: np.array(mapping, dtype=object), self.ORIGINAL_ATTR_KEY: key}

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Register another data set; new categories are appended to the known categories."""
        return self.register_field(adata_target, state_registry[self.CATEGORICAL_MAPPING_KEY])


def shared(mdata: MuData, modality: str) -> Any:
    """Return the obs columns shared by all modalities, for the cells of one modality."""
    adata = mdata.mod[modality]
    return shared_columns(mdata.obs, modality, adata.obs_names, list(adata.obs.columns))


def adopted(mdata: MuData, modality: str, argument: str, key: str | None) -> str | None:
    """Return the name of a column in the modality's obs, after copying it there if it is only in ``mdata.obs``."""
    if key is None:
        return None
    adata = mdata.mod[modality]
    if key in adata.obs:
        return key
    name = key.removeprefix(f"{modality}:")
    if name not in adata.obs:
        known_to_all = shared(mdata, modality)
        if name not in known_to_all:
            known = [str(column) for column in (*adata.obs, *known_to_all) if not str(column).startswith("_scvi_")]
            check_known(argument, key, known, f"mdata.mod[{modality!r}].obs or mdata.obs")
        adata.obs[name] = known_to_all[name]
    return name


def setup_of(cls: Any, source: Any) -> dict[str, Any]:
    """Return the fields that an AnnData was set up with, empty if it is not set up, and for other sources."""
    if not isinstance(source, AnnData):
        return {}
    try:
        manager = cls._get_most_recent_anndata_manager(source)
    except ValueError:  # a copy of an AnnData that was set up
        return {}
    return {} if manager is None else dict(manager.registry["setup_args"])


def adata_of(cls: Any, data: Any, modality: str | None = None) -> Any:
    """Return the modality of a MuData that the model uses; other data are returned unchanged.

    `modality` is the modality of the training data. It is used unless only another modality is set up.
    """
    if not isinstance(data, MuData):
        return data
    ready = [name for name, adata in data.mod.items() if setup_of(cls, adata)]
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


def set_up_like(cls: Any, data: Any, setup: Mapping[str, Any]) -> Any:
    """Set up a MuData like the training data if necessary, and return its modality; return other data unchanged."""
    if not isinstance(data, MuData):
        return data
    adata = adata_of(cls, data, setup.get("modality"))
    if not setup_of(cls, adata):
        known = {*adata.obs, *shared(data, setup["modality"])}
        present = {key: setup[key] if setup[key] in known else None for key in ("batch_key", "labels_key")}
        cls.setup_mudata(data, **{**setup, **present})
    return adata


def register(cls: Any, adata: AnnData, setup: Mapping[str, Any]) -> None:
    """Set up an AnnData with these columns unless it already is, and keep its modality."""
    there = setup_of(cls, adata)
    wanted = {key: value for key, value in setup.items() if key != "modality"}
    if not there or any(there.get(key) != value for key, value in wanted.items()):
        cls.setup_anndata(adata, **wanted)
        if "modality" in there:
            cls._get_most_recent_anndata_manager(adata).update_setup_method_args({"modality": there["modality"]})


class Model(Protocol):
    """A model class, which holds a fitted model and the cells that it was created with."""

    fitted: FittedModel
    adata: Any
    datamodule: CellDataModule | None
    query_cells: Any
    reference_cells: CellSource | None
    base_model: Any
    opened: list[Any]
    train_indices_: Any
    validation_indices_: Any

    def open_cells(self, source: Any = None, **options: Any) -> Cells:
        """Open cells over the genes of the model."""


def training_source(model: Model) -> Any:
    """Return the training cells, or None if the model was loaded without them."""
    return model.adata if model.datamodule is None else model.datamodule.cells


def source_of(model: Model, source: Source | None) -> Any:
    """Return `source`, or the query or training cells if None; of a MuData, its modality."""
    for cells in (source, model.query_cells, training_source(model)):
        if cells is not None:
            return adata_of(type(model), cells, model.fitted.setup.get("modality"))
    raise OptionError(", but the model was loaded without adata; pass the cells.", adata=None)


def ready_cells(model: Model, source: Source | None, what: str) -> tuple[Any, Cells]:
    """Return a source and its cells over the genes of the model, and warn if `what` is random without training."""
    source = source_of(model, source)
    model.fitted.check_ready(what)
    return source, model.open_cells(source)


def write_embedding(
    model: FittedModel, adata: AnnData, key: str, embedding: np.ndarray, cells: Cells, *, correction: float = 0.0
) -> None:
    """Write an embedding and its settings into the AnnData of the cells."""
    key = model.obsm_key if key == AUTO_KEY else key
    adata.obsm[key] = embedding
    provenance = model.provenance_of(cells, embedding.shape[1], correction=correction)
    adata.uns[UNS_KEY] = {**adata.uns.get(UNS_KEY, {}), key: provenance}


def bare_registry(model: str, setup: dict[str, Any]) -> dict[str, Any]:
    """Return a registry with setup arguments but no fields, for the model class named `model`."""
    return {
        "scvi_version": None,
        "model_name": model,
        "setup_args": setup,
        "setup_method_name": "setup_anndata",
        "field_registries": {},
    }


def class_named(name: str) -> Any:
    """Return the model class of this name, or None if it does not exist.

    Examples
    --------
    >>> class_named("ScDiVa").__name__, class_named("SCVI")
    ('ScDiVa', None)
    """
    place = _PLACES.get(name)
    return None if place is None else getattr(importlib.import_module(place), name)


def class_of_architecture(architecture: str | None) -> Any:
    """Return the model class of an architecture.

    Examples
    --------
    >>> [class_of_architecture(name).__name__ for name in ("scdiva", "gene_pooling", None)]
    ['ScDiVa', 'Encoder', 'Encoder']
    """
    return class_named(
        "Encoder" if architecture is None else getattr(MODELS.get(architecture), "model_class", "Encoder")
    )
