"""What ``setup_anndata`` registers of an AnnData: its counts and gene names, and columns of obs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData
from scvi.data.fields import CategoricalObsField, LayerField

from scforge.data.checks import counts_of, warn_if_transformed
from scforge.data.genes import gene_names
from scforge.errors import DataError, did_you_mean, listing


class GeneField(LayerField):
    """Raw counts with the names of their genes. Genes are matched by name, so another data set may have others.

    Parameters
    ----------
    registry_key
        Key of the field in the registry.
    layer
        Key in ``adata.layers``, or None for ``adata.X``.
    gene_key
        Column of ``adata.var``, or None for ``adata.var_names``.
    """

    GENE_KEY = "gene_key"

    def __init__(self, registry_key: str, layer: str | None, gene_key: str | None) -> None:
        super().__init__(registry_key, layer, is_count_data=False, correct_data_format=False)
        self.gene_key = gene_key

    def validate_field(self, adata: AnnData) -> None:
        """Raise unless the layer holds counts and every gene has a name; warn where they look transformed."""
        warn_if_transformed(counts_of(adata, self.attr_key), self.attr_key)
        gene_names(adata, self.gene_key)

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Register the field."""
        self.validate_field(adata)
        return {self.N_OBS_KEY: adata.n_obs, self.N_VARS_KEY: adata.n_vars, self.GENE_KEY: self.gene_key}

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Register another data set, whatever genes it has: they are mapped by name when cells are read."""
        return self.register_field(adata_target)


class ObsField(CategoricalObsField):
    """A column of obs with categories; a missing value has the code -1 where that is allowed.

    Parameters
    ----------
    registry_key
        Key of the field in the registry.
    obs_key
        Column of ``adata.obs``.
    allow_missing
        Whether cells may have no value (labels may, batches may not).
    """

    def __init__(self, registry_key: str, obs_key: str, *, allow_missing: bool) -> None:
        super().__init__(registry_key, obs_key)
        self.allow_missing = allow_missing

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """Write the codes into obs and register the categories."""
        return self._register(adata, known=[])

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Register another data set; categories not seen before come behind the known ones."""
        return self._register(adata_target, known=list(state_registry[self.CATEGORICAL_MAPPING_KEY]))

    def _register(self, adata: AnnData, known: list[Any]) -> dict[str, Any]:
        self.validate_field(adata)
        column = adata.obs[self._original_attr_key]
        missing = int(column.isna().sum())
        if missing and not self.allow_missing:
            raise DataError(
                f"adata.obs[{self._original_attr_key!r}] has no value for {missing} of {adata.n_obs} cells; "
                "fill it in or leave those cells out."
            )
        categories = np.asarray(column.astype("category").cat.categories, dtype=object)
        mapping = [*known, *[category for category in categories if category not in set(known)]]
        adata.obs[self.attr_key] = pd.Categorical(np.asarray(column, dtype=object), categories=mapping).codes
        return {
            self.CATEGORICAL_MAPPING_KEY: np.array(mapping, dtype=object),
            self.ORIGINAL_ATTR_KEY: self._original_attr_key,
        }


def check_places(adata: AnnData, setup: dict[str, Any], front: str) -> None:
    """Raise unless an AnnData without a set-up of its own has counts and gene names where the training data had them.

    Parameters
    ----------
    adata
        The cells.
    setup
        Arguments of the set-up of the training data.
    front
        Name of the front class, for the message.

    Raises
    ------
    DataError
        If it lacks the layer, or the column of var.
    """
    for argument, table, where in (("layer", adata.layers, "adata.layers"), ("gene_key", adata.var, "adata.var")):
        key, known = setup[argument], [name for name in table if name is not None]
        if key is not None and key not in known:
            raise DataError(
                f"{argument}={key!r}, where the training data have them, is not in {where} of these cells"
                f"{did_you_mean(key, known)} (there is: {listing(known)}); call {front}.setup_anndata(adata, "
                "...) on them to say where their counts and gene names are."
            )
