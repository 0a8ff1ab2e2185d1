"""What functions use of a model class: the cells that it reads, and where it writes embeddings."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from anndata import AnnData

from scforge._constants import AUTO_KEY, UNS_KEY
from scforge.data.cells import Cells
from scforge.errors import OptionError
from scforge.estimators.setup import adata_of

if TYPE_CHECKING:
    from scforge.data.cells import CellSource
    from scforge.estimators.fitted import FittedModel
    from scforge.training.datamodule import CellDataModule

type Source = AnnData | Cells | str | os.PathLike[str]
"""A source of cells."""


class Model(Protocol):
    """A model class, which holds a fitted model and the cells that it was created with."""

    fitted: FittedModel
    datamodule: CellDataModule | None
    query_cells: Any
    reference_cells: CellSource | None
    base_model: Any
    opened: list[Any]
    train_indices_: Any
    validation_indices_: Any
    test_indices_: Any

    @property
    def adata(self) -> Any:
        """The AnnData that the model was created with."""

    @classmethod
    def of_fitted(
        cls, fitted: FittedModel, adata: AnnData | None = None, *, datamodule: CellDataModule | None = None
    ) -> Self:
        """Return a model of this class that holds a fitted model."""

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


def write_embedding(
    model: FittedModel, adata: AnnData, key: str, embedding: np.ndarray, cells: Cells, *, correction: float = 0.0
) -> None:
    """Write an embedding and its settings into the AnnData of the cells."""
    key = model.obsm_key if key == AUTO_KEY else key
    adata.obsm[key] = embedding
    provenance = model.provenance_of(cells, embedding.shape[1], correction=correction)
    adata.uns[UNS_KEY] = {**adata.uns.get(UNS_KEY, {}), key: provenance}
