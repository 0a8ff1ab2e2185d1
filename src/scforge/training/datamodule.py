"""Cells for training and validation, as a Lightning data module."""

from __future__ import annotations

import os
from typing import Any

import lightning
import numpy as np
import pandas as pd
import torch

from scforge._checks import check_bool, check_count, check_seed
from scforge._columns import texts_of
from scforge.data.cells import CellBlock, Cells, named_column
from scforge.data.sampling import Balance, CellOrder, CellWeights, ClassBalance, split_cells
from scforge.errors import DataError, OptionError, TrainingError, listing, warn
from scforge.tokenizers.base import Tokenizer
from scforge.training.loading import BatchLoader
from scforge.training.objectives.base import Objective

_UNSHUFFLED_WINDOW = 16_384
"""Number of cells per window for stores in which adjacent cells may be of the same type; 64 random chunks mix well."""


def _warn_of_shared_batches(cells: Cells, batch_key: str) -> None:
    """Warn if several sources contain a batch with the same name: donor 1 differs between studies."""
    from scforge.data.store import SOURCE

    if batch_key == SOURCE:
        return
    try:
        source = cells.column(SOURCE)
    except DataError:  # a single source
        return
    # Categories stay codes, also for millions of cells; cells without a batch do not count.
    batches = texts_of(cells.column(batch_key), key=batch_key, argument="batch_key")
    pairs = pd.DataFrame({"batch": batches, "source": np.asarray(source)}).dropna().drop_duplicates()
    if shared := sorted(pairs.loc[pairs["batch"].duplicated(), "batch"].unique()):
        warn(
            f"batch_key={batch_key!r}: batches with the same name in several sources are treated as one batch "
            f"({listing(shared)}); give different batches different names, e.g. by combining study and donor."
        )


