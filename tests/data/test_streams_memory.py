"""How much memory is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from scforge.data import stream_memory
from scforge.data.stream_memory import available_memory

MEMINFO = "MemTotal: 16000 kB\nMemAvailable: 9000 kB\nHugePages_Total: 0\n"
OUTER, INNER = "/sys/fs/cgroup", "/sys/fs/cgroup/user/job"
FREE = "max\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 9_216_000),
        # A job's own limit; what the page cache holds is given back.
        ({f"{INNER}/memory.max": "5000000", f"{INNER}/memory.current": "3000000"}, 2_000_000),
        (
            {
                f"{INNER}/memory.max": "5000000",
                f"{INNER}/memory.current": "3000000",
                f"{INNER}/memory.stat": "anon 5\ninactive_file 1000000\nactive_file 500000",
            },
            3_500_000,
        ),
        # The limit of a group above it, and none of its own; inside a container the root has the limit.
        ({f"{INNER}/memory.max": FREE, "/sys/fs/cgroup/user/memory.max": "100", **{}}, 9_216_000),
        ({f"{OUTER}/memory.max": "4000000", f"{OUTER}/memory.current": "1"}, 3_999_999),
        ({f"{OUTER}/memory.max": "4000000", f"{OUTER}/memory.current": "5000000"}, 0),
        # Groups of the first version, one without a limit.
        (
            {
                "/proc/self/cgroup": "4:memory:/job\n5:cpu:/other\n",
                f"{OUTER}/memory/job/memory.limit_in_bytes": "7000000",
                f"{OUTER}/memory/job/memory.usage_in_bytes": "1000000",
                f"{OUTER}/memory/memory.limit_in_bytes": "9223372036854771712",
                f"{OUTER}/memory/memory.usage_in_bytes": "1000000",
            },
            6_000_000,
        ),
    ],
)
def test_the_tightest_limit_counts(files, expected, monkeypatch):
    system = {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "0::/user/job\n", **files}
    monkeypatch.setattr(stream_memory, "_text", lambda path: system.get(Path(path).as_posix(), ""))
    assert available_memory() == expected


def test_a_system_without_these_files(monkeypatch):
    monkeypatch.setattr(stream_memory, "_text", lambda path: "")
    assert available_memory() > 10**8
    monkeypatch.delattr("os.sysconf")
    assert available_memory() is None


def test_this_machine():
    assert 10**7 < available_memory() < 10**14
