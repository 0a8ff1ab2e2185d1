"""What a conversion has done so far, so that it can go on after it was interrupted.

The folder of a conversion holds ``journal.json``, ``lock``, a temporary file for each dataset-to-be (``cells_0``, ...),
and ``store``, which becomes the store. The journal is written after each step and says how long each temporary file
was then: what a process that was killed has written behind that is cut off.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from scforge._io import atomic_write_text
from scforge.data.store_files import DATASET
from scforge.errors import DataError, OptionError, first_line

__all__ = ["Journal", "Staging", "locked"]

_FORMAT = 1
_AGAIN = "pass overwrite=True (--overwrite) to start again, or remove {!r}"


@dataclass
class Journal:
    """How far a conversion is.

    Attributes
    ----------
    plan
        What is converted and how; a conversion goes on with the same only.
    source, row
        The first cell that is not in the temporary files.
    sizes, entries
        Size of each temporary file, bytes, and the number of its entries.
    wide
        Whether a count needs 32 bits.
    kept, totals
        Of each source the sum of all counts in genes of the vocabulary, and of all genes.
    n_empty
        Number of cells that express no gene of the vocabulary.
    datasets
        Of each dataset that is written: ``n_cells``, ``n_nonzeros``, ``hash``.
    scattered, finished
        Whether all cells are in the temporary files; whether the store is in its place.
    """

    plan: dict[str, Any]
    sizes: list[int]
    entries: list[int]
    kept: list[float]
    totals: list[float]
    source: int = 0
    row: int = 0
    wide: bool = False
    n_empty: int = 0
    datasets: list[dict[str, Any]] = field(default_factory=list)
    scattered: bool = False
    finished: bool = False

    @classmethod
    def begin(cls, plan: dict[str, Any], *, n_buckets: int, n_sources: int) -> Journal:
        """Return the journal of a conversion that has done nothing yet."""
        return cls(plan, [0] * n_buckets, [0] * n_buckets, [0.0] * n_sources, [0.0] * n_sources)


class Staging:
    """The folder of a conversion.

    Parameters
    ----------
    folder
        Its path.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self._journal = folder / "journal.json"

    def bucket(self, number: int) -> Path:
        """Return the temporary file with the cells of a dataset-to-be."""
        return self.folder / f"cells_{number}"

    def load(self) -> Journal | None:
        """Return the journal, or None if nothing was done yet.

        Raises
        ------
        DataError
            If it is damaged or of another version.
        """
        try:
            content = json.loads(self._journal.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataError(
                f"the journal {str(self._journal)!r} cannot be read ({first_line(error)}); {self._again()}."
            ) from error
        known = {one.name for one in fields(Journal)}
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT or set(content) != known:
            raise DataError(f"the journal {str(self._journal)!r} is of another scforge; {self._again()}.")
        return Journal(**content)

    def save(self, journal: Journal) -> None:
        """Write the journal, atomically."""
        atomic_write_text(self._journal, json.dumps({"format": _FORMAT, **asdict(journal)}))

    def resume(self, plan: dict[str, Any]) -> Journal | None:
        """Return the journal of an interrupted conversion after cutting back its files; None if nothing is to continue.

        Raises
        ------
        OptionError
            If the conversion was begun with other options, or of other sources.
        DataError
            If a source has changed, or a temporary file is too short.
        """
        journal = self.load()
        if journal is None or self.is_over(journal):
            self.clear()
            return None
        self._check_plan(journal.plan, plan)
        self.cut_back(journal)
        return journal

    def is_over(self, journal: Journal) -> bool:
        """Whether a conversion cannot go on, because a dataset that it has written is no longer here.

        So it is when the store has got its place, also if the process was killed before the journal said so.
        """
        folders = (self.store / DATASET.format(number) for number in range(len(journal.datasets)))
        return journal.finished or not all(folder.exists() for folder in folders)

    def cut_back(self, journal: Journal) -> None:
        """Cut off what the journal does not know of.

        Raises
        ------
        DataError
            If a temporary file is shorter than the journal says.
        """
        for path in self.folder.glob(".journal.*"):
            path.unlink()  # of a process that was killed while it wrote its journal
        for number, size in enumerate(journal.sizes):
            path = self.bucket(number)
            actual = path.stat().st_size if path.exists() else 0
            if size > actual:
                raise DataError(f"{str(path)!r} has lost {size - actual} bytes; {self._again()}.")
            if size < actual:
                os.truncate(path, size)

    def clear(self) -> None:
        """Remove everything but the lock."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def remove_if_empty(self) -> None:
        """Remove the folder, whose lock is held, unless there are cells in it."""
        if self.store.exists() or any(path.stat().st_size for path in self.folder.glob("cells_*")):
            return
        self.clear()
        (self.folder / "lock").unlink()
        with contextlib.suppress(OSError):  # from here on it may be the folder of another process
            self.folder.rmdir()

    def _again(self) -> str:
        return _AGAIN.format(str(self.folder))

    def _check_plan(self, begun: dict[str, Any], plan: dict[str, Any]) -> None:
        if begun == plan:
            return
        old, new = begun.get("sources", []), plan["sources"]
        if [one["name"] for one in old] != [one["name"] for one in new]:
            raise OptionError(
                f"an unfinished conversion of other sources is in {str(self.folder)!r}; "
                f"name those to go on with it ({', '.join(repr(one['name']) for one in old)}), or {self._again()}."
            )
        for one, other in zip(old, new, strict=True):
            if one != other:
                raise DataError(
                    f"{other['name']!r} has changed since the unfinished conversion in {str(self.folder)!r} read it; "
                    f"{self._again()}."
                )
        name = next(key for key in {**begun, **plan} if begun.get(key) != plan.get(key))
        raise OptionError(
            f"an unfinished conversion in {str(self.folder)!r} was begun with {name}={begun.get(name)!r}, not "
            f"{plan.get(name)!r}; give the same to go on with it, or {self._again()}."
        )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder, and hold its lock, which the system takes back if the process dies.

    Raises
    ------
    OptionError
        If another conversion is at work in it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # the other process has just finished and removed the folder
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise OptionError(
                f"another conversion is writing to {str(folder)!r}; wait until it is done, or choose another name."
            ) from error
        if _is_still_there(handle, folder / "lock"):
            break
        os.close(handle)
    try:
        yield
    finally:
        os.close(handle)


def _is_still_there(handle: int, path: Path) -> bool:
    """Whether an open file still has its name: a process that finishes removes the lock that it holds."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
