"""How much memory is there, and whether cells fit into it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scforge.errors import DataError

if TYPE_CHECKING:
    from scforge.data.streams import CellStream

__all__ = ["available_memory", "check_memory", "check_stored", "lack_of_memory"]

_ENTRY = 8
"""Bytes of a count in memory: itself, its gene, and what is needed while they are gathered."""

_CELL = 200
"""Bytes of a cell: its name, its library size, and some columns of obs."""

_SMALL = 2**26
"""Bytes of a part that is read without a look at what is available."""

_UNLIMITED = 2**60
"""What control groups of the first version say where there is no limit is more than this."""


def check_memory(streams: Sequence[CellStream], memory: int | str | None = None) -> None:
    """Raise unless the cells fit into `memory`, see :func:`lack_of_memory`.

    Raises
    ------
    DataError
        If they do not.
    """
    if lack := lack_of_memory(streams, memory):
        raise DataError(
            f"{lack}; read them from disk: run scforge convert SOURCE -o store.zarr once and open store.zarr, or pass "
            'cache="store.zarr", which does both.'
        )


def lack_of_memory(streams: Sequence[CellStream], memory: int | str | None = None) -> str | None:
    """Say how far cells exceed `memory`, e.g. ``"16GB"``, or half of what is available; None if they fit."""
    from scforge.data.convert_plan import parse_bytes

    there = available_memory() if memory is None else parse_bytes("memory", memory)
    if there is None:
        return None
    most = there // 2 if memory is None else there
    n_cells, n_entries = sum(stream.n_cells for stream in streams), sum(stream.n_entries for stream in streams)
    needed = n_entries * _ENTRY + n_cells * _CELL
    if needed <= most:
        return None
    half = " available, of which half may be used" if memory is None else " allowed by memory="
    return (
        f"{n_cells:,} cells with {n_entries:,} counts need about {_size(needed)} of memory, and there are "
        f"{_size(there)}{half}"
    )


def check_stored(stored: Any, what: str, *, whole: bool = True) -> None:
    """Raise unless a part of an h5ad file or a zarr folder fits into memory, or each piece of it that is unpacked.

    Raises
    ------
    DataError
        If it does not.
    """
    there, needed = available_memory(), _stored_bytes(stored, whole)
    if there is not None and needed > max(there, _SMALL):
        raise DataError(
            f"{what} would take {_size(needed)} of memory, and {_size(there)} are available; write the file again if "
            "it is damaged, or use a machine with more memory."
        )


def _stored_bytes(stored: Any, whole: bool) -> int:
    """Return the size of an array in memory (or of a piece of it), or of all arrays in a group."""
    if not hasattr(stored, "dtype"):
        return sum(_stored_bytes(stored[name], whole) for name in stored)
    shapes = ((stored.shape or ()) if whole else (), stored.chunks or ())
    return max(map(math.prod, shapes)) * stored.dtype.itemsize


def available_memory() -> int | None:
    """Return how many bytes this process may still take, at most; None where the system does not tell."""
    return min(_limits(), default=None)


def _limits() -> Iterator[int]:
    """Yield what the machine has, and what the control groups of a container or a job leave of it."""
    meminfo = _numbers(Path("/proc/meminfo"))
    if "MemAvailable:" in meminfo:
        yield meminfo["MemAvailable:"] * 1024
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _control_groups(Path("/sys/fs/cgroup"), _text(Path("/proc/self/cgroup"))):
        for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, taken = _text(folder / most).strip(), _text(folder / used).strip()
            if limit.isdigit() and taken.isdigit() and int(limit) < _UNLIMITED:
                # What the page cache holds of files is given back when it is needed.
                stat = _numbers(folder / "memory.stat")
                files = stat.get("inactive_file", 0) + stat.get("active_file", 0)
                yield max(0, int(limit) - int(taken) + files)


def _control_groups(root: Path, described: str) -> Iterator[Path]:
    """Yield the folders of the control groups of this process, inner ones first; inside a container `root` is one."""
    for line in described.splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        place = base / group.strip("/")
        yield place
        yield from (parent for parent in place.parents if parent.is_relative_to(base))


def _numbers(path: Path) -> dict[str, int]:
    """Return the lines of a file of the system as numbers by name."""
    words = [line.split() for line in _text(path).splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such file on this system
        return ""


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 10**8 else f"{n_bytes / 1e6:.1f} MB"
