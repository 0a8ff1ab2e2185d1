import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from scforge.data import CellOrder
from scforge.data.store import StoreCells, inspect_store
from scforge.errors import DataError, MissingFileError


@pytest.fixture
def damaged(store: Path, tmp_path: Path) -> Path:
    """A copy of the store, to be damaged."""
    return Path(shutil.copytree(store, tmp_path / "copy.zarr"))


def read_all(path: Path) -> tuple:
    cells = StoreCells.open(path)
    block = cells.block(np.arange(len(cells)))
    obs = tuple(tuple(cells.column(key)) for key in cells.obs)
    parts = (block.indptr, block.genes, block.counts, block.totals, block.measured, cells.names())
    return (*(part.tobytes() for part in parts), obs, cells.vocab.hash)


PARTS = {
    "dataset_1/X/data/c/0": r"a cell of .*copy\.zarr' cannot be read",
    "dataset_1/X/indices/c/0": r"a cell of .*copy\.zarr' cannot be read",
    "dataset_1/X/indptr/c/0": "dataset_1 of .* (cannot be read|is corrupted)",
    "scforge/vocab/c/0": r"copy\.zarr",
    "zarr.json": r"copy\.zarr",
}


def damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 0x10
        file.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
@pytest.mark.parametrize(("part", "match"), PARTS.items(), ids=PARTS)
def test_damage_is_told(damaged, part, match, how):
    damage(damaged / part, how)
    if how == "missing" and part != "zarr.json":
        match = rf"copy\.zarr/{part}' is missing; copy the data again"
    with pytest.raises(DataError, match=match) as told:
        read_all(damaged)
    assert "copy.zarr" in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("how", ["cut", "missing"])
def test_missing_totals_are_told(damaged, how):
    damage(damaged / "dataset_1/obs/scforge_total/c/0", how)
    with pytest.raises(
        DataError, match=r"(scforge_total .*cannot be read.*; copy the store|scforge_total/c/0' is missing; copy)"
    ):
        read_all(damaged)


def test_only_who_reads_damaged_cells_is_told(damaged, store, assert_same):
    damage(damaged / "dataset_1" / "X/data/c/0", "flipped")
    cells, whole = StoreCells.open(damaged), StoreCells.open(store)
    rows = np.r_[0:234, 468:700]
    assert_same(cells.block(rows), whole.block(rows))
    order = CellOrder(np.arange(700), 50, chunk_size=1, shuffle=False, window_cells=50)
    stream = cells.stream(order.windows())
    for number in range(4):
        assert_same(next(stream), whole.block(np.arange(50 * number, 50 * number + 50)))
    number = 4
    with pytest.raises(DataError, match=r"a cell of .* cannot be read"):  # noqa: PT012 -- whoever is not damaged is read
        for block in stream:
            assert_same(block, whole.block(np.arange(50 * number, 50 * number + 50)))
            number += 1
    assert number < 10  # the flipped byte is in the middle of dataset_1, which has the cells 234 to 467


@pytest.mark.slow
def test_flips_anywhere_are_told_or_do_not_matter(damaged, store):
    """Of the files that are read, and of the metadata: the same cells, or an error that says so."""
    expected = read_all(store)
    generator = np.random.default_rng(0)
    files = ["zarr.json"] * 30
    files += [f"dataset_{generator.integers(3)}/{part[10:]}" for part in generator.permutation([*PARTS][:2] * 4)]
    told = 0
    for name in files:
        content = (store / name).read_bytes()
        changed = bytearray(content)
        changed[generator.integers(len(content))] ^= 1 << generator.integers(8)
        (damaged / name).write_bytes(changed)
        try:
            assert read_all(damaged) == expected
        except (DataError, MissingFileError):
            told += 1
        (damaged / name).write_bytes(content)
    assert told > len(files) / 2


def written_before(path: Path) -> Path:
    """Make a store as scforge 0.1.0 wrote it, without checksums of cells and metadata."""
    content = json.loads((path / "zarr.json").read_text())
    content["attributes"].pop("scforge_sha256", None)
    content["consolidated_metadata"]["metadata"].pop("scforge/checksums", None)
    (path / "zarr.json").write_text(json.dumps(content))
    shutil.rmtree(path / "scforge/checksums", ignore_errors=True)
    return path


def test_a_store_of_an_earlier_version(damaged, store):
    whole = inspect_store(damaged)
    assert whole.checksums
    assert "checksums                of each cell, each column and the metadata" in str(whole)
    found = inspect_store(written_before(damaged), verify=True)
    assert found.verified
    assert not found.checksums
    assert "only --verify finds all damage" in str(found)
    assert read_all(damaged) == read_all(store)
    # Its totals are compared with its counts.
    cells = StoreCells.open(damaged)
    cells._store.totals[3] += 1
    with pytest.raises(DataError, match="cell 3: its counts have changed since they were written"):
        cells.block(np.arange(10))


