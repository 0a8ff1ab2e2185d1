"""Which cells a model has seen, known again by their counts, whatever file or order they come in.

Shapes: N cells of the fine-tuning, M cells of those before.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from scforge._io import check_inside
from scforge.errors import ModelFileError
from scforge.finetuning.marks import CellMarks, fingerprints
from scforge.finetuning.splits import PARTS, Split

__all__ = ["SeenCells", "fingerprints"]

_FILE = "split.safetensors"
_DIGEST = "sha256"
_MARKS = ("names", "panel", "learned")


@dataclass(frozen=True)
class SeenCells:
    """The cells of a fine-tuning, and what each was for.

    Attributes
    ----------
    rows
        Rows of the parts in the cells of the fine-tuning.
    marks
        What all these cells are known by, N of them.
    learned
        What cells are known by whose labels were learned besides: by fine-tunings before this one, or from another
        data module; M of them.
    """

    rows: Split
    marks: CellMarks
    learned: CellMarks = field(default_factory=CellMarks.none)

    @property
    def numbers(self) -> np.ndarray:
        """Fingerprints of the cells of the fine-tuning, int64, shape (N,)."""
        return self.marks.numbers

    @property
    def trained(self) -> CellMarks:
        """Marks of the cells that the fine-tuning trained on, or that chose its best epoch."""
        return self.marks.take(np.concatenate([self.rows.train, self.rows.validation]))

    def with_learned(self, marks: CellMarks) -> SeenCells:
        """Return the same, with further cells whose labels were learned."""
        return replace(self, learned=self.learned.union(marks))

    def split_of(self, numbers: np.ndarray) -> Split | None:
        """Return the split of cells with these fingerprints, if they are those of the fine-tuning, in any order.

        Further cells take no part. None if a cell that was trained on is missing.
        """
        if np.array_equal(numbers, self.numbers):
            return self.rows
        parts: dict[str, np.ndarray] = {}
        taken = np.zeros(len(numbers), dtype=bool)
        for part in PARTS:  # of cells that are alike, one that was trained on decides
            wanted = self.numbers[getattr(self.rows, part)]
            if part == "train" and not np.isin(wanted, numbers).all():
                return None
            parts[part] = np.flatnonzero(np.isin(numbers, wanted) & ~taken)
            taken[parts[part]] = True
        return Split(**parts)

    def learned_from(self, numbers: np.ndarray) -> np.ndarray:
        """Return which cells were trained on, or chose the best epoch, bool."""
        rows = np.concatenate([self.rows.train, self.rows.validation])
        return np.isin(numbers, self.numbers[rows])

    def tested(self, numbers: np.ndarray) -> np.ndarray:
        """Return which cells were held out for the test, bool."""
        return np.isin(numbers, self.numbers[self.rows.test]) & ~self.learned_from(numbers)

    @property
    def digest(self) -> str:
        """Checksum of the split and its cells."""
        total = hashlib.sha256(np.ascontiguousarray(self.numbers).data)
        for part in PARTS:
            total.update(np.ascontiguousarray(getattr(self.rows, part), dtype=np.int64).data)
            total.update(b"|")
        return total.hexdigest()

    def save(self, folder: Path) -> None:
        """Write them into a model folder."""
        from safetensors.numpy import save_file

        tensors = {part: np.asarray(getattr(self.rows, part), dtype=np.int64) for part in PARTS}
        more = {"names": self.marks.names, "panel": self.marks.panels[:1], "learned": self.learned.table}
        metadata = {_DIGEST: _digest_of(more)}
        save_file({**tensors, "cells": self.numbers, **more}, folder / _FILE, metadata=metadata)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], digest: str | None) -> SeenCells | None:
        """Read what :meth:`save` wrote into a folder, None if there is nothing.

        A folder of scforge before names and earlier fine-tunings were kept has neither.

        Raises
        ------
        ModelFileError
            If the file is not the one that was saved.
        """
        from safetensors import SafetensorError, safe_open

        path = Path(folder) / _FILE
        if digest is None:
            return None
        check_inside(path.parent, _FILE)
        try:
            with safe_open(path, "numpy") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- no mapping
                metadata = file.metadata() or {}
            rows, numbers = Split(**{part: tensors[part] for part in PARTS}), tensors["cells"]
            if _DIGEST not in metadata:
                unknown = np.zeros_like(numbers)
                found, intact = cls(rows, CellMarks(numbers, unknown, unknown)), True
            else:
                more = {name: tensors[name] for name in _MARKS}
                panels = np.repeat(more["panel"], len(numbers))
                found = cls(rows, CellMarks(numbers, more["names"], panels), CellMarks(*more["learned"]))
                intact = metadata[_DIGEST] == _digest_of(more)
        except (OSError, KeyError, TypeError, SafetensorError) as error:
            raise ModelFileError(f"{str(path)!r} cannot be read: {error}; copy the model again.") from error
        if not intact or found.digest != digest:
            raise ModelFileError(f"{str(path)!r} is corrupted: its checksum is another one; copy the model again.")
        return found


def _digest_of(tensors: dict[str, np.ndarray]) -> str:
    total = hashlib.sha256()
    for name in _MARKS:
        total.update(np.ascontiguousarray(tensors[name]).data)
        total.update(b"|")
    return total.hexdigest()
