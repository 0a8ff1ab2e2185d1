"""The version of the installed package, which is derived from the git tag (see CONTRIBUTING.md, Release).

The version is looked up on request, because reading package metadata takes longer than importing scforge.
"""

from __future__ import annotations

__version__: str


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = version("scforge")
    except PackageNotFoundError:  # a source tree on the path that nobody installed
        number = "0+unknown"
    globals()[name] = number
    return number
