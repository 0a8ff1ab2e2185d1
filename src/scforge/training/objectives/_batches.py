"""The batch of each cell, which a decoder is told, and what is known of cells of a query.

Shapes: N cells of a source, B cells of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scforge.data.cells import CellBlock, Cells
from scforge.errors import DataError, TrainingError, listing, warn
from scforge.training.objectives._classes import classes_found, classes_of, numbers_of
from scforge.training.objectives.base import Objective

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TellsBatches"]


class TellsBatches(Objective):
    """An objective whose decoder is told the batch of each cell, from a column of obs called `batch_key`."""

    batch_key: str | None
    batches: list[str] | None
    _batches: np.ndarray | None = None
    takes_batch_key = True

    def options_from(self, column: Callable[[str], pd.Series]) -> dict[str, Any]:
        """Return the batches of the cells that a model is made with, unless they are known already."""
        if self.batch_key is None or self.batches is not None:
            return {}
        return {"batches": classes_found("batch_key", self.batch_key, column)}

    def model_options(self) -> dict[str, Any]:
        """Return the number of batches, as an option of the architecture."""
        return {} if self.batches is None else {"n_batches": len(self.batches)}

    def bind(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the batch of each cell.

        Raises
        ------
        DataError
            If there is no such column, or a batch that the model does not know.
        """
        self._batches = self.numbers("batch", self.batches, cells)
        if self._batches is None:
            return
        if n_unknown := int((self._batches < 0).sum()):
            raise DataError(
                f"batch_key={self.batch_key!r}: {n_unknown} of {len(self._batches)} cells are of none of the "
                f"batches that the model knows ({listing(self.batches or [])}); rename the batches of the data, or "
                "make a new model."
            )

    def bind_query(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the batch of each cell of a query; those of unknown ones are decoded in the mean of all batches."""
        self._batches = self.numbers("batch", self.batches, cells, needed=False)
        self.warn_of_unknown_batches()

    def warn_of_unknown_batches(self) -> None:
        """Warn if cells are of none of the batches that the decoder can be told."""
        if self._batches is None:
            return
        if n_unknown := int((self._batches < 0).sum()):
            warn(
                f"batch_key={self.batch_key!r}: {n_unknown} of {len(self._batches)} cells are of none of the batches "
                f"that the model knows ({listing(self.batches or [])}); they are decoded in the mean of all."
            )

    def numbers(self, what: str, names: list[str] | None, cells: Cells, *, needed: bool = True) -> np.ndarray | None:
        """Return the number of the batch or the class of each cell, int64, shape (N,); None without such a key.

        Parameters
        ----------
        what
            ``"batch"`` or ``"labels"``: the option with the column is called ``<what>_key``.
        names
            Names by number.
        needed
            False gives all cells the number -1 where there is no such column.
        """
        argument = f"{what}_key"
        key = getattr(self, argument)
        if key is None:
            return None
        if names is None:
            option = {"batch": "batches"}.get(what, what)
            raise TrainingError(f"{option} are not known yet; give {option}=[...], or make the model with cells.")
        try:
            classes = classes_of(argument, key, cells.column)
        except DataError:
            if needed:
                raise
            return np.full(len(cells), -1, dtype=np.int64)
        return numbers_of(classes, names)

    def own_batches(self, cells: Cells) -> np.ndarray:
        """Return a number for each batch that cells have, known to the model or not, int64, shape (N,); -1 without.

        Raises
        ------
        DataError
            If there is no such column.
        """
        assert self.batch_key is not None
        return np.asarray(cells.column(self.batch_key).astype("category").cat.codes, dtype=np.int64)

    def of_block(self, what: str, numbers: np.ndarray | None, block: CellBlock) -> torch.Tensor | None:
        """Return the numbers of the cells of a batch, int64, shape (B,); None without such a key."""
        argument = f"{what}_key"
        if getattr(self, argument) is None:
            return None
        if numbers is None:
            raise TrainingError(f"{argument}: the classes of the cells are not known; call bind of the objective.")
        return torch.from_numpy(numbers[block.rows])
