from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data.cells import CellSource
from scforge.errors import ModelFileError
from scforge.finetuning.held_out import CellFingerprints, HeldOutRegistry
from scforge.finetuning.splits import Split

N, G = 30, 12
NAMES = [f"cell{i}" for i in range(N)]


def cells(names: list[str] | None = None, measured: np.ndarray | None = None) -> CellSource:
    counts = np.random.default_rng(0).poisson(3.0, (N, G)).astype(np.float32)
    if measured is not None:
        counts[:, ~measured] = 0
    obs = pd.DataFrame(index=NAMES if names is None else names)
    return CellSource(sparse.csr_matrix(counts), counts.sum(axis=1).astype(float), measured=measured, obs=obs)


def without(*genes: int) -> np.ndarray:
    return ~np.isin(np.arange(G), genes)


ROWS = np.arange(10)
NUMBERED = [str(i) for i in range(N)]
OTHERS = [f"other{i}" for i in range(N)]


@pytest.mark.parametrize(
    ("known", "given", "found", "unclear"),
    [
        (cells(), cells(OTHERS), True, False),
        (cells(), cells(measured=without(3)), True, False),
        (cells(measured=without(3)), cells(measured=without(4)), True, False),
        (cells(), cells(OTHERS, without(3)), False, False),
        (cells(), cells(NUMBERED, without(3)), False, True),
        (cells(NUMBERED), cells(measured=without(3)), False, True),
        (cells(), replace(cells(NUMBERED, without(3)), measured=None, overlap=0.9), False, True),
    ],
)
def test_counts_tell_where_the_same_genes_are_measured_and_names_elsewhere(
    known: CellSource, given: CellSource, found: bool, unclear: bool
) -> None:
    learned, marks = CellFingerprints.of(known).take(ROWS), CellFingerprints.of(given)
    np.testing.assert_array_equal(marks.among(learned), found & (np.arange(N) < 10))
    np.testing.assert_array_equal(marks.undecided(learned), np.full(N, unclear))
    # Datasets share barcodes; where all genes are measured in both, counts alone decide.
    learned, shifted = CellFingerprints.of(cells()).take(ROWS), CellFingerprints.of(cells([*NAMES[10:], *NAMES[:10]]))
    np.testing.assert_array_equal(shifted.among(learned), np.arange(N) < 10)


def test_a_union_has_each_cell_once() -> None:
    marks = CellFingerprints.of(cells())
    both = marks.take(np.arange(12)).union(marks.take(np.arange(8, 20)))
    assert len(both) == 20
    np.testing.assert_array_equal(marks.among(both), np.arange(N) < 20)
    assert not marks.among(CellFingerprints.none()).any()
    assert not marks.undecided(CellFingerprints.none()).any()


@pytest.fixture
def seen() -> HeldOutRegistry:
    marks = CellFingerprints.of(cells(measured=without(3)))
    split = Split(train=np.arange(20), validation=np.arange(20, 25), test=np.arange(25, 30))
    return HeldOutRegistry(split, marks, CellFingerprints.of(cells()).take(ROWS))


def test_a_folder_keeps_all_of_it(seen: HeldOutRegistry, tmp_path: Path) -> None:
    seen.save(tmp_path)
    again = HeldOutRegistry.load(tmp_path, seen.digest)
    assert again is not None
    for one, other in ((again.marks, seen.marks), (again.learned, seen.learned), (again.trained, seen.trained)):
        np.testing.assert_array_equal(one.table, other.table)
    path = tmp_path / "split.safetensors"
    content = bytearray(path.read_bytes())
    content[content.find(seen.learned.table.tobytes())] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ModelFileError):
        HeldOutRegistry.load(tmp_path, seen.digest)
