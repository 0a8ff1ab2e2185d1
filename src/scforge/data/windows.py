"""Reading of the windows of a store with annbatch, whose import loads torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from annbatch import Loader
from annbatch.abc import Sampler
from zarr.registry import register_pipeline
from zarrs import ZarrsCodecPipeline

from scforge.data.remote import LocalStore, missing_chunk
from scforge.data.sampling import Window
from scforge.errors import OptionError

if TYPE_CHECKING:
    from annbatch.types import LoadRequest

_GAP = 32
"""Maximum number of unrequested cells between requested cells that are read, instead of splitting the read."""


class WholePipeline(ZarrsCodecPipeline):
    """The codecs of zarrs, which takes a missing file for zeros, with an error for missing files."""

    # zarrs returns nothing either, and zarr ignores it.
    async def read(  # type: ignore[override]
        self, batch_info: Iterable[Any], out: Any, drop_axes: tuple[int, ...] = ()
    ) -> None:
        """Read chunks into `out`."""
        chunks = list(batch_info)
        await super().read(chunks, out, drop_axes)
        # Afterwards, because a file that was there before may not have been there in between. Requests share files.
        for path, chunk in {chunk.path: chunk for chunk, *_ in chunks}.items():
            if isinstance(chunk.store, LocalStore) and not (chunk.store.root / path).exists():
                raise missing_chunk(chunk.store, path)


register_pipeline(WholePipeline)
PIPELINE = f"{__name__}.{WholePipeline.__name__}"
"""Name of the pipeline in the settings of zarr."""


class WindowSampler(Sampler):
    """Sampler that lets annbatch's loader, which keeps the row boundaries, read the windows of each pass."""

    batch_size = None  # each request sets the ends of its batches
    shuffle = False
    windows: Iterable[Window] = ()

    def n_batches(self, n_obs: int) -> int:
        """Return 0 as a placeholder, because the length of the loader is not used."""
        return 0

    def validate(self, n_obs: int) -> None:
        """Accept any number of cells, because the windows come from a :class:`StoreCells`."""

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        for window in self.windows:
            ordered = np.sort(window.rows)
            if ordered[0] < 0 or ordered[-1] >= n_obs:
                wrong = ordered[0] if ordered[0] < 0 else ordered[-1]
                raise OptionError(
                    f"refers to cell {wrong}, but the store only has cells 0 to {n_obs - 1}.", argument="windows"
                )
            cuts = np.flatnonzero(np.diff(ordered) > _GAP + 1)
            starts = ordered[np.concatenate([[0], cuts + 1])]
            stops = ordered[np.concatenate([cuts, [-1]])] + 1
            sizes = stops - starts
            # Where the first cell of each slice would be if its slice began at cell 0 of what is read.
            shifts = np.cumsum(sizes) - sizes - starts
            places = window.rows + shifts[np.searchsorted(starts, window.rows, side="right") - 1]
            yield {
                "requests": [slice(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)],
                "splits": np.split(places, window.ends[:-1]),
            }


def window_loader(matrices: Sequence[Any]) -> tuple[WindowSampler, Loader]:
    """Return a loader of the rows of sparse matrices on disk, and the sampler that takes its windows."""
    sampler = WindowSampler()
    loader = Loader(batch_sampler=sampler, preload_to_gpu=False)
    loader.add_datasets(list(matrices))
    return sampler, loader
