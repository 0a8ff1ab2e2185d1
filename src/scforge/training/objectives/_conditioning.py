"""Batches and labels that objectives condition on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scforge.data.cells import CellBlock, Cells
from scforge.errors import DataError, OptionError, TrainingError, listing, warn
from scforge.training.objectives.base import Objective

if TYPE_CHECKING:
    import pandas as pd


def check_key(argument: str, key: Any) -> str | None:
    """Return the name of a column of obs, or None.

    Raises
    ------
    OptionError
        If it is no name.
    """
    if key is not None and not (isinstance(key, str) and key):
        raise OptionError(f"{argument}={key!r} is not the name of a column of obs.")
    return key


def check_classes(argument: str, classes: Any, key_argument: str, key: str | None) -> list[str] | None:
    """Return a list of the names of classes, or None.

    Raises
    ------
    OptionError
        If it is no such list, names a class twice, or there is no column for them.
    """
    if classes is None:
        return None
    listed = isinstance(classes, Sequence) and not isinstance(classes, str)
    if not listed or not classes or not all(isinstance(name, str) for name in classes):
        raise OptionError(f"{argument}={classes!r} is not a list of the names of classes.")
    if len(set(classes)) < len(classes):
        raise OptionError(f"{argument}={list(classes)!r} names a class twice; name each once.")
    if key is None:
        raise OptionError(f"{argument}={list(classes)!r} needs {key_argument}, the column of obs with the classes.")
    return list(classes)


def classes_of(argument: str, key: str, column: Callable[[str], pd.Series]) -> pd.Series:
    """Return a column of obs, or raise :class:`~scforge.errors.DataError` that says which argument names it."""
    try:
        return column(key)
    except DataError as error:
        raise DataError(f"{argument}={key!r}: {error}") from error


def classes_found(argument: str, key: str, column: Callable[[str], pd.Series]) -> list[str]:
    """Return the names of the classes of a column of obs, sorted.

    Raises
    ------
    OptionError
        If it holds numbers that are no classes, or nothing.
    """
    classes = classes_of(argument, key, column).dropna()
    if classes.dtype.kind == "f":
        raise OptionError(f"{argument}={key!r} holds numbers, not classes; make them categories.")
    names = classes.astype(str).unique()
    if not len(names):
        raise OptionError(f"{argument}={key!r} has no value for any cell; choose another column.")
    return sorted(map(str, names))


def numbers_of(classes: pd.Series, names: Sequence[str]) -> np.ndarray:
    """Return the place of each class among `names`, -1 where it is missing or unknown, int64, shape (N,)."""
    number = {name: i for i, name in enumerate(names)}
    categories = classes.astype("category").cat
    # The code of a missing value is -1, which finds the last.
    lookup = np.array([*(number.get(str(name), -1) for name in categories.categories), -1], dtype=np.int64)
    return lookup[np.asarray(categories.codes)]


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
