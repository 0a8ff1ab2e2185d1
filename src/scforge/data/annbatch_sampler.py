"""The batches of a CellOrder for :class:`annbatch.Loader`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
from annbatch.abc import Sampler

from scforge._checks import check_bool, check_count
from scforge.data.order import CellOrder
from scforge.data.windows import Window
from scforge.errors import OptionError

if TYPE_CHECKING:
    from annbatch.types import LoadRequest

__all__ = ["AnnbatchSampler"]


class AnnbatchSampler(Sampler):
    """Lets :class:`annbatch.Loader` read the windows of an order, one request a window.

    Parameters
    ----------
    windows
        A :class:`~scforge.data.CellOrder`, or windows themselves. Cells are numbered through the loader's data sets.
    whole_windows
        Yield each window as one batch; the caller cuts it.
    gap
        Up to this many cells that nobody asked for are read along, instead of reading what lies before and after them
        separately.

    Raises
    ------
    OptionError
        If an argument cannot be used; in a pass: if a window has cells that the loader does not have, if several
        workers of a DataLoader iterate (each would yield every batch), or if a part of the cells is masked.

    Notes
    -----
    Loaders do not say when a batch is handed out. To save the state amid an epoch, call :meth:`advance` after each
    batch that is taken from the loader.

    Examples
    --------
    >>> import numpy as np
    >>> from scforge.data import CellOrder
    >>> order = CellOrder(np.array([0, 1, 2, 100]), batch_size=2, shuffle=False, window_cells=4)
    >>> request = next(AnnbatchSampler(order).sample(n_obs=200))
    >>> request["requests"], [split.tolist() for split in request["splits"]]
    ([slice(0, 3, None), slice(100, 101, None)], [[0, 1], [2, 3]])
    """

    def __init__(self, windows: CellOrder | Iterable[Window], *, whole_windows: bool = False, gap: int = 32) -> None:
        check_count("gap", gap, "cells", least=0)
        self._windows = windows
        self._whole_windows = check_bool("whole_windows", whole_windows)
        self._gap = int(gap)

    @property
    def batch_size(self) -> int | None:
        """Cells of a batch; every request says itself where its batches end."""
        return self._windows.batch_size if isinstance(self._windows, CellOrder) else None

    @property
    def shuffle(self) -> bool:
        """Whether the order is random; the loader never shuffles by itself."""
        return isinstance(self._windows, CellOrder) and self._windows.shuffle

    def n_batches(self, n_obs: int) -> int:
        """Return the number of batches of a whole pass, whatever the number of cells of the loader.

        Parameters
        ----------
        n_obs
            Number of cells of the loader, which does not matter.

        Returns
        -------
        Batches of this rank, or windows with `whole_windows`.

        Raises
        ------
        OptionError
            If the windows are an iterator, which does not know its length.
        """
        if isinstance(self._windows, CellOrder):
            order = self._windows
            return order.layout.n_windows if self._whole_windows else len(order)
        if not isinstance(self._windows, Sized):
            raise OptionError("windows is an iterator, which does not know its number of batches; give a list.")
        return sum(1 if self._whole_windows else len(window.ends) for window in self._windows)

    def validate(self, n_obs: int) -> None:
        """Check that this pass would yield each batch once.

        Parameters
        ----------
        n_obs
            Number of cells of the loader.

        Raises
        ------
        OptionError
            If it would not, see the class.
        """
        if self.mask != slice(0, None):
            raise OptionError(f"mask={self.mask} is not for this sampler; give rank and world_size to CellOrder.")
        # Whoever has not imported torch is in no worker of its DataLoader.
        torch = sys.modules.get("torch")
        worker = None if torch is None else torch.utils.data.get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise OptionError(f"num_workers={worker.num_workers} would each yield every batch; use 0 or 1.")

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        windows = self._windows.windows() if isinstance(self._windows, CellOrder) else self._windows
        for window in windows:
            yield self._request(window, n_obs)

    def _request(self, window: Window, n_obs: int) -> LoadRequest:
        ordered = np.sort(window.rows)
        if ordered[0] < 0 or ordered[-1] >= n_obs:
            wrong = ordered[0] if ordered[0] < 0 else ordered[-1]
            raise OptionError(f"windows has the cell {wrong}, but the loader has the cells 0 to {n_obs - 1}.")
        cuts = np.flatnonzero(np.diff(ordered) > self._gap + 1)
        starts = ordered[np.concatenate([[0], cuts + 1])]
        stops = ordered[np.concatenate([cuts, [-1]])] + 1
        sizes = stops - starts
        # Where the first cell of each slice would be if its slice began at cell 0 of what is read.
        shifts = np.cumsum(sizes) - sizes - starts
        places = window.rows + shifts[np.searchsorted(starts, window.rows, side="right") - 1]
        return {
            "requests": [slice(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)],
            "splits": [places] if self._whole_windows else np.split(places, window.ends[:-1]),
        }

    def _order(self) -> CellOrder:
        if not isinstance(self._windows, CellOrder):
            raise OptionError("windows has no epochs and no state; give a CellOrder.")
        return self._windows

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the order whose batches come next.

        Parameters
        ----------
        epoch
            Number of the epoch, from 0.

        Raises
        ------
        OptionError
            If there is no :class:`~scforge.data.CellOrder`, but windows.
        """
        self._order().set_epoch(epoch)

    def advance(self, n_batches: int = 1) -> None:
        """Count batches of the order as handed out.

        Parameters
        ----------
        n_batches
            How many.

        Raises
        ------
        OptionError
            If there is no :class:`~scforge.data.CellOrder`, but windows.
        """
        self._order().advance(n_batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the order."""
        return self._order().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the order that `state` is of was.

        Parameters
        ----------
        state
            Of :meth:`state_dict`.

        Raises
        ------
        OptionError
            If there is no :class:`~scforge.data.CellOrder`, but windows.
        """
        self._order().load_state_dict(state)