@pytest.mark.parametrize("written", ["now", "before"])
@pytest.mark.parametrize("opened", [False, True])
def test_a_store_that_vanishes(damaged, opened, written):
    if written == "before":
        written_before(damaged)
    cells = StoreCells.open(damaged)
    if opened:
        cells.block(np.arange(10))
    shutil.rmtree(damaged)
    with pytest.raises(DataError, match=r"copy\.zarr/dataset_\d/X/\w+/c/0' is missing; copy the data again"):
        cells.block(np.arange(700))


@pytest.mark.parametrize("written", ["now", "before"])
def test_a_chunk_that_vanishes(damaged, store, written):
    if written == "before":
        written_before(damaged)
    files = [file for file in damaged.rglob("c/*") if file.is_file() and "var" not in file.parts]
    files = [file for file in files if "scforge_source" not in file.parts]  # not read
    if written == "before":  # chunks of zeros of columns were left out
        files = [file for file in files if "obs" not in file.parts or file.parts[-3:-1] == ("values", "c")]
    assert len(files) > 8
    for file in files:
        content = file.read_bytes()
        file.unlink()
        # Of the vocabulary of an earlier version, half is read as zeros.
        with pytest.raises(DataError, match=rf"/{file.relative_to(damaged)}' is missing; copy|the vocabulary of the"):
            read_all(damaged)
        file.write_bytes(content)
    assert read_all(damaged) == read_all(store)


def test_parts_of_a_flipped_chunk(damaged, store):
    """A part of a chunk is unpacked without the checksum of the chunk."""
    expected, told = read_all(store), 0
    file = damaged / "dataset_1/X/data/c/0"
    content = file.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(40):
        changed = bytearray(content)
        changed[generator.integers(len(content) - 100)] ^= 1 << generator.integers(8)
        file.write_bytes(changed)
        cells = StoreCells.open(damaged)
        try:
            blocks = [cells.block(np.arange(start, start + 9)) for start in range(234, 468, 9)]
        except DataError:
            told += 1
        else:
            assert b"".join(block.counts.tobytes() for block in blocks) in expected[2]
    assert told > 30


def _without(name: str):
    def edit(info, metadata) -> None:
        for key in [key for key in metadata if key == name or key.startswith(f"{name}/")]:
            del metadata[key]

    return edit


def _set(*keys, value):
    def edit(info, metadata) -> None:
        *first, last = keys
        place = metadata if keys[0] in metadata else info
        for key in first:
            place = place[key]
        place[last] = value

    return edit


EDITS = {
    "no last dataset": (_without("dataset_2"), "counts of dataset_2 have shape .missing., expected"),
    "not listed": (lambda info, _: info["datasets"].pop(), r"counts of dataset_2 have shape \(.*\), expected no such"),
    "fewer cells": (
        _set("datasets", 1, "n_cells", value=200),
        r"counts of dataset_1 have shape \(234, 80\), expected \(200, 80\)",
    ),
    "entries": (_set("dataset_1/X/data", "shape", value=[9]), "dataset_1 of .*indptr"),
    "type": (_set("dataset_1/X/data", "data_type", value="uint8"), "a cell of .* cannot be read"),
    "vocabulary": (_set("vocab_hash", value="0"), "its vocabulary or the genes"),
    "overlap": (lambda info, _: info["sources"][0].update(overlap=0.5), "or the genes of its sources"),
    "format": (_set("format", value=3), "of a later scforge version; update scforge"),
    "more": (lambda info, _: info.update(something_new=1), None),
    "description": (lambda info, _: info.pop("chunk_size"), "'chunk_size' in its metadata is invalid"),
}


@pytest.mark.filterwarnings("ignore:Adding dataset with dtype")
@pytest.mark.parametrize(("edit", "match"), EDITS.values(), ids=EDITS)
def test_changed_metadata_are_told(damaged, store, edit, match):
    file = damaged / "zarr.json"
    content = json.loads(file.read_text())
    edit(content["attributes"]["scforge"], content["consolidated_metadata"]["metadata"])
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"copy\.zarr' is corrupted: its zarr\.json does not match its checksum"):
        read_all(damaged)
    # As in a store of an earlier version, or with a checksum of their own.
    content["attributes"].pop("scforge_sha256", None)
    file.write_text(json.dumps(content))
    if match is None:
        assert read_all(damaged) == read_all(store)
        return
    with pytest.raises(DataError, match=match) as told:
        read_all(damaged)
    assert "copy.zarr" in str(told.value)
