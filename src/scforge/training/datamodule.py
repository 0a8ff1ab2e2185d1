"""Batches of tokens for training and validation, prepared by threads."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, Full, Queue
from typing import Any

import lightning
import numpy as np
import torch

from scforge._checks import check_bool, check_count, check_seed
from scforge.data.cells import CellBlock, Cells, named_column
from scforge.data.sampling import Balance, CellOrder, CellWeights, ClassBalance
from scforge.data.splits import split_cells
from scforge.errors import DataError, OptionError, TrainingError
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives.base import Objective

_AHEAD = 4
"""Blocks of cells that wait between reading and tokenizing."""

Batch = dict[str, torch.Tensor]


def default_threads(cells: Cells) -> int:
    """Return the number of threads that tokenize where the user says nothing.

    Cells in memory are tokenized while the last step is computed, by one thread; those on disk also have to be
    unpacked, so that two are worth their while.
    """
    return 1 if cells.chunk_size == 1 else min(2, os.cpu_count() or 1)


class BatchLoader:
    """Iterates over the batches of an epoch, in the order of a :class:`~scforge.data.CellOrder`.

    The batches do not depend on the number of threads. A state says how many batches of the epoch were handed out, not
    how many were made, so that a training that is resumed in the middle of an epoch gets the very same rest.

    Parameters
    ----------
    cells
        The cells.
    order
        Which cells make which batch. Lightning finds it as `sampler` and tells it the epoch.
    prepare
        Makes the tensors of a block of cells, in another thread: e.g. a tokenizer.
    num_threads
        Threads that call `prepare`, besides one that reads; 0 does all when a batch is asked for. None chooses.
    pin_memory
        Put the tensors into memory that a CUDA device copies from while it computes.

    Attributes
    ----------
    waited
        Seconds in which whoever iterates has waited for batches.

    Examples
    --------
    >>> import numpy as np
    >>> import scforge
    >>> from scforge.data import CellOrder, open_cells
    >>> adata = scforge.datasets.pbmc3k()
    >>> vocab = scforge.data.select_genes(adata, n_top_genes=500)
    >>> cells = open_cells(adata, vocab)
    >>> tokenizer = scforge.tokenizers.get_tokenizer("binned_expression", vocab)
    >>> loader = BatchLoader(cells, CellOrder(np.arange(len(cells)), batch_size=100), tokenizer)
    >>> len(loader), next(iter(loader))["input_ids"].shape[0]
    (27, 100)
    """

    def __init__(
        self,
        cells: Cells,
        order: CellOrder,
        prepare: Callable[[CellBlock], Any],
        *,
        num_threads: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        if num_threads is None:
            num_threads = default_threads(cells)
        check_count("num_threads", num_threads, "threads", least=0)
        check_bool("pin_memory", pin_memory)
        self.cells = cells
        self.sampler = order
        self.batch_sampler = None  # Lightning asks whoever has a sampler
        self.prepare = prepare
        self.num_threads = num_threads
        self.pin_memory = pin_memory
        self.waited = 0.0
        self._behind: tuple[int, int] | None = None

    def __len__(self) -> int:
        n_batches = len(self.sampler)
        if self._behind is not None and self._behind[0] == self.sampler.epoch:
            n_batches -= self._behind[1]
        return n_batches

    def __iter__(self) -> Iterator[Batch]:
        blocks = self.cells.stream(self.sampler.windows())
        batches = _Ahead(blocks, self._make, self.num_threads) if self.num_threads else map(self._make, blocks)
        try:
            while True:
                start = time.perf_counter()
                batch = next(batches, None)
                self.waited += time.perf_counter() - start
                if batch is None:
                    return
                self.sampler.advance()
                yield batch
        finally:
            if isinstance(batches, _Ahead):
                batches.close()

    def state_dict(self) -> dict[str, Any]:
        """Return which batches of which epoch were handed out, JSON-safe."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch that a state names."""
        self.sampler.load_state_dict(state)

    def go_on_with(self, state: dict[str, Any]) -> None:
        """Go on behind the batch that a state names, with an epoch that is as long as what is left of it."""
        self.sampler.load_state_dict(state)
        self._behind = (int(state["epoch"]), int(state["position"]))

    def _make(self, block: CellBlock) -> Batch:
        batch = dict(self.prepare(block))
        if self.pin_memory:
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch


