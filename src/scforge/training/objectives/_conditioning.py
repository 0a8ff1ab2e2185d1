"""Batches and labels that objectives condition on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scforge._columns import codes_among, labels_of, texts_of
from scforge.data.cells import CellBlock, Cells, named_column
from scforge.errors import DataError, OptionError, TrainingError, listing, warn
from scforge.training.objectives.base import Objective

if TYPE_CHECKING:
    import pandas as pd

IN_THE_MEAN = "these cells are decoded with the mean of all batches."
"""How cells of unknown batches are treated."""


def check_classes(argument: str, classes: Any, key_argument: str, key: str | None) -> list[str] | None:
    """Return the names of classes as a list, or None.

    Raises
    ------
    OptionError
        If the classes are not a list of names, a name occurs twice, or no column is specified for them.
    """
    if classes is None:
        return None
    if isinstance(classes, str) or not classes or len(set(classes)) < len(classes):
        raise OptionError("must be a list of unique class names.", argument=argument, value=classes)
    if key is None:
        raise OptionError(
            f"requires {key_argument}, the column of obs with the classes.", argument=argument, value=list(classes)
        )
    return list(classes)


def classes_found(
    argument: str, key: str, column: Callable[[str], pd.Series], *, read: Callable[..., pd.Categorical] = texts_of
) -> list[str]:
    """Return the sorted names of the classes in a column of obs, whose text `read` returns.

    Raises
    ------
    DataError
        If the column is missing, or contains no classes.
    OptionError
        If no cell has a value.
    """
    try:
        values = column(key)
    except DataError as error:
        raise DataError(error.problem, argument=argument, value=key) from error
    texts = read(values, key=key, argument=argument)
    if not len(texts.categories):
        raise OptionError("is missing for all cells; choose another column.", argument=argument, value=key)
    return [str(name) for name in texts.categories]


def numbers_of_cells(
    key_argument: str, key: str | None, argument: str, names: list[str] | None, cells: Cells, *, needed: bool = True
) -> np.ndarray | None:
    """Return the class code of each cell (int64, shape (N,); -1 for unknown classes), or None without a column `key`.

    Parameters
    ----------
    key_argument, key
        Name of the option that selects the column, and the column.
    argument, names
        Name of the option that lists the classes, and the classes in the order of their codes.
    cells
        All cells.
    needed
        If False and the column is missing, all cells receive the code -1.
    """
    if key is None:
        return None
    if names is None:
        raise TrainingError(f"are unknown; pass {argument}=[...], or create the model with cells.", argument=argument)
    try:
        values = named_column(cells, key, argument=key_argument)
    except DataError:
        if needed:
            raise
        return np.full(len(cells), -1, dtype=np.int64)
    return codes_among(texts_of(values, key=key, argument=key_argument), names)


def of_block(key: str | None, numbers: np.ndarray | None, block: CellBlock) -> torch.Tensor | None:
    """Return the class codes of the cells in a batch, int64, shape (B,), or None without a column `key`."""
    if key is None:
        return None
    if numbers is None:
        raise TrainingError(f"the classes in column {key!r} are unknown; call the bind method of the objective first.")
    return torch.from_numpy(numbers[block.rows])


class TellsBatches(Objective):
    """An objective whose decoder is conditioned on the batch of each cell, from the column `batch_key` of obs."""

    batch_key: str | None
    batches: list[str] | None
    _batches: np.ndarray | None = None
    takes_batch_key = True

    def _set_batches(self, batch_key: str | None, batches: Sequence[str] | None) -> None:
        """Check and store the batch options."""
        self.batch_key = batch_key
        self.batches = check_classes("batches", batches, "batch_key", batch_key)

    def options_from(self, column: Callable[[str], pd.Series]) -> dict[str, Any]:
        """Return the batches of the cells that the model is created with, unless batches are already set."""
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
            If the column is missing, or contains a batch that is unknown to the model.
        """
        if problem := self.look_up_batches(cells):
            raise DataError(f"{problem}; rename the batches in the data, or train a new model.")

    def bind_query(self, cells: Cells, train_rows: np.ndarray) -> None:
        """Look up the batch of each query cell; unknown batches are decoded with the mean of all batch vectors."""
        if problem := self.look_up_batches(cells, needed=False):
            warn(f"{problem}; {IN_THE_MEAN}")

    def look_up_batches(self, cells: Cells, *, needed: bool = True) -> str:
        """Look up the batch of each cell; return a message if cells have unknown batches, otherwise "".

        If the column is missing and not `needed`, no cell has a batch.
        """
        self._batches = numbers_of_cells("batch_key", self.batch_key, "batches", self.batches, cells, needed=needed)
        if self._batches is None or not (n_unknown := int((self._batches < 0).sum())):
            return ""
        return (
            f"batch_key={self.batch_key!r}: {n_unknown} of {len(cells)} cells have batches that are unknown to the "
            f"model (known: {listing(self.batches or [])})"
        )

    def own_batches(self, cells: Cells) -> pd.Categorical:
        """Return the batch of each cell, even if it is new to the model, length N.

        Raises
        ------
        DataError
            If the column is missing.
        """
        key = str(self.batch_key)
        return texts_of(cells.column(key), key=key, argument="batch_key")

    def batches_of(self, block: CellBlock) -> torch.Tensor | None:
        """Return the batch codes of the cells in a minibatch, int64, shape (B,), or None without `batch_key`."""
        return of_block(self.batch_key, self._batches, block)


class TellsLabels(TellsBatches):
    """An objective that may also learn the labels of cells, from the column `labels_key` of obs."""

    labels_key: str | None
    labels: list[str] | None

    def _set_labels(self, labels_key: str | None, labels: Sequence[str] | None) -> None:
        """Check and store the label options."""
        self.labels_key = labels_key
        self.labels = check_classes("labels", labels, "labels_key", labels_key)

    def options_from(self, column: Callable[[str], pd.Series]) -> dict[str, Any]:
        """Return the labels and batches of the cells that the model is created with, unless they are already set."""
        options = super().options_from(column)
        if self.labels_key is not None and self.labels is None:
            read = partial(labels_of, warns=True)
            options["labels"] = classes_found("labels_key", self.labels_key, column, read=read)
        return options
