"""What may be opened: regular files, HDF5 files that contain all of their data, and documents of bounded size."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scforge.errors import DataError, ScforgeError

if TYPE_CHECKING:
    import h5py


_MAX_DEPTH = 50
"""Maximum depth of a document; Python's own functions fail from a few hundred on."""

_NOT_TEXT = re.compile("[\0\ud800-\udfff]")


def parts_of(content: Any) -> Iterable[Any] | None:
    """Return the keys and values of a mapping or the values of a list, or None for a single value."""
    if isinstance(content, Mapping):
        return chain(content.keys(), content.values())
    return content if isinstance(content, list) else None


def check_plain(
    content: Any,
    parts: Callable[[Any], Iterable[Any] | None] = parts_of,
    *,
    most: int | None = None,
    bits: int = 63,
) -> None:
    """Raise a ValueError if a document is nested too deeply, has too many parts, or a value that :func:`unfit` names.

    `parts` returns the parts of a part, and None for a single value. A part counts each time that it is used.
    """
    pending, n_parts = [(content, 1)], 0
    while pending:
        part, depth = pending.pop()
        inner = parts(part)
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} deep, or a part contains itself")
        if inner is not None:
            pending += ((child, depth + 1) for child in inner)
        elif problem := unfit(getattr(part, "value", part), bits):
            raise ValueError(problem)
        n_parts += 1
        if most is not None and n_parts + len(pending) > most:
            raise ValueError(f"it has more than {most:,} keys and values, counting each use of an alias")


def unfit(value: Any, bits: int = 63) -> str | None:
    """Return why a value of a document cannot be used, or None."""
    if isinstance(value, int) and value.bit_length() > bits:
        return f"an integer has more than {bits} bits; put text in quotes"
    if isinstance(value, str) and (match := _NOT_TEXT.search(value)):
        return f"text contains the character {ascii(match[0])}, which is not allowed; remove it"
    return None


def check_regular(path: str | os.PathLike[str], error: type[ScforgeError] = DataError) -> None:
    """Raise `error` if a path is a pipe, a socket or a device, of which reading may never end."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return  # opening it raises
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise error(f"{os.fspath(path)!r} is a pipe, a socket or a device; pass a regular file.")


def check_folder_files(folder: str | os.PathLike[str]) -> None:
    """Raise a DataError if a folder contains, at any depth, a pipe, a socket, a device, or a link that leads out of it.

    Otherwise a store of somebody else would put any file of this machine into the cells that are read from it. In the
    cache of the Hugging Face Hub, the files of a snapshot are links to the blobs next to it.
    """
    root = os.path.realpath(folder)
    snapshot = next((parent for parent in Path(root).parents if parent.name == "snapshots"), None)
    allowed = {root} | ({str(snapshot.with_name("blobs"))} if snapshot is not None else set())
    pending = [os.fspath(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    target = os.path.realpath(entry.path)
                    if not any(os.path.commonpath([prefix, target]) == prefix for prefix in allowed):
                        raise DataError(
                            f"{entry.path!r} is a link out of its folder, which scforge does not follow; if you trust "
                            "the data, copy the folder with cp -rL and open the copy."
                        )
                    check_regular(entry.path)


def check_h5(file: h5py.Group, name: str) -> None:
    """Raise a DataError if any part of an HDF5 file lies elsewhere: by a link, external storage or a virtual dataset.

    Otherwise a file of somebody else would put any file of this machine into an AnnData or an embedding. `name` is the
    name of the file for messages.
    """
    import h5py

    # Soft links need no look: without an external link, they lead only to what hard links lead to.
    pending = [file.file["/"]]
    is_outside = False
    seen: set[int] = set()
    while pending and not is_outside:
        item = pending.pop()
        if not isinstance(item, h5py.Group | h5py.Dataset) or (address := h5py.h5o.get_info(item.id).addr) in seen:
            continue
        seen.add(address)
        if isinstance(item, h5py.Group):
            for key in item:
                link = item.get(key, getlink=True)
                is_outside |= isinstance(link, h5py.ExternalLink)
                pending += [item[key]] if isinstance(link, h5py.HardLink) else []
        else:
            stored = item.id.get_create_plist()
            # A virtual dataset may also be a part of itself, which HDF5 reads until the process crashes.
            is_outside = stored.get_external_count() > 0 or stored.get_layout() == h5py.h5d.VIRTUAL
            # The one reference that anndata follows; what it leads to need not have a name.
            kept = item.attrs.get("categories")
            pending += [file[kept]] if isinstance(kept, h5py.Reference) and kept else []
    if is_outside:
        raise DataError(
            f"{name!r} reads from other files (an external link, external storage or a virtual dataset), which scforge "
            "does not open; if you trust it, read it with anndata and write it again."
        )
