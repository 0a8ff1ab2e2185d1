"""Which files of a folder are shared: ours by name, and nothing else, so that neither pickles nor code travel."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from scforge._io import check_inside
from scforge.errors import listing

__all__ = [
    "ORIGIN_FILE",
    "SHARED_FILES",
    "check_shared",
    "described_kind",
    "description_of",
    "kind_of",
    "kind_of_folder",
]

Kind = Literal["model", "adapter"]

_NEEDED: dict[Kind, tuple[str, ...]] = {
    "model": ("config.json", "vocab.json", "model.safetensors"),
    "adapter": ("adapter.json", "adapter.safetensors"),
}
_BESIDE = ("README.md", "split.safetensors")
SHARED_FILES = (*_NEEDED["model"], *_NEEDED["adapter"], *_BESIDE)
"""All files that are ever sent or fetched; ``split.safetensors`` says which cells a fine-tuned model has seen."""
ORIGIN_FILE = "origin.json"
"""What a folder on this machine was copied from; never sent."""


def kind_of(names: Iterable[str]) -> Kind | None:
    """Return what files of these names are together, or None if a file is missing.

    Examples
    --------
    >>> kind_of(["adapter.json", "adapter.safetensors", "notes.txt"])
    'adapter'
    >>> kind_of(["config.json", "pytorch_model.bin"]) is None
    True
    """
    there = set(names)
    return next((kind for kind, needed in _NEEDED.items() if there.issuperset(needed)), None)


def kind_of_folder(folder: Path) -> Kind | None:
    """Return what a folder holds, or None."""
    return kind_of(path.name for path in folder.iterdir() if path.is_file())


def check_shared(folder: Path) -> None:
    """Raise :class:`~scforge.errors.ModelFileError` if a file to share is a link out of its folder, or a pipe."""
    for name in SHARED_FILES:
        check_inside(folder, name)


def description_of(folder: Path) -> Path | None:
    """Return the file that describes the model or the adapter in a folder, with checksums of the others, or None."""
    kind = kind_of_folder(folder)
    return None if kind is None else folder / _NEEDED[kind][0]


def described_kind() -> str:
    """Return which files make a model or an adapter, for a message."""
    return " or ".join(f"{kind} ({listing(needed)})" for kind, needed in _NEEDED.items())
