"""Sizes in bytes, and the memory that is available to this process."""

from __future__ import annotations

import os
import re
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
    raise OptionError("is not a valid size; pass e.g. '4GB', or a number of bytes.", argument=argument, value=value)


def available_memory() -> int | None:
    """Return the memory in bytes that is still available to this process, or None if it is unknown.

    It is limited by the machine, and by the control groups of a container or a job.
    """
    limits = []
    if match := re.search(r"^MemAvailable:\s+(\d+)", _text(Path("/proc/meminfo")), re.MULTILINE):
        limits.append(int(match[1]) * 1024)
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    folders: list[Path] = []
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
            own = root / group.strip("/")
            # Inside a container, the root itself is the group of the container.
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    for folder in folders:
        for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, taken = _text(folder / most).strip(), _text(folder / used).strip()
            if limit.isdigit() and taken.isdigit() and int(limit) < _UNLIMITED:
                # What the page cache holds of files is given back when it is needed.
                files = re.findall(r"^(?:in)?active_file (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
                limits.append(max(0, int(limit) - int(taken) + sum(map(int, files))))
    return min(limits, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such file on this system
        return ""
