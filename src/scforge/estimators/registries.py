"""Registries, as scvi-tools has them, of data that are no AnnData at hand."""

from __future__ import annotations

from typing import Any

from scforge.errors import OptionError
from scforge.training.datamodule import CellDataModule


def bare_registry(model: str, setup: dict[str, Any]) -> dict[str, Any]:
    """Return a registry that says where things are, of the class named `model`."""
    return {
        "scvi_version": None,
        "model_name": model,
        "setup_args": setup,
        "setup_method_name": "setup_anndata",
        "field_registries": {},
    }


def datamodule_registry(
    model: str, adata: Any, data: CellDataModule, registry: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the registry of a data module, which says where things are in like data.

    Raises
    ------
    OptionError
        If there is an `adata`, too, or `data` is no data module.
    """
    if adata is not None:
        raise OptionError("adata and datamodule both bring cells; give one of them.")
    if not isinstance(data, CellDataModule):
        raise OptionError(
            f"datamodule is of type {type(data).__name__!r}; make one with scforge.training.CellDataModule(cells)."
        )
    setup = {"layer": None, "gene_key": None, "batch_key": data.batch_key, "labels_key": data.labels_key}
    return bare_registry(model, setup) if registry is None else registry
