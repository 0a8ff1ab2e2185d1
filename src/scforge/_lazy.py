"""Lazy public names (PEP 562), which are imported only when they are used."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_PATIENCE_S = 2.0
"""Seconds after which an import is announced."""

_LARGE = {
    **{name: name for name in ("pandas", "numba", "anndata")},
    **{"torch": "PyTorch", "lightning": "Lightning", "scvi": "scvi-tools"},
}
"""A mapping from packages that take long to import to their names."""

_announces = threading.Lock()
"""Held while an import is timed, so that the imports within it are not announced as well, or while none is to be."""


def process_rank() -> int:
    """Return the rank that a launcher has given to this process, read as in Lightning; 0 without a launcher."""
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), 0)


@contextlib.contextmanager
def silent_loading() -> Iterator[None]:
    """Announce no imports."""
    with _announces:
        yield


@contextlib.contextmanager
def announced_loading() -> Iterator[None]:
    """Name the packages that are loading if it takes two seconds, in notebooks and terminals."""
    import multiprocessing

    watched = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    is_first = multiprocessing.parent_process() is None and not process_rank()
    if not (watched and is_first and _announces.acquire(blocking=False)):
        yield
        return
    before = set(sys.modules)

    def announce() -> None:
        loading = [label for name, label in _LARGE.items() if name in sys.modules and name not in before]
        # Notebooks color stderr like errors.
        stream = sys.stdout if "ipykernel" in sys.modules else sys.stderr
        print(f"scforge: loading {', '.join(loading) or 'packages'} ...", file=stream, flush=True)

    timer = threading.Timer(_PATIENCE_S, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _announces.release()


def lazy_names(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package whose public names live in other modules.

    Parameters
    ----------
    package
        ``__name__`` of the package.
    names
        A mapping from public name to the module that defines it. If this module is ``package.name``, the name refers to
        the module itself.
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with announced_loading():
            module = importlib.import_module(names[name])
        value = module if names[name] == f"{package}.{name}" else getattr(module, name)
        # Python sets submodules on their package by itself; everything else is remembered here.
        vars(importlib.import_module(package))[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *names})

    return __getattr__, __dir__