class _Ahead:
    """Applies a function to items in threads, a bounded number of them ahead; the results come in order."""

    def __init__(self, items: Iterator[CellBlock], make: Callable[[CellBlock], Batch], num_threads: int) -> None:
        self._queue: Queue[CellBlock | BaseException | None] = Queue(_AHEAD)
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="scforge-tokenize")
        self._make = make
        self._most = num_threads + 2
        self._pending: deque[Future[Batch]] = deque()
        self._finished = False
        self._reader = threading.Thread(target=self._read, args=(items,), name="scforge-read", daemon=True)
        self._reader.start()

    def _read(self, items: Iterator[CellBlock]) -> None:
        last: BaseException | None = None
        try:
            for item in items:
                if not self._put(item):
                    return
        except BaseException as error:  # noqa: BLE001 -- raised again where the batches are taken
            last = error
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()
        self._put(last)

    def _put(self, item: CellBlock | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except Full:
                continue
            return True
        return False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._fill()
        if not self._pending:
            raise StopIteration
        batch = self._pending.popleft().result()
        self._fill(wait=False)
        return batch

    def _fill(self, *, wait: bool = True) -> None:
        """Hand what was read to the threads; wait for the reader only if they have nothing to do."""
        while not self._finished and len(self._pending) < self._most:
            try:
                item = self._queue.get(block=wait and not self._pending)
            except Empty:
                return
            if isinstance(item, CellBlock):
                self._pending.append(self._pool.submit(self._make, item))
            else:
                self._finished = True
                if item is not None:
                    failed: Future[Batch] = Future()
                    failed.set_exception(item)
                    self._pending.append(failed)

    def close(self) -> None:
        """Stop reading and tokenizing."""
        self._stopped.set()
        self._finished = True
        for future in self._pending:
            future.cancel()
        self._pending.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.join()


_UNSHUFFLED_WINDOW = 16_384
"""Cells of a window where cells that stand together may be of one kind: 64 chunks from everywhere mix well."""


class CellDataModule(lightning.LightningDataModule):
    """Batches of training and validation cells, in memory, in a store, or behind a URL.

    `Encoder` gives it the tokenizer and the objective of its model: ``Encoder(datamodule=data).train()``.

    Parameters
    ----------
    cells
        The cells (:func:`scforge.data.open_cells`), or a path or URL that it opens: of a store, an h5ad file, ...
        Files that do not fit into memory are converted into a store in the cache of the user once (``cache="auto"``).
    tokenizer, objective
        They make a batch of a block of cells; None leaves them to :meth:`bind`.
    train_rows, validation_rows
        Rows of `cells`, disjoint. None: `validation_size` and `split_by` choose.
    validation_size
        Share of the cells that are held out, drawn with `seed`.
    split_by
        Column of obs with groups, e.g. donors or data sets, that are held out as a whole; None splits by cell.
    batch_size
        Cells a batch; None takes the objective's default, or with `max_tokens_per_batch` as many as fit.
    max_tokens_per_batch
        A batch holds as many cells of like length as fit into so many tokens, padding included.
    balance_by
        Column of obs with classes: training cells are drawn with replacement, so that each class comes equally often.
    balance_start, balance_end, balance_epochs
        How far: 0 draws classes as often as they are, 1 equally often. From `balance_start` it changes to `balance_end`
        over `balance_epochs` epochs.
    weight_by
        Column of obs with weights: training cells are drawn with replacement, in proportion to them.
    seed
        Seed of the split, the order, the masks and the views.
    num_threads
        Threads that tokenize, besides one that reads; 0 makes batches in the training thread; None chooses.
    pin_memory
        Put batches into memory that a CUDA device copies from while it computes; None does so if there is one.
    window_cells
        Cells that are read and shuffled together; None takes 4,096 of a store in random order, and 16,384 of one that
        is in another.
    batch_key, labels_key
        Columns of obs with the batch and the label of each cell; highly variable genes are chosen within batches.
    first_epoch
        Number of epochs trained before, so that a second training sees new masks and views.

    Raises
    ------
    OptionError
        If an argument cannot be used.
    DataError
        If `cells` cannot be opened, or have no such column.

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
                f"cells is of type {type(cells).__name__!r}; pass what scforge.data.open_cells returns, or a store."
            )
        self.cells: Cells = cells
        self.bound: Cells = cells
        self.seed = check_seed(seed)
        if (train_rows is None) != (validation_rows is None):
            raise OptionError("train_rows and validation_rows come together; give both, or neither.")
        if train_rows is None or validation_rows is None:
            groups = None if split_by is None else named_column(cells, split_by, argument="split_by")
            try:
                train_rows, validation_rows = split_cells(len(cells), validation_size, self.seed, groups=groups)
            except DataError as error:
                raise DataError(f"split_by={split_by!r}: {error}") from error
        else:
            if split_by is not None:
                raise OptionError(f"split_by={split_by!r} has no use beside train_rows and validation_rows; give one.")
            train_rows = _checked_rows("train_rows", train_rows, len(cells))
            validation_rows = _checked_rows("validation_rows", validation_rows, len(cells))
            if np.intersect1d(train_rows, validation_rows).size:
                raise OptionError("train_rows and validation_rows share cells; a split must be disjoint.")
            if not len(train_rows):
                raise OptionError("train_rows names no cell; name at least one to train on.")
        self.train_rows = train_rows
        self.validation_rows = validation_rows
        for name, value, what in (
            ("batch_size", batch_size, "cells"),
            ("max_tokens_per_batch", max_tokens_per_batch, "tokens"),
            ("window_cells", window_cells, "cells"),
        ):
            if value is not None:
                check_count(name, value, what)
        num_threads = default_threads(cells) if num_threads is None else num_threads
        check_count("num_threads", num_threads, "threads", least=0)
        self.batch_size = batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.num_threads = num_threads
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else check_bool("pin_memory", pin_memory)
        self.window_cells = window_cells
        for name, key in {"batch_key": batch_key, "labels_key": labels_key}.items():
            if key is not None:
                named_column(cells, key, argument=name)
        self.batch_key, self.labels_key = batch_key, labels_key
        self._balance: Balance | None = None
        if weight_by is not None:
            if balance_by is not None:
                raise OptionError(f"weight_by={weight_by!r} and balance_by={balance_by!r} both weigh cells; give one.")
            self._balance = CellWeights(
                named_column(cells, weight_by, argument="weight_by").iloc[self.train_rows].to_numpy(dtype=np.float64)
            )
        if balance_by is not None:
            column = named_column(cells, balance_by, argument="balance_by")
            classes = column.iloc[self.train_rows].astype("category").cat.codes
            self._balance = ClassBalance(
                np.asarray(classes), warmup_epochs=balance_epochs, start=balance_start, end=balance_end
            )
        self._train_loader: BatchLoader | None = None
        self._state: dict[str, Any] | None = None
        self._rest: dict[str, Any] | None = None
        self.tokenizer: Tokenizer | None = None
        self.objective: Objective | None = None
        check_count("first_epoch", first_epoch, "epochs", least=0)
        self.first_epoch = first_epoch
        if tokenizer is not None and objective is not None:
            self.bind(tokenizer, objective)

    def bind(
        self, tokenizer: Tokenizer, objective: Objective, *, first_epoch: int | None = None, cells: Cells | None = None
    ) -> None:
        """Take the tokenizer and the objective that make batches, and the same cells over the genes of a model.

        Without `first_epoch` that of the data module stays. Another model can take over later, with other genes.
        """
        objective.check(tokenizer)
        if self.max_tokens_per_batch is not None and objective.random_batches:
            raise OptionError(
                f"max_tokens_per_batch={self.max_tokens_per_batch} fills batches with cells of like length, but the "
                f"objective {type(objective).__name__} needs random ones; give batch_size."
            )
        if first_epoch is not None:
            check_count("first_epoch", first_epoch, "epochs", least=0)
            self.first_epoch = first_epoch
        self.tokenizer, self.objective = tokenizer, objective
        self.bound = self.cells if cells is None else cells
        objective.bind(self.bound, self.train_rows)

    def train_dataloader(self) -> BatchLoader:
        """Shuffled batches, other masks and views each epoch."""
        loader = self._loader(self.train_rows, shuffle=True)
        if self._state is not None:
            loader.load_state_dict(self._state)
            self._state = None
        if self._rest is not None:
            loader.go_on_with(self._rest)
            self._rest = None
        self._train_loader = loader
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Return which training batches were handed out; Lightning puts it into its checkpoints."""
        return {} if self._train_loader is None else {"train_loader": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind the batch that a state names, with the next :meth:`train_dataloader`."""
        # Lightning restores a loader only if none was made before; counting the steps of a training makes one.
        self._state = state_dict.get("train_loader")

    def position(self, *, begins_epoch: bool) -> dict[str, Any]:
        """Return which training batch comes next, for :meth:`go_on_with`; JSON-safe.

        Parameters
        ----------
        begins_epoch
            Whether it is the first one of the epoch after the current one.
        """
        if self._train_loader is None:
            raise TrainingError("the data module has made no training batches yet; its position is that of a training.")
        state = self._train_loader.state_dict()
        return {**state, "epoch": state["epoch"] + 1, "position": 0} if begins_epoch else state

    @property
    def waited(self) -> float:
        """Seconds that the training has waited for its batches in this epoch."""
        return 0.0 if self._train_loader is None else self._train_loader.waited

    def go_on_with(self, position: dict[str, Any]) -> None:
        """Let the next :meth:`train_dataloader` have what is left of an epoch."""
        self._rest = position

    def val_dataloader(self) -> BatchLoader | list[Any]:
        """Batches of held-out cells, with the same masks and views each epoch, so that epochs can be compared."""
        return self._loader(self.validation_rows, shuffle=False) if len(self.validation_rows) else []

    def _window_cells(self) -> int | None:
        if self.window_cells is not None or self.bound.chunk_size == 1 or getattr(self.bound, "shuffled", False):
            return self.window_cells
        return _UNSHUFFLED_WINDOW

    def _loader(self, rows: np.ndarray, *, shuffle: bool) -> BatchLoader:
        tokenizer, objective = self.tokenizer, self.objective
        if tokenizer is None or objective is None:
            raise TrainingError("the data module has no tokenizer and objective yet; call bind(tokenizer, objective).")
        lengths = None
        if not objective.random_batches:
            lengths = tokenizer.lengths(self.bound.n_expressed[rows].astype(np.int32, copy=False))
            lengths = lengths.astype(np.min_scalar_type(int(lengths.max())), copy=False)
        batch_size = self.batch_size
        if batch_size is None and self.max_tokens_per_batch is None:
            batch_size = objective.defaults.batch_size
        trainer = self.trainer
        order = CellOrder(
            rows,
            batch_size,
            chunk_size=self.bound.chunk_size,
            window_cells=self._window_cells(),
            lengths=lengths,
            max_tokens_per_batch=self.max_tokens_per_batch,
            # Cells that stand together are often of one kind, so random batches of validation are drawn as well,
            # the same in each epoch.
            shuffle=shuffle or objective.random_batches,
            seed=self.seed,
            first_epoch=self.first_epoch if shuffle else None,
            rank=0 if trainer is None else trainer.global_rank,
            world_size=1 if trainer is None else trainer.world_size,
            balance=self._balance if shuffle else None,
        )

        if shuffle and trainer is not None:
            # How many batches an epoch has may depend on the epoch, and Lightning asks before it tells which comes.
            order.set_epoch(trainer.current_epoch)

        def prepare(block: CellBlock) -> dict[str, torch.Tensor]:
            return objective.prepare(block, tokenizer, epoch=block.draw, seed=self.seed)

        return BatchLoader(self.bound, order, prepare, num_threads=self.num_threads, pin_memory=self.pin_memory)


def _checked_rows(argument: str, rows: np.ndarray, n_cells: int) -> np.ndarray:
    rows = np.unique(np.asarray(rows, dtype=np.int64))
    if len(rows) and (rows[0] < 0 or rows[-1] >= n_cells):
        wrong = rows[0] if rows[0] < 0 else rows[-1]
        raise OptionError(f"{argument} has the row {wrong}, but there are {n_cells} cells.")
    return rows
