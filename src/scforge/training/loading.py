"""Token batches in the order of an epoch, prepared by threads."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import torch

from scforge._checks import check_bool, check_count
from scforge.data.cells import CellBlock, Cells
from scforge.data.sampling import CellOrder

_AHEAD = 4
"""Number of minibatches that are read and tokenized ahead of time, in addition to one per thread."""

Batch = dict[str, torch.Tensor]


class BatchLoader:
    """Iterate over the batches of an epoch, in the order of a :class:`~scforge.data.CellOrder`.

    The batches do not depend on the number of threads. A checkpoint counts the batches that were returned, not the
    batches that were prepared. A run that is resumed within an epoch therefore receives exactly the remaining batches.

    Parameters
    ----------
    cells
        The cells.
    order
        Assignment of cells to batches. Lightning accesses it as `sampler` and sets its epoch.
    prepare
        Function that prepares the tensors of a cell block in another thread, e.g. a tokenizer.
    num_threads
        Number of threads that call `prepare`, in addition to one reading thread; 0 prepares batches on request. If
        None, the number is chosen automatically.
    pin_memory
        Whether to put the tensors into pinned memory, from which a CUDA device copies while it computes.

    Attributes
    ----------
    waited
        Number of seconds that the caller has waited for batches.

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
            # One thread tokenizes cells in memory during the previous step. Those on disk must be decompressed as well.
            num_threads = 1 if cells.chunk_size == 1 else min(2, os.cpu_count() or 1)
        check_count("num_threads", num_threads, "threads", least=0)
        self.cells = cells
        self.sampler = order
        self.batch_sampler = None  # Lightning reads this attribute
        self.prepare = prepare
        self.num_threads = num_threads
        self.pin_memory = check_bool("pin_memory", pin_memory)
        self.waited = 0.0
        self._behind: tuple[int, int] | None = None

    def __len__(self) -> int:
        n_batches = len(self.sampler)
        if self._behind is not None and self._behind[0] == self.sampler.epoch:
            n_batches -= self._behind[1]
        return n_batches

    def __iter__(self) -> Iterator[Batch]:
        blocks = (block for block in self.cells.stream(self.sampler.windows()))
        with closing(self._ahead(blocks) if self.num_threads else (self._batch(block) for block in blocks)) as batches:
            while True:
                start = time.perf_counter()
                batch = next(batches, None)
                self.waited += time.perf_counter() - start
                if batch is None:
                    return
                self.sampler.advance()
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of batches returned so far, JSON-safe."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Skip the batches counted in a state; with ``shortens`` in it, the epoch has only the remaining batches."""
        self.sampler.load_state_dict(state)
        if state.get("shortens"):
            self._behind = (int(state["epoch"]), int(state["position"]))

    def _batch(self, block: CellBlock) -> Batch:
        batch = dict(self.prepare(block))
        if self.pin_memory:
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch

    def _ahead(self, blocks: Generator[CellBlock]) -> Generator[Batch]:
        """Read blocks in one thread, and prepare batches ahead of time in other threads, in order."""
        reader = ThreadPoolExecutor(1, thread_name_prefix="scforge-read")
        pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="scforge-tokenize")
        pending: deque[Future[Batch | None]] = deque()

        def prepared(read: Future[CellBlock | None]) -> Batch | None:
            block = read.result()
            return None if block is None else self._batch(block)

        try:
            while True:
                while len(pending) <= self.num_threads + _AHEAD:
                    pending.append(pool.submit(prepared, reader.submit(next, blocks, None)))
                if (batch := pending.popleft().result()) is None:
                    return
                yield batch
        finally:
            reader.shutdown(cancel_futures=True)
            pool.shutdown(cancel_futures=True)
            blocks.close()
