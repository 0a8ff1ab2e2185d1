"""From cells in memory to batches for Lightning."""

from __future__ import annotations

import numbers

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from scforge._checks import check_count
from scforge.data.cells import CellSource
from scforge.data.sampler import BatchRows, CellSampler
from scforge.errors import OptionError
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives.base import Objective

__all__ = ["CellDataModule", "split_cells"]


def split_cells(n_cells: int, validation_size: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split cells at random into training and validation rows, disjoint and sorted.

    Raises
    ------
    OptionError
        If `validation_size` is not in [0, 1), or leaves no cell for training.
    """
    if not isinstance(validation_size, numbers.Real) or not 0 <= validation_size < 1:
        raise OptionError(f"validation_size={validation_size!r} is not in [0, 1).")
    n_validation = round(n_cells * validation_size)
    if validation_size > 0 and n_validation == 0 and n_cells > 1:
        n_validation = 1
    if n_validation >= n_cells:
        raise OptionError(f"validation_size={validation_size} leaves no cell of {n_cells} for training; lower it.")
    order = np.random.default_rng(seed).permutation(n_cells)
    return np.sort(order[n_validation:]), np.sort(order[:n_validation])


class _Batches(Dataset[dict[str, torch.Tensor]]):
    """Asked for the rows of a batch, returns the batch: cells are tokenised together, not one by one."""

    def __init__(self, cells: CellSource, tokenizer: Tokenizer, objective: Objective, seed: int) -> None:
        self.cells = cells
        self.tokenizer = tokenizer
        self.objective = objective
        self.seed = seed

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, batch: BatchRows) -> dict[str, torch.Tensor]:
        block = self.cells.block(batch.rows, draw=batch.epoch)
        return self.objective.prepare(block, self.tokenizer, epoch=batch.epoch, seed=self.seed)


class CellDataModule(lightning.LightningDataModule):
    """Batches of training and validation cells.

    Parameters
    ----------
    cells
        The cells.
    tokenizer, objective
        They make a batch of a block of cells.
    train_rows, validation_rows
        Rows of `cells`, disjoint.
    batch_size
        Cells a batch.
    seed
        Seed of the order, the masks and the views.
    num_workers
        Worker processes that prepare batches; 0 prepares them in the training process.
    first_epoch
        Number of epochs trained before, so that a second training sees new masks and views.
    """

    def __init__(
        self,
        cells: CellSource,
        tokenizer: Tokenizer,
        objective: Objective,
        *,
        train_rows: np.ndarray,
        validation_rows: np.ndarray,
        batch_size: int,
        seed: int = 0,
        num_workers: int = 0,
        first_epoch: int = 0,
    ) -> None:
        super().__init__()
        if np.intersect1d(train_rows, validation_rows).size:
            raise OptionError("train_rows and validation_rows share cells; a split must be disjoint.")
        objective.check(tokenizer)
        check_count("batch_size", batch_size, "cells")
        check_count("num_workers", num_workers, "processes", least=0)
        self.cells = cells
        self.tokenizer = tokenizer
        self.objective = objective
        self.train_rows = train_rows
        self.validation_rows = validation_rows
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.first_epoch = first_epoch

    def train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        """Shuffled batches, other masks and views each epoch."""
        return self._loader(self.train_rows, shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, torch.Tensor]] | list[object]:
        """Batches of held-out cells, with the same masks and views each epoch, so that epochs can be compared."""
        return self._loader(self.validation_rows, shuffle=False) if len(self.validation_rows) else []

    def _loader(self, rows: np.ndarray, *, shuffle: bool) -> DataLoader[dict[str, torch.Tensor]]:
        if self.objective.random_batches and not shuffle:
            # Cells that stand together in the data are often of one kind; the same draw in each epoch.
            rows = np.random.default_rng(self.seed).permutation(rows)
        lengths = None if self.objective.random_batches else self.tokenizer.lengths(self.cells.n_expressed[rows])
        sampler = CellSampler(
            rows,
            self.batch_size,
            lengths=lengths,
            shuffle=shuffle,
            seed=self.seed,
            first_epoch=self.first_epoch if shuffle else None,
        )
        return DataLoader(
            _Batches(self.cells, self.tokenizer, self.objective, self.seed),
            sampler=sampler,  # yields whole batches, so the loader must not batch again
            batch_size=None,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )
