"""Batches made ahead of their use: one thread reads, others tokenise, the training takes them in their order."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, Full, Queue
from typing import Any

import torch

from scforge._checks import check_bool, check_count
from scforge.data.cells import CellBlock, Cells
from scforge.data.order import CellOrder

__all__ = ["BatchLoader", "default_threads"]

_AHEAD = 4
"""Blocks of cells that wait between reading and tokenising."""

Batch = dict[str, torch.Tensor]


def default_threads(cells: Cells) -> int:
    """Return the number of threads that tokenise where the user says nothing.

    Cells in memory are tokenised while the last step is computed, by one thread; those on disk also have to be
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
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="scforge-tokenise")
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
        """Stop reading and tokenising."""
        self._stopped.set()
        self._finished = True
        for future in self._pending:
            future.cancel()
        self._pending.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.join()
