"""Advice for attributes and arguments of scvi-tools and scanpy that the model classes do not have."""

from __future__ import annotations

import inspect
from typing import Any

from scvi.model.base._base_model import BaseModelMetaClass

OF_SCVI = {
    **dict.fromkeys(
        ("categorical_covariate_keys", "continuous_covariate_keys"),
        "scforge does not support covariates, so use batch_key",
    ),
    "size_factor_key": "scforge uses the sum of the counts of a cell as its size factor, so omit size_factor_key",
    "unlabeled_category": "mark cells without a label by NaN in the labels_key column, and omit unlabeled_category",
    "use_raw": "pass the layer with raw counts as layer, or adata.raw.to_adata() as adata",
}
"""A mapping from arguments of scvi-tools' and scanpy's functions to advice for ``setup_anndata``."""

OF_POSTERIOR = {
    "return_dist": "an embedding of this class has no variances, so omit return_dist, or use scforge.models.ScDiVa",
    **dict.fromkeys(("give_mean", "mc_samples"), "the embedding is always a mean, so omit it"),
    "use_raw": "counts are read from the place that setup_anndata registered, so pass adata.raw.to_adata() as adata",
}
"""A mapping from arguments of scvi-tools' and scanpy's functions to advice for ``get_latent_representation``."""


class Absent:
    """A scvi-tools attribute that a model class does not have; accessing it raises an error with advice."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, model: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} has no {self._name}; {self._instead}.")


class Front(BaseModelMetaClass):
    """Metaclass whose ``dir`` omits attributes that only scvi-tools supports."""

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if not cls.lacks(name)]

    def lacks(cls, name: str) -> bool:
        """Return whether only scvi-tools supports an attribute."""
        return isinstance(inspect.getattr_static(cls, name, None), Absent)
