"""The version of the installed package, which comes from the git tag (CONTRIBUTING.md, Release).

It is looked up when someone asks, because reading the metadata of packages takes longer than importing scforge.
"""

from __future__ import annotations

__version__: str


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("scforge")
    except PackageNotFoundError:  # a source tree on the path that nobody installed
        found = "0+unknown"
    globals()[name] = found
    return found
