"""By what cells are known again: their counts, and where genes are missing, their names.

Shapes: N cells of one source, M others, G genes of the model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scforge.data.cells import Cells

__all__ = ["CellMarks", "fingerprints"]

_PIECE = 1 << 14
_ODD = tuple(np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_NO_NAME = 0
_ALL_GENES, _UNKNOWN_GENES = 0, -1


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
class CellMarks:
    """What cells are known by, a number each.

    Attributes
    ----------
    numbers
        Fingerprints, int64, shape (N,); see :func:`fingerprints`. They tell only where the same genes were measured.
    names
        Hashes of the names of the cells, int64, shape (N,); 0 for a cell without name, or one that is just numbered.
    panels
        Hashes of which genes of the model were measured, int64, shape (N,); 0 for all, -1 where it is not known.
    """

    numbers: np.ndarray
    names: np.ndarray
    panels: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def of(cls, cells: Cells) -> CellMarks:
        """Return the marks of cells over the genes of the model."""
        return cls(fingerprints(cells), _names(cells), np.full(len(cells), _panel(cells), dtype=np.int64))

    @classmethod
    def none(cls) -> CellMarks:
        """Return the marks of no cells."""
        return cls(*np.zeros((3, 0), dtype=np.int64))

    def take(self, rows: np.ndarray) -> CellMarks:
        """Return those of the cells at `rows`."""
        return CellMarks(self.numbers[rows], self.names[rows], self.panels[rows])

    def union(self, others: CellMarks) -> CellMarks:
        """Return those of all cells of both, each once."""
        if not len(others):
            return self
        both = np.concatenate([self.table, others.table], axis=1)
        return CellMarks(*np.ascontiguousarray(np.unique(both, axis=1)))

    def among(self, others: CellMarks) -> np.ndarray:
        """Return which of these cells are among others, bool, shape (N,): the same counts, or the same name.

        Names tell only where other genes were measured, as then the same cell has other counts.
        """
        found = np.isin(self.numbers, others.numbers)
        for panel in np.unique(self.panels):
            mine, names = self.panels == panel, others._names_elsewhere(panel)
            found[mine] |= np.isin(self.names[mine], names[names != _NO_NAME])
        return found

    def undecided(self, others: CellMarks) -> np.ndarray:
        """Return which of these cells may be among others though neither counts nor names tell, bool, shape (N,)."""
        found = np.zeros(len(self), dtype=bool)
        for panel in np.unique(self.panels):
            mine, names = self.panels == panel, others._names_elsewhere(panel)
            found[mine] = (self.names[mine] == _NO_NAME) & bool(len(names)) | bool((names == _NO_NAME).any())
        return found & ~self.among(others)

    def _names_elsewhere(self, panel: int) -> np.ndarray:
        """Return the names of cells whose fingerprints are not comparable with those of a panel."""
        return self.names if panel == _UNKNOWN_GENES else self.names[self.panels != panel]

    @property
    def table(self) -> np.ndarray:
        """All of it, int64, shape (3, N)."""
        return np.stack([self.numbers, self.names, self.panels])


def _hash(content: bytes) -> int:
    """Return 64 bits of a hash, above 0."""
    return (int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1) or 1


def _names(cells: Cells) -> np.ndarray:
    obs = getattr(cells, "obs", None)
    if obs is None or obs.index.dtype.kind in "iu":
        return np.full(len(cells), _NO_NAME, dtype=np.int64)
    names = (str(name) for name in obs.index)
    found = (_NO_NAME if name.isdecimal() else _hash(name.encode()) for name in names)
    return np.fromiter(found, dtype=np.int64, count=len(cells))


def _panel(cells: Cells) -> int:
    if cells.measured is None:
        return _ALL_GENES if cells.overlap == 1.0 else _UNKNOWN_GENES
    return _ALL_GENES if cells.measured.all() else _hash(np.packbits(cells.measured).tobytes())
