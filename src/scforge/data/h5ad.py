"""Files of h5ad and h5mu, opened for reading piece by piece."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import h5py

from scforge._io import new_h5
from scforge.data.stream_errors import reading
from scforge.data.stream_matrix import Matrix
from scforge.data.stream_stored import StoredAdata
from scforge.errors import DataError, MissingFileError

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["Matrix", "StoredAdata", "open_h5ad", "similar_file", "write_h5ad"]


@contextlib.contextmanager
def open_h5ad(path: str | os.PathLike[str], modality: str | None = None) -> Iterator[StoredAdata]:
    """Open an h5ad file, or one modality of an h5mu file, for reading piece by piece.

    Raises
    ------
    MissingFileError
        If there is no such file.
    DataError
        If it is no h5ad file, or has no cells or no genes.
    OptionError
        If there is no such modality.
    """
    path = Path(path)
    if not path.exists():
        raise MissingFileError(f"the file {str(path)!r} does not exist{similar_file(path)}")
    if not path.is_file():
        raise DataError(f"{str(path)!r} is not a file; name an h5ad file.")
    with reading(repr(str(path)), how="as an h5ad file"):
        file = h5py.File(path, "r")
    with file:
        yield StoredAdata.of(str(path), file, modality)


def similar_file(path: Path) -> str:
    """Return ``"; did you mean 'x'?"`` for the file with the nearest name in the same folder, or a full stop."""
    try:
        # The common ending makes all names alike, so it does not count.
        others = {other.stem: other.name for other in path.parent.iterdir() if other.suffix == path.suffix}
    except OSError:  # the folder is not there either
        return "."
    near = difflib.get_close_matches(path.stem, others, n=1, cutoff=0.7)
    return f"; did you mean {others[near[0]]!r}?" if near else "."


def write_h5ad(path: str | os.PathLike[str], adata: AnnData) -> None:
    """Write cells as ``adata.write_h5ad`` does; that the disk is full is an OSError, see :func:`scforge._io.new_h5`."""
    from anndata.io import write_elem

    adata.strings_to_categoricals()
    if adata.raw is not None:
        adata.strings_to_categoricals(adata.raw.var)
    with new_h5(path) as file:
        write_elem(file, "/", adata)