class CellDataModule(lightning.LightningDataModule):
    """Batches of training and validation cells, in memory, in a store, or behind a URL.

    `Encoder` sets the tokenizer and objective of its model: ``Encoder(datamodule=data).train()``.

    Parameters
    ----------
    cells
        The cells (:func:`scforge.data.open_cells`), or a path or URL to open, e.g. of a store or an h5ad file. Files
        that do not fit into memory are converted once into a store in the user's cache (``cache="auto"``).
    tokenizer, objective
        Prepare a batch from a block of cells. If None, they are set later with :meth:`bind`.
    train_rows, validation_rows
        Disjoint rows of `cells`. If None, `validation_size` and `split_by` determine the split.
    validation_size
        Fraction of cells in the validation set, sampled with `seed`.
    split_by
        Column of ``obs`` with groups, e.g. donors or data sets, that are held out as a whole. If None, splits by cell.
    batch_size
        Number of cells per batch. If None, uses the objective's default, or as many cells as fit into
        `max_tokens_per_batch`.
    max_tokens_per_batch
        Maximum number of tokens per batch, including padding. A batch then contains as many cells of similar length as
        fit.
    balance_by
        Column of ``obs`` with classes. Training cells are sampled with replacement so that classes are equally
        frequent.
    balance_start, balance_end, balance_epochs
        Strength of the balancing: 0 samples classes by their frequency, 1 samples all classes equally often. It changes
        from `balance_start` to `balance_end` over `balance_epochs` epochs.
    weight_by
        Column of ``obs`` with weights. Training cells are sampled with replacement, in proportion to their weights.
    seed
        Random seed for the split, the order, the masks and the views.
    num_threads
        Number of tokenizing threads, in addition to one reading thread; 0 prepares batches in the training thread. If
        None, the number is chosen automatically.
    pin_memory
        Whether to put batches into pinned memory, from which a CUDA device copies while it computes. If None, uses
        pinned memory if a CUDA device is available.
    window_cells
        Number of cells that are read and shuffled together. If None, uses 4,096 for a store in random order, and 16,384
        otherwise.
    batch_key, labels_key
        Columns of ``obs`` with the batch and the label of each cell; highly variable genes are selected within batches.
    first_epoch
        Number of epochs trained previously, so that a second training run uses new masks and views.

    Raises
    ------
    OptionError
        If an argument cannot be used.
    DataError
        If `cells` cannot be opened, or a column is missing.

    Examples
    --------
    >>> import scforge
    >>> data = scforge.training.CellDataModule("store.zarr", split_by="donor_id")  # doctest: +SKIP
    >>> model = scforge.models.Encoder(datamodule=data)  # doctest: +SKIP
    >>> model.train()  # doctest: +SKIP
    """

    def __init__(
        self,
        cells: Cells | str | os.PathLike[str],
        tokenizer: Tokenizer | None = None,
        objective: Objective | None = None,
        *,
        train_rows: np.ndarray | None = None,
        validation_rows: np.ndarray | None = None,
        validation_size: float = 0.1,
        split_by: str | None = None,
        batch_size: int | None = None,
        max_tokens_per_batch: int | None = None,
        balance_by: str | None = None,
        balance_start: float = 0.0,
        balance_end: float = 1.0,
        balance_epochs: int = 0,
        weight_by: str | None = None,
        seed: int = 0,
        num_threads: int | None = None,
        pin_memory: bool | None = None,
        window_cells: int | None = None,
        batch_key: str | None = None,
        labels_key: str | None = None,
        first_epoch: int = 0,
    ) -> None:
        super().__init__()
        if isinstance(cells, str | os.PathLike):
            from scforge.data.sources import AUTO, open_cells

            cells = open_cells(cells, cache=AUTO)
        if not hasattr(cells, "stream"):
            raise OptionError(
                f"is of type {type(cells).__name__!r}; pass the cells that scforge.data.open_cells returns, or "
                "the path of a store.",
                argument="cells",
            )
        self.cells: Cells = cells
        self.bound: Cells = cells
        self.seed = check_seed(seed)
        if train_rows is None and validation_rows is None:
            groups = None if split_by is None else named_column(cells, split_by, argument="split_by")
            try:
                train_rows, validation_rows = split_cells(len(cells), validation_size, self.seed, groups=groups)
            except DataError as error:
                raise DataError(f": {error.problem}", split_by=split_by) from error
        elif train_rows is None or validation_rows is None:
            raise OptionError(
                "and validation_rows must be given together; pass both, or neither.", argument="train_rows"
            )
        elif split_by is not None:
            raise OptionError("has no effect with train_rows and validation_rows; omit it.", split_by=split_by)
        else:
            train_rows = _checked_rows("train_rows", train_rows, len(cells))
            validation_rows = _checked_rows("validation_rows", validation_rows, len(cells))
            if np.intersect1d(train_rows, validation_rows).size:
                raise OptionError("and validation_rows overlap; pass disjoint rows.", argument="train_rows")
            if not len(train_rows):
                raise OptionError("is empty; pass at least one cell to train on.", argument="train_rows")
        self.train_rows = train_rows
        self.validation_rows = validation_rows
        for name, value, what, least in (
            ("batch_size", batch_size, "cells", 1),
            ("max_tokens_per_batch", max_tokens_per_batch, "tokens", 1),
            ("window_cells", window_cells, "cells", 1),
            ("num_threads", num_threads, "threads", 0),
            ("first_epoch", first_epoch, "epochs", 0),
        ):
            if value is not None:
                check_count(name, value, what, least=least)
        self.batch_size = batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.num_threads = num_threads
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else check_bool("pin_memory", pin_memory)
        self.window_cells = window_cells
        for name, key in {"batch_key": batch_key, "labels_key": labels_key}.items():
            if key is not None:
                named_column(cells, key, argument=name)
        self.batch_key, self.labels_key = batch_key, labels_key
        if batch_key is not None:
            _warn_of_shared_batches(cells, batch_key)
        self._balance: Balance | None = None
        if weight_by is not None:
            if balance_by is not None:
                raise OptionError(
                    f"and balance_by={balance_by!r} both weight cells; pass only one of the two.", weight_by=weight_by
                )
            self._balance = CellWeights(
                named_column(cells, weight_by, argument="weight_by").iloc[self.train_rows].to_numpy(dtype=np.float64)
            )
        if balance_by is not None:
            column = named_column(cells, balance_by, argument="balance_by").iloc[self.train_rows]
            classes = texts_of(column, key=balance_by, argument="balance_by").codes
            self._balance = ClassBalance(
                np.asarray(classes), warmup_epochs=balance_epochs, start=balance_start, end=balance_end
            )
        self._train_loader: BatchLoader | None = None
        self._state: dict[str, Any] | None = None
        self.tokenizer: Any = None
        self.objective: Any = None
        self.first_epoch = first_epoch
        if tokenizer is not None and objective is not None:
            self.bind(tokenizer, objective)

    def bind(
        self, tokenizer: Tokenizer, objective: Objective, *, first_epoch: int | None = None, cells: Cells | None = None
    ) -> None:
        """Set the tokenizer and the objective that prepare batches, and map the cells to the genes of a model.

        Without `first_epoch`, the data module keeps its value. A data module can be bound again to another model with
        different genes.
        """
        objective.check(tokenizer)
        if self.max_tokens_per_batch is not None and objective.random_batches:
            raise OptionError(
                f"fills batches with cells of similar length, but the "
                f"objective {type(objective).__name__} requires random batches; pass batch_size instead.",
                max_tokens_per_batch=self.max_tokens_per_batch,
            )
        if first_epoch is not None:
            self.first_epoch = first_epoch
        self.tokenizer, self.objective = tokenizer, objective
        self.bound = self.cells if cells is None else cells
        objective.bind(self.bound, self.train_rows)

    def train_dataloader(self) -> BatchLoader:
        """Return shuffled batches, with new masks and views in each epoch."""
        self._train_loader = loader = self._loader(self.train_rows, shuffle=True)
        if self._state is not None:
            loader.load_state_dict(self._state)
            self._state = None
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training batches, which Lightning saves in its checkpoints."""
        return {} if self._train_loader is None else {"train_loader": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Skip the batches counted in a state in the next call of :meth:`train_dataloader`."""
        # Lightning restores a loader only if none exists yet, and counting the steps of a run creates one.
        self._state = state_dict.get("train_loader")

    def position(self, *, begins_epoch: bool) -> dict[str, Any]:
        """Return the position of the next training batch, for :meth:`go_on_with`; JSON-safe.

        Parameters
        ----------
        begins_epoch
            Whether the next batch is the first batch of the next epoch.
        """
        if self._train_loader is None:
            raise TrainingError(
                "the data module has no position yet, because it has not prepared any training batch; train first."
            )
        state = self._train_loader.state_dict()
        return {**state, "epoch": state["epoch"] + 1, "position": 0} if begins_epoch else state

    @property
    def waited(self) -> float:
        """Number of seconds that training has waited for batches in this epoch."""
        return 0.0 if self._train_loader is None else self._train_loader.waited

    def go_on_with(self, position: dict[str, Any]) -> None:
        """Make the next :meth:`train_dataloader` return the remaining batches of an epoch."""
        self._state = {**position, "shortens": True}

    def val_dataloader(self) -> BatchLoader | list[Any]:
        """Return batches of held-out cells, with the same masks and views in each epoch, so epochs are comparable."""
        return self._loader(self.validation_rows, shuffle=False) if len(self.validation_rows) else []

    def _loader(self, rows: np.ndarray, *, shuffle: bool) -> BatchLoader:
        tokenizer, objective = self.tokenizer, self.objective
        if tokenizer is None or objective is None:
            raise TrainingError("the data module has no tokenizer and objective yet; call bind(tokenizer, objective).")
        lengths = None
        if not objective.random_batches:
            lengths = tokenizer.lengths(self.bound.n_expressed[rows].astype(np.int32, copy=False))
            lengths = lengths.astype(np.min_scalar_type(int(lengths.max())), copy=False)
        batch_size, window_cells = self.batch_size, self.window_cells
        if window_cells is None and self.bound.chunk_size > 1 and not getattr(self.bound, "shuffled", False):
            window_cells = _UNSHUFFLED_WINDOW
        if batch_size is None and self.max_tokens_per_batch is None:
            batch_size = objective.defaults.batch_size
        trainer = self.trainer
        order = CellOrder(
            rows,
            batch_size,
            chunk_size=self.bound.chunk_size,
            window_cells=window_cells,
            lengths=lengths,
            max_tokens_per_batch=self.max_tokens_per_batch,
            # Adjacent cells are often of one type, so random validation batches are sampled as well,
            # the same in each epoch.
            shuffle=shuffle or objective.random_batches,
            seed=self.seed,
            first_epoch=self.first_epoch if shuffle else None,
            rank=0 if trainer is None else trainer.global_rank,
            world_size=1 if trainer is None else trainer.world_size,
            balance=self._balance if shuffle else None,
        )
        if shuffle and trainer is not None:
            # The number of batches may depend on the epoch, and Lightning reads it before it sets the epoch.
            order.set_epoch(trainer.current_epoch)

        def prepare(block: CellBlock) -> dict[str, torch.Tensor]:
            return objective.prepare(block, tokenizer, epoch=block.draw, seed=self.seed)

        return BatchLoader(self.bound, order, prepare, num_threads=self.num_threads, pin_memory=self.pin_memory)


def _checked_rows(argument: str, rows: np.ndarray, n_cells: int) -> np.ndarray:
    rows = np.unique(np.asarray(rows, dtype=np.int64))
    if (outside := rows[(rows < 0) | (rows >= n_cells)]).size:
        raise OptionError(
            f"contains row {outside[0]}, but there are {n_cells} cells; pass rows from 0 to {n_cells - 1}.",
            argument=argument,
        )
    return rows
