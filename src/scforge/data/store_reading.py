"""Reading the cells of a store with annbatch, batch after batch."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from annbatch import Loader
from annbatch.abc import Sampler
from scipy import sparse

from scforge.data.annbatch_sampler import AnnbatchSampler
from scforge.data.compressed import boundary_problem
from scforge.data.store_files import AGAIN, CODECS
from scforge.data.stream_errors import reading_errors
from scforge.data.windows import Window
from scforge.errors import DataError, ScforgeError, first_line

if TYPE_CHECKING:
    from annbatch.types import LoadRequest

__all__ = ["StoreReader"]

_SETTINGS: dict[str, Any] = {**CODECS, "threading.max_workers": max(1, (os.cpu_count() or 1) // 2)}
"""Settings of zarr: half of the cores unpack, the others are left to tokenising."""

_PIECE = 256
"""Cells that are read at a time to find which are damaged."""


def _smallest(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


class _Current(Sampler):
    """Hands on to the sampler of the pass that begins: a loader keeps its row boundaries, passes come and go."""

    sampler: AnnbatchSampler
    batch_size = None
    shuffle = False

    def n_batches(self, n_obs: int) -> int:
        """Return what the present sampler says."""
        return self.sampler.n_batches(n_obs)

    def validate(self, n_obs: int) -> None:
        """Check what the present sampler checks."""
        self.sampler.validate(n_obs)

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        return self.sampler.sample(n_obs)


class StoreReader:
    """The matrices of a store as one, read by rows.

    Parameters
    ----------
    datasets
        The groups of the store that hold cells, in their order.
    place
        Path or URL, for messages.

    Attributes
    ----------
    lengths
        Number of entries of each row, unsigned, shape (N,).
    """

    def __init__(self, datasets: list[Any], place: str) -> None:
        self.place = place
        self.names = [dataset.basename for dataset in datasets]
        lengths: list[np.ndarray] = []
        matrices = []
        for name, dataset in zip(self.names, datasets, strict=True):
            matrix, indptr = self._open(name, dataset)
            matrices.append(matrix)
            lengths.append(_smallest(np.diff(indptr)))
            del indptr  # annbatch holds the boundaries as well
        self.lengths = np.concatenate(lengths)
        self.sizes = np.array([matrix.shape[0] for matrix in matrices])
        self.ends = np.cumsum(self.sizes)
        self._sampler = _Current()
        self._loader: Any = Loader(batch_sampler=self._sampler, preload_to_gpu=False)
        self._loader.add_datasets(matrices)
        self._begins = threading.Lock()

    def _open(self, name: str, dataset: Any) -> tuple[Any, np.ndarray]:
        import anndata

        try:
            matrix = anndata.io.sparse_dataset(dataset["X"])
            indptr = np.asarray(dataset["X/indptr"][...])
            n_entries = dataset["X/data"].shape[0]
        except reading_errors() as error:
            raise DataError(f"{name} of {self.place!r} cannot be read: {first_line(error)}; {AGAIN}.") from error
        problem = boundary_problem(indptr, n_entries)
        if problem is None and len(indptr) != matrix.shape[0] + 1:
            problem = f"it has {len(indptr)} boundaries (indptr) and needs {matrix.shape[0] + 1}"
        if problem is None and int(indptr[-1]) != n_entries:
            problem = f"its boundaries (indptr) end at {indptr[-1]}, but there are {n_entries} entries"
        if problem is not None:
            raise DataError(f"{name} of {self.place!r} is damaged: {problem}; {AGAIN}.")
        return matrix, indptr

    def __len__(self) -> int:
        return int(self.ends[-1])

    def batches(self, windows: Iterable[Window]) -> Iterator[tuple[np.ndarray, int, sparse.csr_matrix]]:
        """Yield rows, number of the draw, and counts of each batch of each window.

        Raises
        ------
        DataError
            If what is read is damaged; the message names the data set and the cells.
        """
        told: deque[tuple[np.ndarray, int]] = deque()
        others: list[Exception] = []

        def watched() -> Iterator[Window]:
            try:
                for window in windows:
                    told.extend((rows, window.draw) for rows in window.batches())
                    yield window
            except reading_errors() as error:
                others.append(error)  # of whoever makes the windows: no damage
                raise

        read = self._read(watched())
        while True:
            try:
                counts = next(read, None)
            except ScforgeError:
                raise
            except reading_errors() as error:
                if error in others:
                    raise
                rows = np.concatenate([np.empty(0, dtype=np.int64), *(rows for rows, _ in told)])
                raise DataError(f"{self._damaged_cells(rows)} cannot be read: {first_line(error)}; {AGAIN}.") from error
            if counts is None:
                return
            rows, draw = told.popleft()
            yield rows, draw, counts

    def _read(self, windows: Iterator[Window]) -> Iterator[sparse.csr_matrix]:
        # The first step of a pass takes the sampler, and opens the arrays.
        with self._begins, zarr.config.set(_SETTINGS):
            self._sampler.sampler = AnnbatchSampler(windows)
            passing = iter(self._loader)
            first = next(passing, None)
        if first is not None:
            yield first["X"]
            del first
            for batch in passing:
                yield batch["X"]

    def where(self, row: int) -> tuple[str, int]:
        """Return the name of the data set that holds a row of the store, and its row there."""
        place = int(np.searchsorted(self.ends, row, side="right"))
        return self.names[place], row - int(self.ends[place - 1] if place else 0)

    def _damaged_cells(self, rows: np.ndarray) -> str:
        """Find the first cells among `rows` that cannot be read."""
        rows = np.unique(rows)
        # No piece goes beyond a dataset.
        part = np.searchsorted(self.ends, rows, side="right")
        within = rows - (self.ends - self.sizes)[part]
        cuts = np.flatnonzero(np.diff(within // _PIECE) | np.diff(part)) + 1
        for piece in np.split(rows, cuts) if len(rows) else ():
            window = Window(rows=piece, ends=np.array([len(piece)]), draw=0)
            try:
                for _ in self._read(iter([window])):
                    pass
            except reading_errors():
                name, first = self.where(int(piece[0]))
                return f"{name} of {self.place!r}, cells {first} to {first + int(piece[-1] - piece[0])},"
        return f"{self.place!r}"
