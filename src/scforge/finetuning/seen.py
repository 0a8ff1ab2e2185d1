"""Which cells a model has seen, known again by their counts, whatever file or order they come in.

Shapes: N cells, G genes of the model.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scforge.errors import ModelFileError
from scforge.finetuning.splits import PARTS, Split

if TYPE_CHECKING:
    from scforge.data.cells import Cells

__all__ = ["SeenCells", "fingerprints"]

_FILE = "split.safetensors"
_PIECE = 1 << 14
_ODD = tuple(np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def fingerprints(cells: Cells) -> np.ndarray:
    """Return a number for each cell that depends on its counts over the genes of the model alone, int64, shape (N,).

    Each gene with its count is mixed as in SplitMix64 (Steele et al. 2014), and the mixed numbers are added up.
    """
    found = np.zeros(len(cells), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for start in range(0, len(cells), _PIECE):
            block = cells.block(np.arange(start, min(start + _PIECE, len(cells))))
            mixed = (block.genes.astype(np.uint64) + np.uint64(1)) * _ODD[0]
            mixed ^= np.ascontiguousarray(block.counts, dtype=np.float32).view(np.uint32).astype(
                np.uint64
            ) << np.uint64(20)
            for shift, factor in ((30, _ODD[1]), (27, _ODD[2])):
                mixed = (mixed ^ (mixed >> np.uint64(shift))) * factor
            mixed ^= mixed >> np.uint64(31)
            ends = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(mixed, dtype=np.uint64)])
            found[start : start + len(block)] = ends[block.indptr[1:]] - ends[block.indptr[:-1]]
    return found.view(np.int64)


@dataclass(frozen=True)
class SeenCells:
    """The cells of a fine-tuning, and what each was for.

    Attributes
    ----------
    rows
        Rows of the parts in the cells of the fine-tuning.
    numbers
        Fingerprints of all these cells, int64, shape (N,); see :func:`fingerprints`.
    """

    rows: Split
    numbers: np.ndarray

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
        """Checksum of all of it."""
        total = hashlib.sha256(np.ascontiguousarray(self.numbers).data)
        for part in PARTS:
            total.update(np.ascontiguousarray(getattr(self.rows, part), dtype=np.int64).data)
            total.update(b"|")
        return total.hexdigest()

    def save(self, folder: Path) -> None:
        """Write them into a model folder."""
        from safetensors.numpy import save_file

        tensors = {part: np.asarray(getattr(self.rows, part), dtype=np.int64) for part in PARTS}
        save_file({**tensors, "cells": self.numbers}, folder / _FILE)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], digest: str | None) -> SeenCells | None:
        """Read what :meth:`save` wrote into a folder, None if there is nothing.

        Raises
        ------
        ModelFileError
            If the file is not the one that was saved.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = Path(folder) / _FILE
        if digest is None:
            return None
        try:
            tensors = load_file(path)
            found = cls(Split(**{part: tensors[part] for part in PARTS}), tensors["cells"])
        except (OSError, KeyError, SafetensorError) as error:
            raise ModelFileError(f"{str(path)!r} cannot be read: {error}; copy the model again.") from error
        if found.digest != digest:
            raise ModelFileError(f"{str(path)!r} is corrupted: its checksum is another one; copy the model again.")
        return found
