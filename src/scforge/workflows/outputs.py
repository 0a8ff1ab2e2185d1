"""Files and folders that a command writes, checked before slow imports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scforge._constants import REPORT_FILES
from scforge._io import check_files, check_output
from scforge.errors import OptionError

_TABLE = ".csv"


def check_ending(output: str | os.PathLike[str], endings: Sequence[str]) -> None:
    """Raise an OptionError if the name of an output has none of the file extensions."""
    if Path(output).suffix not in endings:
        raise OptionError(f"must end with {' or '.join(endings)}.", output=str(output))


def output_file(output: Any, endings: list[str], *, overwrite: bool, inputs: list[Any]) -> Path:
    """Return the path of a file to write, see :func:`scforge._io.check_output`."""
    check_ending(output, endings)
    return check_output("output", output, overwrite=overwrite, inputs=inputs)


def check_scores(path: Path, *, overwrite: bool, inputs: list[Any]) -> None:
    """Raise an error if scores cannot be written: a table into a ``.csv`` file, or a report into a folder."""
    if path.suffix == _TABLE:
        output_file(path, [_TABLE], overwrite=overwrite, inputs=inputs)
        return
    if path.suffix and not path.is_dir():
        raise OptionError("must be a .csv file or a folder.", output=str(path))
    check_files("output", path, REPORT_FILES, described_by="report.json", overwrite=overwrite)
