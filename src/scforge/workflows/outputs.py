"""Files and folders that a command writes, checked before slow imports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scforge._io import check_folder, check_writable
from scforge.errors import OptionError

_TABLE = ".csv"


def check_ending(output: str | os.PathLike[str], endings: Sequence[str]) -> None:
    """Raise an OptionError if the name of an output has none of the file extensions."""
    if Path(output).suffix not in endings:
        raise OptionError(f"output={str(output)!r} must end with {' or '.join(endings)}.")


def output_file(output: Any, endings: list[str], *, overwrite: bool, inputs: list[Any]) -> Path:
    """Return the path of a file to write. Raises an :class:`~scforge.errors.OptionError` if it is not writable."""
    path, prefix = Path(output), f"output={str(output)!r}"
    check_ending(output, endings)
    if any(path.resolve() == Path(one).resolve() for one in inputs):
        raise OptionError(f"{prefix} is the input file; choose another name.")
    if path.is_dir() or (path.exists() and not overwrite):
        raise OptionError(f"{prefix} exists; choose another name, or pass overwrite=True (--overwrite) to replace it.")
    check_writable("output", path)
    return path


def check_scores(path: Path, *, overwrite: bool, inputs: list[Any]) -> None:
    """Raise an error if scores cannot be written: a table into a ``.csv`` file, or a report into a folder."""
    if path.suffix == _TABLE:
        output_file(path, [_TABLE], overwrite=overwrite, inputs=inputs)
        return
    if path.suffix and not path.is_dir():
        raise OptionError(f"output={str(path)!r} must be a .csv file or a folder.")
    check_folder("output", path)
    check_writable("output", path)
    if (path / "report.json").exists() and not overwrite:
        raise OptionError(
            f"output={str(path)!r} already contains a report; choose another folder, or pass overwrite=True "
            "(--overwrite) to replace the report."
        )
