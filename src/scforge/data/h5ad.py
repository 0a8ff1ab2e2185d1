"""Files of h5ad and h5mu, opened for reading piece by piece."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py

from scforge._io import new_h5
from scforge.data.stream_errors import reading
from scforge.data.stream_matrix import Matrix
from scforge.data.stream_stored import StoredAdata
from scforge.errors import DataError, MissingFileError

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["Matrix", "StoredAdata", "open_h5ad", "open_hdf5", "similar_file", "write_h5ad"]

_DEPTH, _PARTS = 64, 100_000
"""How deep an AnnData may be nested, and how many parts it may have; links that make a loop have no end."""


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
    with open_hdf5(path, str(path)) as file:
        yield StoredAdata.of(str(path), file, modality)


@contextlib.contextmanager
def open_hdf5(file: Any, name: str) -> Iterator[h5py.File]:
    """Open an HDF5 file (path or open file) that holds all of its content itself; `name` is that of the messages.

    Raises
    ------
    DataError
        If it is no HDF5 file, or has parts that lie in other files, or has no end.
    """
    with contextlib.ExitStack() as opened:
        with reading(repr(name), how="as an h5ad file"):
            stored = opened.enter_context(h5py.File(file, "r"))
            # Links within the file are followed only once it is known that nothing leads out of it.
            if _check_parts(stored, name, follow=False):
                _check_parts(stored, name, follow=True)
        yield stored


def _check_parts(file: h5py.File, name: str, *, follow: bool) -> bool:
    """Raise if a part lies in another file, or there are too many; return whether there are links to follow."""
    waiting: list[tuple[h5py.Group, int]] = [(file, 0)]
    n_parts, linked = 0, False
    while waiting:
        group, depth = waiting.pop()
        for key in group:
            n_parts += 1
            place = f"{group.name.rstrip('/')}/{key}"
            link = group.get(key, getlink=True)
            if isinstance(link, h5py.SoftLink):
                linked = True
                if not follow:
                    continue
            elif not isinstance(link, h5py.HardLink):
                raise _other_file(place, name)
            part = group.get(key)
            if isinstance(part, h5py.Group):
                waiting.append((part, depth + 1))
            elif isinstance(part, h5py.Dataset) and (part.external or part.is_virtual):
                raise _other_file(place, name)
            if depth >= _DEPTH or n_parts > _PARTS:
                raise DataError(
                    f"{name!r} is nested more than {_DEPTH} deep, or has more than {_PARTS:,} parts, as with a link to "
                    "itself; write the file again with anndata."
                )
    return linked


def _other_file(place: str, name: str) -> DataError:
    return DataError(
        f"{place!r} of {name!r} lies in another file, which scforge does not open; if you trust it, make a file that "
        "holds all of it with anndata.read_h5ad(path).write_h5ad(new_path)."
    )


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
