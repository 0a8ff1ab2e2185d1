"""Fingerprints and splits that identify the cells whose labels a model was trained on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Buffer, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from scforge.data.cells import Cells
from scforge.errors import ModelFileError
from scforge.finetuning.splits import PARTS, Split

_PIECE = 1 << 14
_ODD = tuple(np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_NO_NAME = 0
_ALL_GENES, _UNKNOWN_GENES = 0, -1
_SAME = 0.5
"""Fraction of known cells from which equal names mean equal cells, if other genes were measured."""

_FILE = "split.safetensors"

_DIGEST = "sha256"


def fingerprints(cells: Cells) -> np.ndarray:
    """Return a number for each cell that depends only on its counts over the genes of the model, int64, shape (N,).

    Each gene with its count is mixed as in SplitMix64 (Steele et al. 2014), and the results are summed.
    """
    numbers = np.zeros(len(cells), dtype=np.uint64)
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
            numbers[start : start + len(block)] = ends[block.indptr[1:]] - ends[block.indptr[:-1]]
    return numbers.view(np.int64)


@dataclass(frozen=True)
class CellFingerprints:
    """Fingerprints of cells, one number per cell.

    Attributes
    ----------
    numbers
        Fingerprints, int64, shape (N,); see :func:`fingerprints`. Fingerprints are comparable only if the same genes
        were measured.
    names
        Hashes of the cell names, int64, shape (N,); 0 for cells without a name, or with only a number as name.
    panels
        Hashes of the set of model genes that were measured, int64, shape (N,); 0 for all genes, -1 if unknown.
    """

    numbers: np.ndarray
    names: np.ndarray
    panels: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def of(cls, cells: Cells) -> CellFingerprints:
        """Return the fingerprints of cells over the genes of the model."""
        n_cells, obs, measured = len(cells), getattr(cells, "obs", None), cells.measured
        names = np.full(n_cells, _NO_NAME, dtype=np.int64)
        if obs is not None and obs.index.dtype.kind not in "iu":
            texts = (str(name) for name in obs.index)
            hashes = (_NO_NAME if text.isdecimal() else _hash(text.encode()) for text in texts)
            names = np.fromiter(hashes, dtype=np.int64, count=n_cells)
        if measured is None:
            panel = _ALL_GENES if cells.overlap == 1.0 else _UNKNOWN_GENES
        else:
            panel = _ALL_GENES if measured.all() else _hash(np.packbits(measured).tobytes())
        return cls(fingerprints(cells), names, np.full(n_cells, panel, dtype=np.int64))

    @classmethod
    def none(cls) -> CellFingerprints:
        """Return an empty set of fingerprints."""
        return cls(*np.zeros((3, 0), dtype=np.int64))

    def take(self, rows: np.ndarray) -> CellFingerprints:
        """Return the fingerprints of the cells at `rows`."""
        return CellFingerprints(self.numbers[rows], self.names[rows], self.panels[rows])

    def union(self, others: CellFingerprints) -> CellFingerprints:
        """Return the union of both sets."""
        if not len(others):
            return self
        both = np.concatenate([self.table, others.table], axis=1)
        return CellFingerprints(*np.ascontiguousarray(np.unique(both, axis=1)))

    def among(self, others: CellFingerprints) -> np.ndarray:
        """Return which of these cells are among `others`, by equal counts or equal names, bool, shape (N,).

        Names are used only if different genes were measured, because the counts of the same cell then differ.
        """
        is_among = np.isin(self.numbers, others.numbers)
        for panel in np.unique(self.panels):
            mine, names = self.panels == panel, others._names_elsewhere(panel)
            is_among[mine] |= np.isin(self.names[mine], names[names != _NO_NAME])
        return is_among

    def undecided(self, others: CellFingerprints) -> np.ndarray:
        """Return which cells may be among `others` although counts and names do not decide this, bool, shape (N,)."""
        is_undecided = np.zeros(len(self), dtype=bool)
        for panel in np.unique(self.panels):
            mine, names = self.panels == panel, others._names_elsewhere(panel)
            is_undecided[mine] = (self.names[mine] == _NO_NAME) & bool(len(names)) | bool((names == _NO_NAME).any())
        return is_undecided & ~self.among(others)

    def _names_elsewhere(self, panel: int) -> np.ndarray:
        """Return the names of cells whose fingerprints are not comparable with the fingerprints of a panel."""
        return self.names if panel == _UNKNOWN_GENES else self.names[self.panels != panel]

    @property
    def table(self) -> np.ndarray:
        """Numbers, names and panels as one array, int64, shape (3, N)."""
        return np.stack([self.numbers, self.names, self.panels])


def _hash(content: bytes) -> int:
    """Return a positive 64-bit hash."""
    return (int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1) or 1


@dataclass(frozen=True)
class HeldOutRegistry:
    """The cells used for fine-tuning, with their assignment to the parts of the split.

    Attributes
    ----------
    rows
        Rows of each part of the split among the cells used for fine-tuning.
    marks
        Fingerprints of all N cells.
    learned
        Fingerprints of M additional cells whose labels were learned, by earlier fine-tuning or from another data
        module.
    """

    rows: Split
    marks: CellFingerprints
    learned: CellFingerprints = field(default_factory=CellFingerprints.none)

    @property
    def numbers(self) -> np.ndarray:
        """Fingerprints of the cells used for fine-tuning, int64, shape (N,)."""
        return self.marks.numbers

    @property
    def trained(self) -> CellFingerprints:
        """Fingerprints of the cells that were used for training or for choosing the best epoch."""
        return self.marks.take(np.concatenate([self.rows.train, self.rows.validation]))

    def parts_of(self, marks: CellFingerprints) -> np.ndarray:
        """Return the part of the split that each cell belongs to, as text, shape (N,).

        Cells that were not used for fine-tuning are ``"new"``; cells of the fine-tuning data without a part, e.g.
        without a label, are ``"unused"``.
        """
        if marks.among(self.marks).mean() < _SAME:
            # Cells of two studies can have the same barcode.
            marks = replace(marks, names=np.full(len(marks), _NO_NAME, dtype=np.int64))
        parts = np.full(len(marks), "new", dtype=object)
        parts[marks.among(self.marks)] = "unused"
        for part in reversed(PARTS):  # of cells that are alike, one that was trained on decides
            parts[marks.among(self.marks.take(getattr(self.rows, part)))] = part
        parts[marks.among(self.learned)] = PARTS[0]
        return parts

    def split_of(self, numbers: np.ndarray) -> Split | None:
        """Return the split of cells with these fingerprints, if they are the cells used for fine-tuning, in any order.

        Other cells are left out. Returns None if a training cell is missing.
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

    def tested(self, numbers: np.ndarray) -> np.ndarray:
        """Return which cells were held out for testing, bool."""
        return np.isin(numbers, self.numbers[self.rows.test]) & ~np.isin(numbers, self.trained.numbers)

    @property
    def digest(self) -> str:
        """Checksum of the split and its cells."""
        parts = [np.asarray(getattr(self.rows, part), dtype=np.int64) for part in PARTS]
        return _sha256(parts, start=np.ascontiguousarray(self.numbers).data)

    def save(self, folder: Path) -> None:
        """Write the registry into a model folder."""
        from safetensors.numpy import save_file

        tensors = {part: np.asarray(getattr(self.rows, part), dtype=np.int64) for part in PARTS}
        more = {"names": self.marks.names, "panel": self.marks.panels[:1], "learned": self.learned.table}
        save_file(
            {**tensors, "cells": self.numbers, **more}, folder / _FILE, metadata={_DIGEST: _sha256(more.values())}
        )

    @classmethod
    def load(cls, folder: str | os.PathLike[str], digest: str | None) -> HeldOutRegistry | None:
        """Read the file that :meth:`save` wrote into a folder, or return None if there is no such file.

        Raises
        ------
        ModelFileError
            If the file was changed after it was saved.
        """
        from safetensors import SafetensorError, safe_open

        path = Path(folder) / _FILE
        if digest is None:
            return None
        try:
            with safe_open(path, "numpy") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- no mapping
                metadata = file.metadata() or {}
            rows, numbers = Split(**{part: tensors[part] for part in PARTS}), tensors["cells"]
            names, panel, learned = (tensors[name] for name in ("names", "panel", "learned"))
            marks = CellFingerprints(numbers, names, np.repeat(panel, len(numbers)))
            registry = cls(rows, marks, CellFingerprints(*learned))
            intact = metadata[_DIGEST] == _sha256([names, panel, learned])
        except (OSError, KeyError, TypeError, SafetensorError) as error:
            raise ModelFileError(f"{str(path)!r} cannot be read: {error}; copy the model again.") from error
        if not intact or registry.digest != digest:
            raise ModelFileError(f"{str(path)!r} is corrupted: its checksum does not match; copy the model again.")
        return registry


def _sha256(arrays: Iterable[np.ndarray], start: Buffer = b"") -> str:
    total = hashlib.sha256(start)
    for array in arrays:
        total.update(np.ascontiguousarray(array).data)
        total.update(b"|")
    return total.hexdigest()
