"""Sizes in bytes, and the memory that is available to this process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scforge.errors import OptionError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

_UNLIMITED = 2**60
"""Reported limit above which a version 1 control group is unlimited."""


def parse_bytes(argument: str, value: Any) -> int:
    """Return a size in bytes, given as a number or as e.g. ``"4GB"`` (powers of ten) or ``"4GiB"`` (powers of two).

    Examples
    --------
    >>> parse_bytes("memory", "1.5GB"), parse_bytes("memory", "512 MiB")
    (1500000000, 536870912)
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", value, flags=re.IGNORECASE)
        if match and match[2].lower() in _UNITS and float(match[1]) > 0:
            return int(float(match[1]) * _UNITS[match[2].lower()])
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise OptionError(f"{argument}={value!r} is not a valid size; pass e.g. '4GB', or a number of bytes.")


def available_memory() -> int | None:
    """Return the memory in bytes that is still available to this process, or None if it is unknown."""
    return min(_limits(), default=None)


def _limits() -> Iterator[int]:
    """Yield the memory available on the machine, and within the control groups of a container or a job."""
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
    """Yield the control group folders of this process, innermost first; inside a container, `root` is one of them."""
    for line in described.splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        place = base / group.strip("/")
        yield place
        yield from (parent for parent in place.parents if parent.is_relative_to(base))


def _numbers(path: Path) -> dict[str, int]:
    """Return a mapping from name to number for the lines of a system file."""
    words = [line.split() for line in _text(path).splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such file on this system
        return ""
